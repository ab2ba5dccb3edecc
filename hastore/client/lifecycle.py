"""A client's life beyond its methods: dropped unclosed, left at exit, forked, pickled.

    OPEN --close()--> CLOSED
      +---- fork, in the child ----> FORKED

A client that is dropped, or that the interpreter leaves behind, is ended all the same, with a
ResourceWarning that names it. That may happen in the middle of anything, in any thread: what ends
it takes no lock and waits for nobody. In a forked child a client is of no use, since its thread and
its connections are the parent's: its descriptors are closed there, and each use says so.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from hastore.errors import ClientError, UsageError

log = logging.getLogger(__name__)


class Lifecycle:
    """Follow one client from its making to its end. `what` names it in errors."""

    def __init__(self, what: str, abandon: Callable[[], None]) -> None:
        """`abandon` closes the client's descriptors in a forked child; it takes no lock."""
        self.what = what
        self.closed = False
        self.forked = False
        self._abandon = abandon
        self._made_in = os.getpid()
        self._finalizer: weakref.finalize[..., object] | None = None
        _alive.add(self)

    def watch(self, owner: object, end: Callable[[], str]) -> None:
        """Call `end` when `owner` is dropped, or at exit, before `close`.

        `end` must not refer to the owner, takes no lock, waits for nobody, and returns what is
        lost by it ("3 messages were not acknowledged"), "" for nothing.
        """
        self._finalizer = weakref.finalize(owner, _unclosed, self, end)

    def check(self) -> None:
        """Raise ClientError when the client is of no use: closed, or in a forked child."""
        if self.forked:
            raise ClientError(
                f"{self.what} was made in process {self._made_in} and is of no use in a forked "
                "child: make one in each process, after the fork"
            )
        if self.closed:
            raise ClientError(f"{self.what} is closed")

    def close(self) -> bool:
        """Note the closing; True for the first call, never in a forked child."""
        first = not (self.closed or self.forked)
        self.closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        return first


def refuse_pickling(client: object) -> NoReturn:
    """Raise UsageError; what `__reduce__` of a client does."""
    kind = type(client).__name__
    raise UsageError(
        f"a {kind} has connections and cannot be pickled: make one in each process"
    )


def describe(kind: str, addresses: tuple[str, ...], topic: str = "") -> str:
    """Return how a client is called in errors: "Consumer of orders at tcp://HOST:PORT"."""
    return f"{kind} {f'of {topic} ' if topic else ''}at {','.join(addresses)}"


class Closable:
    """A client that `with` closes, and that is neither pickled nor copied."""

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
    """The same for `async with`."""

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


_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def _unclosed(life: Lifecycle, end: Callable[[], str]) -> None:
    if life.closed or life.forked:
        return
    life.closed = True
    lost = end()
    text = f"{life.what} was not closed" + (f": {lost}" if lost else "")
    if lost:
        log.warning("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=2)


def _after_fork() -> None:
    for life in list(_alive):
        if not life.closed:
            life.forked = True
            life._abandon()


os.register_at_fork(after_in_child=_after_fork)
