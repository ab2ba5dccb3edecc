"""Compressed bodies: whatever they hold, they decompress within the bound or are refused."""

from __future__ import annotations

from unittest import mock

from hastore.errors import CorruptRecordError
from hastore.record import compression
from hastore.record.compression import ALGORITHMS, algorithm_of, compress, decompress
from tests.fuzz import kit

MOST = 1 << 20  # instead of 64 MiB
FLAGS = {name: compress(b"x" * 1_000, name)[1] for name in ALGORITHMS}
REACHES = (
    decompress, compression._inflate_frames, compression._inflate_zlib, compression._inflate_lz4,
    compression._inflate_zstd,
)  # fmt: skip
LEAST = kit.Least(0.25, 3)
MEMORY_BYTES = 16 * MOST


def seeds() -> list[bytes]:
    """Return bodies of each kind; the first byte is the kind in sysFlag, as clients write it."""
    out = []
    for name, flag in FLAGS.items():
        packed = compress(b"the body of a message " * 9, name)[0]
        bomb = compress(bytes(MOST + 1), name)[0]
        kind = bytes((flag >> 8 & 7,))
        out += [kind + packed, kind + packed * 2, kind + packed[:-3], kind + packed + b"\0\0"]
        out += [kind + bomb] if len(bomb) < 4_000 else []
    return [*out, b"\0" + out[-2][1:], b"\x07" + out[0][1:], b"\1"]


def one(data: bytes) -> None:
    """Decompress, with a lower bound; what comes out is compressed, and decompressed again."""
    flag = 1 | (data[0] & 7 if data else 0) << 8
    with mock.patch.object(compression, "MAX_BODY_BYTES", MOST):
        with kit.documented(CorruptRecordError):
            found = decompress(data[1:], flag, "the record")
        assert len(found) <= MOST
        name = algorithm_of(flag)
        if name and data[1:]:
            packed, bits = compress(found, name)
            assert decompress(packed, bits, "the record") == found
