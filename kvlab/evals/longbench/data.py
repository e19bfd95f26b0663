"""LongBench's files: where they are, their rows, what can be wrong with one, prompt templates and output lengths.

Rows of all versions have `answers` and, for classification, `all_classes`; MiniLongBench's are brought into that form.
Templates and lengths are the benchmark's own JSON, read from where the data is.
"""

from __future__ import annotations

import ast
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvlab.evals.longbench.metrics import SCORES, paragraph
from kvlab.evals.rows import Row, missing, numbered
from kvlab.hints import did_you_mean
from kvlab.hub import settle_hub
from kvlab.paths import cache_dir, data_dir
from kvlab.settings import SettingError

Version = Literal["v1", "e", "mini", "v2"]
FOLDERS = {"v1": "longbench", "e": "longbench", "mini": "minilongbench", "v2": "longbench_v2"}
"""Folder of each version in a data folder."""
DATASETS = tuple(SCORES)
E_DATASETS = (
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "gov_report",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)
"""Datasets that LongBench-E has."""
LETTERS = ("A", "B", "C", "D")
PARAGRAPHS = {"passage_retrieval_en": "Paragraph ", "passage_retrieval_zh": "段落"}
PROMPTS, LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"
_HUB = {
    "v1": ("THUDM/LongBench", "data.zip"),
    "e": ("THUDM/LongBench", "data.zip"),
    "v2": ("THUDM/LongBench-v2", "data.json"),
}
_V2_FIELDS = ("question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context")


# --------------------------------------------------------------------------------------------------------------- files


def check_dataset(version: Version, name: str) -> None:
    """Raises SettingError for a dataset that a version doesn't have."""
    known = E_DATASETS if version == "e" else DATASETS
    if name not in known:
        raise SettingError(f"task.tasks: there is no dataset {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")


def folder_of(version: Version, given: str | None) -> Path | None:
    """The folder of a version's files: in `task.data_dir`, or that itself; None where nothing says. Raises SettingError."""
    if given is not None and not Path(given).expanduser().is_dir():
        raise SettingError(f"task.data_dir={given}: there is no such folder")
    base = Path(given).expanduser() if given is not None else data_dir()
    if base is None:
        return None
    inner = base / FOLDERS[version]
    return inner if inner.is_dir() else base


def rows_file(version: Version, name: str, folder: Path | None) -> Path:
    """The file with a dataset's rows, from the hub where it isn't in the folder. Raises SettingError where there is none."""
    names = {
        "v1": (f"{name}.jsonl",),
        "e": (f"{name}_e.jsonl",),
        "mini": (f"MiniLongBench_{name}.json",),
        "v2": ("data.json", "data.jsonl"),
    }[version]
    if folder is not None and (found := next((folder / one for one in names if (folder / one).is_file()), None)):
        return found
    where = f"{folder / names[0]} isn't there" if folder else "no data folder is given (task.data_dir, or KVLAB_DATA_DIR)"
    if version == "mini":
        raise SettingError(f"{where}: get pred_data/ of github.com/MilkThink-Lab/MiniLongBench, and set task.data_dir to it")
    return _from_hub(version, names[0], where)


def _from_hub(version: Version, name: str, where: str) -> Path:
    """A file of the benchmark's repository on the hub; of its archive the one that is wanted."""
    repository, file = _HUB[version]
    try:
        from huggingface_hub import hf_hub_download

        settle_hub()
        got = Path(hf_hub_download(repository, file, repo_type="dataset"))
        if got.suffix != ".zip":
            return got
        with zipfile.ZipFile(got) as archive:
            text = archive.read(f"data/{name}")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:  # errors of the hub's package are among them
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise SettingError(
            f"{where}, and {repository} can't be had from the hub ({reason}): put the file there, or correct task.data_dir"
        ) from error
    target = cache_dir() / "longbench" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_file() or target.read_bytes() != text:
        target.write_bytes(text)
    return target


def read_rows_of(version: Version, file: Path) -> list[Row | str]:
    """Rows of a file; in the place of one that can't be read what is wrong with it. SettingError for one without rows."""
    return mini_rows(file) if version == "mini" else numbered(file)


# ------------------------------------------------------------------------------------------------- MiniLongBench's files


def mini_rows(file: Path) -> list[Row | str]:
    """Rows of a MiniLongBench file, an object of objects; `id` is a row's key, `pred` the prediction that it has.

    Raises SettingError for a file that isn't one, or has no rows.
    """
    try:
        held = json.loads(file.read_text(encoding="utf-8") or "{}")
    except (ValueError, OSError) as error:
        raise SettingError(f"{file}: no JSON that can be read ({str(error).splitlines()[0]})") from None
    if not isinstance(held, dict):
        raise SettingError(f'{file}: MiniLongBench files hold an object of rows, such as {{"0": {{"origin_prompt": ...}}}}')
    if not held:
        raise SettingError(f"{file} has no rows")
    rows: list[Row | str] = []
    for number, (key, values) in enumerate(held.items(), 1):
        bad = f"{file}, row {number}: no JSON object"
        rows.append(Row(file, number, _from_mini(key, values)) if isinstance(values, dict) else bad)
    return rows


def _from_mini(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """LongBench's fields. A prompt is a text or one message; gold is the answers, or these with the classes.

    trec's classes are written as the text of a Python list.
    """
    gold = values.get("gold")
    answers = gold.get("answers") if isinstance(gold, dict) else gold
    classes = gold.get("all_classes") if isinstance(gold, dict) else None
    if isinstance(classes, str):
        try:
            classes = ast.literal_eval(classes)
        except (ValueError, SyntaxError):
            classes = [classes]
    prompt = values.get("origin_prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("prompt", prompt[0].get("content"))
    found = {
        "id": key,
        "prompt": prompt,
        "answers": [answers] if isinstance(answers, str) else answers,
        "all_classes": classes,
        "pred": values.get("prediction"),
        "length": values.get("length"),
    }
    return {name: value for name, value in found.items() if value is not None}


# ---------------------------------------------------------------------------------------------------- what rows must have


def problem_of(version: Version, name: str, template: str, values: Mapping[str, Any]) -> str | None:
    """What is wrong with a row of a dataset, if anything."""
    if version == "v2":
        return _v2_problem(values)
    if version == "mini":
        if "prompt" in values and not isinstance(values["prompt"], str):
            return "'origin_prompt' must be a text, or a list of one message"
        if wrong := missing(values, "prompt", "answers"):
            return wrong.replace("'prompt'", "'origin_prompt'").replace("'answers'", "'gold'")
    else:
        wanted = ["context", "answers", *(["input"] if "{input}" in template else [])]
        if wrong := missing(values, *wanted):
            return wrong
        if version == "e" and not _is_number(values.get("length")):
            return "the field 'length' must be a number: it says which of LongBench-E's buckets a row is in"
    return answers_problem(name, values)


def answers_problem(name: str, values: Mapping[str, Any]) -> str | None:
    """What is wrong with a row's answers and classes, if anything."""
    answers = values["answers"]
    if not _texts(answers) or not any(answer.strip() for answer in answers):
        return "the answers must be a list of texts, not all empty"
    if name in ("trec", "lsht"):
        classes = values.get("all_classes")
        if not _texts(classes):
            return f"'all_classes' must be a list of texts, the classes of {name}"
        if other := next((answer for answer in answers if answer not in (classes or ())), None):
            return f"the answer {other!r} isn't among all_classes"
    if name in PARAGRAPHS:
        try:
            for answer in answers:
                paragraph(answer, PARAGRAPHS[name])
        except ValueError as error:
            return str(error)
    return None


def _v2_problem(values: Mapping[str, Any]) -> str | None:
    if wrong := missing(values, *_V2_FIELDS):
        return wrong
    if other := next((name for name in _V2_FIELDS if not isinstance(values[name], str)), None):
        return f"{other!r} must be text"
    if values["answer"] not in LETTERS:
        return f"'answer' is {values['answer']!r}, and the choices are A, B, C and D"
    return None


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, str) for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------ templates and output lengths


def from_table(table: str, name: str, folder: Path | None, given: str | None = None) -> Any:
    """What dataset2prompt.json or dataset2maxlen.json has for a dataset; None where the file or the dataset isn't there.

    given  the file itself. Raises SettingError for one that isn't there or can't be read.
    """
    file = Path(given).expanduser() if given is not None else _beside(table, folder)
    if file is None:
        return None
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise SettingError(f"{file} can't be read as LongBench's {table}: {str(error).splitlines()[0]}") from None
    return held.get(name) if isinstance(held, dict) else None


def _beside(table: str, folder: Path | None) -> Path | None:
    """The benchmark's file with the data, in config/ as in its repository, or in the folder of the first version."""
    if folder is None:
        return None
    places: Sequence[Path] = (folder, folder / "config", folder / FOLDERS["v1"], folder.parent / FOLDERS["v1"])
    return next((place / table for place in places if (place / table).is_file()), None)


def v2_template(folder: Path | None, given: str | None) -> str | None:
    """LongBench v2's 0shot.txt, None where it isn't there. Raises SettingError where a given file can't be read."""
    places = [folder / "prompts" / "0shot.txt", folder / "0shot.txt"] if folder is not None else []
    file = Path(given).expanduser() if given is not None else next((place for place in places if place.is_file()), None)
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise SettingError(f"task.prompt_file={given} can't be read: {str(error).splitlines()[0]}") from None
