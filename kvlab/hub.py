"""Whether the Hugging Face hub can be reached, asked once, before packages that would each try for half a minute."""

from __future__ import annotations

import os
import sys
from functools import cache

import huggingface_hub
from huggingface_hub import constants

PATIENCE_S = 10
"""Seconds in which the hub must answer at all."""


@cache
def settle_hub() -> None:
    """Have this process and its workers read the local hub cache alone where the hub can't be reached.

    Every package asks whether the hub is offline, and none notices it: each file is tried five times, with waits between.
    """
    if constants.is_offline_mode():
        return
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
    except Exception:  # no route, no name, a proxy that refuses: whatever the client in use raises
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        if (datasets := sys.modules.get("datasets")) is not None:  # has its own copy since it was imported
            datasets.config.HF_HUB_OFFLINE = True
