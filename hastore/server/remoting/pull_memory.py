"""The memory that pulls take while they have no answer: long names and large filters. Pure state.

A pull keeps its topic's name and its filter for up to a minute. Most take a few hundred bytes, and
the number of pulls that wait is bounded; those count nothing here. What is large has a bound of its
own, so that some thousand small requests cannot take a gigabyte. Pulls with the same filter share
it: it counts once.
"""

from __future__ import annotations

import sys

from hastore.errors import HastoreError
from hastore.record.properties import MAX_GROUP_TOPIC
from hastore.record.sql_filter import SqlFilter

MAX_BYTES = 64 * 1024 * 1024
FEW_TAGS = 32
SHORT_SQL = 128  # characters
_CODE_BYTES = 32  # of a tag's hash, beside its place in the set
_SQL_BYTES = 32  # for each character, about
Filter = frozenset[int] | SqlFilter | None


class NoRoomError(HastoreError):
    """The large filters of pulls that wait take too much already."""


class PullMemory:
    """What the pulls of a node take that have no answer yet."""

    __slots__ = ("_uses", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._uses: dict[int, int] = {}  # of each large filter, by its id: how many pulls have it

    def take(self, topic: str, wanted: Filter) -> None:
        """Count a pull, until `free` is called with the same; raises NoRoomError."""
        name, size = _large_name(topic), _large_filter(wanted)
        if not (name or size):
            return
        uses = self._uses.get(id(wanted), 0)
        added = name + (0 if uses else size)
        if self.bytes + added > MAX_BYTES:
            text = f"pulls with long names or large filters wait: {self.bytes:,} bytes"
            raise NoRoomError(f"{text}, at most {MAX_BYTES:,}; subscribe to fewer tags")
        self.bytes += added
        if size:
            self._uses[id(wanted)] = uses + 1

    def free(self, topic: str, wanted: Filter) -> None:
        """Count a pull no more: it is answered, or its client has gone."""
        name, size = _large_name(topic), _large_filter(wanted)
        self.bytes -= name
        if size:
            left = self._uses.pop(id(wanted)) - 1
            if left:
                self._uses[id(wanted)] = left
            else:
                self.bytes -= size


def _large_name(topic: str) -> int:
    return sys.getsizeof(topic) if len(topic) > MAX_GROUP_TOPIC else 0


def _large_filter(wanted: Filter) -> int:
    if wanted is None:
        return 0
    if isinstance(wanted, frozenset):
        few = len(wanted) <= FEW_TAGS
        return 0 if few else sys.getsizeof(wanted) + _CODE_BYTES * len(wanted)
    return 0 if len(wanted.text) <= SHORT_SQL else _SQL_BYTES * len(wanted.text)
