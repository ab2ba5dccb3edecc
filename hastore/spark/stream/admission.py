"""How much a micro-batch takes: the rules of Spark's Kafka source. Pure."""

import math
from collections.abc import Mapping

from hastore.spark.options.offsets import TopicPartition

Offsets = Mapping[TopicPartition, int]


def count_new(starts: Offsets, ends: Offsets) -> int:
    """Return how many messages are between the starts and the ends."""
    return sum(max(0, end - starts[key]) for key, end in ends.items())


def share(limit: int, starts: Offsets, ends: Offsets) -> dict[TopicPartition, int]:
    """Move the ends back so that about `limit` messages remain, in proportion to each backlog.

    Every queue with new messages gets at least one, so that none starves behind larger ones. So
    the result may exceed the limit by as many messages as there are queues.
    """
    sizes = {key: max(0, end - starts[key]) for key, end in ends.items()}
    total = sum(sizes.values())
    if total <= limit:
        return dict(ends)
    result = {}
    for key, end in ends.items():
        exact = limit * sizes[key] / total
        part = math.ceil(exact) if exact < 1 else math.floor(exact)
        result[key] = min(end, starts[key] + part) if sizes[key] else end
    return result


class Delay:
    """Holds batches back until there are `least` messages, or `max_delay_s` after the last one."""

    def __init__(self, least: int, max_delay_s: float) -> None:
        self._least = least
        self._max_delay_s = max_delay_s
        self._last_s = float("-inf")

    def holds(self, new: int, now_s: float) -> bool:
        """Return whether a batch of `new` messages must wait; if not, it counts as begun now.

        The first batch of a run does not wait.
        """
        if new < self._least and now_s - self._last_s < self._max_delay_s:
            return True
        self._last_s = now_s
        return False
