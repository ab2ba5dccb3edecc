"""Uniform batches pass every check of the careful path, and lead to the same log and results."""

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hastore.errors import Status
from hastore.store.append.appender import Appender
from hastore.store.append.results import BuiltBatch, UniformResults
from hastore.store.append.uniform_batch import read_uniform_batch
from hastore.store.append.validation import PutValidator, ValidRecord
from tests.store.kit import HOST, config, message, opened, read_log


def payload(chance: random.Random, sequence: int) -> bytes:
    """Return records as producers send them, some of them unlike the others, or damaged."""
    records = []
    producer = chance.choice(["p", "q", None])
    topic = chance.choice(["TopicA", "TopicA", "T" * 127])
    for place in range(chance.randrange(1, 8)):
        more: dict[str, Any] = {}
        number = sequence + place
        if chance.random() < 0.05:
            number = chance.randrange(sequence + 10)  # seen, or out of order
        if chance.random() < 0.5:
            pairs = [("HS_PID", producer), ("HS_SEQ", str(number))] if producer else []
            if chance.random() < 0.2:
                pairs.reverse()
            if chance.random() < 0.1:
                pairs.append(("TAGS", "late"))
            if chance.random() < 0.1:
                pairs.insert(0, ("KEYS", "a b"))
            more["properties"] = pairs
        if chance.random() < 0.03:
            topic = chance.choice(["TopicB", "a.b", "T" * 200])
        if chance.random() < 0.03:
            more["sys_flag"] = chance.choice([0x1, 0x4, 0x8, 0x80, 0x40])
        queue_id = chance.choice([0, 1, 2, 3, 3, 3, 4 if chance.random() < 0.05 else 0])
        size = chance.choice([0, 1, 50, 300, 1001 if chance.random() < 0.05 else 20])
        records.append(
            message(number, topic=topic, queue_id=queue_id, size=size, producer=producer, **more)
        )
    raw = bytearray().join(records)
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        raw[chance.randrange(len(raw))] = chance.choice([0, 1, 2, 0x7F, 0x80, 0xFF])
    if chance.random() < 0.03:
        del raw[chance.randrange(len(raw)) :]
    return bytes(raw)


def test_a_uniform_batch_passes_every_check(tmp_path: Path) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    validator = PutValidator(config(tmp_path, max_message_size=1000), HOST)
    taken = 0
    for turn in range(6_000):
        raw = payload(chance, turn * 8)
        batch = validator.validate_uniform(raw)
        same, entries = validator.validate(raw)
        if batch is None:
            continue
        taken += 1
        assert same == raw
        assert all(isinstance(entry, ValidRecord) for entry in entries)
        good = [entry for entry in entries if isinstance(entry, ValidRecord)]
        assert [entry.at for entry in good] == batch.starts
        assert [entry.queue_id for entry in good] == batch.queue_ids
        assert {entry.topic for entry in good} == {batch.topic}
        numbers = [(batch.producer, sequence) for sequence in batch.sequences]
        expected = [entry.producer for entry in good if entry.producer is not None]
        assert expected == numbers
        assert not numbers or len(numbers) == len(good)
    assert taken > 1_000


def test_the_log_and_the_results_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    frames = [
        [payload(chance, turn * 8) for _ in range(chance.randrange(1, 4))] for turn in range(400)
    ]
    monkeypatch.setattr("hastore.clock.SystemClock.wall_ms", lambda _self: 1_700_000_000_000)
    outcomes = []
    uniform = 0
    for fast in (True, False):
        if not fast:
            monkeypatch.setattr(Appender, "_append_uniform", lambda *_: None)
        root = tmp_path / str(fast)
        with opened(root, max_message_size=1000) as store:
            results = []
            for frame in frames:
                got = store.put_encoded(frame)
                uniform += sum(isinstance(each, UniformResults) for each in got)
                results.append([list(each) for each in got])
            assert store.wait_dispatched(store.max_offset, 60)
            outcomes.append((results, read_log(root), store.queues.topics()))
    assert outcomes[0] == outcomes[1]
    assert uniform > 50
    statuses = [r.status for frame in outcomes[0][0] for each in frame for r in each]
    assert Status.MESSAGE_ILLEGAL in statuses and Status.PUT_OK in statuses
    assert any(r.duplicate for frame in outcomes[0][0] for each in frame for r in each)


def test_a_retry_of_a_uniform_batch_is_known(tmp_path: Path) -> None:
    frame = b"".join(message(number, producer="p") for number in range(50))
    with opened(tmp_path) as store:
        (before,) = store.put_encoded([frame])
        (first,) = store.put_encoded([message(50, producer="p")])
        assert isinstance(first, UniformResults)
        (again,) = store.put_encoded([frame])
        assert [each.offset for each in again] == [each.offset for each in before]
        assert all(each.duplicate for each in again)
        assert first[0] == first[-1] == first[0:1][0]
        both = message(60, producer="p") + message(61, producer="p")
        one, two = store.put_encoded([both, both])
        assert [each.offset for each in one] == [each.offset for each in two]
        assert all(each.duplicate for each in two)


def built_of(chance: random.Random, number: int) -> BuiltBatch:
    """Return records as a node makes them of a client's request."""
    topic = chance.choice(["TopicA", "TopicA", f"T{number // 10}", "a.b", "T" * 127])
    queue_id = chance.choice([0, 1, 3, 3, 9 if chance.random() < 0.1 else 2])
    sizes = [chance.choice([0, 1, 300, 1001 if chance.random() < 0.1 else 20])] * 3
    records = [
        message(number, topic=topic, queue_id=queue_id, size=size, producer=None, properties=pairs)
        for size, pairs in zip(sizes, [[], [("TAGS", "a")], [("KEYS", "a b")]], strict=True)
    ][: chance.randrange(1, 4)]
    raw = b"".join(records)
    batch = read_uniform_batch({topic.encode()}, 2_000, 4_000, raw)
    assert batch is not None
    longest = max(map(len, records))
    return BuiltBatch(*msgspec.structs.astuple(batch), max(sizes), longest)


def test_what_the_node_has_built_is_stored_as_what_comes_from_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    frames = [
        [built_of(chance, turn) for _ in range(chance.choice([1, 1, 2]))] for turn in range(400)
    ]
    forbids = [chance.random() < 0.1 for _ in frames]
    monkeypatch.setattr("hastore.clock.SystemClock.wall_ms", lambda _self: 1_700_000_000_000)
    outcomes = []
    uniform = 0
    for built in (True, False):
        root = tmp_path / str(built)
        with opened(root, max_message_size=1000) as store:
            results = []
            for frame, forbid in zip(frames, forbids, strict=True):
                guards = [lambda topic, _pid: "no" if topic == b"TopicA" else None] * len(frame)
                put = frame if built else [one.payload for one in frame]
                got = store.put_encoded(put, guards if forbid else None)
                uniform += built and all(isinstance(each, UniformResults) for each in got)
                results.append([list(each) for each in got])
            assert store.wait_dispatched(store.max_offset, 60)
            outcomes.append((results, read_log(root), store.queues.topics()))
    assert outcomes[0] == outcomes[1]
    assert uniform > 50
    found = {r.status for frame in outcomes[0][0] for each in frame for r in each}
    assert found == {Status.PUT_OK, Status.MESSAGE_ILLEGAL, Status.FORBIDDEN}
