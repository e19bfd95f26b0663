"""lm-eval's tasks on local files: what is made of raw rows, bad rows, and that requests are those of lm-eval's own task."""

import csv
import io
import json
import os
import re
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from kvlab.evals.lm_recipes import RECIPES
from kvlab.evals.lm_tasks import known_tasks, local_tasks, mmlu_groups, own_tasks
from kvlab.paths import data_dir
from kvlab.settings import SettingError

REAL = pytest.mark.skipif(not os.environ.get("KVLAB_DATA_DIR"), reason="KVLAB_DATA_DIR isn't set: no real data")
ADAPTERS = "llm_adapters_commonsense"
ASKS = "Please choose the correct answer to the question: "
FILLS = "Please choose the correct answer to fill in the blank to complete the given sentence: "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --------------------------------------------------------------------------------------------------- files made up here


@dataclass
class Case:
    """One task: raw rows that are scored, rows for examples (none: the last are kept apart), and what the hub would hold.

    write  raw rows to the text of a file; bad: raw rows that can't be used, and what is said of each
    """

    file: str
    raw: list
    hub: list
    split: str
    shots_file: str | None = None
    shots_raw: list = field(default_factory=list)
    shots_hub: list = field(default_factory=list)
    bad: list = field(default_factory=list)
    write: object = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)  # noqa: E731
    name: str = ""


def as_list(rows):
    return json.dumps(rows, indent=4)


def fives(make):
    """Six rows, of which the last is kept apart."""
    return [make(number) for number in range(6)]


def asked(question, choices, right, shape=None):
    listed = " ".join(f"Answer{n}: {choice}" for n, choice in enumerate(choices, 1))
    shape = shape or "/".join(f"answer{n}" for n in range(1, len(choices) + 1))
    answer = f"answer{right}"
    return {"instruction": f"{ASKS}{question}\n\n{listed}\n\nAnswer format: {shape}", "input": "", "answer": answer}


def lettered(question, choices, right, column="question"):
    letters = list("ABCDE"[: len(choices)])
    return {column: question, "choices": {"text": choices, "label": letters}, "answerKey": letters[right - 1]}


def filled(sentence, one, two, right):
    text = f"{FILLS}{sentence}\n\nOption1: {one} Option2: {two} Answer format: option1/option2"
    return {"instruction": text, "input": "", "answer": f"option{right}"}


def solved(problem, options, answer):
    return {"instruction": f"{problem} The options: {options}", "answer": answer}


QUESTIONS = [
    ("Where do fish live?", ["in water", "on the moon", "in trees", "in stoves"], 1),
    ("What melts?", ["a stone", "snow in spring", "sand"], 2),
    ("Which is a tool?\nLook twice.", ["a hammer", "rain", "joy", "fog", "a hammer: small Answer"], 5),
]
BAD_QUESTIONS = [
    ({"instruction": "Where?", "answer": "answer1"}, "the instruction must be"),
    ({"answer": "answer1"}, "the field 'instruction' is missing"),
    (asked("Where?", ["a", "b"], 3), "answer='answer3' isn't among the choices"),
    (asked("Where?", ["a", "b"], 1, "answer1/answer2/answer3"), "as many as its 'Answer format'"),
    (asked("Where?", ["a"], 1), "two choices or more"),
    (asked("Where?", ["a", " ", "c"], 1), "a choice without text"),
    ({**asked("Where?", ["a", "b"], 1), "answer": None}, "the field 'answer' is missing"),
]
RTE = [
    {"premise": "Ann sings.", "hypothesis": "Ann is quiet.", "label": "not_entailment", "idx": 0},
    {"premise": "Bo ran home.", "hypothesis": "Bo ran.", "label": "entailment", "idx": 1},
]
COPA = [
    {"premise": "The cup fell.", "choice1": "It broke.", "choice2": "It sang.", "question": "effect", "label": 0, "idx": 4},
    {"premise": "The floor was wet.", "choice1": "He slept.", "choice2": "It rained.", "question": "cause", "label": 1},
]
BOOLQ = [
    {"question": "is tea a drink", "passage": "Tea -- Tea is a drink.", "idx": 0, "label": True},
    {"question": "is tea a metal", "passage": "Tea -- Tea is a drink.", "idx": 1, "label": False},
]
MMLU_COLUMNS = [("Two and two is", "3", "4", "5", "6", "B"), (' A "quoted", one\nof two lines', "NA", "007", "x", "y", "A")]
ARTICLES = """
 = First title =

 Some words stand here . And more =

 = = A section = =

 Text of it .

 = = = Deeper = = =

 = x =
 Looks like a title .

 = Second = title =

 Its text , at last .
"""


def mmlu_zip(rows, shots):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for subject in (task.removeprefix("mmlu_") for tasks in mmlu_groups().values() for task in tasks):
            for split, those in (("test", rows), ("dev", shots), ("val", rows)):
                text = io.StringIO(newline="")
                csv.writer(text).writerows(those)
                archive.writestr(f"data/{split}/{subject}_{split}.csv", text.getvalue())
        archive.writestr("data/README.txt", "none")
    return held.getvalue()


def mmlu_doc(question, a, b, c, d, answer):
    return {"question": question, "subject": "anatomy", "choices": [a, b, c, d], "answer": "ABCD".index(answer)}


def numbered(rows, names):
    return [{**row, "label": names.index(row["label"])} for row in rows]


def wrong(row, **changes):
    return {name: value for name, value in {**row, **changes}.items() if value != "drop"}


def superglue(name, rows, hub, bad):
    case = Case(f"superglue_{name}/val.jsonl", rows, hub, "validation", f"superglue_{name}/train.jsonl", rows[::-1], hub[::-1])
    case.bad = bad
    return case


def instructed(name, column="question"):
    raw = [asked(*question) for question in QUESTIONS]
    hub = [lettered(*question, column) for question in QUESTIONS]
    test, train = (f"{ADAPTERS}/{name}_{split}.json" for split in ("test", "train"))
    return Case(test, raw, hub, "test", train, raw[::-1], hub[::-1], BAD_QUESTIONS, as_list)


def rte_case(**columns):
    hub = numbered(RTE, ["entailment", "not_entailment"])
    hub = [{columns.get(name, name): value for name, value in row.items()} for row in hub]
    bad = [(wrong(RTE[0], label="maybe"), "label='maybe' isn't among"), (wrong(RTE[0], premise=" "), "'premise' must be text")]
    return superglue("rte", RTE, hub, bad)


def piqa_row(n):
    return {"goal": f"carry {n} cups", "sol1": f"use tray {n}", "sol2": f"throw them {n} "}


def hella_row(n):
    context = [f"A man takes {n} eggs. he", "[header] How to sit [title] Find a chair. [step] Look for one with legs."][n % 2]
    return {"question": context, "choices": {k: f"{k} takes [x] {n}." for k in "ABCD"}, "answer": "ABCD"[n % 4], "id": n}


def hella_hub(n):
    start, rest = (f"A man takes {n} eggs.", "he") if n % 2 == 0 else (hella_row(n)["question"], "")
    endings = [f"{k} takes [x] {n}." for k in "ABCD"]
    return {"activity_label": "Cooking", "ctx_a": start, "ctx_b": rest, "endings": endings, "label": str(n % 4)}


def mathqa_options(n):
    return [f"A ) {n} FEEt , B ) 1 , C ) 2 , D ) nonE , E ) 7", f"['A ) {n} : 3', 'B ) 4', 'C ) 5', 'D ) 6', 'E ) 8 : 5']"][n % 2]


CASES = {
    "copa": superglue(
        "copa",
        COPA,
        COPA,
        [
            (wrong(COPA[0], label=2), "label=2 isn't among the choices: 0, 1"),
            (wrong(COPA[0], label=True), "label=True isn't among"),
            (wrong(COPA[0], question="why"), "question='why' isn't among"),
            (wrong(COPA[0], choice2="drop"), "the field 'choice2' is missing"),
            (wrong(COPA[0], choice2=3), "the field 'choice2' must be text"),
            (wrong(COPA[0], premise="\ud83d"), "half a character"),
        ],
    ),
    "rte": rte_case(premise="sentence1", hypothesis="sentence2"),
    "sglue_rte": rte_case(),
    "boolq": superglue(
        "boolq", BOOLQ, [{**row, "label": int(row["label"])} for row in BOOLQ], [(wrong(BOOLQ[0], label=1), "label=1 isn't among")]
    ),
    "cb": superglue(
        "cb",
        [{**RTE[0], "label": "contradiction"}, {**RTE[1], "label": "neutral"}],
        [{**RTE[0], "label": 1}, {**RTE[1], "label": 2}],
        [(RTE[0], "label='not_entailment' isn't among")],
    ),
    "piqa": Case(
        "piqa/valid.jsonl",
        fives(piqa_row),
        fives(lambda n: {**piqa_row(n), "label": n % 2}),
        "validation",
        bad=[(wrong(piqa_row(1), sol2=""), "'sol2' is missing or empty"), ([1], "no JSON object")],
    ),
    "openbookqa": instructed("openbookqa", "question_stem"),
    "arc_easy": instructed("arc_easy"),
    "arc_challenge": instructed("arc_challenge"),
    "winogrande": Case(
        f"{ADAPTERS}/winogrande_test.json",
        fives(lambda n: filled(f"Ann met Bo, but _ was late by {n}.", "Ann", "Bo", 1 + n % 2)),
        fives(
            lambda n: {
                "sentence": f"Ann met Bo, but _ was late by {n}.",
                "option1": "Ann",
                "option2": "Bo",
                "answer": str(1 + n % 2),
            }
        ),
        "validation",
        bad=[
            (filled("Nobody was late.", "Ann", "Bo", 1), "one blank _"),
            (filled("_ saw _.", "Ann", "Bo", 1), "one blank _"),
            (filled("_ ran.", " ", "Bo", 1), "an option without text"),
            (filled("_ ran.", "Ann", "Bo", 3), "answer='option3' isn't among"),
        ],
        write=as_list,
    ),
    "mathqa": Case(
        f"{ADAPTERS}/mathqa_test.json",
        fives(lambda n: solved(f"how far is {n} miles ?", mathqa_options(n), "ABCDE"[n % 5])),
        fives(
            lambda n: {
                "Problem": f"how far is {n} miles ?",
                "options": mathqa_options(n).lower(),
                "correct": "abcde"[n % 5],
            }
        ),
        "test",
        bad=[
            (solved("how far ?", "A ) 1 , B ) 2 , C ) 3", "A"), "'A ) ... , B ) ...' to E"),
            ({"instruction": "how far ?", "answer": "A"}, "' The options: '"),
            (solved("how far ?", mathqa_options(0), "F"), "answer='F' isn't among"),
        ],
        write=as_list,
    ),
    "hellaswag": Case(
        "hellaswag/hellaswag.json",
        fives(hella_row),
        fives(hella_hub),
        "validation",
        bad=[
            ({**hella_row(0), "answer": "E"}, "answer='E' isn't among"),
            ({**hella_row(0), "choices": {"A": "x", "B": "y", "C": "z"}}, "four choices"),
            ({**hella_row(0), "question": ""}, "'question' is missing or empty"),
        ],
        write=lambda rows: json.dumps({"dataset": "hellaswag", "dev": rows}),
    ),
    "lambada_openai": Case(
        "lambada/lambada_test.jsonl",
        fives(lambda n: {"text": f"In the {n} house lived an old man, and he was called the old\nman of the house"}),
        fives(lambda n: {"text": f"In the {n} house lived an old man, and he was called the old\nman of the house"}),
        "test",
        bad=[({"text": "word"}, "a space before the last"), ({"text": "two words "}, "none after it")],
    ),
    "gsm8k": Case(
        "gsm8k/test.jsonl",
        fives(lambda n: {"question": f"What is 2 x {n}?", "answer": f"It is <<2*{n}={2 * n}>>.\n#### {2 * n}"}),
        fives(lambda n: {"question": f"What is 2 x {n}?", "answer": f"It is <<2*{n}={2 * n}>>.\n#### {2 * n}"}),
        "test",
        bad=[({"question": "What?", "answer": "4"}, "'#### ' and a number")],
    ),
}


def fill(folder, name, raw=None):
    """Write a task's files; the folder."""
    case = CASES[name]
    raw = case.raw if raw is None else raw
    files = {case.file: case.write(raw)}
    if case.shots_file:
        files[case.shots_file] = case.write(case.shots_raw)
    if name == "piqa":
        files["piqa/valid-labels.lst"] = "".join(f"{n % 2}\n" for n in range(len(raw)))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def held(tasks, name):
    """Rows of a generated task by split."""
    config = yaml.safe_load((tasks.folder / f"{name}.yaml").read_text())
    files = config["dataset_kwargs"]["data_files"]
    return {split: [json.loads(line) for line in Path(path).read_text().split("\n")[:-1]] for split, path in files.items()}


def without_place(rows):
    return [{name: value for name, value in row.items() if name != "kvlab_row"} for row in rows]


# ------------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_columns_of_the_hubs_data(name, tmp_path):
    case, tasks = CASES[name], local_tasks(fill(tmp_path, name), [name])
    rows = held(tasks, name)
    if case.shots_file:
        scored, shots, first = case.hub, case.shots_hub, f"{Path(case.shots_file).name}:1"
    else:
        scored, shots, first = case.hub[:-1], case.hub[-1:], f"{Path(case.file).name}:6"
    for made, wanted in ((rows[case.split], scored), (rows["train"], shots)):
        if name == "hellaswag":
            wanted = [{**row, "activity_label": "", "ctx": f"{row['ctx_a']} {row['ctx_b']}".rstrip()} for row in wanted]
        assert without_place(made) == [{k: v for k, v in row.items() if k != "idx"} for row in wanted]
    assert [row["kvlab_row"] for row in rows[case.split]][:2] == [f"{Path(case.file).name}:{n}" for n in (1, 2)]
    assert rows["train"][0]["kvlab_row"] == first
    assert tasks.names == (name,) and tasks.left_out == ()


def test_articles_are_cut_at_their_titles(tmp_path):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2/test.txt").write_text(ARTICLES)
    rows = held(local_tasks(tmp_path, ["wikitext"]), "wikitext")
    assert list(rows) == ["test"] and [row["kvlab_row"] for row in rows["test"]] == ["test.txt:2", "test.txt:12", "test.txt:15"]
    assert "\n" + "\n".join(row["page"] for row in rows["test"]) == ARTICLES
    assert rows["test"][0]["page"].startswith(" = First title =\n") and "Deeper" in rows["test"][0]["page"]
    (tmp_path / "wikitext2/test.txt").write_text(" = Title =\n\n = Other =\n Text .\n")
    tasks = local_tasks(tmp_path, ["wikitext"])
    assert len(tasks.left_out) == 1 and "test.txt, row 1: an article without text" in tasks.left_out[0]
    (tmp_path / "wikitext2/test.txt").write_text("Text .\n")
    with pytest.raises(SettingError, match="test.txt has no titles"):
        local_tasks(tmp_path, ["wikitext"])


def mmlu_folder(folder, rows=MMLU_COLUMNS, shots=MMLU_COLUMNS[::-1]):
    (folder / "mmlu").mkdir(parents=True)
    (folder / "mmlu/mmlu.zip").write_bytes(mmlu_zip(rows, shots))
    return folder


def test_mmlu_is_made_of_its_subjects(tmp_path):
    tasks = local_tasks(mmlu_folder(tmp_path), ["mmlu"])
    written = {path.name for path in tasks.folder.iterdir()}
    assert len(written) == 57 + 4 + 1 and {"_mmlu.yaml", "_mmlu_stem.yaml", "mmlu_anatomy.yaml"} <= written
    rows = held(tasks, "mmlu_anatomy")
    assert without_place(rows["test"]) == [mmlu_doc(*row) for row in MMLU_COLUMNS]
    assert without_place(rows["dev"]) == [mmlu_doc(*row) for row in MMLU_COLUMNS[::-1]]
    assert rows["test"][1]["kvlab_row"] == "anatomy_test.csv:2"
    one = local_tasks(tmp_path, ["mmlu_anatomy"])
    assert [path.name for path in one.folder.iterdir()] == ["mmlu_anatomy.yaml"] and one.hash != tasks.hash
    stem = local_tasks(tmp_path, ["mmlu_stem", "mmlu_virology"])
    assert len(list(stem.folder.iterdir())) == 19 + 1 + 1 and stem.names == ("mmlu_stem", "mmlu_virology")


def test_bad_rows_of_mmlu_are_named(tmp_path):
    rows = [*MMLU_COLUMNS, ("Which?", "1", "2", "3", "4", "E"), ("Which?", "1", "2"), ("Which?", "1", "", "3", "4", "A")]
    left_out = local_tasks(mmlu_folder(tmp_path, rows), ["mmlu_anatomy"]).left_out
    said = ["row 3: answer='E' isn't among", "row 4: 3 cells, not 6", "row 5: the field 'B' is missing or empty"]
    place = "mmlu.zip/data/test/anatomy_test.csv, "
    assert len(left_out) == 3 and all(place + text in line for text, line in zip(said, sorted(left_out), strict=False))


@pytest.mark.parametrize("name", CASES)
def test_bad_rows_are_left_out_and_named_or_stop(name, tmp_path):
    case = CASES[name]
    good = held(local_tasks(fill(tmp_path / "good", name), [name]), name)[case.split]
    assert case.bad
    for number, (row, said) in enumerate(case.bad):
        folder = fill(tmp_path / str(number), name, [case.raw[0], row, *case.raw[1:]])
        tasks = local_tasks(folder, [name])
        (line,) = tasks.left_out
        assert line.startswith(f"{folder / case.file}, row 2: ") and said in line and "\n" not in line
        rows = held(tasks, name)[case.split]
        assert [r["kvlab_row"].split(":")[1] for r in rows] == ["1", *(str(n) for n in range(3, len(rows) + 2))]
        if name != "piqa":  # whose labels stand by number
            assert without_place(rows) == without_place(good)
        with pytest.raises(SettingError, match=re.escape(f"{folder / case.file}, row 2: ")):
            local_tasks(folder, [name], bad_rows="stop")


def test_bad_examples_are_named_too(tmp_path):
    fill(tmp_path, "copa")
    path = tmp_path / "superglue_copa/train.jsonl"
    path.write_text(path.read_text() + "{]\n" + json.dumps(wrong(COPA[0], label=7)))
    tasks = local_tasks(tmp_path, ["copa"])
    assert [line.split(": ")[0] for line in tasks.left_out] == [f"{path}, row {n}" for n in (3, 4)]
    assert len(held(tasks, "copa")["train"]) == 2


def test_the_last_rows_are_kept_apart(tmp_path):
    for count, apart in ((2, 1), (9, 1), (10, 2), (499, 99), (500, 100), (700, 100)):
        rows = [{"text": f"word number {n}"} for n in range(count)]
        folder = fill(tmp_path / str(count), "lambada_openai", rows)
        splits = held(local_tasks(folder, ["lambada"]), "lambada_openai")
        assert [len(splits["test"]), len(splits["train"])] == [count - apart, apart]
        assert without_place(splits["test"] + splits["train"]) == rows
    with pytest.raises(SettingError, match="lambada_openai in .* has one row"):
        local_tasks(fill(tmp_path / "1", "lambada_openai", [{"text": "two words"}]), ["lambada"])


# ------------------------------------------------------------------------------------------------- names, files, caches


def test_names(tmp_path):
    fill(fill(fill(tmp_path, "lambada_openai"), "copa"), "rte")
    tasks = local_tasks(tmp_path, ["sglue_rte", "lambada", "copa", "rte"])
    assert tasks.names == ("sglue_rte", "lambada_openai", "copa", "rte")
    wrong_names = {
        ("copy",): r"no local data for a task 'copy' \(did you mean copa\?\); there is for: copa, .*mmlu_<subject>",
        ("mmlu_anatomi",): "did you mean mmlu_anatomy",
        (): "task.tasks is empty",
        ("copa", "copa"): "names copa twice: leave one out",
        ("lambada", "lambada_openai"): "names lambada_openai twice",
        ("mmlu", "mmlu_anatomy"): "names mmlu_anatomy twice .it is in mmlu and in mmlu_anatomy.",
        ("mmlu_stem", "mmlu"): "twice .it is in mmlu_stem and in mmlu.",
    }
    for names, said in wrong_names.items():
        with pytest.raises(SettingError, match=said) as problem:
            local_tasks(tmp_path, names)
        assert "\n" not in str(problem.value)
    assert {"mmlu", "mmlu_stem", "mmlu_anatomy", "lambada", "gsm8k"} <= set(known_tasks()) and len(known_tasks()) == 78


def test_files_that_are_not_there_or_hold_nothing(tmp_path):
    with pytest.raises(SettingError, match="task.data_dir=.*none: there is no such folder"):
        local_tasks(tmp_path / "none", ["copa"])
    for name, case in CASES.items():
        folder = fill(tmp_path / name, name)
        for text, said in (("", "has no rows|no JSON"), ("[]", "has no rows|no JSON|must be as many"), (None, "there is no such file")):
            (folder / case.file).unlink() if text is None else (folder / case.file).write_text(text)
            with pytest.raises(SettingError, match=said) as problem:
                local_tasks(folder, [name])
            assert str(folder / case.file) in str(problem.value)
    fill(tmp_path, "piqa")
    (tmp_path / "piqa/valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(SettingError, match="valid-labels.lst has 2 labels, .*valid.jsonl 6 rows"):
        local_tasks(tmp_path, ["piqa"])
    (tmp_path / "piqa/valid-labels.lst").write_text("0\n1\n2\n1\n0\n1\n")
    assert "valid.jsonl, row 3: label='2' isn't among" in local_tasks(tmp_path, ["piqa"]).left_out[0]
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu/mmlu.zip").write_text("no zip")
    with pytest.raises(SettingError, match="mmlu.zip, .*can't be read"):
        local_tasks(tmp_path, ["mmlu_anatomy"])
    with zipfile.ZipFile(tmp_path / "mmlu/mmlu.zip", "w") as archive:
        archive.writestr("data/test/virology_test.csv", "a,b")
    with pytest.raises(SettingError, match="mmlu.zip holds no file test/anatomy_test.csv"):
        local_tasks(tmp_path, ["mmlu"])


def test_lm_eval_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip install 'kvlab.evals.'"):
        local_tasks(fill(tmp_path, "copa"), ["copa"])


def test_the_hash_is_of_the_rows_and_files_are_written_once(tmp_path, cache):
    first = local_tasks(fill(tmp_path / "a", "copa"), ["copa"])
    moved = local_tasks(fill(tmp_path / "b", "copa"), ["copa"])
    assert moved == first, "the same rows elsewhere are the same data"
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*.*")}
    assert not [path for path in files if path.suffix == ".part"]
    local_tasks(tmp_path / "a", ["copa"])
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.*")} == files
    other = local_tasks(fill(tmp_path / "b", "copa", COPA[::-1]), ["copa"])
    assert other.hash != first.hash and other.folder != first.folder
    assert first.folder.is_dir(), "tasks of other rows stay"
    both = local_tasks(fill(tmp_path / "a", "cb"), ["copa", "cb"])
    assert both.hash == local_tasks(tmp_path / "a", ["cb", "copa"]).hash != first.hash


def test_what_an_interruption_left_is_made_again(tmp_path, cache, monkeypatch):
    whole = local_tasks(fill(tmp_path, "copa"), ["copa"])
    texts = {path: path.read_bytes() for path in cache.rglob("*.*")}
    for path in texts:
        for left in (None, b"half"):
            path.unlink() if left is None else path.write_bytes(left)
            assert local_tasks(tmp_path, ["copa"]) == whole
            assert {path: path.read_bytes() for path in cache.rglob("*.*")} == texts
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    fill(tmp_path, "copa", COPA[:1])
    with pytest.raises(KeyboardInterrupt):
        local_tasks(tmp_path, ["copa"])
    monkeypatch.undo()
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(cache))
    assert len(held(local_tasks(tmp_path, ["copa"]), "copa")["validation"]) == 1


# ------------------------------------------------------------------------------------------------------- through lm-eval


@pytest.fixture(scope="session")
def lm_eval_parts():
    """What takes seconds to import."""
    pytest.importorskip("lm_eval", reason="lm-eval isn't installed")
    from datasets import Dataset, disable_progress_bars
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    disable_progress_bars()
    return Dataset, ConfigurableTask, TaskManager, load_yaml


def loaded(parts, tasks):
    return parts[2](include_path=str(tasks.folder), include_defaults=False).load(list(tasks.names))


def requests(task, shots):
    """What a model is asked: kind and arguments of each request, and the document's target."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=3)
    return [(one.request_type, one.arguments, task.doc_to_target(one.doc)) for one in task.instances]


def own_file(name):
    folder = own_tasks() / (RECIPES[name].folder if name in RECIPES else "mmlu/default")
    return next(path for path in folder.glob("*.yaml") if re.search(rf'^"?task"?: "?{name}"?$', path.read_text(), re.M))


def own_task(parts, name, splits):
    """lm-eval's task as it is, on documents of the hub's shape in memory."""
    there = {split: parts[0].from_list(rows) for split, rows in splits.items()}
    return parts[1](config={**parts[3](own_file(name)), "custom_dataset": lambda **_: there})


@pytest.mark.parametrize("name", CASES)
def test_requests_are_those_of_lm_evals_own_task(name, tmp_path, lm_eval_parts):
    case = CASES[name]
    scored, shots = (case.hub, case.shots_hub) if case.shots_file else (case.hub[:-1], case.hub[-1:])
    few = 2 if len(shots) > 1 else 1
    scored, shots = (scored, shots) if few < len(shots) or few == 1 else (scored, shots)
    own = own_task(lm_eval_parts, name, {case.split: scored, "train": shots * 3})
    raw_shots, case_shots = list(case.shots_raw), case.shots_raw
    try:
        case.shots_raw = raw_shots * 3
        raw = case.raw if case.shots_file else case.raw[:-1] * 4 + case.raw[-1:] * 4
        task = loaded(lm_eval_parts, local_tasks(fill(tmp_path, name, raw), [name]))["tasks"][name]
    finally:
        case.shots_raw = case_shots
    assert set(task.config.metric_list[0]) == set(own.config.metric_list[0])
    assert task.config.metric_list == own.config.metric_list and task.OUTPUT_TYPE == own.OUTPUT_TYPE
    for shots_wanted in (0,) if name == "lambada_openai" else (0, few):
        mine, theirs = requests(task, shots_wanted), requests(own, shots_wanted)
        if name == "hellaswag":
            theirs = json.loads(json.dumps(theirs).replace("Cooking: ", ""))
            mine = json.loads(json.dumps(mine))
            assert "he" not in [line.split()[-1] for line in mine[0][1][0].split(". ")[-1:]], "begins with a capital"
        assert mine == theirs and mine
        assert all(len(one[1]) == 2 for one in mine)
