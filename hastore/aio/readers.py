"""hastore.Consumer and hastore.Admin for asyncio: an event loop runs their steps, no thread.

Steps wait only in `_Sleeper.sleep`, after all arrivals are processed. Only there can a running call
be cancelled, so the core's state is consistent afterwards. The calls themselves are described with
the blocking clients (`AdminCalls`, `ConsumerCalls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from hastore.client.connections.calls import AnySteps, Client, Core, make_methods
from hastore.client.connections.requester import ClosedMeanwhile, Requester, Result, Steps
from hastore.client.consumer.admin import AdminCalls
from hastore.client.consumer.consumer import ConsumerCalls
from hastore.client.consumer.consumer_core import POLL_S
from hastore.client.consumer.shared_consumer import SharedCalls, method_for
from hastore.client.consumer.shared_core import Polling, SharedCore
from hastore.client.consumer.sharing import REVOKED, Event
from hastore.client.lifecycle import AsyncClosable
from hastore.client.messages import Message
from hastore.errors import ClientError, HastoreError

# The calls of listeners that this code is part of. A task that a listener makes, as `wait_for` and
# `gather` do, has it from there: what it asks for must not wait for the listener's end.
_CALLS: ContextVar[tuple[object, ...]] = ContextVar("_CALLS", default=())


class AsyncClient(Client, AsyncClosable):
    """Run a core's steps for coroutines of one event loop; one call at a time, others wait."""

    def __init__(self, core: Core, what: str) -> None:
        super().__init__(core, what)
        self._turns = asyncio.Lock()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        make_methods(cls, _awaitable)

    async def close(self) -> None:
        """Close the connections; a call under way in another task ends at once."""
        self._lifecycle.close()
        if self._lifecycle.forked:
            return
        self._requester.closing = True
        self._requester.transport.wake()
        async with self._turns:
            self._requester.close()

    async def _run(self, steps: Steps[Result]) -> Result:
        """Run a call's steps; raises ClientError if the client is closed or forked."""
        self._lifecycle.check_usable()
        await asyncio.sleep(0)  # other tasks run, and a task that loops can be cancelled
        async with self._turns:
            self._lifecycle.check_usable()
            core = self._core
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


def _awaitable(steps: AnySteps) -> Callable[..., Any]:
    async def call(self: AsyncClient, *args: Any, **kwargs: Any) -> Any:
        result = await self._run(steps(self, *args, **kwargs))
        # This comes last: after an earlier interrupt, the next call returns the same messages.
        self._core.mover.undo = None
        return result

    return call


async def _drive(requester: Requester, steps: Steps[Result]) -> Result:
    """Run steps to their end; see Requester.run_steps."""
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


class Admin(AdminCalls, AsyncClient):
    """Query a group; see hastore.Admin."""

    _kind = "aio.Admin"


class Consumer(ConsumerCalls, AsyncClient):
    """Read a topic; see hastore.Consumer.

    Tasks may share it: one call runs at a time, and each message goes to one task. A commit, also
    one of `auto_commit_s`, covers what other tasks have got and are still at work on.

    A cancelled call has moved no position: the next `poll` returns the same messages. A cancelled
    commit may still be stored. That does no harm: the consumer has reached all positions in it.
    """

    _kind = "aio.Consumer"

    def __new__(cls, *_given: object, share: object = False, **_named: object) -> Consumer:
        """Make a SharedConsumer if its queues shall be shared."""
        return super().__new__(SharedConsumer if share is True and cls is Consumer else cls)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages as they arrive, until the consumer is closed; see hastore.Consumer."""
        core, life = self._core, self._lifecycle
        while not life.closed:
            try:
                queue = await self._run(core.ready(POLL_S))
            except ClientError:
                if not life.closed:
                    raise
                return  # another task has closed it before the call had its turn
            while queue is not None and not life.closed:
                ready, at = queue.ready, queue.taken  # read anew: other tasks may take or seek
                if at >= len(ready):
                    break
                message = ready[at]
                # No call comes between here and the yield, so no signal handler runs in between.
                queue.taken, queue.current = at + 1, message
                yield message


class SharedConsumer(SharedCalls, Consumer):  # type: ignore[misc]
    """An aio.Consumer with `share=True`; see hastore.SharedConsumer.

    The listener's methods may be coroutines. Tasks may share it as they may share a Consumer; the
    listener is called in the task whose `poll` has found that the queues change. Until it has
    returned, the polls of other tasks wait: they would give queues back, or read them, too early.
    If it is cancelled, the next `poll` tells it again.
    """

    _kind = "aio.SharedConsumer"
    _core: SharedCore  # type: ignore[assignment]

    _polls: asyncio.Lock | None = None  # made by the first poll
    # The task of the last poll; weakly: it may refer to the consumer.
    _poller: weakref.ref[asyncio.Task[Any]] | None = None
    _told_by: frozenset[object] = frozenset()  # calls of the listener by polls, under way
    _ends: asyncio.Lock | None = None  # made by the first close
    _closing: object = None  # the call of the listener by the close, while it is under way

    async def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return up to `max_messages` messages; see hastore.SharedConsumer."""
        core = self._core
        self._lifecycle.check_usable()
        asked = core.polling(max_messages, timeout_s)
        if (task := asyncio.current_task()) is not None:
            self._poller = weakref.ref(task)
        if self._is_told:
            found = await self._poll(asked)  # the listener polls
        else:
            if self._polls is None:
                self._polls = asyncio.Lock()
            async with self._polls:
                found = await self._poll(asked)
        # This comes last: after an earlier interrupt, the next call returns the same messages.
        core.fetcher.undo = None
        return found

    async def _poll(self, asked: Polling) -> list[Message]:
        core, first = self._core, True
        while True:
            found = await self._run(core.poll(asked, first=first))
            if isinstance(found, Event):
                first = False
                call = object()
                self._told_by |= {call}
                core.calls += 1
                try:
                    await self._tell(found, call)
                    core.told(found)
                except Exception:
                    core.told(found)
                    raise
                finally:
                    core.calls -= 1
                    self._told_by -= {call}
                if self._lifecycle.closed:
                    return []
                continue
            return found

    async def _tell(self, event: Event, call: object) -> None:
        method = method_for(self._listener, event)
        if method is not None:
            before = _CALLS.set((*_CALLS.get(), call))
            try:
                answer = method(list(event.queues))
                if inspect.isawaitable(answer):
                    await answer
            finally:
                _CALLS.reset(before)

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages as they arrive, until it is closed; see hastore.SharedConsumer."""
        while not self._lifecycle.closed:
            try:
                messages = await self.poll(1, POLL_S)
            except ClientError:
                if not self._lifecycle.closed:
                    raise
                return
            for message in messages:
                yield message

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; after an exception the messages of the last poll count as not processed."""
        await self._close(all_done=kind is None)

    async def close(self) -> None:
        """Leave the group and close the connections; see hastore.SharedConsumer.

        It waits for the listener, if a poll of another task has called it. If it is cancelled, the
        connections end at once, and the locks with their time. If another task has polled last, and
        still runs, the messages of that poll count as not processed.
        """
        await self._close(all_done=True)

    async def _close(self, *, all_done: bool) -> None:
        life = self._lifecycle
        if life.closed or life.forked:
            await super().close()
            return
        self._core.stop()
        if self._closing is not None and self._closing in _CALLS.get():
            return  # the listener closes: it is told of that end now
        if self._ends is None:
            self._ends = asyncio.Lock()
        if self._ends.locked() and self._is_told:
            return  # the other task that closes waits for this call of the listener
        try:
            async with self._ends:
                if not life.closed:  # else another task has closed it
                    try:
                        if self._other_works:
                            all_done = False
                        await self._wait_polls()
                        await self._leave(all_done=all_done)
                    finally:
                        life.close()  # before another task has its turn
        finally:
            await super().close()

    @property
    def _is_told(self) -> bool:
        """Whether this code is part of a call of the listener by a poll."""
        return not self._told_by.isdisjoint(_CALLS.get())

    @property
    def _other_works(self) -> bool:
        """Whether another task may be at work on the messages of the last poll."""
        task = self._poller() if self._poller is not None else None
        return task is not None and task is not asyncio.current_task() and not task.done()

    async def _wait_polls(self) -> None:
        """Wait until no poll is under way, for a while: one may be calling the listener."""
        if self._polls is not None and not self._is_told:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._core.timeout_s), self._polls:
                    pass

    async def _leave(self, *, all_done: bool) -> None:
        mine = self.assignment
        try:
            if mine and self._listener is not None:
                self._closing = object()
                await self._tell(Event(REVOKED, mine), self._closing)
        except Exception:
            await self._give_back(all_done=all_done)  # first
            raise
        finally:
            self._closing = None
        await self._give_back(all_done=all_done)

    async def _give_back(self, *, all_done: bool) -> None:
        core = self._core
        deadline = self._requester.deadline(core.timeout_s)  # it may have to wait for its turn
        await self._run(core.leave(all_done=all_done, deadline=deadline))
