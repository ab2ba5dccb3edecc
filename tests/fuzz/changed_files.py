"""A store's files, changed as an input says: written over, cut off, removed, or left by a kill.

    change   kind: 1 byte | number of the file: 1 byte | position: uint16 | length: 1 byte | bytes

The bytes are there for a change of kind WRITE only. A number beyond the files, or a position beyond
a file's end, counts modulo.
"""

from __future__ import annotations

from collections.abc import Mapping

from hastore.errors import StoreError
from hastore.fs.memory import MemoryFileSystem
from hastore.store.state.limits import read_limits

REMOVE, TRUNCATE, WRITE, KILLED = range(4)
_HEAD = 5
Files = Mapping[str, bytes]
ROOT = "/s"


def files_of(fs: MemoryFileSystem) -> Files:
    """Return the files of a store that is closed, but its lock and its reserve."""
    paths = [path for path in sorted(fs._files) if "/reserve/" not in path]
    return {path: fs.read_bytes(path) for path in paths if not path.endswith("/lock")}


def change(files: Files, kind: int, path: str, at: int = 0, data: bytes = b"") -> bytes:
    """Return a change of a file: bytes from a position on, its length, or that it is gone."""
    return bytes((kind, list(files).index(path))) + at.to_bytes(2) + bytes((len(data),)) + data


def repaired(data: bytes) -> bytes:
    """Return changes of which each has all of its bytes."""
    out, at = bytearray(), 0
    while at + _HEAD <= len(data):
        kind = data[at] % 4
        size = data[at + 4] if kind == WRITE else 0
        piece = data[at + _HEAD : at + _HEAD + size]
        out += bytes((kind,)) + data[at + 1 : at + 4] + bytes((len(piece),)) + piece
        at += _HEAD + size
    return bytes(out)


def laid(files: Files, data: bytes) -> MemoryFileSystem:
    """Lay the files, changed as the input says."""
    now: dict[str, bytes | None] = dict(files)
    paths, at = list(files), 0
    while at + _HEAD <= len(data):
        kind, path = data[at] % 4, paths[data[at + 1] % len(paths)]
        place, size = int.from_bytes(data[at + 2 : at + 4]), data[at + 4]
        raw = now[path]
        at += _HEAD
        if kind == KILLED:
            now[f"{ROOT}/abort"] = b"1"
        elif kind == REMOVE:
            now[path] = None
        elif raw is not None and kind == TRUNCATE:
            now[path] = raw[: place % (len(raw) + 1)]
        elif raw is not None:
            piece, place = data[at : at + size], place % (len(raw) + 1)
            now[path] = (raw[:place] + piece + raw[place + len(piece) :])[: len(raw)]
        if kind == WRITE:
            at += size
    fs = MemoryFileSystem()
    for path, content in now.items():
        fs.make_dirs(path.rpartition("/")[0])
        if content is not None:
            fs.replace_bytes(path, content)
    return fs


def flushed_offset(fs: MemoryFileSystem) -> int:
    """Return up to where the store's limits page says that the log was synced; 0 if it does not."""
    try:
        found = read_limits(fs, ROOT)
    except StoreError:
        return 0
    return 0 if found is None else found.flushed_offset
