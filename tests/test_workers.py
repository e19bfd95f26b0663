"""Kernels give the same on any number of threads; what goes wrong in one is raised where the work was given."""

import os
import threading

import pytest
import torch

from conftest import shared_model
from contracts.helpers import attached, positions_of
from kvlab import Budget
from kvlab.kernels import workers
from test_scan import conversation


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def count(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["h2o", "tova", "streaming_llm"])
def test_threads_change_nothing(name, count):
    found = []
    for threads in (1, count):
        torch.set_num_threads(threads)
        with attached(shared_model("gemma2"), "gemma2", name, Budget(tokens=12)) as session:
            logprobs, cache = conversation(session, 5, True, stream=False)
            found.append((logprobs, [positions_of(cache, row) for row in range(3)]))
    assert found[0][1] == found[1][1]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5


@pytest.mark.parametrize("here", [True, False])
def test_every_part_is_done_once_at_the_same_time(count, here):
    done, meeting = [], threading.Barrier(count)

    def part(number):
        meeting.wait(timeout=20)
        done.append((number, threading.get_ident() == caller, torch.get_num_threads()))

    caller = threading.get_ident()
    workers.share(part, count, here=here)
    assert sorted(number for number, *_ in done) == list(range(count))
    assert sum(mine for _, mine, _ in done) == (here or count == 1)
    assert all(threads == 1 for _, mine, threads in done if not mine)
    assert torch.get_num_threads() == count


def test_an_error_is_raised_where_the_work_was_given(count):
    done = []

    def part(number):
        done.append(number)
        if number == count - 1:
            raise ZeroDivisionError("in a part")

    for _ in range(2):  # and threads live on
        with pytest.raises(ZeroDivisionError, match="in a part"):
            workers.share(part, count)
    assert len(done) == 2 * count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(count):
    workers.share(lambda number: None, count)
    child = os.fork()
    if not child:
        workers.share(lambda number: None, count)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
