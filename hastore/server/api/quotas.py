"""Quotas of identities: how much each may ask of this node in a second, and how much it may keep.

    requests_per_s, bytes_per_s   what one second allows may come at once; beyond it requests wait,
                                  or are refused (the caller decides): see `Meter.ask`
    topics                        topics that its `produce` stands for: a put makes no further one
    positions                     pairs of group and topic that it may move: it makes no further one

Bytes are those of requests and of their answers. The bytes of an answer are known when it is sent,
so they count against the next request. Each node counts by itself, from its start on. What is kept
is counted in the log's own tables, so all nodes agree about it.

Everything here runs with the API's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from hastore.clock import Clock
from hastore.record.delays import DLQ_PREFIX, RETRY_PREFIX
from hastore.security.identity import Identity, Quota

BURST_MS = 1_000.0
# RocketMQ's orderly consumers ask for each new queue by a request of its own, and for those that
# were refused again after 20 s.
RECORDS_BURST_MS = 20_000.0
COUNT_MS = 1_000.0  # a count of what is kept holds for so long: a put may have many new topics
NEW_MS = 10_000.0  # what was let through counts for so long, also if nothing came of it
NEW_MAX = 10_000
KEPT_METERS = 1_024  # of identities that have a quota
What = TypeVar("What", bound=Hashable)


class Meter:
    """What one identity has asked of this node."""

    __slots__ = ("_answered", "_bytes_ms", "_records_ms", "_requests_ms", "bytes", "quota",
                 "refused", "requests", "slowed")  # fmt: skip

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._requests_ms = self._bytes_ms = 0.0  # when all that was asked is allowed
        self._records_ms = 0.0
        self._answered = 0  # bytes of answers that do not count yet
        self.requests = self.bytes = self.slowed = self.refused = 0

    def answered(self, size: int) -> None:
        """Count an answer."""
        self._answered += size

    def ask(self, size: int, now_ms: float, most_ms: float) -> float | None:
        """Return how long a request must wait, and count it; None: it must be refused.

        It is refused if it had to wait longer than `most_ms`; then it does not count.
        """
        self._count_bytes(self._answered, now_ms)
        self._answered = 0
        wait_ms = max(self._requests_ms, self._bytes_ms) - now_ms - BURST_MS
        if wait_ms > most_ms:
            self.refused += 1
            return None
        self.requests += 1
        per_s = self.quota.requests_per_s
        if per_s is not None:
            self._requests_ms = max(self._requests_ms, now_ms) + 1_000.0 / per_s
        self._count_bytes(size, now_ms)
        if wait_ms <= 0.0:
            return 0.0
        self.slowed += 1
        return wait_ms

    def may_record(self, now_ms: float) -> bool:
        """Whether a request that is free may bring another record, such as that of a new lock.

        These have as much again as the quota, for themselves: else one that pulls as much as it
        may would get no queues.
        """
        return self._records_ms <= now_ms + RECORDS_BURST_MS

    def record(self, size: int, now_ms: float) -> None:
        """Count such a request."""
        cost_ms = 0.0
        if self.quota.requests_per_s is not None:
            cost_ms = 1_000.0 / self.quota.requests_per_s
        if self.quota.bytes_per_s is not None:
            cost_ms = max(cost_ms, 1_000.0 * size / self.quota.bytes_per_s)
        self._records_ms = max(self._records_ms, now_ms) + cost_ms

    def _count_bytes(self, size: int, now_ms: float) -> None:
        self.bytes += size
        per_s = self.quota.bytes_per_s
        if per_s is not None and size:
            self._bytes_ms = max(self._bytes_ms, now_ms) + 1_000.0 * size / per_s

    def why(self, identity: str) -> str:
        """Return why a request is refused."""
        limits = [
            f"{name} {value:,}"
            for name, value in (
                ("requests_per_s", self.quota.requests_per_s),
                ("bytes_per_s", self.quota.bytes_per_s),
            )
            if value is not None
        ]
        return f"identity {identity} asks for more than its quota ({', '.join(limits)}); slow down"


class _Counted(NamedTuple):
    """What an identity has of one kind, with what was let through since the count."""

    identity: Identity
    until_ms: float  # then it is counted again
    there: set[Any]
    is_ours: Callable[[Any], bool]


class Quotas:
    """The meters of a node's identities, and the counts of what they keep."""

    def __init__(
        self, clock: Clock, may_read: Callable[[Identity, str], bool] = Identity.may_consume
    ) -> None:
        """Prepare; `may_read` says whether an identity may have positions in a topic."""
        self._clock = clock
        self._may_read = may_read
        self._meters: dict[str, Meter] = {}
        self._counted: dict[tuple[str, str], _Counted] = {}  # by kind and name
        self._new_topics: dict[str, float] = {}  # let through, and until when that counts
        self._new_pairs: dict[tuple[str, str], float] = {}
        self.kept_out = 0  # topics and positions that were refused
        # What there is, of the node's tables; the server says it.
        self.has_topic: Callable[[str], bool] = lambda _topic: True
        self.has_pair: Callable[[str, str], bool] = lambda _group, _topic: True
        self.topics: Callable[[], Iterable[str]] = lambda: ()
        self.pairs: Callable[[], Iterable[tuple[str, str]]] = lambda: ()

    def meter(self, identity: Identity) -> Meter | None:
        """Return the meter of an identity; None if it has no quota a second."""
        quota = identity.quota
        if quota is None or (quota.requests_per_s is None and quota.bytes_per_s is None):
            return None
        found = self._meters.get(identity.name)
        if found is None:
            if len(self._meters) >= KEPT_METERS:
                del self._meters[next(iter(self._meters))]
            found = self._meters[identity.name] = Meter(quota)
        found.quota = quota  # it may have changed
        return found

    def why_no_topic(self, identity: Identity, topic: str) -> str | None:
        """Return why an identity may not make a topic; None if it may, or there is one."""
        quota = identity.quota
        if quota is None or quota.topics is None or self.has_topic(topic):
            return None
        is_ours = identity.may_produce
        return self._over(identity, "topics", quota.topics, topic, self._new_topics, is_ours)

    def why_no_retries(self, identity: Identity, group: str, *, is_last: bool) -> str | None:
        """Return why a message may not be sent back, as that would make another topic.

        As for a message that is put there: only of what its `produce` stands for. `is_last`: it
        becomes a dead letter at once.
        """
        topic = (DLQ_PREFIX if is_last else RETRY_PREFIX) + group
        return self.why_no_topic(identity, topic) if identity.may_produce(topic) else None

    def why_no_position(self, identity: Identity, group: str, topic: str) -> str | None:
        """Return why an identity may not keep positions; None if it may, or there are some."""
        quota = identity.quota
        if quota is None or quota.positions is None or self.has_pair(group, topic):
            return None

        def is_ours(pair: tuple[str, str]) -> bool:
            return identity.may_move(pair[0]) and self._may_read(identity, pair[1])

        pair = group, topic
        return self._over(identity, "positions", quota.positions, pair, self._new_pairs, is_ours)

    def _recent(self, new: dict[What, float]) -> list[What]:
        """Return what was let through lately: the tables may not have it yet."""
        now = self._clock.monotonic_ms()
        while new and now >= next(iter(new.values())):
            del new[next(iter(new))]
        return list(new)

    def _over(
        self,
        identity: Identity,
        kind: str,
        most: int,
        what: What,
        new: dict[What, float],
        is_ours: Callable[[What], bool],
    ) -> str | None:
        now = self._clock.monotonic_ms()
        if now < new.get(what, 0.0):
            return None
        counted = self._counted.get((kind, identity.name))
        if counted is None or now >= counted.until_ms or counted.identity != identity:
            every: Iterable[Any] = self.topics() if kind == "topics" else self.pairs()
            there = {one for one in (*every, *self._recent(new)) if is_ours(one)}
            counted = _Counted(identity, now + COUNT_MS, there, is_ours)
            if len(self._counted) >= KEPT_METERS:
                self._counted.clear()
            self._counted[kind, identity.name] = counted
        if what in counted.there:
            return None
        if len(counted.there) < most:
            if len(new) >= NEW_MAX:
                del new[next(iter(new))]
            new[what] = now + NEW_MS
            for (other, _), one in self._counted.items():
                if other == kind and one.is_ours(what):
                    one.there.add(what)
            return None
        self.kept_out += 1
        return f"identity {identity.name} has its {most:,} {kind} (quota.{kind}): no further one"

    def status(self) -> dict[str, Any]:
        """Return the object in the node's status. Any thread may ask."""
        return {
            "kept_out": self.kept_out,
            "identities": {
                name: {
                    "requests": one.requests,
                    "bytes": one.bytes,
                    "slowed": one.slowed,
                    "refused": one.refused,
                }
                for name, one in list(self._meters.items())
            },
        }
