"""What producers, consumers and the group itself put into a log."""

import random
from typing import TYPE_CHECKING

from hastore.errors import Status
from hastore.protocol.committed_positions import CommitBody
from hastore.record.codec import NO_HOST, build_record
from hastore.record.delays import deliver
from hastore.record.queue_ends import build_queue_ends
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.record.transactions import HALF_TOPIC, build_checks, build_ended, prepare
from hastore.server.api.commit_records import commit_record
from hastore.store.append.results import own_records
from hastore.store.message_store import MessageStore
from tests.crash.inline import step
from tests.crash.node import FILE_SIZE, Parts, Ticks
from tests.store.kit import BORN, message

if TYPE_CHECKING:
    from tests.crash.classic import Version


class Puts:
    """Steps that append to `source`, the log of the master."""

    chance: random.Random
    clock: Ticks
    source: MessageStore
    parts: Parts
    version: "Version"
    is_slave: bool

    def __init__(self) -> None:
        self.number = 0
        self.sequences: dict[str, int] = {}
        self.stated = 0

    def append(self, *records: bytes, own: bool = False) -> None:
        guards = [own_records] * len(records) if own else None
        results = self.source.put_encoded(records, guards)
        flat = [one for each in results for one in each]
        assert all(one.status is Status.PUT_OK for one in flat), flat
        self.source_grown()

    def source_grown(self) -> None:
        book, store = self.version.book, self.source
        while len(book.data) < store.max_offset:
            at = len(book.data)
            left = min(store.max_offset, at - at % FILE_SIZE + FILE_SIZE) - at
            with store.view(at, left) as view:
                book.add(bytes(view), FILE_SIZE)
        while self.is_slave and step(self.source.replay):
            continue

    def put(self) -> None:
        records = []
        for _ in range(self.chance.randrange(1, 7)):
            self.number += 1
            size = self.chance.choice((0, 60, 300, 1500))
            topic, queue = self.chance.choice((("A", 0), ("A", 1), ("B", 0), ("C", 3)))
            producer = self.chance.choice((None, "p1", "p2"))
            pairs = [("KEYS", f"k{self.number}")]
            if producer is not None:
                self.sequences[producer] = self.sequences.get(producer, -1) + 1
                pairs += [("HS_PID", producer), ("HS_SEQ", str(self.sequences[producer]))]
            records.append(
                message(self.number, topic=topic, queue_id=queue, size=size, properties=pairs)
            )
        self.append(b"".join(records))

    def commit(self) -> None:
        self.number += 1
        group = self.chance.choice(("g", "h"))
        places = dict.fromkeys(range(self.chance.randrange(1, 3)), (self.number, None, None))
        self.append(commit_record(CommitBody(group, "A", places), self.clock.wall_ms()), own=True)

    def topic(self) -> None:
        name = self.chance.choice(("A", "D", "E"))
        queues = self.chance.randrange(8, 12)
        change = TopicChange(config=TopicConfig(name, queues, queues))
        self.append(build_change(change, self.clock.wall_ms()), own=True)

    def half(self) -> None:
        self.number += 1
        properties = {"TRAN_MSG": "true", "PGROUP": "g", "UNIQ_KEY": f"u{self.number}"}
        waiting = prepare("A", 1, properties)
        text = waiting.properties.decode()
        pairs = [tuple(one.split("\x01")) for one in text.split("\x02") if one]
        record = build_record(
            HALF_TOPIC, b"half", queue_id=0, properties=pairs, born_timestamp_ms=1, born_host=BORN
        )
        self.append(record, own=True)

    def end_half(self) -> None:
        entries = [one for one in self.version.book.entries if one.record.topic == HALF_TOPIC]
        if not entries:
            return
        one = self.chance.choice(entries)
        if self.chance.random() < 0.3:
            self.append(build_checks([(one.offset, 1)], self.clock.wall_ms()), own=True)
        else:
            place = one.record.queue_offset
            self.append(*build_ended([place], self.clock.wall_ms(), NO_HOST), own=True)

    def delay(self) -> None:
        self.number += 1
        pairs = [("KEYS", f"k{self.number}"), ("DELAY", str(self.chance.randrange(1, 4)))]
        self.append(message(self.number, topic="A", properties=pairs))

    def deliver(self) -> None:
        book = self.version.book
        levels = book.delivered(len(book.data))
        for one in book.entries:
            level = one.record.queue_id + 1
            if one.record.topic == "SCHEDULE_TOPIC_XXXX" and one.offset > levels.get(level, -1):
                raw = bytes(book.data[one.offset : one.end])
                self.append(deliver(raw, level=level).record, own=True)
                return

    def state_ends(self) -> None:
        book = self.version.book
        self.stated += 1
        queues = [(*key, after) for key, after in sorted(book.next_offsets(book.read).items())]
        records = build_queue_ends(
            [("quiet", 0, self.stated), *queues],
            since=book.read, ident=self.stated, now_ms=self.clock.wall_ms(), part_bytes=60,
        )  # fmt: skip
        self.append(*records, own=True)
