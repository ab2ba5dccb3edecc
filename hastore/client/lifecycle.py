"""Handles clients that are dropped without `close`, open at exit, forked or pickled.

    OPEN --close()--> CLOSED
      +-------------------+---- fork, in the child ----> FORKED

A client that is dropped is closed with a ResourceWarning that names it. The finalizer that does
this may run in any thread and in the middle of any code, so it takes no lock and waits for nothing.
A client that is still open when the interpreter exits, or a process of `multiprocessing` ends, gets
the same warning, but is not closed: an atexit handler of the application may still use and close
it. A client cannot be used in a forked
child, because its thread and connections belong to the parent. The child closes its copies of the
descriptors, and each use of the client in the child raises ClientError.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

from hastore.errors import ClientError, HastoreError, UsageError

log = logging.getLogger(__name__)


class Lifecycle:
    """Track one client from its constructor to its end. `what` names it in errors."""

    def __init__(self, what: str, abandon: Callable[[], None]) -> None:
        """`abandon` closes the client's descriptors in a forked child, if they are still open.

        It takes no lock, and may come at any point of `close`, whose thread the child may not have.
        """
        self.what = what
        self.closed = False
        self.forked = False
        self._abandon = abandon
        self._made_in = os.getpid()
        self._finalizer: weakref.finalize[..., object] | None = None
        self._waits: list[threading.Lock] = []  # each is held while a `close` waits
        self._lost: Callable[[], str] | None = None  # set while `close` is waited for
        _alive.add(self)
        _tell_at_end_of_child()

    def watch(
        self, owner: object, end: Callable[[], None], lost: Callable[[], str] = lambda: ""
    ) -> None:
        """Warn if `owner` is dropped without `close`, and call `end`; only warn at exit.

        `lost` returns a text that says what is lost ("messages not acknowledged: 3 to 'orders'"),
        or "". Neither function may refer to the owner, take a lock or wait.
        """
        self._lost = lost
        self._finalizer = weakref.finalize(owner, _dropped, self, end)
        self._finalizer.atexit = False

    def check_usable(self) -> None:
        """Raise ClientError if the client is closed, or if this is a forked child."""
        if self.forked:
            raise ClientError(
                f"{self.what} was made in process {self._made_in} and cannot be used in a "
                "forked child: make one in each process, after the fork"
            )
        if self.closed:
            raise ClientError(f"{self.what} is closed")

    def close(self) -> bool:
        """Mark the client as closed; return True in the first call, but not in a forked child."""
        first = not (self.closed or self.forked)
        self.closed = True
        self._lost = None
        if self._finalizer is not None:
            self._finalizer.detach()
        return first

    def new_wait(self) -> threading.Lock:
        """Return a lock to hold while this call of `close` waits for what is under way.

        A lock, because an exception from a signal handler cannot leave it taken.
        """
        self._waits.append(wait := threading.Lock())
        return wait

    @property
    def close_waits(self) -> bool:
        """Whether a call of `close` still waits: then none may end what it waits for."""
        return any(wait.locked() for wait in self._waits)

    def warn(self) -> None:
        """Say once that the client was not closed, and what is lost; takes no lock."""
        lost, self._lost = self._lost, None
        if lost is None or self.closed or self.forked:
            return
        what = lost()
        text = f"{self.what} was not closed" + (f": {what}" if what else "")
        if what:
            log.warning("%s", text)
        warnings.warn(text, ResourceWarning, stacklevel=2)


class CarefulLog(logging.LoggerAdapter[logging.Logger]):
    """A logger for what runs while a producer's core is driven, by its thread or by a caller.

    A log handler may send by the same producer, and gets a ClientError where it would wait. If the
    handler does not catch it, it is shown on stderr, where logging shows what fails in its own
    handlers. In the core it would end the producer, or the call of the message under way.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a line; raises what a handler raises, but no HastoreError."""
        try:
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})
        except HastoreError:
            if logging.raiseExceptions and sys.stderr is not None:
                sys.stderr.write(f"a log handler has failed, at the line {msg!r}:\n")
                traceback.print_exc()


def refuse_pickling(client: object) -> NoReturn:
    """Raise UsageError; the `__reduce__` of each client calls this."""
    kind = type(client).__name__
    raise UsageError(f"a {kind} has connections and cannot be pickled: make one in each process")


def describe(kind: str, addresses: tuple[str, ...], topic: str = "") -> str:
    """Return a client's name for errors: "Consumer of orders at tcp://HOST:PORT"."""
    return f"{kind} {f'of {topic} ' if topic else ''}at {','.join(addresses)}"


class Closable:
    """A client that `with` closes, and that cannot be pickled or copied."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    def close(self) -> None:
        """Close the client."""
        raise NotImplementedError


class AsyncClosable:
    """A client that `async with` closes, and that cannot be pickled or copied."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    async def close(self) -> None:
        """Close the client."""
        raise NotImplementedError


_LAST = -1_000_000  # after the application's own finalizers, which may close their clients
_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
_told_in = 0  # the process that warns at its end


def _dropped(lifecycle: Lifecycle, end: Callable[[], None]) -> None:
    if lifecycle.closed or lifecycle.forked:
        return
    try:
        lifecycle.warn()
    finally:  # a filter of warnings may make it an exception
        lifecycle.closed = True
        end()


def _at_exit() -> None:
    for lifecycle in list(_alive):
        lifecycle.warn()


def _tell_at_end_of_child() -> None:
    """Warn at the end of a child of `multiprocessing`, which mostly calls no atexit handlers."""
    global _told_in
    process, util = (sys.modules.get(f"multiprocessing.{name}") for name in ("process", "util"))
    if process is None or util is None or _told_in == os.getpid():
        return
    _told_in = os.getpid()
    if process.parent_process() is not None:
        util.Finalize(None, _at_exit, exitpriority=_LAST)


def _after_fork() -> None:
    for lifecycle in list(_alive):
        # Also one that is closed: the parent may still be at it, in a thread or in its caller.
        lifecycle.forked = True
        lifecycle._abandon()


os.register_at_fork(after_in_child=_after_fork)
# Registered by the import, so handlers that are registered later may close their clients before.
atexit.register(_at_exit)
