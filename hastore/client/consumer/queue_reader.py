"""One queue of a consumer: where its reader stands, and what was fetched from there on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hastore.client.messages import Message, decode_messages
from hastore.client.results import Position
from hastore.errors import CorruptRecordError, PositionLostError


class Chunk(NamedTuple):
    """What one pull brought: `number` records as they lie in the log, and the position behind."""

    payload: bytes
    number: int
    epochs: list[tuple[int, int]]
    after: Position


@dataclass(slots=True, eq=False)
class QueueReader:
    """One queue: `stand` is where its reader stands, `fetch` where the next pull begins.

    `stand` is a position, or the message behind which that is. All else is what was fetched from
    there on, and may be dropped and fetched again. `fetch` is None while it is known only once all
    that was fetched is taken: then it is where the reader stands.
    """

    queue_id: int
    current: Position | Message
    fetch: Position | None
    chunk: Chunk | None = None
    ready: list[Message] = field(default_factory=list)  # decoded
    taken: int = 0  # of them
    damage: CorruptRecordError | None = None  # what stands behind them
    rid: int | None = None
    sent_ms: float = 0.0
    not_before_ms: float = 0.0
    lost: PositionLostError | None = None

    @property
    def next(self) -> Position:
        """The position where the reader stands."""
        stand = self.current
        return stand.next_position if isinstance(stand, Message) else stand

    @property
    def is_drained(self) -> bool:
        """Whether nothing that was fetched is left to take."""
        return self.chunk is None and self.taken == len(self.ready)

    def seek(self, position: Position) -> None:
        """Go on from a position; what was fetched, or is on its way, is dropped."""
        self.current = self.fetch = position
        self.chunk = None
        self.ready, self.taken = [], 0
        self.damage = None
        self.rid = None
        self.not_before_ms = 0.0
        self.lost = None

    def take(self, most: int) -> list[Message]:
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

    def take_chunk(self) -> bytes:
        """Return what was fetched as it came, b"" when there is nothing; it is not checked."""
        chunk, self.chunk = self.chunk, None
        if chunk is None:
            return b""
        self.current = chunk.after
        return chunk.payload

    def decode(self, chunk: Chunk) -> None:
        """Turn a chunk into messages; what stands behind damage in it is dropped."""
        self.ready, damage = decode_messages(chunk.payload, chunk.epochs)
        self.taken = 0
        if damage is None:
            last = self.ready[-1].offset if self.ready else None
            if len(self.ready) == chunk.number and chunk.after.offset in (None, last):
                return
            damage = CorruptRecordError(f"a reply of {chunk.number} messages has others in it")
            self.ready = []
        self.damage = damage
        self.rid = self.fetch = None  # a pull from behind the damage may be under way
