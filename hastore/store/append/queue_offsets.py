"""The next queue offset of every queue: the master gives it to the queue's next message."""

import threading
from collections.abc import Mapping, Sequence

from hastore.record.delays import MAX_LEVELS, SCHEDULE_TOPIC
from hastore.record.layout import FLAG_INNER_BATCH, FLAG_PREPARED
from hastore.store.derived.contract import (
    Dispatched,
    LoadedQueues,
    RecordColumns,
    inner_batch_of,
    queue_ends_of,
)

_OWN_QUEUES = {SCHEDULE_TOPIC.encode(): MAX_LEVELS}  # topics whose queues no setting limits
_NO_LIMITS: Mapping[bytes, int] = {}


class QueueOffsetTable:
    """The next queue offset by topic and queue; a Dispatcher, called after the consume queues.

    It starts from the consume queues. Then the master adds the records of each put, and replay adds
    all records of the log that no put has added, both in the log's order. All records below
    `end_offset` were added. A put waits until `end_offset` is the log's end.

    `begins` has where queues begin of which the log has nothing: the owner replaces it under the
    log's lock.

    A put reads the table under the log's lock; `_guard` protects changes by puts, replay and cuts.
    """

    def __init__(
        self,
        consume_queues: LoadedQueues,
        default_queues: int,
        limits: Mapping[bytes, int] = _NO_LIMITS,
    ) -> None:
        """Start empty; `limits` are those of TopicTable, which changes them in place."""
        self._limits = limits
        self._consume_queues = consume_queues
        self._default_queues = default_queues
        self._guard = threading.Lock()
        self._next: dict[tuple[bytes, int], int] = {}
        self._queues: dict[bytes, int] = {}
        self._put_ends: dict[bytes, int] = {}
        self.begins: Mapping[tuple[bytes, int], int] = {}
        self.end_offset = 0

    def next(self, topic: bytes, queue_id: int) -> int | None:
        """Return the next queue offset; None for a queue number that a put may not use."""
        known = self._next.get((topic, queue_id))
        if known is None:
            known = self.begins.get((topic, queue_id))
        limit = self._limits.get(topic)
        if limit is not None and topic not in _OWN_QUEUES:
            return (known or 0) if 0 <= queue_id < limit else None
        if known is not None:
            return known
        return 0 if 0 <= queue_id < self.count(topic) else None

    def next_delivered(self, topic: bytes, queue_id: int) -> int | None:
        """Return the next queue offset for a delayed message, whatever its topic takes from others.

        The queue is one that `delivery_queue` has returned.
        """
        key = topic, queue_id
        return self._next.get(key, self.begins.get(key, 0)) if queue_id >= 0 else None

    def delivery_queue(self, topic: bytes, queue_id: int, queues: int) -> int:
        """Return the queue in which a message of `queue_id` is delivered: its own one, or queue 0.

        `queues` is how many the topic has by its record, for consumers or producers, 0 without one.
        A topic that takes no messages for now gets it in its own queue all the same.
        """
        if self.next(topic, queue_id) is not None or 0 <= queue_id < queues:
            return queue_id
        return 0

    def count(self, topic: bytes) -> int:
        """Return the number of queues of a topic that puts may use.

        That is what the topic's record says, else `default_queues`, or more if the log has more.
        """
        limit = self._limits.get(topic)
        if limit is not None:
            return max(0, limit)
        return max(self._default_queues, self._queues.get(topic, 0), _OWN_QUEUES.get(topic, 0))

    def why_not(self, topic: bytes, queue_id: int) -> str:
        """Return why a put may not use a queue."""
        name, limit = topic.decode(), self._limits.get(topic)
        if limit is not None and limit < 0:
            return (
                f"topic {name} takes no messages: its permission has no 2"
                " (`hastore topics set TOPIC --perm rw`)"
            )
        where = "`hastore topics set TOPIC --queues N`"
        if limit is None:
            where = "store.default_queues"
        count = self.count(topic)
        return f"there is no queue {queue_id}: topic {name} has {count} queues ({where})"

    def give_out(self, advanced: dict[tuple[bytes, int], int], end_offset: int) -> None:
        """Set the next offsets after a put, once the log holds its records."""
        with self._guard:
            self._next.update(advanced)
            for topic, queue_id in advanced:
                self._put_ends[topic] = end_offset
                if queue_id >= self._queues.get(topic, 0):
                    self._queues[topic] = queue_id + 1
            self.end_offset = end_offset

    def put_end(self, topic: bytes) -> int:
        """Return where the last put of this node to a topic ended; 0 if there was none.

        Until replay has come there, the consume queues may lack records of the topic.
        """
        return self._put_ends.get(topic, 0)

    # -- replay -----------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Start from the consume queues, which hold every record below their `loaded_end`.

        That is 0, not `offset`, if their files are lost. Then no queue offset may be given out
        before replay has read the log again, and the end must not claim those records.
        """
        del synced
        self._rebuild(min(offset, self._consume_queues.loaded_end))
        return self.end_offset

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Add the records of replay, without those that a put has added."""
        with self._guard:
            if not (isinstance(batch, RecordColumns) and self._add_columns(batch)):
                self._add_each(batch)
            # Behind the records: an end that is too high only leaves a gap.
            for _, stated in queue_ends_of(batch):
                for topic, queue_id, after in stated.queues:
                    self._see(topic, queue_id, after)

    def _add_each(self, batch: Sequence[Dispatched]) -> None:
        new = batch if batch and batch[-1].end_offset > self.end_offset else ()
        for record in new:
            if record.offset < self.end_offset:
                continue
            flags, after = record.sys_flag, record.queue_offset + 1
            if flags & FLAG_PREPARED:  # prepared and rollback records are in no queue
                continue
            begins = after == 1
            if flags & FLAG_INNER_BATCH and (inner := inner_batch_of(record)) is not None:
                after, begins = sum(inner), not inner[0]
            self._see(record.topic, record.queue_id, after, begins=begins)
        if batch:
            self.end_offset = max(self.end_offset, batch[-1].end_offset)

    def _add_columns(self, batch: RecordColumns) -> bool:
        """Add a batch by queue; False if its records must be added one by one."""
        if self.end_offset < batch.end_offset:
            if batch.has_inner_batches or batch.start_offset < self.end_offset:
                return False
            runs = batch.queue_runs()
            if not all(run.is_gapless for run in runs):
                return False
            for run in runs:
                self._see(run.topic, run.queue_id, run.next, begins=not run.first)
            self.end_offset = batch.end_offset
        return True

    def truncate(self, log_end: int) -> None:
        """Start again from the consume queues, which have been cut already."""
        self._rebuild(min(log_end, self.end_offset))

    def flush(self) -> None:
        """Do nothing: a restart reads the consume queues."""

    def reset(self) -> None:
        """Forget everything."""
        with self._guard:
            self._next.clear()
            self._queues.clear()
            self._put_ends.clear()
            self.end_offset = 0

    def delete_before(self, min_offset: int) -> None:
        """Keep everything: a queue's next offset outlives its records."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def advance(self, offset: int) -> None:
        """Move the end to `offset`, where a blank ends or an emptied log begins."""
        self.end_offset = max(self.end_offset, offset)

    def _rebuild(self, end_offset: int) -> None:
        ends = list(self._consume_queues.next_offsets())
        with self._guard:
            self._next.clear()
            self._queues.clear()
            self._put_ends.clear()
            for topic, queue_id, next_offset in ends:
                self._see(topic, queue_id, next_offset)
            self.end_offset = end_offset

    def _see(self, topic: str, queue_id: int, next_offset: int, *, begins: bool = False) -> None:
        """Note a next offset; `begins`: of a record with queue offset 0, so the queue begins."""
        raw = topic.encode("utf-8", "surrogateescape")
        key = raw, queue_id
        self._next[key] = next_offset if begins else max(self._next.get(key, 0), next_offset)
        if queue_id >= self._queues.get(raw, 0):
            self._queues[raw] = queue_id + 1
