"""Payloads of puts: what the fast check of a put accepts, the careful one accepts too."""

from __future__ import annotations

import zlib

from hastore.record.codec import encode_record, find_parts
from hastore.record.layout import CRC_MASK
from hastore.store.append import uniform_batch
from hastore.store.append.uniform_batch import read_uniform_batch
from hastore.store.append.validation import PutValidator, ValidRecord
from tests.fuzz import kit
from tests.random_records import random_record
from tests.store.kit import HOST, config, message

REACHES = (
    PutValidator.validate, read_uniform_batch, uniform_batch._read_tail,
)  # fmt: skip
LEAST = kit.Least(0.12, 6)
TOKENS = (
    b"HS_PID\x01p\x02",
    b"HS_SEQ\x017\x02",
    b"KEYS\x01a\x02",
    b"HS_DELAYED\x011-5\x02",
    b"DELAY\x01",
)
VALIDATOR = PutValidator(config("/nowhere", max_message_size=1_000), HOST)
KNOWN = {b"TopicA", b"TopicB", b"T" * 127}


def seeds() -> list[bytes]:
    """Return payloads of producers: uniform, mixed and wrong."""
    alike = b"".join(message(number, producer="p", size=20) for number in range(5))
    chance = kit.drawn(b"payloads")
    return [
        alike,
        message(1),
        message(1, topic="T" * 200),
        message(1, size=1_001),
        message(1, sys_flag=0x8),
        message(1, sys_flag=0x80),
        message(1, queue_id=9),
        message(1, producer="p") + message(2, producer="q"),
        message(2, producer="p") + message(1),
        message(1, properties=[("HS_PID", "p"), ("HS_SEQ", "x")]),
        message(1, topic="a.b"),
        message(1, properties=[("DELAY", "3")]),
        message(1, properties=[("HS_DELAYED", "1-5")]),
        message(1, topic="HASTORE_TOPICS"),
        message(1, topic="RMQ_SYS_TRANS_HALF_TOPIC"),
        message(
            1, topic="SCHEDULE_TOPIC_XXXX", properties=[("REAL_TOPIC", "a"), ("REAL_QID", "0")]
        ),
        message(1, properties=[("KEYS", "k " * 70)]),
        alike[:-1],
        alike + b"\0" * 91,
        *(encode_record(random_record(chance, body=b"x")) for _ in range(4)),
        b"",
    ]


def repaired(data: bytes) -> bytes:
    """Return records whose CRCs are right, as far as their lengths lead."""
    raw, at = bytearray(data), 0
    while parts := find_parts(raw, at, len(raw)):
        body = raw[parts[4] : parts[4] + parts[5]]
        raw[at + 8 : at + 12] = (zlib.crc32(body) & CRC_MASK).to_bytes(4)
        at += parts[0]
    return bytes(raw)


def one(data: bytes) -> None:
    """Validate a payload in both ways."""
    batch = read_uniform_batch(KNOWN, 1_000, 60_000, data)
    VALIDATOR.validate_uniform(data)
    stored, entries = VALIDATOR.validate(data)
    assert entries or not data, "a payload has a result, even one that is malformed"
    good = [entry for entry in entries if isinstance(entry, ValidRecord)]
    for entry in good:
        assert find_parts(stored, entry.at, len(stored)) is not None
    if batch is not None:
        assert stored == data and len(good) == len(entries)
        assert [entry.at for entry in good] == batch.starts
        assert [entry.queue_id for entry in good] == batch.queue_ids
        assert {entry.topic for entry in good} == {batch.topic}
        numbers = [(batch.producer, sequence) for sequence in batch.sequences]
        assert [entry.producer for entry in good if entry.producer is not None] == numbers
    reason = next((entry for entry in entries if not isinstance(entry, ValidRecord)), None)
    kit.refuse(reason is None, kit.without_details(str(getattr(reason, "reason", reason))))
