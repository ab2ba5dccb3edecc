"""A rebuild writes the bytes that replay writes, whatever the ranges in which it reads the log."""

import random
import shutil
import stat

import pytest

from hastore.errors import CorruptRecordError, StoreError, StoreInUseError, UsageError
from hastore.pipeline import index as pipeline
from hastore.record.codec import NO_HOST, build_record, encode_record
from hastore.record.delays import SCHEDULE_TOPIC
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.store import replay as replay_service
from hastore.store.append.results import own_records
from hastore.store.derived.deliveries import read_delays
from hastore.store.derived.index_file import HEADER, IndexHeader
from hastore.store.rebuild import compare, extract
from hastore.store.rebuild.layout import RangeTask, Sizes, find_sizes, run_here
from hastore.store.rebuild.rebuild import rebuild_in_place, rebuild_to, rebuild_to_verify
from hastore.store.state.marker_files import LockFile
from tests.store.derived.walk.test_vector_walk import random_log
from tests.store.derived_files import ENTRIES, SLOTS, UNITS, rebuilt
from tests.store.kit import message, opened, put
from tests.store.logs import GOLDEN, MemoryLog, fill
from tests.store.rebuild.kit import REAL, SIZES, derived_files, how, write_log


@pytest.fixture(params=range(14))
def chance(request):
    print(f"seed {request.param}")
    return random.Random(request.param)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [path for path in expected if found[path] != expected[path]] == []


def test_random_logs(chance, tmp_path, monkeypatch):
    monkeypatch.setattr(replay_service, "_VECTOR_FROM_BYTES", 1 << 60)  # the scalar walk
    count = chance.choice((1, 40, 300, 1_200))
    log = random_log(chance, count)
    # Small files, but not thousands of them.
    sizes = Sizes(
        chance.choice((3 + count // 40, UNITS)),
        chance.choice((1, SLOTS)),
        chance.choice((2 + count // 10, ENTRIES)),
    )
    expected = rebuilt(
        tmp_path / "replay", log, units=sizes.units, slots=sizes.slots, entries=sizes.entries
    )
    write_log(tmp_path / "store", log)
    way = how(
        range_bytes=max(chance.choice((1_700, 9_999, 50_000, 1 << 30)), log.max_offset // 40),
        buckets=chance.choice((1, 3, 32)),
    )
    built = rebuild_to(REAL, str(tmp_path / "store"), str(tmp_path / "new"), sizes, way)
    assert built.end_offset == log.max_offset
    assert_same(derived_files(tmp_path / "new"), expected)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["commitlog"]
    # In place, over whatever is there; then there is no difference.
    for kind in chance.sample(["consumequeue", "index"], chance.randrange(3)):
        if (tmp_path / "new" / kind).exists():
            shutil.copytree(tmp_path / "new" / kind, tmp_path / "store" / kind)
    rebuild_in_place(REAL, str(tmp_path / "store"), sizes, way)
    assert_same(derived_files(tmp_path / "store"), expected)
    assert not (tmp_path / "store" / "rebuild.tmp").exists()
    _, difference = rebuild_to_verify(
        REAL, str(tmp_path / "store"), str(tmp_path / "work"), sizes, way
    )
    assert difference is None
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("range_bytes", [9_000, 1 << 30])
def test_the_progress_counts_what_is_used_of_a_preallocated_file(tmp_path, range_bytes):
    """In a RocketMQ store its last whole record ends it, in one of hastore the limits page."""
    log = MemoryLog(file_size=1 << 20)
    fill(log, 50)
    write_log(tmp_path / "store", log)
    (tmp_path / "store" / "commitlog" / f"{1 << 20:020}").write_bytes(bytes(1 << 20))
    way = how(range_bytes=range_bytes)
    rebuild_to(REAL, str(tmp_path / "store"), str(tmp_path / "new"), SIZES, way)
    assert way.steps.steps["reading the log"] == [log.max_offset, log.max_offset]
    with opened(tmp_path / "own") as store:
        put(store, *map(message, range(20)))
        end = store.max_offset
    rebuild_to(REAL, str(tmp_path / "own"), str(tmp_path / "new2"), SIZES, way)
    assert way.steps.steps["reading the log"] == [end, end]


@pytest.mark.parametrize(("name", "end"), [("three-files", 167944), ("variants", 18770)])
def test_rocketmqs_own_files(name, end, tmp_path):
    built = rebuild_to(REAL, str(GOLDEN / name), str(tmp_path), SIZES, how())
    assert built.end_offset == end
    assert_same(derived_files(tmp_path), derived_files(GOLDEN / name))


def test_who_may_read_the_store_may_read_what_is_rebuilt_in_place(tmp_path, monkeypatch):
    """The node leaves the right to the group (store.group_read), but gives it to no old file."""
    monkeypatch.setattr(pipeline, "run_tasks", lambda _spark, *given: run_here(*given))
    log = MemoryLog()
    log.append(topic="TopicA", queue_id=0, properties=b"KEYS\x01k\x02")
    for name, mode in (("shared", 0o750), ("private", 0o700)):
        store = tmp_path / name
        write_log(store, log)
        (store / "commitlog").chmod(mode)
        sizes = {"units": SIZES.units, "slots": SIZES.slots, "entries": SIZES.entries}
        pipeline.run_index(None, pipeline.IndexOptions(path=str(store), **sizes))
        made = [*(store / "consumequeue").rglob("*"), *(store / "index").iterdir()]
        modes = {stat.S_IMODE(path.stat().st_mode) for path in made}
        assert modes == {mode, mode & 0o640}


def test_a_delayed_messages_tag_code_is_its_due_time(tmp_path):
    log = MemoryLog()
    log.append(
        topic=SCHEDULE_TOPIC, queue_id=2, properties=b"DELAY\x013\x02TAGS\x01a\x02",
        store_timestamp_ms=5_000,
    )  # fmt: skip
    write_log(tmp_path / "store", log)
    rebuild_to(REAL, str(tmp_path / "store"), str(tmp_path / "new"), SIZES, how())
    units = (tmp_path / "new/consumequeue" / SCHEDULE_TOPIC / "2" / f"{0:020}").read_bytes()
    assert int.from_bytes(units[12:20]) == 15_000


def test_the_delays_are_those_that_the_node_has_noted(tmp_path):
    store, levels = tmp_path / "store", "30d 3s"
    record = build_record(
        SCHEDULE_TOPIC, b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST,
        properties=[("DELAY", "1"), ("REAL_TOPIC", "T"), ("REAL_QID", "0")],
    )  # fmt: skip
    with opened(store, message_delay_level=levels) as node:
        assert node.put_encoded([record], [own_records])[0][0].offset == 0
    name = f"consumequeue/{SCHEDULE_TOPIC}/0/{0:020}"
    written = (store / name).read_bytes()

    def built_with(folder, **given):
        sizes = find_sizes(REAL, str(store), **given)
        rebuild_to(REAL, str(store), str(tmp_path / folder), sizes, how())
        return (tmp_path / folder / name).read_bytes()

    assert built_with("noted") == written
    assert built_with("given", delay_levels="7s") != written
    with opened(store, message_delay_level="1s") as node:
        put(node, message(1))
    assert read_delays(REAL, str(store)) == (1_000,), "a changed setting is noted"
    (store / "hastore/deliveries").unlink()
    assert read_delays(REAL, str(store)) is None
    assert built_with("option", delay_levels=levels) == written
    assert built_with("default") != written


def test_a_node_times_what_waits_by_its_setting_when_it_builds_its_queues_anew(tmp_path):
    """As the note on a broker with other levels says it (server/broker_tables_service.py)."""
    record = build_record(
        SCHEDULE_TOPIC, b"x", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST,
        properties=[("DELAY", "1"), ("REAL_TOPIC", "T"), ("REAL_QID", "0")],
    )  # fmt: skip
    due = []
    for levels in ("1s", "10m", "10m"):
        with opened(tmp_path, message_delay_level=levels) as node:
            if not due:
                node.put_encoded([record], [own_records])
            assert node.wait_dispatched(node.max_offset, 60)
            [unit] = node.queues.read(SCHEDULE_TOPIC, 0, 0, 1)
            due.append(unit.tags_code)
        if len(due) == 2:
            (tmp_path / "hastore/replay").unlink()
    assert due[1] == due[0] and due[2] == due[0] + 599_000


def test_a_record_inside_a_body_is_no_start(tmp_path):
    """A body that holds whole records of just these offsets misleads the search for a start."""
    log = MemoryLog()
    fill(log, 3)
    inner = MemoryLog(start=log.max_offset + 88)  # where the body of the next record begins
    fake = b"".join(encode_record(record) for record in fill(inner, 40))
    log.append(topic="real", queue_id=0, queue_offset=0, body=fake)
    fill(log, 20, queues=(5,))
    expected = rebuilt(tmp_path / "replay", log)
    assert "consumequeue/Topic/1/" + f"{0:020}" in expected
    write_log(tmp_path / "store", log)
    way = how(range_bytes=700)
    built = rebuild_to(REAL, str(tmp_path / "store"), str(tmp_path / "new"), SIZES, way)
    assert built.records == 24
    assert_same(derived_files(tmp_path / "new"), expected)


@pytest.mark.parametrize("window", [3, 64, 400])
def test_the_first_record_of_a_range_is_found_behind_zeros(tmp_path, monkeypatch, window):
    """Zeros are searched in another way; the first record may begin at any byte of a window."""
    monkeypatch.setattr(extract, "_SEARCH_BYTES", window)
    log = MemoryLog(file_size=1 << 16)
    starts = [
        log.append(topic="TopicA", queue_id=0, queue_offset=at, body=bytes(size)).physical_offset
        for at, size in enumerate((70, 71, 0, 500, 10))
    ]
    write_log(tmp_path, log)
    for start in range(1, starts[-1] + 1):
        task = RangeTask(
            path=str(tmp_path / "commitlog" / f"{0:020}"), file_start=0, start=start,
            end=log.max_offset, exact=False, limit=log.max_offset, piece=str(tmp_path / "piece"),
            buckets=1, keys=False,
        )  # fmt: skip
        assert extract.extract_range(task).first == min(at for at in starts if at >= start)


# -- what retention has removed --------------------------------------------------------------------


def test_queues_without_records_keep_their_next_queue_offset(tmp_path):
    log = MemoryLog(file_size=8192)
    records = fill(log, 30, queues=(0,))  # all in the first file
    while log.max_offset < 8192:
        fill_one(log, "other", records)
    write_log(tmp_path / "store", log)
    rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    before = derived_files(tmp_path / "store")
    (tmp_path / "store/commitlog" / f"{0:020}").unlink()
    built = rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    assert (built.first_offset, built.kept_queues) == (8192, 2)
    after = derived_files(tmp_path / "store")
    queue = f"consumequeue/Topic/0/{0:020}"
    assert after[queue] == before[queue]
    _, difference = rebuild_to_verify(
        REAL, str(tmp_path / "store"), str(tmp_path / "work"), SIZES, how()
    )
    assert difference is None
    # Lost queues begin with blanks, as in RocketMQ.
    shutil.rmtree(tmp_path / "store/consumequeue")
    built = rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    assert built.kept_queues == 0
    lost = derived_files(tmp_path / "store")
    assert queue not in lost
    assert lost[f"consumequeue/other/0/{0:020}"][8:12] == b"\x7f\xff\xff\xff"


def test_inner_batches_behind_a_kept_single_message_have_their_places(tmp_path):
    """The blanks that stand for them are kept with the message."""
    log = MemoryLog(file_size=4096)
    log.append(queue_offset=0)
    records = []
    while log.max_offset < 4096:
        fill_one(log, "other", records)
    properties = b"INNER_NUM\x015\x02INNER_BASE\x011\x02"
    log.append(sys_flag=FLAG_INNER_BATCH, queue_offset=1, properties=properties)
    log.append(queue_offset=6)
    write_log(tmp_path, log)
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    before = derived_files(tmp_path)
    (tmp_path / "commitlog" / f"{0:020}").unlink()
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    after = derived_files(tmp_path)
    for kind in ("consumequeue", "batchconsumequeue"):
        path = f"{kind}/T/0/{0:020}"
        assert after[path] == before[path]


def fill_one(log, topic, records):
    number = sum(record.topic == topic for record in records)
    records.append(log.append(topic=topic, queue_id=0, queue_offset=number, body=bytes(200)))


def test_units_that_contradict_the_log_are_not_kept(tmp_path):
    log = MemoryLog(file_size=8192)
    records = []
    while log.max_offset < 9_000:
        fill_one(log, "other", records)
    write_log(tmp_path / "store", log)
    rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    good = derived_files(tmp_path / "store")
    (tmp_path / "store/commitlog" / f"{0:020}").unlink()
    path = tmp_path / "store/consumequeue/other/0" / f"{0:020}"
    units = bytearray(path.read_bytes())
    first = sum(record.physical_offset < 8192 for record in records)
    units[20 * first : 20 * first + 20] = units[:20]  # one unit too many below the log's start
    path.write_bytes(units)
    built = rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    assert built.refused == ("other/0",)
    found = derived_files(tmp_path / "store")[f"consumequeue/other/0/{0:020}"]
    assert found[20 * first :] == good[f"consumequeue/other/0/{0:020}"][20 * first :]


# -- bad input -------------------------------------------------------------------------------------


def small_store(tmp_path, **fields):
    log = MemoryLog(file_size=8192)
    records = fill(log, 150)
    write_log(tmp_path / "store", log)
    return log, records, str(tmp_path / "store")


def listing(root):
    return sorted(str(path) for path in root.rglob("*"))


def test_no_store(tmp_path):
    with pytest.raises(StoreError, match="is no store"):
        rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    assert listing(tmp_path) == []


def test_a_store_in_use(tmp_path):
    _, _, store = small_store(tmp_path)
    lock = LockFile(REAL, store)
    lock.acquire()
    with pytest.raises(StoreInUseError):
        rebuild_in_place(REAL, store, SIZES, how())
    lock.release()
    rebuild_in_place(REAL, store, SIZES, how())


def test_a_folder_that_is_not_empty(tmp_path):
    _, _, store = small_store(tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/mine").touch()
    with pytest.raises(UsageError, match="is not empty: it has mine"):
        rebuild_to(REAL, store, str(tmp_path / "new"), SIZES, how())


@pytest.mark.parametrize("range_bytes", [900, 1 << 30])
@pytest.mark.parametrize("unclean", [False, True])
def test_a_torn_record_in_the_middle(tmp_path, range_bytes, unclean):
    _, records, store = small_store(tmp_path)
    rebuild_in_place(REAL, store, SIZES, how())
    before = derived_files(tmp_path / "store")
    if unclean:
        (tmp_path / "store/abort").touch()
    torn = records[20].physical_offset
    path = tmp_path / "store/commitlog" / f"{0:020}"
    data = bytearray(path.read_bytes())
    data[torn + 4] ^= 0xFF
    path.write_bytes(data)
    files = listing(tmp_path)
    with pytest.raises(CorruptRecordError, match=f"offset {torn}, but whole records follow"):
        rebuild_in_place(REAL, store, SIZES, how(range_bytes=range_bytes))
    assert derived_files(tmp_path / "store") == before
    assert listing(tmp_path) == files


def test_a_torn_end_ends_the_log(tmp_path):
    log, records, store = small_store(tmp_path)
    last = records[-1]
    path = sorted((tmp_path / "store/commitlog").iterdir())[-1]
    data = bytearray(path.read_bytes())
    at = last.physical_offset % 8192
    data[at + 60 :] = bytes(len(data) - at - 60)
    path.write_bytes(data)
    (tmp_path / "store/abort").touch()
    built = rebuild_in_place(REAL, store, SIZES, how())
    assert (built.end_offset, built.records) == (last.physical_offset, len(records) - 1)


def test_a_killed_broker_leaves_an_empty_next_file(tmp_path):
    log, records, store = small_store(tmp_path)
    number = -(-log.max_offset // 8192)
    (tmp_path / "store/commitlog" / f"{8192 * number:020}").write_bytes(bytes(8192))
    (tmp_path / "store/abort").touch()
    built = rebuild_in_place(REAL, store, SIZES, how())
    assert (built.end_offset, built.records) == (log.max_offset, len(records))


def test_a_missing_log_file(tmp_path):
    _, _, store = small_store(tmp_path)
    (tmp_path / "store/commitlog" / f"{8192:020}").unlink()
    with pytest.raises(StoreError, match="files are missing between 8192 and 16384"):
        rebuild_in_place(REAL, store, SIZES, how())


# -- differences -----------------------------------------------------------------------------------


def built_store(tmp_path):
    _, records, store = small_store(tmp_path)
    rebuild_in_place(REAL, store, SIZES, how())
    return records, tmp_path / "store"


def difference_of(store, tmp_path):
    before = listing(store)
    _, difference = rebuild_to_verify(REAL, str(store), str(tmp_path / "work"), SIZES, how())
    assert listing(store) == before
    return difference


def test_files_of_other_programs_among_the_queues_are_ignored(tmp_path):
    _, store = built_store(tmp_path)
    topic = next(iter((store / "consumequeue").iterdir()))
    for folder in (store / "consumequeue", topic):
        (folder / ".DS_Store").write_bytes(b"x")
    assert find_sizes(REAL, str(store), slots=SLOTS, entries=ENTRIES) == SIZES
    assert difference_of(store, tmp_path) is None


def damage(path, at, data):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


def test_a_wrong_unit(tmp_path):
    records, store = built_store(tmp_path)
    damage(store / "consumequeue/Topic/1" / f"{0:020}", 20 * 7 + 15, b"\xaa")
    found = difference_of(store, tmp_path)
    assert found.place == "unit 7"
    record = [record for record in records if record.queue_id == 1][7]
    assert f"offset {record.physical_offset}," in found.expected
    assert found.found != found.expected


def test_units_that_are_missing_or_too_many(tmp_path):
    records, store = built_store(tmp_path)
    count = sum(record.queue_id == 0 for record in records)
    path = store / "consumequeue/Topic/0" / f"{0:020}"
    damage(path, 20 * (count - 1), bytes(20))
    assert difference_of(store, tmp_path).found == "no unit"
    rebuild_in_place(REAL, str(store), SIZES, how())
    damage(path, 20 * count, path.read_bytes()[:20])
    found = difference_of(store, tmp_path)
    assert (found.place, found.expected) == (f"unit {count}", "no unit")
    path.unlink()
    assert difference_of(store, tmp_path).found == "nothing"


@pytest.mark.parametrize("part", ["slot", "hash", "previous"])
def test_a_wrong_index(tmp_path, part):
    _, store = built_store(tmp_path)
    path = next((store / "index").iterdir())
    entries_at = 40 + 4 * SLOTS
    data = path.read_bytes()
    slot = next(n for n in range(SLOTS) if any(data[40 + 4 * n : 44 + 4 * n]))
    at = {"slot": 40 + 4 * slot, "hash": entries_at + 60, "previous": entries_at + 60 + 16}[part]
    damage(path, at, b"\x01\x02\x03\x04")
    found = difference_of(store, tmp_path)
    assert found.path == str(path)
    assert found.place == (f"slot {slot}" if part == "slot" else "entry 3")


def test_an_index_that_began_with_older_records_is_no_difference(tmp_path):
    _, store = built_store(tmp_path)
    (store / "commitlog" / f"{0:020}").unlink()
    assert difference_of(store, tmp_path) is None
    assert ENTRIES > 150  # all keys are in one file


@pytest.fixture
def live_store(tmp_path):
    """A store that a node has open, whose queues and index have several files; its sizes."""
    log = MemoryLog(file_size=8192)
    records = fill(log, 300)
    write_log(tmp_path / "store", log)
    sizes = Sizes(10, SLOTS, 40)
    rebuild_in_place(REAL, str(tmp_path / "store"), sizes, how())
    lock = LockFile(REAL, str(tmp_path / "store"))
    lock.acquire()
    yield tmp_path / "store", sizes, records
    lock.release()


def remove_before(store, offset):
    """Remove the files of queues and index that have only records before an offset of the log."""
    removed = []
    for path in [*store.glob("consumequeue/*/*/*"), *store.glob("index/*")]:
        data = path.read_bytes()
        if path.parent.name == "index":
            last = IndexHeader(*HEADER.unpack(data[: HEADER.size])).end_offset
        else:
            last = max(int.from_bytes(data[at : at + 8]) for at in range(0, len(data), 20))
        if last < offset:
            path.unlink()
            removed.append(path.parent.name)
    return removed


def test_what_retention_removes_meanwhile_is_no_difference(live_store, tmp_path, monkeypatch):
    store, sizes, _ = live_store
    files = sorted((store / "commitlog").iterdir())
    removed = []

    def read_then_remove(name, function, tasks):
        """Run the tasks; at their end a node's retention begins with queues and index."""
        yield from run_here(name, function, tasks)
        if name == "build":
            removed.extend(remove_before(store, int(files[2].name)))

    def remove_log():
        """Remove one more file of the log, while the comparison waits."""
        next(path for path in files if path.exists()).unlink()

    monkeypatch.setattr(compare, "_pause", remove_log)
    _, difference = rebuild_to_verify(
        REAL, str(store), str(tmp_path / "work"), sizes, how(runner=read_then_remove)
    )
    assert difference is None
    assert {"0", "index"} <= set(removed)
    assert [path.exists() for path in files[:3]] == [False, False, True]


@pytest.mark.parametrize("kind", ["consumequeue", "index"])
def test_files_that_retention_did_not_remove_are_a_difference(
    live_store, tmp_path, monkeypatch, kind
):
    store, sizes, records = live_store
    monkeypatch.setattr(compare, "RETENTION_S", 0.0)
    path = sorted(path for path in store.rglob(f"{kind}/**/*") if path.is_file())[0]
    path.unlink()
    _, difference = rebuild_to_verify(REAL, str(store), str(tmp_path / "work"), sizes, how())
    if kind == "consumequeue":
        assert (difference.path, difference.found) == (str(path), "nothing")
    else:
        assert difference.place == "entry 1"
        assert f"offset {records[0].physical_offset})" in difference.expected


@pytest.mark.parametrize("after", ["read the log", "build"])
def test_what_a_cut_of_the_log_changes_meanwhile_is_no_difference(live_store, tmp_path, after):
    store, sizes, _ = live_store
    other = tmp_path / "other"  # the store after the cut, with other records behind it
    log = MemoryLog(file_size=8192)
    records = fill(log, 250)
    while log.max_offset < 30_000:
        fill_one(log, "other", records)
    write_log(other, log)
    rebuild_in_place(REAL, str(other), sizes, how())
    cuts = []

    def read_then_cut(name, function, tasks):
        yield from run_here(name, function, tasks)
        if name == after and not cuts:
            cuts.append(name)
            for kind in ("commitlog", "consumequeue", "index"):
                shutil.rmtree(store / kind)
                shutil.copytree(other / kind, store / kind)

    built, difference = rebuild_to_verify(
        REAL, str(store), str(tmp_path / "work"), sizes, how(runner=read_then_cut)
    )
    assert cuts and difference is None
    assert built.records == len(records)


def test_a_log_file_that_is_gone_meanwhile_is_named_with_the_remedy(live_store, tmp_path):
    store, sizes, _ = live_store
    file = min((store / "commitlog").iterdir())

    def remove_then_read(name, function, tasks):
        file.unlink(missing_ok=True)
        return run_here(name, function, tasks)

    with pytest.raises(StoreError, match=f"^{file} is gone: .*run the job again; the store was"):
        rebuild_to_verify(
            REAL, str(store), str(tmp_path / "work"), sizes, how(runner=remove_then_read)
        )


def test_lost_queues_of_inner_batches(tmp_path):
    log = MemoryLog(file_size=8192)
    fill(log, 10)
    properties = b"INNER_BASE\x010\x02INNER_NUM\x013\x02"
    log.append(topic="many", body=b"x", properties=properties, sys_flag=FLAG_INNER_BATCH)
    write_log(tmp_path / "store", log)
    rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    good = derived_files(tmp_path / "store")
    assert difference_of(tmp_path / "store", tmp_path) is None
    shutil.rmtree(tmp_path / "store/batchconsumequeue")
    found = difference_of(tmp_path / "store", tmp_path)
    assert (found.place, found.found) == ("the file", "nothing")
    assert "/batchconsumequeue/many/0/" in found.path
    rebuild_in_place(REAL, str(tmp_path / "store"), SIZES, how())
    assert_same(derived_files(tmp_path / "store"), good)


def test_a_lost_index(tmp_path):
    _, store = built_store(tmp_path)
    shutil.rmtree(store / "index")
    found = difference_of(store, tmp_path)
    assert (found.place, found.found) == ("after its last entry", "no entry")
    built = rebuild_in_place(REAL, str(store), SIZES, how(index=False))
    assert built.index_files == 0
    assert not (store / "index").exists()
