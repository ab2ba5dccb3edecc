"""Quotas of identities: the meter of what is asked, and what hastore's own clients are answered."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from hastore.protocol import api
from hastore.security.identity import Identity, Quota
from hastore.server.api.quotas import BURST_MS, COUNT_MS, NEW_MS, Meter, Quotas
from tests.process.wire import Wire
from tests.server.api.secured import Secured
from tests.server.api.test_access import ask, prove, put, record
from tests.server.remoting.desk import VirtualClock


def test_an_orderly_consumer_gets_its_queues_one_by_one() -> None:
    """RocketMQ's asks for each by a request, and waits 20 s before it asks again."""
    meter = Meter(Quota(requests_per_s=10))
    got = [0, 0, 0]
    for turn, queues in enumerate((200, 200, 1_000)):
        for number in range(queues):
            now = 20_000.0 * turn + number / 100
            if meter.may_record(now):
                meter.record(200, now)
                got[turn] += 1
    assert got[:2] == [200, 200] and got[2] < 210


def test_a_second_s_worth_comes_at_once_and_more_must_wait() -> None:
    meter, now = Meter(Quota(requests_per_s=10)), 5_000.0
    assert [meter.ask(0, now, 0.0) for _ in range(11)] == [0.0] * 11
    assert meter.ask(0, now, 0.0) is None, "refused, and not counted"
    assert meter.ask(0, now, 1_000.0) == pytest.approx(100.0)
    assert meter.ask(0, now, 1_000.0) == pytest.approx(200.0)
    assert meter.ask(0, now + 250.0, 0.0) is None
    assert meter.ask(0, now + 300.0, 0.0) == 0.0
    assert (meter.requests, meter.slowed, meter.refused) == (14, 2, 2)


def test_answers_count_against_the_next_request() -> None:
    meter = Meter(Quota(bytes_per_s=1_000))
    assert meter.ask(500, 0.0, 0.0) == 0.0
    meter.answered(1_500)
    assert meter.ask(1, 0.0, 0.0) is None
    assert meter.ask(1, 1_000.0, 0.0) == 0.0
    assert meter.bytes == 2_001


def test_never_more_than_the_rate_and_a_burst() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        rate = rng.choice((1, 3, 10, 100, 5_000))
        meter, now, taken, started = Meter(Quota(requests_per_s=rate)), 0.0, 0, 0.0
        for _ in range(500):
            now += rng.choice((0.0, 0.1, 1.0, 50.0, 2_000.0))
            taken += meter.ask(0, now, 0.0) is not None
            most = (now - started + BURST_MS) * rate / 1_000 + 1
            assert taken <= most + 1e-6
        assert taken >= min(500, rate), "what is allowed is let through"


def test_what_is_kept_is_counted_by_patterns() -> None:
    quotas = Quotas(VirtualClock())
    quotas.topics = lambda: ["Shop1", "Shop2", "Pay"]
    quotas.pairs = lambda: [("g1", "Shop1"), ("g1", "Pay"), ("other", "Shop1")]

    def shop(**quota: int) -> Identity:
        return Identity("shop", ("Shop*",), ("Shop*",), groups=("g*",), quota=Quota(**quota))

    quotas.has_topic = lambda topic: topic in quotas.topics()
    quotas.has_pair = lambda group, topic: (group, topic) in quotas.pairs()
    assert "has its 2 topics" in str(quotas.why_no_topic(shop(topics=2), "Shop3"))
    assert quotas.why_no_topic(shop(topics=2), "Shop2") is None, "it is there"
    assert quotas.why_no_topic(shop(topics=3), "Shop3") is None
    assert quotas.why_no_topic(shop(topics=3), "Shop3") is None, "it is being made"
    assert "has its 3 topics" in str(quotas.why_no_topic(shop(topics=3), "Shop4"))
    assert quotas.why_no_position(shop(positions=1), "g1", "Shop1") is None
    assert "has its 1 positions" in str(quotas.why_no_position(shop(positions=1), "g2", "Shop1"))
    assert quotas.why_no_position(shop(positions=2), "g2", "Shop1") is None
    assert quotas.why_no_topic(shop(), "Shop9") is None and quotas.kept_out == 3


def test_what_is_kept_is_not_counted_for_each_record_of_a_put() -> None:
    """With 10,000 topics of others a count takes 10 ms, and a put may have thousands of records."""
    clock, counts = VirtualClock(), []
    quotas = Quotas(clock)
    there = [f"other{number}" for number in range(50)] + ["Shop"]

    def topics() -> list[str]:
        counts.append(1)
        return there

    quotas.topics, quotas.has_topic = topics, lambda topic: topic in there
    quotas.pairs, quotas.has_pair = lambda: [], lambda _group, _topic: False
    shop, more = (
        Identity(name, (pattern,), (pattern,), quota=Quota(topics=40, positions=40))
        for name, pattern in (("shop", "Shop*"), ("more", "*"))
    )
    found = [quotas.why_no_topic(shop, f"Shop{number}") for number in range(100)]
    assert found[:39] == [None] * 39 and all("has its 40" in str(one) for one in found[39:])
    assert len(counts) == 1
    assert quotas.why_no_topic(shop, "Shop") is None and quotas.why_no_topic(shop, "Shop7") is None
    clock.now_ms += COUNT_MS
    there[:] = ["Shop"]
    assert quotas.why_no_topic(more, "a") is not None, "shop's count too, though not made yet"
    clock.now_ms += NEW_MS
    assert quotas.why_no_topic(more, "a") is None
    found = [quotas.why_no_topic(shop, f"Shop{number}") for number in range(20)]
    assert found == [None] * 20
    found = [quotas.why_no_topic(more, f"b{number}") for number in range(30)]
    assert found.count(None) == 18
    wider = Identity("shop", ("*",), ("*",), quota=Quota(topics=40, positions=40))
    assert quotas.why_no_topic(wider, "Shop99") is not None, "its rights have changed"


def test_the_positions_in_retries_count_too(secured: Secured) -> None:
    some = secured.identity(
        "some", consume='["t"]', groups='["g*"]', quota=quota_of(positions=2)
    )  # fmt: skip
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, some)
        for number in range(4):
            place = {0: api.Position(0)}
            commit = api.Commit(1, f"g{number}", f"%RETRY%g{number}", place)
            done = ask(wire, commit)
            if number < 2:
                assert isinstance(done, api.PutDone) and done.status is api.Status.PUT_OK
            else:
                assert isinstance(done, api.Failed) and done.status == "FORBIDDEN", number


def quota_of(**limits: Any) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in limits.items()) + "}"


def test_hastore_s_own_clients_are_answered_busy(secured: Secured) -> None:
    slow = secured.identity("slow", produce='["t"]', quota=quota_of(requests_per_s=3))
    free = secured.identity("free", produce='["t"]')
    with secured.server() as server, Wire(server.endpoint) as wire, Wire(server.endpoint) as other:
        for each, identity in ((wire, slow), (other, free)):
            each.shake_hands()
            prove(each, identity)
        begun = time.monotonic()
        found = [put(wire, record("t")) for _ in range(20)]
        took_s = time.monotonic() - begun
        stored = [one for one in found if one.status is api.Status.PUT_OK]
        refused = [one for one in found if one.status is api.Status.BUSY]
        assert len(stored) + len(refused) == 20
        assert 4 <= len(stored) <= 4 + 3 * took_s + 1
        assert refused or took_s > 5, "20 requests take 5 s and more"
        assert all("more than its quota (requests_per_s 3)" in one.reason for one in refused)
        assert isinstance(ask(wire, api.AskMap(3)), api.Map), "where the group is, is free"
        assert all(put(other, record("t")).status is api.Status.PUT_OK for _ in range(20))


def test_no_further_topic_than_the_quota_is_made(secured: Secured) -> None:
    some = secured.identity("some", produce='["t*"]', quota=quota_of(topics=1))
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, some)
        assert put(wire, record("t1")).status is api.Status.PUT_OK
        while not list(secured.backend.store.topic_table.all()):
            time.sleep(0.01)
        done = put(wire, record("t2"))
        assert done.statuses == [api.Status.FORBIDDEN] and "quota.topics" in done.reason
        assert put(wire, record("t1")).status is api.Status.PUT_OK
