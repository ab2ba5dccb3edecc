"""The Future of a put: a stdlib Future that costs almost nothing until a thread waits for it.

A stdlib Future makes a Condition, two lists and six attributes in its constructor, and takes the
Condition's lock when it ends. Together these take 20 % of a put's cost in the producer. SendFuture
makes most of the objects only for the first waiter or callback. It builds the result from the
node's answer when a caller asks for the result.

    PENDING --settle, succeed, fail--> FINISHED --notify--> waiters and callbacks know

The change of `_state` ends the Future in one step. After an interrupt before that step, the Future
is still pending. After a later interrupt, the notification is repeated, which does no harm. No
waiter is missed: a waiter makes `_observers`, then reads the state; the driver changes the state,
then reads `_observers`. At least one of the two sees the change of the other.

Waiters use LocklessCondition. The methods of threading.Condition are Python code: an exception from
a signal handler may leave the lock taken for good, and a finalizer that needs the lock may run in
the thread that holds it. Here each waiting thread has a Sleeper of its own; its `wake` never
blocks.

The attributes are slots, which avoids a crash of CPython 3.11. Without slots, an instance's
attributes normally live in a layout shared by the class. When an attribute is written that does not
fit into it, CPython makes a dict for this instance. A garbage collection may run while CPython
makes the dict. If a finalizer then lets another thread write to the same instance, that thread
makes a dict too, and the values are freed twice (seen with `gdb` in `settle`). A slot is written in
one step.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from sys import is_finalizing
from typing import Any, Protocol, TypeVar

from hastore.client.lifecycle import CarefulLog
from hastore.client.messages import SendResult
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ClientError, UsageError
from hastore.protocol.api import PutDone, Status
from hastore.service import Sleeper

log = CarefulLog(logging.getLogger(__name__))

Value = TypeVar("Value")
Watch = Callable[[BaseException | None, Any], object]  # the exception or None, and the result
_PENDING = "PENDING"  # the stdlib's own names
_FINISHED = "FINISHED"
_PUT_OK = Status.PUT_OK  # an Enum's look-up is slow
# The longest wait for a Condition's lock: an interrupted waiter may have left it taken.
_CONDITION_S = 1.0
_making = threading.RLock()  # reentrant: a finalizer may use a Future while this is held


class LocklessCondition:
    """Lets threads wait for changes; call `notify_all` after each such change.

    `sleepers` is empty when no thread waits.
    """

    __slots__ = ("sleepers",)

    def __init__(self) -> None:
        self.sleepers: list[Sleeper] = []

    def notify_all(self) -> None:
        """Make all waiting threads check again; finalizers and signal handlers may call it too."""
        for sleeper in tuple(self.sleepers):
            sleeper.wake()

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_true()`, at most `timeout_s` (None: no limit); return its last result."""
        if is_true():
            return True
        deadline_ms = None
        if timeout_s is not None:
            deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000.0
        sleeper = Sleeper()
        # Added before the check, so that no change is missed: a notifier makes its change first,
        # then looks for sleepers.
        self.sleepers.append(sleeper)
        try:
            while not is_true():
                left_s = None
                if deadline_ms is not None:
                    left_s = (deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000.0
                    if left_s <= 0.0:
                        return False
                if not sleeper.sleep(left_s):
                    return is_true()
            return True
        finally:
            self.sleepers.remove(sleeper)


class Outcome(Protocol):
    """The outcome of a put. Each method that ends it returns whether `notify` must be called."""

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with record `begin` of a reply; with `end`, with its records [begin, end)."""
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


class Unread:
    """Counts the failed Futures of a producer that nobody has asked how they ended.

    So a producer whose Futures are dropped can say at its end that messages are lost. Does nothing
    in a forked child, where another thread of the parent may have held the lock.
    """

    __slots__ = ("_lock", "_made_in", "count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last = ""  # the latest failure's text: an exception would keep its frames
        self._lock = threading.RLock()  # reentrant: a finalizer may use a Future while it is held
        self._made_in = os.getpid()

    def add(self, failure: BaseException) -> None:
        """Count a Future that fails."""
        if os.getpid() == self._made_in:
            with self._lock:
                self.count += 1
                self.last = str(failure)

    def remove(self, future: SendFuture[Any]) -> None:
        """Count a failed Future no more: somebody learns how it ended."""
        if os.getpid() == self._made_in:
            with self._lock:
                if future._unread is self:  # else another thread was first
                    future._unread = None
                    self.count -= 1

    def text(self) -> str:
        """Return a text that says how many have failed, "" if none has; takes no lock."""
        if self.count <= 0:
            return ""
        return (
            f"sends that have failed, and whose Futures nobody has asked: {self.count}; "
            f"the last failure: {self.last}"
        )


class _Watcher:
    """A callback of what only looks on: with it nobody has asked how the Future ended."""

    __slots__ = ("_fn",)

    def __init__(self, fn: Watch) -> None:
        self._fn = fn

    def __call__(self, future: Future[Any]) -> None:
        failure = future._exception
        self._fn(failure, future.result() if failure is None else None)


class _Observers:
    """The waiters and callbacks of one Future."""

    __slots__ = ("calls", "condition", "ended", "notified", "waiters")

    def __init__(self) -> None:
        self.ended = LocklessCondition()
        # Each inner list has one callback. Only the thread that pops the callback calls it.
        self.calls: list[list[Callable[[Any], object]]] = []
        # `_condition` and `_waiters` of a stdlib Future, which `wait` and `as_completed` use.
        self.condition: threading.Condition | None = None  # made at the first access
        self.waiters: list[Any] = []
        self.notified = False  # whether `waiters` were notified


class SendFuture(Future[Value]):
    """The caller's Future; `cancel` returns False, because a message cannot be recalled."""

    __slots__ = ("_exception", "_observers", "_receipt", "_result", "_state", "_unread")

    def __init__(self, unread: Unread | None = None) -> None:
        """Make a pending Future; the stdlib's other attributes are made on demand.

        If it fails, `unread` counts it until somebody asks how it ended.
        """
        self._state = _PENDING
        self._unread = unread
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

    def __repr__(self) -> str:
        what = "pending"
        if self._state == _FINISHED:
            failed = self._exception
            what = f"returned {self.result()!r}" if failed is None else f"raised {failed!r}"
        return f"<{type(self).__name__} at {id(self):#x}: {what}>"

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
            self._note_read()
            try:
                raise failure
            finally:
                del self, failure  # else the traceback and the frame refer to each other
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
        self._note_read()
        return self._exception

    def _get_snapshot(self) -> tuple[bool, bool, Value | None, BaseException | None]:
        """Return whether it has ended, was cancelled, its result and its exception.

        asyncio calls this from Python 3.14 on; the stdlib's own reads `_result`, made on demand.
        """
        if self._state != _FINISHED:
            return False, False, None, None
        self._note_read()
        failure = self._exception
        return True, False, None if failure is not None else self.result(), failure

    def add_done_callback(self, fn: Callable[[Future[Value]], object]) -> None:
        """Call `fn` with this Future in the producer's thread, or here if it has already ended."""
        call: list[Callable[[Any], object]] = [fn]
        self._get_observers().calls.append(call)
        if self._state == _FINISHED:
            self._make_call(call)

    def watch(self, fn: Watch) -> None:
        """Call `fn` as a callback; the caller of `send` does not count as having asked by it."""
        self.add_done_callback(_Watcher(fn))

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with record `begin` of a reply; with `end`, with its records [begin, end)."""
        self._receipt = (topic, reply, begin, end)
        if self._exception is not None:  # an interrupted `fail` has left it
            self._note_read()
            self._exception = None
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
        if self._unread is not None and self._exception is None:
            self._unread.add(failure)
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
        if is_finalizing():
            raise ClientError(
                "the interpreter ends, and its threads are stopped: no Future ends any more; close "
                "the producer before, as in an atexit handler"
            )
        if not self._get_observers().ended.wait_for(self.done, timeout):
            raise TimeoutError

    def _note_read(self) -> None:
        """Note that somebody learns how it ended."""
        unread = self._unread
        if unread is not None and self._exception is not None:
            unread.remove(self)

    def _make_call(self, call: list[Callable[[Any], object]]) -> None:
        try:
            fn = call.pop()  # one step: only one thread gets the callback
        except IndexError:
            return
        if not isinstance(fn, _Watcher):
            self._note_read()
        try:
            fn(self)
        except Exception:
            log.exception("a Future's callback failed: %r", fn)


def watch(future: Future[Any], fn: Watch) -> None:
    """Call `fn` once a producer's Future has ended, for what only looks on, such as a trace.

    So what the application did not ask about is still said when the producer is closed. Of a Future
    of another kind that was cancelled, the exception is a CancelledError.
    """
    if isinstance(future, SendFuture):
        future.watch(fn)
        return

    def call(done: Future[Any]) -> None:
        failure = CancelledError() if done.cancelled() else done.exception()
        fn(failure, done.result() if failure is None else None)

    future.add_done_callback(call)


def results_of(topic: str, reply: PutDone, begin: int, end: int | None) -> Any:
    """Return the result of record `begin` of a reply; with `end`, a list for [begin, end)."""
    if end is None:
        return result_of(topic, reply, begin)
    return [result_of(topic, reply, place) for place in range(begin, end)]


def result_of(topic: str, reply: PutDone, place: int) -> SendResult:
    """Return the result of one record of a reply."""
    status = reply.status if reply.statuses is None else reply.statuses[place]
    if status is not _PUT_OK and not status.is_stored:
        return SendResult(status, topic, 0, reply.level, epoch=reply.epoch)
    queue_offset = reply.queue_offsets[place]
    return SendResult(
        status,
        topic,
        reply.queue_ids[place],
        reply.level,
        reply.offsets[place],
        None if queue_offset < 0 else queue_offset,
        reply.epoch,
        reply.hosts.get(place, reply.host) if reply.hosts else reply.host,
    )
