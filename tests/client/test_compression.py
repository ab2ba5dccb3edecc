"""Compressed bodies from the producers' arguments to the consumers' messages, over real servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import hastore.aio
from hastore import Admin, Consumer, OutgoingMessage, Producer
from hastore.client.messages import decode_messages
from hastore.client.producer import preparer
from hastore.errors import CorruptRecordError, UsageError
from hastore.record.codec import Record, decode_record
from hastore.record.compression import ALGORITHMS, compress, decompress
from tests.client.conftest import Node

BODY = b"a body that repeats itself, " * 200  # 5,600 bytes
FLAGS = {"lz4": 0x101, "zstd": 0x201, "zlib": 0x301}


def stored(node: Node) -> list[Record]:
    log, at, found = bytes(node.backend.store.log), 0, list[Record]()
    while at < len(log):
        found.append(decode_record(log, at))  # it compares the body with its CRC
        at += found[-1].size
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_long_bodies_are_stored_compressed_and_read_as_they_were(
    node: Node, algorithm: Any
) -> None:
    bodies = [BODY, BODY[:4_096], BODY[:4_095], b"", BODY]
    with Producer([node.address], compression=algorithm) as producer:
        futures = [
            producer.send("t", body, queue=0, key="k", tags="a", properties={"p": "1"})
            for body in bodies
        ]
        futures.append(producer.send("t", BODY, queue=0))  # without properties of its own
        for future in futures:
            future.result(30)
    records = stored(node)
    bodies.append(BODY)
    packed = [True, True, False, False, True, True]
    assert [record.sys_flag for record in records] == [FLAGS[algorithm] * each for each in packed]
    assert [len(record.body) < 500 for record in records] == [len(body) != 4_095 for body in bodies]
    with Consumer("t", [node.address], queues=[0]) as consumer:
        messages = consumer.poll(timeout_s=30)
    assert [message.body for message in messages] == bodies
    assert [message.raw_body for message in messages] == [record.body for record in records]
    assert [message.compression for message in messages] == [
        algorithm if each else None for each in packed
    ]
    assert messages[0].properties == {
        "KEYS": "k", "TAGS": "a", "p": "1", "HS_PID": producer.producer_id, "HS_SEQ": "0"
    }  # fmt: skip
    assert [message.record.body for message in messages] == [record.body for record in records]
    with Admin([node.address]) as admin:
        found = admin.query_message_id(messages[0].message_id)
    assert found is not None and found.body == BODY


def test_the_threshold_is_the_callers_and_no_compression_is_the_default(node: Node) -> None:
    with Producer([node.address], compression="zlib", compression_threshold=100) as producer:
        producer.send_sync("t", BODY[:99])
        producer.send_sync("t", BODY[:100])
    with Producer([node.address]) as producer:
        producer.send_sync("t", BODY * 100)
    assert [record.sys_flag for record in stored(node)] == [0, 0x301, 0]


def test_batches_are_not_compressed_as_rocketmqs_are_not(node: Node) -> None:
    async def send_all() -> None:
        async with hastore.aio.Producer([node.address], compression="zstd") as producer:
            await producer.send_batch("t", [BODY, OutgoingMessage(BODY, key="k")])
            await producer.send("t", BODY)

    with Producer([node.address], compression="zstd") as producer:
        producer.send_batch("t", [BODY, OutgoingMessage(BODY, key="k")]).result(30)
    asyncio.run(send_all())
    assert [record.sys_flag for record in stored(node)] == [0, 0, 0, 0, 0x201]


def test_a_message_that_is_sent_again_has_the_same_bytes(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first master stores it and ends without an answer; the other one knows it again."""
    master, slave = pair
    packings = []

    def differently(body: bytes, algorithm: str) -> tuple[bytes, int]:
        packings.append(algorithm)
        return compress(body + b"%d" % len(packings), algorithm)

    monkeypatch.setattr(preparer, "compress", differently)
    master.backend.transfer.hold = True  # stores, and does not answer
    puts: list[bytes] = []
    real = slave.backend.put_encoded

    def put(payloads: Any, guards: Any = None) -> Any:
        puts.extend(bytes(payload) for payload in payloads)
        return real(payloads, guards)

    monkeypatch.setattr(slave.backend, "put_encoded", put)
    with Producer([master.address], compression="zstd", delivery_timeout_s=60) as producer:
        future = producer.send("t", BODY, queue=0)
        while not master.backend.store.log:
            assert not future.done()
        first = bytes(master.backend.store.log)
        master.stop()
        master.backend.writable = False
        slave.backend.entries = [*slave.backend.entries, (131074, len(first))]
        slave.backend.writable = True
        slave.backend.master = slave.backend.node
        future.result(60)
    assert packings == ["zstd"]
    [record] = stored(slave)
    assert decompress(record.body, record.sys_flag, "it") == BODY + b"1"
    assert puts and all(record.body in put for put in puts)
    master.restart()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "snappy"}, 'compression: expected one of "lz4", "zstd", "zlib", got'),
        ({"compression": 1}, 'compression: expected one of "lz4"'),
        ({"compression": "lz4", "compression_threshold": -1}, "compression_threshold: expected an"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Producer(["tcp://127.0.0.1:1"], **options)


def test_a_body_that_does_not_decompress_stops_no_reader(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error that names the record, for who reads this body; the others are read."""
    bodies = iter([(b"junk", 0x301), (b"junk", 0x501), compress(BODY, "zlib")])
    monkeypatch.setattr(preparer, "compress", lambda *_: next(bodies))
    with Producer([node.address], compression="zlib") as producer:
        for _ in range(3):
            producer.send_sync("t", BODY, queue=0)
    with Consumer("t", [node.address], queues=[0]) as consumer:
        damaged, unknown, whole = consumer.poll(timeout_s=30)
        where = r"record at offset 0 \(queue 0 of t, queue offset 0\) does not decompress \(zlib\)"
        with pytest.raises(CorruptRecordError, match=where):
            _ = damaged.body
        with pytest.raises(CorruptRecordError, match="unknown compression 5; it can be read as"):
            _ = unknown.body
        assert (damaged.raw_body, unknown.compression, whole.body) == (b"junk", "", BODY)
        assert repr(damaged) == "Message('t', queue 0, queue offset 0, offset 0, 4 bytes)"
        assert consumer.position(0).queue_offset == 3


def test_compressed_records_among_others_are_checked_like_them(node: Node) -> None:
    with Producer([node.address], compression="lz4") as producer:
        for body in (b"x", b"y", BODY, b"z", BODY, BODY, b"x"):
            producer.send_sync("t", body, queue=0)
    log = bytes(node.backend.store.log)
    messages, damage = decode_messages(log, [(65537, 0)])
    assert damage is None and [len(one.body) for one in messages] == [1, 1, 5600, 1, 5600, 5600, 1]
    assert {one.epoch for one in messages} == {65537}
    fifth = messages[4]
    torn = bytearray(log)
    torn[fifth.offset + 100] ^= 1  # in its compressed body: the CRC is of that
    messages, damage = decode_messages(bytes(torn), [(65537, 0)])
    assert len(messages) == 4 and damage is not None
