"""Every policy with every codec and with layers that share: what the table says runs does, and what it refuses is refused."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from conftest import random_ids
from kvlab import Budget, attach
from kvlab.analyze.setup import Setup
from kvlab.calibrate import make_calibration, run_calibration
from kvlab.codecs.side import FULL_PRECISION
from kvlab.compositions import CHOICES, MARK, as_markdown, every_policy, of_policies, of_protocols, tables
from kvlab.tiny import tiny_model, tiny_tokenizer

PAGE = Path(__file__).parent.parent / "docs" / "compositions.md"
TABLES = tables()  # before other tests register policies of their own
ANSWERS = {(answer.row, answer.column): answer.why for answer in of_policies()}
SHARED = {3: 1, 2: 1}
HALF = Budget(ratio=0.5)
SMALL = {"group": 4, "residual": 12, "recent": 8, "obs_window": 8, "recent_window": 8, "block": 16}
"""Settings with which prompts of 40 tokens are evicted and encoded."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose bases are found."""
    model = tiny_model("llama", num_hidden_layers=4)
    texts = tuple(random_ids(1, 48, seed=seed) for seed in (5, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        setup = Setup("tiny", model, tiny_tokenizer(), texts)
        run_calibration("eigen", make_calibration("eigen", {}), setup, lambda text: None)
        yield model


def read(model, policy, codecs, share):
    """Logits of a prompt and of three decoded tokens; and what the cache weighs."""
    ids = random_ids(1, 43, seed=2)
    with attach(model, policy, HALF if policy.evicts else None, codecs, share, tokenizer=tiny_tokenizer()) as session:
        cache = session.new_cache()
        parts = [ids[:, :40], *ids[:, 40:43].split(1, 1)]
        logits = torch.cat([model(part, cache=cache).logits for part in parts], 1)
        return logits, cache.memory()


@pytest.mark.parametrize("row", every_policy())
def test_what_the_table_says_holds(row, model):
    policy = every_policy()[row]
    for number, column in enumerate(CHOICES):
        share, why = (None, SHARED)[(number + len(row)) % 2], ANSWERS[row, column]  # the other half is in the slow suite
        check(model, policy, column, share, why)


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize("row", every_policy())
def test_all_of_the_table_holds(row, share, model):
    for column in CHOICES:
        check(model, every_policy()[row], column, share, ANSWERS[row, column])


def smaller(method):
    """A policy or codec for short prompts."""
    there = {field.name: getattr(method, field.name) for field in fields(method)}
    counts = {name: count for name, count in there.items() if isinstance(count, int)}
    return replace(method, **{name: least for name, least in SMALL.items() if counts.get(name, 0) > least})


def check(model, policy, column, share, why):
    if why is not None:
        with pytest.raises(ValueError) as refused:
            read(model, policy, CHOICES[column], share)
        assert str(refused.value) == why and "\n" not in why, column
        return
    logits, memory = read(model, smaller(policy), [smaller(codec) for codec in CHOICES[column]], share)
    assert logits.isfinite().all(), column
    holders = [layer for layer in range(4) if layer not in (share or {})]
    assert (memory.kept_len.sum((1, 2)) > 0).nonzero()[:, 0].tolist() == holders, column
    assert memory.kv_bytes == sum(memory.parts.values()), column
    assert sum(size for part, size in memory.parts.items() if part != FULL_PRECISION) > 0, f"{column} encoded nothing"


def test_the_page_has_these_tables():
    assert PAGE.read_text().rstrip().endswith(TABLES), "kvlab list compositions --markdown"


def test_named_chains_run():
    """Those that papers name."""
    runs = [("snapkv, grow", "think+kivi2"), ("full", "think+kivi2"), ("full", "think+kivi4"), ("full", "eigen+int4")]
    assert [ANSWERS[pair] for pair in runs] == [None] * 4
    assert ANSWERS["h2o", "kivi2"] and ANSWERS["h2o", "think"]


def test_reasons_name_no_pair():
    for answers in (list(of_policies()), list(of_protocols())):
        refused = [answer for answer in answers if answer.why]
        text = as_markdown(answers, "policy")
        assert text.count(f" {MARK} |") == len(answers) - len(refused)
        assert text.count("\n- **") < 12 < len(refused)
