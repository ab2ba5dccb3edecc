"""Dump, verify and stat of any store, read-only."""

import hashlib
import json
from pathlib import Path

import pytest

from hastore.store.offline import inspect
from tests.store.logs import GOLDEN, MemoryLog, fill
from tests.store.offline.test_reader import store_of, write_log

FIELDS = (
    "offset size magic topic queue_id queue_offset body_crc body_size sys_flag flag born_ms"
    " born_host store_ms store_host reconsume_times prepared_offset properties sha256"
).split()


def test_dump_of_a_golden_store() -> None:
    rows = list(inspect.dump(str(GOLDEN / "three-files")))
    assert len(rows) == 402
    assert [row for row in rows if "blank" in row] == [
        {"offset": 65254, "size": 282, "blank": True},
        {"offset": 130900, "size": 172, "blank": True},
    ]
    assert list(rows[0]) == FIELDS
    first = (GOLDEN / "three-files/commitlog/00000000000000000000").read_bytes()[: rows[0]["size"]]
    assert rows[0]["sha256"] == hashlib.sha256(first).hexdigest()
    assert rows[0]["properties"] == [["KEYS", "key0"], ["TAGS", "tag0"]]
    assert rows[0]["born_host"] == "127.0.0.1:4242"
    json.dumps(rows)
    end = 0
    for row in rows:
        assert row["offset"] == end
        end += row["size"]
    assert end == 167944


def test_dump_of_a_range() -> None:
    rows = list(inspect.dump(str(GOLDEN / "three-files")))
    for start, end in ((0, 1), (1, 500), (65254, 65537), (65300, 66000), (140_000, None)):
        part = list(inspect.dump(str(GOLDEN / "three-files"), start, end))
        stop = 1 << 60 if end is None else end
        assert part == [row for row in rows if start <= row["offset"] < stop]


@pytest.mark.parametrize("name", ["three-files", "variants"])
def test_golden_stores_verify(name: str) -> None:
    found = inspect.verify(str(GOLDEN / name))
    assert found.ok and not found.damages and not found.units_missing
    assert found.units == {"three-files": 400, "variants": 13}[name]


def test_stat_counts_topics(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 500)
    store_of(tmp_path, log)
    shown: list[tuple[int, int]] = []
    found = inspect.stat(str(tmp_path), progress=lambda done, all_: shown.append((done, all_)))
    size = sum(record.size for record in records)
    assert found.topics == {"Topic": {"records": 500, "bytes": size, "queues": 2}}
    assert (found.min_offset, found.max_offset) == (0, log.max_offset)
    assert found.records == 500 and found.record_bytes + found.blank_bytes == log.max_offset
    assert shown and found.as_dict()["first_store_ms"] == records[0].store_timestamp_ms


def test_verify_finds_each_damage_and_continues(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 900)
    store_of(tmp_path, log)
    broken = (10, 11, 200, 600)
    for number in broken:
        log.data[records[number].physical_offset + 89] ^= 0x10
    write_log(tmp_path, log)
    found = inspect.verify(str(tmp_path))
    ends = {10: 12, 200: 201, 600: 601}
    assert not found.ok
    assert [(damage.offset, damage.end_offset) for damage in found.damages] == [
        (records[first].physical_offset, records[after].physical_offset)
        for first, after in ends.items()
    ]
    assert found.stat.records == 896 and found.units == 896
    assert found.stat.max_offset == log.max_offset
    assert inspect.stat(str(tmp_path)).records == 10
    json.dumps(found.as_dict())


def test_verify_compares_the_queues(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 400)
    store_of(tmp_path, log)
    path = tmp_path / "consumequeue/Topic/0/00000000000000000000"
    raw = bytearray(path.read_bytes())
    raw[45] ^= 1
    raw[20 * 190 :] = bytes(len(raw) - 20 * 190)
    path.write_bytes(raw)
    found = inspect.verify(str(tmp_path))
    assert found.units_wrong_count == 1 and "queue 0 queue offset 2" in found.units_wrong[0]
    assert found.units_missing == 10 and found.units == 389 and not found.ok


def test_a_rescued_tail_is_read_from_where_its_log_was_cut(tmp_path: Path) -> None:
    whole = str(GOLDEN / "three-files")
    rows = list(inspect.dump(whole))
    names = [f"{start:020}" for start in (0, 65536, 131072)]
    for first, name in ((5, "65537-{}"), (0, "7-{}.2"), (len(rows) - 3, "65537-{}")):
        cut = rows[first]["offset"]
        folder = tmp_path / name.format(cut)
        folder.mkdir()
        for file in names[cut // 65536 :]:
            data = (Path(whole) / "commitlog" / file).read_bytes()
            gap = max(0, cut - int(file))
            end = max(0, rows[-1]["offset"] + rows[-1]["size"] - int(file))
            (folder / file).write_bytes(bytes(gap) + data[gap:end])
        assert list(inspect.dump(str(folder))) == rows[first:]
        assert list(inspect.dump(str(folder), rows[-2]["offset"] - 1)) == rows[-2:]
        found = inspect.verify(str(folder))
        assert found.ok and not found.units_missing
        assert found.stat.records == sum("blank" not in row for row in rows[first:])


def test_a_tail_that_begins_with_a_torn_record_or_a_blank(tmp_path: Path) -> None:
    rows = list(inspect.dump(str(GOLDEN / "three-files")))
    at = next(number for number, row in enumerate(rows) if "blank" in row)
    for cut, first in ((rows[at]["offset"], at), (rows[at]["offset"] - 20, at + 1)):
        folder = tmp_path / f"1-{cut}"
        folder.mkdir()
        for file in (GOLDEN / "three-files/commitlog").iterdir():
            gap = max(0, cut - int(file.name))
            (folder / file.name).write_bytes(bytes(gap) + file.read_bytes()[gap:])
        assert list(inspect.dump(str(folder))) == rows[first:]


def test_dump_includes_bodies_on_request(tmp_path: Path) -> None:
    assert "body" not in next(inspect.dump(str(GOLDEN / "variants")))
    rows = list(inspect.dump(str(GOLDEN / "variants"), bodies=True))
    assert all(("body" in row) != ("body_base64" in row) for row in rows if "blank" not in row)
    assert inspect.body_field(b"\xff") == {"body_base64": "/w=="}
