"""kvlab: study what KV-cache eviction and compression do to language models.

from kvlab import Budget, attach, load_model, make_policy

model, tokenizer = load_model("smollm2-135m")
with attach(model, policy=make_policy("h2o"), budget=Budget(ratio=0.2)) as session:
    cache = session.new_cache()
    out = model.generate(**tokenizer("Once", return_tensors="pt"), cache=cache, max_new_tokens=20)
    print(session.memory(cache))

Names are loaded when they are first used, so that `kvlab --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.budget import Budget, BudgetError
    from kvlab.cache import KVCache, Memory
    from kvlab.codecs import Codec, CodecError, codec_names, make_codec, register_codec
    from kvlab.models import load_model
    from kvlab.policies import Policy, PolicyError, make_policy, policy_names, register
    from kvlab.session import Session, UnsupportedModel, attach
    from kvlab.shapes import Step
    from kvlab.sharing import Share, ShareError, make_share, register_share, share_names
    from kvlab.tables import load_results

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "Codec",
    "CodecError",
    "KVCache",
    "Memory",
    "Policy",
    "PolicyError",
    "Session",
    "Share",
    "ShareError",
    "Step",
    "UnsupportedModel",
    "attach",
    "codec_names",
    "load_model",
    "load_results",
    "make_codec",
    "make_policy",
    "make_share",
    "policy_names",
    "register",
    "register_codec",
    "register_share",
    "share_names",
]

_HOME = {
    "Budget": "budget",
    "BudgetError": "budget",
    "Codec": "codecs",
    "CodecError": "codecs",
    "KVCache": "cache",
    "Memory": "cache",
    "Policy": "policies",
    "PolicyError": "policies",
    "Session": "session",
    "Share": "sharing",
    "ShareError": "sharing",
    "Step": "shapes",
    "UnsupportedModel": "session",
    "attach": "session",
    "codec_names": "codecs",
    "load_model": "models",
    "load_results": "tables",
    "make_codec": "codecs",
    "make_policy": "policies",
    "make_share": "sharing",
    "policy_names": "policies",
    "register": "policies",
    "register_codec": "codecs",
    "register_share": "sharing",
    "share_names": "sharing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
    return getattr(import_module(f"kvlab.{_HOME[name]}"), name)
