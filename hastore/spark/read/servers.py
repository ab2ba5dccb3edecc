"""Read running nodes: ranges of queues, from slaves first, and the ends that a stream follows.

A reply holds many records, as they are in the log. They are turned into Arrow without being decoded
one by one. The next reply is under way while a batch is built. Each read opens and closes its own
sockets, so that no forked worker inherits one; the searches by time of a planning share theirs. If
a replica stalls, or its reply is damaged, the records are read from another one.

A stream's connections stay open between its looks at the ends. The master is asked, or, while there
is none, the replica with the greatest readable offset. Queues begin where the replica begins that
has kept the most, because each node removes its oldest files by itself. During a failover or a
restart a call waits for a node, as long as the option `retryTimeout` says
(options/source_options.py).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.connections.cluster_groups import GroupNodes
from hastore.client.connections.requester import Answer, Requester, expect
from hastore.client.consumer.range_reader import Chunk, RangeReader, Surveys
from hastore.client.messages import replay_stop
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
    CorruptRecordError,
    NotAuthenticatedError,
    PositionLostError,
    UnreachableError,
    UsageError,
)
from hastore.ha.rules.epochs import Standing
from hastore.protocol import api
from hastore.record.layout import MIN_RECORD_SIZE, header_struct
from hastore.record.message_filter import MessageFilter
from hastore.spark.options.names import BOOTSTRAP, Names
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange, Stored
from hastore.spark.options.source_options import DEFAULT_PATIENCE, Patience
from hastore.spark.read.backend import PlaceVerdict, QueuePlace, ReadableRange
from hastore.spark.read.stores import names_writer, valid_end

if TYPE_CHECKING:
    import pyarrow as pa

    from hastore.spark.arrow.batch import BatchBuilder
    from hastore.spark.arrow.record_fields import Ints

log = logging.getLogger(__name__)

ANSWER_S = 2.0  # after this time without an answer another node is asked
SURVEY_S = 1.0  # between two searches for a master
SEARCH_AGAIN_S = 10.0  # of one that answers: one that is cut off does not know of its successor
SEARCH_S = 10.0  # the most that one search takes
WARN_S = 30.0  # a call that waits so long says so in the log
REPLAY_S = 5.0  # replay lags by milliseconds, unless it has stopped
RETRY_S = 0.1  # after a refusal, as of a node that cuts its log or stops
_POLL_S = 0.01
REPAIR_S = 5.0  # a node mends a damaged record within 0.1 s, if another one has it whole
_NO_SUCH_QUEUE = "NO_SUCH_QUEUE"
_DAMAGED = CorruptRecordError.__name__
# Refused again later too.
_FINAL = frozenset(
    {_DAMAGED, "UsageError", "InternalError", "FORBIDDEN", _NO_SUCH_QUEUE}
)
TIME_S = 5.0  # a node ends a search by time after 3 s
TIME_TRIES = 6  # of a search by time that a node cuts short
TIME_PAUSE_S = 1.0  # after the first of them; longer after each
_BY_NAME_MAX = 8  # of more topics, all are asked for at once
_NO_ANSWER = (UnreachableError, NotAuthenticatedError)
_SIZE = header_struct("size")


class ServerBackend:
    """The nodes of a group, read through the client API."""

    def __init__(
        self,
        bootstrap: tuple[str, ...],
        fail_on_data_loss: bool,
        security: str | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        nodes: GroupNodes | None = None,
        names: Names = Names.QUERY,
    ) -> None:
        self._nodes = nodes
        self._names = names
        try:
            self._bootstrap = parse_bootstrap(bootstrap)
        except UsageError as error:
            text = str(error).removeprefix("bootstrap: ")
            raise UsageError(f"{names.said(BOOTSTRAP)}: {text}") from error
        self.where = ",".join(self._bootstrap)
        self._security = security
        self._patience = patience
        self._fail_on_data_loss = fail_on_data_loss
        self._surveys = Surveys()
        self._searching: ServerHead | None = None  # for all searches by time of a planning

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the sockets of the searches by time.

        Each other call closes its own, `read_queue` when its iterator ends.
        """
        self.close()

    def close(self) -> None:
        """End the searches by time; the next one looks for the nodes, and lists queues, anew.

        So does the next range: a job that looks whether its log was cut must not ask a node that
        was the master a moment ago.
        """
        self._surveys = Surveys()
        if self._searching is not None:
            self._searching.close()
            self._searching = None

    def limit_offset(self) -> int | None:
        """Return None: each node enforces its own readable offset."""
        return None

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all; the master's if a master answers.

        They have all messages that were readable at the call. Raises ClientError if the node's
        replay has not come so far; with `failOnDataLoss` false what is there is returned.
        """
        self.close()  # the searches that follow are in queues that have grown
        head = self._head()
        try:
            missing = head.wait_replayed()
            if missing is not None and self._fail_on_data_loss:
                raise ClientError(
                    f"{missing}; read again once `hastore status` shows no such problem"
                    f"{self._names.or_without_loss()}"
                )
            if missing is not None:
                log.warning("%s", missing)
            return head.available(topics)
        finally:
            head.close()

    def ended(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return at which offset the last deletion of its topic ended each of these queues."""
        head = self._head()
        try:
            head.available({key.topic for key in keys})
            return head.ended(keys)
        finally:
            head.close()

    def check_unlisted(self, topic: str) -> None:
        """Raise ForbiddenError if the client has no right to the topic."""
        head = self._head()
        try:
            head.check_unlisted(topic)
        finally:
            head.close()

    @property
    def knows_deletions(self) -> bool:
        """Return False: nodes tell of topics that are there."""
        return False

    def absent(self, keys: Collection[TopicPartition]) -> dict[str, str]:
        """Return the nodes that cannot be asked for messages now, and what they did not do."""
        head = self._head()
        try:
            return head.absent(keys)
        finally:
            head.close()

    def readable(
        self, queues: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, ReadableRange]:
        """Return the ranges up to the readable offset of the node that has the greatest.

        The nodes list the queues of their whole log. In a synchronous group its last messages may
        not be confirmed yet; a task would wait for them.
        """
        head = self._head()
        try:
            ends = {key: span.end for key, span in queues.items() if span.size}
            found = head.locate(ends, {key: queues[key].start for key in ends})
        finally:
            head.close()
        result = {key: ReadableRange(span) for key, span in queues.items()}
        for key in ends:
            start = queues[key].start
            place = found.get(key, QueuePlace(start))
            end = min(place.next, ends[key])
            result[key] = ReadableRange(OffsetRange(start, max(start, end)), place.before)
        return result

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        if self._searching is None:
            self._searching = self._head()
        return self._searching.offset_by_time(partition, timestamp_ms)

    def _head(self) -> "ServerHead":
        return ServerHead(
            self._bootstrap, self._security, self._patience, self._nodes, self._names
        )

    def log_range(self) -> tuple[int, int]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_log(self, span: LogRange, builder: "BatchBuilder") -> Iterator["pa.RecordBatch"]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_queue(self, span: QueueRange, builder: "BatchBuilder") -> Iterator["pa.RecordBatch"]:
        """Yield the messages of a range from any replica that has them.

        Raises UnreachableError if no replica sends a message for as long as `retryTimeout` says.
        """
        reader = RangeReader(
            self._bootstrap,
            span.topic,
            span.partition,
            span.start,
            span.end,
            before=span.before,
            skip_lost=not self._fail_on_data_loss,
            security=self._security,
            wanted=_filter_of(builder.wanted),
            give_up_s=self._patience.later_s,
            nodes=self._nodes,
            surveys=self._surveys,
        )
        chunks = reader.chunks()
        try:
            for chunk in chunks:
                try:
                    batches = self._sound(chunk, span, builder)
                except CorruptRecordError as damage:
                    reader.refuse(damage)
                    continue
                yield from batches
        except PositionLostError as lost:
            raise PositionLostError(
                f"{lost}; {self._names.without_loss()}",
                lost.queue_id,
                lost.common,
                lost.topic,
            ) from lost
        except UnreachableError as failure:
            raise UnreachableError(
                f"{failure}. Start a node of the group, or name nodes that run in "
                f"{self._names.said(BOOTSTRAP)}{self._patience.or_raise}"
            ) from failure
        finally:
            chunks.close()

    def _sound(
        self, chunk: Chunk, span: QueueRange, builder: "BatchBuilder"
    ) -> "Iterable[pa.RecordBatch]":
        """Return the batches of a chunk whose records are all sound.

        Raises CorruptRecordError. Batches that are too many to be held are made twice.
        """
        from hastore.spark.arrow.batch import MADE_BYTES_PER_BATCH

        held: list[pa.RecordBatch] = []
        held_bytes = 0
        for batch in self._build(chunk, span, builder):
            held_bytes += batch.nbytes
            if held_bytes > 2 * MADE_BYTES_PER_BATCH:
                held.clear()
            else:
                held.append(batch)
        return held if held or not held_bytes else self._build(chunk, span, builder)

    def _build(
        self, chunk: Chunk, span: QueueRange, builder: "BatchBuilder"
    ) -> Iterator["pa.RecordBatch"]:
        from hastore.spark.arrow.batch import QueueRows, build_parts, cut_batches
        from hastore.spark.arrow.inner_batches import (
            InnerBatchBuilder,
            are_wrapped,
            is_any_left_whole,
        )
        from hastore.spark.arrow.record_fields import RecordFields

        data = chunk.payload
        positions = _positions(chunk)
        fields = RecordFields(data, positions, None)
        wrapped = are_wrapped(fields.sys_flags)
        if is_any_left_whole(fields.sys_flags):
            builder.note_left_whole()
        wanted = (fields.queue_offsets >= span.start) | wrapped
        wanted &= fields.queue_offsets < span.end
        cut = valid_end(chunk.epochs, span.last)
        if cut is not None:
            gone = wanted & (fields.physical_offsets >= cut)
            if gone.any():
                text = f"messages of {span.name} before offset {span.end} were cut by a failover"
                if self._fail_on_data_loss:
                    raise PositionLostError(f"{text} during the read", span.partition)
                log.warning("%s: %s, and are left out", self.where, text)
            wanted &= ~gone
        offsets, sizes = fields.queue_offsets, fields.sizes
        if not wanted.all():
            positions, sizes, offsets = positions[wanted], sizes[wanted], offsets[wanted]
        if wrapped.any():
            inner = InnerBatchBuilder(builder, span.start, span.end)

            def build_inner(part: slice) -> "pa.RecordBatch | None":
                rows = QueueRows(span.topic, span.partition, offsets[part])
                return inner.build(data, positions[part], None, rows)

            yield from build_parts(build_inner, positions)
            return

        def build(start: int, part: slice) -> "pa.RecordBatch | None":
            part = slice(start + part.start, start + part.stop)
            rows = QueueRows(span.topic, span.partition, offsets[part])
            # Most replies are one batch, whose fields are known then.
            known = fields if len(rows.offsets) == len(fields.positions) else None
            return builder.build(data, positions[part], None, rows, known)

        for part in cut_batches(positions, sizes):
            yield from build_parts(partial(build, part.start), positions[part])


def _filter_of(wanted: MessageFilter | None) -> api.Filter | None:
    return None if wanted is None else api.Filter(wanted.kind, wanted.expression)


def _positions(chunk: Chunk) -> "Ints":
    """Return where each record begins. RecordFields checks the records later.

    Raises CorruptRecordError if the sizes that the node states are not those of the records.
    """
    data, size = chunk.payload, len(chunk.payload)
    if chunk.sizes:
        stated = np.frombuffer(chunk.sizes, ">i4").astype(np.int64)
        ends = np.cumsum(stated)
        if stated.min() < MIN_RECORD_SIZE or ends[-1] != size:
            raise CorruptRecordError("a reply states sizes that are not those of its records")
        positions: Ints = ends - stated
        view: npt.NDArray[Any] = np.ndarray((size - 3,), ">i4", buffer=data, strides=(1,))
        if (view[positions] != stated).any():
            raise CorruptRecordError("a reply states sizes that are not those of its records")
        return positions
    found = []
    at = 0
    while at < size:
        found.append(at)
        length = _SIZE.unpack_from(data, at)[0] if at + 4 <= size else 0
        if length < MIN_RECORD_SIZE:
            break  # RecordFields refuses this record and names its place
        at += length
    return np.array(found, np.int64)


# -- the ends that a stream follows ----------------------------------------------------------------


class ServerHead:
    """The nodes of a group, asked through the client API."""

    def __init__(
        self,
        bootstrap: tuple[str, ...],
        security: str | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        nodes: GroupNodes | None = None,
        names: Names = Names.QUERY,
    ) -> None:
        """`nodes` are those of a group of a cluster, which are followed to other addresses."""
        self._nodes = nodes
        self._names = names
        self._security = security
        self._patience = patience
        self._answered = False  # whether a node ever has
        self._bootstrap = parse_bootstrap(bootstrap)
        self.where = ",".join(self._bootstrap)
        self._requester: Requester | None = None
        self._node: str | None = None  # the address that answers
        self._surveyed_ms = float("-inf")
        self._token: tuple[str, int] | None = None
        self._ended: dict[TopicPartition, int] = {}  # as of the last `available`
        self._lister: str | None = None  # who has listed the queues
        self._listed: dict[str, dict[int, tuple[int, int]]] = {}  # their ranges, by topic
        self._oldest: str | None = None  # the replica whose log begins first; None: no other's does
        self._looked: tuple[str | None, int] | None = None  # the node and its start at that look
        self._older: dict[TopicPartition, int] = {}  # see `_kept_elsewhere`; of `available`

    def close(self) -> None:
        """Close the connections."""
        if self._requester is not None:
            self._requester.close()
            self._requester = None

    def token(self) -> object:
        """Return the node that answered the last `available`, and its epoch."""
        return self._token

    def wait_replayed(self) -> str | None:
        """Wait until the node's queues have all messages that are readable at the call.

        Returns what they lack, if its replay has stopped or is too late. A slave's log may end
        inside a record, which it never replays without its master: only a stop of replay counts.
        """
        node, end = None, 0
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + min(REPLAY_S, self._patience.first_s) * 1_000.0
        while True:
            status = expect(api.NodeStatus, self._ask(api.AskStatus)[0]).status
            if status["node"] != node:
                node, end = status["node"], status.get("readable_offset", 0)
            come = status.get("dispatched_offset", end)
            if come >= end:
                return None
            why = replay_stop(status)
            late = SYSTEM_CLOCK.monotonic_ms() >= deadline_ms
            if why is not None or (late and status.get("writable")):
                return (
                    f"node {node} of {self.where} has replayed its log only up to offset {come:,}"
                    f" of {end:,}, so the read would leave out what is stored after that: "
                    f"{why or 'it is late'}"
                )
            if late:
                return None
            self._open().transport.sleep(_POLL_S)

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, as the node lists them.

        They begin where the replica begins that has kept the most: tasks read from any.
        """
        info = expect(api.Map, self._ask(api.AskMap)[0]).map
        if self._may_survey(SEARCH_AGAIN_S if info.writable else SURVEY_S):
            try:
                self._choose(SEARCH_S)
            except UnreachableError:  # the question waits for a node, as long as the options say
                self._leave()
            info = expect(api.Map, self._ask(api.AskMap)[0]).map
        found = self._listing(info, topics)
        self._older = self._kept_elsewhere(info, topics, found)
        return {
            key: OffsetRange(self._older.get(key, span.start), span.end)
            for key, span in found.items()
        }

    def listed(self, topics: Collection[str]) -> dict[TopicPartition, OffsetRange]:
        """Return the queues of topics as the node has them, whatever other replicas have kept."""
        return self._listing(expect(api.Map, self._ask(api.AskMap)[0]).map, topics)

    def _listing(
        self, info: api.MapInfo, topics: Collection[str] | None
    ) -> dict[TopicPartition, OffsetRange]:
        self._token = (self._node or "", info.epoch)
        self._listed = {}
        asked = [self._topics(name) for name in _names_of(topics)]
        self._ended = {
            TopicPartition(topic, queue_id): end
            for part in asked
            for topic, ends in part.ended.items()
            for queue_id, end in ends.items()
        }
        return {
            TopicPartition(topic, queue_id): OffsetRange(*bounds)
            for part in asked
            for topic, queues in part.topics.items()
            if topics is None or topic in topics
            for queue_id, bounds in queues.items()
        }

    def _kept_elsewhere(
        self,
        info: api.MapInfo,
        topics: Collection[str] | None,
        own: Mapping[TopicPartition, OffsetRange],
    ) -> dict[TopicPartition, int]:
        """Return where queues begin at the replica whose log begins first, if that is earlier.

        Each node removes its oldest files by itself. `info` and `own` are of the node that answers.
        What a deletion has hidden is left out: the replica may not have heard of that yet.
        """
        oldest = self._find_oldest(info)
        if oldest is None:
            return {}
        result = {}
        try:
            for name in _names_of(topics):
                there = self._ask_at(oldest, partial(api.AskTopics, topic=name), ANSWER_S)
                if not isinstance(there, api.Topics):
                    continue
                for topic, queues in there.topics.items():
                    for queue_id, (start, end) in queues.items():
                        key = TopicPartition(topic, queue_id)
                        start = max(start, self._ended.get(key, 0))
                        if key in own and start < own[key].start <= end:
                            result[key] = start
        except _NO_ANSWER:
            self._looked = None  # it is gone: look for another one the next time
        return result

    def _find_oldest(self, info: api.MapInfo) -> str | None:
        """Return the replica whose log begins first, if it begins before that of `info`.

        Looks again only when the node has removed more. Only replicas of the node's epoch count:
        no task reads from others.
        """
        looked = (self._node, info.min_offset)
        if info.min_offset and looked != self._looked:
            requester = self._open()
            try:
                answered = requester.run_steps(requester.survey(ANSWER_S))
            except _NO_ANSWER:  # nor does the node any more: the next question waits for one
                return None
            maps = requester.cluster.maps
            older = [
                (there.min_offset, address)
                for address, there in maps.items()
                if address in answered and there.epoch == info.epoch
                # Else it has an old log, or none yet, and begins anew before tasks read from it.
                and there.min_offset < info.min_offset <= there.readable_offset
            ]
            self._oldest, self._looked = min(older)[1] if older else None, looked
        return self._oldest if info.min_offset else None

    def ended(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return at which offset the last deletion of its topic ended each of these queues.

        A node of an earlier version does not say.
        """
        return {key: self._ended[key] for key in keys if key in self._ended}

    def check_unlisted(self, topic: str) -> None:
        """Raise ForbiddenError if the client has no right to the topic."""
        self._topics(topic)

    def absent(self, keys: Collection[TopicPartition]) -> dict[str, str]:
        """Return the nodes that cannot be asked for messages now, and what they did not do.

        The next `available` looks anew which replica has kept the most.
        """
        self._looked = None
        self._follow()
        requester = self._open()
        try:
            answered = requester.run_steps(requester.survey(ANSWER_S))
        except _NO_ANSWER:  # the next question waits for a node
            answered = ()
        return requester.cluster.absent(answered)

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older.

        Asks until a search has come to its end: what a node has when it cuts a search short lies
        before the message that is looked for. As an end of a read it would leave messages out,
        without an error. Raises ClientError if each search is cut short, and UnreachableError.
        """
        for number in range(TIME_TRIES):
            if number:
                self._open().transport.sleep(TIME_PAUSE_S * number)
            there = self._listed_range(partition)
            if there is None:
                return None
            reply, _ = self._ask(lambda rid: api.FindTime(rid, *partition, timestamp_ms), TIME_S)
            if self._lister != self._node:
                continue  # another node has answered, whose queue may end elsewhere
            if isinstance(reply, api.Failed) and reply.status == _NO_SUCH_QUEUE:
                return None  # the node lists it, but it never had a message
            found = expect(api.TimeFound, reply)
            if found.cut_short:
                continue
            first: int | None = found.queue_offset
            if 0 < found.queue_offset <= there.start:
                first = self._first_elsewhere(partition, timestamp_ms, there)
            if first is not None:
                return first if first < there.end else None
        raise ClientError(
            f"a node's search for the first message of {partition} stored at {timestamp_ms} or "
            f"later was cut short {TIME_TRIES} times, because its disk is slow or its clock was "
            "set back often, or nodes failed meanwhile: try again, or limit the read by offsets"
        )

    def _first_elsewhere(
        self, key: TopicPartition, timestamp_ms: int, own: OffsetRange
    ) -> int | None:
        """Return the first message stored then or later that another replica has kept, or `own`.

        None if that replica has not ended its search.
        """
        info = expect(api.Map, self._ask(api.AskMap)[0]).map
        low = self._kept_elsewhere(info, {key.topic}, {key: own}).get(key)
        if low is None or self._oldest is None:
            return own.start
        make = partial(api.FindTime, topic=key.topic, queue_id=key.partition)
        try:
            reply = self._ask_at(self._oldest, partial(make, timestamp_ms=timestamp_ms), TIME_S)
        except _NO_ANSWER:
            self._looked = None
            return None
        if not isinstance(reply, api.TimeFound) or reply.cut_short:
            return None
        return max(low, min(reply.queue_offset, own.start))

    def _listed_range(self, key: TopicPartition) -> OffsetRange | None:
        """Return a queue's range in the list of the node that answers; None if it has none."""
        if self._lister != self._node or key.topic not in self._listed:
            self._topics(key.topic if len(self._listed) < _BY_NAME_MAX else None)
        bounds = self._listed.setdefault(key.topic, {}).get(key.partition)
        return None if bounds is None else OffsetRange(*bounds)

    def limit_offset(self) -> int | None:
        """Return None: each node enforces its own readable offset."""
        return None

    def locate(
        self, ends: Mapping[TopicPartition, int], lows: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, QueuePlace]:
        """Return the place of each offset, or of the greatest readable one from `lows` to it."""
        found = {key: self._locate(key, end, lows.get(key, 0)) for key, end in ends.items()}
        return {key: place for key, place in found.items() if place is not None}

    def check(
        self, places: Mapping[TopicPartition, QueuePlace]
    ) -> dict[TopicPartition, PlaceVerdict]:
        """Return whether the record before each place is still in the log."""
        return {key: self._check(key, place) for key, place in places.items()}

    def _topics(self, topic: str | None) -> api.Topics:
        found = expect(api.Topics, self._ask(lambda rid: api.AskTopics(rid, topic))[0])
        if self._lister != self._node:
            self._lister, self._listed = self._node, {}
        self._listed.update(found.topics)
        return found

    def _locate(self, key: TopicPartition, end: int, low: int) -> QueuePlace | None:
        if end <= low:
            return QueuePlace(end)
        found = self._before(key, end)
        if found is not None:
            return found
        result = None  # the queue's end is not readable yet: find the part that is
        high = end - 1
        while low < high:
            middle = (low + high + 1) // 2
            found = self._before(key, middle)
            if found is None:
                high = middle - 1
            else:
                low, result = middle, found
        return result

    def _before(self, key: TopicPartition, end: int) -> QueuePlace | None:
        """Return the place after the message at `end - 1`; None if that is not readable yet."""
        reply = self._pull(key, api.Position(end - 1))
        if reply.status is api.PullStatus.OFFSET_TOO_SMALL:
            is_kept = end > self._older.get(key, end)  # by another replica
            return QueuePlace(end if is_kept else max(end, reply.min_queue_offset))
        if reply.status is not api.PullStatus.FOUND or reply.last_offset is None:
            return None
        stored = Stored(reply.after.epoch, reply.last_offset)
        return QueuePlace(reply.next_queue_offset, stored)

    def _check(self, key: TopicPartition, place: QueuePlace) -> PlaceVerdict:
        if place.before is None:
            return PlaceVerdict(Standing.AGREED, place)
        same = self._compare(key, place, place.next, place.before)
        if same:
            return PlaceVerdict(Standing.AGREED, place)
        reply = self._pull(key, api.Position(place.next, *place.before))
        if reply.status is api.PullStatus.HISTORY_DIFFERS:
            common = reply.common or api.Position(reply.min_queue_offset)
            before = None
            if common.offset is not None:
                before = Stored(common.epoch, common.offset)
            return PlaceVerdict(Standing.LOST, QueuePlace(common.queue_offset, before))
        lost = PlaceVerdict(Standing.LOST, QueuePlace(reply.min_queue_offset))
        if same is False:
            return lost
        if reply.status is api.PullStatus.OFFSET_TOO_LARGE:
            # The log goes beyond the record. If the queue has any record, it should have this one.
            end = reply.max_queue_offset
            if self._compare(key, place, end, place.before) is not None:
                return lost
        elif reply.status in (api.PullStatus.NO_NEW, api.PullStatus.NO_SUCH_QUEUE):
            # Or the place is the queue's end: the node does not tell the two apart.
            start = self._start_of_other(key, place)
            if start is None:
                return PlaceVerdict(Standing.BEHIND, place)
            return PlaceVerdict(Standing.LOST, QueuePlace(start))
        return PlaceVerdict(Standing.AGREED, place)

    def _compare(
        self, key: TopicPartition, place: QueuePlace, end: int, before: Stored
    ) -> bool | None:
        """Return whether the record at `end - 1` is the one before the place.

        None if the node does not say: its log ends before that record, or is of another history;
        the record is gone, or was not confirmed again; no epoch names who wrote it.
        """
        if end <= 0 or not names_writer(before):
            return None
        reply = self._pull_known(key, api.Position(end - 1, *before))
        if reply is None or reply.status is not api.PullStatus.FOUND:
            return None
        if reply.next_queue_offset != end:
            return None
        return end == place.next and reply.last_offset == before.offset

    def _start_of_other(self, key: TopicPartition, place: QueuePlace) -> int | None:
        """Return where the queue of another log starts; None if it is not sure that it is another.

        The master that wrote the record before the place cannot be behind it: while it is master,
        in one epoch, its queues keep what they have, whether that is readable yet or not.
        """
        before, node = place.before, self._node
        if before is None or not names_writer(before) or self._writer() != (node, before.epoch):
            return None
        status = expect(api.NodeStatus, self._ask(api.AskStatus)[0]).status
        end = status.get("max_offset", 0)
        if status.get("dispatched_offset", end) <= before.offset < end:
            return None  # its replay has not come to the record, so its queue is shorter for now
        reply = self._pull_known(key, api.Position(place.next - 1))
        if reply is None or self._writer() != (node, before.epoch):
            return None  # it is damaged by now, or another node may have answered
        is_other = reply.max_queue_offset < place.next
        if reply.status is api.PullStatus.FOUND and reply.next_queue_offset == place.next:
            is_other = reply.last_offset != before.offset
        return reply.min_queue_offset if is_other else None

    def _writer(self) -> tuple[str | None, int] | None:
        """Return the node that answers, and the epoch in which it writes; None of a slave."""
        info = expect(api.Map, self._ask(api.AskMap)[0]).map
        return (self._node, info.epoch) if info.writable else None

    def _pull(self, key: TopicPartition, position: api.Position) -> api.Pulled:
        """Ask for one message; its records are not looked at.

        A node that finds a damaged record takes it from another one: it is asked again meanwhile.
        """
        until_ms = SYSTEM_CLOCK.monotonic_ms() + REPAIR_S * 1_000.0
        while True:
            reply = self._answer_to_pull(key, position)
            is_damaged = isinstance(reply, api.Failed) and reply.status == _DAMAGED
            if not is_damaged or SYSTEM_CLOCK.monotonic_ms() >= until_ms:
                return expect(api.Pulled, reply)
            self._open().transport.sleep(RETRY_S)

    def _pull_known(self, key: TopicPartition, position: api.Position) -> api.Pulled | None:
        """Ask for a message that was read before; None if it is damaged by now."""
        reply = self._answer_to_pull(key, position)
        if isinstance(reply, api.Failed) and reply.status == _DAMAGED:
            return None
        return expect(api.Pulled, reply)

    def _answer_to_pull(self, key: TopicPartition, position: api.Position) -> api.Reply:
        reply, _ = self._ask(lambda rid: api.Pull(rid, key.topic, key.partition, position, 1, 1, 0))
        return reply

    def _ask(self, make: Callable[[int], api.Request], answer_s: float | None = None) -> Answer:
        """Ask the node that answered last, or look for another, as long as the options say.

        A node has `answer_s` for its answer, by default ANSWER_S. Returns the last refusal if
        nothing better comes in all the time.
        """
        wait_s = self._patience.later_s if self._answered else self._patience.first_s
        began_ms = SYSTEM_CLOCK.monotonic_ms()
        refusal: Answer | None = None
        warned = False
        while True:
            waited_s = (SYSTEM_CLOCK.monotonic_ms() - began_ms) / 1_000.0
            left_s = max(0.0, wait_s - waited_s)
            try:
                answer = self._ask_once(make, min(answer_s or ANSWER_S, left_s), left_s)
            except UnreachableError as failure:
                if left_s > 0.0:
                    self._leave()
                    if waited_s >= WARN_S and not warned:
                        warned = True
                        text = "no node of %s answers; waiting %.0f s more: %s"
                        log.warning(text, self.where, left_s, failure)
                    continue
                if refusal is not None:
                    return refusal
                raise UnreachableError(self._no_answer(wait_s, failure)) from failure
            self._answered = True
            reply = answer[0]
            if not isinstance(reply, api.Failed) or reply.status in _FINAL or left_s <= 0.0:
                return answer
            refusal = answer
            self._leave()
            self._open().transport.sleep(min(left_s, RETRY_S))

    def _no_answer(self, wait_s: float, failure: UnreachableError) -> str:
        return (
            f"no node of {self.where} answered within {wait_s:g} s{self._patience.changed_by}: "
            f"{failure}; check {self._names.said(BOOTSTRAP)}, that a node runs there, and that "
            "Spark's driver and executors can reach the nodes' API ports"
        )

    def _follow(self) -> None:
        """Ask at the addresses that the group has now."""
        found = self._bootstrap if self._nodes is None else self._nodes.addresses()
        if set(found) != set(self._bootstrap):
            self._bootstrap = found
            self.where = ",".join(found)
            self._node = None
            self.close()

    def _ask_once(
        self, make: Callable[[int], api.Request], answer_s: float, left_s: float
    ) -> Answer:
        self._follow()
        if self._node is None:
            self._choose(min(left_s, SEARCH_S))
        assert self._node is not None
        requester = self._open()
        return requester.run_steps(requester.ask(self._node, make, answer_s))

    def _ask_at(
        self, address: str, make: Callable[[int], api.Request], answer_s: float
    ) -> api.Reply:
        """Ask a certain node, once. Raises UnreachableError."""
        requester = self._open()
        return requester.run_steps(requester.ask(address, make, answer_s))[0]

    def _leave(self) -> None:
        """Look for a node anew before the next question."""
        if self._node is not None:
            self._open().cluster.maps.pop(self._node, None)
        self._node = None

    def _may_survey(self, pause_s: float) -> bool:
        return SYSTEM_CLOCK.monotonic_ms() - self._surveyed_ms > pause_s * 1_000.0

    def _choose(self, timeout_s: float) -> None:
        """Find the master, or else the replica with the greatest readable offset."""
        requester = self._open()
        requester.run_steps(requester.survey(timeout_s))
        self._surveyed_ms = SYSTEM_CLOCK.monotonic_ms()
        maps = requester.cluster.maps
        newest = max(info.epoch for info in maps.values())
        known = {address: info for address, info in maps.items() if info.epoch == newest}
        self._node = max(known, key=lambda a: (known[a].writable, known[a].readable_offset))

    def _open(self) -> Requester:
        if self._requester is None:
            of_group = None if self._nodes is None else self._nodes.names
            self._requester = Requester(
                self._bootstrap, SYSTEM_CLOCK, self._security, of_group=of_group
            )
        return self._requester


def _names_of(topics: Collection[str] | None) -> Collection[str | None]:
    """Return what to ask for: each topic by its name, or, if they are too many, all at once."""
    return [None] if topics is None or len(topics) > _BY_NAME_MAX else list(topics)
