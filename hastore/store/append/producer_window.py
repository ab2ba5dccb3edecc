"""One producer's last sequence numbers, and where their records lie."""

from array import array
from collections.abc import Sequence

WINDOW = 1024


class ProducerWindow:
    """One producer: `sequences[i]` lies at `offsets[i]`, in the log's order."""

    __slots__ = ("floor", "offsets", "sequences", "top")

    def __init__(self) -> None:
        self.sequences = array("q")
        self.offsets = array("q")
        self.floor = -1  # the greatest sequence number that has left the window
        self.top = -1  # the greatest one there is

    def add(self, sequence: int, offset: int) -> None:
        """Take the next record."""
        self.sequences.append(sequence)
        self.offsets.append(offset)
        self.top = max(self.top, sequence)
        if len(self.sequences) >= 2 * WINDOW:
            self.trim()

    def extend(self, sequences: Sequence[int], offsets: Sequence[int]) -> None:
        """Add many, as `add` would."""
        top = max(sequences)
        if top > self.top:
            self.top = top
        at = 0
        while len(self.sequences) + len(sequences) - at >= 2 * WINDOW:
            stop = at + 2 * WINDOW - len(self.sequences)
            self.sequences.extend(sequences[at:stop])
            self.offsets.extend(offsets[at:stop])
            self.trim()
            at = stop
        self.sequences.extend(sequences[at:] if at else sequences)
        self.offsets.extend(offsets[at:] if at else offsets)

    def trim(self) -> None:
        """Let go of all but the last `WINDOW`."""
        gone = len(self.sequences) - WINDOW
        if gone > 0:
            self.floor = max(self.floor, max(self.sequences[:gone]))
            del self.sequences[:gone]
            del self.offsets[:gone]

    def cut(self, log_end: int) -> None:
        """Forget records at or beyond `log_end`."""
        keep = len(self.offsets)
        while keep and self.offsets[keep - 1] >= log_end:
            keep -= 1
        del self.sequences[keep:]
        del self.offsets[keep:]
        self.top = max(self.floor, max(self.sequences, default=-1))

    def find(self, sequence: int) -> int | None:
        """Return the offset of a sequence number in the window."""
        if sequence > self.top:
            return None
        try:
            return self.offsets[self.sequences.index(sequence)]
        except ValueError:
            return None
