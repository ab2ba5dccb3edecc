"""Runs a client's steps on an event loop, without a thread, for aio's Consumer and Admin.

Steps wait only in `_Sleeper.sleep`, after all arrivals are processed. Only there can a running call
be cancelled, so the core's state is consistent afterwards.
"""

from __future__ import annotations

import asyncio

from hastore.client.connections.requester import ClosedMeanwhile, Requester, Result, Steps
from hastore.client.core import Core
from hastore.client.lifecycle import AsyncClosable, Lifecycle
from hastore.errors import HastoreError


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
