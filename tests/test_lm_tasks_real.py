"""lm-eval's tasks on the real data of KVLAB_DATA_DIR: what is made of it against plain readings, and requests of first rows."""

import csv
import io
import json
import os
import re
import zipfile
from pathlib import Path

import pytest

from kvlab.evals.harness.local_tasks import local_tasks
from kvlab.evals.harness.recipes import RECIPES
from lm_local import held, loaded, requests

FOLDER = Path(os.environ.get("KVLAB_DATA_DIR", "none")).expanduser()
pytestmark = pytest.mark.skipif(not os.environ.get("KVLAB_DATA_DIR"), reason="KVLAB_DATA_DIR isn't set: no real data")
ADAPTERS = FOLDER / "llm_adapters_commonsense"

COUNTS = {
    "copa": (100, 32),
    "rte": (277, 32),
    "sglue_rte": (277, 32),
    "boolq": (3270, 32),
    "cb": (56, 32),
    "piqa": (1738, 100),
    "openbookqa": (500, 4957),
    "arc_easy": (2376, 2251),
    "arc_challenge": (1172, 1119),
    "winogrande": (1167, 100),
    "mathqa": (2885, 100),
    "hellaswag": (900, 100),
    "lambada_openai": (5053, 100),
    "gsm8k": (1219, 100),
    "wikitext": (62,),
}
"""Rows that are scored, and examples."""


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """All tasks, in a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield local_tasks(FOLDER, [*RECIPES, "mmlu"])


@pytest.fixture(scope="session")
def found(tasks):
    return loaded(tasks)


def in_order(tasks, name):
    """All rows of a task's scored file, those that are kept apart at its end."""
    return [row for rows in held(tasks, name).values() for row in rows]


def lines(name):
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_all_rows_can_be_used(tasks, found):
    assert tasks.left_out == ()
    assert {name: tuple(map(len, held(tasks, name).values())) for name in RECIPES} == COUNTS
    subjects = [name for name in found["tasks"] if name.startswith("mmlu_")]
    assert len(subjects) == 57 and {len(held(tasks, name)["dev"]) for name in subjects} == {5}
    assert sum(len(held(tasks, name)["test"]) for name in subjects) == 14042
    assert set(found["group_map"]["mmlu"]) == {"mmlu_stem", "mmlu_other", "mmlu_social_sciences", "mmlu_humanities"}


@pytest.mark.parametrize("name", ["openbookqa", "arc_easy", "arc_challenge"])
def test_instructions_can_be_put_together_again(name, tasks):
    for split in ("test", "train"):
        raw = json.loads((ADAPTERS / f"{name}_{split}.json").read_text())
        for row, doc in zip(raw, held(tasks, name)[split], strict=True):
            texts, letters = doc["choices"]["text"], doc["choices"]["label"]
            listed = " ".join(f"Answer{n}: {text}" for n, text in enumerate(texts, 1))
            shape = "/".join(f"answer{n}" for n in range(1, len(texts) + 1))
            question = doc["question_stem" if name == "openbookqa" else "question"]
            start = "Please choose the correct answer to the question:"
            assert row["instruction"] == f"{start} {question}\n\n{listed}\n\nAnswer format: {shape}"
            assert row["answer"] == f"answer{letters.index(doc['answerKey']) + 1}"


def test_arc_is_what_another_file_has(tasks):
    """But for questions that haven't four choices, which that file makes four, and 71 whose right choice it counts wrongly."""
    other, shifted, fours = lines("structured_mc/arc_easy.jsonl"), 0, 0
    for row, doc in zip(other, held(tasks, "arc_easy")["test"], strict=True):
        assert row["query"] == f"Question: {doc['question']}"
        if len(doc["choices"]["text"]) == 4:
            right = "ABCD".index(doc["answerKey"])
            assert row["choices"] == doc["choices"]["text"] and row["gold"] in (right, right + 1)
            shifted, fours = shifted + (row["gold"] == right + 1), fours + 1
    assert (fours, shifted) == (2365, 71)


def test_winogrande_is_what_another_file_has(tasks):
    for row, doc in zip(lines("structured_mc/winogrande.jsonl"), in_order(tasks, "winogrande"), strict=True):
        before, after = doc["sentence"].split("_")
        assert row["context_options"] == [before + doc["option1"], before + doc["option2"]]
        assert row["continuation"] == after.strip() and row["gold"] == int(doc["answer"]) - 1


def test_mathqa_has_five_options_as_lm_eval_finds_them(tasks, found):
    raw = json.loads((ADAPTERS / "mathqa_test.json").read_text())
    for row, doc in zip(raw, in_order(tasks, "mathqa"), strict=True):
        problem, options = row["instruction"].split(" The options: ")
        assert (doc["Problem"], doc["options"], doc["correct"]) == (problem, options.lower(), row["answer"].lower())
        assert len(found["tasks"]["mathqa"].doc_to_choice(doc)) == 5
        assert problem == problem.lower() and not re.search("[G-Z]", options), "capitals are those that were put there"


def test_mmlu_is_what_its_files_have(tasks, found):
    with zipfile.ZipFile(FOLDER / "mmlu/mmlu.zip") as archive:
        for name in [name for name in found["tasks"] if name.startswith("mmlu_")]:
            subject = name.removeprefix("mmlu_")
            for split in ("test", "dev"):
                file = io.TextIOWrapper(archive.open(f"data/{split}/{subject}_{split}.csv"), "utf-8", newline="")
                docs = [[doc["question"], *doc["choices"], "ABCD"[doc["answer"]]] for doc in held(tasks, name)[split]]
                assert docs == list(csv.reader(file)) and all(doc["subject"] == subject for doc in held(tasks, name)[split])


def test_articles_are_those_of_a_plain_reading(tasks):
    """A title begins with one sign once those of sections are drawn together."""
    pages = [[]]
    text = (FOLDER / "wikitext2/test.txt").read_text()
    for line in text.split("\n"):
        drawn = line.replace("= =", "==").replace("== =", "===").strip()
        if drawn.startswith("= ") and drawn.endswith(" ="):
            pages.append([])
        pages[-1].append(line)
    assert ["\n".join(page) for page in pages[1:]] == [row["page"] for row in held(tasks, "wikitext")["test"]]


def test_fields_that_stay_as_they_are(tasks):
    for name, file in (("copa", "superglue_copa/val"), ("gsm8k", "gsm8k/test"), ("lambada_openai", "lambada/lambada_test")):
        for row, doc in zip(lines(f"{file}.jsonl"), in_order(tasks, name)[: len(lines(f"{file}.jsonl"))], strict=True):
            assert all(row[field] == value for field, value in doc.items() if field != "kvlab_row")
    labels = (FOLDER / "piqa/valid-labels.lst").read_text().split()
    for row, label, doc in zip(lines("piqa/valid.jsonl"), labels, in_order(tasks, "piqa"), strict=True):
        assert {**row, "label": int(label)} == {name: value for name, value in doc.items() if name != "kvlab_row"}


def test_contexts_of_hellaswag_are_cut_before_their_last_words(tasks):
    rows = json.loads((FOLDER / "hellaswag/hellaswag.json").read_text())["dev"]
    cut = 0
    for row, doc in zip(rows, in_order(tasks, "hellaswag"), strict=True):
        assert " ".join(filter(None, (doc["ctx_a"], doc["ctx_b"]))) == row["question"] == doc["ctx"]
        assert doc["endings"] == list(row["choices"].values()) and "ABCD"[int(doc["label"])] == row["answer"]
        wikihow = "[header]" in row["question"]
        assert not (wikihow and doc["ctx_b"]) and doc["ctx_b"][:1].islower() == bool(doc["ctx_b"])
        cut += bool(doc["ctx_b"])
    assert cut == 365, "all that are not from WikiHow but one, which ends with a quotation"


@pytest.mark.parametrize("name", [*RECIPES, "mmlu_anatomy"])
def test_first_rows_give_sensible_requests(name, found):
    task, kinds = found["tasks"][name], set()
    for shots in (0, 2):
        asked = requests(task, shots)
        assert len({one.doc_id for one in task.instances}) == 3
        for (kind, arguments, target), one in zip(asked, task.instances, strict=True):
            kinds.add(kind)
            context, *rest = arguments
            if kind == "loglikelihood":
                assert context == context.rstrip() and rest[0].startswith(" ") and rest[0].strip()
                assert len(context.split()) >= (2 if not shots else 6)
            elif kind == "generate_until":
                assert context.startswith("Question: ") and context.endswith("\nAnswer:")
                assert context.count("#### ") == shots and rest[0]["until"][0] == "Question:"
                assert "#### " in target
            assert re.fullmatch(r"[a-z_0-9-]+\.\w+:\d+", one.doc["kvlab_row"])
    assert len(kinds) == 1


def test_the_right_choice_is_right(found):
    """By what the raw files say, through lm-eval's own scoring of a model that knows it."""
    for name in (
        "copa",
        "piqa",
        "boolq",
        "cb",
        "rte",
        "openbookqa",
        "arc_easy",
        "winogrande",
        "hellaswag",
        "mathqa",
        "mmlu_anatomy",
    ):
        task = found["tasks"][name]
        for doc in task.eval_docs.select(range(20)):
            choices = task.doc_to_choice(doc)
            number = task.doc_to_text(doc) if name == "winogrande" else task.doc_to_target(doc)
            right = choices.index(number) if isinstance(number, str) and number in choices else int(number)
            scores = [(-1.0 - (n != right), False) for n in range(len(choices))]
            assert task.process_results(doc, scores).get("acc") in (1.0, (right, right)), name
            assert right == raw_gold(name, doc["kvlab_row"])


def raw_gold(name, place):
    """Number of the right choice, from the raw file."""
    file, number = place.split(":")
    row = int(number) - 1
    if name == "piqa":
        return int((FOLDER / "piqa/valid-labels.lst").read_text().split()[row])
    if name == "hellaswag":
        return "ABCD".index(json.loads((FOLDER / "hellaswag/hellaswag.json").read_text())["dev"][row]["answer"])
    if name == "mmlu_anatomy":
        with zipfile.ZipFile(FOLDER / "mmlu/mmlu.zip") as archive:
            text = archive.read(f"data/test/{file}").decode()
        return "ABCD".index(list(csv.reader(io.StringIO(text)))[row][5])
    if file.endswith(".jsonl"):
        label = lines(f"superglue_{name}/{file}")[row]["label"]
        named = {"cb": ["entailment", "contradiction", "neutral"], "rte": ["entailment", "not_entailment"]}.get(name)
        return named.index(label) if named else int(label)
    answer = json.loads((ADAPTERS / file).read_text())[row]["answer"]
    return "ABCDE".index(answer) if answer in "ABCDE" else int(answer[-1]) - 1
