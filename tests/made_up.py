"""Made-up benchmark data, so that configs which need some make cells."""

import json

from kvlab.evals.longbench.data import DATASETS, LENGTHS, PROMPTS


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


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def few_shot(folder, n=12):
    """Rows of the tasks that H2O's and Scissorhands' presets name."""
    lines(folder / "piqa/valid.jsonl", [{"goal": f"Boil {k} eggs", "sol1": "In water.", "sol2": "In sand."} for k in range(n)])
    (folder / "piqa/valid-labels.lst").write_text("0\n" * n)
    for split in ("val", "train"):
        row = {"choice1": "It fell.", "choice2": "It sang.", "question": "effect", "label": 0}
        lines(
            folder / f"superglue_copa/{split}.jsonl", [{"premise": f"The cup tipped {k}.", **row, "idx": k} for k in range(n)]
        )
    adapters = folder / "llm_adapters_commonsense"
    adapters.mkdir()
    answers = "\n\nAnswer1: a Answer2: b Answer3: c Answer4: d\n\nAnswer format: answer1/answer2/answer3/answer4"
    asked = "Please choose the correct answer to the question: What"
    blank = "Please choose the correct answer to fill in the blank to complete the given sentence: Ann met Bea and _ left"
    options = "\n\nOption1: Ann Option2: Bea Answer format: option1/option2"
    sums = "what is 1 + {} ? The options: A ) 1 , B ) 2 , C ) 3 , D ) 4 , E ) 5"
    files = {
        "openbookqa_test": [(f"{asked} {k}?{answers}", "answer1") for k in range(n)],
        "openbookqa_train": [(f"{asked} then {k}?{answers}", "answer2") for k in range(n)],
        "winogrande_test": [(f"{blank} {k}.{options}", "option2") for k in range(n)],
        "mathqa_test": [(sums.format(k), "A") for k in range(n)],
    }
    for name, rows in files.items():
        held = [{"instruction": text, "input": "", "output": "", "answer": answer} for text, answer in rows]
        (adapters / f"{name}.json").write_text(json.dumps(held))
    endings = {"choices": {"A": "sits.", "B": "sings.", "C": "sails.", "D": "sinks."}, "answer": "A", "domain": "indomain"}
    story = [{"question": f"A man stands on {k} legs. he", **endings, "id": k} for k in range(n)]
    (folder / "hellaswag").mkdir()
    (folder / "hellaswag/hellaswag.json").write_text(json.dumps({"dataset": "hellaswag", "dev": story, "test": []}))


def instructions(folder):
    """AlpacaEval's instructions."""
    (folder / "alpaca_eval").mkdir()
    rows = [{"dataset": "made_up", "instruction": f"Count to {k}.", "output": "1", "generator": "nobody"} for k in (1, 2)]
    (folder / "alpaca_eval/model_outputs_text_davinci_003.json").write_text(json.dumps(rows))


def summaries(folder):
    """XSUM as H2O has it."""
    article = "###\nArticle: The cup fell. It broke.\n\nSummarize the above article in 1 sentence.\n"
    row = {"article": article, "summary_gt": "A cup broke.", "temperature": 0.3, "stop": ["###"], "n": 1, "max_tokens": 64}
    lines(folder / "xsum/xsum_0shot.jsonl", [row] * 2)


def last_words(folder):
    """LAMBADA's passages."""
    lines(folder / "lambada/lambada_test.jsonl", [{"text": f"Ann has {k} cups and Bea has a cup"} for k in range(12)])


def sums(folder):
    """GSM8K's questions."""
    rows = [{"question": f"Ann has {k} cups and buys 1. How many?", "answer": f"{k} + 1\n#### {k + 1}"} for k in range(12)]
    lines(folder / "gsm8k/test.jsonl", rows)


def everything(folder):
    """A data folder for every config in conf/."""
    longbench(folder)
    few_shot(folder)
    instructions(folder)
    summaries(folder)
    last_words(folder)
    sums(folder)
