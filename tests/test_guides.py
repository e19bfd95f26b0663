"""What the guides say is so: their files and commands work as they stand, and no document's link leads nowhere."""

import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab as kvlab_package
from running import TINY, kvlab, results

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    file
    for folder in (".", "docs", "experiments")
    for file in sorted((ROOT / folder).glob("**/*.md" if folder != "." else "*.md"))
]


def blocks(guide, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / guide).read_text(), re.DOTALL | re.MULTILINE)


def anchors(file):
    """Of headings, as GitHub names them."""
    heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(document):
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_document_stands_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for file in (ROOT / "docs").glob("*.md"):
        assert file.name == "README.md" or f"]({file.name})" in index, file.name
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()


def test_every_public_module_can_be_imported_and_says_what_it_is():
    """What `make docs` shows; ruff asks the same of classes and functions."""
    names = [one.name for one in pkgutil.walk_packages(kvlab_package.__path__, "kvlab.") if "._" not in one.name]
    assert len(names) > 150
    assert [name for name in names if not (importlib.import_module(name).__doc__ or "").strip()] == []


@pytest.mark.parametrize(
    ("guide", "file", "preset", "cells"),
    [
        ("add_a_policy.md", "my_policy.py", ["policy=aged_mean", "name=runs"], 6),
        ("add_a_task.md", "my_task.py", ["task=two_capitals", "name=two"], 3),
    ],
)
def test_a_guides_file_and_commands_work_as_they_stand(tmp_path, in_a_folder, capsys, guide, file, preset, cells):
    """Nothing but the text of the guide, in an empty folder; the model alone is another."""
    (tmp_path / file).write_text(blocks(guide, "python")[0])
    (commented,) = blocks(guide, "yaml")
    group, name = preset[0].split("=")
    (tmp_path / "my_conf" / group).mkdir(parents=True)
    (tmp_path / "my_conf" / group / f"{name}.yaml").write_text(commented)
    tiny = [*TINY, "runtime.kernels=reference"]
    commands = [shlex.split(line)[1:] for line in "".join(blocks(guide, "bash")).splitlines() if line.startswith("kvlab ")]
    commands.append(["run", *preset, "budget.ratio=0.6", "--import", file, "--config-dir", "my_conf"])
    for command in commands:
        own = [] if any(word.startswith("name=") for word in command) else ["name=runs"]
        code, out, err = kvlab(*command, *([*tiny, *own] if command[0] == "run" else []), capsys=capsys)
        assert code == 0, (command, err)
    found = results(tmp_path / "outputs")
    assert len(found) == cells and all(one["status"] == "ok" for one in found.values()), found.keys()


@pytest.mark.slow
def test_the_policy_guides_python_runs(tmp_path):
    own, program = blocks("add_a_policy.md", "python")
    (tmp_path / "my_policy.py").write_text(own)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0.4 < float(done.stdout) < 0.7
