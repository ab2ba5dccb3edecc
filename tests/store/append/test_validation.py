"""Which records of a put are refused, with which status and reason."""

from pathlib import Path

import pytest

from hastore.errors import Status
from hastore.record.codec import decode_record
from tests.store.kit import bodies, message, opened


def test_each_bad_record_is_refused_alone(tmp_path: Path) -> None:
    bad_crc = bytearray(message(1))
    bad_crc[90] ^= 1
    bad_properties = message(2).replace(b"KEYS\x01", b"KEYS\x03")
    batch = message(4, sys_flag=0x80)
    with opened(tmp_path, max_message_size=1000) as store:
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


@pytest.mark.parametrize("cut", [1, 50, 120])
def test_a_payload_that_holds_no_records_is_refused_whole(tmp_path: Path, cut: int) -> None:
    with opened(tmp_path) as store:
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
    with opened(tmp_path) as store:
        ((result,),) = store.put_encoded([bytes(raw)])
        assert result.status is Status.PROPERTIES_SIZE_EXCEEDED
