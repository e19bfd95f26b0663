"""On a real model: a left-padded batch of three prompts gives what each prompt gives alone, for every policy."""

import os
import pydoc_data.topics
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab import Budget, attach, load_model, make_policy, policy_names
from kvlab.embedded import is_fetched

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.skipif(not is_fetched(), reason="the embedded model is not in the cache folder: run `make setup`"),
]

BUDGET = 64
LENGTHS = (100, 170, 130)
STEPS = 24
FAST = ("h2o", "adakv", "hashevict", "fastgen")
"""One of each kind of policy: at each step, ragged, before attention, by profile. The others are slow."""
SMALL = {"corm": {"obs_window": 24, "recent_window": 12}}  # by default it protects more than the budget


@pytest.fixture(scope="module")
def embedded():
    return load_model("smollm2-135m")


def texts():
    """Real English: manual pages of Python's, and a book where benchmark data is set."""
    topics = pydoc_data.topics.topics
    found = [topics["assert"] + topics["import"], topics["lambda"] + topics["with"] + topics["while"], topics["try"]]
    folder = os.environ.get("KVLAB_DATA_DIR")
    books = sorted(Path(folder).glob("gutenberg/**/*.txt")) if folder else []
    if books:
        found[1] = books[0].read_text(encoding="utf-8", errors="replace")[20_000:30_000]
    return found


@pytest.fixture(scope="module")
def prompts(embedded):
    """Token ids of three prompts of different lengths, (1, length) each."""
    tokenizer = embedded[1]
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts()]
    assert all(row.shape[1] >= length for row, length in zip(ids, LENGTHS, strict=True))
    return [row[:, :length] for row, length in zip(ids, LENGTHS, strict=True)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in policy_names()]
)
def test_a_padded_batch_equals_its_prompts_alone(name, embedded, prompts):
    model, tokenizer = embedded
    policy = make_policy(name, **SMALL.get(name, {}))
    batch = tokenizer.pad({"input_ids": [row[0].tolist() for row in prompts]}, return_tensors="pt")
    with attach(model, policy=policy, budget=Budget(tokens=BUDGET), tokenizer=tokenizer) as session:
        cache = session.new_cache()
        out = model.generate(
            **batch,
            cache=cache,
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens, logits = out.sequences[:, -STEPS:], torch.stack(out.logits, 1)
        for row, prompt in enumerate(prompts):
            alone = session.new_cache()
            last = model(prompt, cache=alone, logits_to_keep=1).logits
            with alone.stepwise():  # the tokens that the batch chose, each as if decoded; all at once, which is faster
                steps = model(tokens[row : row + 1, :-1], cache=alone).logits
            expected = torch.cat([last, steps], 1)[0]
            assert tokens[row].tolist() == expected.argmax(-1).tolist()
            assert (logits[row] - expected).abs().max() <= 1e-3
            assert positions(cache, row) == positions(alone, 0)
    seen = [length + STEPS - 1 for length in LENGTHS]
    assert cache.seen_len.tolist() == seen
    layers, heads = len(cache.layers), cache.kept_len.shape[2]
    for row, length in enumerate(seen):
        kept = cache.kept_len[:, row]
        if not policy.evicts:
            assert (kept == length).all()
        elif policy.chooses or int(policy.target(np.array([[BUDGET]]))[0, 0]) < BUDGET:  # what it needs, or what is left
            assert (kept <= BUDGET).all() and (kept > 0).all()
        elif policy.holds_budget_after_prompt:
            split = policy.layer_budget(BUDGET, layers, LENGTHS[row])
            assert kept.sum(1).tolist() == [tokens * heads for tokens in split]
            assert int(kept.sum()) == layers * heads * BUDGET
            assert policy.ragged or (kept == torch.tensor(split)[:, None]).all()


def positions(cache, row):
    return [layer[row] for layer in cache.kept_positions()]
