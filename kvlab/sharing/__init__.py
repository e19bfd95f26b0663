"""Sharing: layers that read another layer's cache and hold none. Importing this package registers kvlab's own ways."""

from kvlab.sharing.base import (
    FixedMap,
    Share,
    ShareError,
    make_share,
    map_of,
    register_share,
    resolve,
    share_class,
    share_names,
)
from kvlab.sharing.kvsharer import KVSharer

__all__ = [
    "FixedMap",
    "KVSharer",
    "Share",
    "ShareError",
    "make_share",
    "map_of",
    "register_share",
    "resolve",
    "share_class",
    "share_names",
]
