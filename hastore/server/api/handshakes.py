"""Steps of TLS handshakes, computed in a thread of their own.

A step takes 0.3 ms: keys, a signature, and with a client's certificate its check. OpenSSL releases
the interpreter's lock for it, so that the API's thread goes on with other clients. STEPS_MAX steps
are handed over at a time: the rest waits in `newcomers.py`, where sources take turns.

While a step is under way, its engine belongs to this thread (`Connection.shaking`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from hastore.security.tls_engine import TlsEngine
from hastore.service import OnFailure, Service

STEPS_MAX = 1  # handed over and not taken back; with four a flood doubled the time of a put
C = TypeVar("C")


class Step(NamedTuple, Generic[C]):
    """A step that was computed: the plaintext that it gave, or what went wrong with it."""

    connection: C
    received: int  # bytes
    plain: bytes | Exception


class Handshakes(Service, Generic[C]):
    """Compute steps in the order in which they are handed over."""

    def __init__(self, on_done: Callable[[], None], *, on_failure: OnFailure) -> None:
        """Prepare; `on_done` is called from the thread when `pop_done` has something."""
        super().__init__("TlsHandshakes", on_failure=on_failure)
        self._on_done = on_done
        self._waiting: SimpleQueue[tuple[C, TlsEngine, bytes] | None] = SimpleQueue()
        self._done: deque[Step[C]] = deque()
        self._under_way = 0  # used by the API's thread only

    # -- called by the API's thread ----------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether another step may be handed over."""
        return self._under_way < STEPS_MAX

    @property
    def has_done(self) -> bool:
        """Whether `pop_done` has something."""
        return bool(self._done)

    def begin(self, connection: C, tls: TlsEngine, received: bytes) -> None:
        """Hand over received bytes; the engine must not be used until the step is done."""
        self._under_way += 1
        self._waiting.put((connection, tls, received))

    def pop_done(self) -> list[Step[C]]:
        """Return the steps that are done since the last call."""
        found = [self._done.popleft() for _ in range(len(self._done))]
        self._under_way -= len(found)
        return found

    # -- the thread --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        self._waiting.put(None)

    def run(self) -> None:
        """Compute until stopped; steps that still wait then are dropped."""
        while (step := self._waiting.get()) is not None and not self.stopping.is_set():
            connection, tls, received = step
            plain: bytes | Exception
            try:
                plain = tls.receive(received)
            except Exception as failure:  # the API ends this connection with it
                plain = failure
            self._done.append(Step(connection, len(received), plain))
            self._on_done()
