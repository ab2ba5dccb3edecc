"""The offsets of a stream, as Spark keeps them in the query's checkpoint. Pure.

    {"version": 1,
     "next": {"topic": {"0": 17}},                next offset to read, by queue
     "before": {"topic": {"0": [65537, 4711]}},   epoch and physical offset of the record before it
     "from": {"next": ..., "before": ...}}        the batch's start, if not the previous offset

Spark compares offsets as text, so equal offsets have equal JSON: topics and queues are sorted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hastore.errors import UsageError
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.partitions import Stored
from hastore.spark.read.backend import QueuePlace

VERSION = 1
Places = Mapping[TopicPartition, QueuePlace]


@dataclass(frozen=True)
class StreamOffset:
    """A position in each queue.

    `is_initial` marks the offset with which a query begins; Spark does not store it. So the end of
    the first batch holds the places where the query began, in `origin`. So does the end of a batch
    that begins elsewhere than the last one ended, because messages are gone.
    """

    places: Places
    origin: Places | None = None
    is_initial: bool = False


def to_json(offset: StreamOffset) -> dict[str, Any]:
    """Return the form that Spark stores."""
    result: dict[str, Any] = {"version": VERSION, **_tree(offset.places)}
    if offset.origin is not None:
        result["from"] = _tree(offset.origin)
    if offset.is_initial:
        result["initial"] = True
    return result


def from_json(tree: Mapping[str, Any]) -> StreamOffset:
    """Read what `to_json` made; raises UsageError for anything else."""
    try:
        if tree["version"] != VERSION:
            raise UsageError(
                f"the checkpoint has offsets of version {tree['version']!r}, which this hastore "
                "does not know: run the query with the version that wrote it, or a later one"
            )
        origin = _places(tree["from"]) if "from" in tree else None
        return StreamOffset(_places(tree), origin, bool(tree.get("initial", False)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the checkpoint's offsets are not those of a hastore stream: {str(tree)[:200]}; use "
            "another checkpointLocation"
        ) from error


def next_offsets(places: Places) -> dict[str, dict[str, int]]:
    """Return Kafka's form of offsets: {"topic": {"queue": next}}."""
    result: dict[str, dict[str, int]] = {}
    for key in sorted(places):
        result.setdefault(key.topic, {})[str(key.partition)] = places[key].next
    return result


def _tree(places: Places) -> dict[str, Any]:
    before: dict[str, dict[str, list[int | None]]] = {}
    for key in sorted(places):
        stored = places[key].before
        if stored is not None:
            before.setdefault(key.topic, {})[str(key.partition)] = list(stored)
    return {"next": next_offsets(places), "before": before}


def _places(tree: Mapping[str, Any]) -> dict[TopicPartition, QueuePlace]:
    before = tree["before"]
    result = {}
    for topic, queues in tree["next"].items():
        for queue, offset in queues.items():
            stored = before.get(topic, {}).get(queue)
            epoch, at = (None, None) if stored is None else stored
            key = TopicPartition(topic, int(queue))
            result[key] = QueuePlace(
                int(offset),
                None if at is None else Stored(None if epoch is None else int(epoch), int(at)),
            )
    return result
