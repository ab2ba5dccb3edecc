"""hastore.Consumer and hastore.Admin for asyncio: their steps run on an event loop.

Runs a client's steps on an event loop, without a thread, for aio's Consumer and Admin.

Steps wait only in `_Sleeper.sleep`, after all arrivals are processed. Only there can a running call
be cancelled, so the core's state is consistent afterwards.

hastore.Admin for asyncio.

hastore.Consumer for asyncio.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Sequence

from hastore.client.connections.addresses import parse_bootstrap
from hastore.client.connections.requester import ClosedMeanwhile, Core, Requester, Result, Steps
from hastore.client.consumer.admin import AdminCore, QueueRanges
from hastore.client.consumer.consumer_core import (
    POLL_S,
    ConsumerCore,
    OnLost,
    ReadFrom,
    Start,
    make_reading,
)
from hastore.client.lifecycle import AsyncClosable, Lifecycle, describe
from hastore.client.messages import Message, NodeInfo, Position
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import HastoreError
from hastore.protocol.api import MapInfo


class AsyncClient(AsyncClosable):
    """Run a core's steps for coroutines of one event loop; one call at a time, others wait."""

    def __init__(self, core: Core, what: str) -> None:
        self._turns = asyncio.Lock()
        self._requester = core.requester
        self._lifecycle = Lifecycle(what, core.requester.abandon)
        self._lifecycle.watch(self, core.requester.drop)

    async def close(self) -> None:
        """Close the connections; a call under way in another task ends at once."""
        self._lifecycle.close()
        if self._lifecycle.forked:
            return
        self._requester.closing = True
        self._requester.transport.wake()
        async with self._turns:
            self._requester.close()

    async def _run(self, core: Core, steps: Steps[Result]) -> Result:
        """Run a core's steps; raises ClientError if the client is closed or forked."""
        self._lifecycle.check()
        await asyncio.sleep(0)  # other tasks run, and a task that loops can be cancelled
        async with self._turns:
            self._lifecycle.check()
            try:
                core.begin_call()
                result = await _drive(self._requester, steps)
                core.end_call()
            except (HastoreError, asyncio.CancelledError):  # the state is consistent
                core.end_call()
                raise
            finally:
                if self._requester.closing:
                    self._requester.close()
        return result


async def _drive(requester: Requester, steps: Steps[Result]) -> Result:
    """Run steps to their end; see Requester.run."""
    transport = requester.transport
    loop = asyncio.get_running_loop()
    sleeper = _Sleeper(loop)
    descriptor = transport.fileno()
    try:
        wait_s = next(steps)
        loop.add_reader(descriptor, sleeper.wake)
        while not requester.closing:
            arrivals = requester.collect()
            if not arrivals and wait_s > 0.0:
                due_s = transport.due_s()
                await sleeper.sleep(wait_s if due_s < 0.0 else min(wait_s, due_s))
                transport.sleep(0.0)  # consumes a wake-up
                arrivals = requester.collect()
            wait_s = steps.send(arrivals)
        steps.throw(ClosedMeanwhile("the client was closed"))
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        loop.remove_reader(descriptor)
        sleeper.end()
    raise RuntimeError("the steps yielded after the client was closed")


class _Sleeper:
    """One task's sleep, which ends at an event of a descriptor or at the timeout."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    async def sleep(self, timeout_s: float) -> None:
        """Sleep until `wake`, at most `timeout_s`."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def wake(self) -> None:
        """End the sleep."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self) -> None:
        """Drop the waiting Future: later wake-ups do nothing."""
        self._waiter = None


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
