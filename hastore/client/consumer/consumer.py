"""Read a topic, queue by queue, from any replica.

    with Consumer("flights", ["tcp://127.0.0.1:10911"], group="delays") as consumer:
        for message in consumer.poll(timeout_s=1.0):
            ...
        consumer.commit()

A consumer reads up to the readable offset: under a synchronous master, the messages that enough
slaves have confirmed. Messages of one queue come in order; the queues take turns. While the caller
handles messages, the next ones are fetched, up to `prefetch_bytes`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from importlib import import_module

from hastore.client.arguments import refusal
from hastore.client.connections.bootstrap import cluster_of, parse_bootstrap
from hastore.client.connections.calls import Blocking, Client, ClientCall
from hastore.client.connections.requester import Requester, Steps
from hastore.client.consumer.consumer_core import (
    POLL_S,
    ConsumerCore,
    OnLost,
    ReadFrom,
    Reading,
    Start,
    make_read_options,
    make_reading,
)
from hastore.client.consumer.subscription import RebalanceListener, Topics
from hastore.client.lifecycle import describe
from hastore.client.messages import Message, Position
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ClientError, UsageError

_CLUSTER_MODULE = "hastore.client.consumer.cluster_consumer"


class ConsumerCalls(Client):
    """The constructor, properties and calls of both Consumers."""

    _core: ConsumerCore

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
        share: bool = False,
        listener: RebalanceListener | None = None,
        auto_commit_s: float | None = None,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect; raises UsageError, and ConfigError for the files of `security`.

        `group`: start from its committed positions and commit under its name. `start` is for queues
        without a committed position. `queues`: None reads all queues of the topic. `tags`
        ("red || green") or `sql` ("price > 10") names the messages that are wanted: the nodes send
        no others, and the positions move past those. `on_lost` says
        what happens when retention or a failover has removed a position: "raise" raises
        PositionLostError; the other values continue at the "earliest", the "latest" or the "common"
        position, which is the last that is still valid. `timeout_s` bounds each request; `poll` has
        a timeout of its own. With `share` the members of the group share the queues of one or more
        topics, see SharedConsumer: `topic` may be a sequence of names, prefixes that end in * and
        compiled patterns, `listener` is told which queues come and leave, and `auto_commit_s` is
        how often positions are committed by themselves. `security`: TLS, and who the client is; see
        hastore.Security.

        A pull returns up to `max_bytes`. `prefetch_bytes` bounds the records fetched or requested
        for the next polls. Even beyond this bound, each queue may have two pulls, each of 16 KiB or
        of one larger message. Small messages, once decoded, take about twice as much memory as
        their bytes.
        """
        check_unshared(share, listener, auto_commit_s)
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
        reading = make_reading(topic, group, queues, options)
        self._begin(parse_bootstrap(bootstrap), reading, security, clock)

    def _begin(
        self,
        addresses: tuple[str, ...],
        reading: Reading,
        security: SecurityLike,
        clock: Clock,
        of_group: tuple[str, str] | None = None,
    ) -> None:
        requester = Requester(addresses, clock, security, of_group=of_group)
        core = ConsumerCore(requester, clock, reading)
        super().__init__(core, describe(self._kind, addresses, reading.topic))

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

    @property
    def paused(self) -> list[int]:
        """The queues that are paused."""
        queues = self._core.fetcher.queues
        return sorted(queue_id for queue_id, queue in queues.items() if queue.is_paused)

    @ClientCall
    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> Steps[list[Message]]:
        """Return up to `max_messages` messages; waits up to `timeout_s` for the first.

        Returns [] if none came or the consumer was closed meanwhile.

        Raises PositionLostError if a position is lost and `on_lost` is "raise"; the caller then
        seeks and polls again. Raises CorruptRecordError if a replica returned damaged bytes. The
        position stays before these bytes, and the next poll asks another replica if there is one.
        """
        return self._core.poll(max_messages, timeout_s)

    @ClientCall
    def positions(self) -> Steps[dict[int, Position]]:
        """Return the position in each queue."""
        return self._core.positions()

    @ClientCall
    def position(self, queue: int) -> Steps[Position]:
        """Return the position in a queue."""
        return self._core.position(queue)

    @ClientCall
    def seek(self, queue: int, position: int | Position) -> Steps[None]:
        """Continue at a queue offset, or at a Position that the caller has kept."""
        return self._core.seek(queue, position)

    @ClientCall
    def seek_to_earliest(self) -> Steps[None]:
        """Continue at the first message that exists, in every queue."""
        return self._core.seek_to_ends(0)

    @ClientCall
    def seek_to_latest(self) -> Steps[None]:
        """Continue after the last readable message, in every queue."""
        return self._core.seek_to_ends(1)

    @ClientCall
    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> Steps[None]:
        """Continue at the first message stored at or after a time, in every queue.

        The time is an int of ms since 1970 (UTC), or a datetime; raises UsageError for a datetime
        without a time zone.
        """
        return self._core.seek_to_time(timestamp_ms)

    @ClientCall
    def end_offsets(self) -> Steps[dict[int, int]]:
        """Return the end of each queue that is read."""
        return self._core.end_offsets()

    @ClientCall
    def lag(self) -> Steps[dict[int, int]]:
        """Return how many messages are left in each queue that is read."""
        return self._core.lag()

    @ClientCall
    def pause(self, queues: Sequence[int] | None = None) -> Steps[None]:
        """Return no messages of these queues until `resume`; None: of all that are read."""
        return self._core.pause(queues, paused=True)

    @ClientCall
    def resume(self, queues: Sequence[int] | None = None) -> Steps[None]:
        """Return messages of these queues again; None: of all."""
        return self._core.pause(queues, paused=False)

    @ClientCall
    def commit(self) -> Steps[None]:
        """Commit the positions under the group's name, as durable as any message.

        Raises what Producer.send_sync would; committing again is harmless.

        If the group's position in a queue is ahead of this consumer's, commits nothing and raises
        PositionBehindError: probably another consumer has committed under this group, and consumers
        of one group do not share its messages. The group's position may go back only in a queue in
        which a seek or `on_lost` has moved this consumer. More than 1,000 queues are committed in
        parts: if one fails, those before it are committed.
        """
        return self._core.commit()

    @ClientCall
    def committed(self) -> Steps[dict[int, Position]]:
        """Return the group's committed positions."""
        return self._core.committed()


class Consumer(ConsumerCalls, Blocking):
    """Read messages and commit positions; one thread at a time, but any thread may call `close`.

    A queue's position is after its last message that `poll` has returned or an iteration has
    yielded. A call that raises, even an exception from a signal handler, has moved no position: the
    next call returns the same messages.
    """

    _kind = "Consumer"
    _sharing: type[Consumer]  # the class of those with `share`, which sets this

    def __new__(
        cls,
        topic: object = None,
        bootstrap: str | Sequence[str] | None = None,
        *,
        share: object = False,
        **_named: object,
    ) -> Consumer:
        """Make a SharedConsumer if its queues shall be shared, a ClusterConsumer for a cluster."""
        if cls is Consumer and share is not True and cluster_of(bootstrap) is not None:
            # By name, because that module needs this one, and only such a client needs it.
            made: Consumer = object.__new__(import_module(_CLUSTER_MODULE).ClusterConsumer)
            return made
        return super().__new__(cls._sharing if share is True and cls is Consumer else cls)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages as they arrive, until the consumer is closed.

        The position moves past each message when that message is yielded. A `commit` in the loop's
        body or after a `break` covers the messages that the body has seen.
        """
        core, life = self._core, self._lifecycle
        while not life.closed:
            try:
                queue = self._run(core.ready(POLL_S))
            except ClientError:
                if not life.closed:
                    raise
                return  # another thread has closed it before the call began
            while queue is not None and not life.closed:
                ready, at = queue.ready, queue.taken  # read anew: the loop's body may seek or poll
                if at >= len(ready):
                    break
                message = ready[at]
                # No call comes between here and the yield, so no signal handler runs in between.
                queue.taken, queue.current = at + 1, message
                yield message


def check_unshared(
    share: bool, listener: RebalanceListener | None, auto_commit_s: float | None
) -> None:
    """Raise UsageError for arguments of a consumer that shares queues."""
    if share is not False:
        raise refusal("share", share, "True or False")
    if listener is not None or auto_commit_s is not None:
        raise UsageError("listener and auto_commit_s are for consumers with share=True")
