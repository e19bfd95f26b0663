"""`kvlab dashboard`: results as one HTML page that opens anywhere, or served while sweeps run. Loads no model."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path

from kvlab.dashboard.page import plotly_script, render_page
from kvlab.dashboard.server import Server
from kvlab.dashboard.store import Plain, Store
from kvlab.results import write_whole
from kvlab.tables import Where, matching

__all__ = ["Server", "Store", "open_page", "render_page", "serve", "write_dashboard", "write_page"]


WAIT_S = 1.0
"""Between two looks for the first result."""


def write_dashboard(where: Where, output: Path) -> str:
    """Write the page of all results below folders and globs; a line on what it holds.

    Raises ValueError where there are no results, plotly isn't installed, or the file can't be written.
    """
    return write_page(where, output)[0]


def write_page(where: Where, output: Path) -> tuple[str, Plain]:
    """As `write_dashboard`; also what the page shows."""
    folder = next(place for place in output.absolute().parents if place.exists())
    if output.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"--output={output} can't be written: give another file")
    plotly_script()  # what lacks is said before anything is read
    _, data = Store(where).page()
    text = render_page(data)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(output, text)
    except OSError as error:
        raise ValueError(f"--output={output} can't be written ({error.strerror}): give another file") from error
    cells, comparisons = len(data["cells"]), len(data["comparisons"])
    of = f"{cells} cell{'' if cells == 1 else 's'} in {comparisons} comparison{'' if comparisons == 1 else 's'}"
    return f"{output}: {of}, {len(text.encode()) / 1e6:.1f} MB", data


def serve(where: Where, port: int, show: Callable[[str], None], opens: bool = False) -> None:
    """Serve the page on this machine until it is interrupted. Raises ValueError as `write_dashboard`, or for the port."""
    plotly_script()
    store = Store(where)
    if not _awaited(store, show):
        return
    with Server(store, port) as server:
        show(f"{server.address} shows {len(store.page()[1]['cells'])} cells, and new ones as they come; Ctrl+C ends it")
        if opens:
            open_page(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            show("ended")


def _awaited(store: Store, show: Callable[[str], None]) -> bool:
    """Wait for the first result where cells were begun; False if interrupted. Raises ValueError where none was."""
    waits = False
    while True:
        try:
            store.state()
            return True
        except ValueError as error:
            if not all(any(start.rglob("config.yaml")) for place in store.places for start in matching(place) or [place]):
                raise
            if not waits:
                show(f"{error}; this waits for the first one, Ctrl+C ends it")
            waits = True
        try:
            time.sleep(WAIT_S)
        except KeyboardInterrupt:
            show("ended")
            return False


def open_page(address: str) -> None:
    """In a browser, where this machine shows windows at all."""
    if sys.platform in ("darwin", "win32") or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        webbrowser.open(address)
