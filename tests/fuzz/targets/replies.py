"""Payloads of replies, as clients read them: the messages are those of the general decoder."""

from __future__ import annotations

from hastore.client import messages
from hastore.client.messages import Message, decode_messages
from hastore.errors import CorruptRecordError
from hastore.record.codec import check_record, decode_record
from hastore.record.compression import ZLIB, compress
from tests.fuzz import kit
from tests.fuzz.targets.put_payloads import repaired as repaired_payload
from tests.fuzz.targets.records import IPV4, record

REACHES = (
    decode_messages, messages._take_alike, messages._start_of, messages._unpacking,
    Message._topic_place, Message._stored,
)  # fmt: skip
LEAST = kit.Least(0.05, 1)
TOKENS = (b"\x01T\0\x10KEYS\x01a b\x02TAGS\x01t\x02", b"\0\0\0\x5b\xda\xa3\x20\xa7")
EPOCHS = ((1, 0), (3, 300), (4, 301), (9, 2**40))


def seeds() -> list[bytes]:
    """Return payloads of records that are alike, mixed, compressed or damaged."""
    alike = b"".join(
        record(body=b"%04d" % number, physical_offset=number * 100) for number in range(6)
    )
    packed, flags = compress(b"compressed " * 9, ZLIB)
    mixed = alike + record(body=packed, sys_flag=flags) + record(topic="é" * 90, magic=0xDAA320AB)
    batch = record(sys_flag=0x80, properties=b"INNER_NUM\x013\x02")
    torn = alike[:-1] + b"\0"
    bare = record(properties=b"", topic="") * 3
    six = record(sys_flag=0x20, store_host=type(IPV4)(bytes(16), 7))
    return [b"", alike, mixed, batch + six + alike, torn, bare, alike[:250], alike + b"\0" * 50]


def repaired(data: bytes) -> bytes:
    """Return the records with right CRCs, as far as their lengths lead."""
    return repaired_payload(data)


def one(data: bytes) -> None:
    """Decode a payload; each message has what its record has, and no valid record is left out."""
    found, damage = decode_messages(data, EPOCHS)
    at = 0
    for message in found:
        physical = int.from_bytes(data[at + 28 : at + 36], signed=True)
        size = check_record(data, at, len(data), physical)
        assert size, f"a message of a record at {at} that is not valid"
        expected = decode_record(data[at : at + size])
        assert message.record == expected
        assert (message.queue_id, message.offset) == (expected.queue_id, expected.physical_offset)
        assert (message.topic, message.raw_body) == (expected.topic, expected.body)
        assert message.properties == dict(expected.property_pairs)
        assert (message.tags, message.message_id) == (expected.tags, expected.message_id)
        assert message.store_timestamp_ms == expected.store_timestamp_ms
        assert message.next_position.queue_offset > message.queue_offset
        try:
            assert isinstance(message.body, bytes)
        except CorruptRecordError:
            assert message.compression is not None
        at += size
    physical = int.from_bytes(data[at + 28 : at + 36], signed=True)
    assert not check_record(data, at, len(data), physical), f"a valid record at {at} is left out"
    assert (damage is None) == (at == len(data))
    if damage is not None:
        with kit.documented(CorruptRecordError):
            raise damage
