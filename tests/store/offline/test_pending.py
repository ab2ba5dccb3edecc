"""The records on which a RocketMQ broker would still act."""

import json
from pathlib import Path

from hastore.record.codec import NO_HOST, Record, build_record
from hastore.record.transactions import ASIDE_TOPIC, HALF_TOPIC, OP_TOPIC
from hastore.store.append.results import own_records
from hastore.store.offline.pending import TIMER_TOPIC, Owed, find_pending, pending_of
from tests.store.kit import opened

REVIVED = "rmq_sys_REVIVE_LOG_test"
STORED_MS = 1_700_000_000_000


def record(
    topic: str,
    offset: int,
    *,
    body: bytes = b"",
    queue: tuple[int, int] = (0, 0),
    **properties: object,
) -> Record:
    queue_id, queue_offset = queue
    raw = "".join(f"{name}\x01{value}\x02" for name, value in properties.items()).encode()
    return Record(
        body, topic, queue_id, raw, queue_offset=queue_offset, physical_offset=offset,
        store_timestamp_ms=STORED_MS,
    )  # fmt: skip


def test_delayed_messages_are_pending_until_they_are_delivered() -> None:
    """A delay level is the id of its queue: 0 for 1 s, 17 for 2 h."""
    delayed = [
        record("SCHEDULE_TOPIC_XXXX", 0, REAL_TOPIC="T", UNIQ_KEY="a", queue=(0, 0)),
        record("SCHEDULE_TOPIC_XXXX", 100, REAL_TOPIC="T", UNIQ_KEY="b", queue=(17, 0)),
        record("SCHEDULE_TOPIC_XXXX", 200, REAL_TOPIC="T", UNIQ_KEY="c", queue=(18, 0)),
        record(TIMER_TOPIC, 300, REAL_TOPIC="T", UNIQ_KEY="d", TIMER_OUT_MS=STORED_MS + 5),
    ]
    found = pending_of(delayed)
    assert [(one.kind, one.topic, one.key) for one in found] == [
        (Owed.DELAYED, "T", key) for key in "abcd"
    ]
    assert [one.due_ms for one in found] == [
        STORED_MS + 1_000, STORED_MS + 7_200_000, None, STORED_MS + 5,
    ]  # fmt: skip
    delivered = [record("T", 400, UNIQ_KEY="b"), record("Other", 500, UNIQ_KEY="a")]
    assert [one.key for one in pending_of([*delayed, *delivered])] == ["a", "c", "d"]


def test_the_times_are_those_of_the_levels_that_the_node_had(tmp_path: Path) -> None:
    """An operator who waited for them before leaving a broker was told RocketMQ's default ones."""
    waits = build_record(
        "SCHEDULE_TOPIC_XXXX", b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST,
        properties=[("DELAY", "1"), ("REAL_TOPIC", "T"), ("REAL_QID", "0")],
    )  # fmt: skip
    with opened(tmp_path, message_delay_level="10m 1h") as store:
        [[put]] = store.put_encoded([waits], [own_records])
        assert put.store_timestamp_ms is not None and store.wait_dispatched(store.max_offset, 60)
    (tmp_path / "hastore/limits").unlink()  # it says that nothing is confirmed
    [one] = find_pending(str(tmp_path))
    assert one.due_ms == put.store_timestamp_ms + 600_000


def test_a_recalled_timer_message_is_not_pending_and_nor_is_its_recall() -> None:
    """As RocketMQ 5.3.3 writes them; who sent again what the list had sent what was taken back."""

    def waits(offset: int, key: str, due: int, recalls: str = "") -> Record:
        about = {"TIMER_DEL_UNIQKEY": recalls} if recalls else {}
        return record(
            TIMER_TOPIC, offset, REAL_TOPIC="T", UNIQ_KEY=key, TIMER_OUT_MS=STORED_MS + due, **about
        )

    messages = [waits(0, "a", 5), waits(100, "b", 5), waits(200, "c", 5)]
    recall = waits(300, "b", 5, "T+b")
    assert [one.key for one in pending_of([*messages, recall])] == ["a", "c"]
    rolled = waits(400, "b", 5)  # a long delay's message is written again, in any order
    assert [one.key for one in pending_of([*messages, recall, rolled])] == ["a", "c"]
    earlier = waits(300, "b", 5, "b")  # RocketMQ before 5.3 names no topic
    assert [one.key for one in pending_of([*messages, earlier])] == ["a", "c"]
    # The broker looks only among what is due at the same time, and in the same topic.
    others = [waits(300, "b", 6, "T+b"), waits(400, "b", 5, "Other+b")]
    assert [one.key for one in pending_of([*messages, *others])] == ["a", "b", "c"]


def pop_record(
    offset: int, tag: str, content: dict[str, object], topic: str = TIMER_TOPIC
) -> Record:
    """A record of a broker 5.3.3 for a pop of the group `workers` from queue 2 of Orders."""
    body = json.dumps({"c": "workers", "t": "Orders", "q": 2, "so": 10, "pt": 500, **content})
    key = f"Orders@2@10@workers@500@g0@{tag}{content.get('ao', '')}"
    return record(
        topic, offset, body=body.encode(), REAL_TOPIC=REVIVED, UNIQ_KEY=key, TAGS=tag,
        TIMER_OUT_MS=60_000,
    )  # fmt: skip


def test_what_was_popped_is_pending_until_it_is_acknowledged_or_given_again() -> None:
    """Its group's position is behind it already, and hastore gives none of it again."""
    checkpoint = pop_record(0, "ck", {"bm": 0, "n": 4, "it": 60_000, "d": [0, 1, 2, 4]})
    acks = [pop_record(100, "ack", {"ao": 11}), pop_record(200, "bAck", {"aol": [10, 99]})]
    late = pop_record(300, "ack", {"ao": 12}, REVIVED)  # after its time: it waits no more
    other = pop_record(400, "ack", {"ao": 14, "pt": 501})
    [one] = pending_of([checkpoint, *acks, late, other])
    assert (one.kind, one.topic, one.key, one.queue_id) == (Owed.POPPED, "Orders", "workers", 2)
    assert (one.offset, one.due_ms, one.queue_offset, one.popped) == (0, 60_500, 14, (14,))
    rolled = pop_record(500, "ck", {"n": 4, "it": 60_000, "d": [0, 1, 2, 4]})
    assert [one.popped for one in pending_of([checkpoint, *acks, rolled])] == [(12, 14)]
    assert pending_of([checkpoint, *acks, late, pop_record(500, "ack", {"ao": 14})]) == []
    given = pop_record(600, "ck", {"n": 4, "it": 60_000}, REVIVED)
    assert pending_of([checkpoint, *acks, given]) == []
    assert pending_of([record(REVIVED, 0, body=b"{}"), record(REVIVED, 9, body=b"\xff")]) == []
    [all_of_it] = pending_of([pop_record(0, "ck", {"n": 3, "it": 1})])
    assert all_of_it.popped == (10, 11, 12)


def test_half_messages_are_pending_until_they_are_committed_or_ended() -> None:
    halves = [
        record(HALF_TOPIC, 100 * number, REAL_TOPIC="T", UNIQ_KEY=key, queue=(0, number))
        for number, key in enumerate("abc")
    ]
    ended = record(OP_TOPIC, 400, body=b"1,", queue=(0, 7))
    committed = record("T", 500, UNIQ_KEY="c")
    assert [one.key for one in pending_of(halves)] == ["a", "b", "c"]
    found = pending_of([*halves, ended, committed])
    assert [(one.kind, one.offset, one.queue_offset) for one in found] == [(Owed.HALF, 0, 0)]


def test_a_half_message_that_was_set_aside_is_not_pending() -> None:
    """RocketMQ's broker lists none of these as ended: it only writes them to that topic."""
    halves = [
        record(HALF_TOPIC, 100 * at, REAL_TOPIC="T", UNIQ_KEY="k", PGROUP=group, queue=(0, at))
        for at, group in enumerate("pq")
    ]
    aside = record(ASIDE_TOPIC, 300, REAL_TOPIC="T", UNIQ_KEY="k", PGROUP="p", queue=(0, 0))
    assert [one.offset for one in pending_of([*halves, aside])] == [100]
    sent_again = record(HALF_TOPIC, 400, REAL_TOPIC="T", UNIQ_KEY="k", PGROUP="p", queue=(0, 2))
    assert [one.offset for one in pending_of([*halves, aside, sent_again])] == [100, 400]


def test_half_messages_of_two_producers_may_have_one_key() -> None:
    """The list of what is open lacked the first one."""
    halves = [
        record(HALF_TOPIC, 100 * number, REAL_TOPIC="T", UNIQ_KEY="a", PGROUP=group,
               queue=(0, number))
        for number, group in enumerate(("g", "h"))
    ]  # fmt: skip
    assert [one.offset for one in pending_of(halves)] == [0, 100]
    committed = record("T", 500, UNIQ_KEY="a", PGROUP="h")
    assert [one.offset for one in pending_of([*halves, committed])] == [0]
    ended = record(OP_TOPIC, 400, body=b"1,")
    assert [one.offset for one in pending_of([*halves, ended])] == [0]


def test_what_hastore_has_delivered_is_not_pending() -> None:
    """Its own delayed messages have no UNIQ_KEY; who sent again what the list had, sent twice."""
    waiting = [
        record("SCHEDULE_TOPIC_XXXX", 100, REAL_TOPIC="T", queue=(0, 0)),
        record("SCHEDULE_TOPIC_XXXX", 200, REAL_TOPIC="T", queue=(17, 0)),
        record("SCHEDULE_TOPIC_XXXX", 300, REAL_TOPIC="T", UNIQ_KEY="a", queue=(0, 1)),
    ]
    first = record("T", 400, REAL_TOPIC="T", HS_DELAYED="1-100")
    assert [one.offset for one in pending_of([*waiting, first])] == [200, 300]
    second = record("T", 500, REAL_TOPIC="T", UNIQ_KEY="a", HS_DELAYED="1-300")
    assert [one.offset for one in pending_of([*waiting, first, second])] == [200]


def test_a_delivery_of_hastore_hides_no_other_message() -> None:
    """Those of a broker's in the same level, and a later send with the same UNIQ_KEY."""
    waiting = [
        record("SCHEDULE_TOPIC_XXXX", 0, REAL_TOPIC="T", UNIQ_KEY="brokers", queue=(2, 0)),
        record("SCHEDULE_TOPIC_XXXX", 100, REAL_TOPIC="T", UNIQ_KEY="a", queue=(2, 1)),
        record("SCHEDULE_TOPIC_XXXX", 200, REAL_TOPIC="T", UNIQ_KEY="a", queue=(2, 2)),
    ]
    first = record("T", 300, REAL_TOPIC="T", UNIQ_KEY="a", HS_DELAYED="3-100")
    assert [one.offset for one in pending_of([*waiting, first])] == [0, 200]
    odd = [
        record("T", 300, REAL_TOPIC="T", UNIQ_KEY="a", HS_DELAYED="1-200"),  # of no such level
        record("T", 310, REAL_TOPIC="T", HS_DELAYED="3-9999"),  # a message behind the delivery
    ]
    assert [one.offset for one in pending_of([*waiting, *odd])] == [0, 200]


def test_what_was_taken_over_from_a_broker_as_delivered_is_not_pending() -> None:
    """The record of HASTORE_DELAYS names the last message of a level that it had delivered."""
    waiting = [
        record("SCHEDULE_TOPIC_XXXX", 0, REAL_TOPIC="T", queue=(0, 0)),
        record("SCHEDULE_TOPIC_XXXX", 100, REAL_TOPIC="T", queue=(0, 1)),
        record("SCHEDULE_TOPIC_XXXX", 150, REAL_TOPIC="T", queue=(1, 0)),
        record("SCHEDULE_TOPIC_XXXX", 200, REAL_TOPIC="T", queue=(0, 2)),
        record(TIMER_TOPIC, 50, REAL_TOPIC="T", UNIQ_KEY="d", TIMER_OUT_MS=STORED_MS + 5),
    ]
    taken = record("HASTORE_DELAYS", 300, HS_DELAYED="1-100")
    assert [one.offset for one in pending_of([*waiting, taken])] == [50, 150, 200]
