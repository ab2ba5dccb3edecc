"""The base of Consumer, Admin and Positions: a core that never blocks, and its blocking driver.

    idle --begin_call--> in a call --end_call--> idle
                             |
                             +--interrupt--> inconsistent --begin_call, recover--> in a call

A core's operations are steps (see `requester`). `Blocking` runs them for callers that wait;
`hastore.aio` runs them on an event loop. An exception from a signal handler may interrupt a call
between any two instructions. Then `end_call` was not called, and the next call recovers first.
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


class Blocking(Closable):
    """Run a core's steps for blocking callers, one call at a time; other calls wait."""

    def __init__(self, core: Core, what: str) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may call `close`
        self._in_call = False  # a call is under way; protected by the lock
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
            # During a call, only a signal handler gets here. The interrupted call then closes the
            # connections at its end.
            if not self._in_call:
                self._requester.close()

    def _run(self, core: Core, steps: Steps[Result]) -> Result:
        """Run a core's steps; raises ClientError if the client is closed or forked."""
        self._lifecycle.check()
        with self._lock:
            if self._in_call:
                raise ClientError(f"{self._lifecycle.what}: a signal handler that interrupts a "
                                  "call may use only `close`")  # fmt: skip
            try:
                self._in_call = True
                self._lifecycle.check()
                core.begin_call()
                result = self._requester.run(steps)
                core.end_call()
            except HastoreError:  # the steps raised it, so the state is consistent
                core.end_call()
                raise
            finally:
                self._in_call = False
                if self._requester.closing:
                    self._requester.close()
        return result
