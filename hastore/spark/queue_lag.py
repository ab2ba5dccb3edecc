"""How far a streaming query is behind the logs that it reads, from its progress."""

import json
from typing import Any, NamedTuple


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
