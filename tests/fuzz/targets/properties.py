"""Properties, tags and topics of a record: fast readers and general ones say the same."""

from __future__ import annotations

import unittest.mock

from hastore.errors import MessageIllegalError, UsageError
from hastore.record import hashes, properties
from hastore.record.hashes import KeyHasher, java_hash_code, tag_codes, tags_of
from hastore.record.properties import (
    MAX_KEYS,
    MAX_PID_BYTES,
    check_topic,
    decode_properties,
    encode_properties,
    find_property,
    in_java_order,
    inner_count,
    is_well_formed,
    keys_of,
    producer_of,
    sole_producer,
    stored_tags,
    without_properties,
    words_of_keys,
)
from tests.fuzz import kit

REACHES = (
    decode_properties, find_property, keys_of, producer_of, sole_producer, words_of_keys,
    without_properties, inner_count, check_topic, java_hash_code, tag_codes, hashes._codes_of,
)  # fmt: skip
LEAST = kit.Least(0.4, 3)
TOKENS = (
    *(
        b"KEYS\x01",
        b"UNIQ_KEY\x01",
        b"TAGS\x01",
        b"HS_PID\x01",
        b"\x02HS_SEQ\x01",
        b"INNER_NUM\x01",
    ),
    *(b"9" * 18, b"p" * 65, b" " * 64, b"XHS_PID\x01"),
)


def seeds() -> list[bytes]:
    """Return properties as producers and RocketMQ write them, topics, and tags."""
    texts = [
        b"KEYS\x01a b  c\x02UNIQ_KEY\x01u\x02",
        b"HS_PID\x01p\x02HS_SEQ\x0117\x02",
        b"a\x01b",
        b"TAGS\x01t\x02HS_PID\x01p\x02HS_SEQ\x0117\x02X\x01y\x02",
        b"HS_SEQ\x011\x02HS_PID\x01p\x02",
        b"XHS_PID\x01n\x02HS_PID\x01q\x02HS_SEQ\x019",
        b"HS_PID\x01\x02HS_SEQ\x011\x02",
        b"\x01\x02",
        b"HS_PID\x01p\x02HS_SEQ\x01x\x02",
        b"HS_SEQ\x015\x02HS_PID\x01p\x02HS_SEQ\x019\x02",
        b"HS_PID\x01p\x02",
        b"INNER_NUM\x0112\x02",
        b"\xff\x01\xfe\x02",
        b"KEYS\x01" + b"k " * 70 + b"\x02",
        b"UNIQ_KEY\x01a\x02UNIQ_KEY\x01\x02",
        b"\x02\x02",
        b"",
        "größe\x01漢\x02😀\x01x\x02".encode(),
    ]
    topics = [b"Topic-1_%|", b"", b"a.b", b"x" * 128, "é".encode()]
    tags = [b"a || b", b"*", b"", b" || ", b"a||a", b"\xf0\x9f\x98\x80 || b"]
    return [
        *(b"p" + one for one in texts),
        *(b"t" + one for one in topics),
        *(b"g" + t for t in tags),
    ]


def one(data: bytes) -> None:
    """Read properties in each way, check a topic, or read tags."""
    kind, raw = data[:1], data[1:]
    text = kit.text_of(raw)
    if kind == b"t":
        with kit.documented(MessageIllegalError):
            check_topic(text)
        most = 255 if text.startswith(("%RETRY%", "%DLQ%")) else 127
        assert 1 <= len(text) <= most and text.isascii()
        return
    if kind == b"g":
        with kit.documented(UsageError):
            codes = tag_codes(text)
        found = {java_hash_code(tag) & 0xFFFFFFFF for tag in tags_of(text)}
        assert codes is None or codes == found
        return
    pairs = decode_properties(raw)
    assert all("\x02" not in value and "\x01" not in name for name, value in pairs)
    escaped = [
        (n.encode("utf-8", "surrogateescape"), v.encode("utf-8", "surrogateescape"))
        for n, v in pairs
    ]
    for name, _ in escaped:
        if name and b"\x02" not in name:
            assert find_property(raw, name) == next(v for n, v in escaped if n == name)
    tags = [value for name, value in escaped if name == b"TAGS"]
    assert stored_tags(raw) == (next(filter(None, reversed(tags)), b"") if tags else None)
    assert sorted(in_java_order(dict(pairs))) == sorted(dict(pairs).items())
    words = words_of_keys(raw)
    assert words == 0 or words > MAX_KEYS
    for key in keys_of(raw):
        assert key and key in raw
        KeyHasher().key_hash("T", key)
    assert 1 <= inner_count(raw) <= 99_999
    left = decode_properties(without_properties(raw, (b"KEYS",)))
    assert left == [pair for pair in pairs if pair[0] != "KEYS"]
    with kit.documented(ValueError):
        found = producer_of(raw)
    _same_without_the_fast_ways(raw, found)
    with kit.documented(MessageIllegalError):
        stored = encode_properties(pairs, as_stored=True)  # too long, at most
        assert decode_properties(stored) == pairs and (not pairs or is_well_formed(stored))
        again = encode_properties(pairs)
    assert again == stored


def _same_without_the_fast_ways(raw: bytes, found: tuple[bytes, int] | None) -> None:
    nothing = unittest.mock.Mock(search=lambda _raw: None)
    with (
        unittest.mock.patch.object(properties, "sole_producer", lambda _raw: None),
        unittest.mock.patch.object(properties, "_USUAL", nothing),
    ):
        assert producer_of(raw) == found
    assert found is None or 1 <= len(found[0]) <= MAX_PID_BYTES
