"""The Future of a put: a stdlib Future that costs nearly nothing until somebody waits for it.

A stdlib Future makes a Condition, two lists and six attributes when it is made, and takes the
Condition's lock when it ends: a fifth of what a put costs its producer. This one makes them when
the first waiter or callback asks for them, and keeps the node's answer as it came until somebody
wants the result.

    PENDING --settle, succeed, fail--> FINISHED --notify--> who waits knows

It ends by one step, the change of `_state`; whatever is cut off before it leaves the Future
pending, whatever is cut off behind it leaves a notification to be made up for, which may be made
more than once. Why no waiter is missed: who waits makes `_watch`, then looks at the state; who
settles changes the state, then looks for a `_watch`. One of both sees the other.

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

from hastore.client.producer.lockless_condition import LocklessCondition
from hastore.client.results import SendResult
from hastore.errors import UsageError
from hastore.protocol.api import PutDone, Status

log = logging.getLogger(__name__)

Value = TypeVar("Value")
_PENDING = "PENDING"  # the stdlib's own names
_FINISHED = "FINISHED"
_PUT_OK = Status.PUT_OK  # an Enum's look-up is slow
_CONDITION_S = 1.0  # a waiter that was cut off may have left the Condition's lock taken
_making = threading.RLock()  # a finalizer may come in between, and wait for a Future too


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


class _Observers:
    """What those need who wait for one Future."""

    __slots__ = ("calls", "condition", "ended", "notified", "waiters")

    def __init__(self) -> None:
        self.ended = LocklessCondition()
        self.calls: list[list[Callable[[Any], object]]] = []  # each is emptied by who calls it
        self.condition: threading.Condition | None = None  # once the stdlib asked for it
        self.waiters: list[Any] = []  # the stdlib's
        self.notified = False  # they know


class SendFuture(Future[Value]):
    """The caller's Future: `cancel` is always refused, what is sent cannot be called back."""

    __slots__ = ("_exception", "_observers", "_receipt", "_result", "_state")

    def __init__(self) -> None:
        """Make a pending Future; what the stdlib's also have comes with the first who asks."""
        self._state = _PENDING
        self._exception: BaseException | None = None
        self._receipt: tuple[str, PutDone, int, int | None] | None = None
        self._observers: _Observers | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what the stdlib's `wait` and `as_completed` look for in a Future."""
        if name == "_waiters":
            return self._get_observers().waiters
        if name != "_condition":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        observers = self._get_observers()
        if observers.condition is None:
            condition = threading.Condition()
            with _making:
                if observers.condition is None:
                    observers.condition = condition
        return observers.condition

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
            self._result = results_of(*receipt)
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
        self._get_observers().calls.append(call)
        if self._state == _FINISHED:
            self._make_call(call)

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with the stored record at place `begin` of a reply, or all up to `end`."""
        self._receipt = (topic, reply, begin, end)
        if self._exception is not None:
            self._exception = None  # of a failure that was cut off
        self._state = _FINISHED
        return self._observers is not None

    def succeed(self, value: Any) -> bool:
        """End it with a result."""
        self._result: Any = value
        self._receipt = self._exception = None
        self._state = _FINISHED
        return self._observers is not None

    def fail(self, failure: BaseException) -> bool:
        """End it with an exception."""
        self._exception = failure
        self._receipt = None
        self._state = _FINISHED
        return self._observers is not None

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
        observers = self._observers
        if observers is None:
            return
        observers.ended.notify_all()
        condition = observers.condition
        if condition is not None and not observers.notified:
            taken = condition.acquire(timeout=_CONDITION_S)
            try:
                for waiter in observers.waiters:
                    waiter.add_result(self)
                observers.notified = True
            finally:
                if taken:
                    condition.release()
        for call in observers.calls:
            self._make_call(call)

    def _get_observers(self) -> _Observers:
        """Return what those need who wait, made by the first of them."""
        observers = self._observers
        if observers is None:
            made = _Observers()
            with _making:
                if self._observers is None:
                    self._observers = made
                observers = self._observers
        return observers

    def _wait(self, timeout: float | None) -> None:
        if not self._get_observers().ended.wait_for(self.done, timeout):
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
