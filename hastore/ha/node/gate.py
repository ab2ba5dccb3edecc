"""The write gate: at any moment at most one epoch's writer may append to a node's log.

When a candidate asks for a promise, the node takes the gate's lock and closes the gate for every
writer. Only then does it read the log's end, which its answer reports. So after the answer nothing
of a lower epoch is appended, neither by this node as master nor by its link to a master.
"""

import threading


class WriteGate:
    """Knows the epoch that may append now: a master's own epoch, or that of a slave's link.

    `epoch` is None while the gate is closed. Thread-safe: `lock` is held for each append and for
    each change of `epoch`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.epoch: int | None = None

    def open(self, epoch: int) -> None:
        """Let the writer of `epoch` append.

        The caller holds the lock and has checked the promise.
        """
        self.epoch = epoch

    def close(self) -> None:
        """Close the gate for every writer; waits for an append in progress."""
        with self.lock:
            self.epoch = None

    def entered(self, epoch: int) -> "Entered":
        """Hold the lock for a `with` block.

        The name after `as` is False when `epoch` may not append now.
        """
        return Entered(self, epoch)


class Entered:
    """The gate's lock, held for a `with` block."""

    __slots__ = ("_epoch", "_gate")

    def __init__(self, gate: WriteGate, epoch: int) -> None:
        self._gate = gate
        self._epoch = epoch

    def __enter__(self) -> bool:
        self._gate.lock.acquire()
        return self._gate.epoch == self._epoch

    def __exit__(self, *_: object) -> None:
        self._gate.lock.release()
