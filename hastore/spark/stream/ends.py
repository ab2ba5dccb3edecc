"""Look for the ends of a stream's queues, not more often than is useful."""

from collections.abc import Collection

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.ha.rules.history import Standing
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.source_options import Assign, Strategy, Subscribe
from hastore.spark.read.places import Head, Place, Verdict
from hastore.spark.read.planning import matching
from hastore.spark.stream.offsets import Places

AGE_FACTOR = 20.0  # a look is repeated after 20 times its own duration: 5 % of the time
AGE_MAX_MS = 500.0


class Ends:
    """The places at which the selected queues end, as of the last look.

    Spark asks an idle query about 80 times a second.
    """

    def __init__(self, head: Head, strategy: Strategy, clock: Clock = SYSTEM_CLOCK) -> None:
        self._head = head
        self._strategy = strategy
        self._clock = clock
        self._looked_ms = float("-inf")
        self._took_ms: list[float] = []
        self._token: object = None
        # Places in the log under `_token`: the ends, and those that `verify` was asked for.
        self._valid: dict[TopicPartition, Place] = {}
        self._agreed: dict[TopicPartition, Place] = {}
        self.ranges: dict[TopicPartition, OffsetRange] = {}
        self.places: dict[TopicPartition, Place] = {}

    def look(self, *, now: bool = False) -> Places:
        """Return the readable ends; they are looked up again if they are too old, or if `now`."""
        began_ms = self._clock.monotonic_ms()
        # The first look connects and imports, so the shorter of the last two counts.
        age_ms = min(AGE_MAX_MS, AGE_FACTOR * min(self._took_ms[-2:], default=0.0))
        if not now and began_ms - self._looked_ms < age_ms:
            return self.places
        self.ranges = matching(self._strategy, self._head.available(_topics(self._strategy)))
        if self._head.token() is None or self._head.token() != self._token:
            self._token = self._head.token()
            self._valid, self._agreed = {}, {}
            changed = {key: span.end for key, span in self.ranges.items()}
        else:
            changed = {
                key: span.end
                for key, span in self.ranges.items()
                if key not in self._valid or self._valid[key].next != span.end
            }
        lows = {
            key: self._valid[key].next
            if key in self._valid and self._valid[key].next < span.end
            else span.start
            for key, span in self.ranges.items()
        }
        found = self._head.locate(changed, lows)
        self.places = {
            key: found.get(key) or self._valid.get(key) or Place(span.start)
            for key, span in self.ranges.items()
        }
        self._valid = dict(self.places)
        self._looked_ms = self._clock.monotonic_ms()
        self._took_ms = [*self._took_ms[-1:], self._looked_ms - began_ms]
        return self.places

    def verify(self, places: Places) -> dict[TopicPartition, Verdict]:
        """Return how each place relates to the log; asks only for places that are not known."""
        asked = {
            key: place
            for key, place in places.items()
            if place not in (self._valid.get(key), self._agreed.get(key)) or self._token is None
        }
        verdicts = self._head.check(asked)
        self._agreed |= {
            key: verdict.common
            for key, verdict in verdicts.items()
            if verdict.standing is Standing.AGREED
        }
        return {
            key: verdicts.get(key) or Verdict(Standing.AGREED, place)
            for key, place in places.items()
        }


def _topics(strategy: Strategy) -> Collection[str] | None:
    """Return the topics to ask for; None for all."""
    if isinstance(strategy, Subscribe):
        return strategy.topics
    if isinstance(strategy, Assign):
        return {key.topic for key in strategy.partitions}
    return None
