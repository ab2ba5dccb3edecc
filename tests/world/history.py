"""What the clients of a walk saw, and what must hold of it.

A message's body names it: producer, run of the producer, number. `Promises.note_*` are called while
the walk goes on and raise Violation at once where they can; `check_logs` judges the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hastore.client.messages import Message, SendResult
from hastore.record.codec import Record, decode_record

TOPIC = "t"
Place = tuple[int, int]  # queue, queue offset


class Violation(AssertionError):
    """A promise is broken."""


@dataclass(frozen=True)
class Sent:
    """A message that a producer has sent."""

    producer: str
    run: int
    number: int

    @property
    def body(self) -> bytes:
        pad = (self.number * 7919 + self.run) % 97
        return f"{self.producer}/{self.run}/{self.number}/".encode().ljust(pad + 24, b".")


def named(body: bytes) -> Sent:
    producer, run, number, _ = body.decode().split("/")
    return Sent(producer, int(run), int(number))


@dataclass
class History:
    """All that clients did; `strict` is False once faults have gone beyond what is promised."""

    strict: bool = True
    # Retention works: one node may remove the only whole copy of what has rotted on another.
    expires: bool = False
    refused_s: float = -1e9  # when a node last said why it does not start: it mends no other one
    sent: set[bytes] = field(default_factory=set)
    acked: dict[bytes, SendResult] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    at: dict[Place, bytes] = field(default_factory=dict)  # what was read or acknowledged there
    who: dict[Place, str] = field(default_factory=dict)
    delivered: dict[Place, int] = field(default_factory=dict)  # to the group's members
    committed: dict[int, int] = field(default_factory=dict)
    lost_positions: list[str] = field(default_factory=list)
    reads: int = 0
    ranges: int = 0
    problems: list[str] = field(default_factory=list)

    def excuse(self) -> None:
        """From here on messages may be lost: what was acknowledged before is not expected."""
        self.strict = False

    def violate(self, text: str) -> None:
        self.problems.append(text)

    def note_sent(self, body: bytes) -> None:
        self.sent.add(body)

    def note_acked(self, body: bytes, result: SendResult) -> None:
        if body in self.acked:
            self.violate(f"{named(body)} was acknowledged twice")
        self.acked[body] = result
        if result.queue_offset is not None:  # else an earlier attempt's, and the disk fails
            place = result.queue_id, result.queue_offset
            self._place(place, body, f"the acknowledgement {result}")

    def _place(self, place: Place, body: bytes, who: str) -> None:
        known = self.at.setdefault(place, body)
        if known is body or known == body:
            self.who.setdefault(place, who)
        elif self.strict:
            self.violate(
                f"queue {place[0]}, offset {place[1]}: {named(body)} by {who}, but "
                f"{named(known)} by {self.who.get(place)}"
            )

    def note_read(self, who: str, queue: int, queue_offset: int, body: bytes) -> None:
        """Note what a reader of confirmed messages got."""
        self.reads += 1
        if body not in self.sent:
            self.violate(f"{who} read {body[:60]!r} at {queue}/{queue_offset}, which nobody sent")
            return
        if body in self.refused and self.strict:
            self.violate(f"{who} read {named(body)}, which was refused as not stored")
        self._place((queue, queue_offset), body, who)

    def note_delivered(self, who: str, message: Message) -> None:
        place = (message.queue_id, message.queue_offset)
        self.note_read(who, *place, message.body)
        self.delivered[place] = self.delivered.get(place, 0) + 1

    def note_committed(self, queue: int, queue_offset: int) -> None:
        self.committed[queue] = max(self.committed.get(queue, 0), queue_offset)


@dataclass
class Log:
    """The log of a node at the end of a walk."""

    name: str
    start: int
    end: int
    data: bytes
    form: Any
    file_size: int

    @classmethod
    def of(cls, name: str, store: Any) -> Log:
        start, end = store.min_offset, store.max_offset
        data = bytearray()
        while start + len(data) < end:
            with store.log.view(start + len(data), end - start - len(data)) as view:
                data += view
        return cls(name, start, end, bytes(data), store.log.form, store.file_size)

    def records(self) -> list[Record]:
        """Return the records; raises Violation if the log is torn."""
        return [record for _, _, record in self.items()]

    def items(self) -> list[tuple[int, int, Record]]:
        """Return the records with their offsets and sizes; raises Violation if the log is torn."""
        found, at = [], 0
        while at < len(self.data):
            offset = self.start + at
            left = self.file_size - offset % self.file_size
            size = self.form.announced(self.data, at, min(len(self.data), at + left))
            if not size:
                at += left
                continue
            try:
                self.form.check_item(self.data, at, len(self.data), offset)
                lead = self.form.lead
                record = decode_record(self.data, at + lead)
                found.append((offset + lead, size - lead, record))
            except Exception as failure:
                raise Violation(f"{self.name}: the log is torn at {offset}: {failure}") from failure
            at += size
        return found


def _first_difference(one: bytes, other: bytes) -> int:
    """Return where two texts of one length differ first; a walk asks for it many times."""
    same, end = 0, len(one)  # they are the same before `same`, and not before `end`
    while end - same > 1:
        middle = (same + end) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            end = middle
    return same


def differences(logs: list[Log]) -> list[str]:
    """Return where logs have other bytes than the first of them."""
    first, found = logs[0], []
    for log in logs[1:]:
        start, end = max(first.start, log.start), min(first.end, log.end)
        one = first.data[start - first.start : end - first.start]
        other = log.data[start - log.start : end - log.start]
        if one != other:
            at = start + _first_difference(one, other)
            found.append(f"{first.name} and {log.name} differ at {at} of [{start}, {end})")
    return found


def check_logs(history: History, logs: list[Log], *, retention: bool) -> None:
    """Compare the logs of all nodes with each other, and with what clients were told."""
    problems, first = history.problems, logs[0]
    problems += differences(logs)
    content: dict[Place, bytes] = {}
    seen: dict[bytes, list[Record]] = {}
    for record in first.records():
        if record.topic == TOPIC:
            content[record.queue_id, record.queue_offset] = record.body
            seen.setdefault(record.body, []).append(record)
    problems += _what_is_wrong(history, first, content, seen, retention=retention)


def _what_is_wrong(
    history: History, log: Log, content: dict[Place, bytes], seen: dict[bytes, list[Record]],
    *, retention: bool,
) -> list[str]:  # fmt: skip
    wrong = []
    lowest = {queue: min(o for q, o in content if q == queue) for queue in {q for q, _ in content}}
    for body, records in seen.items():
        if len(records) > 1:
            at = [(one.queue_id, one.queue_offset) for one in records]
            wrong.append(f"{named(body)} is stored {len(records)} times: {at}")
        if body not in history.sent:
            wrong.append(f"the log has {body[:60]!r}, which nobody sent")
        if body in history.refused and history.strict:
            wrong.append(f"{named(body)} is stored, but was refused as not stored")
    if history.strict:
        for body, result in history.acked.items():
            place = (result.queue_id, result.queue_offset)
            gone = retention and (result.offset or 0) < log.start
            kept = body in seen if place[1] is None else content.get(place) == body
            if not kept and not gone:
                wrong.append(
                    f"{named(body)} was acknowledged ({result.level}, offset {result.offset}, "
                    f"epoch {result.epoch}) at {place}; "
                    f"there is {content.get(place, b'nothing')[:40]!r}"
                )
        for place, body in history.at.items():
            gone = retention and place[1] < lowest.get(place[0], 1 << 62)
            if content.get(place) != body and body not in history.acked and not gone:
                who = history.who.get(place)
                wrong.append(f"{who} saw {named(body)} at {place}; it is not kept")
        for queue, position in history.committed.items():
            missed = [
                o for q, o in content
                if q == queue and o < position and (q, o) not in history.delivered
            ]  # fmt: skip
            if missed:
                wrong.append(
                    f"the group committed {position} of queue {queue} without {sorted(missed)[:5]}"
                )
    order: dict[tuple[str, int, int], int] = {}
    for (queue, _), body in sorted(content.items()):
        one = named(body)
        if one.number < order.get((one.producer, one.run, queue), -1):
            wrong.append(f"{one} comes after a later one of its producer in queue {queue}")
        order[one.producer, one.run, queue] = one.number
    return wrong
