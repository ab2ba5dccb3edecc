"""What a history says of messages, as tables: sends and their ends, messages read, records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hastore.errors import UsageError
from hastore.history.rules.budget import Level, parse_level
from hastore.history.rules.columns import (
    LATE,
    NONE,
    Flags,
    Names,
    Numbers,
    Table,
    as_number,
    begins,
)
from hastore.history.rules.events import (
    Epoch,
    Fail,
    Fault,
    Header,
    Info,
    Log,
    Ok,
    Read,
    Record,
    Rescued,
    Send,
)
from hastore.history.rules.findings import Report

PENDING, ACKED, UNKNOWN, REFUSED = range(4)  # outcomes of a send
_LOWEST = Level("MASTER_MEM", 1)


@dataclass(slots=True)
class Facts:
    """All tables, and the few events that stand alone. Numbers of queues are of `queues`."""

    report: Report
    header: Header = field(default_factory=Header)
    sends: Table = field(
        default_factory=lambda: Table(
            *("began", "ended", "outcome", "digest", "queue", "queue_offset", "offset"),
            *("epoch", "level", "attempts", "line", "end_line"),
        )
    )
    reads: Table = field(
        default_factory=lambda: Table(
            *("offset", "digest", "queue", "queue_offset", "t", "epoch"),
            *("producer", "sequence", "line"),
        )
    )
    records: Table = field(
        default_factory=lambda: Table(
            *("offset", "size", "digest", "queue", "queue_offset", "count"),
            *("producer", "sequence", "host", "line"),
        )
    )
    queues: Names[tuple[str, int]] = field(default_factory=Names)  # (topic, queue id)
    levels: Names[str] = field(default_factory=Names)
    producers: Names[str] = field(default_factory=Names)
    hosts: Names[str] = field(default_factory=Names)
    sent_topics: set[str] = field(default_factory=set)
    log: Log | None = None
    rescued: set[int] = field(default_factory=set)  # digests
    epochs: list[tuple[Epoch, int]] = field(default_factory=list)  # with their lines
    faults: list[Fault] = field(default_factory=list)
    _parsed: dict[str, Level | None] = field(default_factory=dict)
    _whole: Flags | None = None
    _begins: dict[int, int] = field(default_factory=dict)  # first offsets of queues

    # -- sends

    def add_send(self, event: Send, line: int) -> int:
        """Note a send; return its row."""
        self.sent_topics.add(event.topic)
        return self.sends.add(
            event.t, LATE, PENDING, as_number(event.digest), NONE, NONE, NONE, 0, NONE,
            event.attempts, line, 0,
        )  # fmt: skip

    def end_send(self, row: int, sent: Send, event: Ok | Fail | Info, line: int) -> None:
        """Note how a send ended."""
        if event.t < sent.t:
            self.report.find("settled", "a send ended before it began", self._line(row), line)
        outcome = {Ok: ACKED, Fail: REFUSED, Info: UNKNOWN}[type(event)]
        self.sends.put(row, ended=event.t, end_line=line, outcome=outcome)
        if not isinstance(event, Ok):
            return
        answers = event.level != "" or sent.acks in ("all", "1")
        if event.offset is None and answers and not sent.indirect:
            text = "an answer was asked for, and names no place in the log"
            self.report.find("level", text, self._line(row), line)
        if event.offset is None or sent.indirect:
            # Nothing is known of the record itself: it may be there, once.
            self.sends.put(row, outcome=UNKNOWN)
            return
        if event.queue is None:
            raise UsageError("ok: an offset, but no queue")
        level = self._level(event, sent, self._line(row), line)
        self.sends.put(
            row,
            offset=event.offset,
            queue=self.queues.number((sent.topic, event.queue)),
            queue_offset=NONE if event.queue_offset is None else event.queue_offset,
            epoch=event.epoch,
            level=self.levels.number(level),
        )

    def _line(self, row: int) -> int:
        return self.sends.get(row, "line")

    def _level(self, event: Ok, sent: Send, *lines: int) -> str:
        """Return the level of a reply; it must be one, and not below what was asked for."""
        if event.level not in self._parsed:
            self._parsed[event.level] = parse_level(event.level)
        level = self._parsed[event.level]
        if level is None:
            self.report.find("level", f"no reply has the level {event.level!r}", *lines)
        elif self.header.mode == "dledger" and level.copies:
            text = f"in mode dledger a majority confirms all that is answered, the reply is {level}"
            self.report.find("level", text, *lines)
        elif sent.acks == "all" and self._is_below_all(level):
            self.report.find("level", f"acks all was asked for, the reply is {level}", *lines)
        elif sent.sync_flush and not level.on_disk:
            self.report.find("level", f"a sync was asked for, the reply is {level}", *lines)
        return event.level

    def _is_below_all(self, level: Level) -> bool:
        """Whether fewer nodes than all that the group asks for have confirmed."""
        if self.header.mode == "sync" and level.name.startswith("SYNC"):
            return level.copies <= self.header.acks
        return level.name.startswith("MASTER")

    def level_of(self, row: int) -> Level:
        """Return the level that a reply stated; one that was found wrong counts as the lowest."""
        return self._parsed[self.levels[self.sends.get(row, "level")]] or _LOWEST

    def is_alone(self, rows: Numbers) -> Flags:
        """Return for which acknowledged sends only the master is said to have the message."""
        parsed = [self._parsed[self.levels[number]] for number in range(len(self.levels))]
        alone = np.array([level is None or level.is_alone for level in parsed], np.bool_)
        found: Flags = alone[self.sends["level"][rows]]
        return found

    # -- messages

    def add_read(self, event: Read, line: int) -> None:
        """Note the messages that a consumer was given."""
        queue = self.queues.number((event.topic, event.queue))
        for seen in event.messages:
            producer = NONE if seen.producer is None else self.producers.number(seen.producer)
            self.reads.add(
                seen.offset, as_number(seen.digest), queue, seen.queue_offset, event.t,
                NONE if seen.epoch is None else seen.epoch, producer,
                NONE if seen.sequence is None else seen.sequence, line,
            )  # fmt: skip

    def add_record(self, event: Record, line: int) -> None:
        """Note a record of the log."""
        producer = NONE if event.producer is None else self.producers.number(event.producer)
        self.records.add(
            event.offset, event.size, as_number(event.digest),
            self.queues.number((event.topic, event.queue)), event.queue_offset, event.count,
            producer, NONE if event.sequence is None else event.sequence,
            NONE if event.host is None else self.hosts.number(event.host), line,
        )  # fmt: skip

    def add_rescued(self, event: Rescued) -> None:
        """Note a record that a node has archived."""
        self.rescued.add(as_number(event.digest))

    # -- what the rules ask

    def whole_queues(self) -> Flags:
        """Return of which queues the history has all sends, by number."""
        if self._whole is None:
            named = self.header.topics
            topics = self.sent_topics if named is None else set(named)
            known = range(len(self.queues))
            self._whole = np.array([self.queues[n][0] in topics for n in known], np.bool_)
        return self._whole

    def was_removed(self, queue: int, before: int) -> bool:
        """Whether retention may have removed all of a queue before this place."""
        if self.log is None:
            return any(one.fault == "retention" for one in self.faults)
        if not self._begins:
            queues = self.records["queue"]
            order = np.lexsort((self.records["queue_offset"], queues))
            order = order[begins(queues[order])] if len(order) else order
            first = self.records["queue_offset"][order]
            self._begins = dict(zip(queues[order].tolist(), first.tolist(), strict=True))
        return self.log.begin > 0 and self._begins.get(queue, before) >= before

    def name_of(self, queue: int) -> str:
        """Return a queue's name for findings: "orders[3]"."""
        topic, number = self.queues[queue]
        return f"{topic}[{number}]"

    def rows_with(self, *outcomes: int) -> Numbers:
        """Return the rows of sends that ended so."""
        return np.flatnonzero(np.isin(self.sends["outcome"], outcomes))
