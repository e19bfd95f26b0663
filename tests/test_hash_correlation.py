"""Hash codes against attention as a task: the numbers of `kvlab analyze hash`, prompt by prompt."""

import json

import pytest
import torch

import made_up
from kvlab import load_model
from kvlab.analyze import ANALYSES, read
from kvlab.analyze.setup import Setup
from kvlab.evals.hash_correlation import HashCorrelation
from kvlab.settings import SettingError
from running import TINY, kvlab, results, sample_lines

RUN = ["run", *TINY, "task=hash_correlation", "task.tasks=[gsm8k]", "task.num_fewshot=2", "task.limit=2", "budget=none"]


def test_each_prompt_has_the_number_that_an_analysis_of_it_gives(tmp_path):
    made_up.sums(tmp_path)
    run = [*RUN, f"task.data_dir={tmp_path}", f"output_dir={tmp_path}/out", "task.bits=8", "policy=full"]
    assert kvlab(*run) == 0
    model, tokenizer = load_model("tiny-llama")
    task = HashCorrelation(tasks=("gsm8k",), num_fewshot=2, limit=2, data_dir=str(tmp_path), bits=8)
    expected = {}
    for sample in task.samples(tokenizer):
        analysis = ANALYSES["hash"](0.95)
        read(Setup("tiny", model, tokenizer, (torch.tensor([sample.prompt.ids]),)), [analysis])
        expected[sample.id] = analysis.tables()[""].query("bits == 8").r.mean()
    (lines,), (result,) = sample_lines(tmp_path / "out").values(), results(tmp_path / "out").values()
    found = {record["id"]: record["values"]["pearson_r"] for record in map(json.loads, lines)}
    assert found == pytest.approx(expected, abs=1e-6) and len(set(found.values())) == 2
    assert result["main_metric"] == "pearson_r" and result["task"] == "gsm8k 2-shot hash 8 bits"


def test_another_cache_than_a_full_one_is_refused(tmp_path):
    made_up.sums(tmp_path)
    run = [*RUN, f"task.data_dir={tmp_path}", f"output_dir={tmp_path}/out", "policy=knorm", "budget=ratio", "budget.ratio=0.5"]
    assert kvlab(*run) == 1
    (result,) = results(tmp_path / "out").values()
    assert result["error"] == "task=hash_correlation looks at a full cache: use policy=full codec=none share=none"


def test_bits():
    with pytest.raises(SettingError, match="task.bits=0, task.projections=3: use 1 to 1024 bits"):
        HashCorrelation(tasks=("gsm8k",), bits=0)
