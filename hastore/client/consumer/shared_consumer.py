"""Read topics together with other members of a group: each queue has one reader.

    with Consumer(["flights", "delays-*"], group="board", share=True) as consumer:
        while True:
            for message in consumer.poll():
                ...
            consumer.commit()

Its members may be consumers of hastore and RocketMQ's. Each polls often: a member that does not
poll for SESSION_MS (docs/client-protocol.md) loses its queues. There is no thread that would poll
in its place.
"""

from __future__ import annotations

import datetime
import inspect
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.connections.calls import Client, ClientCall
from hastore.client.connections.requester import Requester, Steps
from hastore.client.consumer.consumer import Consumer, ConsumerCalls
from hastore.client.consumer.consumer_core import (
    POLL_S,
    OnLost,
    ReadFrom,
    Start,
    make_read_options,
)
from hastore.client.consumer.shared_core import SharedCore, make_shared_reading
from hastore.client.consumer.sharing import ASSIGNED, REVOKED, Event
from hastore.client.consumer.subscription import RebalanceListener, TopicQueue, Topics
from hastore.client.lifecycle import describe
from hastore.client.messages import Message, Position
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ClientError, UsageError


class SharedCalls(Client):
    """The constructor, properties and calls of consumers that share queues."""

    _core: SharedCore

    def __init__(
        self,
        topic: Topics,
        bootstrap: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        queues: Sequence[int] | None = None,
        tags: str | None = None,
        sql: str | None = None,
        start: Start = "earliest",
        on_lost: OnLost = "raise",
        read_from: ReadFrom = "slaves",
        max_bytes: int = 1024 * 1024,
        prefetch_bytes: int = 8 * 1024 * 1024,
        timeout_s: float = 10.0,
        share: bool = True,
        listener: RebalanceListener | None = None,
        auto_commit_s: float | None = None,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect; see hastore.Consumer. The first call of `poll` joins the group."""
        if share is not True:
            raise UsageError("share: a SharedConsumer shares its queues; for one that does not "
                             "use Consumer")  # fmt: skip
        options = make_read_options(
            start=start,
            on_lost=on_lost,
            read_from=read_from,
            max_bytes=max_bytes,
            prefetch_bytes=prefetch_bytes,
            timeout_s=timeout_s,
            clock=clock,
            tags=tags,
            sql=sql,
        )
        reading = make_shared_reading(topic, group, queues, listener, auto_commit_s, options)
        self._listener = listener
        # Held while the listener is called; reentrant: the listener, and a signal handler, may
        # close. Threads only: tasks have locks of their own.
        self._telling = threading.RLock()
        addresses = parse_bootstrap(bootstrap)
        core = SharedCore(Requester(addresses, clock, security), clock, reading)
        what = describe(self._kind, addresses, str(reading.wanted))
        super(ConsumerCalls, self).__init__(core, what)  # type: ignore[misc]

    @property
    def topic(self) -> str:
        """The topics and patterns that are read, as a text."""
        return str(self._core.wanted)

    @property
    def group(self) -> str:
        """The group whose members share the queues."""
        return self._core.group

    @property
    def source(self) -> str | None:
        """The address of the replica that is read, None while the consumer looks for one."""
        return self._core.fetcher.source

    @property
    def member(self) -> str:
        """The id of this member, as the group and the nodes know it."""
        return self._core.sharing.member

    @property
    def members(self) -> list[str]:
        """The ids of all members, as the master has said them last."""
        joined = self._core.sharing.joined
        return [] if joined is None else list(joined.members)

    @property
    def assignment(self) -> list[TopicQueue]:
        """The queues that are this member's now."""
        return sorted(self._core.fetcher.mine)

    @property
    def _handles(self) -> dict[TopicQueue, int]:
        """A number for each of these queues, which is another one if it went and came back."""
        return {name: queue.handle for name, queue in self._core.fetcher.mine.items()}

    @property
    def paused(self) -> list[TopicQueue]:
        """The queues that are paused."""
        return sorted(name for name, one in self._core.fetcher.mine.items() if one.is_paused)

    @ClientCall
    def positions(self) -> Steps[dict[TopicQueue, Position]]:
        """Return the position in each queue that is this member's."""
        return self._core.positions()

    @ClientCall
    def position(self, queue: TopicQueue) -> Steps[Position]:
        """Return the position in a queue."""
        return self._core.position(queue)

    @ClientCall
    def seek(self, queue: TopicQueue, position: int | Position) -> Steps[None]:
        """Continue at a queue offset, or at a Position that the caller has kept."""
        return self._core.seek(queue, position)

    @ClientCall
    def seek_to_earliest(self) -> Steps[None]:
        """Continue at the first message that exists, in every queue of this member's."""
        return self._core.seek_to_ends(0)

    @ClientCall
    def seek_to_latest(self) -> Steps[None]:
        """Continue after the last readable message, in every queue of this member's."""
        return self._core.seek_to_ends(1)

    @ClientCall
    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> Steps[None]:
        """Continue at the first message stored at or after a time, in every queue of this member's.

        The time is as for hastore.Consumer.
        """
        return self._core.seek_to_time(timestamp_ms)

    @ClientCall
    def commit(self) -> Steps[None]:
        """Commit the positions of the queues that are this member's, as durable as any message.

        Raises FencedError if one of them is another member's by now: nothing of its topic is
        committed then. If one was lost before its position was committed, each commit raises it,
        and commits nothing, until `poll` has told the listener. Raises what Producer.send_sync
        would; committing again is harmless.
        """
        return self._core.commit()

    @ClientCall
    def send_back(
        self,
        message: Message,
        delay_level: int | None = None,
        *,
        max_attempts: int | None = None,
        dead_letter: bool = False,
    ) -> Steps[None]:
        """Have a message that cannot be handled now delivered to the group again, after a delay.

        The master puts a copy into the group's topic of retries (`%RETRY%` and the group's name),
        as durable as a commit; commit then as usual, and go on. One member gets it after the delay
        of this level (`store.message_delay_level`: 1 is a second, 18 two hours); None: 10 s, then
        longer with each attempt. After `max_attempts`, by default as many as the group's settings
        say (16), or at once with `dead_letter=True`, it goes to `%DLQ%` and the group's name, and
        stays there for whoever looks after it.

        If the call's outcome is unknown, repeat it: the message may come twice then, as any may.
        Raises MessageIllegalError if the message is not in the master's log any more or the
        group's settings or its name allow no retries, and else what Producer.send_sync would.
        """
        return self._core.send_back(message, delay_level, max_attempts, dead=dead_letter)

    @ClientCall
    def committed(self) -> Steps[dict[TopicQueue, Position]]:
        """Return the group's committed positions in all its topics."""
        return self._core.committed()

    @ClientCall
    def end_offsets(self) -> Steps[dict[TopicQueue, int]]:
        """Return the end of each queue that is this member's."""
        return self._core.end_offsets()

    @ClientCall
    def lag(self) -> Steps[dict[TopicQueue, int]]:
        """Return how many messages this member has left in each of its queues."""
        return self._core.lag()

    @ClientCall
    def pause(self, queues: Iterable[TopicQueue] | None = None) -> Steps[None]:
        """Return no messages of these queues until `resume`; None: of all that it has now.

        They stay this member's. A queue that comes anew is not paused.
        """
        return self._core.pause(queues, paused=True)

    @ClientCall
    def resume(self, queues: Iterable[TopicQueue] | None = None) -> Steps[None]:
        """Return messages of these queues again; None: of all."""
        return self._core.pause(queues, paused=False)


class SharedConsumer(SharedCalls, Consumer):  # type: ignore[misc]
    """A hastore.Consumer with `share=True`; one thread at a time, but any thread may `close`."""

    _kind = "SharedConsumer"
    _core: SharedCore  # type: ignore[assignment]
    _poller: Any = None  # the thread of the last poll

    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[Message]:
        """Return up to `max_messages` messages; waits up to `timeout_s` for the first.

        Calls the listener when queues come or leave. Returns [] if none came, if no queue is this
        member's, or if the consumer was closed meanwhile. Raises as Consumer.poll does, and what
        the listener raises.
        """
        core = self._core
        self._lifecycle.check_usable()
        asked, first = core.polling(max_messages, timeout_s), True
        self._poller = threading.current_thread()
        while True:
            found = self._run(core.poll(asked, first=first))
            if isinstance(found, Event):
                first = False
                before, core.calls = core.calls, core.calls + 1
                try:
                    with self._telling:
                        if self._lifecycle.closed:  # by another thread, since the steps ended
                            return []
                        self._tell(found)
                    core.told(found)
                except Exception:
                    if not core.is_cut:  # else a signal handler's, in a call of the listener
                        core.told(found)
                    raise
                finally:
                    core.calls = before
                if self._lifecycle.closed:
                    return []
                continue
            # This comes last: after an earlier interrupt, the next call returns the same messages.
            core.fetcher.undo = None
            return found

    def _tell(self, event: Event) -> None:
        method = method_for(self._listener, event)
        if method is not None and inspect.isawaitable(method(list(event.queues))):
            raise UsageError("the listener's methods are coroutines: use hastore.aio.Consumer")

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they arrive, until it is closed; the position moves with each.

        Like `poll`, it joins the group, calls the listener and commits if `auto_commit_s` is set.
        """
        while not self._lifecycle.closed:
            try:
                yield from self.poll(1, POLL_S)
            except ClientError:
                if not self._lifecycle.closed:
                    raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; after an exception the messages of the last poll count as not processed."""
        self._close(all_done=kind is None)

    def close(self) -> None:
        """Leave the group and close the connections.

        Calls `on_revoked`, commits what polls have returned if `auto_commit_s` is set, and gives
        the locks back, so that other members go on at once; waits for at most `timeout_s`, and
        the listener. A poll under way in another thread returns []. If it has called the listener,
        that call ends first. If another thread has polled last, and still runs, the messages of
        that poll count as not processed. A signal handler in the polling thread cannot be told from
        the thread itself: its `close` counts them as processed.
        """
        self._close(all_done=True)

    def _close(self, *, all_done: bool) -> None:
        life, core = self._lifecycle, self._core
        if life.closed or life.forked:
            super().close()
            return
        core.stop()
        poller = self._poller
        if poller is not None and poller is not threading.current_thread() and poller.is_alive():
            all_done = False  # it may be at work on them; while a poll is under way there are none
        is_silent = self._telling.acquire(timeout=core.timeout_s)
        deadline = self._requester.deadline(core.timeout_s)
        try:
            with self._lock:
                if not self._in_call and not life.closed:  # else a signal handler has called
                    self._leave(self._requester.left_s(deadline), all_done=all_done)
        finally:
            super().close()
            if is_silent:
                self._telling.release()

    def _leave(self, within_s: float, *, all_done: bool) -> None:
        """Tell the listener, and leave the group; the listener's time does not count."""
        core, mine, requester = self._core, self.assignment, self._requester
        try:
            if mine and self._listener is not None:
                self._tell(Event(REVOKED, mine))
        except Exception:  # the locks are given back first
            self._run(core.leave(all_done=all_done, deadline=requester.deadline(within_s)))
            raise
        self._run(core.leave(all_done=all_done, deadline=requester.deadline(within_s)))


def method_for(listener: RebalanceListener | None, event: Event) -> Any:
    """Return the listener's method for an event; None without a listener."""
    if listener is None:
        return None
    if event.kind == ASSIGNED:
        return listener.on_assigned
    return listener.on_revoked if event.kind == REVOKED else listener.on_fenced


Consumer._sharing = SharedConsumer
