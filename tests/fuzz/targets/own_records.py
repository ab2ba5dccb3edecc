"""Records that a node itself reads: commits, topics, statements, delays, half messages."""

from __future__ import annotations

import zlib

from hastore.errors import CorruptRecordError, MessageIllegalError
from hastore.protocol.committed_positions import (
    CommitBody,
    PositionMap,
    RecordedLocks,
    decode_commit,
    encode_commit,
)
from hastore.record import delays
from hastore.record.codec import decode_record, find_parts
from hastore.record.delays import deliver, marked, put_to_wait, real_place, retry_of, sent_back
from hastore.record.queue_ends import QUEUES_TOPIC, build_queue_ends, queue_ends_in
from hastore.record.topic_records import (
    SavedTopics,
    TopicChange,
    TopicConfig,
    TopicEntry,
    apply_change,
    build_change,
    change_in,
    decode_topics,
    encode_topics,
)
from hastore.record.transactions import (
    as_asked,
    checks_in,
    commit,
    ended_in,
    half_in,
    put_half,
    set_aside,
)
from tests.fuzz import kit
from tests.fuzz.targets.records import record
from tests.fuzz.targets.records import repaired as repaired_record

REACHES = (
    decode_commit, change_in, decode_topics, queue_ends_in, marked, deliver, put_to_wait, sent_back,
    commit, set_aside, as_asked, half_in, checks_in, ended_in, put_half, real_place,
    delays.level_of,
)  # fmt: skip
LEAST = kit.Least(0.3, 8)
TOKENS = (
    *(b"REAL_TOPIC\x01T\x02", b"REAL_QID\x010\x02", b"DELAY\x013\x02", b"HS_DELAYED\x011-5\x02"),
    *(
        b"PGROUP\x01g\x02",
        b"UNIQ_KEY\x01u\x02",
        b"TRAN_MSG\x01true\x02",
        b'"positions":{"0":[5,1,7]}',
    ),
    *(
        b'"locks":{"0":"c"}',
        b'"next":{"T":{"0":5}}',
        b'"config":{',
        b'"deleted":"T"',
        b'"origin":5',
    ),
)


def seeds() -> list[bytes]:
    """Return each kind, as hastore and RocketMQ write it."""
    config = TopicConfig("T", 4, 4, 6, attributes={"a": "b"})
    change = decode_record(build_change(TopicChange(config, origin=5), 5)).properties
    gone = decode_record(build_change(TopicChange(deleted="T"), 5)).properties
    entry = TopicEntry(config, 5, 5, 5, 1)
    saved = encode_topics(SavedTopics({"T": entry}, 900, ((100, {"U": None, "T": entry}),)))
    (ends,) = build_queue_ends([("T", 0, 5), ("é", 3, 7)], since=9, ident=1, now_ms=5)
    body = CommitBody("g", "T", {0: (5, 1, 7), 1: (6, None, None)}, {0: 3}, {2: "c"}, {3: "d"}, "m")
    waits = record(
        topic="SCHEDULE_TOPIC_XXXX",
        queue_id=2,
        properties=b"REAL_TOPIC\x01T\x02REAL_QID\x011\x02DELAY\x013\x02HS_PID\x01p\x02",
    )
    half = record(topic="RMQ_SYS_TRANS_HALF_TOPIC", sys_flag=0, properties=(
        b"REAL_TOPIC\x01T\x02REAL_QID\x011\x02PGROUP\x01g\x02UNIQ_KEY\x01u\x02TRAN_MSG\x01true\x02"
    ))  # fmt: skip
    return [
        b'c{"group":"g","topic":"T","positions":{},"more":' + b"[" * 1_500,
        b'c{"group":"\xff"}',
        b"c" + encode_commit(body),
        b'c{"group":"","topic":"T","positions":{}}',
        b"c[]",
        repaired(b"q" + b"HS_QUEUES\x01" + bytes(8) + b'{"since":' + b"[" * 1_500),
        b"t" + change,
        b"t" + gone,
        b"s" + saved,
        b"s",
        b"q" + decode_record(ends).properties,
        b"d" + waits,
        b"d" + half,
        b"d" + record(properties=b"DELAY\x01-1\x02"),
        b"d" + record(properties=b"DELAY\x013\x02KEYS\x01k\x02HS_PID\x01p\x02HS_SEQ\x011\x02"),
        b"d" + record(properties=b"DELAY\x01x\x02"),
        b"d" + record(sys_flag=4),
        b"d" + waits[:-4],
        b"h"
        + b"TRANSACTION_CHECK_TIMES\x013\x02CHECK_IMMUNITY_TIME_IN_SECONDS\x0160\x02UNIQ_KEY\x01u",
        b"h" + b"HS_CHECKS\x015-1,9-2\x02HS_DELAYED\x012-500\x02",
        b"o" + b"5,6, 7 ,x,9" + b"9" * 20,
    ]


def repaired(data: bytes) -> bytes:
    """Return the input with the CRC of its text, or of its record."""
    kind, raw = data[:1], data[1:]
    if kind == b"d":
        return kind + repaired_record(raw)
    at = raw.find(b"\x01") + 1 if kind in (b"t", b"q") else 0
    if kind in (b"t", b"q", b"s") and len(raw) > at + 8:
        stop = raw.find(b"\x02", at) if kind != b"s" else len(raw)
        text = raw[at + 8 : stop if stop >= 0 else len(raw)]
        return kind + raw[:at] + b"%08x" % zlib.crc32(text) + raw[at + 8 :]
    return data


def one(data: bytes) -> None:
    """Read what replay reads of such a record; write it, and read it again."""
    kind, raw = data[:1], data[1:]
    if kind == b"c":
        with kit.documented(CorruptRecordError):
            body = decode_commit(raw)
        assert decode_commit(encode_commit(body)) == body
        RecordedLocks().apply(body, 5)
        positions = PositionMap()
        positions.apply_commit(body, 1_000)
        for place in positions.find(body.group, body.topic).values():
            assert place.origin <= 1_000
    elif kind == b"t":
        change = change_in(raw)
        kit.refuse(change, "no change of a topic")
        assert change is not None and (change.config is None) != (change.deleted is None)
        apply_change({}, change, 5)
        again = change_in(decode_record(build_change(change, 5)).properties)
        assert again == change
    elif kind == b"s":
        saved = decode_topics(raw)
        kit.refuse(saved, "no file of topics")
        assert saved is not None
        for end in (0, saved.offset - 1, saved.offset, 2**63 - 1):
            assert saved.at(max(0, end)).offset <= max(end, 0) or end < 0
        assert decode_topics(encode_topics(saved)) == saved
    elif kind == b"q":
        found = queue_ends_in(QUEUES_TOPIC, 0xC, raw)
        kit.refuse(found, "no statement")
        assert found is not None and 0 <= found.part < found.parts
        for topic, queue_id, after in found.queues:
            assert isinstance(topic, str) and queue_id >= 0 and 0 <= after < 2**63
            topic.encode("utf-8", "surrogateescape")
    elif kind == b"o":
        assert all(0 <= place < 10**18 for place in ended_in(raw))
    elif kind == b"h":
        half = half_in(raw)
        assert all(part is not None and len(part) <= 255 for part in half.identity)
        assert 0 <= half.checks < 10**9
        checks_in(raw)
        mark = marked(raw)
        assert mark is None or (0 <= mark.level and 0 <= mark.offset < 2**63)
    else:
        _moved(raw)


def _moved(raw: bytes) -> None:
    """Make of a record all that a node makes of it; each is a whole record, or is refused."""
    refusals: list[Exception] = []
    made: list[bytes] = []
    steps = (
        lambda: deliver(raw).record, lambda: commit(raw).record, lambda: set_aside(raw, 15),
        lambda: as_asked(raw)[0], lambda: put_to_wait(raw, 18),
        lambda: _back(raw), lambda: put_half(raw) and None,
    )  # fmt: skip
    for step in steps:
        try:
            one = step()
        except (CorruptRecordError, MessageIllegalError) as refused:
            refusals.append(refused)
        else:
            made += [] if one is None else [one]
    for one in made:
        parts = find_parts(one, 0, len(one))
        assert parts is not None and parts[0] == len(one)
        decode_record(one)
    if refusals and (not made or len(raw) % 4 == 0):  # each place that refuses is to be met
        with kit.documented(CorruptRecordError, MessageIllegalError):
            raise refusals[len(raw) % len(refusals)]


def _back(raw: bytes) -> bytes:
    found = decode_record(raw)
    retry = retry_of(found, "g", level=0, times_max=16, retry_queue=0)
    return sent_back(found, retry)
