"""The Future of a put: a stdlib Future that costs nearly nothing until somebody waits for it.

A stdlib Future makes a Condition, two lists and six attributes when it is made, and takes the
Condition's lock when it ends: a fifth of what a put costs its producer. This one makes them when
the first waiter or callback asks for the Condition, and keeps the node's answer as it came until
somebody wants the result.

Why no waiter is missed: who waits makes the Condition, then looks at the state under its lock; who
settles changes the state, then looks for a Condition. One of both sees the other.

Why slots: in CPython 3.11 an instance's dict comes into being at a write that finds no room in its
class's shared keys, and a garbage collection may run in the middle of that. When a finalizer there
lets another thread write to the same instance, that makes a dict too, and the values are freed
twice: the process crashes later (`gdb` showed it in `settle`). A slot is written in one go.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from hastore.client.results import SendResult
from hastore.protocol.api import PutDone

Value = TypeVar("Value")
_PENDING = "PENDING"  # the stdlib's own names
_FINISHED = "FINISHED"
_making = threading.Lock()


class SendFuture(Future[Value]):
    """The caller's Future: `cancel` is always refused, what is sent cannot be called back."""

    __slots__ = (
        "_condition", "_done_callbacks", "_exception", "_made", "_receipt", "_result", "_state",
        "_waiters",
    )  # fmt: skip

    def __init__(self) -> None:
        """Make a pending Future; the stdlib's other attributes come with the first waiter."""
        self._state = _PENDING
        self._result: Any = None
        self._exception = None
        self._receipt: tuple[str, PutDone, int, int | None] | None = None
        self._made: threading.Condition | None = None  # `_condition`, once somebody asked for it

    def __getattr__(self, name: str) -> Any:
        """Make the Condition when somebody asks for it first."""
        if name != "_condition":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with _making:
            if self._made is None:
                self._waiters: list[Any] = []
                self._done_callbacks: list[Any] = []
                self._made = threading.Condition()  # first: a settler looks here
                self._condition = self._made
            return self._made

    def cancel(self) -> bool:
        """Return False."""
        return False

    def done(self) -> bool:
        """Whether it has ended."""
        return self._state == _FINISHED

    def result(self, timeout: float | None = None) -> Value:
        """Return the result, waiting at most `timeout` seconds; raises what the put ended with."""
        if self._state != _FINISHED or self._exception is not None:
            super().result(timeout)
        receipt = self._receipt
        if receipt is not None:
            self._result = _read(*receipt)
            self._receipt = None
        value: Value = self._result
        return value

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> None:
        """End it with the stored record at place `begin` of a reply, or all up to `end`."""
        self._receipt = (topic, reply, begin, end)
        self._state = _FINISHED
        condition = self._made
        if condition is not None:
            with condition:
                for waiter in self._waiters:
                    waiter.add_result(self)
                condition.notify_all()
            self._invoke_callbacks()


def _read(topic: str, reply: PutDone, begin: int, end: int | None) -> Any:
    if end is None:
        return result_of(topic, reply, begin)
    return [result_of(topic, reply, place) for place in range(begin, end)]


def result_of(topic: str, reply: PutDone, place: int) -> SendResult:
    """Return the result of one record of a reply."""
    status = reply.status if reply.statuses is None else reply.statuses[place]
    if not status.is_stored:
        return SendResult(status, topic, 0, reply.level, epoch=reply.epoch)
    return SendResult(
        status,
        topic,
        reply.queue_ids[place],
        reply.level,
        reply.offsets[place],
        reply.queue_offsets[place],
        reply.epoch,
        reply.hosts.get(place, reply.host) if reply.hosts else reply.host,
    )
