"""What all tests share: offline, shapes checked, tiny models, and the crossing of policies with model families."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

if not torch.cuda.is_available():
    # Triton decides at its first import, which may be deep in transformers, whether its interpreter runs all kernels.
    os.environ["TRITON_INTERPRET"] = "1"

from jaxtyping import install_import_hook

# Shapes of the public API are checked while tests run.
install_import_hook(
    [
        "kvlab.budget",
        "kvlab.selection",
        "kvlab.kernels.reference",
        "kvlab.kernels.cpu",
        "kvlab.kernels.gpu",
        "kvlab.kernels.packed",
        "kvlab.kernels.packed_gpu",
        "kvlab.policies",
        "kvlab.session",
    ],
    "beartype.beartype",
)

import functools
import importlib.util
import signal
import sys
import zlib
from pathlib import Path

import pytest

from kvlab.policies import policy_names
from kvlab.tiny import tiny_families, tiny_model

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
torch.set_grad_enabled(False)
signal.signal(signal.SIGINT, signal.default_int_handler)  # is ignored where tests are started in the background

FAST_FAMILIES = ("llama", "opt", "gemma3")
"""GQA with rotary positions; learned positions without GQA; sliding-window layers."""


def pytest_addoption(parser):
    parser.addoption("--policy-file", action="append", default=[], help="test the policies that this file registers")
    parser.addoption("--whole", action="store_true", help="run all of big grids, of which each push runs a part")


@pytest.hookimpl(tryfirst=True)  # before those marked slow are left out
def pytest_collection_modifyitems(config, items):
    """Where a module says THINNED = n each push runs about one in n of its parametrised tests, the slow suite the others."""
    grids = {}
    for item in [] if config.getoption("--whole") else items:
        if hasattr(item.module, "THINNED") and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            grids.setdefault((item.module, item.originalname), []).append(item)
    for (module, name), cases in grids.items():
        kept = covering([item.callspec.params for item in cases], module.THINNED, zlib.crc32(name.encode()))
        for number, item in enumerate(cases):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


def covering(cases, parts, start):
    """Numbers of about one in `parts` of a grid's cases, each a dict of its parameters.

    Diagonals, so that values of any two parameters meet as often as they can, and the first case of each value that is on none.
    Where a parameter has another value in each case they are a list and no grid: one in `parts`, or all of a short one.
    """
    axes = []
    for name in cases[0]:
        known = {}
        axes.append([known.setdefault(id(case[name]), len(known)) for case in cases])
    if any(len(set(axis)) == len(cases) for axis in axes):
        return range(len(cases)) if len(cases) < 2 * parts else range(start % parts, len(cases), parts)
    kept = {number for number, place in enumerate(zip(*axes, strict=True)) if (sum(place) + start) % parts == 0}
    for axis in axes:
        met = {axis[number] for number in kept}
        kept |= {axis.index(value) for value in set(axis) - met}
    return kept


def pytest_configure(config):
    before = set(policy_names())
    for number, path in enumerate(config.getoption("--policy-file")):
        spec = importlib.util.spec_from_file_location(f"policy_file_{number}", Path(path))
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    added = sorted(set(policy_names()) - before)
    config.policies_under_test = added or sorted(before)


def pytest_generate_tests(metafunc):
    if "policy_name" in metafunc.fixturenames:
        metafunc.parametrize("policy_name", metafunc.config.policies_under_test)
    if "family" in metafunc.fixturenames:
        others = [] if metafunc.config.option.markexpr == "not slow" else [f for f in tiny_families() if f not in FAST_FAMILIES]
        metafunc.parametrize("family", [*FAST_FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in others)])


@functools.cache
def shared_model(family, dtype=torch.float32):
    """A tiny model that no test may change."""
    return tiny_model(family, dtype=dtype)


@functools.cache
def random_ids(batch, length, seed=0):
    """Token ids without special tokens, (batch, length)."""
    return torch.randint(10, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model(family):
    return shared_model(family)


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """The current folder is the test's own, and the number of threads is as before afterwards."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
