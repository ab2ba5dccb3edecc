"""The write gate: at any moment at most one writer's epoch may append to a node's log.

A promise is made while the gate is held: it closes the gate for every lower writer before the
log's end is read, so nothing is appended by a superseded master or from its link after the node
has answered a candidate.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class WriteGate:
    """Who may append now: an epoch (the own one of a master, or that of a slave's link), or
    nobody.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._epoch: int | None = None

    @property
    def epoch(self) -> int | None:
        """The epoch whose writer may append; None: closed."""
        return self._epoch

    def open(self, epoch: int) -> None:
        """Let the writer of `epoch` append; the caller holds the lock and has checked the
        promise.
        """
        self._epoch = epoch

    def close(self) -> None:
        """Let nobody append; waits for an append under way."""
        with self.lock:
            self._epoch = None

    @contextmanager
    def entered(self, epoch: int) -> Iterator[bool]:
        """Hold the gate for one append; False when the epoch may not append any more."""
        with self.lock:
            yield self._epoch == epoch
