"""Eviction policies, one paper a file. Importing this package registers those that ship with kvlab."""

from kvlab.policies import (
    adakv,
    corm,
    fastgen,
    full,
    h2o,
    hashevict,
    hyde,
    knorm,
    pyramidkv,
    random,
    scissorhands,
    snapkv,
    streaming_llm,
    tova,
)
from kvlab.policies.base import Policy, PolicyError, import_modules, make_policy, policy_class, policy_names, register

__all__ = [
    "Policy",
    "PolicyError",
    "adakv",
    "corm",
    "fastgen",
    "full",
    "h2o",
    "hashevict",
    "hyde",
    "import_modules",
    "knorm",
    "make_policy",
    "policy_class",
    "policy_names",
    "pyramidkv",
    "random",
    "register",
    "scissorhands",
    "snapkv",
    "streaming_llm",
    "tova",
]
