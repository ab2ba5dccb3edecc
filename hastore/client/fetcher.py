"""Fetch from a replica: one pull of each queue under way, another replica when one stalls.

A queue has a fetch position (where the next pull begins) and a chunk of fetched records that its
reader has not taken yet. Slaves are asked first; a replica is left when its link breaks, when it
does not answer, or when others can read further while it has not moved for a second.
"""

from __future__ import annotations

from dataclasses import dataclass

from hastore.client.links import Arrival
from hastore.client.requester import Requester
from hastore.client.results import Message, Position
from hastore.clock import Clock
from hastore.errors import PositionLostError
from hastore.protocol import api
from hastore.store.record import decode_record

WAIT_MS = 1_000  # of a long poll
ANSWER_MS = 1_500.0  # beyond it, before a replica is left
REFRESH_MS = 1_000.0
RETRY_MS = 50.0
POLICIES = ("raise", "earliest", "latest", "common")


@dataclass(slots=True, eq=False)
class QueueReader:
    """One queue: `next` is where its reader stands, `fetch` where the next pull begins."""

    queue_id: int
    next: Position
    fetch: Position
    chunk: bytes = b""
    chunk_at: int = 0
    epochs: list[tuple[int, int]] | None = None
    rid: int | None = None
    sent_ms: float = 0.0
    not_before_ms: float = 0.0
    lost: PositionLostError | None = None

    def seek(self, position: Position) -> None:
        """Go on from a position; what was fetched, or is on its way, is dropped."""
        self.next = self.fetch = position
        self.chunk, self.chunk_at = b"", 0
        self.rid = None
        self.not_before_ms = 0.0
        self.lost = None

    def take(self) -> Message | None:
        """Return the next fetched message."""
        if self.chunk_at >= len(self.chunk):
            return None
        record = decode_record(self.chunk, self.chunk_at)
        self.chunk_at += record.size
        if self.chunk_at >= len(self.chunk):
            self.chunk, self.chunk_at = b"", 0
        epoch = None
        for each, start in self.epochs or ():
            if start > record.physical_offset:
                break
            epoch = each
        message = Message(record, epoch)
        self.next = message.next_position
        return message


class Fetcher:
    """Keep the queues' chunks filled; used by one thread at a time."""

    def __init__(
        self, requester: Requester, topic: str, clock: Clock, max_bytes: int, prefer_master: bool
    ) -> None:
        self._requester = requester
        self._topic = topic
        self._clock = clock
        self._max_bytes = max_bytes
        self._prefer_master = prefer_master
        self.queues: dict[int, QueueReader] = {}
        self.policy = "raise"
        self.source: str | None = None
        self._left: set[str] = set()  # replicas found wanting since the last change of source
        self._seen_readable = -1
        self._next_refresh_ms = 0.0
        requester.on_arrival = self._arrived

    def step(self, timeout_s: float) -> None:
        """Keep pulls under way and wait once, at most `timeout_s`, for something to arrive."""
        now = self._clock.monotonic_ms()
        self._refresh(now)
        self._choose()
        wait_ms = min(timeout_s * 1000.0, self._next_refresh_ms - now)
        for queue in self.queues.values():
            if queue.rid is not None and now > queue.sent_ms + WAIT_MS + ANSWER_MS:
                self._leave()
            if queue.rid is None and not queue.chunk and queue.lost is None:
                if now >= queue.not_before_ms:
                    self._pull(queue, now)
                else:
                    wait_ms = min(wait_ms, queue.not_before_ms - now)
        self._requester.wait(max(0.0, wait_ms) / 1000.0)

    def _pull(self, queue: QueueReader, now: float) -> None:
        rid = self._requester.next_rid()
        pull = api.Pull(
            rid, self._topic, queue.queue_id, queue.fetch, api.MAX_PULL_MESSAGES,
            self._max_bytes, WAIT_MS,
        )  # fmt: skip
        if self.source is not None and self._requester.links.send(self.source, pull):
            queue.rid, queue.sent_ms = rid, now
        else:
            queue.not_before_ms = now + RETRY_MS

    def _arrived(self, arrival: Arrival) -> None:
        reply = arrival.reply
        if reply is None:
            if arrival.up:
                self._next_refresh_ms = 0.0
            elif arrival.address == self.source:
                self._leave()
        elif arrival.address == self.source:
            queue = next((q for q in self.queues.values() if q.rid == reply.rid), None)
            if queue is not None:
                queue.rid = None
                if isinstance(reply, api.Pulled):
                    self._pulled(queue, reply, arrival.payload)
                else:  # refused: busy, or the store is closed
                    queue.not_before_ms = self._clock.monotonic_ms() + RETRY_MS
                    self._leave()

    def _pulled(self, queue: QueueReader, reply: api.Pulled, payload: bytes) -> None:
        status = reply.status
        if status is api.PullStatus.FOUND:
            queue.chunk, queue.chunk_at, queue.epochs = payload, 0, reply.epochs
            queue.fetch = Position(reply.next_queue_offset)  # refined when the chunk is taken
            self._left.clear()
        elif status is api.PullStatus.OFFSET_TOO_SMALL:
            text = f"before the first one kept, {reply.min_queue_offset}"
            self._lose(queue, text, reply, Position(reply.min_queue_offset))
        elif status is api.PullStatus.OFFSET_TOO_LARGE:
            if self.source == self._requester.cluster.master:
                text = f"beyond the end, {reply.max_queue_offset}"
                self._lose(queue, text, reply, Position(reply.max_queue_offset))
            else:
                queue.not_before_ms = self._clock.monotonic_ms() + RETRY_MS
                self._leave()  # a replica may lag: only the master knows the end
        elif status is api.PullStatus.HISTORY_DIFFERS:
            common = reply.common or Position(reply.min_queue_offset)
            text = f"of a record that a failover cut away; {common.queue_offset} still holds"
            self._lose(queue, text, reply, common)

    def _lose(
        self, queue: QueueReader, text: str, reply: api.Pulled, common: Position
    ) -> None:
        if self.policy == "raise":
            place = f"queue {queue.queue_id} of {self._topic}: {queue.next.queue_offset} is {text}"
            queue.lost = PositionLostError(place, queue.queue_id, common)
        elif self.policy == "earliest":
            queue.seek(Position(reply.min_queue_offset))
        elif self.policy == "latest":
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
            if mine.readable_offset < best and mine.readable_offset == self._seen_readable:
                self._leave()
            self._seen_readable = mine.readable_offset
        for address in self._requester.cluster.addresses:
            self._requester.links.send(address, api.AskMap(self._requester.next_rid()))

    def _choose(self) -> None:
        if self.source is not None:
            return
        cluster, links = self._requester.cluster, self._requester.links
        epoch = max((info.epoch for info in cluster.maps.values()), default=0)
        heard = [
            address for address in cluster.replicas()
            if links.is_up(address) and address in cluster.maps
            and cluster.maps[address].epoch == epoch
        ]  # fmt: skip
        if self._prefer_master:
            heard.reverse()
        fresh = [address for address in heard if address not in self._left]
        if not fresh:
            self._left.clear()
        self.source = next(iter(fresh or heard), None)
        self._seen_readable = -1

    def _leave(self) -> None:
        """Turn to another replica; pulls under way are asked there anew."""
        if self.source is not None:
            self._left.add(self.source)
        self.source = None
        for queue in self.queues.values():
            queue.rid = None
