"""What the README says is so: its examples run, its tables are what the program prints."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import made_up
from kvlab.commands.listing import policy_table
from kvlab.embedded import is_fetched
from kvlab.policies import policy_class, policy_names
from kvlab.tiny import tiny_model, tiny_tokenizer
from running import kvlab

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(arguments, folder, **environment):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_the_table_of_policies_is_what_kvlab_list_prints():
    shipped = [policy_class(name) for name in policy_names() if policy_class(name).__module__.startswith("kvlab.policies.")]
    assert policy_table(shipped) in README, "paste the output of `kvlab list policies --markdown` into the README"


def test_every_make_target_that_the_documents_name_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
        assert named and named <= targets, document


def test_every_command_of_the_readme_can_be(tmp_path, monkeypatch, capsys):
    """Each `kvlab run` is composed and checked on a tiny model, with files of the names that it mentions."""
    (tmp_path / "my_text.txt").write_text("Some words that stand in a text of one's own. " * 200)
    (tmp_path / "my_prompts.jsonl").write_text(re.search(r"```json\n(.*?)\n", README)[1] + "\n")
    (tmp_path / "my_module.py").write_text(next(block for block in BLOCKS if "@register" in block))
    tiny_model("llama").save_pretrained(tmp_path / "my-model")
    tiny_tokenizer().save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    made_up.everything(tmp_path / "data")
    monkeypatch.setenv("KVLAB_DATA_DIR", str(tmp_path / "data"))
    few = ["--model", "tiny-llama", "--texts", "2", "--tokens", "20"]
    assert kvlab("calibrate", "kvsharer", *few, "-o", "threshold=-1") == 0  # `share=kvsharer` needs it
    commands = [shlex.split(line, comments=True) for line in README.splitlines() if line.startswith("kvlab run ")]
    assert len(commands) >= 7
    for _, *arguments in commands:
        model = [] if "model=path" in arguments else ["model=tiny-llama"]
        code = kvlab(*arguments, *model, *([] if "--dry-run" in arguments else ["--dry-run"]))
        assert code == 0, (arguments, capsys.readouterr().err)


@pytest.mark.embedded
@pytest.mark.skipif(not is_fetched(), reason="the embedded model is not fetched (make setup)")
def test_the_example_runs_as_it_stands(tmp_path):
    example = next(block for block in BLOCKS if "attach" in block)
    assert len(example.strip().splitlines()) <= 30
    (tmp_path / "example.py").write_text(example)
    done = run(["example.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    shares = dict(re.findall(r"(\w+): (\d\.\d\d) of full", done.stdout))
    assert set(shares) == {"full", "streaming_llm", "h2o", "snapkv", "adakv"}
    assert all(float(share) < 0.4 for name, share in shares.items() if name != "full")
    assert float(shares["full"]) >= 1


def test_the_policy_in_one_file_passes_every_contract(tmp_path):
    """A new file and nothing else: no edit in the package, in the tests or in a list."""
    example = next(block for block in BLOCKS if "@register" in block)
    assert len(example.strip().splitlines()) <= 20
    (tmp_path / "my_module.py").write_text(example)
    tests = str(ROOT / "tests" / "contracts")
    quick = ["-m", "pytest", tests, "-q", "-m", "not slow", "-k", "value_norm and llama", "-p", "no:cacheprovider"]
    done = run([*quick, "--policy-file", str(tmp_path / "my_module.py")], ROOT)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    assert passed and int(passed[1]) >= 15, done.stdout[-500:]
