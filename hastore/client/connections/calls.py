"""The calls of Consumer, Admin and Positions: described once, made for threads and for asyncio.

A call is described by a method that returns its steps (see `requester`), under `@ClientCall`. A
class with a driver makes its own method of each call that it inherits: `Blocking` one that runs the
steps in the calling thread, `AsyncClient` (hastore/aio/readers.py) a coroutine on an event loop.
So name, arguments and docstring stand in one place. For a type checker `ClientCall` is a
descriptor, whose type depends on the driver.

    idle --begin_call--> in a call --end_call--> idle
                             |
                             +--interrupt--> inconsistent --begin_call, recover--> in a call

A core holds the state that outlives a call. An exception from a signal handler may interrupt a call
between any two instructions. Then `end_call` was not called, and the next call recovers first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from hastore.client.connections.requester import Requester, Result, Steps
from hastore.client.lifecycle import AsyncClosable, Closable, Lifecycle
from hastore.errors import ClientError, HastoreError

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
AnySteps = Callable[..., Steps[Any]]


class ClientCall(Generic[Arguments, Returned]):
    """A call of a client, by the method that returns its steps."""

    def __init__(self, steps: Callable[Concatenate[Any, Arguments], Steps[Returned]]) -> None:
        self.steps = steps
        # What the call returns to the user, for `help`: Steps[list[Message]] -> list[Message].
        shown = steps.__annotations__
        shown["return"] = shown["return"].removeprefix("Steps[").removesuffix("]")

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...

    @overload
    def __get__(self, client: Closable, owner: type) -> Callable[Arguments, Returned]: ...

    @overload
    def __get__(
        self, client: AsyncClosable, owner: type
    ) -> Callable[Arguments, Coroutine[Any, Any, Returned]]: ...

    def __get__(self, client: object, owner: type) -> object:
        """Return this: only a class without a driver still has it."""
        return self


def make_methods(owner: type, make: Callable[[AnySteps], Callable[..., Any]]) -> None:
    """Let `make` replace each call that a class inherits by a method of its own."""
    members: dict[str, object] = {}
    for base in reversed(owner.__mro__):
        members |= vars(base)
    for name, call in members.items():
        if isinstance(call, ClientCall):
            method = functools.wraps(call.steps)(make(call.steps))
            method.__module__, method.__qualname__ = owner.__module__, f"{owner.__name__}.{name}"
            setattr(owner, name, method)


class Mover(Protocol):
    """What the calls of a core move, such as positions."""

    undo: Any  # how to undo the moves of the call; None once its caller has the result


class _NothingMoves:
    undo = None


class Core:
    """The state that outlives a call; used by one thread at a time."""

    mover: Mover = _NothingMoves()

    def __init__(self, requester: Requester) -> None:
        self.requester = requester
        self._in_call = False

    def begin_call(self) -> None:
        """Begin a call; if the last call was interrupted, recover first."""
        if self._in_call:
            self.recover()
        self._in_call = True

    def end_call(self) -> None:
        """End a call whose state is consistent."""
        self._in_call = False

    def recover(self) -> None:
        """Make the state consistent. Late answers do no harm: no call waits for their numbers."""
        requester = self.requester
        # `open` may have been interrupted between two addresses.
        requester.transport.open(requester.cluster.addresses)


class Client:
    """What the clients of both drivers have: a core, its connections, and their end."""

    _kind: str  # its name in errors

    def __init__(self, core: Core, what: str) -> None:
        self._core = core
        self._requester = core.requester
        self._lifecycle = Lifecycle(what, core.requester.abandon)
        self._lifecycle.watch(self, core.requester.drop)


class Blocking(Client, Closable):
    """Run a core's steps for blocking callers, one call at a time; other calls wait."""

    def __init__(self, core: Core, what: str) -> None:
        super().__init__(core, what)
        self._lock = threading.RLock()  # reentrant: a signal handler may call `close`
        self._in_call = False  # a call is under way; protected by the lock

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        make_methods(cls, _blocking)

    def close(self) -> None:
        """Close the connections; a call under way in another thread ends at once."""
        self._lifecycle.close()
        if self._lifecycle.forked:
            return
        self._requester.closing = True
        self._requester.transport.wake()
        with self._lock:
            # During a call, only a signal handler gets here. The interrupted call then closes the
            # connections at its end.
            if not self._in_call:
                self._requester.close()

    def _run(self, steps: Steps[Result]) -> Result:
        """Run a call's steps; raises ClientError if the client is closed or forked."""
        life = self._lifecycle
        if life.closed or life.forked:  # asked here too: it saves a function call for each poll
            life.check_usable()
        with self._lock:
            if self._in_call:
                raise ClientError(f"{life.what}: a signal handler that interrupts a "
                                  "call may use only `close`")  # fmt: skip
            core = self._core
            try:
                self._in_call = True
                if life.closed or life.forked:
                    life.check_usable()
                core.begin_call()
                result = self._requester.run_steps(steps)
                core.end_call()
            except HastoreError:  # the steps raised it, so the state is consistent
                core.end_call()
                raise
            finally:
                self._in_call = False
                if self._requester.closing:
                    self._requester.close()
        return result


def _blocking(steps: AnySteps) -> Callable[..., Any]:
    def call(self: Blocking, *args: Any, **kwargs: Any) -> Any:
        result = self._run(steps(self, *args, **kwargs))
        # This comes last: after an earlier interrupt, the next call returns the same messages.
        self._core.mover.undo = None
        return result

    return call
