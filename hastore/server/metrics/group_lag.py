"""How many messages consumer groups are behind, by their committed positions.

A group's lag in a topic is the sum over the queues in which it has a position. A queue in which it
has none is left out: where such a consumer would begin is its own choice. What retention has
removed does not count, since nobody can read it any more.
"""

from collections.abc import Callable, Mapping

from hastore.counters import OTHER
from hastore.protocol.committed_positions import Place
from hastore.server.metrics.page import Page

PAIRS_MAX = 1_000
Pair = tuple[str, str]  # group, topic
MayCount = Callable[[str, str | None], bool]  # a topic, with None or a group that reads it
Ranges = Mapping[int, tuple[int, int]]  # of a topic: by queue its first and its next queue offset


def add_group_lag(
    page: Page,
    positions: Mapping[Pair, Mapping[int, Place]],
    queues_of: Callable[[str], Ranges],
    may_count: MayCount,
) -> None:
    """Add the lag of each pair that may be shown; pairs beyond PAIRS_MAX are added up as one."""
    known: dict[str, Ranges] = {}
    rest, others = 0, False
    for number, ((group, topic), places) in enumerate(positions.items()):
        if not may_count(topic, group):
            continue
        ranges = known.get(topic)
        if ranges is None:
            ranges = known[topic] = queues_of(topic)
        lag = lag_of(ranges, places)
        if number < PAIRS_MAX and (group, topic) != (OTHER, OTHER):
            page.add("hastore_consumer_lag_messages", lag, group, topic)
        else:
            rest, others = rest + lag, True
    if others:
        page.add("hastore_consumer_lag_messages", rest, OTHER, OTHER)
    page.add("hastore_consumer_groups", len(positions))


def lag_of(ranges: Ranges, places: Mapping[int, Place]) -> int:
    """Return how many messages of a topic's queues are at or beyond these positions."""
    lag = 0
    for queue, place in places.items():
        first, following = ranges.get(queue, (0, 0))
        lag += max(0, following - max(first, place.queue_offset))
    return lag
