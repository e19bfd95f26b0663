"""What tests of lm-eval's tasks on local data share: generated rows, and requests through lm-eval."""

import functools
import json
import re
from pathlib import Path

import pytest
import yaml

from kvlab.evals.harness.local_tasks import own_tasks
from kvlab.evals.harness.recipes import MMLU, RECIPES


def held(tasks, name):
    """Rows of a generated task by split."""
    config = yaml.safe_load((tasks.folder / f"{name}.yaml").read_text())
    files = config["dataset_kwargs"]["data_files"]
    return {split: [json.loads(line) for line in Path(path).read_text().split("\n")[:-1]] for split, path in files.items()}


def without_place(rows):
    return [{name: value for name, value in row.items() if name != "kvlab_row"} for row in rows]


@functools.cache
def lm_eval_parts():
    """What takes seconds to import; the test is skipped where it isn't installed."""
    pytest.importorskip("lm_eval", reason="lm-eval isn't installed: pip install 'kvlab[evals]'")
    from datasets import Dataset, disable_progress_bars
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    disable_progress_bars()
    return Dataset, ConfigurableTask, TaskManager, load_yaml, TaskIndex


def loaded(tasks):
    """What lm-eval makes of generated tasks."""
    return lm_eval_parts()[2](include_path=str(tasks.folder), include_defaults=False).load(list(tasks.names))


def index(folders):
    """What lm-eval finds in folders of task files, the later before the earlier."""
    return lm_eval_parts()[4].build(folders)


def requests(task, shots, limit=3):
    """What a model is asked: kind and arguments of each request, and the document's target."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=limit)
    return [(one.request_type, one.arguments, task.doc_to_target(one.doc)) for one in task.instances]


def own_task(name, splits):
    """lm-eval's task as it is, on documents of the hub's shape in memory."""
    dataset, configurable, _, load_yaml, _ = lm_eval_parts()
    files = (own_tasks() / (RECIPES[name].folder if name in RECIPES else MMLU)).glob("*.yaml")
    path = next(path for path in files if re.search(rf'^"?task"?: "?{name}"?$', path.read_text(), re.M))
    there = {split: dataset.from_list(rows) for split, rows in splits.items()}
    return configurable(config={**load_yaml(path), "custom_dataset": lambda **_: there})
