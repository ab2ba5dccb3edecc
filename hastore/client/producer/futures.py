"""The Future of a put: a stdlib Future that costs almost nothing until a thread waits for it.

A stdlib Future makes a Condition, two lists and six attributes in its constructor, and takes the
Condition's lock when it ends: 20 % of a put's cost in the producer. This one makes them for the
first waiter or callback, and builds the result from the node's answer when it is asked for.

    PENDING --settle, succeed, fail--> FINISHED --notify--> waiters and callbacks know

The change of `_state` is the one step that ends it. An interrupt before that step leaves the Future
pending; an interrupt after it leaves a notification to be repeated, which does no harm. No waiter
is missed: a waiter makes `_observers`, then reads the state; the driver changes the state, then
reads `_observers`. At least one of the two sees the change of the other.

Slots avoid a crash of CPython 3.11: it makes an instance's dict at a write that finds no room in
the class's shared keys, and a garbage collection may run in the middle. If a finalizer then lets
another thread write to the same instance, that thread makes a dict too, and the values are freed
twice (seen with `gdb` in `settle`). A slot is written in one step.
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
_CONDITION_S = 1.0  # an interrupted waiter may have left the Condition's lock taken
_making = threading.RLock()  # reentrant: a finalizer that runs inside may wait for a Future


class Outcome(Protocol):
    """The outcome of a put. The methods that end it return whether `notify` must be called."""

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with the stored record at index `begin` of a reply, or with all up to `end`."""
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
        """Notify waiters and callbacks; a second call does no harm."""
        ...


class _Observers:
    """The waiters and callbacks of one Future."""

    __slots__ = ("calls", "condition", "ended", "notified", "waiters")

    def __init__(self) -> None:
        self.ended = LocklessCondition()
        # One callback in each list: the thread that pops it calls it.
        self.calls: list[list[Callable[[Any], object]]] = []
        self.condition: threading.Condition | None = None  # made when the stdlib asks for it
        self.waiters: list[Any] = []  # the stdlib's
        self.notified = False  # whether the stdlib's waiters were notified


class SendFuture(Future[Value]):
    """The caller's Future; `cancel` always returns False, since a message cannot be recalled."""

    __slots__ = ("_exception", "_observers", "_receipt", "_result", "_state")

    def __init__(self) -> None:
        """Make a pending Future; the stdlib's other attributes are made on demand."""
        self._state = _PENDING
        self._exception: BaseException | None = None
        self._receipt: tuple[str, PutDone, int, int | None] | None = None
        self._observers: _Observers | None = None

    def __getattr__(self, name: str) -> Any:
        """Return the attributes that the stdlib's `wait` and `as_completed` read."""
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
        """Return the result, waiting at most `timeout` seconds; raises the put's exception."""
        if self._state != _FINISHED:
            self._wait(timeout)
        failure = self._exception
        if failure is not None:
            try:
                raise failure
            finally:
                del self, failure  # else the traceback and the frame make a cycle
        receipt = self._receipt
        if receipt is not None:
            self._result = results_of(*receipt)
            self._receipt = None
        value: Value = self._result
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the put's exception, None for success; waits at most `timeout` seconds."""
        if self._state != _FINISHED:
            self._wait(timeout)
        return self._exception

    def add_done_callback(self, fn: Callable[[Future[Value]], object]) -> None:
        """Call `fn` with this Future in the producer's thread, or here if it has already ended."""
        call: list[Callable[[Any], object]] = [fn]
        self._get_observers().calls.append(call)
        if self._state == _FINISHED:
            self._make_call(call)

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with the stored record at index `begin` of a reply, or with all up to `end`."""
        self._receipt = (topic, reply, begin, end)
        if self._exception is not None:
            self._exception = None  # from an interrupted `fail`
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
        """End it with a result and notify."""
        if self.succeed(result):
            self.notify()

    def set_exception(self, exception: BaseException | None) -> None:
        """End it with an exception and notify."""
        assert exception is not None
        if self.fail(exception):
            self.notify()

    def notify(self) -> None:
        """Notify waiters and callbacks; a second call does no harm.

        Called by the driver's thread, where no signal handler runs.
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
        """Return the observers, which the first caller makes."""
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
            fn = call.pop()  # one step: the thread that gets it calls it
        except IndexError:
            return
        try:
            fn(self)
        except Exception:
            log.exception("a Future's callback failed: %r", fn)


def results_of(topic: str, reply: PutDone, begin: int, end: int | None) -> Any:
    """Return the result of the record at index `begin` of a reply, or a list of all up to `end`."""
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
