"""Producers of hastore's that wait to be asked how transactions of their group end.

    AskChecks --waits--> a half message, or its time is over --> Checks
                  ^ given by CheckBacks

The client API is request and reply: so a producer that can decide asks for what its group must
decide, and asks again after each answer. It decides by EndTransaction, or leaves the message open;
then it is asked again after the usual interval.

Between two requests a producer is at work on its decisions. It still counts as one that can be
asked, for GONE_MS: what is meant for it waits, up to KEPT_MAX messages and KEPT_BYTES. So a check
does not pass unseen because its only producer was busy for a moment.

Everything runs in the API's thread, with the API's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hastore.clock import Clock
from hastore.protocol.api import AskChecks, Checks, Failed
from hastore.record.transactions import Half
from hastore.server.api.connections import Connection
from hastore.server.remoting.door import Door

GONE_MS = 60_000.0
KEPT_MAX = 256
KEPT_BYTES = 4 << 20  # or one larger message
GROUPS_MAX = 16  # of one connection
POLLERS_MAX = 10_000  # of a node


class Poller:
    """One producer of one group: a connection that asks for what is to be decided."""

    def __init__(self, connection: Connection, group: str) -> None:
        self.connection = connection
        self.group = group
        self.rid: int | None = None  # of the request that waits
        self.timer: int | None = None
        self.asked_ms = 0.0  # when it last asked
        self._kept: dict[int, tuple[int, int, bytes]] = {}  # by the half message's offset
        self._bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether one more half message may wait for it."""
        return len(self._kept) < KEPT_MAX and self._bytes < KEPT_BYTES

    def keep(self, half: Half, checks: int, record: bytes) -> None:
        """Let a half message wait for it."""
        self.drop(half.offset)
        self._kept[half.offset] = half.place, checks, record
        self._bytes += len(record)

    def drop(self, offset: int) -> None:
        """Forget a half message."""
        kept = self._kept.pop(offset, None)
        self._bytes -= 0 if kept is None else len(kept[2])

    def take(self, is_open: Callable[[int], bool]) -> tuple[list[tuple[int, int, int]], bytes]:
        """Return what waits and is still open, and forget it."""
        found = [(offset, *kept) for offset, kept in self._kept.items() if is_open(offset)]
        self._kept.clear()
        self._bytes = 0
        halves = [(offset, place, checks) for offset, place, checks, _ in found]
        return halves, b"".join([record for *_, record in found])


class CheckPolls:
    """The producers that wait, by group."""

    def __init__(self, door: Door) -> None:
        """Prepare."""
        self._parts = door.parts
        self._door = door
        self._clock: Clock = door.parts.clock
        self._of: dict[str, dict[Connection, Poller]] = {}
        self._counts: dict[Connection, int] = {}  # of the groups of each connection
        self._due: dict[Poller, None] = {}  # they have something, and a request that waits

    def __len__(self) -> int:
        """Return the number of producers, once for each of their groups."""
        return sum(map(len, self._of.values()))

    def ask(self, connection: Connection, request: AskChecks) -> None:
        """Take a request: answer it now, or let it wait."""
        reason = self._parts.backend.writable_reason()
        if reason is not None:
            self._refuse(connection, request.rid, "SERVICE_NOT_AVAILABLE", reason)
            return
        poller = self._of.get(request.group, {}).get(connection)
        if poller is None:
            if self._counts.get(connection, 0) >= GROUPS_MAX or len(self) >= POLLERS_MAX:
                text = f"more than {GROUPS_MAX} groups of a connection, {POLLERS_MAX:,} of a node"
                self._refuse(connection, request.rid, "BUSY", text)
                return
            poller = Poller(connection, request.group)
            self._of.setdefault(request.group, {})[connection] = poller
            self._counts[connection] = self._counts.get(connection, 0) + 1
        self._answer(poller, empty=True)  # an earlier request of it
        now_ms = self._clock.monotonic_ms()
        poller.asked_ms, poller.rid = now_ms, request.rid
        self._answer(poller, empty=not request.wait_ms)
        if poller.rid is not None:
            over = partial(self._answer, poller, empty=True)
            poller.timer = self._door.at(now_ms + request.wait_ms, over)

    def of(self, group: str, may_be_asked: Callable[[Connection], bool]) -> list[Poller]:
        """Return a group's producers that can take one more half message."""
        of_group = self._of.get(group)
        if not of_group:
            return []
        return [
            one
            for one in of_group.values()
            if not one.connection.ended and one.has_room and may_be_asked(one.connection)
        ]

    def give(self, poller: Poller, half: Half, checks: int, record: bytes) -> None:
        """Ask a producer about a half message: it gets it with the next `flush`."""
        poller.keep(half, checks, record)
        if not self._due:
            self._door.later(self.flush)
        self._due[poller] = None

    def flush(self) -> None:
        """Answer the requests for which there is something."""
        due, self._due = self._due, {}
        for poller in due:
            self._answer(poller, empty=False)

    def look(self) -> None:
        """Forget producers that are gone; refuse what waits if this node is no master any more."""
        reason = self._parts.backend.writable_reason()
        now_ms = self._clock.monotonic_ms()
        for poller in list(self._all()):
            ended = poller.connection.ended
            if reason is not None and poller.rid is not None and not ended:
                rid = self._unpark(poller)
                self._refuse(poller.connection, rid, "SERVICE_NOT_AVAILABLE", reason)
            idle = poller.rid is None and now_ms - poller.asked_ms > GONE_MS
            if ended or reason is not None or idle:
                self._forget(poller)

    def _all(self) -> Iterator[Poller]:
        for of_group in self._of.values():
            yield from of_group.values()

    def _forget(self, poller: Poller) -> None:
        if poller.rid is not None:
            self._unpark(poller)
        of_group, connection = self._of[poller.group], poller.connection
        del of_group[connection]
        if not of_group:
            del self._of[poller.group]
        self._counts[connection] -= 1
        if not self._counts[connection]:
            del self._counts[connection]
        self._due.pop(poller, None)

    def _answer(self, poller: Poller, *, empty: bool) -> None:
        """Answer the request that waits, if there is one: with what is still open, or nothing."""
        if poller.rid is None:
            return
        transactions = self._parts.backend.store.transactions
        halves, records = poller.take(lambda offset: transactions.find(offset) is not None)
        if halves or empty:
            rid = self._unpark(poller)
            self._parts.replies.send(poller.connection, Checks(rid, halves), records or None)

    def _unpark(self, poller: Poller) -> int:
        """Let no request of a producer wait any more; return its number."""
        rid, poller.rid = poller.rid, None
        if poller.timer is not None:
            self._door.cancel(poller.timer)
            poller.timer = None
        assert rid is not None, "a request waits"
        return rid

    def _refuse(self, connection: Connection, rid: int, status: str, reason: str) -> None:
        master = self._parts.backend.master_map().master_api
        self._parts.replies.send(connection, Failed(rid, status, reason, master))
