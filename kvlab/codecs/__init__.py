"""Codecs: how keys and values are held in fewer bits. Importing this package registers kvlab's own."""

from kvlab.codecs import decoquant, kivi, qaq, rtn
from kvlab.codecs.base import Codec, CodecError, codec_class, codec_names, make_codec, one_codec, register_codec

__all__ = [
    "Codec",
    "CodecError",
    "codec_class",
    "codec_names",
    "decoquant",
    "kivi",
    "make_codec",
    "one_codec",
    "qaq",
    "register_codec",
    "rtn",
]
