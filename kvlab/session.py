"""`attach`: give a model a policy and a budget for the length of a `with` block, and caches to work with.

What is changed on the model, and undone on leaving, also through an exception, is in `seam.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from kvlab.budget import Budget, BudgetError
from kvlab.cache import KVCache, Memory
from kvlab.cache.plan import Plan
from kvlab.codecs import Codec, CodecError, chain
from kvlab.kernels.dispatch import choose
from kvlab.policies.base import Policy, PolicyError
from kvlab.seam import Seam
from kvlab.shapes import Outputs, Step
from kvlab.sharing import Share, ShareError, map_of
from kvlab.support import UnsupportedModel, check_model, no_rolling
from kvlab.vocab import Vocab

__all__ = ["Session", "UnsupportedModel", "attach"]


@dataclass(frozen=True)
class Session:
    """A policy and a budget at work on a model; made by `attach`. Caches of one session are independent of each other."""

    model: PreTrainedModel
    plan: Plan

    @property
    def policy(self) -> Policy:
        """The policy at work."""
        return self.plan.policy

    @property
    def budget(self) -> Budget:
        """What caches may hold."""
        return self.plan.budget

    def new_cache(
        self,
        *,
        max_new_tokens: int | None = None,
        sample_ids: Sequence[int | str] | None = None,
        known_len: int | Sequence[int] | None = None,
    ) -> KVCache:
        """An empty cache for one batch of prompts.

        max_new_tokens  tokens to come, for a budget of the total
        sample_ids      a name or number for each prompt; random draws depend on it, so that batching changes nothing
        known_len       length of the whole text (one or for each prompt), which a ratio is of: needed under
                        `cache.stepwise()`, and where a prompt comes in parts that are evicted one by one
        """
        return KVCache(self.plan, max_new_tokens=max_new_tokens, sample_ids=sample_ids, known_len=known_len)

    def memory(self, cache: KVCache) -> Memory:
        """What a cache weighs now."""
        return cache.memory()


@contextmanager
def attach(
    model: PreTrainedModel,
    policy: Policy,
    budget: Budget | None = None,
    codec: Codec | Sequence[Codec] | None = (),
    share: Share | Mapping[int, int] | None = None,
    tokenizer: Any = None,
    kernels: str = "auto",
    watch: Callable[[Step], None] | None = None,
    simulation: Callable[..., Outputs] | None = None,
) -> Iterator[Session]:
    """Let `model` work with caches that hold what `policy` keeps within `budget`.

    model      a transformers model whose attention goes through the attention interface
    policy     from `make_policy`; budget: None means no limit
    codec      from `make_codec`: how keys and values are held, or two in a row, channels first; none: as they come
    share      from `make_share`, or target -> source: layers that read an earlier layer's cache and hold none; chains allowed
    tokenizer  needed by policies that treat special tokens or punctuation apart; or a `Vocab` made of one
    watch      is shown each layer at a turn's end, before anything leaves: `step.looks()` gives the attention of all queries of
               the turn, some at a time
    simulation  attention of whole texts in place of the model's own (`kvlab.simulation`); nothing is evicted then
    kernels    back end of attention and eviction: cpu (compiled by numba), gpu (Triton), reference (plain torch), or auto

    Yields a Session: `cache = session.new_cache()`, then `model.generate(..., cache=cache)`. Calls without a kvlab cache
    behave as stock. Sessions may be nested and several caches may be alive at once.
    Raises UnsupportedModel, PolicyError, CodecError, ShareError or BudgetError, each with what to change.
    """
    coding = chain((codec,) if isinstance(codec, Codec | str) else tuple(codec or ()))
    if budget is not None and not isinstance(budget, Budget):
        raise BudgetError(f"budget={budget!r}: pass a Budget, such as Budget(ratio=0.2)")
    if simulation is not None and policy.evicts:
        raise PolicyError(f"a simulation evicts nothing: pass make_policy('full'), not {policy.name}")
    layers = check_model(model)
    choose(kernels, model.device.type, model.dtype)
    _check_policy(model, policy, tokenizer)
    sources = map_of(share, model, layers)
    if sources and (simulation is not None or watch is not None):
        raise ShareError(f"{'a simulation' if watch is None else 'watch'} looks at each layer by itself; leave out share")
    if coding is not None:
        coding = coding.for_model(model)
        _check_codec(model, policy, coding, simulation is not None)
    if policy.rolling:  # keys without rotation are held in float32 at least
        layers = tuple(replace(layer, key_itemsize=max(4, layer.key_itemsize)) for layer in layers)
    if coding is not None:
        layers = tuple(coding.fitted(idx, layer) for idx, layer in enumerate(layers))
    over: list[bool] = []
    plan = Plan(
        policy=policy,
        budget=budget or Budget(),
        layers=layers,
        itemsize=model.dtype.itemsize,
        codec=coding,
        vocab=tokenizer if tokenizer is None or isinstance(tokenizer, Vocab) else Vocab(tokenizer),
        kernels=kernels,
        watch=watch,
        simulation=simulation,
        sources=sources,
        ended=lambda: bool(over),
    )
    seam = Seam.of(model)
    try:
        yield Session(model, plan)
    finally:
        over.append(True)
        seam.release()


def _check_policy(model: PreTrainedModel, policy: Policy, tokenizer: Any) -> None:
    if not isinstance(policy, Policy):
        raise PolicyError(f"policy={policy!r}: pass a policy, such as make_policy('h2o')")
    needs_vocab = policy.keep_special or "token_ids" in policy.needs
    if needs_vocab and tokenizer is None:
        raise PolicyError(f"policy {policy.name} must know the special tokens: pass attach(..., tokenizer=tokenizer)")
    if policy.rolling and (reason := no_rolling(model)):
        raise PolicyError(f"rolling=true {reason}")


def _check_codec(model: PreTrainedModel, policy: Policy, codec: Codec, simulated: bool) -> None:
    if simulated:
        raise CodecError(f"a simulation holds nothing that codec {codec.label} could encode; leave out one of the two")
    codec.check_policy(policy)
    if codec.pre_rope and (reason := no_rolling(model, "rope=post" if hasattr(codec, "rope") else "another codec")):
        raise CodecError(f"codec {codec.label} holds keys without their rotation, which {reason}")
