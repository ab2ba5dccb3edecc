"""Run a node that says what its heap holds, and that may have a leak; the product is unchanged.

    python tests/soak/watched_node.py FOLDER LEAK bin/hastore serve -c FILE

A thread writes FOLDER/gauges each EVERY_S: Python's blocks of memory (`sys.getallocatedblocks`) and
the bytes that malloc has given out (mallinfo2). Both leave out what is free inside the heap, so
they tell a leak from fragmentation. If FOLDER/dump appears, the thread writes how many objects of
each type there are, and with HASTORE_SOAK_TRACE=1 where the most memory was taken (tracemalloc).

LEAK plants what the soak must find, for each connection of the client API: `memory`, a list that
keeps it; `descriptors`, a copy that is never closed; `threads`, one that never ends; `-`, nothing.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pathlib
import runpy
import sys
import threading
import time
import tracemalloc
from collections import Counter
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
EVERY_S = 0.5
KEPT_BYTES = 65_536  # for each connection, as a read buffer
LEAKS = ("memory", "descriptors", "threads")
_TYPES = 400
_PLACES = 60


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"),
            *("fordblks", "keepcost"),
        )
    ]


def gauges(mallinfo2: Any) -> dict[str, int]:
    """Return what the heap holds; without glibc 2.33 only Python's blocks."""
    found = {"blocks": sys.getallocatedblocks()}
    if mallinfo2 is not None:
        info = mallinfo2()
        found["heap_bytes"] = info.uordblks + info.hblkhd
        found["free_bytes"] = info.fordblks
    return found


def _kinds() -> Counter[str]:
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def _dump() -> dict[str, Any]:
    before = _kinds()
    gc.collect()
    kinds = _kinds()
    garbage = before - kinds
    found: dict[str, Any] = {
        "types": dict(kinds.most_common(_TYPES)),
        "garbage": dict(garbage.most_common(_TYPES)),
    }
    if tracemalloc.is_tracing():
        lines = tracemalloc.take_snapshot().statistics("lineno")[:_PLACES]
        found["places"] = {str(one.traceback): one.size for one in lines}
    return found


def _replace(path: pathlib.Path, content: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def watch(folder: pathlib.Path) -> None:
    """Write the gauges until the process ends."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is not None:
        mallinfo2.restype = _Mallinfo2
    asked = folder / "dump"
    while True:
        _replace(folder / "gauges", gauges(mallinfo2))
        if asked.exists():
            _replace(folder / "dumped", _dump())
            asked.unlink()
        time.sleep(EVERY_S)


def plant(leak: str) -> None:
    """Let each connection of the client API leave something behind."""
    from hastore.server.api.connections import Connections

    take_up = Connections._take_up
    kept: list[Any] = []

    def leaking(self: Any, sock: Any, *more: Any) -> Any:
        if leak == "descriptors":
            kept.append(os.dup(sock.fileno()))
        elif leak == "threads":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        connection = take_up(self, sock, *more)
        if leak == "memory":
            kept.append((connection, bytes(KEPT_BYTES).replace(b"\0", b"x")))
        return connection

    Connections._take_up = leaking  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    _, place, planted, *sys.argv = sys.argv
    if os.environ.get("HASTORE_SOAK_TRACE"):
        tracemalloc.start()
    if planted != "-":
        plant(planted)
    pathlib.Path(place).mkdir(exist_ok=True)
    threading.Thread(target=watch, args=(pathlib.Path(place),), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
