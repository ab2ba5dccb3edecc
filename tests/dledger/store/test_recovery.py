"""Where a log of entries ends after kills, cuts and damage, and the index with it."""

import random
import shutil
from pathlib import Path

import pytest

from hastore.config.model import Flush, RetentionConfig
from hastore.dledger.core.events import HardState
from hastore.errors import ProtocolError, StoreBrokenError
from hastore.fs.filesystem import REAL, RealFile
from hastore.fs.memory import MemoryFileSystem
from hastore.record.log_format import pack_header
from hastore.service import raise_failure
from hastore.store import log_store
from hastore.store.log.commit_log import CommitLog, StoreHealth
from hastore.store.log.entry_index import EntryIndex
from hastore.store.log.entry_loader import load_entries
from hastore.store.log.recovery import recover
from hastore.store.offline.inspect import verify
from hastore.store.state.entry_state import EntryState
from hastore.store.state.limits import read_limits
from tests.dledger.store.kit import (
    copy_entries,
    data_of,
    folder_bytes,
    index_of,
    make,
    no_op,
    opened,
    put,
    walk,
)
from tests.dledger.store.records import record
from tests.dledger.store.test_crash_points import forget_boot
from tests.store.kit import FILE_SIZE, bodies, crash_copy, message, scribble

SMALL = 4096


def recovered_ends(data: bytes, cuts, *, limits=None):
    """Recover logs that were cut off at these offsets; yield (offset, end, entries, units)."""
    root = "/store"
    for cut in cuts:
        fs = MemoryFileSystem()
        for folder in ("data", "index"):
            fs.make_dirs(f"{root}/{folder}")
        fs.make_dirs(f"{root}/hastore")
        kept = data[:cut].ljust(len(data), b"\0")
        for at in range(0, len(data), SMALL):
            file = fs.open(f"{root}/data/{at:020}", create=True)
            file.pwrite(kept[at : at + SMALL], 0)
            file.close()
        index = EntryIndex(fs, f"{root}/index", EntryState(fs, root), file_bytes=SMALL)
        log = CommitLog(fs, root, SMALL, StoreHealth(), on_failure=raise_failure, entries=index)
        log.queue.load()
        found = recover(log, limits, clean=False, same_boot=True)
        load_entries(log, found, trusted=True)
        yield cut, found.end, index.end_index, folder_bytes(f"{root}/index", fs)


def test_a_log_cut_at_any_byte_ends_with_its_last_whole_entry(tmp_path):
    with opened(tmp_path, commitlog_file_size=SMALL) as store:
        for term in (1, 2):
            no_op(store, term)
            put(store, term, *(message(number, size=30) for number in range(12)))
        store.flush()
        data = data_of(store)
    heads, units = walk(data, SMALL)
    assert len(data) == 2 * SMALL and len(heads) == 26
    ends = [head[4] + head[1] for head in heads]
    blank_at = max(end for end in ends if end <= SMALL)
    # An entry whose last bytes are zeros is whole before they are written.
    whole = [head[4] + len(data[head[4] : head[4] + head[1]].rstrip(b"\0")) for head in heads]
    # Every byte of the first two entries, of those around the blank, and of the last one.
    cuts = [*range(ends[1] + 2), *range(blank_at - 300, SMALL + 60), *range(ends[-2], ends[-1] + 2)]
    for cut, end, last, index in recovered_ends(data, cuts):
        count = sum(1 for one in whole if one <= cut)
        assert last == count - 1, cut
        assert index.rstrip(b"\0") == units[: 32 * count].rstrip(b"\0"), cut
        expected = ends[count - 1] if count else 0
        if expected == blank_at and cut >= blank_at + 8:
            expected = SMALL  # the blank is there
        assert end == expected, cut


def test_a_torn_put_after_a_kill_is_cut_and_the_log_goes_on(tmp_path):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with opened(tmp_path / "s") as store:
        no_op(store, 3)
        put(store, 3, *(message(number) for number in range(40)))
        copy = crash_copy(store.messages, tmp_path / "c")
        data = data_of(store)
    heads, _ = walk(data, FILE_SIZE)
    path = f"{copy}/dledger-n1/data/{0:020}"
    cut = chance.randrange(1, heads[-1][4] + heads[-1][1])
    scribble(path, cut, bytes(chance.choice((1, 40, FILE_SIZE - cut))))
    kept = [head for head in heads if head[4] + head[1] <= cut]
    with opened(copy) as again:
        found, _ = walk(data_of(again), FILE_SIZE)
        assert found == heads[: len(found)] and len(found) >= len(kept)
        no_op(again, 4)
        put(again, 4, message(1))
        found, units = walk(data_of(again), FILE_SIZE)
        again.flush()
        assert index_of(again)[: len(units)] == units


def entries(spec, start=0):
    """Bytes of entries [(index, term, number)] with records, from position `start`."""
    data = b""
    for index, term, number in spec:
        pos = start + len(data)
        body = record(pos + 48, number)
        data += pack_header(index, term, pos, len(body)) + body
    return data


def foreign(root: Path, data: bytes, *, units: bytes = b"") -> Path:
    """A store as RocketMQ on DLedger leaves it."""
    for folder, content, size in (("data", data, SMALL), ("index", units, SMALL)):
        path = root / "dledger-n1" / folder
        path.mkdir(parents=True)
        for at in range(0, max(len(content), 1), size):
            (path / f"{at:020}").write_bytes(content[at : at + size].ljust(size, b"\0"))
    return root


def reopened(root):
    return make(root, commitlog_file_size=SMALL)


def test_a_stale_tail_of_an_older_term_is_cleared(tmp_path):
    new = entries([(0, 1, 0), (1, 1, 1), (2, 5, 2)])
    stale = entries([(3, 3, 30), (4, 3, 31)], len(new))
    store = reopened(foreign(tmp_path, new + stale))
    store.open()
    try:
        assert store.log_state().terms == ((1, 0), (5, 2)) and store.end_index == 2
        assert data_of(store).rstrip(b"\0") == new.rstrip(b"\0")
    finally:
        store.close()


def test_a_tail_whose_terms_still_fit_belongs_to_the_log_as_in_dledger(tmp_path):
    data = entries([(0, 1, 0), (1, 2, 1), (2, 2, 2)])
    store = reopened(foreign(tmp_path, data))
    store.open()
    try:
        assert store.end_index == 2
    finally:
        store.close()


# Not of byte 23: a term that was raised looks as if the entries behind it had been truncated.
@pytest.mark.parametrize("at", [0, 7, 12, 31, 47, 48 + 5, 48 + 100])
def test_damage_before_whole_entries_of_a_foreign_store_is_refused(tmp_path, at):
    data = bytearray(entries([(number, 1, number) for number in range(8)]))
    second = len(entries([(0, 1, 0)]))
    data[second + at] ^= 0x10
    root = foreign(tmp_path, bytes(data))
    before = folder_bytes(str(root / "dledger-n1" / "data"))
    with pytest.raises(StoreBrokenError, match="nothing was cut"):
        reopened(root).open()
    assert folder_bytes(str(root / "dledger-n1" / "data")) == before


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_damage_below_what_was_synced_is_named_and_never_cut(tmp_path, kind):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with opened(tmp_path / "s") as store:
        put(store, 1, *(message(number) for number in range(100)))
        store.flush()
        put(store, 1, *(message(number) for number in range(50)))
        heads, _ = walk(data_of(store), FILE_SIZE)
        copy = crash_copy(store.messages, tmp_path / "c")
    if kind == "power":
        forget_boot(REAL, copy)
    head = heads[chance.randrange(100)]
    at = head[4] + chance.randrange(head[1])  # any byte: the entry's CRC has them all
    path = f"{copy}/dledger-n1/data/{0:020}"
    with open(path, "rb") as file:
        file.seek(at)
        old = file.read(1)[0]
    scribble(path, at, bytes([old ^ 0x41]))
    with pytest.raises(StoreBrokenError, match=r"were synced.*nothing was cut"):
        make(copy).open()
    scribble(path, at, bytes([old]))
    with opened(copy) as again:
        assert again.end_index == 149


@pytest.mark.parametrize("what", ["topic", "sequence", "queue offset", "store time"])
def test_rot_outside_a_body_is_found_by_a_start_by_verify_and_by_a_follower(tmp_path, what):
    """The CRC of a record has only its body; that of its entry has everything."""
    with opened(tmp_path / "s") as store:
        put(store, 1, *(message(number, producer="0123456789abcdef") for number in range(100)))
        store.flush()
        pos = store.position(50)
        data = data_of(store)[: store.end_position(50)]
    places = {
        "topic": data.index(b"TopicA", pos) + 5,  # TopicA becomes TopicC
        "sequence": data.index(b"HS_SEQ\x0150", pos) + 7,
        "queue offset": pos + 48 + 27,
        "store time": pos + 48 + 62,
    }
    path = f"{tmp_path}/s/dledger-n1/data/{0:020}"
    scribble(path, places[what], bytes([data[places[what]] ^ 2]))
    found = verify(str(tmp_path / "s"))
    assert [(one.offset, one.reason.split(",")[0]) for one in found.damages] == [
        (pos, f"entry 50 has the bodyCrc {int.from_bytes(data[pos + 40 : pos + 44])}")
    ]
    with pytest.raises(StoreBrokenError, match=rf"bytes \[{pos}, .*were synced.*nothing was cut"):
        make(tmp_path / "s").open()
    scribble(path, places[what], bytes([data[places[what]]]))
    with opened(tmp_path / "s") as leader, opened(tmp_path / "f") as follower:
        scribble(path, places[what], bytes([data[places[what]] ^ 2]))  # after its start
        with pytest.raises(ProtocolError, match=f"entry 50 at {pos} came damaged"):
            copy_entries(leader, follower, max_bytes=leader.end_position(30))
        assert 0 < follower.end_index < 50
        scribble(path, places[what], bytes([data[places[what]]]))
        copy_entries(leader, follower)
        assert follower.end_index == 99


def test_entries_of_an_earlier_version_stay_readable_and_the_next_ones_have_crcs(tmp_path):
    old = entries([(number, 1, number) for number in range(3)])
    root = foreign(tmp_path, old)
    store = reopened(root)
    store.open()
    try:
        put(store, 1, message(0), message(1))
        store.flush()
        heads, _ = walk(data_of(store), SMALL)
        assert [bool(head[7]) for head in heads] == [False] * 3 + [True] * 2
        assert heads[4][6] == heads[3][7]
    finally:
        store.close()
    found = verify(str(root))
    assert found.ok and found.stat.entries_without_crc == 3


@pytest.mark.parametrize("kind", ["clean", "kill", "power"])
@pytest.mark.parametrize("harm", ["no folder", "no file", "zeros", "garbage", "short", "last"])
def test_an_index_that_lacks_or_contradicts_entries_is_written_anew(tmp_path, kind, harm):
    with opened(tmp_path / "s", commitlog_file_size=SMALL) as store:
        for term in range(1, 6):
            no_op(store, term)
            put(store, term, *(message(number) for number in range(60)))
        store.flush()
        state, index = store.log_state(), index_of(store)
        copy = crash_copy(store.messages, tmp_path / "c") if kind != "clean" else None
    root = Path(copy or tmp_path / "s")
    if kind == "power":
        forget_boot(REAL, str(root))
    folder = root / "dledger-n1" / "index"
    files = sorted(folder.iterdir())
    assert len(files) == 3
    if harm == "no folder":
        shutil.rmtree(folder)
    elif harm == "no file":
        files[1].unlink()
    elif harm == "zeros":
        files[1].write_bytes(bytes(4096))
    elif harm == "garbage":
        files[0].write_bytes(random.Random(1).randbytes(4096))
    elif harm == "short":
        files[0].write_bytes(files[0].read_bytes()[:1000])
    else:
        files[2].unlink()
    with opened(root, commitlog_file_size=SMALL) as again:
        assert again.log_state() == state
        again.flush()
        assert index_of(again) == index


def test_an_index_that_is_written_anew_is_synced_anew(tmp_path, monkeypatch):
    """Units that are not on the disk must not count as synced: the next start would trust them."""
    with opened(tmp_path, commitlog_file_size=1 << 20) as store:
        put(store, 1, *(message(number) for number in range(600)))
        folder = Path(store.messages.directory) / "index"
    assert EntryState(REAL, str(tmp_path)).load().synced_index == 600
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 2
    shutil.rmtree(folder)
    synced, real = set(), RealFile.sync
    monkeypatch.setattr(RealFile, "sync", lambda file: synced.add(file.path) or real(file))
    with opened(tmp_path, commitlog_file_size=1 << 20):
        pass
    assert {str(folder / name) for name in names} <= synced


def test_a_part_of_the_index_that_a_power_loss_took_is_written_anew(tmp_path, monkeypatch):
    """Below a recovery's start only units that are known to be on the disk are trusted."""
    monkeypatch.setattr(log_store, "HOUSEKEEPING_S", 3600.0)  # it would sync the index meanwhile
    with opened(tmp_path / "s", commitlog_file_size=1 << 20) as store:
        put(store, 1, *(message(number) for number in range(300)))
        store.flush()
        store.messages.entries.sync()
        for first in range(300, 1500, 100):
            put(store, 1, *(message(number) for number in range(first, first + 100)))
        store.flush()
        index = index_of(store)
        copy = crash_copy(store.messages, tmp_path / "c")
    assert EntryState(REAL, copy).load().synced_index == 300
    # The page cache had the units of entries 300 to 1499, the disk none of them.
    folder = Path(copy) / "dledger-n1" / "index"
    for number, path in enumerate(sorted(folder.iterdir())):
        kept = max(0, min(4096, 300 * 32 - number * 4096))
        path.write_bytes(path.read_bytes()[:kept].ljust(4096, b"\0"))
    forget_boot(REAL, copy)
    with opened(copy, commitlog_file_size=1 << 20) as again:
        again.flush()
        assert again.end_index == 1499 and index_of(again) == index


def test_a_node_that_lost_its_disk_stays_in_quarantine_when_it_restarts(tmp_path):
    with opened(tmp_path) as store:
        assert not store.remembers
        store.save_hard_state(store.hard_state, remembers=False)
    for term in (1, 2):
        with opened(tmp_path) as store:
            assert not store.remembers
            store.save_hard_state(HardState(term, None), remembers=False)
    with opened(tmp_path) as store:
        assert not store.remembers
        store.save_hard_state(HardState(3, 2), remembers=True)
    with opened(tmp_path) as store:
        assert store.hard_state == HardState(3, 2, remembers=True)


def test_what_another_program_appended_to_a_closed_store_is_archived(tmp_path):
    """Entries of DLedger whose bodies are no records, in the last file and in one more."""
    root = tmp_path / "s"
    with opened(root, commitlog_file_size=SMALL) as store:
        put(store, 3, *(message(number) for number in range(10)))
        store.flush()
        kept, end = data_of(store), store.end_position(store.end_index)
    added = b"".join(
        pack_header(10 + number, 3, end + 148 * number, 100) + b"other" * 20 for number in range(30)
    )
    data = root / "dledger-n1" / "data"
    whole = (kept[:end] + added).ljust(2 * SMALL, b"\0")
    (data / f"{0:020}").write_bytes(whole[:SMALL])
    (data / f"{SMALL:020}").write_bytes(whole[SMALL:])
    with opened(root, commitlog_file_size=SMALL) as store:
        assert store.end_index == 9 and data_of(store) == kept
        no_op(store, 4)
    rescued = root / "rescued"
    (archive,) = rescued.iterdir()
    assert archive.name == f"3-{end}"
    assert folder_bytes(str(archive))[end:] == added
    with opened(root, commitlog_file_size=SMALL) as store:
        assert store.end_index == 10
    assert list(rescued.iterdir()) == [archive]


def test_retention_keeps_index_terms_and_begin(tmp_path):
    kept = RetentionConfig(max_size_bytes=3 * SMALL)
    with opened(tmp_path, commitlog_file_size=SMALL, retention=kept) as store:
        for term in range(1, 11):
            no_op(store, term)
            put(store, term, *(message(number) for number in range(20)))
        store.flush()
        assert store.messages.wait_dispatched(store.messages.max_offset, 60)
        store.messages.entries.sync()
        heads, _ = walk(data_of(store), SMALL)
        assert store.messages.retention.delete_expired(None) > 5
        begin = store.begin_index
        head = heads[begin]
        assert head[4] == store.messages.min_offset and head[4] % SMALL == 0
        state = store.log_state()
        assert state.begin_index == begin and state.end_index == len(heads) - 1
        assert state.prev_term == heads[begin - 1][3] == store.term_of(begin - 1)
        assert state.terms[0] == (head[3], begin)
        assert store.index_at(head[4]) == begin - 1
        left = index_of(store)
        assert len(left) < 4096 * 3
        wanted = len(bodies(store.messages))
    with opened(tmp_path, commitlog_file_size=SMALL, retention=kept) as again:
        assert again.log_state() == state and len(bodies(again.messages)) == wanted
        assert index_of(again) == left
        assert read_limits(REAL, str(tmp_path)).first_offset == head[4]


def test_a_foreign_store_that_lacks_committed_entries_is_refused(tmp_path):
    data = bytearray(entries([(number, 1, number) for number in range(8)]))
    data[len(entries([(0, 1, 0)])) + 23] ^= 0x10  # a raised term: what follows seems truncated
    root = foreign(tmp_path, bytes(data))
    (root / "dledger-n1" / "checkpoint").write_text("endIndex=7\ncommittedIndex=7\n")
    before = folder_bytes(str(root / "dledger-n1" / "data"))
    for _ in range(2):
        with pytest.raises(StoreBrokenError, match="entry 7 is committed, but the log ends with"):
            reopened(root).open()
        assert folder_bytes(str(root / "dledger-n1" / "data")) == before


def filled(root):
    """Fill three data files and close the store; return their paths, in order."""
    with opened(root, commitlog_file_size=SMALL) as store:
        for number in range(40):
            put(store, 1, message(number, size=100))
        store.commit(store.end_index)
        files = sorted(Path(f"{store.messages.directory}/data").iterdir())
    assert len(files) >= 3
    return files


def test_a_log_that_ends_with_a_file_is_not_short_after_a_power_loss(tmp_path):
    """The start then reads no entry: the log is synced up to an empty file."""
    files = filled(tmp_path)
    store = make(tmp_path, commitlog_file_size=SMALL, flush=Flush.SYNC)
    store.open()
    log = store.messages.log
    with log.lock:
        log.roll()
        log.record_end = end = log.max_offset
    store.messages.flush()
    store.commit(store.end_index)
    store.close()
    files[0].with_name(f"{end:020}").write_bytes(bytes(SMALL))
    (tmp_path / "abort").touch()
    forget_boot(REAL, str(tmp_path))
    with opened(tmp_path, commitlog_file_size=SMALL, flush=Flush.SYNC) as again:
        assert (again.begin_index, again.end_index) == (0, 39)
        assert again.messages.max_offset == end


def test_missing_first_files_are_not_taken_for_retention(tmp_path):
    """Without them the entries that they held would count as committed, and as removed."""
    first, second, *_ = filled(tmp_path)
    kept = {file: file.read_bytes() for file in (first, second)}
    for gone in ([first], [first, second]):
        for file in gone:
            file.unlink()
        before = folder_bytes(str(tmp_path / "hastore"))
        with pytest.raises(StoreBrokenError, match="entry 0 at 0: the files between"):
            make(tmp_path, commitlog_file_size=SMALL).open()
        assert folder_bytes(str(tmp_path / "hastore")) == before
        for file in gone:
            file.write_bytes(kept[file])
    with opened(tmp_path, commitlog_file_size=SMALL) as again:
        assert (again.begin_index, again.end_index) == (0, 39)


def test_a_store_of_an_earlier_version_does_not_say_where_its_log_begins(tmp_path):
    """Nor does RocketMQ's. The first start notes it; from then on nothing may be missing."""
    first, second, *_ = filled(tmp_path)
    state = EntryState(REAL, str(tmp_path))
    state.load()
    state.save(begin_sure=False)
    first.unlink()
    with opened(tmp_path, commitlog_file_size=SMALL) as store:
        begin = store.begin_index
        assert begin > 0
    second.unlink()
    with pytest.raises(StoreBrokenError, match=f"begins with entry {begin} at {SMALL}"):
        make(tmp_path, commitlog_file_size=SMALL).open()
