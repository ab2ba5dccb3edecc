"""Fetches messages from one replica, one pull per queue in flight; leaves a replica that stalls.

The records that a pull has brought are decoded when the reader needs their messages. While the
reader takes them, the next pull is in flight. So each queue (`QueueReader`) holds at most two
pulls: one as messages, one as records or in flight. The bytes that each pull requests are limited
so that the sum over all queues stays within `prefetch_bytes`. Still, the sum may exceed it: each
pull requests at least 16 KiB (or `max_bytes`, if that is less) and returns at least one message,
whatever its size.

Slaves are asked first. The fetcher switches to another replica when the connection breaks, when the
replica does not answer, or when its readable offset has not moved for a second while another's is
greater.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from hastore.client.connections.requester import Requester, Steps, error_of
from hastore.client.connections.transport import Arrival
from hastore.client.messages import Message, Position, decode_messages
from hastore.clock import Clock
from hastore.errors import ClientError, CorruptRecordError, NotAuthenticatedError, PositionLostError
from hastore.protocol import api


class PulledRecords(NamedTuple):
    """The reply to one pull: `number` records as stored, and the position after them.

    If it is filtered, records that do not match may lie between the last one and that position.
    """

    payload: bytes
    number: int
    epochs: list[tuple[int, int]]
    after: Position
    is_filtered: bool = False


@dataclass(slots=True, eq=False)
class QueueReader:
    """One queue: `current` is the reader's position, `fetch` the position of the next pull.

    `current` is a Position, or the last message that the reader has taken. The fetched messages
    after `current` may be dropped and fetched again. `fetch` is None while the next pull must wait
    until the reader has taken all messages. That pull begins at the reader's position.
    """

    queue_id: int
    current: Position | Message
    fetch: Position | None
    chunk: PulledRecords | None = None
    ready: list[Message] = field(default_factory=list)  # decoded
    taken: int = 0  # how many messages of `ready` were taken
    damage: CorruptRecordError | None = None  # in the bytes after `ready`
    rid: int | None = None
    sent_ms: float = 0.0
    not_before_ms: float = 0.0
    lost: PositionLostError | None = None
    # The replicas that do not have the position: the first queue offset that each still has, or, if
    # it is behind, the end of what it has.
    gone_at: dict[str, int] = field(default_factory=dict)
    # The replicas that were left before they had said that, and then were asked once more.
    asked_again: set[str] = field(default_factory=set)
    # The replicas that cannot give the next message, once one has said that it is damaged there.
    unreadable: dict[str, str] = field(default_factory=dict)  # why
    # With a filter: the last message of `ready`, or the last one taken, and the position behind the
    # others that the node has looked at after it.
    last: Message | None = None
    after: Position = field(default=Position(0))
    is_paused: bool = False  # its messages are not given

    @property
    def key(self) -> int:
        """Its key in `Fetcher.queues`."""
        return self.queue_id

    @property
    def next(self) -> Position:
        """The reader's position."""
        stand = self.current
        if stand is self.last:
            return self.after
        return stand.next_position if isinstance(stand, Message) else stand

    @property
    def is_drained(self) -> bool:
        """Whether all fetched messages were taken."""
        return self.chunk is None and self.taken == len(self.ready)

    def seek(self, position: Position) -> None:
        """Continue at a position; drops all messages fetched or in flight."""
        self.current = self.fetch = position
        self.chunk = None
        self.ready, self.taken = [], 0
        self.damage = self.last = None
        self.rid = None
        self.not_before_ms = 0.0
        self.lost = None
        self.gone_at.clear()
        self.asked_again.clear()
        self.unreadable.clear()

    def pass_by(self, after: Position) -> None:
        """Go on behind messages that do not match, once those fetched before are taken."""
        self.fetch = after
        self.unreadable.clear()
        if self.last is not None and (self.current is self.last or not self.is_drained):
            self.after = after
        else:
            self.current = after

    def take_ready(self, most: int) -> list[Message]:
        """Return up to `most` of the decoded messages."""
        begin, ready = self.taken, self.ready
        if begin == 0 and len(ready) <= most:
            messages, self.ready = ready, []
        else:
            messages = ready[begin : begin + most]
            self.taken = begin + len(messages)
            if self.taken == len(ready):
                self.ready, self.taken = [], 0
        if messages:
            self.current = messages[-1]
        return messages

    def decode(self, chunk: PulledRecords) -> None:
        """Decode a chunk; records after damaged bytes are dropped."""
        if self.last is not None and self.current is self.last:
            self.current = self.after
        self.last = None
        self.ready, damage = decode_messages(chunk.payload, chunk.epochs)
        self.taken = 0
        if damage is None:
            last = self.ready[-1].offset if self.ready else None
            behind = chunk.after.offset
            if len(self.ready) == chunk.number and (
                behind in (None, last) or (chunk.is_filtered and (last or 0) < (behind or 0))
            ):
                if chunk.is_filtered and self.ready:
                    self.last, self.after = self.ready[-1], chunk.after
                return
            text = f"a reply states {chunk.number} messages but does not hold them"
            damage = CorruptRecordError(text)
            self.ready = []
        self.damage = damage
        self.rid = self.fetch = None  # ignores the answer of the pull in flight


WAIT_MS = 1_000  # of a long poll
ANSWER_MS = 1_500.0  # after WAIT_MS and this time without an answer, another replica is asked
QUIET_MS = 300.0  # without a byte of it; before, the answer may be on its way
REFRESH_MS = 1_000.0
RETRY_MS = 50.0
AGAIN_MS = 500.0  # until a queue is asked again whose pull the node did not let wait
PUMP_MS = 1.0  # between reads from the network, while there are messages to take
PULL_BYTES_MIN = 16 * 1024
_NOTHING = (api.PullStatus.NO_NEW, api.PullStatus.NO_SUCH_QUEUE)
ON_LOST = ("raise", "earliest", "latest", "common")


class Fetcher:
    """Keep messages of all queues available; used by one thread at a time."""

    def __init__(
        self,
        requester: Requester,
        topic: str,
        clock: Clock,
        *,
        max_bytes: int,
        prefetch_bytes: int,
        prefer_master: bool,
        on_lost: str,
        wanted: api.Filter | None = None,
        first_on_arrival: Callable[[Arrival], None] | None = None,
    ) -> None:
        """Prepare; from now on `requester` delivers its arrivals here.

        `first_on_arrival` gets each arrival before the fetcher does.
        """
        self._requester = requester
        self._topic = topic
        self._clock = clock
        self._max_bytes = max_bytes
        self._prefetch_bytes = prefetch_bytes
        self._prefer_master = prefer_master
        self._on_lost = on_lost
        self.wanted = wanted
        self._first_on_arrival = first_on_arrival
        self.queues: dict[int, QueueReader] = {}
        self.undo: list[tuple[QueueReader, Position | Message]] | None = None
        # `sought`: the keys of queues that a seek or `on_lost` has moved, until the core takes them
        # out. `seeking`: those of the last seek, until `settle` moves them to `sought` or `recover`
        # drops them.
        self.sought: set[int] = set()
        self.seeking: frozenset[int] = frozenset()
        self.source: str | None = None
        self._forbidden: ClientError | None = None  # raised by the next `advance`
        self._first_queue = 0
        # Replicas that have stalled or failed since the last good reply.
        self._rejected: set[str] = set()
        self._seen_readable = -1
        self._map_rid: int | None = None  # of the map that `source` was asked for, until it is read
        self._next_refresh_ms = 0.0
        self._next_pump_ms = 0.0
        requester.deliver_to(self._on_arrival)

    def take_messages(self, most: int) -> list[Message]:
        """Take messages from the queues in turn, starting with another queue each time.

        `undo` then has each queue's earlier position. The caller sets `undo` to None once the
        messages are delivered; until then `recover` restores these positions.

        Raises PositionLostError or CorruptRecordError for a queue that has no messages left and has
        lost its position, or has received a damaged record. It raises only if the queues before
        this one gave no messages in this call. After a CorruptRecordError, the queue's next pull
        starts at the reader's position, and goes to another replica if there is one.
        """
        taken: list[Message] = []
        moved: list[tuple[QueueReader, Position | Message]] = []
        for queue in self._in_turn():
            while len(taken) < most and self._has_ready(queue):
                moved.append((queue, queue.current))
                self.undo = moved
                part = queue.take_ready(most - len(taken))
                taken = taken + part if taken else part
            if len(taken) >= most:
                break
            if not taken:
                self._raise_problem(queue)
        return taken

    def find_ready(self) -> QueueReader | None:
        """Return a queue with decoded messages or None; raises what `take_messages` does."""
        for queue in self._in_turn():
            if self._has_ready(queue):
                return queue
            self._raise_problem(queue)
        return None

    def seek(self, places: Mapping[int, Position]) -> None:
        """Continue at these positions, by key; the caller sets `undo` to None as after a take."""
        queues = [self.queues[key] for key in places if key in self.queues]
        self.undo = [(queue, queue.current) for queue in queues]
        self.seeking = frozenset(queue.key for queue in queues)
        for queue in queues:
            queue.seek(places[queue.key])

    def settle(self) -> None:
        """Count the last seek's queues as sought: the seek has returned to its caller."""
        self.sought |= self.seeking
        self.seeking = frozenset()

    def recover(self) -> None:
        """Undo the moves of an interrupted call, and drop everything fetched."""
        self.seeking = frozenset()
        for queue, stand in reversed(self.undo or ()):
            queue.current = stand
        for queue in self.queues.values():
            queue.seek(queue.next)
        self.undo = None
        self._next_refresh_ms = self._next_pump_ms = 0.0

    def _in_turn(self) -> Iterator[QueueReader]:
        queues = [queue for queue in self.queues.values() if not queue.is_paused]
        self._first_queue += 1
        for index in range(len(queues)):
            yield queues[(self._first_queue + index) % len(queues)]

    def _has_ready(self, queue: QueueReader) -> bool:
        """Return whether a queue has messages.

        If no decoded message is left, its next pull is sent and its chunk is decoded first.
        """
        if queue.taken < len(queue.ready):
            return True
        chunk = queue.chunk
        if chunk is None or queue.damage is not None:
            return False
        queue.chunk = None
        if queue.fetch is not None:
            self._ask(queue, self._clock.monotonic_ms())
        queue.decode(chunk)
        return bool(queue.ready)

    def _raise_problem(self, queue: QueueReader) -> None:
        if queue.lost is not None:
            raise queue.lost
        damage = queue.damage
        if damage is not None:
            queue.seek(queue.next)
            self._switch_replica()
            raise damage

    def pump(self) -> None:
        """Read from the network if PUMP_MS have passed since the last time; does not wait."""
        if self._clock.monotonic_ms() >= self._next_pump_ms:
            self.advance()

    def step(self, timeout_s: float) -> Steps[None]:
        """Keep pulls in flight and wait once, at most `timeout_s`, for an arrival."""
        wait_s = min(self.advance(), timeout_s)
        if wait_s > 0.0:
            yield wait_s

    def advance(self) -> float:
        """Keep pulls in flight; returns the seconds until there is something else to do."""
        arrived = self._requester.collect()
        self._raise_refusal()
        now = self._clock.monotonic_ms()
        self._next_pump_ms = now + PUMP_MS
        self._refresh(now)
        self._choose_replica()
        wait_ms = self._next_refresh_ms - now
        for queue in self.queues.values():
            if queue.rid is not None and now > queue.sent_ms + WAIT_MS + ANSWER_MS:
                self._leave_if_quiet(now)
            wait_ms = min(wait_ms, self._ask(queue, now))
        return 0.0 if arrived else max(0.0, wait_ms) / 1000.0

    def _raise_refusal(self) -> None:
        """Raise if the identity may not read the topic, or no node accepts this client."""
        forbidden, self._forbidden = self._forbidden, None
        if forbidden is not None:
            raise forbidden
        refused = self._requester.cluster.take_refused() if self.source is None else None
        if refused is not None:
            raise NotAuthenticatedError(refused)

    def _ask(self, queue: QueueReader, now: float) -> float:
        """Send the queue's next pull if it is due; returns the ms until the next call is due."""
        if queue.rid is not None or queue.chunk is not None:
            return REFRESH_MS
        if queue.lost is not None or queue.damage is not None:
            return REFRESH_MS
        if queue.fetch is None and queue.is_drained:
            queue.fetch = queue.next
        if queue.fetch is None:
            return REFRESH_MS
        if now < queue.not_before_ms:
            return queue.not_before_ms - now
        rid = self._requester.next_rid()
        share = self._prefetch_bytes // (2 * len(self.queues))
        pull = api.Pull(
            rid, self._topic_of(queue), queue.queue_id, queue.fetch, api.MAX_PULL_MESSAGES,
            min(self._max_bytes, max(PULL_BYTES_MIN, share)), WAIT_MS,
            False, self._filter_of(queue),
        )  # fmt: skip
        if self.source is not None and self._requester.transport.send(self.source, pull):
            queue.rid, queue.sent_ms = rid, now
        else:
            queue.not_before_ms = now + RETRY_MS
        return REFRESH_MS

    def _topic_of(self, queue: QueueReader) -> str:
        return self._topic

    def _filter_of(self, queue: QueueReader) -> api.Filter | None:
        return self.wanted

    def _on_arrival(self, arrival: Arrival) -> None:
        if self._first_on_arrival is not None:
            self._first_on_arrival(arrival)
        reply = arrival.reply
        if reply is None:
            if arrival.up:
                self._next_refresh_ms = 0.0
            elif arrival.address == self.source:
                self._switch_replica()
        elif arrival.address == self.source:
            if reply.rid == self._map_rid:
                self._map_rid = None
            queue = next((q for q in self.queues.values() if q.rid == reply.rid), None)
            if queue is not None:
                queue.rid = None
                if isinstance(reply, api.Pulled):
                    self._pulled(queue, reply, arrival.payload)
                else:  # refused
                    queue.not_before_ms = self._clock.monotonic_ms() + RETRY_MS
                    if not isinstance(reply, api.Failed):
                        self._switch_replica()
                    elif reply.status == api.Status.FORBIDDEN:
                        self._forbidden = error_of(reply)
                    elif reply.status == CorruptRecordError.__name__:
                        self._refused_as_damaged(queue, reply.reason)
                    elif reply.status != api.Status.BUSY:
                        self._switch_replica()

    def _pulled(self, queue: QueueReader, reply: api.Pulled, payload: bytes) -> None:
        status = reply.status
        if status in _NOTHING:
            # A node lets so many pulls of a connection wait, and answers the others at once.
            now = self._clock.monotonic_ms()
            if now < queue.sent_ms + WAIT_MS / 2:
                queue.not_before_ms = now + AGAIN_MS
        if status is api.PullStatus.FOUND:
            queue.gone_at.clear()
            queue.asked_again.clear()
            queue.unreadable.clear()
            after = reply.after
            queue.fetch = None if reply.last_offset is None else after
            is_filtered = self._filter_of(queue) is not None
            queue.chunk = PulledRecords(payload, reply.count, reply.epochs, after, is_filtered)
            self._rejected.clear()
        elif status is api.PullStatus.NO_MATCH:
            queue.pass_by(reply.after)
            self._rejected.clear()
        elif not queue.is_drained:
            self._pulled_nothing_ahead(queue, status)
        elif (
            status is api.PullStatus.OFFSET_TOO_LARGE
            and self.source == self._requester.cluster.master
        ):
            text = f"beyond the end, {reply.max_queue_offset}"
            self._lose_position(queue, text, reply, Position(reply.max_queue_offset))
        elif queue.unreadable and status is not api.PullStatus.HISTORY_DIFFERS:
            self._cannot_read(queue, f"{status.value}, but another replica has that message")
        elif status is api.PullStatus.OFFSET_TOO_SMALL:
            self._pulled_too_early(queue, reply)
        elif status is api.PullStatus.OFFSET_TOO_LARGE:
            queue.not_before_ms = self._clock.monotonic_ms() + RETRY_MS
            if self.source is not None:
                queue.asked_again.add(self.source)  # it is behind: it has never had the message
                if queue.gone_at:
                    queue.gone_at[self.source] = reply.max_queue_offset
            self._switch_replica()  # a slave may lag: only the master knows the end
        elif status is api.PullStatus.HISTORY_DIFFERS:
            common = reply.common or Position(reply.min_queue_offset)
            text = f"after a record that a failover cut away; {common.queue_offset} is still valid"
            self._lose_position(queue, text, reply, common)

    def _refused_as_damaged(self, queue: QueueReader, reason: str) -> None:
        """Handle a refusal of the message at the pull's position, which is damaged there."""
        if queue.is_drained:
            self._cannot_read(queue, reason)
        else:
            queue.fetch = None  # until the reader has taken what was fetched before it

    def _cannot_read(self, queue: QueueReader, reason: str) -> None:
        """Ask another replica for the next message, which is damaged at one; raise if none is left.

        One that lags, or has removed the message, cannot give it: a reader must not stand still
        without a word, nor step over what may be repaired.
        """
        assert self.source is not None  # it has sent the reply
        queue.unreadable[self.source] = f"{self.source}: {reason}"
        told = queue.unreadable.keys() | queue.gone_at.keys()
        if all(one in told for one in self._heard()):
            queue.damage = CorruptRecordError("; ".join(queue.unreadable.values()))
        else:
            self._switch_replica()

    def _pulled_too_early(self, queue: QueueReader, reply: api.Pulled) -> None:
        """Ask another replica for a position that this one has removed; lose it if none has it.

        Each node has a retention of its own, and a node that was added later may begin later. One
        that was left, as it stood still or was silent, may be the only one that has it.
        """
        assert self.source is not None  # it has sent the reply
        queue.gone_at[self.source] = reply.min_queue_offset
        others = set(self._heard()) - queue.gone_at.keys()
        left = others & self._rejected
        if others - left or left - queue.asked_again:
            queue.asked_again |= left
            self._rejected = (self._rejected - left) | queue.gone_at.keys()
            self._switch_replica()
            return
        first = min(kept for kept in queue.gone_at.values() if kept > queue.next.queue_offset)
        # From there on it is read from the replicas that begin there; others begin later, or lag.
        begins = {address for address, kept in queue.gone_at.items() if kept == first}
        self._rejected = (self._rejected | queue.gone_at.keys()) - begins
        if self.source not in begins:
            self._switch_replica()
        text = f"before the first one kept, {first}"
        reply = msgspec.structs.replace(reply, min_queue_offset=first)
        self._lose_position(queue, text, reply, Position(first))

    def _pulled_nothing_ahead(self, queue: QueueReader, status: api.PullStatus) -> None:
        """Handle a reply without records to a pull ahead of the reader.

        A loss that the reply reports concerns the fetch position, not the reader's. If the history
        differs, a failover has cut the log: fetched messages are dropped, and the next pull asks
        for the reader's position at once. After any other loss, that pull is sent once the reader
        has taken all fetched messages.
        """
        if status is api.PullStatus.HISTORY_DIFFERS:
            queue.seek(queue.next)
        elif status is not api.PullStatus.NO_NEW:
            queue.fetch = None

    def _lose_position(
        self, queue: QueueReader, text: str, reply: api.Pulled, common: Position
    ) -> None:
        if self._on_lost == "raise":
            name = self._topic_of(queue)
            place = f"queue {queue.queue_id} of {name}: {queue.next.queue_offset} is {text}"
            queue.lost = PositionLostError(place, queue.queue_id, common, name)
            return
        self.sought.add(queue.key)
        if self._on_lost == "earliest":
            queue.seek(Position(reply.min_queue_offset))
        elif self._on_lost == "latest":
            queue.seek(Position(reply.max_queue_offset))
        else:
            queue.seek(common)

    # -- which replica

    def _refresh(self, now: float) -> None:
        if now < self._next_refresh_ms:
            return
        self._next_refresh_ms = now + REFRESH_MS
        maps = self._requester.cluster.maps
        mine = maps.get(self.source or "")
        if mine is not None:
            best = max(info.readable_offset for info in maps.values())
            # Else its map is old: a newer one may be unread yet, behind the answers to pulls.
            if self._map_rid is None:
                if mine.readable_offset < best and mine.readable_offset == self._seen_readable:
                    self._switch_replica()
                self._seen_readable = mine.readable_offset
        for address in self._requester.cluster.addresses:
            rid = self._requester.next_rid()
            self._requester.transport.send(address, api.AskMap(rid))
            if address == self.source:
                self._map_rid = rid

    def _heard(self) -> list[str]:
        """Return the replicas of the last epoch that are connected, the preferred ones first."""
        cluster, transport = self._requester.cluster, self._requester.transport
        epoch = max((info.epoch for info in cluster.maps.values()), default=0)
        heard = [
            address for address in cluster.replicas()
            if transport.is_up(address) and address in cluster.maps
            and cluster.maps[address].epoch == epoch
        ]  # fmt: skip
        if self._prefer_master:
            heard.reverse()
        return heard

    def _choose_replica(self) -> None:
        if self.source is not None:
            return
        heard = self._heard()
        fresh = [address for address in heard if address not in self._rejected]
        if not fresh:
            self._rejected.clear()
        self.source = next(iter(fresh or heard), None)
        self._seen_readable = -1
        self._map_rid = None

    def _leave_if_quiet(self, now: float) -> None:
        """Leave the replica, whose answer is late, unless that is being read.

        After a caller was away for long, all that has come meanwhile is read step by step.
        """
        source = self.source
        if source is None or now > self._requester.transport.heard_ms(source) + QUIET_MS:
            self._switch_replica()

    def _switch_replica(self) -> None:
        """Leave the replica; pulls in flight are sent again to the next replica."""
        if self.source is not None:
            self._rejected.add(self.source)
        self.source = None
        for queue in self.queues.values():
            queue.rid = None
