"""The two sides of an audit: what each can compare, and the bytes and digests of its log.

A side is a store's folder (folder.py) or a running node (node.py). `Extent` is plain data, which
travels to the tasks; `open_side` (opening.py) opens it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

RANGE_BYTES = 16 * 1024 * 1024  # of one digest; ranges end at multiples of it
READ_BYTES = 1024 * 1024  # of one read

FOLDER = "hastore store"
ROCKETMQ = "RocketMQ store"
NODE = "node"

Epochs = tuple[tuple[int, int], ...]  # (epoch, start offset), both rising


@dataclass(frozen=True)
class Extent:
    """What a side has when the audit begins. All offsets are bytes of the log."""

    where: str  # the folder's path, or tcp://HOST:PORT
    kind: str
    min_offset: int
    end_offset: int  # compared up to here
    end_is: str  # what `end_offset` is: "confirmed offset", "readable offset", "last whole record"
    max_offset: int  # the end of its log, as far as it is known; at least `end_offset`
    file_size: int | None = None  # of a log file; None: not known
    epochs: Epochs = ()  # a node's history


@dataclass(frozen=True)
class Missing:
    """A side does not have a range (any more)."""

    where: str
    min_offset: int
    end_offset: int
    why: str = ""

    def reason(self, start: int) -> str:
        """Return why the range that begins at `start` is missing, as text for people."""
        if self.why:
            return self.why
        if start < self.min_offset:
            return f"{self.where} removed it by retention: its log begins at {self.min_offset} now"
        return f"{self.where} was cut or restarted: its log is readable up to {self.end_offset} now"


class Side(Protocol):
    """One side, open; used by one thread. Ranges have at most RANGE_BYTES."""

    where: str

    def begin(self, start: int, end: int) -> None:
        """Ask for the digest of a range; `finish` returns it, in the order of the calls."""
        ...

    def finish(self) -> bytes | Missing:
        """Return the digest of the oldest range that was begun. Raises HastoreError."""
        ...

    def read(self, start: int, end: int) -> bytes | Missing:
        """Return the bytes of a range. Raises HastoreError. No digest may be under way."""
        ...

    def lost(self, start: int, end: int) -> Missing | None:
        """Return how a cut has changed a range since the audit began; None if none has."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def covering(history: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the (epoch, start offset) entries that cover [start, end), as a node states them."""
    first = 0
    for epoch, begin in history:
        if begin > start:
            break
        first = epoch
    return [(first, start), *((epoch, at) for epoch, at in history if start < at < end)]
