"""Append another node's bytes to this node's log, and take over its history entries on the way.

A slave's link and a promotion's catch-up use it, each in its own thread.
"""

import logging
from collections.abc import Callable

from hastore.errors import (
    STORE_CLOSED,
    NoLogFileError,
    ProtocolError,
    StoreBrokenError,
    StoreError,
    StoreFullError,
)
from hastore.ha.node.member import Member
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import (
    History,
    agreed,
    due_entries,
    next_start,
    same_resumptions,
)

log = logging.getLogger(__name__)


def require_open(store: ReplicaLog) -> None:
    """Raise StoreBrokenError if the log takes nothing any more: such a node follows nobody.

    Its master would count it as in sync until something is put.
    """
    if store.broken_reason is not None:
        raise StoreBrokenError(f"{STORE_CLOSED}{store.broken_reason}")


class Receiver:
    """Append the bytes that one peer sends, while the gate is open for the link's epoch.

    A history entry is taken over, durably, when the log ends exactly at the entry's start. This
    happens before that offset is reported, and before a byte beyond it is written. Methods raise
    ProtocolError when the epoch may not append any more.
    """

    def __init__(self, member: Member, epoch: int, history: History) -> None:
        self._member = member
        self._epoch = epoch
        self._history = history
        self._bound: int | None = None
        self.full: str | None = None  # why nothing is appended; None while there is room

    def begin(self) -> None:
        """Take over the entries that start at the log's end, and which resumptions its bytes are
        of, before the first byte.
        """
        with self._member.gate.entered(self._epoch) as mine:
            self._check_epoch(mine)
            self._member.state.note_written_over(None)  # both logs are the same up to here
            self._take_entries()

    def room(self) -> int | None:
        """Return how many bytes may follow before the next entry is due; None: no entry follows."""
        if self._bound is None:
            return None
        room = self._bound - self._member.store.max_offset
        if room <= 0:
            raise ProtocolError(f"the log passed epoch start {self._bound} without its entry")
        return room

    def append(self, offset: int, data: memoryview, while_full: Callable[[], None]) -> None:
        """Append a piece of a body.

        If the disk is full, call `while_full`, which waits, and try again.
        """
        gate, store = self._member.gate, self._member.store
        while len(data):
            room = None if self._bound is None else self.room()
            piece = data if room is None else data[:room]
            try:
                with gate.lock:
                    if gate.epoch != self._epoch:
                        self._check_epoch(mine=False)
                    store.append_replica(offset, piece)
                    if room is not None and len(piece) == room:
                        self._take_entries()
            except StoreFullError as error:
                self._say_full(error)
                while_full()
                continue
            self.full = None
            if room is None:
                return
            offset += len(piece)
            data = data[len(piece) :]

    def append_spliced(
        self,
        offset: int,
        move: Callable[[int, int, int], int],
        size: int,
        while_full: Callable[[], None],
    ) -> None:
        """Append, at `offset`, `size` bytes that are in a pipe.

        `move(fd, position, size)` moves bytes from the pipe into the log's file, and returns their
        number. Raises StoreError when a move fails: the bytes that are left in the pipe cannot be
        recovered, so the link must end.
        """
        store = self._member.store
        while size:
            try:
                with self._member.gate.entered(self._epoch) as mine:
                    self._check_epoch(mine)
                    if offset != store.max_offset:
                        raise ProtocolError(
                            f"bytes for offset {offset}, but this log ends at {store.max_offset}"
                        )
                    room = self.room()
                    place = store.replica_range(offset, size if room is None else min(size, room))
                    try:
                        moved = move(place.fd, place.position, place.size)
                    except OSError as failure:
                        cause = store.replica_failed(offset, place.size, failure)
                        raise StoreError(f"the link starts again: {cause}") from failure
                    store.commit_replica(offset, moved)
                    if room is not None and moved == room:
                        self._take_entries()
            except StoreFullError as error:
                self._say_full(error)
                while_full()
                continue
            offset += moved
            self.full = None
            size -= moved

    def _say_full(self, error: StoreFullError) -> None:
        """Log once, not at each try, that the disk is full."""
        if self.full is None and isinstance(error, NoLogFileError):
            log.error("nothing is appended until the next log file can be made: %s", error)
        elif self.full is None:
            log.error("the disk is full, nothing is appended until there is room: %s", error)
        self.full = f"nothing of what the master sends is appended: {error}"

    def _check_epoch(self, mine: bool) -> None:
        if not mine:
            raise ProtocolError(f"epoch {self._epoch} is superseded; its bytes are refused")

    def _take_entries(self) -> None:
        member = self._member
        mine, end = member.state.history, member.store.max_offset
        base = same_resumptions(agreed(mine, end, self._history), self._history)
        due = due_entries(base, end, self._history)
        if due or base != mine:
            member.state.take_entries(due, base)
        self._bound = next_start(member.state.history, self._history)
