"""The asyncio twin of hastore.Admin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hastore.aio.threaded import Threaded
from hastore.client.admin import Admin as _Admin
from hastore.client.admin import QueueRanges
from hastore.client.results import Message, NodeInfo
from hastore.protocol.api import MapInfo


class Admin(Threaded):
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
