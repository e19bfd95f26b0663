"""What `kvlab analyze` wrote, as the page shows it: any NAME.json of an analysis at or below the given folders and globs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab.tables import matching

NAMES = ("sparsity", "heavy_hitters", "persistence", "heads", "hash")
"""Analyses that the page can draw."""
_PARTS = ("title", "meaning", "rows", "lines")


def analysis_files(places: Iterable[Path]) -> list[Path]:
    """Files with the name of an analysis, sorted, each once."""
    folders = [start for place in places for start in matching(place) if start.is_dir()]
    files = [file for folder in folders for name in NAMES for file in folder.rglob(f"{name}.json")]
    return sorted({file.resolve(): file for file in files}.values())


def read_analyses(files: Iterable[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Title, meaning, rows, lines, about and path of each analysis, and a line for each file that can't be read."""
    found, skipped = [], []
    for file in files:
        try:
            content = json.loads(file.read_bytes())
            if not isinstance(content, dict) or "analyses" not in content:
                continue  # another program's file of that name
            about = _about(content)
            for name, analysis in content["analyses"].items():
                if name in NAMES:
                    parts = {part: analysis.get(part) or "" for part in _PARTS}
                    found.append({"name": name, **parts, "rows": list(analysis["rows"]), "about": about, "path": str(file)})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            skipped.append(f"{file} is left out ({' '.join(str(error).split())}): run `kvlab analyze` again")
    return sorted(found, key=lambda one: (one["about"], NAMES.index(one["name"]))), skipped


def _about(content: Mapping[str, Any]) -> str:
    texts = content.get("texts")
    pieces = f"{texts} text{'' if texts == 1 else 's'} of {content.get('tokens')} tokens"
    return ", ".join(str(part) for part in (content.get("model"), pieces, content.get("dtype")) if part)
