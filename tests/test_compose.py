"""Every file in conf/ composes to a cell that can be; choices of the user's own are found."""

import re
import sys
from itertools import product
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

import made_up
from kvlab.artefacts import DESCRIBED, save
from kvlab.cells import Cell
from kvlab.choices import REGISTERED, choices
from kvlab.compose import run_hydra
from kvlab.embedded import embedded_folder
from kvlab.launcher import _spread
from kvlab.parts import GROUPS
from kvlab.paths import conf_dir
from kvlab.policies import policy_names
from kvlab.tables import stored_references
from running import kvlab, results

NEEDED = {
    ("model", "path"): ["model.path=tiny/model"],
    ("task", "prompts"): ["task.file=rows.jsonl"],
    ("task", "longbench"): ["task.tasks=[trec]"],
    ("task", "lm_eval"): ["task.tasks=[copa]"],
    ("task", "helm"): ["task.scenarios=[xsum]"],
    ("task", "hash_correlation"): ["task.tasks=[copa]"],
    # What `kvlab reproduce` gives, and what only the hub has.
    ("experiment", "corm/budget_paper"): ["task.tasks=[trec]"],
    ("experiment", "decoquant/table2"): ["task.tasks=[lambada_openai]"],
    ("experiment", "decoquant/table2_paper"): ["task.tasks=[lambada_openai]"],
    ("experiment", "eigen/perplexity_paper"): ["task.dataset=null"],
    ("experiment", "fastgen/steps_paper"): ["task.dataset=null"],
    ("experiment", "h2o/xsum_paper"): ["task.hub=false", "task.max_train_instances=0"],
    ("experiment", "kivi/axes_paper"): ["task.tasks=[copa]"],
    ("experiment", "kivi/longbench_paper"): ["task.tasks=[trec]"],
    ("experiment", "kvsharer/perplexity_paper"): ["task.dataset=null"],
    ("experiment", "qaq/table_ratio"): ["task.tasks=[copa]"],
    ("experiment", "qaq/table_ratio_paper"): ["task.tasks=[copa]"],
    ("experiment", "scissorhands/c4_paper"): ["task.dataset=null"],
}


def composed(*arguments):
    """The configs that a command line composes to."""
    found = []

    def keep(configs):
        found.extend(OmegaConf.to_container(config, resolve=True) for config in configs)
        return [None] * len(configs)

    run_hydra(arguments, keep)
    return found


@pytest.fixture(scope="session")
def benchmarks(tmp_path_factory):
    """A data folder for all of them."""
    folder = tmp_path_factory.mktemp("benchmarks")
    made_up.everything(folder)
    return folder


def every_choice():
    """Choices of a group as one sweep, which composes faster; by themselves those that need something or are sweeps."""
    for group in GROUPS:
        alone = [name for name in choices(group) if group in ("experiment", "debug") or (group, name) in NEEDED]
        yield from ((group, name) for name in alone)
        if together := [name for name in choices(group) if name not in alone]:
            yield group, ",".join(together)


def test_there_is_a_folder_for_every_group_and_a_group_for_every_folder():
    assert {path.name for path in conf_dir().iterdir() if path.is_dir()} == set(GROUPS)
    assert set(policy_names()) <= set(choices("policy"))
    assert all(any(path.rglob("*.yaml")) for path in conf_dir().iterdir() if path.is_dir()), "git keeps no empty folder"


def leave_artefacts(folder, monkeypatch):
    """Calibrations of the default model, as far as cells look at them."""
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(folder))
    about = dict.fromkeys(DESCRIBED, "") | {"fingerprint": f"embedded {embedded_folder().name}"}
    for group in ("codec", "share"):
        names, find = REGISTERED[group]
        for cls in (find(name) for name in names()):
            hints = get_type_hints(cls)
            for values in product(*(get_args(hints[name]) for name in cls.calibrated_by)) if cls.calibrated else ():
                settings = dict(zip(cls.calibrated_by, values, strict=True))
                save(cls.calibrated, about | settings, {}, version=cls.calibrated_version)


@pytest.mark.parametrize(("group", "name"), list(every_choice()), ids=lambda part: part[:40])
def test_every_choice_makes_a_cell(group, name, benchmarks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hello"}\n')
    monkeypatch.setenv("KVLAB_DATA_DIR", str(benchmarks))
    if group in ("codec", "share", "experiment"):
        leave_artefacts(tmp_path / "cache", monkeypatch)
    protocol = [] if group == "protocol" else ["protocol=prompt"]
    configs = composed(f"{group}={name}", *NEEDED.get((group, name), []), *protocol)
    assert len(configs) >= name.count(",") + 1
    for config in (cell for every in configs for cell in _spread(every)):
        cell = Cell.of(config)
        assert cell.run_id and cell.folder.parts[0] == "outputs"
        assert cell.comparison_id == Cell.of(config).comparison_id


def test_a_sweep_is_a_product():
    cells = [Cell.of(config) for config in composed("policy=h2o,tova", "budget.ratio=0.1,0.2,0.5", "task=passkey")]
    assert len({cell.run_id for cell in cells}) == 6 and len({cell.comparison_id for cell in cells}) == 1
    assert {cell.label for cell in cells} >= {"h2o 10 %, passkey", "tova 50 %, passkey"}


def test_the_demo_is_the_sweep_that_the_readme_shows():
    cells = {Cell.of(config).run_id: Cell.of(config) for config in composed("experiment=demo")}
    assert len(cells) == 18  # full once a task
    assert {cell.policy.name for cell in cells.values()} == {"full", "streaming_llm", "h2o", "snapkv", "tova"}
    assert {cell.budget.ratio for cell in cells.values()} == {None, 0.2, 0.5}
    perplexity = next(cell.task for cell in cells.values() if cell.task.name == "perplexity")
    assert perplexity.windows >= 8
    passkey = next(cell.task for cell in cells.values() if cell.task.name == "needle")
    assert (len(passkey.depths) * passkey.n >= 24, passkey.lengths, passkey.haystack) == (True, (500,), "noise")


def test_the_demos_references_are_found():
    """The ids in conf/references.yaml are those of today's identities. Prose differs between releases of Python."""
    passkey, perplexity = (
        Cell.of(composed("experiment=demo", f"task={task}")[0]) for task in ("demo_passkey", "demo_perplexity")
    )
    assert passkey.comparison_id in stored_references()
    if sys.version_info[:2] == (3, 11):
        assert perplexity.comparison_id in stored_references()


def test_one_seed_is_everybodys():
    (config,) = composed("seed=7", "policy=random", "task=passkey")
    cell = Cell.of(config)
    assert (cell.seed, cell.policy.seed, cell.task.seed) == (7, 7, 7)
    assert cell.policy_label == "random"
    (config,) = composed("seed=7", "policy=random", "policy.seed=3")
    assert Cell.of(config).policy_label == "random seed=3"


def test_your_own_config_folder_policy_and_task(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "mine/model/small.yaml": "name: small\ndescription: my own\ntiny: opt\n",
        "mine/policy/h2o_heavy.yaml": "# More heavy hitters.\ndefaults: [h2o]\nheavy_share: 0.75\n",
        "mine/task/short.yaml": "defaults: [perplexity]\nwindows: 2\ncontext: 24\nscored: 8\n",
        "mine/experiment/one.yaml": "# @package _global_\ndefaults:\n  - override /task: short\nname: one\n"
        "hydra: {sweeper: {params: {policy: 'full,h2o_heavy'}}}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code, _, err = kvlab("run", "--config-dir", "mine", "experiment=one", "model=small", "logger=none", capsys=capsys)
    assert code == 0, err
    found = results(tmp_path / "outputs")
    assert {result["policy_label"] for result in found.values()} == {"full", "h2o heavy_share=0.75"}
    assert {result["model"] for result in found.values()} == {"small"}
    code, out, _ = kvlab("list", "policies", "--config-dir", "mine", capsys=capsys)
    assert re.search(r"^h2o_heavy +More heavy hitters\.$", out, re.MULTILINE)
    code, out, _ = kvlab("list", "experiments", "--config-dir", "mine", capsys=capsys)
    assert {"demo", "founding_five_stream", "longbench", "one"} <= {line.split()[0] for line in out.splitlines()}
