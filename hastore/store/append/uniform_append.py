"""What one append will hold when all of it is runs (uniform_batch.py): the quick way of a put.

Used under the log's lock. Nothing counts as given out before `settle`, once the log holds it.
"""

from hastore.record.codec import OFFSETS, OFFSETS_AT, STORE_AT
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.append.uniform_batch import UniformBatch, UniformResults


class UniformAppend:
    """Give runs their places behind `start`, the log's end, and join their bytes."""

    def __init__(
        self, start: int, window: DedupWindow, table: QueueOffsetTable, now_ms: int
    ) -> None:
        self.end = start
        self.results: list[UniformResults] = []
        self._start = start
        self._now_ms = now_ms
        self._window = window
        self._table = table
        self._payloads: list[bytes] = []
        self._numbered: list[tuple[bytes, list[int], list[int]]] = []  # of producers, with offsets
        self._following: dict[bytes, dict[int, int]] = {}  # topic and queue to next queue offset
        self._tops: dict[bytes, int] = {}  # the last sequence number of each run's producer

    def take(self, batch: UniformBatch) -> bool:
        """Take a run; False, and the batch is of no use, when it may have been put before."""
        producer, topic, queue_ids = batch.producer, batch.topic, batch.queue_ids
        if producer is not None:
            top = self._tops.get(producer)
            if batch.sequences[0] <= (self._window.top(producer) if top is None else top):
                return False
            self._tops[producer] = batch.sequences[-1]
        following = self._following.get(topic)
        if following is None:
            following = self._following[topic] = {}
        queue_offsets: list[int] = []
        for queue_id in queue_ids:
            queue_offset = following.get(queue_id)
            if queue_offset is None:
                queue_offset = self._table.next(topic, queue_id)
                if queue_offset is None:
                    return False
            following[queue_id] = queue_offset + 1
            queue_offsets.append(queue_offset)
        first = self.end
        self.end = first + len(batch.payload)
        offsets = [first + start for start in batch.starts]
        self._payloads.append(batch.payload)
        if producer is not None:
            self._numbered.append((producer, batch.sequences, offsets))
        self.results.append(
            UniformResults(offsets, self.end, queue_ids, queue_offsets, self._now_ms)
        )
        return True

    def patched(self, store_host: bytes) -> bytearray:
        """Return the joined records, with what only the master knows filled in."""
        buffer = bytearray().join(self._payloads)
        stamp = self._now_ms.to_bytes(8) + store_host
        width = len(stamp)
        pack_offsets = OFFSETS.pack_into
        start = self._start
        for stored in self.results:
            for offset, queue_offset in zip(stored.offsets, stored.queue_offsets, strict=True):
                at = offset - start
                pack_offsets(buffer, at + OFFSETS_AT, queue_offset, offset)
                at += STORE_AT
                buffer[at : at + width] = stamp
        return buffer

    def settle(self) -> None:
        """Count it as given out: the log holds it."""
        advanced: dict[tuple[bytes, int], int] = {}
        for topic, following in self._following.items():
            for queue_id, queue_offset in following.items():
                advanced[topic, queue_id] = queue_offset
        self._table.take(advanced, self.end)
        self._window.add_runs(self._numbered, self.end)
