"""Ctrl-C while a batch runs: the first waits until its samples are recorded, a second one stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SAID = b"\nkvlab: interrupted; the running batch is finished first, Ctrl-C again stops at once\n"


@contextmanager
def finished_first() -> Iterator[None]:
    """What stands in here is finished before Ctrl-C ends it, unless there is a second one. Raises KeyboardInterrupt then.

    Only where Ctrl-C does what it does by default, and in the main thread, since no other gets signals.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    asked = False

    def wait(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        os.write(2, SAID)  # a stream may be in the middle of a line that it locks

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked:  # also in the place of what a batch in trouble raises: it is tried again
            raise KeyboardInterrupt
