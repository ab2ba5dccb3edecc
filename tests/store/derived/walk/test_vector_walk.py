"""The vector walk returns what the scalar walk returns, and dispatchers write the same bytes."""

import random
from pathlib import Path

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.fs.filesystem import REAL
from hastore.record.codec import Host
from hastore.record.delays import SCHEDULE_TOPIC
from hastore.record.hashes import KeyHasher
from hastore.record.layout import V1_MAGIC, V2_MAGIC
from hastore.record.properties import keys_of
from hastore.record.transactions import HALF_TOPIC, OP_TOPIC
from hastore.service import raise_failure
from hastore.store import replay as replay_service
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.derived import vector_walk
from hastore.store.derived.column_batch import ColumnBatch
from hastore.store.derived.contract import RecordColumns, is_of_transaction
from hastore.store.derived.scalar_walk import ScalarWalker, Stop
from hastore.store.derived.vector_walk import VectorWalker
from hastore.store.replay import IndexBuildService
from hastore.store.store_times import StoreTimes
from tests.store.derived_files import Derived
from tests.store.logs import START_MS, MemoryLog

V4, V6 = Host(bytes((127, 0, 0, 1)), 10911), Host(bytes(range(16)), 7)
PRODUCERS = tuple(f"{number * 0x1234567:016x}" for number in range(5))


@pytest.fixture(params=range(12))
def chance(request: pytest.FixtureRequest) -> random.Random:
    print(f"seed {request.param}")
    return random.Random(request.param)


def usual_properties(chance: random.Random, sequences: dict[str, int]) -> bytes:
    """Make properties as the producer does, sometimes with a repeated sequence number."""
    pairs = []
    if chance.random() < 0.5:
        pairs.append(
            (
                "KEYS",
                chance.choice(("k", "", "ä", "a b", " a", "x y z "))
                + "k" * chance.choice((0, 0, 300))
                + str(chance.randrange(2000)),
            )
        )
    if chance.random() < 0.3:
        pairs.append(("TAGS", chance.choice(("A", "BB", "t1", "t2", "größe", ""))))
    if chance.random() < 0.2:
        pairs.append(("UNIQ_KEY", f"{chance.randrange(1 << 30):08X}"))
    if chance.random() < 0.2:
        pairs.append(("trace", chance.choice(("abc", "ünï", ""))))
    name = chance.choice(PRODUCERS[: chance.choice((1, 5))])
    sequences[name] = sequences.get(name, -1) + chance.choice((1, 1, 1, 1, 0, 3))
    if chance.random() < 0.8:
        pairs += [("HS_PID", name), ("HS_SEQ", str(sequences[name]))]
    if chance.random() < 0.3:  # a batch's own properties come after those of its messages
        pairs.append(("UNIQ_KEY", chance.choice(("", f"{chance.randrange(1 << 30):08X}"))))
        pairs += [("WAIT", "true"), ("TAGS", chance.choice(("", "A", "CC")))]
        pairs += [("KEYS", chance.choice(("", "q", "w z")))][: chance.randrange(2)]
    return "".join(f"{key}\x01{value}\x02" for key, value in pairs).encode()


ODD_PROPERTIES = (
    b"",
    b"nothing",
    b"\x02\x02",
    b"\x01\x02",
    b"KEYS\x01a\x02KEYS\x01b c\x02",
    b"KEYS\x01a b  c\x02UNIQ_KEY\x01u v\x02",
    b"UNIQ_KEY\x01u\x02UNIQ_KEY\x01\x02TAGS\x01",
    b"XTAGS\x01no\x02TAGS\x01yes\x02TAGS\x01later",
    b"TAGS\x01a\x01b\x02KEYS\x01c\x01d\x02",
    b"TAGS\x01\xff\xfe\x02KEYS\x01\xff\x02",
    b"KEYS\x01nul\x00key\x02",
    b"HS_PID\x01p\x02",
    b"HS_PID\x01" + b"p" * 65 + b"\x02HS_SEQ\x011\x02",
    b"HS_PID\x01p\x02HS_SEQ\x01x1\x02",
    b"HS_PID\x01p\x02HS_SEQ\x01" + b"1" * 18,
    b"HS_PID\x01p\x02HS_SEQ\x01" + b"1" * 19 + b"\x02",
    b"HS_SEQ\x018\x02HS_PID\x01\x02",
    b"HS_SEQ\x019\x02XHS_PID\x01n\x02HS_PID\x01q\x02",
    b"DELAY\x013\x02TAGS\x01a\x02",
    b"DELAY\x01x\x02TAGS\x01a\x02",
    b"INNER_BASE\x015\x02INNER_NUM\x013\x02",
)


def random_log(chance: random.Random, count: int) -> MemoryLog:
    """Append records of every kind, mostly in runs of similar records."""
    log = MemoryLog(file_size=1 << 17)
    nexts: dict[tuple[str, int], int] = {}
    sequences: dict[str, int] = {}
    topics = ["Topic", "Other", HALF_TOPIC, "Täglich", "long" * 40, SCHEDULE_TOPIC, OP_TOPIC, "."]
    oddness = chance.choice((0.0, 0.02, 0.5))
    while count > 0:
        stretch = min(count, chance.randrange(1, 80))
        count -= stretch
        topic = chance.choice(topics[: chance.choice((1, 3, 8))])
        body = chance.randrange(300)
        for _ in range(stretch):
            queue = (topic, chance.randrange(chance.choice((1, 4))))
            place = nexts.get(queue, chance.choice((0, 0, 7)))
            odd = chance.random() < oddness
            flags = chance.choice((0x4, 0x8, 0xC, 0x80, 0x40, 0x10, 0x20, 0x30)) if odd else 0
            if not odd or chance.random() < 0.8:
                raw = usual_properties(chance, sequences)
            else:
                raw = chance.choice(ODD_PROPERTIES)
            log.append(
                topic=topic,
                magic=V2_MAGIC if len(topic) > 120 or odd and chance.random() < 0.2 else V1_MAGIC,
                queue_id=queue[1] if not odd or chance.random() < 0.9 else -3,
                queue_offset=place if not odd or chance.random() < 0.8 else chance.randrange(300),
                sys_flag=flags,
                body=bytes(body if chance.random() < 0.5 else chance.randrange(400)),
                properties=raw,
                store_timestamp_ms=START_MS + log.max_offset // 7 if not odd else -5,
                born_host=V6 if flags & 0x10 else V4,
                store_host=V6 if flags & 0x20 else V4,
            )
            nexts[queue] = place + (0 if flags & 0x4 else 1)
    return log


def record_starts(log: MemoryLog) -> list[int]:
    found = []
    for start in range(0, len(log.data), log.file_size):
        data = bytes(log.data[start : start + log.file_size])
        found += [each.offset for each in ScalarWalker().walk(data, start, log.file_size).batch]
    return found


def test_same_records_and_same_end(chance: random.Random) -> None:
    """On logs that are whole, cut anywhere, or damaged anywhere."""
    log = random_log(chance, 400)
    scalar, vector = ScalarWalker(), VectorWalker(ScalarWalker(), batch_min=1)
    by_columns = 0
    for number in range(60):
        data = bytearray(log.data)
        if number % 3 == 2:
            for _ in range(chance.choice((1, 1, 30))):
                data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 32, 127, 255))
        offset = 0
        wanted = chance.choice((5_000, 20_000, len(data)))
        while offset < len(data):
            left = log.file_size - offset % log.file_size
            with memoryview(bytes(data)) as whole, whole[offset:][: min(wanted, left)] as view:
                expected = scalar.walk(view, offset, left)
                found = vector.walk(view, offset, left)
                assert list(found.batch) == list(expected.batch)
                assert found[1:] == expected[1:]
                if isinstance(found.batch, RecordColumns):
                    by_columns += 1
                    wanted_ones = [one for one in expected.batch if is_of_transaction(one)]
                    assert found.batch.of_transactions() == wanted_ones
            offset += expected.consumed
            if expected.stop is Stop.BLANK:
                offset += left - expected.consumed
            elif expected.stop is Stop.BAD or not expected.consumed:
                break
    assert by_columns > 30


@pytest.mark.parametrize("name", ["UNIQ_KEY", "KEYS", "TAGS", "WAIT", "own"])
def test_messages_of_a_clients_batch_are_read_as_columns(name: str) -> None:
    """They have the batch's properties after their own, so most names occur twice."""
    log = MemoryLog(file_size=1 << 17)
    for number in range(60):
        own, common = f"{name}\x01{number:04}\x02", f"{name}\x01{number // 10:04}\x02"
        log.append(properties=f"{own}WAIT\x01true\x02{common}WAIT\x01true\x02".encode())
    with memoryview(bytes(log.data)) as view:
        expected = ScalarWalker().walk(view, 0, log.file_size)
        found = VectorWalker(ScalarWalker()).walk(view, 0, log.file_size).batch
    assert list(found) == list(expected.batch)
    assert isinstance(found, ColumnBatch)
    assert not found._single, "records that were read one by one"
    hasher = KeyHasher()
    keys = [
        (hasher.key_hash(record.topic, key), record.offset)
        for record in expected.batch
        for key in keys_of(record.properties)
    ]
    keyed = found.keyed()
    columns = () if keyed is None else (keyed.hashes.tolist(), keyed.offsets.tolist())
    assert list(zip(*columns, strict=True)) == keys


def test_properties_longer_than_their_length_can_say() -> None:
    """A body length that is too small leaves 65,536 bytes or more: Stop.BAD, not an exception."""
    log = MemoryLog(file_size=1 << 20)
    log.append(body=bytes(80_000))
    data = bytearray(log.data)
    data[84:88] = (1000).to_bytes(4)
    for walker in (ScalarWalker(), VectorWalker(ScalarWalker(), batch_min=1)):
        assert walker.walk(memoryview(data), 0, 1 << 20).stop is Stop.BAD


def whole(root: Path, log: MemoryLog) -> tuple[Derived, DedupWindow, QueueOffsetTable, StoreTimes]:
    """Make all dispatchers for a store in `root`."""
    derived = Derived.over(root, log)
    window = DedupWindow(REAL, str(root))
    table = QueueOffsetTable(derived.queues, 4)

    def last_ms() -> int | None:
        offset = derived.queues.last_offset()
        record = None if offset is None else derived.index._record_at(offset)
        return None if record is None else record.store_timestamp_ms

    times = StoreTimes(REAL, str(root), SYSTEM_CLOCK, last_ms)
    parts = [derived.queues, derived.index, window, table, times]
    derived.build = IndexBuildService(
        log, parts, state=derived.build._state, on_failure=raise_failure
    )
    return derived, window, table, times


def test_same_files_and_same_state(
    chance: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is replayed in random steps, with restarts and cuts, once by each walk."""
    log = random_log(chance, 1500)
    end = log.max_offset
    steps = sorted(chance.randrange(end) for _ in range(chance.choice((0, 5, 60)))) + [end]
    restarts = {number for number in range(len(steps)) if chance.random() < 0.1}
    cut = chance.choice((None, None, chance.choice(record_starts(log))))
    outcomes = []
    for least, name in ((1 << 40, "scalar"), (0, "vector")):
        monkeypatch.setattr(replay_service, "_VECTOR_FROM_BYTES", least)
        monkeypatch.setattr(vector_walk, "_BATCH_MIN", chance.choice((1, 48)))
        root = tmp_path / name
        parts = whole(root, log)
        parts[0].build.load()
        for number, shown in enumerate(steps):
            log.max_offset = shown
            parts[0].build.replay()
            if number in restarts:
                parts[1].save()
                parts[0].build.close()
                parts = whole(root, log)
                parts[0].build.load()
        if cut is not None:
            parts[0].build.truncate(cut)
            parts[0].build.replay()
        derived, window, table, times = parts
        assert derived.build.dispatched_offset == end
        window.save()
        outcomes.append(
            (
                derived.files(),
                (root / "hastore" / "idempotence").read_bytes(),
                list(window._producers),
                table._next,
                table._queues,
                (table.end_offset, times.last_ms, times.falls),
                derived.queues.dispatched_timestamp_ms,
            )
        )
        derived.build.close()
    scalar, vector = outcomes
    assert vector[0].keys() == scalar[0].keys()
    assert [path for path in scalar[0] if scalar[0][path] != vector[0][path]] == []
    assert vector[1:] == scalar[1:]
