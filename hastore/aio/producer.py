"""hastore.Producer for asyncio: the same core, on the event loop itself, without a thread.

async with Producer(["tcp://127.0.0.1:10911"]) as producer:
    results = await asyncio.gather(*(producer.send("flights", body) for body in bodies))
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from hastore.aio.loop_driver import LINGER_S, LoopDriver
from hastore.client.arguments import check_clock, waiting_limit
from hastore.client.connections.addresses import first_address, parse_bootstrap
from hastore.client.lifecycle import AsyncClosable, Lifecycle, describe
from hastore.client.producer.options import BATCH_BYTES, Acks, make_options
from hastore.client.producer.preparer import (
    NO_PROPERTIES,
    OutgoingMessage,
    Preparer,
    Properties,
)
from hastore.client.results import SendResult
from hastore.client.security import SecurityLike, as_security
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import UsageError
from hastore.protocol.api import WINDOW

_POLL_S = 0.01  # the pause between two checks whether the kernel has taken all bytes


class Producer(AsyncClosable):
    """Send messages from the coroutines of one event loop; see hastore.Producer.

    Messages are sent in the order of the calls. A `send` that is cancelled while its message is
    queued sends nothing; if it is cancelled later, the message is delivered all the same.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        acks: Acks = None,
        sync_flush: bool = False,
        linger_ms: float = 0.0,
        batch_bytes: int = BATCH_BYTES,
        max_in_flight: int = WINDOW,
        delivery_timeout_s: float = 30.0,
        idempotent: bool = True,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Take the arguments of hastore.Producer.

        Raises UsageError if no event loop is running.
        """
        options = make_options(
            acks, sync_flush, linger_ms, batch_bytes, max_in_flight, delivery_timeout_s, idempotent
        )
        addresses = parse_bootstrap(bootstrap)
        check_clock("clock", clock)
        self._loop = _running_loop()
        self._timeout_s = options.delivery_timeout_ms / 1000.0
        security = as_security(security)
        identity = security.identity if security is not None else None
        self._preparer = Preparer(first_address(addresses), options, identity)
        self._driver = LoopDriver(addresses, options, self._preparer, self._loop, clock, security)
        self._lifecycle = Lifecycle(describe("asyncio Producer", addresses), self._driver.abandon)
        self._lifecycle.watch(self, self._driver.detach)

    @property
    def producer_id(self) -> str:
        """The random id that this producer's messages carry."""
        return self._preparer.producer_id

    @property
    def epoch(self) -> int:
        """The greatest epoch that a writable node has stated; 0 before the first."""
        return self._driver.core.cluster.epoch

    @property
    def master(self) -> str | None:
        """The address of the master, None while the producer looks for it."""
        return self._driver.core.cluster.master

    async def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | bytes | None = None,
        tags: str | None = None,
        properties: Properties = NO_PROPERTIES,
        queue: int | None = None,
    ) -> SendResult:
        """Send a message and wait for its result; raises what hastore.Producer.send_sync does.

        To have many messages in flight, gather many sends: the sends of one iteration of the event
        loop share frames.
        """
        self._check()
        draft = self._preparer.draft(topic, body, key, tags, properties, queue)
        result: SendResult = await self._driver.send(topic, [draft], is_batch=False)
        return result

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | bytes],
        *,
        queue: int | None = None,
    ) -> list[SendResult]:
        """Send messages in their order and wait for all results.

        A batch is not atomic: if this raises or is cancelled, some messages may be stored.
        """
        self._check()
        split = self._preparer.batches(topic, messages, queue)
        parts = [self._driver.send(topic, drafts, is_batch=True) for drafts in split]
        found: list[SendResult] = []
        for part in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(part, BaseException):
                raise part
            found += part
        return found

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all messages sent so far are settled; False if `timeout_s` is over first."""
        self._check()
        return await self._flush(waiting_limit("timeout_s", timeout_s))

    async def close(self, timeout_s: float | None = None) -> None:
        """Wait for unsettled messages, at most `timeout_s`, and then end the producer.

        Without `timeout_s` it waits at most 1 s longer than the delivery timeout. If `close` is
        cancelled, the producer ends at once. A message that is not settled by then fails with its
        last status, or with OutcomeUnknown. Does nothing in a forked child.
        """
        if self._lifecycle.forked:
            return
        self._check_loop()
        limit_s = waiting_limit("timeout_s", timeout_s)
        if limit_s is None:
            limit_s = self._timeout_s + 1.0
        self._lifecycle.close()
        try:
            if not self._driver.ended:
                await self._flush(limit_s)
                until = self._loop.time() + LINGER_S
                while self._driver.unsent_bytes and self._loop.time() < until:
                    await asyncio.sleep(_POLL_S)  # waits here, because `end` would block the loop
        finally:
            self._driver.end(0.0 if self._driver.unsent_bytes else LINGER_S)

    async def _flush(self, timeout_s: float | None) -> bool:
        waiter = self._driver.flush()
        try:
            done, _ = await asyncio.wait((waiter,), timeout=timeout_s)
            return bool(done)
        finally:
            waiter.cancel()

    def _check(self) -> None:
        self._lifecycle.check()
        self._check_loop()

    def _check_loop(self) -> None:
        if _running_loop() is not self._loop:
            raise UsageError("an asyncio producer can be used only on its own event loop")


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as failure:
        raise UsageError(
            "make and use an asyncio producer in coroutines: no event loop is running here"
        ) from failure
