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

import datetime
from collections.abc import Iterator, Sequence

from hastore.client.connections.addresses import parse_bootstrap
from hastore.client.connections.requester import Requester, Result, Steps
from hastore.client.consumer.consumer_core import (
    POLL_S,
    ConsumerCore,
    OnLost,
    ReadFrom,
    Start,
    make_reading,
)
from hastore.client.core import Blocking
from hastore.client.lifecycle import describe
from hastore.client.results import Message, Position
from hastore.clock import SYSTEM_CLOCK, Clock


class Consumer(Blocking):
    """Read messages and keep positions; used by one thread at a time, `close` from any.

    `position` is where the reader stands: behind the last message that `poll` has returned, or that
    an iteration has yielded. A call that ends by an exception, a signal's for instance, has moved
    nothing: the next one returns what it would have.
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
        read_from: ReadFrom = "slaves",
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
        reading = make_reading(
            topic,
            group=group,
            queues=queues,
            start=start,
            on_lost=on_lost,
            read_from=read_from,
            max_bytes=max_bytes,
            prefetch_bytes=prefetch_bytes,
            timeout_s=timeout_s,
            clock=clock,
        )
        addresses = parse_bootstrap(bootstrap)
        self._core = ConsumerCore(Requester(addresses, clock), clock, reading)
        super().__init__(self._core, describe("Consumer", addresses, reading.topic))

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they come, until the consumer is closed.

        The position moves behind each message as it is yielded: a `commit` in the loop's body, or
        behind a `break`, covers what the body has seen.
        """
        core, life = self._core, self._lifecycle
        while not life.closed:
            queue = self._call(core.ready(POLL_S))
            while queue is not None and not life.closed:
                ready, at = queue.ready, queue.taken  # anew: the body may seek, or poll
                if at >= len(ready):
                    break
                message = ready[at]
                # No call from here to the yield, so no signal's exception comes between.
                queue.taken, queue.current = at + 1, message
                yield message

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._core.topic

    @property
    def group(self) -> str | None:
        """The group under whose name positions are kept."""
        return self._core.group

    @property
    def source(self) -> str | None:
        """The address that is read from, None while one is looked for."""
        return self._core.fetcher.source

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return what is there, up to `max_messages`; waits up to `timeout_s` for the first.

        Empty, too, when the consumer is closed meanwhile. PositionLostError when the policy says
        so; seek, then poll again. CorruptRecordError when a replica gave damaged bytes: the
        position stands before them, and polling again asks another replica if there is one.
        """
        fetcher = self._core.fetcher
        taken = self._call(self._core.poll(max_messages, timeout_s))
        fetcher.undo = None  # the last act: what is interrupted before has taken nothing
        return taken

    def positions(self) -> dict[int, Position]:
        """Return where the reader stands in each queue."""
        return self._call(self._core.positions())

    def position(self, queue: int) -> Position:
        """Return where the reader stands in a queue."""
        return self._call(self._core.position(queue))

    def seek(self, queue: int, position: int | Position) -> None:
        """Go on from a queue offset, or from a Position that was kept."""
        self._call(self._core.seek(queue, position))
        self._core.fetcher.undo = None

    def seek_to_earliest(self) -> None:
        """Go on from the first message kept, in every queue."""
        self._call(self._core.seek_to_ends(0))
        self._core.fetcher.undo = None

    def seek_to_latest(self) -> None:
        """Go on behind the last readable message, in every queue."""
        self._call(self._core.seek_to_ends(1))
        self._core.fetcher.undo = None

    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> None:
        """Go on from the first message stored at or after a time, in every queue.

        An int of ms since 1970 (UTC), or a datetime with a time zone; UsageError for a naive one.
        """
        self._call(self._core.seek_to_time(timestamp_ms))
        self._core.fetcher.undo = None

    def commit(self) -> None:
        """Keep the reader's positions under the group's name, as durable as any message.

        Raises what Producer.send_sync would; committing again is harmless. PositionBehindError,
        with nothing kept, when the group stands further in a queue and nobody told this consumer
        to go back there, by a seek or `on_lost`: consumers of one group do not share its messages.
        """
        self._call(self._core.commit())

    def committed(self) -> dict[int, Position]:
        """Return the group's committed positions."""
        return self._call(self._core.committed())

    def _call(self, steps: Steps[Result]) -> Result:
        return self._run(self._core, steps)
