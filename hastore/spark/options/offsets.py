"""Where a read starts and ends: Kafka's JSON or instants, resolved to offsets. Pure.

The names are Kafka's: a `partition` is a queue, an `offset` is a queue offset, ends are exclusive.
`-2` (earliest) and `-1` (latest) appear in JSON only; in the code they are `Bound`s. In the text of
an instant digits alone are milliseconds since 1970, as in Kafka; everything else is ISO 8601, with
a time zone or in that of the session.
"""

import enum
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hastore.errors import PositionLostError, UsageError
from hastore.spark.options.names import Names

log = logging.getLogger(__name__)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECONDS = re.compile(r"[0-9]{1,18}")
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])([0-9]{1,2})(?::?([0-5][0-9]))?")


class Instant(NamedTuple):
    """A parsed instant; `in_session_zone` is true if the text named no time zone."""

    timestamp_ms: int
    in_session_zone: bool


def parse_instant(called: str, text: str, session_zone: str | None) -> Instant:
    """Parse milliseconds or ISO 8601 text; `called` is how errors say the option.

    Raises UsageError, also if the text has no time zone and the session's is not known.
    """
    text = text.strip()
    if _MILLISECONDS.fullmatch(text):
        return Instant(int(text), False)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"{called}: Expected milliseconds since 1970 or ISO 8601 text such as "
            f"2026-11-20T21:52:00+01:00, got {text}"
        ) from error
    if moment.tzinfo is not None:
        return Instant(to_milliseconds(moment), False)
    if session_zone is None:
        raise UsageError(
            f"{called}: {text} has no time zone; add one, such as {text}Z, or call "
            "hastore.spark.register(spark) first: then the session's zone counts (not with Spark "
            "Connect)"
        )
    return Instant(to_milliseconds(moment.replace(tzinfo=find_zone(session_zone))), True)


def to_milliseconds(moment: datetime) -> int:
    """Return milliseconds since 1970, rounded up, and 0 for earlier moments.

    Rounding up is exact: a message was stored at `moment` or later if and only if its time in
    milliseconds reaches the result.
    """
    return max(0, -((_EPOCH - moment) // timedelta(milliseconds=1)))


def find_zone(name: str) -> tzinfo:
    """Return the time zone of one of Spark's names: `Europe/Berlin`, `Z`, `+01:00`, `UTC+1`.

    Raises UsageError for a name that this machine does not know.
    """
    if name in ("Z", "UTC", "GMT", "UT"):
        return UTC
    match = _OFFSET.fullmatch(name)
    if match and int(match[2]) <= 18:
        distance = timedelta(hours=int(match[2]), minutes=int(match[3] or 0))
        return timezone(distance if match[1] == "+" else -distance)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UsageError(
            f"this machine does not know the session's time zone {name!r}; write times with an "
            "offset, such as 2026-11-20T21:52:00+01:00"
        ) from error


# -- offsets and limits ----------------------------------------------------------------------------

_WIRE_EARLIEST = -2
_WIRE_LATEST = -1
_INT64_MAX = 2**63 - 1
_MAX_SHOWN = 1_000  # characters of a wrong value in an error


class TopicPartition(NamedTuple):
    """A queue of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetRange(NamedTuple):
    """The offsets `[start, end)` of one partition."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Return the number of messages."""
        return self.end - self.start


class Bound(enum.Enum):
    """The start or the end of a partition's range, looked up when the query is planned."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class OffsetsByPartition:
    """An offset or a bound for each partition."""

    offsets: Mapping[TopicPartition, int | Bound]


@dataclass(frozen=True)
class GlobalTimestamp:
    """One instant for all partitions; it means the first message stored then or later."""

    timestamp_ms: int


@dataclass(frozen=True)
class TimestampsByPartition:
    """An instant for each partition, with the meaning that it has in `GlobalTimestamp`."""

    timestamps_ms: Mapping[TopicPartition, int]


OffsetLimit = Bound | OffsetsByPartition | GlobalTimestamp | TimestampsByPartition


class NoMatch(enum.Enum):
    """How to treat a starting timestamp that is later than all messages."""

    ERROR = "error"
    LATEST = "latest"


@dataclass(frozen=True)
class _Json:
    """The JSON of an option, and an example for the error."""

    option: str
    text: str
    example: str

    def wrong(self, more: str = "") -> UsageError:
        shown = self.text if len(self.text) <= _MAX_SHOWN else self.text[:_MAX_SHOWN] + "..."
        return UsageError(
            f"option {self.option!r}: Expected e.g. {self.example}, got {shown}{more}"
        )

    def load(self) -> dict[str, object]:
        def refuse_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
            result = dict(pairs)
            if len(result) != len(pairs):
                raise self.wrong(", which has a name twice")
            return result

        try:
            value = json.loads(self.text, object_pairs_hook=refuse_twice)
        except (ValueError, RecursionError) as error:
            raise self.wrong() from error
        if not isinstance(value, dict):
            raise self.wrong()
        return value

    def partition(self, value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}", value):
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
        raise self.wrong()


def parse_partitions(text: str) -> frozenset[TopicPartition]:
    """Parse `assign`: `{"topicA":[0,1]}`. Raises UsageError."""
    source = _Json("assign", text, '{"topicA":[0,1],"topicB":[0,1]}')
    result = set()
    for topic, partitions in source.load().items():
        if not isinstance(partitions, list):
            raise source.wrong()
        for partition in partitions:
            result.add(TopicPartition(topic, source.partition(partition)))
    if not result:
        raise UsageError(
            f"No topicpartitions to assign as specified value for option 'assign' is '{text}'"
        )
    return frozenset(result)


def _parse_numbers(source: _Json, least: int) -> dict[TopicPartition, int]:
    result = {}
    for topic, partitions in source.load().items():
        if not isinstance(partitions, dict):
            raise source.wrong()
        for partition, number in partitions.items():
            if (
                not isinstance(number, int)
                or isinstance(number, bool)
                or not least <= number <= _INT64_MAX
            ):
                raise source.wrong()
            key = TopicPartition(topic, source.partition(partition))
            result[key] = number
    return result


def parse_offsets(text: str, option: str = "startingOffsets") -> OffsetsByPartition:
    """Parse `{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}`. Raises UsageError."""
    example = '{"topicA":{"0":23,"1":-1},"topicB":{"0":-2}}, earliest or latest'
    source = _Json(option, text, example)
    bounds = {_WIRE_EARLIEST: Bound.EARLIEST, _WIRE_LATEST: Bound.LATEST}
    numbers = _parse_numbers(source, least=_WIRE_EARLIEST)
    return OffsetsByPartition({key: bounds.get(number, number) for key, number in numbers.items()})


def parse_timestamps(
    text: str, option: str = "startingOffsetsByTimestamp"
) -> TimestampsByPartition:
    """Parse `{"topicA":{"0":1000,"1":1000}}`, milliseconds since 1970. Raises UsageError."""
    source = _Json(option, text, '{"topicA":{"0":1000,"1":1000},"topicB":{"0":1000}}')
    return TimestampsByPartition(_parse_numbers(source, least=0))


def format_offsets(offsets: Mapping[TopicPartition, int]) -> str:
    """Write offsets as Kafka's source does: compact JSON, topics and partitions sorted."""
    tree: dict[str, dict[str, int]] = {}
    for key in sorted(offsets):
        tree.setdefault(key.topic, {})[str(key.partition)] = offsets[key]
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False)


def check_limits(start: OffsetLimit, end: OffsetLimit, names: Names = Names.QUERY) -> None:
    """Raise UsageError if the limits contradict each other; nothing has been read yet."""
    if isinstance(start, OffsetsByPartition) and isinstance(end, OffsetsByPartition):
        _check_same_partitions(start.offsets, end.offsets)
        for key, first in start.offsets.items():
            last = end.offsets[key]
            if isinstance(first, int) and isinstance(last, int) and first > last:
                raise UsageError(
                    f"startingOffsets of {key} ({first}) is beyond endingOffsets ({last})"
                )
    if isinstance(start, TimestampsByPartition) and isinstance(end, TimestampsByPartition):
        _check_same_partitions(start.timestamps_ms, end.timestamps_ms)
        for key, begin_ms in start.timestamps_ms.items():
            if begin_ms > end.timestamps_ms[key]:
                raise UsageError(
                    f"startingOffsetsByTimestamp of {key} ({begin_ms}) is beyond "
                    f"endingOffsetsByTimestamp ({end.timestamps_ms[key]})"
                )
    if isinstance(start, GlobalTimestamp) and isinstance(end, GlobalTimestamp):
        if start.timestamp_ms > end.timestamp_ms:
            raise UsageError(
                f"{names.bare('startingTimestamp')} ({start.timestamp_ms}) is beyond "
                f"{names.bare('endingTimestamp')} ({end.timestamp_ms})"
            )


def _names(keys: Iterable[TopicPartition]) -> str:
    return "[" + ", ".join(str(key) for key in sorted(keys)) + "]"


def _check_same_partitions(start: Iterable[TopicPartition], end: Iterable[TopicPartition]) -> None:
    if set(start) != set(end):
        raise UsageError(
            "starting and ending offsets name different topic partitions: "
            f"{_names(start)} and {_names(end)}"
        )


def _check_complete(
    option: str, given: Iterable[TopicPartition], available: Iterable[TopicPartition]
) -> None:
    if set(given) != set(available):
        raise UsageError(
            f"If {option} contains specific offsets, you must specify all TopicPartitions. "
            "Use -1 for latest, -2 for earliest, if you don't care. "
            f"Specified: {_names(given)} Assigned: {_names(available)}"
        )


OffsetByTime = Callable[[TopicPartition, int], int | None]
"""Find the first offset stored at or after an instant (ms); None if all messages are older."""


@dataclass(frozen=True)
class Limits:
    """Both ends of a read, and how to treat limits that match no message."""

    start: OffsetLimit
    end: OffsetLimit
    no_match: NoMatch = NoMatch.ERROR
    fail_on_data_loss: bool = True
    names: Names = Names.QUERY

    def removed(
        self, available: Mapping[TopicPartition, OffsetRange]
    ) -> list[TopicPartition]:
        """Return the partitions whose starting offset is before the first one available."""
        if not isinstance(self.start, OffsetsByPartition):
            return []
        ends = self.end.offsets if isinstance(self.end, OffsetsByPartition) else {}
        return [
            key
            for key, offset in self.start.offsets.items()
            if isinstance(offset, int)
            and key in available
            and offset < available[key].start
            and offset != ends.get(key)  # else it asks for nothing
        ]

    def resolve(
        self,
        available: Mapping[TopicPartition, OffsetRange],
        offset_by_time: OffsetByTime,
        unheard: str = "",
    ) -> dict[TopicPartition, OffsetRange]:
        """Turn the limits into offsets within the available range of each partition.

        `unheard` is what texts about offsets that are not available add.

        Raises UsageError if the limits name other partitions than those available, or if a start is
        after its end. Raises PositionLostError if a requested offset is not available and
        `failOnDataLoss` is set.
        """
        starts = _resolve(self.start, "startingOffsets", available, offset_by_time)
        ends = _resolve(self.end, "endingOffsets", available, offset_by_time)
        result = {}
        for key in sorted(available):
            there = available[key]
            start, end = starts[key], ends[key]
            if start is None:
                # A queue without a message has none that is too old; over a path it may not exist.
                if there.size and self.no_match is NoMatch.ERROR:
                    raise UsageError(
                        f"No offset matched from request of topic-partition {key} and timestamp "
                        f"{_instant(self.start, key)}; set startingOffsetsByTimestampStrategy to "
                        "latest to begin at the end"
                    )
                start = there.end
            end = there.end if end is None else end
            by_offset = isinstance(self.start, OffsetsByPartition)
            if end == start or (end < start and not by_offset):
                # It asks for nothing, wherever that is; so nothing can be missing.
                start = min(max(start, there.start), there.end)
                result[key] = OffsetRange(start, start)
                continue
            start = self._keep_within(key, "starting", start, there, unheard)
            end = self._keep_within(key, "ending", end, there, unheard)
            if start > end and by_offset:
                raise UsageError(
                    f"the starting offset {start} of {key} is beyond its ending offset {end}"
                )
            result[key] = OffsetRange(start, max(start, end))
        return result

    def _keep_within(
        self, key: TopicPartition, which: str, offset: int, there: OffsetRange, unheard: str
    ) -> int:
        if there.start <= offset <= there.end:
            return offset
        text = (
            f"the {which} offset {offset} of {key} is not available (the partition has "
            f"[{there.start}, {there.end})): removed by retention, cut by a failover, or never "
            f"written{unheard}"
        )
        if self.fail_on_data_loss:
            raise PositionLostError(f"{text}; {self.names.without_loss()}")
        nearest = min(max(offset, there.start), there.end)
        log.warning("%s; the read takes %d instead", text, nearest)
        return nearest


def _instant(limit: OffsetLimit, key: TopicPartition) -> int:
    if isinstance(limit, GlobalTimestamp):
        return limit.timestamp_ms
    assert isinstance(limit, TimestampsByPartition)
    return limit.timestamps_ms[key]


def _resolve(
    limit: OffsetLimit,
    option: str,
    available: Mapping[TopicPartition, OffsetRange],
    offset_by_time: OffsetByTime,
) -> dict[TopicPartition, int | None]:
    def find(key: TopicPartition, timestamp_ms: int) -> int | None:
        there = available[key]
        if not there.size:
            return None
        # Messages that arrived since, or are not readable yet, are found too: they are not there.
        found = offset_by_time(key, timestamp_ms)
        return None if found is None or found >= there.end else max(found, there.start)

    match limit:
        case Bound.EARLIEST:
            return {key: there.start for key, there in available.items()}
        case Bound.LATEST:
            return {key: there.end for key, there in available.items()}
        case GlobalTimestamp(timestamp_ms):
            return {key: find(key, timestamp_ms) for key in available}
        case TimestampsByPartition(timestamps_ms):
            _check_complete(f"{option}ByTimestamp", timestamps_ms, available)
            return {key: find(key, timestamps_ms[key]) for key in available}
        case OffsetsByPartition(offsets):
            _check_complete(option, offsets, available)
            result: dict[TopicPartition, int | None] = {}
            for key, there in available.items():
                wanted = offsets[key]
                if isinstance(wanted, Bound):
                    wanted = there.start if wanted is Bound.EARLIEST else there.end
                result[key] = wanted
            return result
