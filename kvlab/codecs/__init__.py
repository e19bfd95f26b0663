"""Codecs: how keys and values are held in fewer bits or channels. Importing this package registers kvlab's own."""

from kvlab.codecs import decoquant, eigen, kivi, qaq, rtn, think
from kvlab.codecs.base import Codec, CodecError, codec_class, codec_names, make_codec, register_codec
from kvlab.codecs.chain import chain

__all__ = [
    "Codec",
    "CodecError",
    "chain",
    "codec_class",
    "codec_names",
    "decoquant",
    "eigen",
    "kivi",
    "make_codec",
    "qaq",
    "register_codec",
    "rtn",
    "think",
]
