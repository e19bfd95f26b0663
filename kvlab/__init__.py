"""kvlab: study what KV-cache eviction and compression do to language models.

from kvlab import Budget, attach, load_model, make_policy

model, tokenizer = load_model("smollm2-135m")
with attach(model, policy=make_policy("h2o"), budget=Budget(ratio=0.2)) as session:
    cache = session.new_cache()
    out = model.generate(**tokenizer("Once", return_tensors="pt"), cache=cache, max_new_tokens=20)
    print(session.memory(cache))
"""

from kvlab.attach import Session, UnsupportedModel, attach
from kvlab.budget import Budget, BudgetError
from kvlab.cache import KVCache, Memory
from kvlab.models import load_model
from kvlab.policies import Policy, PolicyError, make_policy, policy_names, register
from kvlab.shapes import Step

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "KVCache",
    "Memory",
    "Policy",
    "PolicyError",
    "Session",
    "Step",
    "UnsupportedModel",
    "attach",
    "load_model",
    "make_policy",
    "policy_names",
    "register",
]
