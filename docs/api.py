"""The API reference from docstrings: `python docs/api.py [FOLDER]` writes HTML (default: build/docs). Any warning ends it."""

from __future__ import annotations

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.render

import kvlab

HARMLESS = ("The module specification .* already been added", "Error parsing type annotation")
"""Of warnings: packages bring their modules along; types of a dataclass's inherited fields are shown as written."""


def public_modules() -> list[str]:
    """Names of all modules without an underscore."""
    found = pkgutil.walk_packages(kvlab.__path__, "kvlab.")
    return ["kvlab", *(one.name for one in found if not any(part.startswith("_") for part in one.name.split(".")))]


def main(folder: Path) -> None:
    """Write the reference."""
    for name in kvlab.__all__:  # loaded when first used, so pdoc would not see them
        setattr(kvlab, name, getattr(kvlab, name))
    pdoc.render.configure(template_directory=Path(__file__).parent / "pdoc", footer_text=f"kvlab {kvlab.__version__}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="pdoc")
        for harmless in HARMLESS:
            warnings.filterwarnings("ignore", harmless)
        pdoc.pdoc(*public_modules(), output_directory=folder)
    print(f"{folder / 'index.html'}: {len(public_modules())} modules")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs"))
