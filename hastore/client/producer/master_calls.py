"""Requests of a producer that are no puts: the ends of transactions, and questions for checks.

    incoming --step--> unsent --step--> in flight --reply--> ended
                          ^                |
                          +-- roll back ---+   refused, late, connection lost, another master

They go to the master by the connection of the puts, and are repeated until they have an outcome or
their time is over: each may be repeated without harm. `SendCore` calls every method but `admit`,
`stop_polls` and `abandon`; it asks which node is the master.

A poll has no time limit, and nobody loses anything with it. It ends when the producer does. A node
answers it after POLL_MS at the latest: one that does not is late as with any other request, since a
machine that has lost its power ends no connection.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hastore.client.connections.transport import Arrival, Transport
from hastore.client.messages import Status, failure_of
from hastore.client.producer.futures import Outcome
from hastore.errors import ClientError, HastoreError, NotAuthenticatedError, TransactionError
from hastore.protocol import api

log = logging.getLogger(__name__)

POLL_MS = 20_000  # for so long a node may keep a poll
PAUSES_MS = (10.0, 20.0, 50.0, 100.0, 200.0)
LAST_TRY_MS = 50.0  # a refused call is not made again so shortly before its time is over
_NEVER = float("inf")
_NO_REQUEST = (ValueError, TypeError, OverflowError, msgspec.MsgspecError)  # made or encoded
_AGAIN = frozenset({"BUSY", "SERVICE_NOT_AVAILABLE"})


class MasterCall(msgspec.Struct, eq=False):
    """One request for the master.

    `outcome` gets the reply of an EndTransaction, or the reply and its payload of a poll.
    """

    make: Callable[[int], api.Request]  # from the request's number
    outcome: Outcome
    expires_ms: float
    is_poll: bool = False
    unknown: bool = False  # an attempt may have been carried out
    address: str | None = None  # where it is in flight
    rid: int = 0
    sent_ms: float = 0.0  # or when it was last seen to leave, over a slow link
    end_bytes: int = 0  # `Transport.sent_bytes` with it
    status: Status = Status.TIMEOUT  # of the last answer; TIMEOUT also if none has come yet
    reason: str = ""

    @property
    def in_doubt(self) -> bool:
        """Whether an attempt may have ended a transaction; a poll ends none."""
        return (self.unknown or self.address is not None) and not self.is_poll


class MasterCalls:
    """The calls of one producer that have no outcome yet."""

    def __init__(self, transport: Transport, rids: Iterator[int], ended: deque[Outcome]) -> None:
        """Prepare; `ended` gets the outcomes whose waiters are to be notified."""
        self._transport = transport
        self._rids = rids
        self._ended = ended
        self._incoming: deque[MasterCall] = deque()
        self._open: dict[int, MasterCall] = {}  # by id; in the order in which they were admitted
        self._flying: dict[int, MasterCall] = {}  # by rid
        self._paused_until_ms = 0.0
        self._pauses = 0
        self._no_polls = False
        self._closed: str | None = None

    def __len__(self) -> int:
        """Return how many calls have no outcome yet."""
        return len(self._incoming) + len(self._open)

    @property
    def ends(self) -> int:
        """How many of them are ends of transactions."""
        if not self._open and not self._incoming:  # as in most producers
            return 0
        return sum(1 for call in self._all() if not call.is_poll)

    def _all(self) -> list[MasterCall]:
        incoming = tuple(self._incoming)  # first: `step` adds a call to `_open` before it goes
        return list({id(call): call for call in (*self._open.values(), *incoming)}.values())

    @property
    def takes_polls(self) -> bool:
        """Whether `admit` still takes polls."""
        return self._closed is None and not self._no_polls

    # -- called by any thread

    def admit(self, call: MasterCall) -> None:
        """Take a call; the caller then wakes the driver. Raises ClientError once closed."""
        if self._closed is not None or (call.is_poll and not self.takes_polls):
            raise ClientError(self._closed or "the producer is closed")
        self._incoming.append(call)
        if self._closed is not None:  # meanwhile: nobody may be there to end it
            self.end(self._closed)

    def stop_polls(self) -> None:
        """Let polls end, and none begin any more. Takes no lock."""
        self._no_polls = True

    def abandon(self, reason: str) -> None:
        """End all calls in a forked child. Takes no lock."""
        self.end(reason)

    # -- called by the core

    def step(self, now: float, master: str | None) -> None:
        """End what is late, and send what can be sent."""
        incoming = self._incoming
        while incoming:
            call = incoming[0]
            self._open[id(call)] = call
            incoming.popleft()
        for call in list(self._open.values()):
            if call.outcome.done():
                self._drop(call)
            elif call.is_poll and self._no_polls:
                self._fail(call, ClientError("the producer is closed"))
            elif now >= call.expires_ms:
                call.unknown |= call.address is not None
                self._fail(call, _late(call))
            elif call.address is None and master is not None and now >= self._paused_until_ms:
                if call.status.is_refusal and call.expires_ms - now < LAST_TRY_MS:
                    continue  # it then fails with its last refusal
                if not self._send(call, master, now):
                    self._paused_until_ms = now + PAUSES_MS[0]

    def _send(self, call: MasterCall, master: str, now: float) -> bool:
        call.rid = next(self._rids)
        try:
            request = call.make(call.rid)
            api.encode(request)
        except _NO_REQUEST as failure:  # which must not end what sends all others
            self._fail(call, ClientError(f"the request cannot be sent: {failure}"))
            return True
        call.address, call.sent_ms = master, now  # first: an interrupted `send` may have sent it
        self._flying[call.rid] = call
        call.end_bytes = 0
        if self._transport.send(master, request):
            call.end_bytes = self._transport.sent_bytes(master)
            return True
        del self._flying[call.rid]
        call.address = None
        return False

    def on_reply(self, arrival: Arrival, now: float) -> bool:
        """Take a reply, if it is to a call; return whether another node may be the master."""
        reply = arrival.reply
        call = None if reply is None else self._flying.get(reply.rid)
        if call is None or call.address != arrival.address:
            return False
        del self._flying[call.rid]
        call.address = None
        if isinstance(reply, api.Failed):
            return self._on_failed(call, reply, now)
        if call.is_poll:
            if isinstance(reply, api.Checks):
                self._succeed(call, (reply, arrival.payload))
            else:
                self._fail(call, ClientError(f"the node answered {type(reply).__name__}"))
            return False
        if not isinstance(reply, api.PutDone):
            self._fail(call, ClientError(f"the node answered {type(reply).__name__}"))
            return False
        return self._on_end(call, reply, now)

    def _on_end(self, call: MasterCall, reply: api.PutDone, now: float) -> bool:
        status = call.status = reply.status
        call.reason = reply.reason
        if status is Status.PUT_OK:
            self._succeed(call, reply)
        elif status.is_refusal or status.is_stored or status is Status.TIMEOUT:
            call.unknown |= not status.is_refusal
            self._pause(now)
            return status is Status.SERVICE_NOT_AVAILABLE
        elif status is Status.MESSAGE_ILLEGAL:
            self._fail(call, TransactionError(reply.reason or "there is no such transaction"))
        else:
            self._fail(call, failure_of(status, reply.reason, None, unknown=call.in_doubt))
        return False

    def _on_failed(self, call: MasterCall, reply: api.Failed, now: float) -> bool:
        if reply.status in _AGAIN:
            call.status, call.reason = Status(reply.status), reply.reason
            self._pause(now)
            return reply.status == Status.SERVICE_NOT_AVAILABLE
        known = reply.status in Status.__members__
        status = Status(reply.status) if known else None
        if status is None:
            self._fail(call, ClientError(f"{reply.status}: {reply.reason}"))
        else:
            self._fail(call, failure_of(status, reply.reason, None, unknown=call.in_doubt))
        return False

    def roll_back(self) -> None:
        """Take back what is in flight: its replies will not come, or are not wanted."""
        for call in self._open.values():
            if call.address is not None:
                call.unknown = True
                call.address = None
        self._flying.clear()
        self._paused_until_ms = 0.0

    def refuse(self, why: str) -> None:
        """End all calls: no node accepts this client."""
        for call in self._all():
            if call.in_doubt:
                self._fail(call, failure_of(Status.UNAUTHENTICATED, why, None, unknown=True))
            else:
                self._fail(call, NotAuthenticatedError(why))

    def end(self, reason: str) -> None:
        """End all calls, and take none any more."""
        self._closed = self._closed or reason
        for call in self._all():
            call.unknown |= call.address is not None
            call.reason = call.reason or reason
            self._fail(call, ClientError(reason) if call.is_poll else _late(call))
        self._incoming.clear()

    def sent_ms(self) -> float | None:
        """Return when the first call in flight was sent; None without any.

        A poll counts as sent when the node's time for it is over.
        """
        flying = self._flying.values()
        return min([c.sent_ms + (POLL_MS if c.is_poll else 0) for c in flying], default=None)

    def note_leaving(self, acked_bytes: int, now: float) -> None:
        """Note which calls still leave: the node has taken so many bytes of the connection."""
        for call in self._flying.values():
            if call.end_bytes > acked_bytes:
                call.sent_ms = now

    def due_ms(self, now: float, master: str | None) -> float:
        """Return when `step` must be called, even if nothing arrives; infinity: never."""
        if self._incoming:
            return 0.0
        due = _NEVER
        for call in self._open.values():
            due = min(due, call.expires_ms)
            if call.is_poll and self._no_polls:
                due = 0.0
            elif call.address is None and master is not None:
                due = min(due, max(self._paused_until_ms, now + 1.0))
        return due

    # -- outcomes

    def _pause(self, now: float) -> None:
        self._paused_until_ms = now + PAUSES_MS[min(self._pauses, len(PAUSES_MS) - 1)]
        self._pauses += 1

    def _succeed(self, call: MasterCall, value: Any) -> None:
        self._pauses = 0
        if not call.outcome.done() and call.outcome.succeed(value):
            self._ended.append(call.outcome)
        self._drop(call)

    def _fail(self, call: MasterCall, failure: HastoreError) -> None:
        if not call.outcome.done() and call.outcome.fail(failure):
            self._ended.append(call.outcome)
        self._drop(call)

    def _drop(self, call: MasterCall) -> None:
        self._open.pop(id(call), None)
        self._flying.pop(call.rid, None)


def _late(call: MasterCall) -> HastoreError:
    """Return the failure of a call whose time is over."""
    reason = call.reason or "no master has answered in time"
    status = call.status
    if status is Status.TIMEOUT and not call.unknown:
        status = Status.SERVICE_NOT_AVAILABLE
    if status.is_stored:  # what ends the transaction is in a log, and was not confirmed
        status = Status.TIMEOUT
    return failure_of(status, reason, None, unknown=call.unknown)
