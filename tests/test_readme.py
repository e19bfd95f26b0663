"""What the README says is so: its examples run, its tables are what the program prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli import policy_table
from kvlab.embedded import is_fetched
from kvlab.policies import policy_class, policy_names

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


@pytest.mark.embedded
@pytest.mark.skipif(not is_fetched(), reason="the embedded model is not fetched (make setup)")
def test_the_example_runs_as_it_stands(tmp_path):
    example = BLOCKS[0]
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
