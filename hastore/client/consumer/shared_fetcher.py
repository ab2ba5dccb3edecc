"""Fetches messages of the queues that a member of a group has now, of several topics.

A queue gives messages only as long as its lease lasts by this client's own clock, and while it is
neither paused nor about to leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hastore.client.connections.requester import Requester
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.fetcher import Fetcher, QueueReader
from hastore.client.consumer.subscription import TopicQueue
from hastore.clock import Clock
from hastore.protocol.api import Filter, Position
from hastore.record.delays import RETRY_PREFIX


@dataclass(slots=True, eq=False)
class SharedQueue(QueueReader):
    """A queue that the member has. `handle` tells it from all that the member has had."""

    topic: str = ""
    handle: int = 0
    lease_ms: float = 0.0  # until when it is this member's, in monotonic ms
    is_leaving: bool = False  # it is given back as soon as the listener was told
    kept: int | None = None  # the group's committed queue offset, as far as this member knows
    is_unsure: bool = False  # a commit was sent, and it is not known whether it was stored

    @property
    def key(self) -> int:
        """Its key in `Fetcher.queues`: several topics have a queue of this number."""
        return self.handle

    @property
    def name(self) -> TopicQueue:
        """The topic and the queue."""
        return TopicQueue(self.topic, self.queue_id)


class SharedFetcher(Fetcher):
    """Keep messages of the member's queues available; used by one thread at a time."""

    queues: dict[int, QueueReader]

    def __init__(
        self,
        requester: Requester,
        clock: Clock,
        on_arrival: Callable[[Arrival], None],
        *,
        max_bytes: int,
        prefetch_bytes: int,
        prefer_master: bool,
        on_lost: str,
        wanted: Filter | None = None,
    ) -> None:
        """Prepare; `on_arrival` gets each arrival before the fetcher does."""
        self.mine: dict[TopicQueue, SharedQueue] = {}
        self._handles = 0
        super().__init__(
            requester, "", clock, max_bytes=max_bytes, prefetch_bytes=prefetch_bytes,
            prefer_master=prefer_master, on_lost=on_lost, wanted=wanted,
            first_on_arrival=on_arrival,
        )  # fmt: skip

    def add(self, name: TopicQueue, position: Position, lease_ms: float) -> SharedQueue:
        """Begin to read a queue."""
        self._handles += 1
        queue = SharedQueue(
            name.queue_id, position, position,
            topic=name.topic, handle=self._handles, lease_ms=lease_ms,
        )  # fmt: skip
        self.mine[name] = queue
        self.queues[queue.handle] = queue
        return queue

    def drop(self, name: TopicQueue) -> None:
        """Stop reading a queue."""
        queue = self.mine.pop(name, None)
        if queue is not None:
            self.queues.pop(queue.handle, None)
            self.sought.discard(queue.handle)

    def look_for_nodes(self) -> None:
        """Ask all nodes for their maps with the next step, instead of within a second."""
        self._next_refresh_ms = 0.0

    def _in_turn(self) -> Iterator[QueueReader]:
        now = self._clock.monotonic_ms()
        for queue in super()._in_turn():
            assert isinstance(queue, SharedQueue)
            if now < queue.lease_ms and not queue.is_leaving:
                yield queue

    def _topic_of(self, queue: QueueReader) -> str:
        assert isinstance(queue, SharedQueue)
        return queue.topic

    def _filter_of(self, queue: QueueReader) -> Filter | None:
        """Return the filter, but none for retries: as in RocketMQ, these are chosen already."""
        return None if self._topic_of(queue).startswith(RETRY_PREFIX) else self.wanted
