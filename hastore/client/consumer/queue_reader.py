"""One queue of a consumer: the reader's position, and what was fetched after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hastore.client.messages import Message, decode_messages
from hastore.client.results import Position
from hastore.errors import CorruptRecordError, PositionLostError


class Chunk(NamedTuple):
    """The reply to one pull: `number` records as stored, and the position after them."""

    payload: bytes
    number: int
    epochs: list[tuple[int, int]]
    after: Position


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
    chunk: Chunk | None = None
    ready: list[Message] = field(default_factory=list)  # decoded
    taken: int = 0  # how many messages of `ready` were taken
    damage: CorruptRecordError | None = None  # in the bytes after `ready`
    rid: int | None = None
    sent_ms: float = 0.0
    not_before_ms: float = 0.0
    lost: PositionLostError | None = None

    @property
    def next(self) -> Position:
        """The reader's position."""
        stand = self.current
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

    def decode(self, chunk: Chunk) -> None:
        """Decode a chunk; records after damaged bytes are dropped."""
        self.ready, damage = decode_messages(chunk.payload, chunk.epochs)
        self.taken = 0
        if damage is None:
            last = self.ready[-1].offset if self.ready else None
            if len(self.ready) == chunk.number and chunk.after.offset in (None, last):
                return
            text = f"a reply states {chunk.number} messages but does not hold them"
            damage = CorruptRecordError(text)
            self.ready = []
        self.damage = damage
        self.rid = self.fetch = None  # ignores the answer of the pull in flight
