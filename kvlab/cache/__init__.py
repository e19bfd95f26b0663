"""The cache: slot store, layers that apply a policy, and the transformers `Cache` that holds them."""

from kvlab.cache.kv_cache import KVCache, Memory, RowMemory

__all__ = ["KVCache", "Memory", "RowMemory"]
