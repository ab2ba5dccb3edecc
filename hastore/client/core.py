"""What a client of any kind does, apart from waiting: the base of the cores, and who calls them.

    idle --enter--> in a call --leave--> idle
                        |
                        +-- an exception from outside, anywhere --> torn --enter, mend--> in a call

A core's operations are steps (see `requester`). An exception that comes from outside, as a signal's
does, may cut a call off between any two instructions: then `leave` was never called, and the next
call mends what may be torn before it begins.
"""

from __future__ import annotations

import threading

from hastore.client.connections.requester import Requester, Result, Steps
from hastore.client.lifecycle import Closable, Lifecycle
from hastore.errors import ClientError, HastoreError


class Core:
    """The base of the cores; used by one thread at a time."""

    def __init__(self, requester: Requester) -> None:
        self.requester = requester
        self._in_call = False

    def begin_call(self) -> None:
        """Begin a call; mends first what one that was cut off has left."""
        if self._in_call:
            self.recover()
        self._in_call = True

    def end_call(self) -> None:
        """End a call that left nothing half done."""
        self._in_call = False

    def recover(self) -> None:
        """Drop what was under way. Answers to earlier requests are known by their numbers."""
        requester = self.requester
        # `open` may have been interrupted between two addresses.
        requester.transport.open(requester.cluster.addresses)


class Blocking(Closable):
    """Run a core for callers that wait; calls of several threads take turns."""

    def __init__(self, core: Core, what: str) -> None:
        self._lock = threading.RLock()  # a signal's handler may close in the middle of a call
        self._in_call = False  # a call is under way; used by the thread that has the lock
        self._requester = core.requester
        self._lifecycle = Lifecycle(what, core.requester.abandon)
        self._lifecycle.watch(self, core.requester.drop)

    def close(self) -> None:
        """Close the connections; a call under way in another thread ends at once."""
        self._lifecycle.close()
        if self._lifecycle.forked:
            return
        self._requester.closing = True
        self._requester.transport.wake()
        with self._lock:
            if not self._in_call:  # else the call, below this signal's handler, closes as it ends
                self._requester.close()

    def _run(self, core: Core, steps: Steps[Result]) -> Result:
        """Take a core's steps; ClientError when the client is closed, or forked."""
        self._lifecycle.check()
        with self._lock:
            if self._in_call:
                raise ClientError(f"{self._lifecycle.what} cannot be used by a signal's handler in "
                                  "the middle of a call, but for `close`")  # fmt: skip
            try:
                self._in_call = True
                self._lifecycle.check()
                core.begin_call()
                result = self._requester.run(steps)
                core.end_call()
            except HastoreError:  # raised by the steps, which are whole then
                core.end_call()
                raise
            finally:
                self._in_call = False
                if self._requester.closing:
                    self._requester.close()
        return result
