"""Bytes of the log for a node whose own are damaged there: the answer to a REPAIR, and the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from hastore.errors import StoreError, UsageError
from hastore.ha.hello.peer import Call
from hastore.ha.rules.epochs import EpochStarts, epochs_of
from hastore.protocol.hello import REPAIR_BYTES_MAX, Answer, Hello, RangeOf, Refused


class RangedLog(Protocol):
    """What is read here of a store."""

    @property
    def min_offset(self) -> int:
        """The offset of the first byte."""
        ...

    @property
    def readable_offset(self) -> int:
        """The end of the bytes that readers may see."""
        ...

    def view(self, offset: int, max_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend a view of the bytes from `offset` on, up to a file's end."""
        ...


def answer_range(store: RangedLog, history: Callable[[], EpochStarts], hello: Hello) -> Answer:
    """Return the bytes that a REPAIR asks for. The caller checks them.

    They are of one history: a cut lowers the readable offset first, and changes the history before
    the offset can rise again.
    """
    start, end = hello.copy_from, hello.copy_to
    if not 0 <= start <= end <= start + REPAIR_BYTES_MAX:
        return Refused(f"[{start}, {end}) is no range of at most {REPAIR_BYTES_MAX} bytes")
    before = list(history())
    data = bytearray()
    if store.min_offset <= start and end <= store.readable_offset:
        try:
            while start + len(data) < end:
                at = start + len(data)
                with store.view(at, end - at) as view:
                    if not view:
                        break
                    data += view
        except (StoreError, UsageError, OSError) as failure:
            return Refused(f"bytes [{start}, {end}) cannot be read: {failure}")
    if len(data) < end - start or end > store.readable_offset or list(history()) != before:
        data.clear()
    covering = epochs_of(before, start, end) if data else []
    return RangeOf(store.min_offset, store.readable_offset, bytes(data), tuple(covering))


def range_in(made: Call, start: int, end: int) -> RangeOf | str:
    """Return what a node has answered to a REPAIR, or why it has none of the range."""
    made.close()
    answer = made.answer
    if isinstance(answer, Refused):
        return answer.reason
    if not isinstance(answer, RangeOf):
        return f"it answered {type(answer).__name__}"
    if len(answer.data) not in (0, end - start):
        return f"it sent {len(answer.data)} bytes of [{start}, {end})"
    return answer
