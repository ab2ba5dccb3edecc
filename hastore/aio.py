"""The clients for asyncio: the same names, the same arguments, awaitable.

    async with Producer(["tcp://127.0.0.1:10911"]) as producer:
        result = await producer.send("flights", b"...")

The producer's Futures come from its sending thread and are wrapped; what blocks runs in a thread of
the client's own. A cancelled `send` is no longer waited for, but may be stored all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from hastore.client.admin import Admin as _Admin
from hastore.client.admin import QueueRanges
from hastore.client.consumer import Consumer as _Consumer
from hastore.client.producer import OutgoingMessage, Properties
from hastore.client.producer import Producer as _Producer
from hastore.client.results import Message, NodeInfo, Position, SendResult
from hastore.protocol.api import MapInfo

__all__ = ["Admin", "Consumer", "OutgoingMessage", "Producer"]
Result = TypeVar("Result")


class _Threaded:
    """Run a blocking client's methods in one thread of its own."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def _call(self, method: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    async def close(self) -> None:
        """Close the client and its thread."""
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class Producer(_Threaded):
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


class Consumer(_Threaded):
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


class Admin(_Threaded):
    """Ask about a group; see hastore.Admin."""

    def __init__(self, bootstrap: str | Sequence[str] | None = None, **options: Any) -> None:
        """Take what hastore.Admin takes."""
        super().__init__("hastore-admin")
        self._admin = _Admin(bootstrap, **options)

    async def __aenter__(self) -> Admin:
        return self

    async def status(self) -> list[NodeInfo]:
        """Return what each node that answers says of itself."""
        return await self._call(self._admin.status)

    async def maps(self) -> dict[str, MapInfo]:
        """Return each node's view of the group by its address."""
        return await self._call(self._admin.maps)

    async def topics(self) -> dict[str, QueueRanges]:
        """Return each topic's queues with their (first, end) queue offsets."""
        return await self._call(self._admin.topics)

    async def query_key(self, topic: str, key: str, **limits: Any) -> list[Message]:
        """Return the messages of a topic with a key, newest first."""
        return await self._call(self._admin.query_key, topic, key, **limits)

    async def query_message_id(self, message_id: str) -> Message | None:
        """Return the message with an id, None when there is none."""
        return await self._call(self._admin.query_message_id, message_id)

    async def close(self) -> None:
        """Close the connections."""
        await self._call(self._admin.close)
        self._thread.shutdown(wait=False)
