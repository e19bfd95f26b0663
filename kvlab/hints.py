"""Near misses for error messages."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean x or y?)' for the known names close to a wrong one, or nothing."""
    close = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
