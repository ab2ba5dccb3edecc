"""Files of a DLedger group, both ways: written by the one, read and continued by the other."""

import json
import os
import random
import shutil

import pytest

from hastore.dledger.core.events import HardState, OwnEntry
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.protocol.dledger import MemberSet
from tests.dledger.store.kit import put as put_entries
from tests.interop.dledger import SUCCESS, Ledgers
from tests.interop.dledger_files import (
    DATA_BYTES,
    HEAD,
    INDEX_BYTES,
    ROCKETMQ_INDEX_BYTES,
    read_ledger,
)
from tests.interop.dledger_records import record
from tests.interop.test_dledger_rocketmq import open_ledger, put, queue_offsets
from tests.process.harness import hastore
from tests.process.stores import tree
from tests.store.kit import HOST, config, message

pytestmark = pytest.mark.full
ROUNDS, EACH, MOST = 2, 80, 1_500


def open_store(root, node, index_bytes=INDEX_BYTES):
    """Open hastore's entry store on the files of server `n<node>`."""
    settings = config(root, commitlog_file_size=DATA_BYTES)
    store = DLedgerMmapFileStore(settings, node=node, index_file_bytes=index_bytes, store_host=HOST)
    store.open()
    return store


def entries_of(store):
    """Return what hastore reads of each entry: index, term, position and bytes."""
    found = []
    for index in range(store.begin_index, store.end_index + 1):
        one = store.read(index, 1)
        assert (one.first_index, one.last_index) == (index, index)
        with store.messages.view(one.pos, one.size) as view:
            found.append((index, store.term_of(index), one.pos, bytes(view)))
    return found


def expected(entries, folder):
    """Return the same of entries that were read without hastore's code."""
    data = tree(folder / "data")

    def raw(entry):
        start = entry.pos // DATA_BYTES * DATA_BYTES
        at = entry.pos - start
        return data[f"{start:020d}"][at : at + entry.size]

    return [(entry.index, entry.term, entry.pos, raw(entry)) for entry in entries]


def copy_of(folder, root):
    """Copy a log that another program continued; hastore's own files do not know its new end."""
    shutil.copytree(folder, root / folder.name)
    return root


def entries_in(root, index_bytes=INDEX_BYTES):
    """Return what hastore reads of the log of server n0."""
    store = open_store(root, 0, index_bytes)
    try:
        return entries_of(store)
    finally:
        store.close()


def noted_as_committed(folder):
    """Return the committed index that a server's checkpoint notes, -1 if it has none.

    A server that stops writes its checkpoint in two threads, each of which removes the file before
    it renames the shared temporary one: now and then none is left.
    """
    file = folder / "checkpoint"
    if not file.exists():
        return -1
    (line,) = (one for one in file.read_text().split() if one.startswith("committedIndex="))
    return int(line.partition("=")[2])


def lines_of(peer, name, file):
    """Return the lines that a real server writes about its entries."""
    count = peer.call("dledger.dump", server=name, file=str(file))
    lines = file.read_text().splitlines()
    assert len(lines) == count
    return lines


def append_some(group, leader, seed, first=0):
    """Append records for one queue, from a queue offset on; DLedger fills in where they lie."""
    chance = random.Random(seed)
    bodies = [
        record(0, first + number, chance.randbytes(chance.randrange(MOST)))
        for number in range(EACH)
    ]
    assert {result[0] for result in group.append(leader, *bodies)} == {SUCCESS}


@pytest.mark.slow("three servers elect a leader, stop, and elect another one")
def test_hastore_reads_what_three_servers_wrote(make_peer, ports, tmp_path):
    """Several terms and files; each server's copy is read, and one of them written further."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    peer = make_peer()
    group = Ledgers(peer, ports, tmp_path, records=True)
    leader = None
    for number in range(ROUNDS):
        first = [name for name in group.names if name != leader]  # so another leads: a new term
        group.start(*first)
        leader = group.wait_leader(*first)
        if len(first) < len(group.names):
            group.start(*(name for name in group.names if name not in first))
        append_some(group, leader, seed + number, EACH * number)
        end = EACH * (number + 1) - 1
        for name in group.names:
            group.wait_state(name, end=end, committed=end)
        leader = group.wait_leader()
        lines = lines_of(peer, leader, tmp_path / "lines")
        group.stop()
    entries = {name: read_ledger(group.store(name)) for name in group.names}
    assert entries["n0"] == entries["n1"] == entries["n2"]
    assert [entry.line() for entry in entries["n0"]] == lines
    assert not any(entry.crc for entry in entries["n0"])
    assert len({entry.term for entry in entries["n0"]}) > 1
    assert len(os.listdir(group.store("n0") / "data")) > 1
    noted = {name: noted_as_committed(group.store(name)) for name in group.names}
    assert set(noted.values()) - {-1} == {len(lines) - 1}
    for name in group.names:
        folder = group.store(name)
        before = tree(folder / "data"), tree(folder / "index")
        store = open_store(group.base(name), int(name[1:]))
        try:
            assert entries_of(store) == expected(entries[name], folder)
            assert store.committed_index == noted[name]
            assert store.hard_state.term >= entries[name][-1].term
        finally:
            store.close()
        assert (tree(folder / "data"), tree(folder / "index")) == before, "nothing was changed"


def write_with_hastore(root, node, *, index_bytes=INDEX_BYTES):
    """Write a log of two terms with entries of its own, over several files."""
    store = open_store(root, node, index_bytes)
    try:
        for term in (3, 4):
            store.save_hard_state(HardState(term, node))
            # As a node does, with the group's id as a property.
            store.append_own(OwnEntry(store.end_index + 1, term), "a1b2c3d4e5f60718")
            for group in (MemberSet((0, 1, 2)), MemberSet((0, 1, 2), (3,), (2,))):
                own = OwnEntry(store.end_index + 1, term, group)
                store.append_own(own, "a1b2c3d4e5f60718")
            for number in range(100):
                put_entries(store, term, message(number, queue_id=0, size=number * 10))
        store.flush()
        store.commit(store.end_index)
    finally:
        store.close()


def test_a_real_server_opens_what_hastore_wrote(make_peer, ports, tmp_path):
    """It serves each entry, keeps hastore's vote, and hastore reads what it appends then."""
    peer = make_peer()
    group = Ledgers(peer, ports, tmp_path, 1, records=True)
    write_with_hastore(group.base("n0"), 0)
    entries = read_ledger(group.store("n0"))
    assert all(entry.crc for entry in entries)
    assert len(entries) == 206 and len(os.listdir(group.store("n0") / "data")) > 1
    before = tree(group.store("n0") / "data"), tree(group.store("n0") / "index")
    group.start()
    assert group.wait_leader() == "n0"
    state = group.status("n0")
    assert (state["end"], state["end_term"], state["term"]) == (205, 4, 4), state
    assert state["vote"] == "n0"
    group.wait_state("n0", committed=205)
    assert lines_of(peer, "n0", tmp_path / "lines") == [entry.line() for entry in entries]
    for entry in random.sample(entries, 10):
        assert group.get("n0", entry.index) == entry.body
    assert (tree(group.store("n0") / "data"), tree(group.store("n0") / "index")) == before
    append_some(group, "n0", 1)
    group.stop()
    after = read_ledger(group.store("n0"))
    assert after[: len(entries)] == entries and len(after) == len(entries) + EACH
    assert after[-1].term == entries[-1].term and not any(one.crc for one in after[len(entries) :])
    assert entries_in(copy_of(group.store("n0"), tmp_path / "copy")) == expected(
        after, group.store("n0")
    )


@pytest.mark.slow("three servers elect a leader, and one copies the log")
def test_real_servers_push_what_hastore_wrote_as_it_is(make_peer, ports, tmp_path):
    """The CRCs of its entries reach a server with an empty disk, and hastore goes on with them."""
    group = Ledgers(make_peer(), ports, tmp_path, records=True)
    write_with_hastore(group.base("n0"), 0)
    shutil.copytree(group.store("n0"), group.store("n1"))
    entries = read_ledger(group.store("n0"))
    group.start("n0", "n1")
    leader = group.wait_leader("n0", "n1")
    group.start("n2")
    append_some(group, leader, 1)
    for name in group.names:
        group.wait_state(name, end=len(entries) + EACH - 1, committed=len(entries) + EACH - 1)
    group.stop()
    after = read_ledger(group.store("n2"))
    assert after[: len(entries)] == entries and len(after) == len(entries) + EACH
    assert tree(group.store("n2") / "data") == tree(group.store("n0") / "data")
    root = copy_of(group.store("n2"), tmp_path / "copy")
    store = open_store(root, 2)
    try:
        put_entries(store, store.end_term, message(1, queue_id=0))
        store.flush()
    finally:
        store.close()
    assert [bool(one.crc) for one in read_ledger(root / "dledger-n2")][-2:] == [False, True]
    verify = hastore("log", "verify", "--json", "--store", str(root))
    assert verify.returncode == 0 and json.loads(verify.stdout)["entries_without_crc"] == EACH


def test_hastore_log_reads_a_server_directory(make_peer, ports, tmp_path):
    """The dump has all entries, with records as bodies or without."""
    group = Ledgers(make_peer(), ports, tmp_path, 1, records=True)
    group.start()
    leader = group.wait_leader()
    append_some(group, leader, 7)
    assert group.append(leader, b"", b"no record")[1][0] == SUCCESS
    group.wait_state("n0", committed=EACH + 1)
    group.stop()
    entries = read_ledger(group.store("n0"))
    dump = hastore("log", "dump", "--store", str(group.base("n0")), "--json")
    assert dump.returncode == 0, dump.stderr
    found = [json.loads(line) for line in dump.stdout.splitlines()]
    assert [(one["index"], one["term"], one["pos"], one["size"]) for one in found] == [
        (entry.index, entry.term, entry.pos, entry.size) for entry in entries
    ]
    verify = hastore("log", "verify", "--store", str(group.base("n0")))
    assert verify.returncode == 0, verify.stderr


def test_rocketmq_continues_what_hastore_wrote(make_peer, ports, tmp_path):
    """RocketMQ serves all messages, and hastore reads what RocketMQ appends to them."""
    peer, root = make_peer(), tmp_path / "store"
    write_with_hastore(root, 0, index_bytes=ROCKETMQ_INDEX_BYTES)
    shutil.rmtree(root / "consumequeue")  # RocketMQ builds its own from the log
    open_ledger(peer, ports, root)
    served = [("TopicA", number) for number in range(200)]
    assert queue_offsets(peer, tmp_path / "lines") == served
    assert [put(peer, "TopicA") for _ in range(3)] == [200, 201, 202]
    served += [("TopicA", number) for number in (200, 201, 202)]
    assert queue_offsets(peer, tmp_path / "lines") == served
    peer.kill()
    store = open_store(copy_of(root / "dledger-n0", tmp_path / "copy"), 0, ROCKETMQ_INDEX_BYTES)
    try:
        assert (store.end_index, store.end_term) == (208, 4)
        last = store.messages.reader.record_at(store.position(208) + HEAD.size)
        assert (last.topic, last.queue_id, last.queue_offset) == ("TopicA", 0, 202)
    finally:
        store.close()
