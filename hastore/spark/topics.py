"""Calls for notebooks and scripts: topics as a DataFrame, and how far a stream is behind."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from hastore.errors import UsageError
from hastore.spark.options.offsets import find_zone, to_milliseconds
from hastore.spark.registering import register
from hastore.spark.worker import ZONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


_registered: "WeakKeyDictionary[SparkSession, str]" = WeakKeyDictionary()


def read_topic(
    spark: "SparkSession",
    topic: str | Sequence[str],
    *,
    path: str | os.PathLike[str] | None = None,
    servers: str | Sequence[str] | None = None,
    start: datetime | Mapping[int, int] | None = None,
    end: datetime | Mapping[int, int] | None = None,
    columns: Sequence[str] | None = None,
    headers: bool = False,
    metadata: bool = False,
    stream: bool = False,
    options: Mapping[str, str] | None = None,
) -> "DataFrame":
    """Return the messages of a topic, or of several, as a DataFrame; registers the format.

    Exactly one of `path` (a store's directory) and `servers` (addresses of running nodes) is
    needed. `start` and `end` are moments, or offsets by queue of a single topic; the end is
    exclusive. Without them all messages are read that are readable when the query starts. A moment
    without a time zone is in the session's. `columns` are the only ones to be read, in this order;
    without it `headers` and `metadata` add theirs to Kafka's. With `stream` the DataFrame is a
    stream, which begins at the end unless `start` says otherwise. `options` are further options of
    the source. Raises UsageError for arguments that contradict each other and for wrong options of
    a stream, and Spark's AnalysisException, with the source's own sentence, for wrong options of a
    batch read.
    """
    zone = str(spark.conf.get(ZONE))
    if _registered.get(spark) != zone:
        register(spark)
        _registered[spark] = zone
    topics = [topic] if isinstance(topic, str) else list(topic)
    given = {
        "subscribe": ",".join(topics),
        **_limit("start", "starting", start, topics, zone),
        **_limit("end", "ending", end, topics, zone),
        **_where(path, servers),
        **(options or {}),
    }
    reader: Any = spark.readStream if stream else spark.read
    reader = reader.format("hastore")
    if stream:  # Spark would not tell the source before the query runs that it is one
        from hastore.spark.options.source_options import parse_stream_options

        parse_stream_options(given, zone)
    if columns is not None:
        if headers or metadata:
            raise UsageError("headers and metadata add columns; name them in `columns` instead")
        reader = reader.schema(_schema(columns))
    elif headers or metadata:
        given |= {"includeHeaders": str(headers), "includeMetadata": str(metadata)}
    frame: DataFrame = reader.options(**given).load()
    return frame


def _where(
    path: str | os.PathLike[str] | None, servers: str | Sequence[str] | None
) -> dict[str, str]:
    if (path is None) == (servers is None):
        raise UsageError("read_topic needs either a path or servers")
    if path is not None:
        return {"path": os.fspath(path)}
    listed = servers if isinstance(servers, str) else ",".join(servers or ())
    return {"hastore.bootstrap.servers": listed}


def _limit(
    argument: str,
    prefix: str,
    limit: datetime | Mapping[int, int] | None,
    topics: Sequence[str],
    zone: str,
) -> dict[str, str]:
    """Return the option for one end of the read."""
    if limit is None:
        return {}
    if isinstance(limit, datetime):
        moment = limit if limit.tzinfo is not None else limit.replace(tzinfo=find_zone(zone))
        return {f"{prefix}Timestamp": str(to_milliseconds(moment))}
    if len(topics) != 1:
        raise UsageError(
            f"{argument}: offsets by queue need a single topic; for several set the option "
            f"'{prefix}Offsets'"
        )
    return {f"{prefix}Offsets": json.dumps({topics[0]: dict(limit)})}


def _schema(columns: Sequence[str]) -> "StructType":
    """Return the schema of some columns: in DDL a session would say what a timestamp is."""
    from hastore.spark.arrow.schema import Column, projection_of

    known = [column.value for column in Column]
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise UsageError(
            f"format 'hastore' has no column {unknown[0]!r}; it has " + ", ".join(known)
        )
    return projection_of(Column(name) for name in columns).schema


# -- the lag of a stream ---------------------------------------------------------------------------


class QueueLag(NamedTuple):
    """A queue in a query's last progress.

    `end` is the offset after the last message of the last batch, `latest` the queue's end when
    Spark looked for new messages, before that batch ran. `lag` is the number of messages between.
    """

    topic: str
    queue: int
    end: int
    latest: int
    lag: int


def lag(query: Any) -> list[QueueLag]:
    """Return the lag of each queue that a query reads with format "hastore".

    `query` is a StreamingQuery, or a progress: of `lastProgress`, of a StreamingQueryListener, or
    its JSON. Without a progress, or without a hastore source, the list is empty. While a query is
    idle, Spark renews its progress every 10 s (`spark.sql.streaming.noDataProgressEventInterval`).
    """
    progress = getattr(query, "lastProgress", query)
    if progress is None:
        return []
    text = progress if isinstance(progress, str) else getattr(progress, "json", None)
    tree = json.loads(text) if isinstance(text, str) else progress
    return [row for source in tree["sources"] for row in _of_source(source)]


def _of_source(source: dict[str, Any]) -> list[QueueLag]:
    end, latest = _tree(source.get("endOffset")), _tree(source.get("latestOffset"))
    if "version" not in end or "next" not in end:
        return []  # of another format
    result = []
    for topic, queues in sorted({**latest, **end["next"]}.items()):
        known = {int(queue): offset for queue, offset in end["next"].get(topic, {}).items()}
        there = {int(queue): offset for queue, offset in latest.get(topic, {}).items()}
        for queue in sorted({int(queue) for queue in queues} | known.keys() | there.keys()):
            at = known.get(queue, 0)
            last = there.get(queue, at)
            result.append(QueueLag(topic, queue, at, last, max(0, last - at)))
    return result


def _tree(offset: Any) -> dict[str, Any]:
    """Return an offset as a dict: Spark gives it as text or, in JSON, as a tree."""
    found = json.loads(offset) if isinstance(offset, str) else offset
    return found if isinstance(found, dict) else {}
