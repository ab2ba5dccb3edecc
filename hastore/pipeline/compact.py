"""The job `compact`: the latest message of each key of a topic, as Parquet files and as a topic.

The rules are those of Kafka's log compaction: of the messages with the same key, only the last one
in the log stays, and one with an empty body deletes its key. The last one is that with the greatest
physical offset, whatever its queue: a group has one log, and its offsets order all messages.

The first run reads the whole topic. Later runs read only what has come since, and merge it with the
files of the run before, so keys whose messages retention has removed from the log stay.

A task writes one file of the rows that stay and, for a topic, one of the rows that have changed
since the run before. Each file of changes is one task of one write, in the order of the commit that
has fixed them, and the write's name is fixed too. So the sink finds out, after a kill, which rows
are stored already, and each change is in the topic once. If the topic has lost messages, by its
retention or with the topic, all rows of the files are written to it again, in the same way.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from hastore.client import Admin
from hastore.client.connections.bootstrap import cluster_of, parse_bootstrap
from hastore.errors import ForbiddenError, MessageIllegalError, StoreFullError, UsageError
from hastore.pipeline.compact_files import (
    FRESH,
    Fitting,
    RowWriter,
    read_rows,
    staged_files,
    write_rows,
)
from hastore.pipeline.object_target import CHANGES, DATA, ObjectTarget, target_of
from hastore.pipeline.parquet_files import TASK_BYTES, record_sizes
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.read_positions import (
    Unread,
    check_unchanged,
    end_positions,
    positions_as_state,
    unread,
)
from hastore.pipeline.running import Start, Stopwatch, check_session, run_action
from hastore.pipeline.target import Target, check_compression, check_folders, folder_of
from hastore.pipeline.where import Where, as_option, servers_option
from hastore.spark.options.names import NAMES, Names
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.source_options import SourceOptions, Subscribe
from hastore.spark.read.backend import Backend
from hastore.spark.read.planning import open_backend, open_head, select
from hastore.spark.read.servers import ServerHead
from hastore.spark.sink.options import check_destination
from hastore.spark.worker import interrupted_later

COLUMNS = (
    *("key", "value", "partition", "offset", "timestamp", "headers", "tags"),
    "physicalOffset",
)
_DDL = (  # "timestamp" alone may have no zone: spark.sql.timestampType
    "key binary, value binary, partition int, offset bigint, timestamp timestamp_ltz, "
    "headers array<struct<key:string,value:binary>>, tags string, physicalOffset bigint"
)
log = logging.getLogger(__name__)
_HAS_ROWS = "to_rows"  # of a commit's state: whether the topic has got any
_SHUFFLE = "spark.sql.shuffle.partitions"


@dataclass(frozen=True)
class Destination:
    """A topic, and the nodes of its group."""

    topic: str
    servers: str


@dataclass(frozen=True)
class CompactOptions:
    """How a topic is compacted; `keep_without_key` and the destination's topic never change.

    None is as in the first run into the target, and there the default.
    """

    keep_without_key: bool | None = None  # default: False
    compression: str = "snappy"
    fail_on_data_loss: bool = True
    destination: Destination | None = None  # a topic that gets the changes too


@dataclass(frozen=True)
class CompactSummary:
    """What a run of `compact` did."""

    target: str
    topic: str
    read: int  # messages of the log that this run read
    keys: int  # in the target now
    without_key: int  # messages without a key in the target now; 0 if they are dropped
    files: int
    bytes: int
    lost_messages: int
    published: int  # messages written to the topic of the destination
    published_again: int  # of these, written again, because the topic had lost messages
    dropped_headers: int  # of these, and tags, which only the files have: they cannot be sent
    left_out: int  # messages that cannot be sent and are in the files only
    seconds: float


def compact(
    spark: SparkSession,
    where: Where,
    target: str,
    options: CompactOptions | None = None,
    *,
    progress: JobProgress | None = None,
) -> CompactSummary:
    """Bring the target up to the end of the topic now: one row for each key that is not deleted.

    `target` is a folder's path, or s3://BUCKET/FOLDER; committed.py reads the latter.
    Raises UsageError for wrong arguments, and PositionLostError if the log was cut after an earlier
    run. The target changes at once, when the run ends; a run that dies changes nothing.
    """
    check_session(spark)
    return compact_with(lambda: spark, where, target, options, progress=progress)


def compact_with(
    start: Start,
    where: Where,
    target: str,
    options: CompactOptions | None = None,
    *,
    progress: JobProgress | None = None,
) -> CompactSummary:
    """Compact as `compact` does; call `start` only if there is something to read or to publish."""
    watch = Stopwatch(start)
    options, progress = options or CompactOptions(), progress or JobProgress()
    check_compression(options.compression)
    fail = options.fail_on_data_loss
    parsed = where.parsed({"failOnDataLoss": as_option(fail)}, Names.LOSING_COMMAND)
    strategy = _topic(parsed)
    (topic,) = strategy.topics
    where = replace(where, topics=strategy.topics)
    with open_backend(parsed) as backend:
        select(strategy, backend)  # its errors before the target
        with target_of(target, "compact") as opened:
            options = _take_over(opened.path, opened.state, topic, options)
            published = _publish(watch.start, opened, options, progress)  # of a run that died
            found = unread(
                backend, strategy, opened.state, fail_on_data_loss=fail, patience=parsed.patience
            )
            progress.keep(f"{opened.path} is as it was before")
            if found.ranges or found.lost or not opened.number:
                if not opened.in_place:
                    check_folders(opened.path, (topic,))
                spark, number = watch.start(), opened.number
                try:
                    _rewrite(spark, opened, where, backend, found, options, progress)
                except StoreFullError as full:
                    has = "The target has what it had before"
                    if opened.number != number:
                        has = "The commit is made, and the next run moves its files to their places"
                    raise StoreFullError(f"{full}. {has}") from full
                published = published.plus(_publish(watch.start, opened, options, progress))
            again = publish_again(watch.start, opened, options, progress)
            published = published.plus(again)
            files = opened.files()
            state = opened.state
            return CompactSummary(
                target=str(opened.path),
                topic=topic,
                read=sum(span.size for span in found.ranges.values()),
                keys=state["keys"],
                without_key=state["without_key"],
                files=len(files),
                bytes=sum(files.values()),
                lost_messages=sum(one.messages for one in found.lost),
                published=published.rows,
                published_again=again.rows,
                dropped_headers=published.dropped,
                left_out=published.left_out,
                seconds=watch.seconds,
            )


def check_compact(where: Where, target: str, options: CompactOptions) -> None:
    """Check what needs no Spark. Raises UsageError, StoreError, UnreachableError."""
    check_compression(options.compression)
    (topic,) = _topic(where.parsed()).topics
    opened = target_of(target, "compact")
    state = opened.look()
    where.check()
    _take_over(opened.path, state, topic, options)


def _topic(parsed: SourceOptions) -> Subscribe:
    """Return the strategy with the one topic. Raises UsageError, also for several groups.

    The topics of the options are counted, because a text with commas names several.
    """
    cluster = cluster_of(parsed.bootstrap)
    if cluster is not None:
        raise UsageError(
            f"compact reads one group, and {cluster} names all groups of a cluster, whose messages "
            f"have no common order; give --servers {cluster}/GROUP, and each group its own --target"
        )
    strategy = parsed.strategy
    if not isinstance(strategy, Subscribe) or len(strategy.topics) != 1:
        raise UsageError("compact takes one topic; give --topic once")
    return strategy


def _take_over(
    path: Path | str, state: Mapping[str, Any], topic: str, options: CompactOptions
) -> CompactOptions:
    """Return the options, with those of the first run where none are given.

    Raises UsageError if a given one differs; the destination of a first run must be new.
    """
    destination = options.destination
    if not state:
        if destination:
            check_new(destination)
        return replace(options, keep_without_key=bool(options.keep_without_key))
    if state["topic"] != topic:
        raise UsageError(
            f"{path} has the topic {state['topic']!r}; name another target for {topic!r}"
        )
    kept = state["keep_without_key"]
    if options.keep_without_key not in (None, kept):
        raise UsageError(
            f"{path} {'keeps' if kept else 'drops'} messages without a key since its first run; "
            f"leave out --without-key {'drop' if kept else 'keep'}, or name another target"
        )
    to_topic, servers = state["to_topic"], state.get("to_servers")
    if destination is None and to_topic is not None:
        if servers is None:  # an older version wrote it
            raise UsageError(
                f"{path} writes its changes to the topic {to_topic!r}; give --to-topic {to_topic} "
                "and --to-servers, too"
            )
        destination = Destination(to_topic, servers)
    elif destination is not None and destination.topic != to_topic:
        where = "no topic" if to_topic is None else f"the topic {to_topic!r}"
        raise UsageError(
            f"{path} writes its changes to {where} since its first run; leave out --to-topic "
            f"{destination.topic}, or name another target"
        )
    return replace(options, keep_without_key=kept, destination=destination)


def _publish(
    start: Start, target: Target | ObjectTarget, options: CompactOptions, progress: JobProgress
) -> "Published":
    if options.destination is None:
        return Published()
    progress.keep(
        f"{target.path} is up to date, and topic {options.destination.topic} has a part of the "
        "changes"
    )
    fitting = Fitting(target.state.get("topic", ""), not options.fail_on_data_loss)
    return publish(start, target, options.destination, fitting, progress)


def _rewrite(
    spark: SparkSession,
    target: Target | ObjectTarget,
    where: Where,
    backend: Backend,
    found: Unread,
    options: CompactOptions,
    progress: JobProgress,
) -> None:
    """Write the files anew from those of the run before and the ranges, and commit them."""
    (topic,), ranges = where.topics, found.ranges
    ends = end_positions(backend, ranges)
    before = target.files()
    frame = _messages(spark, where, ranges, options).withColumn(FRESH, f.lit(True))
    if before:
        old = read_rows(spark, target.root, list(before), _DDL).withColumn(FRESH, f.lit(False))
        frame = old.unionByName(frame)
    size = sum(before.values()) + sum(
        span.size * record_sizes(backend, {key: span})[key.topic] for key, span in ranges.items()
    )
    number = target.number + 1
    folder, changes_folder = folder_of(topic), f"{CHANGES}/{number:08}"
    if target.in_place:
        folder, changes_folder = f"{DATA}/{folder}", f"{changes_folder}-{target.run}"
    writer = RowWriter(
        target.root,
        folder if target.in_place else target.staging_name,
        options.compression,
        changes=options.destination is not None,
        deletions=bool(before),  # in a new topic there is nothing to delete
        changes_staging=changes_folder if target.in_place else None,
        topic=topic,
        leaves_out=not options.fail_on_data_loss,
    )
    usual = spark.conf.get(_SHUFFLE) or "200"
    spark.conf.set(_SHUFFLE, str(max(1, round(size / TASK_BYTES))))
    try:
        rows: list[Row] = run_action(
            spark,
            "compact",
            write_rows(latest(frame, bool(options.keep_without_key)), writer),
            progress,
        )
    finally:
        spark.conf.set(_SHUFFLE, usual)
    check_unchanged(backend, ends)
    files = staged_files(rows, folder, changes=False)
    changes = staged_files(rows, changes_folder, changes=True)
    with_key = sum(row.with_key for row in rows if not row.changes)
    state = {
        "topic": topic,
        "to_topic": options.destination.topic if options.destination else None,
        "to_servers": options.destination.servers if options.destination else None,
        "changes": {
            "write": f"hastore-compact-{target.run}-{number}",
            "files": [file.final for file in changes],
            "rows": sum(file.rows for file in changes),
            "dropped": sum(row.dropped for row in rows),
            "left_out": sum(row.left_out for row in rows),
        },
        **_of_topic(target.state),
        "keep_without_key": options.keep_without_key,
        "columns": list(COLUMNS),
        **positions_as_state(found.positions | ends, found.topics),
        "keys": with_key,
        "without_key": sum(file.rows for file in files) - with_key,
    }
    with interrupted_later():  # a stop reports all that is committed
        target.commit(state, [*files, *changes], removed=sorted(before))
        progress.keep(f"{target.path} is up to date")


def _messages(
    spark: SparkSession,
    where: Where,
    ranges: Mapping[TopicPartition, OffsetRange],
    options: CompactOptions,
) -> DataFrame:
    """Return the messages of the ranges."""
    assigned: dict[str, list[int]] = {}
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for (topic, queue), span in ranges.items():
        assigned.setdefault(topic, []).append(queue)
        starts.setdefault(topic, {})[str(queue)] = span.start
        ends.setdefault(topic, {})[str(queue)] = span.end
    if not ranges:
        return spark.createDataFrame([], _DDL)
    fails = as_option(options.fail_on_data_loss)
    given = where.options({"failOnDataLoss": fails}, Names.LOSING_COMMAND)
    given.pop("subscribe")
    given |= {
        "assign": json.dumps(assigned),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "minPartitions": str(spark.sparkContext.defaultParallelism),
    }
    return spark.read.format("hastore").schema(_DDL).options(**given).load()


def latest(frame: DataFrame, keep_without_key: bool) -> DataFrame:
    """Return the last row of each key by physical offset; an empty value is not dropped yet.

    Rows without a key are dropped, or all kept that have a value.
    """
    others = [name for name in (*COLUMNS, FRESH) if name not in ("key", "physicalOffset")]
    # The messages of an inner batch are one record of the log, so they share its offset.
    order = f.struct("physicalOffset", "offset")
    last = f.max_by(f.struct(*others), order).alias("last")
    offset = f.max("physicalOffset").alias("physicalOffset")
    found = frame.where("key IS NOT NULL").groupBy("key").agg(last, offset)
    rows = found.select(
        "key", *(f.col(f"last.{name}").alias(name) for name in others), "physicalOffset"
    ).select(*COLUMNS, FRESH)
    if not keep_without_key:
        return rows
    return rows.unionByName(frame.where("key IS NULL").select(*COLUMNS, FRESH))


# -- the topic of the changes ----------------------------------------------------------------------

PUBLISHED_COLUMNS = ("key", "value", "headers", "tags")
_ONE_TASK = {
    "spark.sql.files.minPartitionNum": "1",  # with the next: a file is never divided
    "spark.sql.files.maxPartitionBytes": str(2**62),
}


def check_new(destination: Destination) -> None:
    """Raise UsageError if the topic has messages already, or can have none.

    Once the first run has committed, the target cannot get another topic.
    """
    try:
        check_destination(destination.topic)
    except MessageIllegalError as failure:
        raise UsageError(f"--to-topic: {failure}") from failure
    with Admin(parse_bootstrap(destination.servers.split(","))) as admin:
        queues = admin.topics().get(destination.topic, {})
    if any(end > 0 for _, end in queues.values()):
        raise UsageError(
            f"the topic {destination.topic!r} has messages already; name a new topic for the "
            "compacted messages"
        )


class Published(NamedTuple):
    """What was written to the topic, and what could not be sent."""

    rows: int = 0
    dropped: int = 0
    left_out: int = 0

    def plus(self, other: "Published") -> "Published":
        """Return the sums."""
        return Published(*map(sum, zip(self, other, strict=True)))


def publish(
    start: Start,
    target: Target | ObjectTarget,
    destination: Destination,
    fitting: Fitting,
    progress: JobProgress,
) -> Published:
    """Write the changes that the last commit left, and commit that; return what was written."""
    waiting: dict[str, Any] | None = target.state.get("changes")
    if not waiting or not (waiting["files"] or waiting.get("left_out")):
        return Published()
    done = Published(waiting["rows"], waiting.get("dropped", 0), waiting.get("left_out", 0))
    names: Sequence[str] = waiting["files"]
    if names:
        spark = start()
        with _one_task_for_each_file(spark):
            frames = [read_rows(spark, target.root, [name], _DDL) for name in names]
            frame = functools.reduce(DataFrame.unionByName, frames)
            if "dropped" not in waiting:  # of an older version, which did not make them fit
                counts: list[Row] = run_action(spark, "publish", fitting.count(frame), progress)
                left_out = sum(row.left_out for row in counts)
                done = Published(done.rows - left_out, sum(row.dropped for row in counts), left_out)
                frame = fitting.fit(frame, _DDL)
            writer = (
                frame.select(*PUBLISHED_COLUMNS)
                .write.format("hastore")
                .mode("append")
                .options(**servers_option(destination.servers))
                .option(NAMES, Names.DESTINATION.value)
                .option("topic", destination.topic)
                .option("writeId", waiting["write"])
            )
            if isinstance(target, ObjectTarget):
                target.check_counts()  # seconds after the commit, all of the same moment are there
            run_action(spark, "publish", writer.save, progress)
    removed = () if waiting.get("kept") else names
    state = {**target.state, "changes": None}
    if done.rows or waiting.get("kept"):
        state[_HAS_ROWS] = done.rows > 0
    target.commit(state, [], removed=removed)
    return done


def publish_again(
    start: Start, target: Target | ObjectTarget, options: CompactOptions, progress: JobProgress
) -> Published:
    """Write all rows of the files to the topic if messages of it are gone; return what was written.

    A commit fixes files and name of the write first, so that it is done once, as `publish` says.
    """
    state, destination = target.state, options.destination
    if destination is None or not state["keys"] + state["without_key"]:
        return Published()
    if not _has_rows(state):  # none of the rows can be sent, so the topic lacks none
        return Published()
    ranges = _queues_of(destination)
    if ranges is None or not has_lost(ranges, state.get("to_begins", {})):
        return Published()
    log.warning(
        "messages of the topic %r are gone, by retention or with the topic: all are written again",
        destination.topic,
    )
    changes = {
        "write": f"hastore-compact-{target.run}-{target.number + 1}-all",
        "files": sorted(target.files()),
        "rows": state["keys"] + state["without_key"],
        "kept": True,  # they are the files of the target
    }
    begins = {str(queue): span.end for queue, span in ranges.items()}
    target.commit({**state, "changes": changes, "to_begins": begins}, [])
    return _publish(start, target, options, progress)


def _of_topic(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the state keeps of the topic from one run to the next."""
    return {"to_begins": state.get("to_begins", {}), _HAS_ROWS: _has_rows(state)}


def _has_rows(state: Mapping[str, Any]) -> bool:
    """Return whether rows were written to the topic, the last time that it was written anew.

    Older versions do not say so.
    """
    return bool(state.get(_HAS_ROWS, bool(state)))


def has_lost(ranges: Mapping[int, OffsetRange], begins: Mapping[str, int]) -> bool:
    """Return whether a topic with these queues lacks messages that were written to it.

    `begins` are the ends of its queues when all rows were written to it; {} if it was new then.
    """
    if not ranges or not {int(queue) for queue in begins} <= ranges.keys():
        return True
    return any(span.start > begins.get(str(queue), 0) for queue, span in ranges.items())


def _queues_of(destination: Destination) -> dict[int, OffsetRange] | None:
    """Return the queues of a topic; None if the client has no right to know."""
    topic = destination.topic
    at = Where(servers=destination.servers, topics=(topic,))
    head = open_head(at.parsed(names=Names.DESTINATION))
    # What only another replica has kept counts as gone: RocketMQ's consumers do not look there.
    listed = head.listed if isinstance(head, ServerHead) else head.available
    try:
        found = {
            key.partition: span
            for key, span in listed({topic}).items()
            if key.topic == topic
        }
        if not found:
            head.check_unlisted(topic)
    except ForbiddenError as no_right:
        log.warning("whether the topic %r still has all messages is unknown: %s", topic, no_right)
        return None
    finally:
        head.close()
    return found


@contextlib.contextmanager
def _one_task_for_each_file(spark: SparkSession) -> Iterator[None]:
    """Set what keeps a file in one task meanwhile."""
    before = {name: spark.conf.get(name, None) for name in _ONE_TASK}
    for name, value in _ONE_TASK.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
