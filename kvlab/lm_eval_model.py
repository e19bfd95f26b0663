"""kvlab as a model of lm-eval: `kvlab lm_eval --model kvlab --model_args policy=h2o,budget.ratio=0.2 ...` is lm-eval's command
line with this class registered, since lm-eval discovers no plug-ins.

Requests with the same context are read once and scored on forks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tqdm import tqdm

from kvlab.cells import Cell
from kvlab.compose import run_hydra
from kvlab.evals import Record
from kvlab.evals.harness.local_tasks import known_tasks
from kvlab.evals.harness.requests import Doc, Encoder, Requests, grouped, windows_of
from kvlab.evals.harness.source import NEEDS, chat_template, find_source
from kvlab.evaluation import evaluate
from kvlab.launcher import plain
from kvlab.reading import Prompt
from kvlab.runner import batches
from kvlab.settings import SettingError
from kvlab.units import say
from kvlab.workbench import Workbench

NAME = "kvlab"
MAX_NEW_TOKENS = 256
SHORT = {"ratio": "budget.ratio", "pretrained": "model.path", "dtype": "runtime.dtype", "device": "runtime.device"}
"""lm-eval's own names of arguments, and one that is worth a short one."""


def run_lm_eval(arguments: Sequence[str], data_dir: str | None = None) -> None:
    """lm-eval's command line, with kvlab among its models and local data among its tasks.

    data_dir  folder of data files that tasks are made from where it has them
    Raises SettingError for --use_cache, whose key ignores policy and budget.
    """
    if any(argument.split("=")[0] in ("--use_cache", "-c") for argument in arguments):
        raise SettingError("--use_cache mixes up policies, since lm-eval's key knows neither policy nor budget: leave it out")
    register()
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["kvlab lm_eval", *_with_local_tasks(list(arguments), data_dir)]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _with_local_tasks(arguments: list[str], data_dir: str | None) -> list[str]:
    """Arguments with a folder of task files for the data there is, where the user names none.

    A name that stands for several of lm-eval's tasks becomes that of the one that there is data for.
    """
    options = [argument.partition("=")[0] for argument in arguments]
    place = next((number for number, option in enumerate(options) if option in ("--tasks", "-t")), None)
    if place is None or "--include_path" in options:
        return arguments
    first = place + 1
    until = next((number for number in range(first, len(arguments)) if arguments[number].startswith("-")), len(arguments))
    given = [arguments[place].partition("=")[2], *arguments[first:until]]
    names = list(dict.fromkeys(name for argument in given for name in argument.split(",") if name))
    known = set(known_tasks())
    ours = [name for name in names if name in known]
    source = find_source(ours, data_dir, None, "skip") if ours else None
    if source is None or not source.folders:
        return arguments
    if source.left_out:
        say(f"{len(source.left_out)} bad rows are left out; the first: {source.left_out[0]}")
    here = dict(zip(ours, source.names, strict=True))
    tasks = ["--tasks", *(here.get(name, name) for name in names)]
    return [*arguments[:place], *tasks, *arguments[until:], "--include_path", *source.folders]


@cache
def register() -> type:
    """The class, registered with lm-eval. Raises SettingError where lm-eval isn't installed."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise SettingError(NEEDS) from error

    @register_model(NAME)
    class KvlabLM(_Answers, TemplateLM):
        """lm-eval's interface over one cell of kvlab."""

    return KvlabLM


class _Answers:
    """What lm-eval asks of a model. Built on lm-eval's TemplateLM, which tokenises pairs."""

    def __init__(self, batch_size: Any = 8, max_batch_size: Any = None, device: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.max_gen_toks = int(settings.pop("max_gen_toks", MAX_NEW_TOKENS))
        length = settings.pop("max_length", None)
        self.cell = cell_of(settings, batch_size, device)
        self.bench = Workbench(self.cell.model)
        self.tokenizer = self.bench.tokenizer
        self.max_length = int(length or min(self.bench.context, 1 << 20))
        self.encoder = Encoder(self.tokenizer, self.max_length)
        self.held: list[Record] = []

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests tells tokenizers apart by."""
        return self.bench.spec.name

    @property
    def prefix_token_id(self) -> int:
        """What stands in for an empty context."""
        return self.encoder.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text."""
        return self.encoder.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: Sequence[Any], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's template has it."""
        return chat_template(self.tokenizer)(chat_history, add_generation_prompt)

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        pairs = [(tuple(context), tuple(ids)) for _, context, ids in requests]
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (context, ids) in enumerate(pairs):
            groups.setdefault(self.encoder.fitted(context, ids), []).append(number)
        docs = []
        for place, (context, numbers) in enumerate(groups.items()):
            prompts, parts = grouped([(n, context, pairs[number][1]) for n, number in enumerate(numbers)])
            docs.append(Doc(f"context{place}", prompts[0], parts=parts))
        records = self._answer(docs, disable_tqdm)
        found: dict[int, tuple[float, bool]] = {}
        for place, numbers in enumerate(groups.values()):
            answers = records[f"context{place}"]["loglikelihoods"]
            found |= {number: tuple(answer) for number, answer in zip(numbers, answers, strict=True)}
        return [found[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts. Each window of a text begins with an empty cache."""
        if self.cell.protocol.compresses:
            raise SettingError("whole texts have no prompt to compress: add protocol=stream to --model_args")
        docs = []
        for place, request in enumerate(requests):
            windows = self.encoder.rolling(*request.args)
            prompts, parts = windows_of(windows)
            docs.append(Doc(f"text{place}", prompts[0], others=prompts[1:], parts=parts))
        records = self._answer(docs, disable_tqdm)
        return [records[doc.id]["loglikelihoods"][0][0] for doc in docs]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Outputs up to the stop strings, decoded greedily."""
        docs = []
        for place, request in enumerate(requests):
            context, options = request.args
            if options.get("do_sample"):
                raise SettingError("kvlab decodes greedily: leave do_sample out of --gen_kwargs")
            new_tokens = int(options.get("max_gen_toks", options.get("max_new_tokens", self.max_gen_toks)))
            until = options.get("until") or []
            stop = (until,) if isinstance(until, str) else tuple(until)
            prompt = Prompt(self.encoder.before(context, new_tokens)[0])
            docs.append(Doc(f"request{place}", prompt, new_tokens=new_tokens, stop=stop))
        records = self._answer(docs, disable_tqdm)
        return [records[doc.id]["output"] for doc in docs]

    def _answer(self, docs: Sequence[Doc], disable_tqdm: bool) -> dict[str, Record]:
        """Records by id, batch by batch. Raises BudgetError where the budget can't hold what the policy protects."""
        found: dict[str, Record] = {}
        if docs:
            self.bench.check_budget(self.cell, docs)
        with tqdm(total=len(docs), desc=self.cell.label, unit="context", disable=disable_tqdm or None) as bar:
            for batch in batches(docs, self.cell.runtime.batch_size):
                for record in evaluate(self.cell, self.bench, batch):
                    found[record["id"]] = record
                bar.update(len(batch))
        self.held += found.values()
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results say of the model: the cell, and what its cache held."""
        names = ("kv_bytes", "kv_bytes_full", "kept", "seen")
        sums = {name: sum(record["memory"][name] for record in self.held) for name in names}
        kept = sums["kept"] / sums["seen"] if sums["seen"] else 1.0
        return {"kvlab": self.cell.summary()["identity"], "kvlab_memory": {**sums, "kept_fraction": kept}}


def cell_of(settings: dict[str, Any], batch_size: Any = 8, device: str | None = None) -> Cell:
    """The cell that model arguments describe, as `kvlab run` composes it. Raises SettingError for what can't be."""
    named = {SHORT.get(name, name): value for name, value in settings.items()}
    if "model.path" in named:
        named["model"] = "path"
    if device and device != "cuda:0":  # lm-eval's default, whether or not there is one
        named.setdefault("runtime.device", device)
    if not str(batch_size).isdigit():
        raise SettingError(f"--batch_size {batch_size}: use a number")
    overrides = [f"{name}={_text(value)}" for name, value in named.items()]
    found: list[Cell] = []

    def keep(configs: Sequence[Any]) -> list[None]:
        if len(configs) > 1:
            raise SettingError("--model_args describe several cells: give one value each, or use `kvlab run task=lm_eval`")
        found.append(Cell.of(plain(configs[0])))
        return [None]

    run_hydra([*overrides, f"runtime.batch_size={batch_size}", "logger=none", "task=perplexity"], keep)
    return replace(found[0], task=Requests())


def _text(value: Any) -> str:
    """A value as Hydra reads it."""
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)
