"""hastore.Consumer for asyncio."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Sequence

from hastore.aio.client import AsyncClient
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
from hastore.client.lifecycle import describe
from hastore.client.results import Message, Position
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock


class Consumer(AsyncClient):
    """Read a topic; see hastore.Consumer.

    Tasks may share it: one call runs at a time, and each message goes to one task. A cancelled call
    has moved no position: the next `poll` returns the same messages.
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
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Take the arguments of hastore.Consumer."""
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
        self._core = ConsumerCore(Requester(addresses, clock, security), clock, reading)
        super().__init__(self._core, describe("aio.Consumer", addresses, reading.topic))

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages as they arrive, until the consumer is closed; see hastore.Consumer."""
        core, life = self._core, self._lifecycle
        while not life.closed:
            queue = await self._call(core.ready(POLL_S))
            while queue is not None and not life.closed:
                ready, at = queue.ready, queue.taken  # read anew: other tasks may take or seek
                if at >= len(ready):
                    break
                message = ready[at]
                # No call comes between here and the yield, so no signal handler runs in between.
                queue.taken, queue.current = at + 1, message
                yield message

    @property
    def topic(self) -> str:
        """The topic that is read."""
        return self._core.topic

    @property
    def group(self) -> str | None:
        """The group under whose name positions are committed."""
        return self._core.group

    @property
    def source(self) -> str | None:
        """The address of the replica that is read, None while the consumer looks for one."""
        return self._core.fetcher.source

    async def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return up to `max_messages` messages; waits up to `timeout_s` for the first."""
        fetcher = self._core.fetcher
        taken = await self._call(self._core.poll(max_messages, timeout_s))
        # This comes last: after an earlier interrupt, the next call returns the same messages.
        fetcher.undo = None
        return taken

    async def positions(self) -> dict[int, Position]:
        """Return the position in each queue."""
        return await self._call(self._core.positions())

    async def position(self, queue: int) -> Position:
        """Return the position in a queue."""
        return await self._call(self._core.position(queue))

    async def seek(self, queue: int, position: int | Position) -> None:
        """Continue at a queue offset, or at a Position that the caller has kept."""
        await self._call(self._core.seek(queue, position))
        self._core.fetcher.undo = None

    async def seek_to_earliest(self) -> None:
        """Continue at the first message that exists, in every queue."""
        await self._call(self._core.seek_to_ends(0))
        self._core.fetcher.undo = None

    async def seek_to_latest(self) -> None:
        """Continue after the last readable message, in every queue."""
        await self._call(self._core.seek_to_ends(1))
        self._core.fetcher.undo = None

    async def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> None:
        """Continue at the first message stored at or after a time, in every queue.

        The time is an int of ms since 1970 (UTC), or a datetime; raises UsageError for a datetime
        without a time zone.
        """
        await self._call(self._core.seek_to_time(timestamp_ms))
        self._core.fetcher.undo = None

    async def commit(self) -> None:
        """Commit the positions under the group's name; see hastore.Consumer.

        A cancelled commit may still be stored. That does no harm: the consumer has reached all the
        positions in it.
        """
        await self._call(self._core.commit())

    async def committed(self) -> dict[int, Position]:
        """Return the group's committed positions."""
        return await self._call(self._core.committed())

    async def _call(self, steps: Steps[Result]) -> Result:
        return await self._run(self._core, steps)
