"""The command line as a user meets it: one line per name, one line per mistake, exit codes."""

import os
import re
import subprocess
import sys

import pytest

from kvlab import __version__
from kvlab.cli import main
from kvlab.models import model_names
from kvlab.policies import policy_names


def test_list_has_one_name_a_line_in_the_first_column(capsys):
    assert main(["list", "policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names == sorted(names) and set(policy_names()) < set(names), "registered ones and presets"
    assert all(len(line.split()) > 3 for line in lines), "every policy says what it keeps"
    assert main(["list", "models"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(model_names())


@pytest.mark.parametrize(
    "given", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("mine", "mine.py")), "../here/mine.py"]
)
def test_list_imports_the_users_module(tmp_path, given):
    tmp_path = tmp_path / "here"
    tmp_path.mkdir()
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from kvlab import Policy, register\n"
        "@register('mine')\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Policy):\n"
        "    '''Keep what I like.'''\n"
    )
    command = [sys.executable, "-m", "kvlab.cli", "list", "policies", "--import", given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^mine +Keep what I like\.$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "policies", "--import", "no_such_module"], "no_such_module"),
        (["list", "policys"], "policies"),
        (["lisst"], "list"),
        ([], "COMMAND"),
    ],
)
def test_mistakes_end_with_code_2_and_say_what_to_change(arguments, says, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert says in error[-1]


def test_doctor_finds_nothing_wrong_here(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "no"}
    assert any(line.split()[:2] == ["ok", "transformers"] for line in lines)


def test_doctor_fails_where_the_cache_folder_cannot_be(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert main(["doctor"]) == 1
    assert "KVLAB_CACHE_DIR" in capsys.readouterr().out


def test_version_and_help_do_not_load_torch():
    code = (
        "import sys; from kvlab.cli import main\ntry: main(['--version'])\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (0, f"kvlab {__version__}\n"), done.stderr
