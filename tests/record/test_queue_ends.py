"""The records that state the next offsets of quiet queues."""

from __future__ import annotations

import random
import zlib

import pytest

from hastore.record.codec import Record, decode_record
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.properties import encode_properties
from hastore.record.queue_ends import (
    PART_BYTES,
    PROPERTY,
    QUEUES_TOPIC,
    QueueEnds,
    build_queue_ends,
    queue_ends_in,
)


def read(raw: bytes) -> QueueEnds | None:
    record: Record = decode_record(raw)
    return queue_ends_in(record.topic, record.sys_flag, record.properties)


def test_every_queue_is_in_one_of_the_parts() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topics = [f"topic-{number}-" + "x" * chance.randrange(200) for number in range(500)]
    topics += ['a"b\\c\n\x01\x02', "ünï", "not utf-8 \udcff\udc80"]
    queues = [
        (topic, queue, chance.randrange(1 << 40))
        for topic in topics
        for queue in range(chance.randrange(1, 20))
    ]
    records = build_queue_ends(queues, since=7, ident=9, now_ms=1_700_000_000_000)
    found = [read(raw) for raw in records]
    assert len(records) > 3
    for number, part in enumerate(found):
        assert part is not None
        assert part[:4] == (7, 9, number, len(records))
        assert len(records[number]) < PART_BYTES + 2_000
    assert [queue for part in found if part is not None for queue in part.queues] == queues


def test_a_statement_without_queues_is_one_record() -> None:
    (raw,) = build_queue_ends([], since=5, ident=1, now_ms=1)
    assert read(raw) == QueueEnds(5, 1, 0, 1, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"since":1,"id":1,"part":0,"parts":1}',
        '{"since":1,"id":1,"part":1,"parts":1,"next":{}}',
        '{"since":-1,"id":1,"part":0,"parts":1,"next":{}}',
        '{"since":"1","id":1,"part":0,"parts":1,"next":{}}',
        '{"since":1,"id":1,"part":0,"parts":1,"next":{"t":[1]}}',
        '{"since":1,"id":1,"part":0,"parts":1,"next":{"t":{"x":1}}}',
        '{"since":1,"id":1,"part":0,"parts":1,"next":{"t":{"0":-1}}}',
        '{"since":1,"id":1,"part":0,"parts":1,"next":{"t":{"0":1.5}}}',
        '{"since":1,"id":1,"part":0,"parts":1,"next":{"t":{"0":' + "9" * 40 + "}}}",
    ],
)
def test_other_forms_state_nothing(text: str) -> None:
    value = f"{zlib.crc32(text.encode()):08x}{text}"
    properties = encode_properties([(PROPERTY, value)])
    assert queue_ends_in(QUEUES_TOPIC, FLAG_ROLLBACK, properties) is None


def test_damage_other_topics_and_flags_state_nothing() -> None:
    (raw,) = build_queue_ends([("t", 0, 10)], since=5, ident=1, now_ms=1)
    record = decode_record(raw)
    properties = record.properties
    assert queue_ends_in(QUEUES_TOPIC, FLAG_ROLLBACK, properties) is not None
    assert queue_ends_in("other", FLAG_ROLLBACK, properties) is None
    assert queue_ends_in(QUEUES_TOPIC, 0, properties) is None
    assert queue_ends_in(QUEUES_TOPIC, FLAG_ROLLBACK, b"") is None
    rotten = properties.replace(b'"0":10', b'"0":11')
    assert rotten != properties
    assert queue_ends_in(QUEUES_TOPIC, FLAG_ROLLBACK, rotten) is None
