"""How far a job has read each queue, and which record it read last.

A queue offset alone does not identify a message: after a failover that cut the log, another message
may have it. So each position keeps marks of the record before it. If that record is still the same,
nothing before it was cut, because a cut removes the end of the log. RocketMQ's stores have no
epochs, so the marks are fields of the record itself.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from hastore.errors import PositionLostError, UsageError
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import QueueRange
from hastore.spark.options.source_options import DEFAULT_PATIENCE, Patience, Strategy
from hastore.spark.read.backend import Backend, spans_of
from hastore.spark.read.clusters import is_of_cluster, number_in
from hastore.spark.read.planning import AbsentNodes, matching, select

log = logging.getLogger(__name__)
_ALL_QUEUES = "all_queues"  # of a commit's state: the topics whose queues all have a position
MARK_COLUMNS = (Column.PHYSICAL_OFFSET, Column.SIZE, Column.BODY_CRC, Column.TIMESTAMP)


@dataclass(frozen=True)
class RecordMark:
    """Fields that identify a record."""

    physical_offset: int
    size: int
    body_crc: int
    timestamp_us: int


@dataclass(frozen=True)
class ReadPosition:
    """The next queue offset to read, and the record before it; None in a queue read from its start.

    Without a mark the position cannot be checked.
    """

    next: int
    mark: RecordMark | None

    def as_json(self) -> dict[str, Any]:
        """Return the position for a commit."""
        return {"next": self.next, "mark": None if self.mark is None else asdict(self.mark)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ReadPosition":
        """Return the position that `as_json` wrote."""
        mark = value["mark"]
        return cls(value["next"], None if mark is None else RecordMark(**mark))


ReadPositions = dict[TopicPartition, ReadPosition]


def positions_as_state(
    positions: Mapping[TopicPartition, ReadPosition], topics: Iterable[str]
) -> dict[str, Any]:
    """Return what a commit's state has for the next run: see Unread."""
    tree: dict[str, Any] = {}
    for key in sorted(positions):
        tree.setdefault(key.topic, {})[str(key.partition)] = positions[key].as_json()
    return {"positions": tree, _ALL_QUEUES: sorted(topics)}


def positions_from_json(tree: Mapping[str, Any]) -> ReadPositions:
    """Return the positions in what `positions_as_state` returned."""
    return {
        TopicPartition(topic, int(queue)): ReadPosition.from_json(value)
        for topic, queues in tree.items()
        for queue, value in queues.items()
    }


class Lost(NamedTuple):
    """Messages that retention has removed before they were read."""

    key: TopicPartition
    messages: int


class Unread(NamedTuple):
    """What a target does not have yet.

    A commit must have all the positions: also those of queues without messages, and of queues that
    it has not come to. So the next run knows which queues are new since.
    """

    positions: ReadPositions  # where it goes on
    topics: frozenset[str]  # whose queues all have a position
    ranges: dict[TopicPartition, OffsetRange]
    lost: list[Lost]


def unread(
    backend: Backend,
    strategy: Strategy,
    state: Mapping[str, Any],
    *,
    fail_on_data_loss: bool,
    patience: Patience = DEFAULT_PATIENCE,
) -> Unread:
    """Return what is there of the topics, but not in a target, whose last commit has this state.

    Call it with the target locked: another run may have read more since. Before messages count as
    removed, nodes that are absent are waited for, as long as `patience` says for later answers.

    Raises PositionLostError if the log was cut after it was read, and, with `fail_on_data_loss`, if
    retention has removed messages that were never read. Raises UsageError if the positions are of a
    group alone and the queues of a whole cluster, or the other way.
    """
    committed = positions_from_json(state.get("positions", {}))
    topics = frozenset(state.get(_ALL_QUEUES, ()))
    available, positions = _look(backend, strategy, committed, topics)

    def removed() -> list[TopicPartition]:
        nonlocal available, positions
        available, positions = _look(backend, strategy, committed, topics)
        return _removed(available, positions)

    unheard = ""
    if _removed(available, positions):
        unheard = AbsentNodes(backend, patience).wait(removed)
    _check_unlisted(backend, strategy, committed, available)
    ranges, lost = {}, []
    for key in sorted(available):
        there, start = available[key], positions[key].next
        if key in committed:
            check_read_position(backend, key, committed[key], there)
        if start < there.start:
            lost.append(Lost(key, there.start - start))
            new = "" if key in committed else ", which is new since the last run,"
            text = (
                f"the messages [{start}, {there.start}) of {key}{new} at {backend.where} were "
                f"removed before they were read{unheard}"
            )
            if fail_on_data_loss:
                raise PositionLostError(f"{text}; give --allow-data-loss to go on without them")
            log.warning("%s", text)
            start = there.start
            if start >= there.end:  # no range whose commit says that these are counted
                positions[key] = ReadPosition(start, None)
        if start < there.end:
            ranges[key] = OffsetRange(start, there.end)
    return Unread(positions, topics | {key.topic for key in available}, ranges, lost)


def _look(
    backend: Backend,
    strategy: Strategy,
    committed: Mapping[TopicPartition, ReadPosition],
    topics: Container[str],
) -> tuple[dict[TopicPartition, OffsetRange], ReadPositions]:
    """Return what is there, and where to go on."""
    available = spans_of(backend.readable(select(strategy, backend)))
    _check_numbers(backend, available, committed)
    return available, _beginnings(backend, available, committed, topics) | dict(committed)


def _removed(
    available: Mapping[TopicPartition, OffsetRange], positions: ReadPositions
) -> list[TopicPartition]:
    return [key for key, there in available.items() if positions[key].next < there.start]


def _beginnings(
    backend: Backend,
    available: Mapping[TopicPartition, OffsetRange],
    committed: Mapping[TopicPartition, ReadPosition],
    topics: Container[str],
) -> ReadPositions:
    """Return where to begin in the queues without a position.

    If a commit has all queues of a topic, another one is new since, and its messages have come
    since: from 0 on, or from where the last deletion of its topic has ended it. Of a topic, or of a
    group of a cluster, that the target does not have yet, what is there counts. So it does if only
    older versions have exported the topic: their commits lack the queues that had no message.
    """
    known = {_topic_of_group(key) for key in committed if key.topic in topics}
    starts = {key: there for key, there in available.items() if key not in committed}
    new = [key for key in starts if _topic_of_group(key) in known]
    late = [key for key in new if starts[key].start > 0]
    first = dict.fromkeys(new, 0) | (backend.ended(late) if late else {})
    return {key: ReadPosition(first.get(key, min(there)), None) for key, there in starts.items()}


def _topic_of_group(key: TopicPartition) -> tuple[str, int]:
    """Return a queue's topic, and the number of its group in a cluster."""
    return key.topic, number_in(key)


def _check_numbers(
    backend: Backend,
    available: Mapping[TopicPartition, OffsetRange],
    positions: Mapping[TopicPartition, ReadPosition],
) -> None:
    """Raise UsageError if no position is of a queue of its topic, because others number them."""
    known, there = _partitions(positions), _partitions(available)
    for topic in sorted(known.keys() & there.keys()):
        before, now = (is_of_cluster(max(one[topic])) for one in (known, there))
        if before != now and not known[topic] & there[topic]:
            names = ("a group alone", "all groups of a cluster")
            raise UsageError(
                f"topic {topic!r} was read from {names[before]} before, and {backend.where} is "
                f"{names[now]}, which numbers the queues in another way: all messages would be "
                "read again. Read from where the runs before did, or name a new target"
            )


def _partitions(keys: Iterable[TopicPartition]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for topic, partition in keys:
        found.setdefault(topic, set()).add(partition)
    return found


def _check_unlisted(
    backend: Backend,
    strategy: Strategy,
    committed: ReadPositions,
    available: Mapping[TopicPartition, OffsetRange],
) -> None:
    """Raise PositionLostError for a queue that was read, and that a store's folder does not list.

    Nodes list the queues without messages too. A folder does not, so its log decides: the queue of
    a record that the log still has to have must be there, unless its topic was deleted.
    """
    known = matching(strategy, dict.fromkeys(committed, OffsetRange(0, 0)))
    unlisted = sorted(key for key in known if key not in available and committed[key].mark)
    if backend.limit_offset() is None or not unlisted:
        return
    start, _ = backend.log_range()
    ended, topics = backend.ended(unlisted), {key.topic for key in available}
    for key in unlisted:
        mark = committed[key].mark
        assert mark is not None
        if key in ended or mark.physical_offset < start:  # it was deleted, or retention removed it
            continue
        if key.topic not in topics and not backend.knows_deletions:
            log.warning(
                "%s has no queue of topic %r, which was read before: it counts as deleted",
                backend.where,
                key.topic,
            )
            continue
        raise PositionLostError(
            f"{key} was read up to {committed[key].next} before, and {backend.where} has no such "
            "queue: a failover has cut all of it, this replica is behind, or its consume queues "
            "are lost, which `hastore pipeline index` builds anew. If the replica is only behind, "
            "run the job again later; if the log was cut, start over with a new target"
        )


def check_read_position(
    backend: Backend, key: TopicPartition, known: ReadPosition, there: OffsetRange
) -> None:
    """Raise PositionLostError if the record before a position is another one now, or gone."""
    if known.next > there.end:
        raise PositionLostError(
            f"{key} at {backend.where} ends at offset {there.end}, but was read up to {known.next} "
            "before: a failover has cut the log, or this replica is behind. If it is only behind, "
            "run the job again later; if the log was cut, start over with a new target"
        )
    if known.mark is None or known.next - 1 < there.start:
        return
    found = read_mark(backend, key, known.next - 1, there.start)
    if found != known.mark:
        raise PositionLostError(
            f"the message {known.next - 1} of {key} at {backend.where} is not the one that was "
            "read before: a failover has cut the log, or this is another log. Nothing was mixed; "
            "start over with a new target"
        )


def end_positions(
    backend: Backend, ranges: Mapping[TopicPartition, OffsetRange]
) -> dict[TopicPartition, ReadPosition]:
    """Return the positions after ranges, for `check_unchanged`: call it before they are read."""
    return {
        key: ReadPosition(span.end, read_mark(backend, key, span.end - 1, span.start))
        for key, span in ranges.items()
    }


def check_unchanged(backend: Backend, ends: Mapping[TopicPartition, ReadPosition]) -> None:
    """Raise PositionLostError if the log was cut below these positions since their marks were read.

    A job calls it between the end of its tasks and its commit, with the `end_positions` from before
    the tasks: if a queue's last record is the same, all records before it were, all the time.
    """
    available = backend.available()
    for key, position in ends.items():
        there = available.get(key)
        if position.mark is None or (there is not None and position.next - 1 < there.start):
            continue  # retention has removed the record since
        if there is None:
            raise PositionLostError(
                f"{key} at {backend.where} is gone: its topic was deleted while it was read, or a "
                "failover has cut all of it; none of it was made visible since the last commit. "
                "Run the job again, without the topic if it was deleted"
            )
        if (
            position.next > there.end
            or read_mark(backend, key, position.next - 1, there.start) != position.mark
        ):
            raise PositionLostError(
                f"{key} at {backend.where} was cut by a failover while it was read; nothing of the "
                "cut messages was made visible. Run the job again"
            )


def read_mark(backend: Backend, key: TopicPartition, offset: int, low: int) -> RecordMark | None:
    """Return the marks of the message at a queue offset; None if it is not there.

    Those of an inner batch that is left whole are its record's, at each of its offsets. It is one
    row at its first offset, which is looked for farther and farther back, down to `low`.
    """
    start, back, found = offset, 1, None
    while found is None:
        span = QueueRange(key.topic, key.partition, start, offset + 1, backend.limit_offset())
        builder = BatchBuilder(projection_of(MARK_COLUMNS))
        for batch in backend.read_queue(span, builder):
            found = mark_of(batch) or found
        if start <= low or not builder.left_whole:
            break
        start, back = max(low, offset - back), 2 * back
    return found


def mark_of(batch: pa.RecordBatch) -> RecordMark | None:
    """Return the marks of a batch's last row, from the columns MARK_COLUMNS."""
    if not batch.num_rows:
        return None
    physical_offset, size, body_crc, timestamp = (
        batch.column(column.value)[-1] for column in MARK_COLUMNS
    )
    return RecordMark(physical_offset.as_py(), size.as_py(), body_crc.as_py(), timestamp.value)
