"""Which of several commits holds, and how many positions are kept."""

import random

import pytest

from hastore.errors import CorruptRecordError
from hastore.protocol import committed_positions as positions
from hastore.protocol.committed_positions import (
    CommitBody,
    PositionMap,
    decode_commit,
    encode_commit,
)


def commit(queue_offset, origin=None, queue=0):
    origins = {} if origin is None else {queue: origin}
    return CommitBody("g", "t", {queue: (queue_offset, None, None)}, origins)


def where(found):
    return {queue: place.queue_offset for queue, place in found.find("g", "t").items()}


def test_a_body_round_trips_and_an_invalid_one_is_refused():
    body = CommitBody("g", "t", {0: (5, 65537, 100), 7: (9, None, None)}, {7: 3})
    assert decode_commit(encode_commit(body)) == body
    for raw in (b"{not json", b'{"group":"g"}', b'{"group":"g","topic":"t","positions":{"0":[1]}}'):
        with pytest.raises(CorruptRecordError):
            decode_commit(raw)


def test_a_rewrite_after_a_later_commit_changes_nothing():
    found = PositionMap()
    found.apply_commit(commit(5), 100)
    found.apply_commit(commit(3), 200)  # a commit that moves the position back
    found.apply_commit(commit(5, origin=100), 300)
    assert where(found) == {0: 3}
    found.apply_commit(commit(3, origin=200), 400)
    assert where(found) == {0: 3}
    found.apply_commit(commit(9), 500)
    assert where(found) == {0: 9}


def test_an_origin_beyond_the_record_counts_as_the_record():
    found = PositionMap()
    found.apply_commit(commit(5, origin=2**62), 100)
    found.apply_commit(commit(6), 200)
    assert where(found) == {0: 6}


def test_the_latest_commit_holds_in_any_order_of_reading():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(200):
        said = {}
        records = []
        for at in range(1, chance.randrange(2, 30)):
            queue = chance.randrange(3)
            if records and chance.random() < 0.4:
                _, again = chance.choice(records)
                ((number, place),) = again.positions.items()
                origin = again.origins.get(number, records_at(records, again))
                records.append((at, CommitBody("g", "t", {number: place}, {number: origin})))
            else:
                records.append((at, commit(chance.randrange(100), queue=queue)))
                said[queue] = records[-1][1].positions[queue][0]
        # They are read in any order.
        chance.shuffle(records)
        found = PositionMap()
        for at, body in records:
            found.apply_commit(body, at)
        assert where(found) == said


def records_at(records, body):
    return next(at for at, each in records if each is body)


def test_groups_and_memory_are_bounded(monkeypatch):
    monkeypatch.setattr(positions, "MAX_GROUPS", 3)
    found = PositionMap()
    for number in range(4):
        body = CommitBody(f"g{number}", "t", {0: (1, None, None)})
        assert found.apply_commit(body, number) == (number < 3)
    assert not found.has_room("g9", "t", 1) and found.has_room("g1", "t", 1000)
    monkeypatch.setattr(positions, "MAX_TABLE_BYTES", 100_000)
    many = CommitBody("g1", "t", dict.fromkeys(range(1000), (1, None, None)))
    assert not found.apply_commit(many, 9)
    assert found.apply_commit(CommitBody("g1", "t", {0: (2, None, None)}), 9)  # no more room
    assert PositionMap(found.entries).has_room("g1", "t", 300) == found.has_room("g1", "t", 300)


def test_positions_in_topics_that_are_dropped_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "MAX_GROUPS", 2)
    found = PositionMap()
    for topic in ("t", "u"):
        found.apply_commit(CommitBody("g", topic, dict.fromkeys(range(9), (1, None, None))), 1)
    more = CommitBody("h", "v", {0: (1, None, None)})
    assert found.drop_topics({"w"}) == 0 and not found.apply_commit(more, 2)
    assert found.drop_topics({"t", "w"}) == 1 and found.apply_commit(more, 2)
    assert list(found) == [("g", "u"), ("h", "v")]
    assert found.memory_bytes == PositionMap(found.entries).memory_bytes
    assert not found.apply_commit(CommitBody("h", "t", more.positions), 3)
    assert found.apply_commit(CommitBody("h", "t", more.positions), 3, positions.READ_FACTOR)


def test_a_record_of_locks_only_is_no_position() -> None:
    table = PositionMap()
    body = CommitBody("g", "t", {}, {}, {3: "client"})
    assert table.apply_commit(body, 100) and len(table) == 0 and not table.memory_bytes
    assert positions.decode_commit(positions.encode_commit(body)) == body
    assert b"locks" not in positions.encode_commit(CommitBody("g", "t", {1: (1, None, None)}))
