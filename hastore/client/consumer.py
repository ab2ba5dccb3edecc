"""Read a topic, queue by queue, from any replica.

    with Consumer("flights", ["tcp://127.0.0.1:10911"], group="delays") as consumer:
        for message in consumer.poll(timeout_s=1.0):
            ...
        consumer.commit()

Only what is readable is read: under a synchronous master what enough slaves have confirmed.
Messages of one queue come in its order; the queues take turns. While the caller handles messages
the next ones are fetched, up to `prefetch_bytes`; a batch that `poll` returned is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal

from hastore.client.addresses import parse_bootstrap
from hastore.client.fetcher import POLICIES, Fetcher, QueueReader
from hastore.client.requester import Requester, commit_positions, expect
from hastore.client.results import Message, Position
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ClientError, UnreachableError, UsageError
from hastore.protocol import api

Start = Literal["earliest", "latest"]
OnLost = Literal["raise", "earliest", "latest", "common"]
_POLL_S = 1.0


class Consumer:
    """Read messages and keep positions; used by one thread at a time, `close` from any.

    `position` is where the reader stands: behind the last message that `poll` has returned.
    """

    def __init__(
        self,
        topic: str,
        bootstrap: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        queues: Sequence[int] | None = None,
        start: Start = "earliest",
        on_lost: OnLost = "raise",
        read_from: Literal["slaves", "master"] = "slaves",
        max_bytes: int = 1024 * 1024,
        prefetch_bytes: int = 8 * 1024 * 1024,
        timeout_s: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare to read; connects at the first use, raises UsageError only.

        `group` names whose committed positions to start from and to commit under; `start` is for
        queues without one. `queues` None: all of the topic. `on_lost`: what to do when a position
        is lost (retention, or a failover cut it away): raise PositionLostError, or go on at the
        earliest, the latest, or the last common position. `timeout_s` bounds each request but
        `poll`.

        A pull brings up to `max_bytes`. `prefetch_bytes` bounds the records that are held for, or
        are on their way to, the next polls; of each queue at least two pulls of 16 KiB, or of a
        message if that is larger. Small messages take about twice their bytes once decoded.
        """
        if start not in ("earliest", "latest"):
            raise UsageError(f'start={start!r}: "earliest" or "latest"')
        if on_lost not in POLICIES:
            raise UsageError(f"on_lost={on_lost!r}: one of {', '.join(POLICIES)}")
        if not 1 <= max_bytes <= api.MAX_FRAME_BYTES:
            raise UsageError(f"max_bytes={max_bytes}: from 1 to {api.MAX_FRAME_BYTES}")
        if prefetch_bytes < 0:
            raise UsageError(f"prefetch_bytes={prefetch_bytes} is negative")
        if not topic:
            raise UsageError("a consumer needs a topic")
        self.topic = topic
        self.group = group
        self._start: Start = start
        self._wanted = None if queues is None else tuple(queues)
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.RLock()
        self._closing = False
        self._requester = Requester(parse_bootstrap(bootstrap), clock)
        self._fetcher = Fetcher(
            self._requester,
            topic,
            clock,
            max_bytes=max_bytes,
            prefetch_bytes=prefetch_bytes,
            prefer_master=read_from == "master",
        )
        self._fetcher.policy = on_lost

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they come, until the consumer is closed."""
        while not self._closing:
            yield from self.poll(timeout_s=_POLL_S)

    @property
    def source(self) -> str | None:
        """The address that is read from, None while one is looked for."""
        return self._fetcher.source

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return what is there, up to `max_messages`; waits up to `timeout_s` for the first.

        PositionLostError when the policy says so; seek, then poll again. CorruptRecordError when a
        replica gave damaged bytes: the position stands before them, and polling again asks another
        replica if there is one.
        """
        with self._lock:
            deadline = self._requester.deadline(timeout_s)
            self._prepare(timeout_s)
            self._fetcher.pump()
            while not self._closing:
                taken = self._fetcher.take(max_messages)
                if taken:
                    return taken
                left = self._requester.left_s(deadline)
                self._fetcher.step(left)
                if left <= 0.0:
                    return self._fetcher.take(max_messages)
        return []

    def positions(self) -> dict[int, Position]:
        """Return where the reader stands in each queue."""
        with self._lock:
            self._prepare(self._timeout_s)
            return {queue_id: queue.next for queue_id, queue in self._fetcher.queues.items()}

    def position(self, queue: int) -> Position:
        """Return where the reader stands in a queue."""
        with self._lock:
            return self._queue(queue).next

    def seek(self, queue: int, position: int | Position) -> None:
        """Go on from a queue offset, or from a Position that was kept."""
        place = Position(position) if isinstance(position, int) else position
        if place.queue_offset < 0:
            raise UsageError(f"queue offset {place.queue_offset} is negative")
        with self._lock:
            self._queue(queue).seek(place)

    def seek_to_earliest(self) -> None:
        """Go on from the first message kept, in every queue."""
        self._seek_to_ends(0)

    def seek_to_latest(self) -> None:
        """Go on behind the last readable message, in every queue."""
        self._seek_to_ends(1)

    def seek_to_time(self, timestamp_ms: int) -> None:
        """Go on from the first message stored at or after a time (ms since 1970)."""
        with self._lock:
            self._prepare(self._timeout_s)
            for queue_id, queue in self._fetcher.queues.items():
                reply, _ = self._ask(_find_time(self.topic, queue_id, timestamp_ms))
                if isinstance(reply, api.Failed) and reply.status == "NO_SUCH_QUEUE":
                    queue.seek(Position(0))
                else:
                    queue.seek(Position(expect(api.TimeFound, reply).queue_offset))

    def commit(self) -> None:
        """Keep the reader's positions under the group's name, as durable as any message.

        Raises what Producer.send_sync would; committing again is harmless.
        """
        group = self._group()
        with self._lock:
            positions = self.positions()
            commit_positions(self._requester, group, self.topic, positions, self._timeout_s)

    def committed(self) -> dict[int, Position]:
        """Return the group's committed positions."""
        with self._lock:
            return self._committed(self._group())

    def close(self) -> None:
        """Close the connections; a `poll` under way returns. Commits nothing."""
        self._closing = True
        self._requester.links.wake()
        with self._lock:
            self._requester.close()

    # -- behind the scenes

    def _group(self) -> str:
        if not self.group:
            raise UsageError("positions are kept under a group's name; give the consumer a group")
        return self.group

    def _queue(self, queue_id: int) -> QueueReader:
        self._prepare(self._timeout_s)
        found = self._fetcher.queues.get(queue_id)
        if found is None:
            raise UsageError(f"queue {queue_id} is none of this consumer's")
        return found

    def _prepare(self, timeout_s: float) -> None:
        """Find the queues and where to start in each, once."""
        if self._fetcher.queues:
            return
        if self._closing:
            raise ClientError("the consumer is closed")
        ranges = self._ranges(max(timeout_s, self._timeout_s))
        committed = self._committed(self.group) if self.group else {}
        for queue_id, (first, end) in ranges.items():
            start = Position(first if self._start == "earliest" else end)
            place = committed.get(queue_id, start)
            self._fetcher.queues[queue_id] = QueueReader(queue_id, place, place)

    def _ranges(self, timeout_s: float) -> dict[int, tuple[int, int]]:
        reply, _ = self._ask(lambda rid: api.AskTopics(rid, self.topic), timeout_s)
        topics = expect(api.Topics, reply)
        known = topics.topics.get(self.topic, {})
        wanted = self._wanted
        if wanted is None:
            wanted = tuple(range(max(topics.default_queues, max(known, default=-1) + 1)))
        return {queue_id: known.get(queue_id, (0, 0)) for queue_id in wanted}

    def _committed(self, group: str) -> dict[int, Position]:
        reply, _ = self._ask(lambda rid: api.Fetch(rid, group, self.topic))
        return expect(api.Positions, reply).positions

    def _seek_to_ends(self, which: int) -> None:
        with self._lock:
            self._prepare(self._timeout_s)
            for queue_id, ends in self._ranges(self._timeout_s).items():
                queue = self._fetcher.queues.get(queue_id)
                if queue is not None:
                    queue.seek(Position(ends[which]))

    def _ask(
        self, make: Callable[[int], api.Request], timeout_s: float | None = None
    ) -> tuple[api.Reply, bytes]:
        """Ask the master if there is one, else the replica that has most."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        requester = self._requester
        requester.survey(limit)
        maps = requester.cluster.maps
        order = sorted(maps, key=lambda a: (maps[a].writable, maps[a].readable_offset))
        failure: UnreachableError | None = None
        for address in reversed(order):
            try:
                return requester.ask(address, make, limit)
            except UnreachableError as unreachable:
                failure = unreachable
        raise failure or UnreachableError("no node answers")


def _find_time(topic: str, queue_id: int, timestamp_ms: int) -> Callable[[int], api.Request]:
    return lambda rid: api.FindTime(rid, topic, queue_id, timestamp_ms)
