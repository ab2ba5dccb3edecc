"""The key index: queries, keys that span files, file names."""

import random
from pathlib import Path

import pytest

from hastore.record.hashes import KeyHasher
from hastore.store.derived.index_file import IndexFile
from hastore.store.derived.key_index import KeyIndex
from tests.store.derived_files import Derived, query, rebuilt
from tests.store.logs import START_MS, MemoryLog, fill


def test_query_finds_the_latest_first(tmp_path: Path) -> None:
    log = MemoryLog()
    chance = random.Random(1)
    expected: dict[str, list[int]] = {}
    for number in range(1500):
        key = f"key{chance.randrange(50)}"
        record = log.append(
            topic="Topic",
            queue_offset=number,
            properties=f"KEYS\x01{key}\x02".encode(),
            store_timestamp_ms=START_MS + number * 1000,
        )
        expected.setdefault(key, []).insert(0, record.physical_offset)
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    index = derived.index
    assert len(list((tmp_path / "index").iterdir())) == 4
    for key, offsets in expected.items():
        assert query(index, "Topic", key, max_messages=1000) == offsets
        assert query(index, "Topic", key, max_messages=3) == offsets[:3]
    assert query(index, "Topic", "absent") == query(index, "Other", "key1") == []
    late = query(index, "Topic", "key1", max_messages=1000, begin_ms=START_MS + 700_000)
    assert set(late) < set(expected["key1"]) and late
    assert index.full_timestamp_ms > START_MS
    derived.build.close()
    again = Derived.over(tmp_path, log)
    assert query(again.index, "Topic", "key7", max_messages=1000) == expected["key7"]


def test_a_records_keys_may_span_files(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 300, keys=7)
    files = rebuilt(tmp_path, log)
    index = [data for name, data in files.items() if name.startswith("index")]
    assert len(index) == 6  # 2100 keys, 399 a file
    assert [int.from_bytes(data[36:40]) for data in index] == [400] * 5 + [2100 - 5 * 399 + 1]


def test_the_first_record_starts_a_file_even_without_keys(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 1, keys=0)
    files = rebuilt(tmp_path, log)
    assert files["index/0"] == bytes(39) + b"\1" + bytes(8400)


@pytest.mark.parametrize("keyed", [0, 3, 399, 798])
def test_a_power_loss_finds_no_entry_in_a_file_that_has_none(tmp_path: Path, keyed: int) -> None:
    """One of zeros counted as that of a record at 0, and all searches by key ended there."""
    log = MemoryLog()
    records = [log.append(queue_offset=at, properties=b"KEYS\x01k\x02") for at in range(keyed)]
    log.append(queue_offset=keyed, properties=b"")
    wanted = rebuilt(tmp_path / "wanted", log)
    derived = Derived.over(tmp_path / "root", log)
    derived.build.replay()
    derived.build.flush()
    derived.build.close()
    again = Derived.over(tmp_path / "root", log, boot_id=bytes(16))
    again.build.replay()
    found = query(again.index, "T", "k", max_messages=1_000)
    assert found == [one.physical_offset for one in reversed(records)]
    assert again.files() == wanted


def test_a_power_loss_keeps_an_entry_of_zeros_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyHasher, "key_hash", lambda _self, _topic, key: len(key) - 1)
    log = MemoryLog()
    log.append(properties=b"KEYS\x01k\x02")
    log.append(queue_offset=1, properties=b"KEYS\x01kk\x02")
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    derived.build.flush()
    derived.build.close()
    files = derived.files()
    again = Derived.over(tmp_path, log, boot_id=bytes(16))
    assert again.files() == files and query(again.index, "T", "k") == [0]


def test_rollbacks_are_left_out_prepared_records_are_not(tmp_path: Path) -> None:
    log = MemoryLog()
    prepared = log.append(sys_flag=0x4, properties=b"KEYS\x01k\x02")
    log.append(sys_flag=0xC, properties=b"KEYS\x01k\x02")
    committed = log.append(sys_flag=0x8, properties=b"KEYS\x01k\x02")
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    found = query(derived.index, "T", "k")
    assert found == [committed.physical_offset, prepared.physical_offset]


@pytest.mark.parametrize("limit", [100, 500, 799])
def test_a_cut_that_was_killed_at_any_step_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A kill leaves no file whose header counts entries that were cleared."""
    log = MemoryLog()
    records = [
        log.append(queue_offset=number, properties=b"KEYS\x01k%d\x02" % number)
        for number in range(1_500)
    ]
    wanted = rebuilt(tmp_path / "wanted", log)

    class Killed(BaseException):
        pass

    def killing(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def step(*arguments: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return real(*arguments)

        patch.setattr(owner, name, step)

    killed, step = True, 0
    while killed:
        step += 1
        root = tmp_path / str(step)
        derived = Derived.over(root, log)
        derived.build.replay()
        left = step
        with monkeypatch.context() as patch:
            for owner, name in (
                (KeyIndex, "_discard"), (KeyIndex, "_finish_header"),
                (IndexFile, "cut"), (IndexFile, "clear"),
            ):  # fmt: skip
                killing(owner, name)
            try:
                derived.build.truncate(records[limit].physical_offset)
                killed = False
            except Killed:
                pass
        derived.build.close()
        again = Derived.over(root, log)
        again.build.replay()
        again.build.close()
        assert again.files() == wanted, step
    assert step > 4


def test_retention_removes_files_but_the_last(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 1000)
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    log.min_offset = records[500].physical_offset
    derived.build.delete_before(log.min_offset)
    assert len(list((tmp_path / "index").iterdir())) == 2
    derived.build.delete_before(log.max_offset)
    assert len(list((tmp_path / "index").iterdir())) == 1
    assert query(derived.index, "Topic", "k999-0") == [records[999].physical_offset]
