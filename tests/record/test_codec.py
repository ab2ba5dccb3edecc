"""The record codec: RocketMQ's bytes, each prefix of a record, and records of hypothesis."""

import glob
import os
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hastore.errors import CorruptRecordError, MessageIllegalError
from hastore.record.codec import (
    Host,
    Record,
    build_record,
    check_blank,
    check_record,
    decode_record,
    encode_moved,
    encode_record,
    find_parts,
    join_moved,
    may_begin_record,
    pack_blank,
    patch_for_store,
    split_record,
)
from hastore.record.layout import V1_MAGIC, V2_MAGIC
from hastore.record.log_format import ENTRIES, pack_header
from hastore.record.properties import encode_properties

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "golden")
IPV4 = Host.parse("127.0.0.1:10911")
IPV6 = Host.parse("[::1]:10911")

texts = st.text(
    st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=20
)
hosts = st.builds(
    Host, st.one_of(st.binary(min_size=4, max_size=4), st.binary(min_size=16, max_size=16)),
    st.integers(-(2**31), 2**31 - 1),
)  # fmt: skip
longs = st.integers(-(2**63), 2**63 - 1)
ints = st.integers(-(2**31), 2**31 - 1)


@st.composite
def records(draw: st.DrawFn) -> Record:
    body = draw(st.binary(max_size=300))
    name = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=80)
    topic = draw(name)
    wide = len(topic.encode()) > 127 or draw(st.booleans())
    born, stored = draw(hosts), draw(hosts)
    flags = draw(ints) & ~0x30
    flags |= 0x10 * born.is_ipv6 | 0x20 * stored.is_ipv6
    return Record(
        body=body,
        topic=topic,
        queue_id=draw(ints),
        properties=encode_properties(draw(st.lists(st.tuples(texts, texts), max_size=4))),
        flag=draw(ints),
        sys_flag=flags,
        queue_offset=draw(longs),
        physical_offset=draw(st.integers(0, 2**63 - 1)),
        body_crc=zlib.crc32(body) & 0x7FFFFFFF,
        born_timestamp_ms=draw(longs),
        born_host=born,
        store_timestamp_ms=draw(longs),
        store_host=stored,
        reconsume_times=draw(ints),
        prepared_transaction_offset=draw(longs),
        magic=V2_MAGIC if wide else V1_MAGIC,
    )


@pytest.mark.parametrize(
    ("name", "count", "blanks", "end"),
    [("three-files", 400, 2, 167944), ("variants", 15, 0, 18770)],
)
def test_golden_records_encode_to_the_same_bytes(
    name: str, count: int, blanks: int, end: int
) -> None:
    seen = [0, 0, 0]
    for path in sorted(glob.glob(f"{GOLDEN}/{name}/commitlog/*")):
        with open(path, "rb") as file:
            data = file.read()
        base, at = int(os.path.basename(path)), 0
        while size := check_record(data, at, len(data), base + at):
            record = decode_record(data, at)
            assert encode_record(record) == data[at : at + size]
            assert record.size == size
            assert record.physical_offset == base + at
            seen[0] += 1
            at += size
        seen[2] = base + at
        if check_blank(data, at, len(data)):
            assert pack_blank(len(data) - at) == data[at : at + 8]
            seen[1] += 1
    assert seen == [count, blanks, end]


@given(records())
@settings(deadline=None, print_blob=True)
def test_what_is_encoded_is_decoded(record: Record) -> None:
    raw = encode_record(record)
    assert len(raw) == record.size
    assert decode_record(raw) == record
    assert check_record(raw, 0, len(raw), record.physical_offset) == len(raw)
    behind = b"x" * 7 + raw + b"rest"
    assert decode_record(behind, 7) == record
    assert check_record(memoryview(behind), 7, len(behind), record.physical_offset) == len(raw)


@given(records(), records(), longs)
@settings(deadline=None, print_blob=True)
def test_a_record_is_moved_without_decoding_it_as_with(
    record: Record, other: Record, prepared: int
) -> None:
    parts = split_record(encode_record(record))
    assert (parts.body, parts.properties) == (record.body, record.properties)
    moved = parts._replace(topic=other.topic.encode(), properties=other.properties)
    assert join_moved(
        moved, other.queue_id, prepared_transaction_offset=prepared
    ) == encode_moved(
        record, other.topic, other.queue_id,
        properties=other.properties, prepared_transaction_offset=prepared,
    )  # fmt: skip


def test_a_moved_record_has_no_checksum_of_the_old_one() -> None:
    """A RocketMQ 5.3 that checks them would take the record for damaged."""
    own = b"KEYS\x01k\x02"
    raw = encode_record(replace(decode_record(_stored(b"body")), properties=own))
    for properties in (own + b"__CRC32#\x010123456789\x02", b"__CRC32#\x011\x02" + own):
        record = replace(decode_record(raw), properties=properties)
        moved = encode_moved(record, "U", 1), encode_moved(record, "U", 1, properties=properties)
        joined = join_moved(split_record(encode_record(record)), 1, prepared_transaction_offset=0)
        assert all(decode_record(one).properties == own for one in (*moved, joined))


def test_what_is_no_record_is_not_split_and_too_much_is_not_joined() -> None:
    raw = _stored(b"body")
    broken = raw.replace(b"body", b"bodY")
    for wrong in (broken, raw[:-1], b""):
        with pytest.raises(CorruptRecordError):
            split_record(wrong)
    parts = split_record(raw)
    for much in ({"topic": bytes(32_768)}, {"properties": bytes(32_768)}):
        with pytest.raises(MessageIllegalError, match="32768 bytes"):
            join_moved(parts._replace(**much), 0, prepared_transaction_offset=0)


@given(records())
@settings(deadline=None, print_blob=True, max_examples=25)
def test_no_prefix_of_a_record_is_one(record: Record) -> None:
    raw = encode_record(record)
    for size in range(len(raw)):
        assert check_record(raw, 0, size, record.physical_offset) == 0
        with pytest.raises(CorruptRecordError):
            decode_record(raw[:size])


@given(st.binary(max_size=400), st.integers(0, 400), ints)
@settings(deadline=None, print_blob=True)
def test_any_bytes_are_checked_without_an_exception(data: bytes, at: int, offset: int) -> None:
    assert check_record(data, at, len(data), offset) in range(len(data) + 1)
    assert check_blank(data, at, len(data)) in range(len(data) + 1)


@given(records(), st.data())
@settings(deadline=None, print_blob=True)
def test_lengths_that_lie_are_refused(record: Record, data: st.DataObject) -> None:
    raw = bytearray(encode_record(record))
    parts = find_parts(raw, 0, len(raw))
    assert parts is not None
    where = data.draw(st.sampled_from([0, parts[4] - 4]))
    lie = data.draw(
        st.sampled_from([-1, -(2**31), 0, 1, 90, 2**31 - 1, len(raw) + 1, len(raw) - 1])
    )
    if raw[where : where + 4] == lie.to_bytes(4, signed=True):
        return
    raw[where : where + 4] = lie.to_bytes(4, signed=True)
    assert check_record(raw, 0, len(raw), record.physical_offset) == 0


def test_a_record_must_know_its_place_and_its_body() -> None:
    raw = bytearray(_stored(b"body", offset=4096))
    assert check_record(raw, 0, len(raw), 4096)
    assert not check_record(raw, 0, len(raw), 0)
    raw[88] ^= 1
    assert not check_record(raw, 0, len(raw), 4096)


@pytest.mark.parametrize("part", ["topic", "properties"])
def test_a_torn_end_of_zeros_is_no_record(part: str) -> None:
    raw = bytearray(_stored(b"body"))
    parts = find_parts(raw, 0, len(raw))
    assert parts is not None
    if part == "properties":
        raw[-4:] = bytes(4)
    else:
        raw[parts[6] : parts[6] + parts[7]] = bytes(parts[7])
    assert not check_record(raw, 0, len(raw), 0)


def test_a_v1_topic_length_is_a_signed_byte() -> None:
    record = decode_record(_stored(b"body"))
    raw = bytearray(encode_record(replace(record, topic="T" * 127)))
    assert check_record(raw, 0, len(raw), 0)
    longer = replace(record, topic="T" * 128)
    with pytest.raises(MessageIllegalError):
        encode_record(longer)
    wide = encode_record(replace(longer, magic=V2_MAGIC))
    assert check_record(wide, 0, len(wide), 0) == len(wide)


def test_the_form_follows_bytes_not_characters() -> None:
    topic = "中" * 43  # 43 characters, 129 bytes: RocketMQ writes a broken record here
    raw = build_record(topic, b"x", queue_id=0, born_timestamp_ms=1, born_host=IPV4)
    record = decode_record(raw)
    assert (record.magic, record.topic) == (V2_MAGIC, topic)


@pytest.mark.parametrize("born", [IPV4, IPV6])
def test_patching_changes_what_only_the_master_knows(born: Host) -> None:
    raw = build_record(
        "TopicA",
        b"hello",
        queue_id=3,
        properties=[("TAGS", "t"), ("EMPTY", "")],
        born_timestamp_ms=5,
        born_host=born,
    )
    before = decode_record(raw)
    buffer = bytearray(b"##" + raw)
    patch_for_store(
        buffer, 2, queue_offset=7, physical_offset=9, store_timestamp_ms=11, store_host=IPV4
    )
    assert decode_record(buffer, 2) == replace(
        before, queue_offset=7, physical_offset=9, store_timestamp_ms=11, store_host=IPV4
    )
    assert before.property_pairs == [("TAGS", "t"), ("EMPTY", "")]
    with pytest.raises(MessageIllegalError):
        patch_for_store(
            buffer, 2, queue_offset=7, physical_offset=9, store_timestamp_ms=1, store_host=IPV6
        )


def _stored(body: bytes, offset: int = 0) -> bytes:
    raw = build_record(
        "TopicA",
        body,
        queue_id=0,
        properties=[("KEYS", "k")],
        born_timestamp_ms=1,
        born_host=IPV4,
    )
    buffer = bytearray(raw)
    patch_for_store(
        buffer, 0, queue_offset=0, physical_offset=offset, store_timestamp_ms=2, store_host=IPV4
    )
    return bytes(buffer)


@pytest.mark.parametrize("host", [IPV4, IPV6])
@pytest.mark.parametrize(("magic", "topic"), [(V1_MAGIC, "t" * 127), (V2_MAGIC, "t" * 400)])
def test_each_beginning_of_a_record_may_begin_it_and_none_with_a_damaged_size_does(
    host: Host, magic: int, topic: str
) -> None:
    flags = 0x30 if host.is_ipv6 else 0
    properties = encode_properties([("KEYS", "k" * 300)])
    record = Record(
        b"body" * 50, topic, properties=properties, magic=magic, sys_flag=flags, physical_offset=77,
        born_host=host, store_host=host,
    )  # fmt: skip
    raw = encode_record(record)
    entry = pack_header(3, 2, 29, len(raw)) + raw
    damaged = (len(raw) + 70_000).to_bytes(4) + raw[4:]
    in_entry = entry[:4] + (len(entry) + 1).to_bytes(4) + entry[8:]
    for end in range(8, len(raw)):
        assert may_begin_record(raw[:end], 0, end, 77)
        assert ENTRIES.may_begin(entry[:end], 0, end, 29)
        assert may_begin_record(damaged, 0, end, 77) is (end < (112 if flags else 88))
        assert not may_begin_record(raw, 0, end, 78) or end < 88
        assert not ENTRIES.may_begin(in_entry, 0, end, 29) or end < 48
