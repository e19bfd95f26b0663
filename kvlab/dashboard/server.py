"""`kvlab dashboard --serve`: the page on this machine alone, with what is new in the store and all changed samples."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kvlab.dashboard.page import as_json, render_page
from kvlab.dashboard.store import PER_CELL, Store

HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves a store's page. Port 0 is any free one. Raises ValueError where the port is taken or may not be used."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, store: Store, port: int) -> None:
        self.store = store
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = "taken" if error.errno == errno.EADDRINUSE else f"no port that can be had ({error.strerror})"
            raise ValueError(f"--port {port} is {why}: give another one, or --port 0 for any that is free") from None

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has gone is nobody's concern."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """`/`, `/data.json`, `/samples.json?cell=PATH&start=N`; for programs on this machine alone."""
        host = self.headers.get("Host", "").partition(":")[0]  # the port may be a tunnel's, or 80 and so not said
        if host not in (HOST, "localhost"):  # another site's page that has its name lead here
            return self._send(403, "text/plain", "this page is for this machine only")
        routes: dict[str, Callable[[], None]] = {"/": self._page, "/data.json": self._data, "/samples.json": self._samples}
        try:
            return routes.get(urlsplit(self.path).path, self._missing)()
        except ValueError as error:  # a store that is gone, a cell that is
            return self._send(404, "text/plain", " ".join(str(error).split()))
        except FileNotFoundError as error:  # a run began anew between two looks at its folder
            return self._send(503, "text/plain", f"the store changes just now ({error.filename})")

    def _page(self) -> None:
        state, data = self.server.store.page()
        self._send(200, "text/html", render_page({**data, "state": state}, live=True))

    def _data(self) -> None:
        """Only where it is another than the one that the browser has."""
        if self.headers.get("If-None-Match") == f'"{self.server.store.state()}"':
            return self._send(304, "application/json", "")
        state, data = self.server.store.page()
        return self._send(200, "application/json", as_json({**data, "state": state}), state)

    def _samples(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        start = asked.get("start", ["0"])[0]
        found = self.server.store.samples(asked.get("cell", [""])[0], int(start) if start.isdecimal() else 0, PER_CELL)
        self._send(200, "application/json", as_json(found))

    def _missing(self) -> None:
        self._send(404, "text/plain", "there is nothing here")

    def _send(self, status: int, kind: str, text: str, tag: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Polls are not worth a line."""
