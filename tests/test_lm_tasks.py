"""lm-eval's tasks on local files: what is made of raw rows, bad rows, and that requests are those of lm-eval's own task."""

import csv
import io
import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvlab.evals.harness.local_tasks import known_tasks, local_tasks, mmlu_groups, own_tasks
from kvlab.settings import SettingError
from lm_local import held, index, loaded, own_task, requests, without_place

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
    """One task: the n-th raw row, and the row that the hub would hold.

    shots  file that examples are from; none: the last rows are kept apart. Its rows are numbered from 100
    write  raw rows to the text of a file; bad: raw rows that can't be used, and what is said of each
    """

    file: str
    split: str
    raw: Callable
    hub: Callable
    shots: str | None = None
    bad: list = field(default_factory=list)
    write: Callable = lambda rows: "".join(json.dumps(row) + "\n" for row in rows)  # noqa: E731

    def rows(self, count=6):
        """Raw rows that are scored or kept apart."""
        return [self.raw(n) for n in range(count)]

    def wanted(self, count=6, shots=3):
        """Rows of the hub that are scored, and those that are examples."""
        apart = 0 if self.shots else max(1, count // 5)
        examples = range(100, 100 + shots) if self.shots else range(count - apart, count)
        return [self.hub(n) for n in range(count - apart)], [self.hub(n) for n in examples]


def as_list(rows):
    return json.dumps(rows, indent=4)


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


def question(n):
    """Four choices, three, and five with a colon and a line break."""
    return [
        (f"Where do {n} fish live?", ["in water", "on the moon", "in trees", "in stoves"], 1),
        (f"What melts in {n} days?", ["a stone", "snow in spring", "sand"], 2),
        (f"Which is a tool?\nLook {n} times.", ["a hammer", "rain", "joy", "fog", "a hammer: small Answer"], 5),
    ][n % 3]


BAD_QUESTIONS = [
    ({"instruction": "Where?", "answer": "answer1"}, "the instruction must be"),
    ({"answer": "answer1"}, "the field 'instruction' is missing"),
    (asked("Where?", ["a", "b"], 3), "answer='answer3' isn't among the choices"),
    (asked("Where?", ["a", "b"], 1, "answer1/answer2/answer3"), "as many as its 'Answer format'"),
    (asked("Where?", ["a"], 1), "two choices or more"),
    (asked("Where?", ["a", " ", "c"], 1), "a choice without text"),
    ({**asked("Where?", ["a", "b"], 1), "answer": None}, "the field 'answer' is missing"),
]


def rte(n):
    label = ["not_entailment", "entailment"][n % 2]
    return {"premise": f"Ann sings {n} songs.", "hypothesis": f"Ann is quiet {n} times.", "label": label, "idx": n}


def cb(n):
    return {**rte(n), "label": ["contradiction", "entailment", "neutral"][n % 3]}


def copa(n):
    texts = {"premise": f"The {n} cups fell.", "choice1": "It broke.", "choice2": "It sang."}
    return {**texts, "question": ["effect", "cause"][n // 2 % 2], "label": n % 2, "idx": n}


def boolq(n):
    return {"question": f"is tea {n} a drink", "passage": f"Tea -- Tea {n} is a drink.", "idx": n, "label": n % 3 > 0}


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


def wrong(row, **changes):
    return {name: value for name, value in {**row, **changes}.items() if value != "drop"}


def superglue(name, raw, hub, bad):
    return Case(f"superglue_{name}/val.jsonl", "validation", raw, hub, f"superglue_{name}/train.jsonl", bad)


def instructed(name, column="question"):
    test, train = (f"{ADAPTERS}/{name}_{split}.json" for split in ("test", "train"))
    raw, hub = (lambda n: asked(*question(n))), (lambda n: lettered(*question(n), column))
    return Case(test, "test", raw, hub, train, BAD_QUESTIONS, as_list)


def rte_case(*columns):
    bad = [(wrong(rte(0), label="maybe"), "label='maybe' isn't among"), (wrong(rte(0), premise=" "), "'premise' must be text")]
    hub = lambda n: {**dict(zip(columns, rte(n).values(), strict=False)), "label": 1 - n % 2}  # noqa: E731
    return superglue("rte", rte, hub, bad)


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
    return [f"A ) {n} FEEt , B ) 1 , C ) 2 , D ) nonE , E ) 7", f"['A ) {n} : 3', 'B ) 4', 'C ) 5', 'D ) 6', 'E ) 8 : 5']"][
        n % 2
    ]


def blank(n):
    return {"sentence": f"Ann met Bo, but _ was late by {n}.", "option1": "Ann", "option2": "Bo", "answer": str(1 + n % 2)}


def solution(n):
    return {"Problem": f"how far is {n} miles ?", "options": mathqa_options(n).lower(), "correct": "abcde"[n % 5]}


def story(n):
    return {"text": f"In the {n} house lived an old man, and he was called the old\nman of the house"}


def sum_of(n):
    return {"question": f"What is 2 x {n}?", "answer": f"It is <<2*{n}={2 * n}>>.\n#### {2 * n}"}


CASES = {
    "copa": superglue(
        "copa",
        copa,
        copa,
        [
            (wrong(copa(0), label=2), "label=2 isn't among the choices: 0, 1"),
            (wrong(copa(0), label=True), "label=True isn't among"),
            (wrong(copa(0), question="why"), "question='why' isn't among"),
            (wrong(copa(0), choice2="drop"), "the field 'choice2' is missing"),
            (wrong(copa(0), choice2=3), "the field 'choice2' must be text"),
            (wrong(copa(0), premise="\ud83d"), "half a character"),
        ],
    ),
    "rte": rte_case("sentence1", "sentence2"),
    "sglue_rte": rte_case("premise", "hypothesis"),
    "boolq": superglue(
        "boolq", boolq, lambda n: {**boolq(n), "label": int(n % 3 > 0)}, [(wrong(boolq(0), label=1), "label=1 isn't among")]
    ),
    "cb": superglue("cb", cb, lambda n: {**cb(n), "label": [1, 0, 2][n % 3]}, [(rte(0), "label='not_entailment' isn't among")]),
    "piqa": Case(
        "piqa/valid.jsonl",
        "validation",
        piqa_row,
        lambda n: {**piqa_row(n), "label": n % 2},
        bad=[(wrong(piqa_row(1), sol2=""), "'sol2' is missing or empty"), ([1], "no JSON object")],
    ),
    "openbookqa": instructed("openbookqa", "question_stem"),
    "arc_easy": instructed("arc_easy"),
    "arc_challenge": instructed("arc_challenge"),
    "winogrande": Case(
        f"{ADAPTERS}/winogrande_test.json",
        "validation",
        lambda n: filled(blank(n)["sentence"], "Ann", "Bo", 1 + n % 2),
        blank,
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
        "test",
        lambda n: solved(solution(n)["Problem"], mathqa_options(n), "ABCDE"[n % 5]),
        solution,
        bad=[
            (solved("how far ?", "A ) 1 , B ) 2 , C ) 3", "A"), "'A ) ... , B ) ...' to E"),
            ({"instruction": "how far ?", "answer": "A"}, "' The options: '"),
            (solved("how far ?", mathqa_options(0), "F"), "answer='F' isn't among"),
        ],
        write=as_list,
    ),
    "hellaswag": Case(
        "hellaswag/hellaswag.json",
        "validation",
        hella_row,
        hella_hub,
        bad=[
            ({**hella_row(0), "answer": "E"}, "answer='E' isn't among"),
            ({**hella_row(0), "choices": {"A": "x", "B": "y", "C": "z"}}, "four choices"),
            ({**hella_row(0), "question": ""}, "'question' is missing or empty"),
        ],
        write=lambda rows: json.dumps({"dataset": "hellaswag", "dev": rows}),
    ),
    "lambada_openai": Case(
        "lambada/lambada_test.jsonl",
        "test",
        story,
        story,
        bad=[({"text": "word"}, "a space before the last"), ({"text": "two words "}, "none after it")],
    ),
    "gsm8k": Case(
        "gsm8k/test.jsonl", "test", sum_of, sum_of, bad=[({"question": "What?", "answer": "4"}, "'#### ' and a number")]
    ),
}


def fill(folder, name, raw=None, shots=3):
    """Write a task's files; the folder."""
    case = CASES[name]
    raw = case.rows() if raw is None else raw
    files = {case.file: case.write(raw)}
    if case.shots:
        files[case.shots] = case.write([case.raw(100 + n) for n in range(shots)])
    if name == "piqa":
        files["piqa/valid-labels.lst"] = "".join(f"{n % 2}\n" for n in range(len(raw)))
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


# ------------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("name", CASES)
def test_rows_have_the_columns_of_the_hubs_data(name, tmp_path):
    case, tasks = CASES[name], local_tasks(fill(tmp_path, name), [name])
    rows = held(tasks, name)
    assert set(rows) == {case.split, "train"}
    for made, wanted in zip((rows[case.split], rows["train"]), case.wanted(), strict=True):
        if name == "hellaswag":
            wanted = [{**row, "activity_label": "", "ctx": f"{row['ctx_a']} {row['ctx_b']}".rstrip()} for row in wanted]
        assert without_place(made) == [{k: v for k, v in row.items() if k != "idx"} for row in wanted]
    assert [row["kvlab_row"] for row in rows[case.split]][:2] == [f"{Path(case.file).name}:{n}" for n in (1, 2)]
    assert rows["train"][0]["kvlab_row"] == (f"{Path(case.shots).name}:1" if case.shots else f"{Path(case.file).name}:6")
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
        folder = fill(tmp_path / str(number), name, [case.raw(0), row, *case.rows()[1:]])
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
    path.write_text(path.read_text() + "{]\n" + json.dumps(wrong(copa(0), label=7)))
    tasks = local_tasks(tmp_path, ["copa"])
    assert [line.split(": ")[0] for line in tasks.left_out] == [f"{path}, row {n}" for n in (4, 5)]
    assert len(held(tasks, "copa")["train"]) == 3


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
        for text, said in (
            ("", "has no rows|no JSON"),
            ("[]", "has no rows|no JSON|must be as many"),
            (None, "there is no such file"),
        ):
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
    with pytest.raises(SettingError, match="mmlu.zip holds no file test/abstract_algebra_test.csv"):
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
    other = local_tasks(fill(tmp_path / "b", "copa", [copa(1), copa(0)]), ["copa"])
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
    fill(tmp_path, "copa", [copa(0)])
    with pytest.raises(KeyboardInterrupt):
        local_tasks(tmp_path, ["copa"])
    monkeypatch.undo()
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(cache))
    assert len(held(local_tasks(tmp_path, ["copa"]), "copa")["validation"]) == 1


# ------------------------------------------------------------------------------------------------------- through lm-eval


@pytest.mark.parametrize("name", CASES)
def test_requests_are_those_of_lm_evals_own_task(name, tmp_path):
    case = CASES[name]
    scored, shots = case.wanted(30, 6)
    own = own_task(name, {case.split: scored, "train": shots})
    tasks = local_tasks(fill(tmp_path, name, case.rows(30), 6), [name])
    task = loaded(tasks)["tasks"][name]
    assert task.config.metric_list == own.config.metric_list and task.OUTPUT_TYPE == own.OUTPUT_TYPE
    assert task.aggregation().keys() == own.aggregation().keys()
    for wanted in (0,) if name == "lambada_openai" else (0, 2):  # whose examples lm-eval takes from what is scored
        mine, theirs = requests(task, wanted), requests(own, wanted)
        if name == "hellaswag":
            theirs = [(kind, (text.replace("Cooking: ", ""), choice), target) for kind, (text, choice), target in theirs]
            assert " He', ' A takes 0.'" in repr(mine[0])
        assert mine and mine == theirs
        assert {len(one[1]) for one in mine} == {2}
    few = requests(task, 2)
    assert few[0][1][0].endswith(requests(task, 0)[0][1][0]) and len(few) == len(requests(task, 0))


def test_answers_of_gsm8k_are_graded_without_the_hub(tmp_path):
    task = loaded(local_tasks(fill(tmp_path, "gsm8k"), ["gsm8k"]))["tasks"]["gsm8k"]
    requests(task, 0)
    for one, output in zip(task.instances, ["So #### 0", "It is 2.", "#### 5"], strict=True):
        one.resps = [output]
    task.apply_filters()
    for name, right in (("strict-match", [1, 0, 0]), ("flexible-extract", [1, 1, 0])):
        values = [task.process_results(one.doc, [one.filtered_resps[name]]) for one in task.instances]
        assert [value["exact_match"] for value in values] == right


def test_mmlu_through_lm_eval(tmp_path):
    rows = [(f"{question} {n}", *rest) for n in range(4) for question, *rest in MMLU_COLUMNS]
    tasks = local_tasks(mmlu_folder(tmp_path, rows, rows[5:]), ["mmlu_stem", "mmlu_virology"])
    found = loaded(tasks)
    assert set(found["groups"]) == {"mmlu_stem"} and len(found["tasks"]) == 20
    assert set(found["group_map"]["mmlu_stem"]) == set(mmlu_groups()["mmlu_stem"])
    docs = [{**mmlu_doc(*row), "subject": "virology"} for row in rows]
    own = own_task("mmlu_virology", {"test": docs, "dev": docs[5:]})
    for wanted in (0, 2):
        assert requests(found["tasks"]["mmlu_virology"], wanted) == requests(own, wanted)
    first = requests(found["tasks"]["mmlu_virology"], 2)[1]
    assert first[1][1] == " B" and first[1][0].count("Answer: ") == 2 and first[1][0].endswith("\nAnswer:")


def test_articles_through_lm_eval(tmp_path):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2/test.txt").write_text(ARTICLES)
    tasks = local_tasks(tmp_path, ["wikitext"])
    pages = [{"page": row["page"]} for row in held(tasks, "wikitext")["test"]]
    own = own_task("wikitext", {"test": pages, "train": pages, "validation": pages})
    task = loaded(tasks)["tasks"]["wikitext"]
    assert requests(task, 0) == requests(own, 0)
    assert requests(task, 0)[1][1] == (" = x =\nLooks like a title .\n",), "lm-eval takes out some spaces, and not all"
    doc = task.eval_docs[0]
    assert task.process_results(doc, [(-3.0)]) == own.process_results(pages[0], [(-3.0)])


def test_lm_evals_defaults_are_replaced(tmp_path):
    """Tags of lm-eval keep their other tasks, and groups that name a task find the local one."""
    tasks = local_tasks(fill(fill(tmp_path, "copa"), "boolq"), ["copa", "boolq"])
    found = index([own_tasks() / "super_glue", tasks.folder])
    assert found["copa"].yaml_path == tasks.folder / "copa.yaml"
    assert found["super-glue-lm-eval-v1"].tags >= {"copa", "boolq", "cb", "sglue_rte"}
