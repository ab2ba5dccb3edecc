"""Compressed bodies, as RocketMQ's clients write and read them. Pure.

sysFlag says whether a body is compressed (0x1) and how (bits 8 to 10): 1 LZ4, 2 ZSTD, 3 ZLIB. Older
clients wrote ZLIB only, and 0. An empty body is none of these. The log, the HA link and the nodes
keep such bodies as they are: bodyCRC is that of the compressed bytes, and only readers decompress.

ZLIB needs no other library. LZ4 and ZSTD (before Python 3.14) are optional packages, imported on
first use: a node needs none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from hastore.errors import CorruptRecordError, UsageError
from hastore.record.layout import FLAG_COMPRESSED

LZ4, ZSTD, ZLIB = "lz4", "zstd", "zlib"
ALGORITHMS = (LZ4, ZSTD, ZLIB)
MAX_BODY_BYTES = 64 * 1024 * 1024  # decompressed; the limit stops decompression bombs
_SHIFT = 8
_MASK = 0x7
COMPRESSION_FLAGS = FLAG_COMPRESSED | _MASK << _SHIFT  # of sysFlag
_TYPES = {0: ZLIB, 1: LZ4, 2: ZSTD, 3: ZLIB}
_FLAGS = {name: FLAG_COMPRESSED | number << _SHIFT for number, name in _TYPES.items() if number}
_LEVEL = 5  # RocketMQ's; LZ4 has its own
_LZ4_RATIO = 255  # bytes that one byte of LZ4 can stand for
_PACKAGES = {LZ4: "lz4", ZSTD: "backports.zstd"}
# The first of these modules that is there. Python's own zstd is since 3.14, and may be left out: to
# look for a module in vain takes longer than to compress a body.
_MODULES = {LZ4: ("lz4.frame",), ZSTD: ("backports.zstd",)}
if sys.version_info >= (3, 14):
    _MODULES[ZSTD] = ("compression.zstd", "backports.zstd")

# Return the decompressed body, or so many bytes of it; raise BadStreamError.
Inflate = Callable[[bytes, int], bytes]


class BadStreamError(Exception):
    """Bytes that do not decompress."""


def algorithm_of(sys_flag: int) -> str | None:
    """Return how a body with this sysFlag is compressed: None if it is not, "" if nobody knows."""
    if not sys_flag & FLAG_COMPRESSED:
        return None
    return _TYPES.get(sys_flag >> _SHIFT & _MASK, "")


def check_algorithm(name: str) -> None:
    """Raise UsageError, which names the remedy, unless bodies can be compressed like this here."""
    if name not in ALGORITHMS:
        raise UsageError(f"{name!r} is no compression: use one of {', '.join(ALGORITHMS)}")
    _COMPRESS[name](b"")


def compress(body: bytes, algorithm: str) -> tuple[bytes, int]:
    """Return a body compressed and its bits of sysFlag; as it is, and 0, if that is not shorter."""
    packed = _COMPRESS[algorithm](body)
    return (packed, _FLAGS[algorithm]) if len(packed) < len(body) else (body, 0)


def decompress(
    body: bytes, sys_flag: int, where: str, inflates: Mapping[str, Inflate] | None = None
) -> bytes:
    """Undo the compression that sysFlag names; `where` names the record in errors.

    `inflates` replaces the libraries for some algorithms. Raises CorruptRecordError if the body
    does not decompress, or has more than MAX_BODY_BYTES when decompressed: at most one byte more
    is ever made. Raises UsageError, which names the remedy, without the library.
    """
    algorithm = algorithm_of(sys_flag)
    if algorithm is None or not body:
        return body
    if not algorithm:
        kind = sys_flag >> _SHIFT & _MASK
        raise CorruptRecordError(
            f"the body of {where} has the unknown compression {kind}; {AS_STORED}"
        )
    inflate = (inflates or _INFLATE).get(algorithm) or _INFLATE[algorithm]
    try:
        text = inflate(body, MAX_BODY_BYTES + 1)
    except BadStreamError as failure:
        raise CorruptRecordError(
            f"the body of {where} does not decompress ({algorithm}): {failure}; {AS_STORED}"
        ) from failure
    if len(text) > MAX_BODY_BYTES:
        raise CorruptRecordError(
            f"the body of {where} has over {MAX_BODY_BYTES} bytes when decompressed; {AS_STORED}"
        )
    return text


AS_STORED = "it can be read as it is stored only"


# -- the libraries


def _library(algorithm: str) -> Any:
    """Import what an algorithm needs. Raises UsageError with the remedy."""
    for name in _MODULES[algorithm]:
        try:
            return import_module(name)
        except ImportError as failure:
            missing = failure
    raise UsageError(
        f"{algorithm} needs the package {_PACKAGES[algorithm]}: pip install 'hastore[compression]'"
    ) from missing


def _zlib() -> Any:
    from zlib_ng import zlib_ng

    return zlib_ng


def _compress_lz4(body: bytes) -> bytes:
    # RocketMQ's lz4-java reads independent blocks only.
    packed: bytes = _library(LZ4).compress(body, block_linked=False)
    return packed


def _compress_zstd(body: bytes) -> bytes:
    packed: bytes = _library(ZSTD).compress(body, _LEVEL)
    return packed


def _compress_zlib(body: bytes) -> bytes:
    packed: bytes = _zlib().compress(body, _LEVEL)
    return packed


def _inflate_lz4(body: bytes, most: int) -> bytes:
    library = _library(LZ4)
    # The library takes memory for `most` bytes at once, and no body becomes as long as this.
    most = min(most, _LZ4_RATIO * len(body) + 1)
    return _inflate_frames(library.LZ4FrameDecompressor, RuntimeError, body, most)


def _inflate_zstd(body: bytes, most: int) -> bytes:
    library = _library(ZSTD)
    return _inflate_frames(library.ZstdDecompressor, library.ZstdError, body, most)


def _inflate_frames(
    begin: Callable[[], Any], failure: type[Exception], body: bytes, most: int
) -> bytes:
    """Decompress frames, one after the other: Java's readers take several, too."""
    pieces, rest = [], body
    while rest and most > 0:
        frame = begin()
        try:
            piece = frame.decompress(rest, most)
        except failure as wrong:
            raise BadStreamError(str(wrong)) from wrong
        pieces.append(piece)
        most -= len(piece)
        if not frame.eof:
            if most > 0:
                raise BadStreamError("it ends within its compressed stream")
            break
        rest = frame.unused_data or b""
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _inflate_zlib(body: bytes, most: int) -> bytes:
    library = _zlib()
    stream = library.decompressobj()
    try:
        text: bytes = stream.decompress(body, most)
    except library.error as wrong:
        raise BadStreamError(str(wrong)) from wrong
    if not stream.eof and len(text) < most:
        raise BadStreamError("it ends within its compressed stream")
    return text


_COMPRESS = {LZ4: _compress_lz4, ZSTD: _compress_zstd, ZLIB: _compress_zlib}
_INFLATE: dict[str, Inflate] = {LZ4: _inflate_lz4, ZSTD: _inflate_zstd, ZLIB: _inflate_zlib}
