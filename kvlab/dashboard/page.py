"""The page: template, style, scripts, plotly and the data in one file that needs no network and allows none."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("dom", "state", "theme", "figures", "tables", "samples", "analyses", "provenance", "start")
"""Files of the page's own script, in order."""
NO_PLOTLY = "the dashboard needs plotly, which isn't installed: pip install 'kvlab[dashboard]'"


def render_page(data: Mapping[str, Any], live: bool = False) -> str:
    """The whole page as HTML. `live`: served by `kvlab dashboard --serve`, and asks there for what is new.

    Scripts run only if their hash is in the page's policy, so a text that became one would not. Raises ValueError where plotly
    isn't installed.
    """
    scripts = {"plotly": plotly_script(), "script": own_script()}
    hashes = " ".join(f"'sha256-{_sha256(text)}'" for text in scripts.values())
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    policy += "form-action 'none'; connect-src " + ("'self'" if live else "'none'")
    parts = {**scripts, "policy": policy, "style": _asset("page.css"), "data": as_json(data)}
    parts["live"] = "yes" if live else "no"
    # In one pass: what is put in is never looked at for places to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def as_json(data: Any) -> str:
    """JSON that can't end the element it stands in, whatever texts it holds; half a surrogate pair becomes a question mark."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", "replace").decode()


def own_script() -> str:
    """The page's own script."""
    return "\n".join(_asset(f"{name}.js") for name in SCRIPTS)


def plotly_script() -> str:
    """plotly.js, from the Python package, which isn't imported. Raises ValueError without it."""
    spec = importlib.util.find_spec("plotly")
    places = (spec.submodule_search_locations or []) if spec else []
    files = [Path(place) / "package_data" / "plotly.min.js" for place in places]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise ValueError(NO_PLOTLY)
    text = file.read_text(encoding="utf-8")
    assert "</script" not in text.lower()
    return text


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
