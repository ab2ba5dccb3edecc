"""A plan leaves out what the filters of a query cannot match, over a path and over servers."""

import contextlib
import random
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    Not,
)

from hastore.errors import UsageError
from hastore.spark.options.filters import WantedMessages
from hastore.spark.options.source_options import parse_options
from hastore.spark.read import planning
from hastore.spark.read.planning import plan
from hastore.spark.read.servers import ServerBackend
from hastore.spark.read.stores import PathBackend
from tests.api_fakes import FakeBackend
from tests.spark.read.test_server_reader import fill, serving
from tests.spark.stores import numbered, write_store


def at(seconds):
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


@pytest.fixture
def path(tmp_path):
    """Topics t (queues 0 and 1) and u, with a message a second: offset n of t-0 at 2 n s."""
    write_store(tmp_path, numbered(1_000, queues=2) + numbered(100, topic="u"))
    return str(tmp_path)


def plan_path(path, *filters, **options):
    given = parse_options({"path": path, "subscribePattern": ".*", **options})
    with PathBackend(path, True) as backend:
        return plan(backend, given, WantedMessages().narrow(filters))


def spans(pieces):
    return {(p.topic, p.partition): (p.start, p.end) for p in pieces}


def test_only_the_wanted_offsets_are_planned(path):
    assert spans(plan_path(path, GreaterThan(("offset",), 97), LessThan(("offset",), 103))) == {
        ("t", 0): (98, 103),
        ("t", 1): (98, 103),
        ("u", 0): (98, 100),
    }
    assert plan_path(path, GreaterThan(("offset",), 10**15)) == []
    assert plan_path(path, LessThan(("offset",), -5)) == []
    assert plan_path(path, IsNull(("offset",))) == []


def test_only_the_wanted_topics_and_partitions_are_planned(path):
    assert set(spans(plan_path(path, EqualTo(("topic",), "u")))) == {("u", 0)}
    assert set(spans(plan_path(path, Not(EqualTo(("partition",), 0))))) == {("t", 1)}
    assert set(spans(plan_path(path, In(("partition",), (1, 7))))) == {("t", 1)}


def test_times_are_looked_for_a_minute_wider(path):
    filters = [GreaterThanOrEqual(("timestamp",), at(500)), LessThan(("timestamp",), at(510))]
    assert spans(plan_path(path, *filters)) == {("t", 0): (220, 285), ("t", 1): (220, 285)}
    assert spans(plan_path(path, GreaterThan(("timestamp",), at(10**9)))) == {}
    assert spans(plan_path(path, LessThan(("timestamp",), at(-100)))) == {}
    assert len(plan_path(path, LessThan(("timestamp",), at(8 * 10**9)))) == 3


def test_the_limits_of_the_options_still_hold(path):
    found = plan_path(
        path,
        LessThan(("offset",), 50),
        subscribePattern="t",
        startingOffsets='{"t":{"0":40,"1":-2}}',
        endingOffsets='{"t":{"0":-1,"1":3}}',
    )
    assert spans(found) == {("t", 0): (40, 50), ("t", 1): (0, 3)}
    with pytest.raises(UsageError):
        plan_path(path, EqualTo(("topic",), "u"), subscribePattern="t", startingOffsets='{"t":{}}')


def test_a_pattern_leaves_out_the_topics_of_the_group_itself(tmp_path):
    """Each topic that somebody makes, and each commit of positions, is a message of these."""
    own = [*numbered(2, topic="HASTORE_TOPICS"), *numbered(2, topic="HASTORE_POSITIONS")]
    write_store(tmp_path, [*numbered(3), *own])
    assert set(spans(plan_path(str(tmp_path)))) == {("t", 0)}
    given = parse_options({"path": str(tmp_path), "subscribe": "HASTORE_TOPICS"})
    with PathBackend(str(tmp_path), True) as backend:
        assert set(spans(plan(backend, given))) == {("HASTORE_TOPICS", 0)}


def test_times_that_run_back_lose_no_message(tmp_path):
    """A RocketMQ broker's clock may be set back."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    messages = numbered(400)
    for _, _, fields in messages:
        fields["store_timestamp_ms"] += rng.randrange(planning.CLOCK_STEP_MS)
    times = [fields["store_timestamp_ms"] for _, _, fields in messages]
    write_store(tmp_path, messages)
    for _ in range(50):
        low, high = sorted(rng.randrange(460_000) for _ in range(2))
        found = plan_path(
            str(tmp_path),
            GreaterThanOrEqual(("timestamp",), at(low / 1000)),
            LessThan(("timestamp",), at(high / 1000)),
        )
        planned = {n for piece in found for n in range(piece.start, piece.end)}
        assert {n for n, time in enumerate(times) if low <= time < high} <= planned


def test_a_log_is_cut_by_physical_offset(path):
    given = parse_options({"path": path, "mode": "log"})
    filters = [GreaterThan(("physicalOffset",), 5_000), LessThan(("physicalOffset",), 9_000)]
    with PathBackend(path, True) as backend:
        whole, end = backend.log_range()
        (piece,) = plan(backend, given, WantedMessages().narrow(filters))
        assert (piece.start, piece.end, piece.limit) == (5_001, 9_000, end)
        assert (
            plan(backend, given, WantedMessages().narrow([LessThan(("physicalOffset",), 0)])) == []
        )
        assert plan(backend, given, WantedMessages(nothing=True)) == []
        assert [p.start for p in plan(backend, given)] == [whole]


def test_a_plan_over_servers_leaves_out_the_same(monkeypatch):
    monkeypatch.setattr(planning, "CLOCK_STEP_MS", 0)
    node = FakeBackend()
    fill(node.store, 100)
    middle = node.store.record_at(node.store.units["t", 0][25][0]).store_timestamp_ms
    with contextlib.ExitStack() as stack:
        bootstrap = stack.enter_context(serving(node))
        backend = stack.enter_context(ServerBackend(bootstrap, True))
        given = parse_options({"hastore.bootstrap.servers": ",".join(bootstrap), "subscribe": "t"})

        def planned(*filters):
            return spans(plan(backend, given, WantedMessages().narrow(filters)))

        assert planned(GreaterThan(("offset",), 46), EqualTo(("partition",), 1)) == {
            ("t", 1): (47, 50)
        }
        found = planned(GreaterThanOrEqual(("timestamp",), at(middle / 1000)))
        first = node.store.queue_offset_by_time("t", 0, middle)
        assert found[("t", 0)] == (first, 50)
        assert planned(GreaterThan(("timestamp",), at(10**9 * 8))) == {}
