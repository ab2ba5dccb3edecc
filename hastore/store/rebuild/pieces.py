"""A piece: what the records of one range contribute to queues and key index, as columns in a file.

    the arrays, each at a multiple of 8 bytes   JSON   position of the JSON (8)   magic (8)

Queues are ordered by bucket, so that a task of the second step reads one part of each array. A
segment is a run of units whose queue offsets are consecutive; its units are stored as the consume
queue stores them. The file is written under another name and renamed, so it is whole if it exists,
unless the machine lost power.
"""

import json
import mmap
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hastore.errors import StoreError
from hastore.fs.filesystem import FileSystem
from hastore.store.derived.contract import UNIT_FIELDS
from hastore.store.rebuild.layout import RangeResult

Array = npt.NDArray[Any]

UNIT = np.dtype(UNIT_FIELDS)
QUEUE = np.dtype([("topic", "<i4"), ("queue_id", "<i4")])
SEGMENT = np.dtype([("queue", "<i4"), ("first", "<i8"), ("unit", "<i8"), ("count", "<i8")])
BATCH = np.dtype(
    [
        ("queue", "<i4"), ("queue_offset", "<i8"), ("offset", "<i8"), ("size", "<i4"),
        ("tags_code", "<i8"), ("stored_ms", "<i8"), ("base", "<i8"), ("count", "<i4"),
    ]
)  # fmt: skip
KEY = np.dtype([("hash", "<i4"), ("offset", "<i8"), ("stored_ms", "<i8")])
DTYPES = {
    "queues": QUEUE,
    "segments": SEGMENT,
    "units": UNIT,
    "batches": BATCH,
    "keys": KEY,
    "segment_ends": np.dtype("<i8"),  # for each bucket, after its last segment
    "batch_ends": np.dtype("<i8"),  # for each bucket, after its last batch
}
_MAGIC = b"HSPIECE1"
_TAIL_BYTES = 16


def write_piece(
    fs: FileSystem,
    path: str,
    result: RangeResult,
    topics: Sequence[str],
    arrays: dict[str, Sequence[Array]],
) -> None:
    """Write a piece; each array is given in parts. Raises OSError, and then leaves no file."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    file = fs.open(temporary, create=True)
    try:
        places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, parts in arrays.items():
            start = at
            for part in parts:
                if len(part):
                    data = np.ascontiguousarray(part, dtype=DTYPES[name])
                    file.pwrite(data.view(np.uint8).reshape(-1).data, at)
                    at += data.nbytes
            places[name] = start, (at - start) // DTYPES[name].itemsize
            at += -at % 8
        head = {"result": asdict(result), "topics": list(topics), "arrays": places}
        file.pwrite(json.dumps(head).encode() + at.to_bytes(8) + _MAGIC, at)
        file.close()
        fs.rename(temporary, path)
    except BaseException:
        file.close()
        if fs.exists(temporary):
            fs.remove(temporary)
        raise


class Piece:
    """A piece that is open for reading; its arrays are views of the mapped file."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        """Open it; raises StoreError if it is damaged."""
        file = fs.open(path, writable=False)
        try:
            self._map: mmap.mmap | None = file.map() if file.size > _TAIL_BYTES else None
        finally:
            file.close()
        if self._map is None or self._map[-len(_MAGIC) :] != _MAGIC:
            raise StoreError(f"{path} is damaged; remove the folder that holds pieces/")
        at = int.from_bytes(self._map[-_TAIL_BYTES : -len(_MAGIC)])
        head = json.loads(self._map[at:-_TAIL_BYTES])
        self.topics: list[str] = head["topics"]
        fields = head["result"]
        self.result = RangeResult(**{**fields, "buckets": tuple(fields["buckets"])})
        self._places: dict[str, tuple[int, int]] = head["arrays"]

    def array(self, name: str) -> Array:
        """Return one of the arrays; drop it before the piece goes."""
        position, count = self._places[name]
        if not count:
            return np.empty(0, DTYPES[name])
        assert self._map is not None
        return np.frombuffer(self._map, DTYPES[name], count, position)

    def of_bucket(self, name: str, bucket: int) -> Array:
        """Return a bucket's part of "segments" or "batches"."""
        ends = self.array("segment_ends" if name == "segments" else "batch_ends")
        return self.array(name)[int(ends[bucket - 1]) if bucket else 0 : int(ends[bucket])]
