"""How lm-eval's tasks are made of files in a data folder. A further one is an entry here and a function in `documents.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.evals.harness import documents
from kvlab.evals.harness.documents import Convert
from kvlab.evals.harness.raw_files import Source, table, table_in, table_with_labels, wiki_pages, zipped_csv


@dataclass(frozen=True)
class Recipe:
    """How one of lm-eval's tasks is made.

    folder   where in lm_eval/tasks its YAML is
    split    what lm-eval calls the rows that are scored
    scored   where they come from; convert: what is made of each
    shots    where few-shot examples come from; None: the last rows of `scored`, kept apart
    shot_split  what lm-eval calls these; None where a task has no examples
    changes  what else the YAML changes
    """

    folder: str
    split: str
    scored: Source
    convert: Convert
    shots: Source | None = None
    shot_split: str | None = "train"
    changes: Mapping[str, Any] = field(default_factory=dict)


def _superglue(name: str, folder: str, convert: Convert) -> Recipe:
    return Recipe(folder, "validation", table(f"superglue_{name}/val.jsonl"), convert, table(f"superglue_{name}/train.jsonl"))


def _instructed(name: str, folder: str, convert: Convert) -> Recipe:
    files = [table(f"llm_adapters_commonsense/{name}_{split}.json") for split in ("test", "train")]
    return Recipe(folder, "test", files[0], convert, files[1])


_PIQA = table_with_labels("piqa/valid.jsonl", "piqa/valid-labels.lst")
_HELLASWAG = table_in("hellaswag/hellaswag.json", "dev")
_WINOGRANDE = table("llm_adapters_commonsense/winogrande_test.json")

RECIPES: dict[str, Recipe] = {
    "copa": _superglue("copa", "super_glue/copa", documents.copa),
    "rte": _superglue("rte", "glue/rte", documents.glue_rte),
    "sglue_rte": _superglue("rte", "super_glue/rte", documents.sglue_rte),
    "boolq": _superglue("boolq", "super_glue/boolq", documents.boolq),
    "cb": _superglue("cb", "super_glue/cb", documents.cb),
    "piqa": Recipe("piqa", "validation", _PIQA, documents.piqa),
    "openbookqa": _instructed("openbookqa", "openbookqa", documents.openbookqa),
    "arc_easy": _instructed("arc_easy", "arc", documents.arc),
    "arc_challenge": _instructed("arc_challenge", "arc", documents.arc),
    "winogrande": Recipe("winogrande", "validation", _WINOGRANDE, documents.winogrande),
    "mathqa": Recipe("mathqa", "test", table("llm_adapters_commonsense/mathqa_test.json"), documents.mathqa),
    # The activity is missing, so what lm-eval's own process_docs makes begins with ': ', which is cut off.
    "hellaswag": Recipe("hellaswag", "validation", _HELLASWAG, documents.hellaswag, changes={"doc_to_text": "{{query[2:]}}"}),
    "lambada_openai": Recipe("lambada", "test", table("lambada/lambada_test.jsonl"), documents.lambada),
    "gsm8k": Recipe("gsm8k", "test", table("gsm8k/test.jsonl"), documents.gsm8k),
    "wikitext": Recipe("wikitext", "test", wiki_pages("wikitext2/test.txt"), documents.wikitext, shot_split=None),
}
"""By lm-eval's names."""
MMLU = "mmlu/default"
"""Where in lm_eval/tasks the YAMLs of MMLU are."""


def mmlu_subject(subject: str) -> Recipe:
    """How the task of one of MMLU's subjects is made; its examples are those of the file `dev`."""
    columns = ("question", "A", "B", "C", "D", "answer")
    test, dev = (zipped_csv("mmlu/mmlu.zip", f"{split}/{subject}_{split}.csv", columns) for split in ("test", "dev"))
    return Recipe(MMLU, "test", test, documents.mmlu(subject), dev, "dev")
