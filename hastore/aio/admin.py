"""hastore.Admin for asyncio."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from hastore.aio.client import AsyncClient
from hastore.client.admin import AdminCore, QueueRanges
from hastore.client.connections.addresses import parse_bootstrap
from hastore.client.lifecycle import describe
from hastore.client.results import Message, NodeInfo
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.protocol.api import MapInfo


class Admin(AsyncClient):
    """Query a group; see hastore.Admin."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        timeout_s: float = 5.0,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect; raises UsageError for wrong arguments."""
        addresses = parse_bootstrap(bootstrap)
        self._core = AdminCore.connect(addresses, timeout_s, clock, security)
        super().__init__(self._core, describe("aio.Admin", addresses))

    async def status(self) -> list[NodeInfo]:
        """Return the status of each node that answers; raises UnreachableError if none does."""
        return await self._run(self._core, self._core.status())

    async def maps(self) -> dict[str, MapInfo]:
        """Return each node's view of the group, by the node's address."""
        return await self._run(self._core, self._core.maps())

    async def topics(self) -> dict[str, QueueRanges]:
        """Return each topic's queues with their (first, end) queue offsets."""
        return await self._run(self._core, self._core.topics())

    async def query_key(
        self,
        topic: str,
        key: str | bytes,
        *,
        max_messages: int = 32,
        begin_ms: int | datetime.datetime = 0,
        end_ms: int | datetime.datetime = 2**63 - 1,
    ) -> list[Message]:
        """Return the messages of a topic with a key, newest first."""
        core = self._core
        return await self._run(core, core.query_key(topic, key, max_messages, begin_ms, end_ms))

    async def query_message_id(self, message_id: str) -> Message | None:
        """Return the message with an id, None when there is none."""
        return await self._run(self._core, self._core.query_message_id(message_id))
