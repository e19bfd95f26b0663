"""Eviction policies, one paper a file. Importing this package registers those that ship with kvlab."""

from kvlab.policies import adakv, full, h2o, knorm, pyramidkv, random, snapkv, streaming_llm, tova
from kvlab.policies.base import Policy, PolicyError, import_modules, make_policy, policy_class, policy_names, register

__all__ = [
    "Policy",
    "PolicyError",
    "adakv",
    "full",
    "h2o",
    "import_modules",
    "knorm",
    "make_policy",
    "policy_class",
    "policy_names",
    "pyramidkv",
    "random",
    "register",
    "snapkv",
    "streaming_llm",
    "tova",
]
