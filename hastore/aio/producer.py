"""The asyncio twin of hastore.Producer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from hastore.aio.threaded import Threaded
from hastore.client.producer import OutgoingMessage, Properties
from hastore.client.producer import Producer as _Producer
from hastore.client.results import SendResult


class Producer(Threaded):
    """Send messages; see hastore.Producer."""

    def __init__(self, bootstrap: str | Sequence[str] | None = None, **options: Any) -> None:
        """Take what hastore.Producer takes."""
        super().__init__("hastore-producer")
        self._producer = _Producer(bootstrap, **options)

    async def __aenter__(self) -> Producer:
        return self

    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tags: str | None = None,
        properties: Properties = (),
        queue: int | None = None,
    ) -> SendResult:
        """Send a message and wait for its result, as hastore.Producer.send_sync does.

        To have many in flight, gather many sends.
        """
        future = await self._call(
            self._producer.send, topic, body, key=key, tags=tags, properties=properties, queue=queue
        )
        return await asyncio.wrap_future(future)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | bytes],
        *,
        queue: int | None = None,
    ) -> list[SendResult]:
        """Send messages in their order and wait for all results."""
        future = await self._call(self._producer.send_batch, topic, messages, queue=queue)
        return await asyncio.wrap_future(future)

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was sent so far is settled; False when the time is up first."""
        return await self._call(self._producer.flush, timeout_s)

    async def close(self) -> None:
        """Settle what is under way and end."""
        await self._call(self._producer.close)
        self._thread.shutdown(wait=False)
