"""What the client API counts, for /metrics; changed with the API's lock held, in any thread."""

from dataclasses import dataclass, field

from hastore.counters import Histogram, Tally, Traffic


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
