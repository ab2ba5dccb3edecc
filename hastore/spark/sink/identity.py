"""The identity of each row of a write: a producer id, and numbers that rise with the rows. Pure.

A number is `batch << 32 | row` and has at most 18 digits, so the batches of a producer end at
2**27. Each further 2**27 batches have a producer of their own.
"""

import hashlib
from dataclasses import dataclass

from hastore.errors import UsageError

ROW_BITS = 32
_BATCH_BITS = 27  # 2**59 has 18 digits
MAX_ROWS = 1 << ROW_BITS


@dataclass(frozen=True)
class TaskIdentity:
    """The producer of one task, and the number of its first row."""

    producer_id: str
    first: int

    @property
    def end(self) -> int:
        """The first number that is beyond those of this task."""
        return self.first + MAX_ROWS


def stream_task(query_id: str, batch: int, partition: int) -> TaskIdentity:
    """Return the identity of a task of a streaming query."""
    era, place = batch >> _BATCH_BITS, batch & ((1 << _BATCH_BITS) - 1)
    return TaskIdentity(_producer("stream", query_id, era, partition), place << ROW_BITS)


def batch_task(write_id: str, partition: int) -> TaskIdentity:
    """Return the identity of a task of a batch write."""
    return TaskIdentity(_producer("write", write_id, 0, partition), 0)


def number_of(identity: TaskIdentity, row: int) -> int:
    """Return the number of a row. Raises UsageError beyond 2**32 rows."""
    if row > MAX_ROWS:
        raise UsageError(
            f"a partition has more than {MAX_ROWS:,} rows; repartition the data before the write"
        )
    return identity.first + row


def _producer(kind: str, name: str, era: int, partition: int) -> str:
    text = f"{kind}\0{name}\0{era}\0{partition}"
    # Letters and digits alone: nodes read such an id fastest.
    return "spark" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]
