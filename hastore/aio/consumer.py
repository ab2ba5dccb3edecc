"""The asyncio twin of hastore.Consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from hastore.aio.threaded import Threaded
from hastore.client.consumer import Consumer as _Consumer
from hastore.client.results import Message, Position


class Consumer(Threaded):
    """Read a topic; see hastore.Consumer."""

    def __init__(
        self, topic: str, bootstrap: str | Sequence[str] | None = None, **options: Any
    ) -> None:
        """Take what hastore.Consumer takes."""
        super().__init__("hastore-consumer")
        self._consumer = _Consumer(topic, bootstrap, **options)
        self._closed = False

    async def __aenter__(self) -> Consumer:
        return self

    async def __aiter__(self) -> AsyncIterator[Message]:
        while not self._closed:
            for message in await self.poll():
                yield message

    async def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return what is there; waits up to `timeout_s` for the first."""
        return await self._call(self._consumer.poll, max_messages, timeout_s)

    async def positions(self) -> dict[int, Position]:
        """Return where the reader stands in each queue."""
        return await self._call(self._consumer.positions)

    async def seek(self, queue: int, position: int | Position) -> None:
        """Go on from a queue offset, or from a Position that was kept."""
        await self._call(self._consumer.seek, queue, position)

    async def seek_to_earliest(self) -> None:
        """Go on from the first message kept, in every queue."""
        await self._call(self._consumer.seek_to_earliest)

    async def seek_to_latest(self) -> None:
        """Go on behind the last readable message, in every queue."""
        await self._call(self._consumer.seek_to_latest)

    async def seek_to_time(self, timestamp_ms: int) -> None:
        """Go on from the first message stored at or after a time (ms since 1970)."""
        await self._call(self._consumer.seek_to_time, timestamp_ms)

    async def commit(self) -> None:
        """Keep the reader's positions under the group's name."""
        await self._call(self._consumer.commit)

    async def committed(self) -> dict[int, Position]:
        """Return the group's committed positions."""
        return await self._call(self._consumer.committed)

    async def close(self) -> None:
        """Close the connections; commits nothing."""
        self._closed = True
        await asyncio.to_thread(self._consumer.close)
        self._thread.shutdown(wait=False)
