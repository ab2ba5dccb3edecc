"""The write gate: at any moment at most one writer's epoch may append to a node's log.

A promise is made while the gate is held: it closes the gate for every lower writer before the
log's end is read, so nothing is appended by a superseded master or from its link after the node
has answered a candidate.
"""

import threading
from types import TracebackType


class WriteGate:
    """Who may append now: an epoch (the own one of a master, or that of a slave's link), or
    nobody.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None  # whose writer may append; None: closed

    def open(self, epoch: int) -> None:
        """Let the writer of `epoch` append; the caller holds the lock and has checked the
        promise.
        """
        self.epoch = epoch

    def close(self) -> None:
        """Let nobody append; waits for an append under way."""
        with self.lock:
            self.epoch = None

    def entered(self, epoch: int) -> "Entered":
        """Hold the gate for one append; False when the epoch may not append any more."""
        return Entered(self, epoch)


class Entered:
    """The gate, held for a `with` block."""

    __slots__ = ("_epoch", "_gate")

    def __init__(self, gate: WriteGate, epoch: int) -> None:
        self._gate = gate
        self._epoch = epoch

    def __enter__(self) -> bool:
        self._gate.lock.acquire()
        return self._gate.epoch == self._epoch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gate.lock.release()
