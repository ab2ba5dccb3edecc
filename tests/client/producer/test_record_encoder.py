"""The producer's encoder writes the same bytes as build_record."""

import random
import time
from zlib import crc32

import pytest

from hastore.client.producer import preparer
from hastore.client.producer.preparer import RecordEncoder
from hastore.errors import MessageIllegalError
from hastore.record.codec import NO_HOST, Host, build_record, decode_record

HOSTS = [Host.parse("127.0.0.1:0"), Host.parse("[::1]:0")]
TEXT = "abcXYZ019 _-%äß漢"


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("host", HOSTS, ids=["IPv4", "IPv6"])
def test_the_bytes_are_those_of_build_record(host: Host, numbered: bool) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    encoder = RecordEncoder("0123456789abcdef" if numbered else None, host)
    for _ in range(300):
        topic = "t" * chance.choice([1, 1, 1, 5, 127, 128, 300])
        body = chance.randbytes(chance.choice([0, 1, 30, 1024, 70_000]))
        pairs = [
            (name, "".join(chance.choices(TEXT, k=chance.randrange(12))))
            for name in ("KEYS", "TAGS", "colour")[: chance.choice([0, 0, 0, 1, 2, 3])]
        ]
        sequence = chance.randrange(chance.choice([10, 10, 100, 10**18]))
        queue_id, born_ms = chance.randrange(9), 1_700_000
        own = [("HS_PID", "0123456789abcdef"), ("HS_SEQ", str(sequence))] if numbered else []
        expected = build_record(
            topic, body, queue_id=queue_id, properties=[*pairs, *own],
            born_timestamp_ms=born_ms, born_host=host,
        )  # fmt: skip
        assert encoder.encode(topic, body, queue_id, pairs, sequence, born_ms) == expected
        assert decode_record(expected).body == body


@pytest.mark.parametrize("known", [True, False], ids=["known topic", "new topic"])
@pytest.mark.parametrize("host", HOSTS, ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("during", [True, False], ids=["during a message", "between messages"])
def test_a_host_that_is_learnt_later_is_in_the_next_message(
    host: Host, known: bool, during: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up of a name ends at any time, in a thread of its own."""
    encoder = RecordEncoder(None, NO_HOST)
    if known:
        encoder.encode("t", b"first", 0, [], 0, 1)
    if during:
        with monkeypatch.context() as patched:
            patched.setattr(
                preparer, "crc32", lambda body: (encoder.learn_host(host), crc32(body))[1]
            )
            record = decode_record(encoder.encode("t", b"second", 0, [], 1, 1))
        assert (record.born_host, record.body) == (NO_HOST, b"second"), "as it began"
    else:
        encoder.learn_host(host)
    for _ in range(2):
        record = decode_record(encoder.encode("t", b"third", 0, [], 2, 1))
        assert (record.born_host, record.body) == (host, b"third")


def test_what_no_record_can_hold_is_refused() -> None:
    encoder = RecordEncoder("0123456789abcdef", HOSTS[0])
    with pytest.raises(MessageIllegalError, match="separator"):
        encoder.encode("t", b"", 0, [("a", "b\x02c")], 1, 1)
    with pytest.raises(MessageIllegalError, match="bytes of properties"):
        encoder.encode("t", b"", 0, [("a", "b" * 32_740)], 1, 1)
