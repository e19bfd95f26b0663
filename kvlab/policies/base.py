"""What a policy is: scores for held tokens, plus a few declarations. One paper, one file, no model anywhere.

A policy is a frozen dataclass registered by name. Its fields are its settings (and its Hydra config). The cache calls
`score` when a decision is due and drops the lowest; budgets, protection, ties, padding and storage are not its business.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from kvlab.kernels.contract import ScanRule
from kvlab.registry import Registry
from kvlab.selection import assign_tiers
from kvlab.settings import check
from kvlab.shapes import Arrival, Kept, PerHead, Probes, Queries, Scores, Step, Tiers

Group = Literal["mean", "max", "sum", "first"]


DECIDING = ("score", "scan_rule", "when", "once", "remember", "select")
"""What a class may declare that says how it decides."""
NEEDS = frozenset({"mass", "attention", "looks", "token_ids"})
SCORE = "score"
"""State in which the cache remembers the scores of a policy that gives each token its score once."""
RANK = "rank"
"""State in which the cache remembers scores after a turn's end; infinite for tokens that weren't scored."""


class PolicyError(ValueError):
    """A policy or one of its settings that cannot be: the message says what to change."""


@dataclass(frozen=True)
class TokenState:
    """Type and shape of what a policy remembers of one token."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Base of all policies. Override `score`; declare the rest only where it differs.

    Settings of every policy:
    num_sink       first tokens of a sequence that are always kept
    recent_window  last tokens that are always kept, the newest included
    keep_special   special tokens (BOS, template markers) are always kept; needs `attach(..., tokenizer=...)`
    rolling        keys are stored before RoPE and rotated by their rank among the held tokens, as StreamingLLM does
    """

    num_sink: int = 0
    recent_window: int = 0
    keep_special: bool = False
    rolling: bool = False

    name: ClassVar[str] = ""
    evicts: ClassVar[bool] = True
    """False for a policy that holds everything, whatever the budget."""
    when: ClassVar[Literal["every_step", "prompt_end"]] = "every_step"
    """`prompt_end`: decides at the end of each turn only. In between the cache remembers the scores of that decision: the token
    with the lowest leaves, until scored ones fill half of the budget; then the oldest unprotected of the others."""
    phase: ClassVar[Literal["after_attention", "before_attention"]] = "after_attention"
    """`after_attention`: reads up to B + 1 tokens, then drops to B. `before_attention`: makes room first, reads up to B."""
    coupling: ClassVar[Literal["head", "layer"]] = "head"
    """`layer`: all KV heads of a layer keep the same tokens."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Any of: mass (attention received so far), attention (of the voting queries), looks (the same, some queries at a time),
    token_ids."""
    state: ClassVar[Mapping[str, TokenState]] = {}
    """What the policy remembers of each token; `arrive` makes it, the cache moves it along and bills it."""
    query_aware: ClassVar[bool] = False
    """Whether the last tokens of the prompt steer what is kept, so that a question at its end is seen."""
    once: ClassVar[bool] = False
    """Whether a score depends on the token alone (its key, position, id), so that it is asked for once, as the token comes."""
    ragged: ClassVar[bool] = False
    """Whether heads of one layer may hold different numbers of tokens."""
    # Not annotated, so not dataclass fields: constants here, settings in the policies that annotate them.
    group = "mean"
    """How the query heads of a KV head merge, per query, before their attention is summed."""
    obs_window = 1
    """How many of a turn's last queries vote at its end."""

    def __post_init__(self) -> None:
        check(self, "policy", PolicyError)

    def score(self, step: Step) -> Scores:
        """Importance of each held token, higher = keep. Empty slots may get anything. Shape (batch, kv_heads, slots)."""
        raise NotImplementedError(f"policy {self.name or type(self).__name__} has no score()")

    def scan_rule(self) -> ScanRule | None:
        """The rule by which kernels may decide at decode steps instead of `score`; None: `score` is asked at each.

        It must be what `score` (or `select`) says. Between turns a policy that decides at their ends has one anyway.
        """
        if self.chooses:
            return None
        if self.when == "prompt_end":
            return ScanRule(order="ranked", plane=RANK) if self.ranks_after_prompt else ScanRule()
        return ScanRule(order="value", plane=SCORE) if self.once else None

    def arrive(self, arrival: Arrival) -> Mapping[str, Tensor]:
        """State of new tokens by name: (batch, kv_heads, tokens, ...) each. What is left out starts at 0."""
        return {}

    def token_state(self) -> Mapping[str, TokenState]:
        """`state`, for a policy whose settings say how large it is."""
        return self.state

    def remember(self, step: Step) -> Mapping[str, Tensor]:
        """New values of the policy's own state after attention, before the decision: at turn ends and at steps."""
        return {}

    def profile(self, step: Step) -> Mapping[str, Tensor]:
        """What is to be known of each head from the first prompt's end on, (batch, kv_heads, ...) by name."""
        return {}

    def tiers(self, step: Step) -> Tiers:
        """What settings protect, for a policy that chooses."""
        special = None
        if self.keep_special and step.token_ids is not None:
            special = torch.isin(step.token_ids, step.vocab.special_ids(step.positions.device))
        return assign_tiers(
            step.positions, step.now, num_sink=self.num_sink, recent=step.recent, special=special, window=step.window
        )

    def select(self, step: Step) -> Kept:
        """Which tokens stay, for a policy that says so itself instead of scoring; asked at turn ends and at each step."""
        raise NotImplementedError

    @property
    def voting(self) -> int | None:
        """How many of a turn's last queries are remembered for its end; None: all."""
        return self.obs_window

    def probes(self, queries: Queries, arrival: Arrival) -> Probes:
        """Bits that arriving tokens are compared with, for a rule ordered by `distance`."""
        raise NotImplementedError

    def grace(self, budget: PerHead) -> PerHead | None:
        """Age in tokens up to which nothing fades or decays; None where neither happens."""
        return None

    def target(self, budget: np.ndarray) -> np.ndarray:
        """How many tokens a decode step's decision leaves, at most the budget: (batch, kv_heads), on the host."""
        return budget

    def recent(self, budget: PerHead) -> PerHead:
        """How many of the last tokens are protected under a budget of that many tokens per head."""
        return budget.new_full(budget.shape, self.recent_window)

    def layer_budget(self, budget: int, num_layers: int, length: int) -> list[int]:
        """Budget of each layer for a sequence of `length` tokens; must sum to num_layers * budget."""
        return [budget] * num_layers

    def head_budget(self, step: Step, scores: Scores, tiers: Tiers) -> PerHead:
        """Budget of each head at a turn's end; must sum to the sum of `step.budget` over a layer's heads."""
        return step.budget

    @property
    def chooses(self) -> bool:
        """Whether the policy says itself which tokens stay, however many."""
        return type(self).select is not Policy.select

    @property
    def profiles(self) -> bool:
        """Whether the policy wants to know something of each head once, from all of the first prompt."""
        return type(self).profile is not Policy.profile

    @property
    def remembers(self) -> bool:
        """Whether the policy keeps a state of its own up to date by what is attended to."""
        return type(self).remember is not Policy.remember

    @property
    def drops(self) -> bool:
        """Whether anything leaves at all under a budget."""
        return self.evicts

    @property
    def fades(self) -> tuple[float, float] | None:
        """(rate, floor) by which old tokens lose influence on attention at steps, see `Fade`; None: they don't."""
        return None

    @property
    def replays_prompt(self) -> bool:
        """Whether a prompt's end is decided as if its tokens had come one by one, by the rule of decode steps."""
        return False

    @property
    def holds_budget_after_prompt(self) -> bool:
        """False where decoded tokens are all kept (`after_prompt=grow`), as some papers publish it."""
        return getattr(self, "after_prompt", "rank") != "grow"

    @property
    def ranks_after_prompt(self) -> bool:
        """Whether the scores of a turn's end go on to decide what leaves."""
        return self.evicts and self.when == "prompt_end" and self.holds_budget_after_prompt and not self.chooses


def rule_of(policy: Policy) -> ScanRule | None:
    """The rule that kernels may follow for this policy; None where only its own `score` knows.

    A class that changes how it decides voids the rule that it inherits.
    """
    if policy.rolling:  # keys change their places at each step
        return None
    if policy.remembers and policy.when == "prompt_end":  # no rule says what it would remember at steps
        return None
    classes = type(policy).__mro__
    declared = {name: next(i for i, cls in enumerate(classes) if name in vars(cls)) for name in DECIDING}
    own = declared["scan_rule"]  # the first in the order of inheritance wins
    if policy.when == "prompt_end" or policy.once:
        changed = declared["when"] if policy.when == "prompt_end" else min(declared["once"], declared["score"])
        rule = policy.scan_rule() if own <= changed else Policy.scan_rule(policy)
    else:
        changed = min(declared["score"], declared["remember"], declared["select"])
        rule = policy.scan_rule() if own <= changed or own == classes.index(Policy) else None
    return None if rule is None else replace(rule, coupled=policy.coupling == "layer")


POLICIES: Registry[Policy] = Registry("policy", "register", PolicyError, "kvlab.policies")
PolicyType = TypeVar("PolicyType", bound=type[Policy])


def register(name: str) -> Callable[[PolicyType], PolicyType]:
    """Class decorator: make a policy known by `name`. Raises PolicyError if another module's policy has that name."""

    def add(cls: PolicyType) -> PolicyType:
        POLICIES.check(name, cls)
        if unknown := cls.needs - NEEDS:
            raise PolicyError(f"policy {name!r} needs {', '.join(unknown)}; what there is: {', '.join(sorted(NEEDS))}")
        if taken := (NEEDS | {RANK, SCORE}) & set(cls.state):
            raise PolicyError(f"policy {name!r}: state {', '.join(taken)} is a name of kvlab's own; choose another")
        POLICIES.add(name, cls)
        return cls

    return add


def policy_names() -> list[str]:
    """Names of all registered policies, those of installed plug-ins (entry-point group `kvlab.policies`) included."""
    return POLICIES.names()


def policy_class(name: str) -> type[Policy]:
    """The policy registered by `name`. Raises PolicyError with near names if there is none."""
    return POLICIES.find(name)


def make_policy(name: str, **settings: object) -> Policy:
    """A policy by name with its settings. Raises PolicyError on an unknown name or setting, or a wrong value."""
    return POLICIES.make(name, settings)


def import_modules(modules: Sequence[str]) -> None:
    """Import the user's own modules, by name or as a .py file, so that what they register is known.

    Names are looked for in the current folder too, after everything installed. Raises PolicyError if one can't be imported.
    """
    for module in modules:
        path = Path(module)
        folder = str(path.parent.resolve() if path.suffix == ".py" else Path.cwd())
        if folder not in sys.path:
            sys.path.append(folder)
        try:
            _run_file(path) if path.suffix == ".py" else importlib.import_module(module)
        except FileNotFoundError as error:
            raise PolicyError(f"--import {module}: there is no such file") from error
        except ModuleNotFoundError as error:
            hint = "; give a .py file, or a module on PYTHONPATH" if error.name == module else ""
            raise PolicyError(f"--import {module}: {error}{hint}") from error
        except Exception as error:  # the user's code may raise anything
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({last.filename}, line {last.lineno})" if last.filename != __file__ else ""
            raise PolicyError(f"--import {module}: {type(error).__name__}: {error}{where}") from error


def _run_file(path: Path) -> None:
    """Import a file under a name of its own, so that it can't stand in for another module (a policy in random.py)."""
    name = f"kvlab_own_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"{path} can't be imported")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
