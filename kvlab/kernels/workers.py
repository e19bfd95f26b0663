"""Threads for compiled kernels, as many as torch has. Idle ones sleep.

Not OpenMP's: a second pool of those beside torch's would look for work for milliseconds after each kernel, on the cores that
torch's threads need next, and the other way round; a prefill then takes up to twice the time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

Part = Callable[[int], object]
"""Does the part of a job that has this number."""


class _Job:
    """One job's parts: how many are to come, and what went wrong."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.done: SimpleQueue[BaseException | None] = SimpleQueue()

    def do(self, number: int) -> None:
        try:
            self.part(number)
        except BaseException as error:  # raised again where the job was given
            self.done.put(error)
        else:
            self.done.put(None)


def threads() -> int:
    """How many there are."""
    return torch.get_num_threads()


def share(part: Part, parts: int, *, here: bool = True) -> None:
    """Do parts 0 to parts - 1 at the same time, at most `threads()`; part 0 in the calling thread if `here`.

    Elsewhere torch uses one thread for what a part asks of it.
    """
    if parts == 1 and (here or threads() == 1):
        part(0)
        return
    job, inboxes = _Job(part), _inboxes(threads())
    for number in range(int(here), parts):
        inboxes[number].put((job, number))
    error: BaseException | None = None
    try:
        if here:
            part(0)
    finally:  # what others write into must outlive them
        for _ in range(int(here), parts):
            error = job.done.get() or error
    if error is not None:
        raise error


def over_rows(kernel: Callable[..., None], rows: int, arguments: tuple[Any, ...]) -> None:
    """Run kernel(first, end, *arguments) over rows (or coupled units of them), each thread over some of its own."""
    parts = max(1, min(threads(), rows))
    share(lambda part: kernel(part * rows // parts, (part + 1) * rows // parts, *arguments), parts)


Inbox = SimpleQueue[tuple[_Job, int] | None]
_pool: tuple[tuple[int, int], list[Inbox]] | None = None  # of which process and how many, and where they wait for parts
_lock = threading.Lock()


def _inboxes(count: int) -> list[Inbox]:
    """Where threads wait for parts. A forked process has none of its parent's threads, so it gets its own."""
    global _pool
    wanted = (os.getpid(), count)
    if _pool is None or _pool[0] != wanted:
        with _lock:
            if _pool is None or _pool[0] != wanted:
                if _pool is not None and _pool[0][0] == wanted[0]:
                    for inbox in _pool[1]:
                        inbox.put(None)
                _pool = (wanted, _start(count))
    return _pool[1]


def _start(count: int) -> list[Inbox]:
    inboxes: list[Inbox] = [SimpleQueue() for _ in range(count)]
    ready: SimpleQueue[None] = SimpleQueue()
    for inbox in inboxes:
        threading.Thread(target=_serve, args=(inbox, ready), name="kvlab-kernels", daemon=True).start()
    for _ in inboxes:
        ready.get()
    torch.set_num_threads(count)  # threads changed the number for those to come
    return inboxes


@torch.no_grad()
def _serve(inbox: Inbox, ready: SimpleQueue[None]) -> None:
    torch.get_num_threads()  # a thread's first question sets its number, so it comes before the answer that is to hold
    torch.set_num_threads(1)
    ready.put(None)
    while (given := inbox.get()) is not None:
        job, number = given
        job.do(number)
        del given, job
