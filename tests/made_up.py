"""Made-up benchmark data, so that configs which need some make cells."""

import json

from kvlab.evals.longbench_data import DATASETS, LENGTHS, PROMPTS


def longbench(folder):
    """One row of every dataset of LongBench, LongBench-E and MiniLongBench, and templates, in a data folder."""
    first, mini = folder / "longbench", folder / "minilongbench"
    for place in (first, mini):
        place.mkdir(parents=True)
    answers = ["Paragraph 1, 段落1"]
    gold = {"answers": answers, "all_classes": answers}
    row = json.dumps({"_id": "a", "context": "Words.", "input": "What?", "length": 1, **gold})
    small = json.dumps({"0": {"origin_prompt": "What?", "gold": gold}})
    for name in DATASETS:
        (first / f"{name}.jsonl").write_text(row)
        (first / f"{name}_e.jsonl").write_text(row)
        (mini / f"MiniLongBench_{name}.json").write_text(small)
    (first / PROMPTS).write_text(json.dumps(dict.fromkeys(DATASETS, "{context} {input}")))
    (first / LENGTHS).write_text(json.dumps(dict.fromkeys(DATASETS, 8)))
