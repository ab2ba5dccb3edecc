"""Records built from Arrow batches: the bytes of the producer's own encoder, and refused rows."""

import random
import re
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import hastore
from hastore.client.messages import decode_messages
from hastore.client.producer.preparer import RecordEncoder, pairs_of
from hastore.errors import Status, UsageError
from hastore.record.codec import NO_HOST, Host, build_record, decode_record
from hastore.record.delays import deliver, put_to_wait, retry_of, sent_back
from hastore.record.layout import MAX_PROPERTIES_BYTES
from hastore.record.properties import PRODUCER_PROPERTIES, ROCKETMQ_PROPERTIES
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.record_fields import PropertyScan
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.read.clusters import partition_of
from hastore.spark.sink import records
from hastore.spark.sink.options import SinkColumns
from hastore.spark.sink.records import RecordBuilder, RowError
from tests.store.kit import opened

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("value", pa.binary()), ("key", pa.binary()), ("headers", HEADERS),
        ("topic", pa.string()), ("partition", pa.int32()), ("tags", pa.string()),
    ]
)  # fmt: skip
ALL = SinkColumns(0, 1, 2, 3, 4, 5)


def builder(columns=ALL, topic=None, born_host=NO_HOST, queues=4):
    return RecordBuilder(
        columns, topic=topic, partition=3, producer_id="sparkabc", first_number=7 << 32,
        queues_of=lambda _: queues, born_host=born_host,
    )  # fmt: skip


def batch(rows):
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def row(**parts):
    whole = dict.fromkeys(SCHEMA.names) | {"value": b"v", "topic": "t", "partition": 0}
    return whole | parts


@pytest.mark.parametrize("born", [Host.parse("10.0.0.7:0"), Host.parse("[fe80::1]:0"), NO_HOST])
def test_the_bytes_are_those_of_the_producer(monkeypatch, born):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    chance = random.Random(seed)
    monkeypatch.setattr(records, "_ROWS_PER_BUILD", 50)
    monkeypatch.setattr(records, "_BYTES_PER_BUILD", 40_000)
    monkeypatch.setattr(records, "BYTES_PER_CHUNK", 9_000)

    def maybe(make):
        return make() if chance.random() < 0.6 else None

    rows = [
        row(
            value=chance.randbytes(chance.choice([0, 1, 200, 12_000])),
            key=maybe(lambda: chance.choice([b"", b"k1", b"k22", "é".encode()])),
            tags=maybe(lambda: "A"),
            headers=maybe(
                lambda: [
                    {"key": f"ä{place}", "value": chance.choice([b"", b"x" * 300, "ö".encode()])}
                    for place in range(chance.randrange(4))
                ]
            ),
            topic=chance.choice(["t", "t", "longer-topic"]),
            partition=maybe(lambda: chance.randrange(4)),
        )
        for _ in range(300)
    ]
    whole = batch([row(), *rows]).slice(1)  # with an offset, as after the rows that are left out
    chunks = list(builder(born_host=born).build(whole, 1_000, 99))
    encoder = RecordEncoder("sparkabc", born)
    expected = []
    for place, given in enumerate(rows, 1_000):
        queue = given["partition"]
        key = given["key"]
        if queue is None:
            queue = (place + 3) % 4 if key is None else zlib.crc32(key) % 4
        headers = [(h["key"], h["value"].decode()) for h in given["headers"] or ()]
        pairs = pairs_of(key, given["tags"], headers)
        expected.append(
            encoder.encode(given["topic"], given["value"], queue, pairs, (7 << 32) + place, 99)
        )
    assert b"".join(chunk.payload for chunk in chunks) == b"".join(expected)
    at = 1_000
    for chunk in chunks:
        assert chunk.first_row == at and 1 <= chunk.rows <= records.ROWS_PER_CHUNK
        assert chunk.payload == b"".join(expected[at - 1_000 : at - 1_000 + chunk.rows])
        assert chunk.topic == rows[at - 1_000]["topic"]
        at += chunk.rows
    assert len(chunks) > 10


def test_the_option_topic_wins_and_columns_may_be_missing():
    data = pa.RecordBatch.from_arrays([pa.array(["ä", "b"])], ["value"])
    [chunk] = builder(SinkColumns(0), topic="other").build(data, 0, 5)
    first = decode_record(chunk.payload)
    assert (first.topic, first.body, first.queue_id) == ("other", "ä".encode(), 3)
    assert first.properties == b"HS_PID\x01sparkabc\x02HS_SEQ\x01%d\x02" % (7 << 32)
    assert decode_record(chunk.payload[first.size :]).queue_id == 0


def test_a_null_value_is_a_tombstone_and_an_empty_one_is_not():
    rows = [row(value=None, key=b"k"), row(value=b""), row(value=b"x"), row(value=None)]
    [chunk] = builder().build(batch([row(), *rows]).slice(1), 0, 5)
    found, at = [], 0
    while at < len(chunk.payload):
        found.append(decode_record(chunk.payload[at:]))
        at += found[-1].size
    assert [one.body for one in found] == [b"", b"", b"x", b""]
    marks = [dict(one.property_pairs).get("HS_NULL") for one in found]
    assert marks == ["1", None, None, "1"]
    sizes = np.array([one.size for one in found], np.int64)
    columns = [Column.VALUE, Column.KEY, Column.HEADERS]
    read = BatchBuilder(projection_of(columns)).build(
        memoryview(chunk.payload), np.cumsum(sizes) - sizes, None, None
    )
    assert [tuple(one.values()) for one in read.to_pylist()] == [
        (None, b"k", None), (b"", None, None), (b"x", None, None), (None, None, None),
    ]  # fmt: skip
    messages, _ = decode_messages(chunk.payload, [])
    assert [message.is_null for message in messages] == [True, False, False, True]


def test_rows_without_a_topic_go_to_that_of_the_view():
    rows = [row(topic=None), row(topic="u")]
    made = RecordBuilder(
        ALL, topic=None, default_topic="t", partition=0, producer_id="p", first_number=0,
        queues_of=lambda _: 1, born_host=NO_HOST,
    )  # fmt: skip
    [chunk] = made.build(batch(rows), 0, 5)
    first = decode_record(chunk.payload)
    assert [first.topic, decode_record(chunk.payload[first.size :]).topic] == ["t", "u"]


def test_each_topic_has_queues_of_its_own():
    """A key goes to the same queue as by Producer, and no row to a queue that is not there."""
    counts = {"few": 2, "many": 16, "t": 4}
    made = RecordBuilder(
        ALL, topic=None, default_topic="t", partition=0, producer_id="p", first_number=0,
        queues_of=counts.__getitem__, born_host=NO_HOST,
    )  # fmt: skip
    keys = [b"k%d" % number for number in range(30)] + [None] * 30
    for topics in ([None, "few", "many"], ["few"], ["many"]):
        rows = [row(topic=t, key=key, partition=None) for key in keys for t in topics]
        found = []
        for chunk in made.build(batch(rows), 0, 5):
            at = 0
            while at < len(chunk.payload):
                found.append(decode_record(chunk.payload[at:]))
                at += found[-1].size
        assert len(found) == len(rows)
        for place, (record, given) in enumerate(zip(found, rows, strict=True)):
            queues = counts[given["topic"] or "t"]
            assert record.topic == (given["topic"] or "t")
            key = given["key"]
            assert record.queue_id == (place if key is None else zlib.crc32(key)) % queues


def test_bytes_that_are_not_utf8_are_stored_as_they_are():
    header = [{"key": "trace", "value": b"\xff\x00\xfe"}]
    [chunk] = builder().build(batch([row(key=b"\xff", headers=header)]), 0, 5)
    found = dict(decode_record(chunk.payload).property_pairs)
    assert found["KEYS"].encode("utf-8", "surrogateescape") == b"\xff"
    assert found["trace"].encode("utf-8", "surrogateescape") == b"\xff\x00\xfe"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"topic": None}, "'topic' is null"),
        ({"topic": "a b"}, "topic 'a b'"),
        ({"topic": "a.b"}, "no dots"),
        ({"topic": "HASTORE_FOO"}, "are the group's own"),
        ({"partition": -1}, "'partition' is -1"),
        ({"key": b"a\x01b"}, "'key' has a byte 1 or 2"),
        ({"tags": "\x02"}, "'tags' has a byte 1 or 2"),
        (
            {"value": random.randbytes(4 * 1024 * 1024 + 1)},
            "its body has 4194305 bytes; at most 4194304",
        ),
        ({"key": bytes(MAX_PROPERTIES_BYTES)}, "at most 32767 fit"),
        ({"headers": [{"key": "a", "value": b"1"}, {"key": "b", "value": b"\x01"}]}, "header's v"),
        ({"headers": [{"key": "a\x02", "value": b"1"}]}, "a header's key has a byte 1 or 2"),
        ({"headers": [{"key": None, "value": b"1"}]}, "is null"),
        ({"headers": [None]}, "is null"),
        ({"headers": [{"key": "b", "value": None}]}, "header 'b' has no value"),
        ({"headers": [{"key": "KEYS", "value": b"1"}]}, "'KEYS' is a name that hastore or Rocket"),
        ({"headers": [{"key": "HS_SEQ", "value": b"1"}]}, "'HS_SEQ' is a name"),
        ({"headers": [{"key": "DELAY", "value": b"1"}]}, "'DELAY' is a name"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_named(parts, problem):
    fine = row(headers=[{"key": "a", "value": b"1"}], key=b"k")
    with pytest.raises(RowError) as refused:
        list(builder().build(batch([fine, fine, row(**parts), fine]), 100, 5))
    assert refused.value.row == 102
    assert problem in refused.value.problem


def own_names():
    """The names of properties that hastore's code has, by file."""
    pattern = re.compile(r'"(HS_[A-Z_]+)"')
    folder = Path(hastore.__file__).parent
    return {name for path in folder.rglob("*.py") for name in pattern.findall(path.read_text())}


def test_what_hastore_adds_to_a_message_is_reserved_and_can_be_left_out(tmp_path):
    # In the group's own topics: no messages.
    group_only = {"HS_TOPIC", "HS_QUEUES", "HS_GROUP", "HS_CHECKS"}
    assert own_names() == {"HS_PID", "HS_SEQ", "HS_DELAYED", "HS_NULL"} | group_only
    users = {"trip": "7", "HS_TOPIC": "a user's"}
    message = decode_record(
        build_record(
            "T", b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST,
            properties=[*users.items(), ("KEYS", "k"), ("TAGS", "a"), ("UNIQ_KEY", "u"),
                        ("MSG_REGION", "r"), ("TRACE_ON", "true"), ("CLUSTER", "c")],
        )
    )  # fmt: skip
    retry = retry_of(message, "G", level=0, times_max=16, retry_queue=0)
    found = decode_record(deliver(sent_back(message, retry)).record)
    names = {name for name, _ in found.property_pairs}
    assert "HS_DELAYED" in names and "REAL_TOPIC" in names and "RETRY_TOPIC" in names
    assert names - PRODUCER_PROPERTIES - ROCKETMQ_PROPERTIES == users.keys()

    raw, end = found.properties, np.array([len(found.properties)])
    [headers] = PropertyScan(pa.py_buffer(raw), np.array([0]), end).headers(HEADERS).to_pylist()
    assert {one["key"]: one["value"].decode() for one in headers} == users
    [built] = [*builder().build(batch([row(headers=headers)]), 0, 1)]
    again = decode_record(built.payload)
    assert dict(again.property_pairs).items() >= users.items()
    with opened(tmp_path) as store:
        [[result]] = store.put_encoded([built.payload])
        assert result.status is Status.PUT_OK
    for name in ("HS_PID", "HS_SEQ", "HS_DELAYED"):
        with pytest.raises(UsageError, match="reserved"):
            pairs_of(None, None, {name: "1"})
        with pytest.raises(RowError, match="reserves"):
            list(builder().build(batch([row(headers=[{"key": name, "value": b"1"}])]), 0, 1))


def test_what_nodes_add_to_a_message_of_hastore_s_producer_is_no_header():
    """It has no UNIQ_KEY, delayed, sent back or given up."""
    users = {"trip": "7", "TTL": "a user's"}

    def record(delay_level=None):
        pairs = pairs_of("k", "a", users, delay_level)
        pairs += [("HS_PID", "p"), ("HS_SEQ", "1")]
        return build_record(
            "T", b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST, properties=pairs
        )

    def headers_of(properties):
        end = np.array([len(properties)])
        scan = PropertyScan(pa.py_buffer(properties), np.array([0]), end)
        [headers] = scan.headers(HEADERS).to_pylist()
        return {one["key"]: one["value"].decode() for one in headers}

    plain = decode_record(record())
    assert headers_of(plain.properties) == users  # these are the user's own
    delayed = deliver(put_to_wait(record(delay_level=3), 18)).record
    again = retry_of(plain, "G", level=0, times_max=16, retry_queue=0)
    given_up = retry_of(plain, "G", level=-1, times_max=16, retry_queue=0)
    retried = deliver(sent_back(plain, again)).record
    for raw in (delayed, retried, sent_back(plain, given_up)):
        properties = decode_record(raw).properties
        assert b"REAL_TOPIC" in properties or b"RETRY_TOPIC" in properties
        assert headers_of(properties) == users


def test_every_form_of_strings_and_bytes_is_taken():
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()):
        data = pa.RecordBatch.from_arrays([pa.array(["ab"]).cast(kind)], ["value"])
        [chunk] = builder(SinkColumns(0), topic="t").build(data, 0, 5)
        assert decode_record(chunk.payload).body == b"ab"


def test_every_property_that_producer_takes_and_the_source_shows_can_be_written_back():
    """One message that the sink refuses would block `compact --to-topic` in each run."""
    for name in ("", *sorted(PRODUCER_PROPERTIES | ROCKETMQ_PROPERTIES)):
        try:
            pairs = pairs_of(None, None, {name: "1", "other": "2"})
        except UsageError:
            continue
        record = build_record(
            "T", b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST, properties=pairs
        )
        shown = headers_of(decode_record(record).properties)
        [built] = builder().build(batch([row(headers=shown)]), 0, 1)
        again = headers_of(decode_record(built.payload).properties)
        assert again == shown and {"key": "other", "value": b"2"} in shown, name


def headers_of(properties):
    scan = PropertyScan(pa.py_buffer(properties), np.array([0]), np.array([len(properties)]))
    [headers] = scan.headers(HEADERS).to_pylist()
    return headers


@pytest.mark.parametrize("afar", [False, True])
def test_a_body_that_the_source_has_decompressed_is_compressed_again(afar):
    part = random.randbytes(100_000) if afar else bytes(100_000)
    body = part * 60
    rows = [row(), row(value=body, key=b"k"), row(value=bytes(4 << 20)), row(value=None)]
    chunks = list(builder(born_host=Host.parse("[fe80::1]:0")).build(batch(rows), 0, 5))
    found = []
    for chunk in chunks:
        at = 0
        for _ in range(chunk.rows):
            size = int.from_bytes(chunk.payload[at : at + 4])
            raw, at = chunk.payload[at : at + size], at + size
            assert len(decode_record(raw).body) <= 4 << 20
            [read] = BatchBuilder(projection_of((Column.VALUE,))).build(
                memoryview(raw), np.array([0]), 0, None
            ).to_pylist()  # fmt: skip
            found.append((read["value"], decode_record(raw).sys_flag & 0x701))
    assert [value for value, _ in found] == [b"v", body, bytes(4 << 20), None]
    assert [flag for _, flag in found] == [0, 0x201 if afar else 0x301, 0, 0]


def test_a_partition_of_a_whole_cluster_is_written_to_its_queue():
    """The source numbers them by group and queue, and a topic has no more than 4,096 queues."""
    partitions = [0, 4_095, *(partition_of(name, 3) for name in ("g0", "orders", "x" * 40))]
    rows = [row(partition=one) for one in partitions]
    [chunk] = builder().build(batch(rows), 0, 5)
    at, found = 0, []
    while at < len(chunk.payload):
        size = int.from_bytes(chunk.payload[at : at + 4])
        found.append(decode_record(chunk.payload[at : at + size]).queue_id)
        at += size
    assert found == [0, 4_095, 3, 3, 3]
