"""Counts that a node keeps for /metrics, cheap enough for hot paths: plain increments, no lock.

Whoever changes one of these holds a lock that it needs anyway, or is the only thread that does. Any
thread may read them: it sees each number as it was at some moment. All of them begin at 0 with the
process, and none falls.
"""

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field

# The upper ends of a histogram's buckets, in milliseconds; the last bucket has no end.
BOUNDS_MS = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1_000.0, 2_500.0, 5_000.0, 10_000.0),
)
OTHER = "other"  # what is beyond a bound; a name that is really so is counted with it
NAMES_MAX = 50
TOPICS_MAX = 200


class Histogram:
    """How long operations took: how many in each bucket, and the sum."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_MS) + 1)
        self.sum_ms = 0.0

    def observe(self, took_ms: float) -> None:
        """Count an operation."""
        self.counts[bisect_left(BOUNDS_MS, took_ms)] += 1
        self.sum_ms += took_ms


class Tally:
    """Counts by name, such as a status. Beyond `most` names the rest counts as OTHER."""

    def __init__(self, most: int = NAMES_MAX) -> None:
        self._most = most
        self._counts: dict[str, int] = {}

    def add(self, name: str, more: int = 1) -> None:
        """Count something."""
        counts = self._counts
        if name not in counts and len(counts) >= self._most:
            name = OTHER
        counts[name] = counts.get(name, 0) + more

    def items(self) -> list[tuple[str, int]]:
        """Return the counts so far, by name."""
        return list(self._counts.items())


class Traffic:
    """Messages and bytes by topic: of the first `most` topics since the start, the rest as OTHER.

    Whoever comes first keeps its row, so that no count moves from one row to another.
    """

    def __init__(self, most: int = TOPICS_MAX) -> None:
        self._most = most
        self._rows: dict[str | bytes, list[int]] = {}
        self._other = [0, 0]

    def add(self, topic: str | bytes, messages: int, size_bytes: int) -> None:
        """Count messages of a topic; a caller uses either text or bytes for its topics."""
        row = self._rows.get(topic)
        if row is None:
            row = self._row(topic)
        row[0] += messages
        row[1] += size_bytes

    def _row(self, topic: str | bytes) -> list[int]:
        if len(self._rows) >= self._most or topic in (OTHER, OTHER.encode()):
            return self._other
        row = self._rows[topic] = [0, 0]
        return row

    def rows(self) -> list[tuple[str, int, int]]:
        """Return (topic, messages, bytes) of each topic, and of the rest."""
        found = [
            (topic if isinstance(topic, str) else topic.decode("utf-8", "replace"), row[0], row[1])
            for topic, row in list(self._rows.items())
        ]
        return [*found, (OTHER, self._other[0], self._other[1])]


class RoundTrips:
    """How long it takes from an append here until a peer reports it: one at a time for each peer.

    One thread calls `sent`. Reports come from others, and are counted under one lock.
    """

    def __init__(self) -> None:
        self.times = Histogram()
        self.waiting: dict[Hashable, tuple[int, float]] = {}  # by peer: the mark, when it was sent

    def sent(self, peer: Hashable, mark: int, now_ms: float) -> None:
        """Note that what ends at `mark` goes to a peer, unless an earlier one is on its way."""
        self.waiting.setdefault(peer, (mark, now_ms))

    def reported(self, peer: Hashable, mark: int, now_ms: float) -> None:
        """Note that a peer has reported `mark`."""
        begun = self.waiting.get(peer)
        if begun is not None and mark >= begun[0]:
            self.waiting.pop(peer, None)
            self.times.observe(now_ms - begun[1])

    def forget(self, peer: Hashable) -> None:
        """Forget what was on its way to a peer: its link has ended, or the log was cut."""
        self.waiting.pop(peer, None)


@dataclass(slots=True)
class ReplicationCounts:
    """What happened between this node and the others of its group."""

    promotions: int = 0  # how often it became the master, or the leader
    elections: int = 0  # terms in which it stood for election (mode dledger)
    links: Tally = field(default_factory=Tally)  # opened, by the peer's number
    round_trips: RoundTrips = field(default_factory=RoundTrips)


@dataclass(slots=True)
class ApiCounts:
    """The counts of one ApiServer, since its start."""

    puts: int = 0  # that were appended
    pulls: int = 0  # that were answered
    refusals: Tally = field(default_factory=Tally)  # of requests, by status
    refused_messages: Tally = field(default_factory=Tally)  # of puts that were not refused whole
    unconfirmed: Tally = field(default_factory=Tally)  # puts, by outcome
    sent: Traffic = field(default_factory=Traffic)  # to consumers
    put_times: dict[str, Histogram] = field(default_factory=dict)  # by level, without a number
    append_times: Histogram = field(default_factory=Histogram)
    pull_times: Histogram = field(default_factory=Histogram)  # from memory
    cold_pull_times: Histogram = field(default_factory=Histogram)  # with the wait for the disk
    _of_level: dict[str, Histogram] = field(default_factory=dict)  # SYNC_MEM(1), SYNC_MEM(2)

    def times_of(self, level: str) -> Histogram:
        """Return the histogram in which puts with this level count."""
        times = self._of_level.get(level)
        if times is None:
            times = self.put_times.setdefault(level.partition("(")[0], Histogram())
            self._of_level[level] = times
        return times
