"""`kvlab bench` on a tiny model: what it prints, and that it measures what it says. Times themselves are never tested."""

import importlib
import json

import pytest
import torch

from kvlab.bench import timing
from kvlab.bench.setup import load
from kvlab.bench.timing import Line, alternate
from kvlab.cli import main

SMALL = ["--model", "tiny-llama", "--lengths", "192", "--batch", "2", "--repeats", "1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A small tensor to measure bandwidth on."""
    ones = torch.ones
    monkeypatch.setattr(timing.torch, "ones", lambda count, **options: ones(min(count, 2**16), **options))
    shorter = {
        "choices": {"CONTEXT": 60},
        "codecs": {"BITS": (2,), "STEPS": 1},
        "decode": {"STEPS": 2},
        "sweep": {"NEW_TOKENS": 2},
    }
    for module, values in shorter.items():
        for name, value in values.items():  # a function of the package hides its module
            monkeypatch.setattr(importlib.import_module(f"kvlab.bench.{module}"), name, value)


@pytest.mark.filterwarnings("ignore:a budget of")  # corm protects more than so short a prompt's part
def test_every_bench_prints_a_table(capsys):
    assert main(["bench", "decode", "prefill", "loglik", "choices", "codecs", "memory", "sweep", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.count("### ") == 7
    for said in (
        "h2o at 20% over transformers' DynamicCache, batch 2 × 192",
        "knorm over streaming_llm",
        "scan over token by token",
        "| kivi2 | ",
        "h2o, stream: 4 choices of 1 contexts of 60 tokens",
        "one sweep over 16 runs",
        "tokens and kept positions are identical",
    ):
        assert said in out
    assert "**no**" not in out.split("### Keys and values held")[0], "targets are for another model"


@pytest.mark.filterwarnings("ignore:a budget of")
def test_json_has_what_the_tables_have(capsys):
    assert main(["bench", "loglik", "memory", "--json", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    scan, plain = found["benches"]["loglik"]
    assert scan["faster"] and scan["ratio"] == pytest.approx(scan["against"] / scan["seconds"])
    assert not plain["faster"] and plain["ratio"] == pytest.approx(plain["seconds"] / plain["against"])
    assert scan["target"] is None and scan["met"] is None
    held = {row["policy"]: row for row in found["benches"]["memory"]}
    tokens, token = 38 * 2 * 2 * 2, 2 * 16 * 4  # 20 % of 192; batch, KV heads and layers; bytes of a key and a value
    assert held["h2o"]["allowed"] == tokens * token
    assert held["h2o"]["held"] == (tokens + 2 * 2 * 2) * token  # and one more slot a row, where tokens come in
    assert found["machine"]["dtype"] == "float32"


def test_the_stock_model_has_the_same_weights_and_no_session():
    setup = load("tiny-llama", None, None, lengths=(64,), batch=1, ratio=0.2, repeats=1)
    ids = setup.ids(20)
    stock = setup.stock
    with setup.session("h2o"):
        assert "kvlab" not in stock.config._attn_implementation
        assert torch.equal(stock(ids).logits, setup.model(ids).logits)
    assert next(stock.parameters()).data_ptr() == next(setup.model.parameters()).data_ptr()


def test_lines_say_whether_their_target_is_met():
    assert Line("a", 1.0, 2.0, 2.0, faster=True).met
    assert not Line("a", 1.0, 1.9, 2.0, faster=True).met
    assert Line("a", 1.1, 1.0, 1.1).met
    assert not Line("a", 1.2, 1.0, 1.1).met


def test_works_take_turns_and_the_first_round_does_not_count():
    done = []
    found = alternate({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, 3, torch.device("cpu"))
    assert done == ["a", "b"] * 4 and set(found) == {"a", "b"}


def test_lengths_beyond_the_context_or_the_text_are_refused(capsys):
    assert main(["bench", "memory", "--model", "tiny-llama", "--lengths", "4096"]) == 2
    assert "reads 2048 tokens at most" in capsys.readouterr().err
