"""A put's guard: each record is judged by its own topic, on the fast path and on the slow one."""

import random

import pytest

from hastore.errors import Status
from hastore.record.codec import NO_HOST, Host, build_record
from tests.store.kit import opened

TOPICS = ("orders", "orders-2", "money", "HASTORE_POSITIONS")


def record(topic, number, born_host=NO_HOST):
    properties = (("HS_PID", f"p-{topic}"), ("HS_SEQ", str(number)))
    return build_record(
        topic, b"%d" % number, queue_id=0, born_timestamp_ms=1, born_host=born_host,
        properties=properties,
    )  # fmt: skip


def guard(topic, producer):
    assert producer is not None and producer.startswith(b"p-")
    return None if topic.startswith(b"orders") else f"no right to {topic.decode()}"


def stored_topics(store):
    return {topic for topic, queues in store.queues.topics().items() if queues}


@pytest.mark.parametrize("shape", ["uniform", "mixed", "IPv6"])
def test_no_forbidden_record_is_stored(tmp_path, shape):
    host = Host.parse("[::1]:1") if shape == "IPv6" else NO_HOST
    with opened(tmp_path) as store:
        for topic in TOPICS:
            payload = b"".join(record(topic, n, host) for n in range(3))
            if shape == "mixed":
                payload += record("orders-3", TOPICS.index(topic), host)
            end = store.max_offset
            [results] = store.put_encoded([payload], guards=[guard])
            right = Status.PUT_OK if topic.startswith("orders") else Status.FORBIDDEN
            statuses = [result.status for result in results]
            assert statuses[:3] == [right] * 3 and statuses[3:] in ([], [Status.PUT_OK])
            if right is Status.FORBIDDEN:
                assert results[0].reason == f"no right to {topic}"
                assert (store.max_offset > end) == (shape == "mixed")


@pytest.mark.parametrize("shape", ["uniform", "mixed", "long", "IPv6"])
def test_a_guard_judges_each_record_by_its_producer(tmp_path, shape):
    host = Host.parse("[::1]:1") if shape == "IPv6" else NO_HOST
    seen = []

    def only_p(topic, producer):
        seen.append((topic, producer))
        return "another's" if producer == b"victim" else None

    def numbered(producer, number):
        pairs = (("HS_PID", producer), ("HS_SEQ", str(number))) if producer else ()
        if shape == "long":  # not the usual order
            pairs = (("a", "b"), *reversed(pairs), ("HS_PID", "second"))
        return build_record(
            "t", b"", queue_id=0, born_timestamp_ms=1, born_host=host, properties=pairs
        )

    mixed = ["victim", "p", None, "victim", "second"]
    with opened(tmp_path) as store:
        for producers in (["victim"], ["victim"] * 3, ["p"] * 3, [None] * 3, mixed):
            if shape == "mixed":
                producers = [*producers, None]
            payload = b"".join(numbered(name, 10 + n) for n, name in enumerate(producers))
            [results] = store.put_encoded([payload], guards=[only_p])
            if shape == "long" and None in producers:
                continue  # a number without an HS_SEQ is not valid
            forbidden = [result.status is Status.FORBIDDEN for result in results]
            assert forbidden == [name == "victim" for name in producers]
        assert store.producer_progress(b"victim").last is None
    assert {producer for _, producer in seen} <= {b"victim", b"p", b"second", None}


def test_payloads_of_one_append_have_guards_of_their_own(tmp_path):
    with opened(tmp_path) as store:
        payloads = [record("money", 0), record("money", 1), record("orders", 0)]
        first, second, third = store.put_encoded(payloads, guards=[guard, None, guard])
        assert [first[0].status, second[0].status, third[0].status] == [
            Status.FORBIDDEN, Status.PUT_OK, Status.PUT_OK,
        ]  # fmt: skip


def test_a_forbidden_record_uses_up_no_number_and_no_place(tmp_path):
    with opened(tmp_path) as store:
        assert store.put_encoded([record("money", 5)], guards=[guard])[0][0].status is (
            Status.FORBIDDEN
        )
        [[result]] = store.put_encoded([record("money", 5)])
        assert result.status is Status.PUT_OK and not result.duplicate
        assert (result.offset, result.queue_offset) == (0, 0)


def test_random_batches_store_what_the_guard_allows(tmp_path):
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    chance = random.Random(seed)
    numbers = dict.fromkeys(TOPICS, 0)
    with opened(tmp_path) as store:
        for _ in range(60):
            payloads, wanted = [], []
            for _ in range(chance.randint(1, 4)):
                topics = chance.choices(TOPICS, k=chance.choice([1, 1, 2, 5]))
                if chance.random() < 0.5:
                    topics = [topics[0]] * len(topics)
                payloads.append(b"".join(record(t, numbers[t] + n) for n, t in enumerate(topics)))
                for topic in topics:
                    numbers[topic] += len(topics)
                wanted.append([guard(topic.encode(), b"p-") is None for topic in topics])
            found = store.put_encoded(payloads, guards=[guard] * len(payloads))
            got = [[one.status is not Status.FORBIDDEN for one in results] for results in found]
            assert got == wanted
        store.replay.wait_dispatched(store.max_offset, 60)
        assert stored_topics(store) <= {"orders", "orders-2"}


@pytest.mark.parametrize("together", [False, True])
def test_a_number_used_in_another_topic_hides_no_message(tmp_path, together):
    """Whoever reads a producer's messages knows its HS_PID, and may use it in another topic."""

    def numbered(topic, body):
        properties = (("HS_PID", "victim"), ("HS_SEQ", "7"))
        return build_record(
            topic, body, queue_id=0, born_timestamp_ms=1, born_host=NO_HOST, properties=properties
        )

    theirs, mine = numbered("orders", b"theirs"), numbered("money", b"mine")
    with opened(tmp_path) as store:
        if together:
            first, second = store.put_encoded([theirs, mine])
        else:
            [first], [second] = store.put_encoded([theirs]), store.put_encoded([mine])
        assert first[0].status is Status.PUT_OK
        assert second[0].status is Status.MESSAGE_ILLEGAL
        assert "another topic" in second[0].reason
        [again] = store.put_encoded([theirs])
        assert again[0].duplicate and again[0].offset == first[0].offset
        assert stored_topics(store) <= {"orders"}
