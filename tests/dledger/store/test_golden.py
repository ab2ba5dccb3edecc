"""The stores that DLedger and RocketMQ on DLedger wrote: read, continued, and made again."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from hastore.dledger.core.events import HardState, TakenEntries
from hastore.errors import StoreBrokenError
from hastore.fs.filesystem import REAL
from hastore.protocol.dledger import AppendRequest
from hastore.record.codec import decode_record
from hastore.record.log_format import pack_unit
from hastore.store.entry_message_store import NewEntries
from hastore.store.offline import inspect
from hastore.store.offline.reader import StoreReader
from hastore.store.rebuild.layout import Sizes, find_sizes, run_here
from hastore.store.rebuild.rebuild import How, rebuild_to_verify
from tests.dledger.store.kit import data_of, folder_bytes, index_of, make, no_op, put, walk
from tests.store.kit import bodies, message

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
NAMES = ("dledger-killed", "dledger-rocketmq", "dledger-terms")
FILE_SIZE = 32768


def manifest(name):
    return json.loads((GOLDEN / name / "manifest.json").read_text())


def store_of(name, tmp_path):
    """A copy of a golden store, which a test may change."""
    return shutil.copytree(GOLDEN / name / "store", tmp_path / name)


def data(name):
    return folder_bytes(str(GOLDEN / name / "store" / "dledger-n0" / "data"))


def files_under(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(Path(root).rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["store", "store/dledger-n0"])
def test_the_dump_is_what_dledger_itself_read(name, folder):
    expected, raw = manifest(name), data(name)
    found = list(inspect.dump(str(GOLDEN / name / folder), bodies=True))
    entries = [one for one in found if "blank" not in one]
    blanks = [{"pos": one["pos"], "size": one["size"]} for one in found if "blank" in one]
    assert blanks == expected["blanks"]
    assert len(entries) == len(expected["entries"])
    for one, its in zip(entries, expected["entries"], strict=True):
        pos, size = its["pos"], its["size"]
        assert [one[key] for key in ("index", "term", "pos", "size", "magic", "channel")] == [
            its[key] for key in ("index", "term", "pos", "size", "magic", "channel")
        ]
        assert (one["chain_crc"], one["body_crc"]) == (its["chainCrc"], its["bodyCrc"])
        assert one["body_size"] == size - 48
        assert one["sha256"] == hashlib.sha256(raw[pos : pos + size]).hexdigest()
        assert its["bodySha256"] == hashlib.sha256(raw[pos + 48 : pos + size]).hexdigest()
        assert ("record" in one) == (name == "dledger-rocketmq")
    if name == "dledger-rocketmq":
        offsets = [one["record"]["offset"] for one in entries]
        assert offsets == [one["pos"] + 48 for one in entries]
        puts = expected["puts"]
        ids = ",".join(one["msgId"] for one in puts).split(",")
        assert offsets == [int(one[-16:], 16) for one in ids]


@pytest.mark.parametrize("name", NAMES)
def test_verify_and_stat_agree_with_the_manifest(name):
    expected = manifest(name)
    found = inspect.verify(str(GOLDEN / name / "store"))
    assert found.ok and found.stat.max_offset == expected["endPos"], found.as_dict()
    shown = found.as_dict()
    assert shown["entries"] == shown["index_units"] == len(expected["entries"])
    assert shown["ledger_end_index"] == expected["ledgerEndIndex"]
    assert shown["ledger_end_term"] == expected["ledgerEndTerm"]
    seen = inspect.stat(str(GOLDEN / name / "store")).as_dict()
    assert (seen["entries"], seen["ledger_begin_index"]) == (len(expected["entries"]), 0)
    if name == "dledger-rocketmq":
        assert found.units == len(expected["entries"])


def test_the_reader_ends_where_the_checkpoint_says(tmp_path):
    root = store_of("dledger-rocketmq", tmp_path)
    checkpoint = root / "dledger-n0" / "checkpoint"
    entries = manifest("dledger-rocketmq")["entries"]
    for committed, index in ((67, True), (40, True), (40, False), (-1, True)):
        checkpoint.write_text(f"committedIndex={committed}\nendIndex=67\n")
        if not index:
            shutil.rmtree(root / "dledger-n0" / "index")
            (root / "dledger-n0" / "index").mkdir()
        with StoreReader(str(root)) as reader:
            found = list(reader.raw_records())
            assert [offset for offset, _ in found] == [
                one["pos"] + 48 for one in entries[: committed + 1]
            ]
            if committed == 40:
                end = entries[40]["pos"] + entries[40]["size"]
                assert reader.limit_offset == end
                middle = list(reader.raw_records(entries[9]["pos"] + 1, entries[12]["pos"] + 1))
                assert [offset for offset, _ in middle] == [
                    one["pos"] + 48 for one in entries[10:13]
                ]
                assert reader.record_at(entries[40]["pos"] + 48) is not None
                assert reader.record_at(entries[41]["pos"] + 48) is None


def test_a_node_goes_on_with_the_store_of_rocketmq(tmp_path):
    root = store_of("dledger-rocketmq", tmp_path)
    before, expected = data("dledger-rocketmq"), manifest("dledger-rocketmq")
    messages = [decode_record(before, one["pos"] + 48).body for one in expected["entries"]]
    store = make(root, node=0, commitlog_file_size=FILE_SIZE)
    store.open()
    try:
        assert store.log_state().end_index == 67 and store.log_state().terms == ((0, 0),)
        assert (store.hard_state, store.remembers) == (HardState(0, 0), True)
        assert store.committed_index == 67 and store.end_position(67) == expected["endPos"]
        found = bodies(store.messages, "Orders", 0) + bodies(store.messages, "Orders", 1)
        assert sorted(found) == sorted(messages)
        store.save_hard_state(HardState(1, 0))
        no_op(store, 1)
        put(store, 1, message(1, topic="Orders"))
        assert len(bodies(store.messages, "Orders", 0)) == 39
        assert data_of(store)[: expected["endPos"]] == before[: expected["endPos"]]
        heads, units = walk(data_of(store), FILE_SIZE)
        store.flush()
        assert len(heads) == 70 and index_of(store)[: len(units)] == units
    finally:
        store.close()
    text = (root / "dledger-n0" / "currterm").read_text()
    assert text == "voteLeader=n0\ncurrTerm=1\n"


@pytest.mark.parametrize("name", ["dledger-killed", "dledger-terms"])
def test_a_node_refuses_a_store_with_other_bodies_and_changes_nothing(name, tmp_path):
    root = store_of(name, tmp_path)
    before = files_under(root / "dledger-n0")
    store = make(root, node=0, commitlog_file_size=FILE_SIZE)
    with pytest.raises(StoreBrokenError, match="no RocketMQ record; nothing was cut"):
        store.open()
    assert files_under(root / "dledger-n0") == before


def test_the_records_of_rocketmq_make_the_same_files_again(tmp_path):
    name = "dledger-rocketmq"
    raw, entries = data(name), manifest(name)["entries"]
    store = make(tmp_path / "new", node=0, commitlog_file_size=FILE_SIZE)
    store.open()
    try:
        for number, one in enumerate(entries):
            request = AppendRequest(0, number - 1, 0, one["pos"], one["size"], ((0, 1),), -1)
            part = raw[one["pos"] : one["pos"] + one["size"]]
            store.append_taken(request, part, TakenEntries(0, number))
        store.flush()
        store.save_hard_state(HardState(0, 0))
        store.commit(67)
    finally:
        store.close()
    ours, theirs = tmp_path / "new" / "dledger-n0", GOLDEN / name / "store" / "dledger-n0"
    for file in ("data", "index"):
        assert folder_bytes(str(ours / file)) == folder_bytes(str(theirs / file))
    for file in ("checkpoint", "currterm"):
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_blanks_and_index_are_made_as_dledger_makes_them(name, tmp_path):
    expected, raw = manifest(name), data(name)
    store = make(tmp_path / "new", node=0, commitlog_file_size=FILE_SIZE)
    store.open()
    try:
        for one in expected["entries"]:
            pos, size, term = one["pos"], one["size"], one["term"]
            unit = pack_unit(one["index"], term, pos, size)
            store.messages.append_entries(
                pos, raw[pos : pos + size], NewEntries(unit, ((term, 1),))
            )
        store.flush()
        theirs = folder_bytes(str(GOLDEN / name / "store" / "dledger-n0" / "index"))
        assert data_of(store)[: expected["endPos"]] == raw[: expected["endPos"]]
        size = 32 * len(expected["entries"])
        assert index_of(store)[:size] == theirs[:size]
        assert store.end_term == expected["ledgerEndTerm"]
    finally:
        store.close()


class Quiet:
    """Steps of a rebuild that show nothing."""

    def begin(self, text, total, unit):
        pass

    def advance(self, amount):
        pass

    def keep(self, text):
        pass


def test_a_rebuild_finds_the_queues_that_rocketmq_wrote(tmp_path):
    root = store_of("dledger-rocketmq", tmp_path)
    known = find_sizes(REAL, str(root), slots=1, entries=2)
    sizes = Sizes(known.units, 1, 2)
    for range_bytes in (1 << 20, 3000):
        how = How(run_here, Quiet(), range_bytes=range_bytes, buckets=2, index=False)
        built, difference = rebuild_to_verify(REAL, str(root), str(tmp_path / "work"), sizes, how)
        assert (difference, built.records, built.queues) == (None, 68, 2)
