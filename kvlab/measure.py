"""Clocks and memory meters of a process and its device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from pathlib import Path

import torch


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


SHORT = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What else says that memory was too little: torch's allocator of the CPU, and CUDA's own libraries."""


def out_of_memory(error: BaseException) -> bool:
    """Whether too little memory of the process or its device was the cause."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT)


def give_back() -> None:
    """Free what nobody holds any more, also to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class PeakMemory:
    """The most memory that the process and its device held since this was made, where the system can tell."""

    def __init__(self) -> None:
        self.process: int | None = None
        self.device: int | None = None
        self.go_on()

    def go_on(self) -> None:
        """Measure from here on, too."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def pause(self) -> None:
        """Leave aside what comes until `go_on`."""
        process = None
        with contextlib.suppress(OSError, IndexError):
            status = Path("/proc/self/status").read_text()
            process = 1024 * int(status.split("VmHWM:")[1].split()[0])
        device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        self.process = max((n for n in (self.process, process) if n is not None), default=None)
        self.device = max((n for n in (self.device, device) if n is not None), default=None)

    @staticmethod
    def held() -> int | None:
        """Bytes that the process or its device holds right now, what was freed given back to the system."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # only the GNU C library keeps much, and can be told
            ctypes.CDLL(None).malloc_trim(0)
        if torch.cuda.is_available():
            return torch.cuda.memory_allocated()
        with contextlib.suppress(OSError, IndexError):
            return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
        return None

    def read(self) -> dict[str, int | None]:
        """Bytes; None where it can't be known. After an interruption, of the last attempt."""
        self.pause()
        return {"peak_process_bytes": self.process, "peak_device_bytes": self.device}
