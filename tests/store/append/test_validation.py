"""Which records of a put are refused, with which status and reason."""

from pathlib import Path
from typing import Any

import pytest

from hastore.errors import Status
from hastore.record.codec import NO_HOST, Host, build_record, decode_record
from hastore.record.delays import deliver
from hastore.record.properties import MAX_CREATED_TOPIC, MAX_KEYS
from hastore.record.transactions import HALF_TOPIC, commit, half_pairs, set_aside
from hastore.store.append.results import DeliveriesIf
from tests.store import kit
from tests.store.kit import bodies, message
from tests.store.test_store_times import Classic, Clock, Ledger, opened


def test_each_bad_record_is_refused_alone(tmp_path: Path) -> None:
    bad_crc = bytearray(message(1))
    bad_crc[90] ^= 1
    bad_properties = message(2).replace(b"KEYS\x01", b"KEYS\x03")
    batch = message(4, sys_flag=0x80)
    with kit.opened(tmp_path, max_message_size=1000) as store:
        payload = b"".join(
            [message(0), bad_crc, bad_properties, message(3, size=1001), batch]
            + [message(5, topic="a.b"), message(6, queue_id=4), message(7, queue_id=-1), message(8)]
        )
        (results,) = store.put_encoded([payload])
        taken = [result.status is Status.PUT_OK for result in results]
        assert taken == [True] + [False] * 7 + [True]
        reasons = [result.reason or "" for result in results]
        assert "CRC" in reasons[1]
        assert "store.max_message_size" in reasons[3]
        assert "inner batch" in reasons[4]
        assert "a.b" in reasons[5]
        assert "store.default_queues" in reasons[6]
        assert all(results[place].offset is None for place in range(1, 8))
        assert bodies(store) == [decode_record(message(n)).body for n in (0, 8)]


def test_a_value_may_hold_the_byte_that_ends_a_name(tmp_path: Path) -> None:
    """As RocketMQ's clients may send it; a piece without that byte is no property."""
    odd = message(1).replace(b"KEYS\x01k", b"KEYS\x01\x01")
    assert odd != message(1)
    with kit.opened(tmp_path) as store:
        (results,) = store.put_encoded([odd + message(2).replace(b"KEYS\x01", b"KEYS\x02")])
        assert [one.status for one in results] == [Status.PUT_OK, Status.MESSAGE_ILLEGAL]


@pytest.mark.parametrize("shape", ["uniform", "mixed", "IPv6", "numbered"])
@pytest.mark.parametrize("kind", [Classic, Ledger])
def test_a_record_has_a_bounded_number_of_keys(tmp_path: Path, kind: Any, shape: str) -> None:
    """Each key is an entry of the index: replay of one record with 8,100 takes as long as a put."""

    def keyed(number: int, *values: str) -> bytes:
        properties = [("A", "a b"), *(("KEYS", value) for value in values), ("B", "c d")]
        host = Host.parse("[::1]:1") if shape == "IPv6" else NO_HOST
        producer = [("HS_PID", "p"), ("HS_SEQ", str(number))] if shape == "numbered" else []
        return message(number, properties=[*properties, *producer], born_host=host)

    most = " ".join(f"k{n}" for n in range(MAX_KEYS))
    allowed = [keyed(0, most), keyed(1, "k"), keyed(2, most), keyed(3, " " * (MAX_KEYS - 1))]
    refused = [keyed(4, most + " k"), keyed(5, "k", most + " k"), keyed(6, most + " k", "k")]
    refused.append(keyed(7, "k " * 8_100))
    payload = b"".join([*allowed, *refused, keyed(8, most)])
    if shape == "mixed":
        payload += message(9, topic="TopicB")
    with opened(kind, tmp_path, Clock()) as node:
        messages, put = node.messages, node.store
        for _ in range(2):  # first the topic is not known
            if kind is Ledger:
                [results] = put.put(1, [payload]).results
            else:
                [results] = put.put_encoded([payload])
            taken = [result.status is Status.PUT_OK for result in results]
            assert taken == [True] * 4 + [False] * 4 + [True] * (len(taken) - 8)
            for result, words in zip(results[4:8], [2_049, 2_049, 2_049, 8_101], strict=True):
                assert result.status is Status.MESSAGE_ILLEGAL and result.reason == (
                    f"KEYS has {words:,} words; at most 2,048 are allowed, because each is an entry"
                    " of the key index: give the message fewer keys"
                )
            one = refused[0]  # alone: the fast path must not take it
            results = put.put(1, [one]).results if kind is Ledger else put.put_encoded([one])
            assert [each.status for each in results[0]] == [Status.MESSAGE_ILLEGAL]
        assert messages.wait_dispatched(messages.max_offset, 60)
        assert len(messages.reader.query_key("TopicA", f"k{MAX_KEYS - 1}")) > 2


@pytest.mark.parametrize("cut", [1, 50, 120])
def test_a_payload_that_holds_no_records_is_refused_whole(tmp_path: Path, cut: int) -> None:
    with kit.opened(tmp_path) as store:
        for payload in (message(0) + message(1)[:cut], message(0)[cut:], b"\xff" * 200):
            ((result,),) = store.put_encoded([payload])
            assert result.status is Status.MESSAGE_ILLEGAL
        assert store.put_encoded([b""]) == [[]]
        assert store.put_encoded([]) == []
        assert store.max_offset == 0


def test_too_many_properties_have_a_status_of_their_own(tmp_path: Path) -> None:
    raw = bytearray(message(0, properties=[("KEYS", "k" * 100)]))
    at = raw.index(b"KEYS") - 2
    raw[at : at + 2] = (40_000).to_bytes(2)
    raw[at + 2 :] = b"KEYS\x01" + b"k" * (40_000 - 6) + b"\x02"
    raw[:4] = len(raw).to_bytes(4)
    with kit.opened(tmp_path) as store:
        ((result,),) = store.put_encoded([bytes(raw)])
        assert result.status is Status.PROPERTIES_SIZE_EXCEEDED


@pytest.mark.parametrize("kind", ["delayed", "half"])
def test_a_message_that_waits_leaves_room_for_what_it_gets_later(tmp_path: Path, kind: str) -> None:
    """Else it is acknowledged, and can never be delivered, committed or set aside."""
    topic = "t" * MAX_CREATED_TOPIC
    pairs = [("DELAY", "1"), ("HS_PID", "p"), ("HS_SEQ", "1")]
    if kind == "half":
        topic, pairs = HALF_TOPIC, half_pairs(topic, 0, "g", "u", ())
    later = DeliveriesIf(lambda: None)
    with kit.opened(tmp_path) as store:
        for size in range(kit.FILE_SIZE - 800, kit.FILE_SIZE + 400, 3):
            raw = build_record(
                topic, bytes(size - 400), queue_id=0, properties=pairs,
                born_timestamp_ms=0, born_host=NO_HOST,
            )  # fmt: skip
            pairs = [(name, str(size) if name == "HS_SEQ" else value) for name, value in pairs]
            ((result,),) = store.put_encoded([raw])
            if result.status is not Status.PUT_OK:
                break
            assert result.offset is not None and result.end_offset is not None
            with store.view(result.offset, result.end_offset - result.offset) as view:
                stored = bytes(view)
            made = [deliver(stored).record] if kind == "delayed" else []
            if kind == "half":
                made = [commit(stored).record, set_aside(stored, 1_000_000_000)]
            for record in made:
                ((result,),) = store.put_encoded([record], [later])
                assert result.status is Status.PUT_OK, (size, result)
        else:
            pytest.fail("each size was accepted")
        assert "the log takes up to" in (result.reason or "")
