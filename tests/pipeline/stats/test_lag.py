"""What the nodes' statuses say of lag, and what they do not say."""

from hastore.pipeline.stats import LagMinute, by_minute, lag_of


def status(node, role, end, **more):
    fields = {"node": node, "role": role, "max_offset": end, "confirmed_offset": 0, "epoch": 7}
    return {**fields, "writable": role != "SLAVE", "slaves": [], **more}


def test_slaves_are_behind_the_master():
    master = status(1, "SYNC_MASTER", 1_000, confirmed_offset=900)
    found = lag_of([master, status(2, "SLAVE", 950), status(3, "SLAVE", 1_020)], 5)
    assert [(one.node, one.behind_bytes) for one in found] == [
        ("unconfirmed", 100),
        ("node 2", 50),
        ("node 3", 0),  # it answered later, and had more by then
    ]


def test_without_a_master_the_lag_is_unknown():
    """The master may be a RocketMQ broker, which tells a slave its end but not these clients."""
    (found,) = lag_of([status(2, "SLAVE", 950)], 5)
    assert (found.end_offset, found.behind_bytes) == (950, None)
    assert by_minute([found]) == [LagMinute(0, "node 2", 1, 950, None, None)]


def test_classic_slaves_appear_as_the_master_sees_them():
    slaves = [
        {"classic": True, "ack_offset": 400, "address": "10.0.0.9:3"},
        {"classic": False, "ack_offset": 600, "address": "10.0.0.8:3"},
    ]
    found = lag_of([status(1, "ASYNC_MASTER", 1_000, slaves=slaves)], 5)
    assert [(one.node, one.behind_bytes) for one in found][1:] == [("slave 10.0.0.9:3", 600)]


def test_samples_are_merged_by_minute():
    samples = [
        one
        for at_ms, end in ((59_000, 10), (60_000, 20), (61_000, 90))
        for one in lag_of([status(1, "ASYNC_MASTER", 100), status(2, "SLAVE", end)], at_ms)
        if one.node == "node 2"
    ]
    assert by_minute(samples) == [
        LagMinute(0, "node 2", 1, 10, 90.0, 90),
        LagMinute(60_000, "node 2", 2, 90, 45.0, 80),
    ]
