"""The Future of a put: a stdlib Future that costs nearly nothing until somebody waits for it.

A stdlib Future makes a Condition, two lists and six attributes when it is made, and takes the
Condition's lock when it ends: a fifth of what a put costs its producer. This one makes them when
the first waiter or callback asks for them, and keeps the node's answer as it came until somebody
wants the result.

    PENDING --settle, succeed, fail--> FINISHED --notify--> who waits knows

It ends by one step, the change of `_state`; whatever is cut off before it leaves the Future
pending, whatever is cut off behind it leaves a notification to be made up for, which may be made
more than once. Why no waiter is missed: who waits says so in `_watched`, then looks at the state;
who settles changes the state, then looks at `_watched`. One of both sees the other.

Why slots: in CPython 3.11 an instance's dict comes into being at a write that finds no room in its
class's shared keys, and a garbage collection may run in the middle of that. When a finalizer there
lets another thread write to the same instance, that makes a dict too, and the values are freed
twice: the process crashes later (`gdb` showed it in `settle`). A slot is written in one go.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from hastore.client.bell import Bell
from hastore.client.results import SendResult
from hastore.errors import UsageError
from hastore.protocol.api import PutDone, Status

log = logging.getLogger(__name__)

Value = TypeVar("Value")
_PENDING = "PENDING"  # the stdlib's own names
_FINISHED = "FINISHED"
_PUT_OK = Status.PUT_OK  # an Enum's look-up is slow
_CONDITION_S = 1.0  # a waiter that was cut off may have left the Condition's lock taken
_making = threading.RLock()  # a finalizer may come in between, in the same thread


class Outcome(Protocol):
    """What a put ends in; the first three say whether somebody is to be told of it."""

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with the stored record at place `begin` of a reply, or all up to `end`."""
        ...

    def succeed(self, value: Any) -> bool:
        """End it with a result."""
        ...

    def fail(self, failure: BaseException) -> bool:
        """End it with an exception."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def notify(self) -> None:
        """Tell those who wait; a second call does no harm."""
        ...


class SendFuture(Future[Value]):
    """The caller's Future: `cancel` is always refused, what is sent cannot be called back."""

    __slots__ = (
        "_bell", "_calls", "_condition", "_done_callbacks", "_exception", "_made", "_receipt",
        "_result", "_state", "_told", "_waiters", "_watched",
    )  # fmt: skip

    def __init__(self) -> None:
        """Make a pending Future; the stdlib's other attributes come with the first who asks."""
        self._state = _PENDING
        self._exception: BaseException | None = None
        self._receipt: tuple[str, PutDone, int, int | None] | None = None
        self._watched = False  # somebody waits, or did
        self._bell: Bell | None = None
        self._calls: list[list[Callable[[Any], object]]] | None = None  # emptied by who calls it
        self._made: threading.Condition | None = None  # `_condition`, once the stdlib asked for it

    def __getattr__(self, name: str) -> Any:
        """Make the Condition for the stdlib's `wait` and `as_completed`."""
        if name != "_condition":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with _making:
            if self._made is None:
                self._waiters: list[Any] = []
                self._done_callbacks: list[Any] = []
                self._told = False  # the stdlib's waiters know
                self._condition = threading.Condition()
                self._made = self._condition
                self._watched = True
            return self._made

    def __reduce__(self) -> Any:
        raise UsageError("a Future ends in the process that made it and cannot be pickled")

    def cancel(self) -> bool:
        """Return False."""
        return False

    def cancelled(self) -> bool:
        """Return False."""
        return False

    def running(self) -> bool:
        """Return False."""
        return False

    def done(self) -> bool:
        """Whether it has ended."""
        return self._state == _FINISHED

    def result(self, timeout: float | None = None) -> Value:
        """Return the result, waiting at most `timeout` seconds; raises what the put ended with."""
        if self._state != _FINISHED:
            self._wait(timeout)
        failure = self._exception
        if failure is not None:
            try:
                raise failure
            finally:
                del self, failure  # else the traceback makes a cycle
        receipt = self._receipt
        if receipt is not None:
            self._result: Any = results_of(*receipt)
            self._receipt = None
        value: Value = self._result
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the put ended with, None for success; waits at most `timeout` seconds."""
        if self._state != _FINISHED:
            self._wait(timeout)
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[Value]], object]) -> None:
        """Call `fn` with this Future when it has ended: in the producer's thread, or at once."""
        call: list[Callable[[Any], object]] = [fn]
        calls = self._calls
        if calls is None:
            made: list[list[Callable[[Any], object]]] = []
            with _making:
                if self._calls is None:
                    self._calls = made
                calls = self._calls
        calls.append(call)
        self._watched = True
        if self._state == _FINISHED:
            self._make_call(call)

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with the stored record at place `begin` of a reply, or all up to `end`."""
        self._receipt = (topic, reply, begin, end)
        if self._exception is not None:
            self._exception = None  # of a failure that was cut off
        self._state = _FINISHED
        return self._watched

    def succeed(self, value: Any) -> bool:
        """End it with a result."""
        self._result = value
        self._receipt = self._exception = None
        self._state = _FINISHED
        return self._watched

    def fail(self, failure: BaseException) -> bool:
        """End it with an exception."""
        self._exception = failure
        self._receipt = None
        self._state = _FINISHED
        return self._watched

    def set_result(self, result: Any) -> None:
        """End it with a result and tell those who wait."""
        if self.succeed(result):
            self.notify()

    def set_exception(self, exception: BaseException | None) -> None:
        """End it with an exception and tell those who wait."""
        assert exception is not None
        if self.fail(exception):
            self.notify()

    def notify(self) -> None:
        """Tell those who wait that it has ended; a second call does no harm.

        Called by a thread that no signal's exception reaches.
        """
        if self._bell is not None:
            self._bell.ring()
        condition = self._made
        if condition is not None and not self._told:
            taken = condition.acquire(timeout=_CONDITION_S)
            try:
                for waiter in self._waiters:
                    waiter.add_result(self)
                self._told = True
            finally:
                if taken:
                    condition.release()
        for call in self._calls or ():
            self._make_call(call)

    def _wait(self, timeout: float | None) -> None:
        bell = self._bell
        if bell is None:
            made = Bell()
            with _making:
                if self._bell is None:
                    self._bell = made
                bell = self._bell
        self._watched = True
        if not bell.wait_for(self.done, timeout):
            raise TimeoutError

    def _make_call(self, call: list[Callable[[Any], object]]) -> None:
        try:
            fn = call.pop()  # one step: whoever gets it calls it
        except IndexError:
            return
        try:
            fn(self)
        except Exception:
            log.exception("a Future's callback failed: %r", fn)


def results_of(topic: str, reply: PutDone, begin: int, end: int | None) -> Any:
    """Return the result of the record at place `begin` of a reply, or a list of all up to `end`."""
    if end is None:
        return result_of(topic, reply, begin)
    return [result_of(topic, reply, place) for place in range(begin, end)]


def result_of(topic: str, reply: PutDone, place: int) -> SendResult:
    """Return the result of one record of a reply."""
    status = reply.status if reply.statuses is None else reply.statuses[place]
    if status is not _PUT_OK and not status.is_stored:
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
