"""Faults of DLedger 0.3.1.2, each provoked in real servers.

Each test prints what it saw. The tests fail once DLedger corrects a fault. `make dledger-faults`
also runs those with several elections, which take longer.
"""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import threading

import pytest

from tests.interop.dledger import (
    APPEND,
    DISK_ERROR,
    GET,
    GROUP,
    HEART_BEAT,
    PUSH,
    SUCCESS,
    VOTE,
    Ledgers,
    connect,
    send,
)
from tests.interop.dledger_files import DATA_BYTES, HEAD
from tests.interop.java_process import PeerError
from tests.interop.rocketmq import Peer
from tests.process.harness import wait_until

pytestmark = pytest.mark.full
OLD, NEW = b"old " * 25, b"new " * 25
LONG = {"heartBeatTimeIntervalMs": 3_000}  # a leader that is alone leads for 9 s


def on_demand(test):
    """Let pytest find a slow test only if HASTORE_DLEDGER_FAULTS is set."""
    return test if os.environ.get("HASTORE_DLEDGER_FAULTS") else None


@pytest.fixture(scope="module")
def shared_jvm(rocketmq_5, tmp_path_factory):
    """A JVM for the servers of all tests that do not kill it."""
    peer = Peer(rocketmq_5, tmp_path_factory.mktemp("jvm"), "dledger")
    yield peer
    peer.kill()


@pytest.fixture
def make_ledgers(shared_jvm, ports, tmp_path):
    """Return a function that makes a group of DLedger servers, all in one JVM."""

    def make(count=3, peer=None, **config):
        return Ledgers(peer or shared_jvm, ports, tmp_path, count, **config)

    yield make
    shared_jvm.call("dledger.stop_all")


def others(group, *names):
    return [name for name in group.names if name not in names]


def codes(results):
    return [result[0] for result in results]


def saw(text, *states):
    print("\n  ".join([text, *map(json.dumps, states)]))


def elect(group, *names):
    """Start all servers (or the given ones) and wait until they have a leader."""
    group.start(*names)
    return group.wait_leader(*names)


@on_demand
def test_figure_8(make_ledgers):
    """An entry of an old term is committed by counting, and replaced later."""
    group = make_ledgers(**LONG)
    first = elect(group)
    assert codes(group.append(first, b"0")) == [SUCCESS]
    for name in others(group, first):
        group.wait_state(name, committed=0)
    group.stop(*others(group, first))
    group.begin_append(first, OLD)
    group.wait_state(first, end=1, committed=0)
    group.stop(first)
    second = elect(group, *others(group, first))
    (third,) = others(group, first, second)
    group.stop(third)
    group.begin_append(second, NEW)
    group.wait_state(second, end=1, committed=0)
    group.stop(second)
    assert elect(group, first, third) == first, "its log is longer"
    for name in (first, third):
        group.wait_state(name, committed=1)
    before = [group.status(name) for name in (first, third)]
    assert before[0]["end_term"] < before[0]["term"], "committed, but of an older term"
    assert group.get(first, 1) == OLD
    saw(f"entry 1 is {OLD[:4]!r}, committed on two of three servers:", *before)
    group.stop(first, third)
    assert elect(group, second, third) == second, "its last term is greater"
    group.wait_state(third, end=1, end_term=group.status(second)["end_term"])
    saw("the third server led; entry 1 was replaced:", *map(group.status, (second, third)))
    assert group.get(second, 1) == NEW, "a committed entry has other bytes now"


@pytest.mark.slow("three servers of DLedger start twice")
def test_a_power_cut_takes_acknowledged_entries(make_ledgers, make_peer, tmp_path):
    """DLedger acknowledges what no server has synced (its flush interval is its default, 10 ms)."""
    peer = make_peer()
    group = make_ledgers(peer=peer)
    leader = elect(group)
    found = peer.call("dledger.cut", server=leader, size=1024, attempts=1000)
    peer.kill()
    saw("acknowledged, and synced by none; flushed positions:", found)
    for name, flushed in found["flushed"].items():
        cut_off(group.store(name) / "data", flushed)
    again = make_peer()
    for name in group.names:
        group.use(name, again)
    end = group.status(elect(group))["end"]
    saw(f"entry {found['index']} was acknowledged; after the cut the log ends with entry {end}")
    assert end < found["index"]


def cut_off(folder: pathlib.Path, flushed):
    """Drop what was not synced, as a power cut may; a server that got no entry has no folder."""
    for file in folder.glob("*"):
        keep = max(0, min(flushed - int(file.name), DATA_BYTES))
        with open(file, "r+b") as out:
            out.seek(keep)
            out.write(bytes(DATA_BYTES - keep))


def vote(group, name, candidate, term, end=(-1, -1)):
    """Ask for a vote until the server has come to that term; return its answer."""

    def asked():
        said = group.call(
            name,
            VOTE,
            leaderId=candidate,
            localId=candidate,
            term=term,
            ledgerEndIndex=end[0],
            ledgerEndTerm=end[1],
        )["voteResult"]
        return None if said == "REJECT_TERM_NOT_READY" else said

    return wait_until(asked, 60, f"no vote in term {term}")


def assert_votes_again(group, name, term):
    """Check that a server which voted for n0 votes for another in the same term."""
    wait_until(lambda: group.status(name).get("vote"), 60, "no vote")
    state = group.status(name)
    saw(f"its second vote in term {term}:", state)
    assert state["term"] == term and state["vote"] != "n0"


def follow(group, name, leader, term):
    """Make a server follow a leader that only sends heart beats, so that it asks for no votes."""

    def beaten():
        said = group.call(name, HEART_BEAT, leaderId=leader, localId=leader, term=term)
        return said["code"] == SUCCESS

    wait_until(beaten, 60, f"{name} does not follow")


@contextlib.contextmanager
def stopped_at_rename(debug):
    """Stop the JVM with a debugger when it renames a file; yield an event that says it has."""
    debugger = subprocess.Popen(
        ["jdb", "-attach", debug],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
    )
    armed, stopped, said = threading.Event(), threading.Event(), []

    def read():
        text = b""
        while part := debugger.stdout.read(1024):
            text += part
            said[:] = [text]
            if b"Set breakpoint" in text:
                armed.set()
            if b"Breakpoint hit" in text:
                stopped.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        debugger.stdin.write(b"stop in java.io.File.renameTo\n")
        assert armed.wait(60), said
        yield stopped
    finally:
        debugger.kill()
        debugger.wait()
        reader.join(60)
        debugger.stdin.close()
        debugger.stdout.close()


@on_demand
def test_a_vote_is_forgotten_between_unlink_and_rename(make_ledgers, make_peer, ports):
    """`currterm` is unlinked before its new text is renamed; its two copies are never read."""
    debug = f"127.0.0.1:{ports.take()}"
    options = [f"-agentlib:jdwp=transport=dt_socket,server=y,suspend=n,quiet=y,address={debug}"]
    peer = make_peer(options=options)
    # In memory, so that no checkpoint is renamed; a follower for as long as the test takes.
    group = make_ledgers(peer=peer, storeType="MEMORY", heartBeatTimeIntervalMs=60_000)
    group.start("n1")
    follow(group, "n1", "n0", 5)
    assert vote(group, "n1", "n0", 5) == "ACCEPT"
    assert vote(group, "n1", "n2", 5) == "REJECT_ALREADY_HAS_LEADER"
    with stopped_at_rename(debug) as stopped, connect(group.addresses["n1"]) as sock:
        send(sock, HEART_BEAT, group=GROUP, remoteId="n1", leaderId="n0", localId="n0", term=6)
        assert stopped.wait(60), "the server did not rename currterm"
        peer.kill()
    folder = group.store("n1")
    saw("files at the kill:", {file.name: file.read_text() for file in folder.glob("currterm*")})
    assert not (folder / "currterm").exists()
    group.use("n1", make_peer())
    group.start("n1")
    saw("after the restart:", group.status("n1"))
    assert group.status("n1")["term"] == 0
    vote(group, "n1", "n2", 5)
    assert_votes_again(group, "n1", 5)


def test_a_vote_that_could_not_be_written(make_ledgers, make_peer):
    """A failure to write `currterm` is logged, and the vote is sent."""
    group = make_ledgers(storeType="MEMORY", heartBeatTimeIntervalMs=60_000)
    group.start("n1")
    follow(group, "n1", "n0", 5)
    (group.store("n1") / "currterm.tmp").mkdir()  # as with a full disk, it cannot be written
    assert vote(group, "n1", "n0", 5) == "ACCEPT"
    saw("currterm after the vote for n0:", (group.store("n1") / "currterm").read_text())
    group.stop("n1")
    group.start("n1")
    assert_votes_again(group, "n1", 5)


@on_demand
def test_a_wiped_node_under_its_old_id(make_ledgers):
    """It votes at once, and elects a leader that lacks acknowledged entries."""
    group = make_ledgers()
    leader = elect(group)
    assert codes(group.append(leader, b"0")) == [SUCCESS]
    wiped, late = others(group, leader)
    group.wait_state(late, committed=0)
    group.stop(late)
    assert codes(group.append(leader, *[OLD] * 10)) == [SUCCESS] * 10
    group.stop(leader, wiped)
    shutil.rmtree(group.store(wiped))
    fresh = elect(group, wiped, late)
    assert codes(group.append(fresh, NEW)) == [SUCCESS]
    group.start(leader)
    group.wait_state(leader, end=1, end_term=group.status(fresh)["term"])
    saw("entries 1 to 10 were acknowledged; now:", *map(group.status, group.names))
    assert group.get(fresh, 1) == NEW


@on_demand
def test_a_stranger_truncates_committed_entries(make_ledgers):
    """A push needs no more than the leader's name and term, which each answer of it tells."""
    group = make_ledgers(**LONG)
    leader = elect(group)
    assert codes(group.append(leader, *[OLD] * 9)) == [SUCCESS] * 9
    known = group.call(leader, APPEND, body="AAAA")
    entry = group.call(leader, GET, beginIndex=2)["entries"][0]
    for name in others(group, leader):
        group.wait_state(name, committed=9)
        said = group.call(
            name,
            PUSH,
            type="TRUNCATE",
            term=known["term"],
            leaderId=leader,
            localId="stranger",
            commitIndex=2,
            entry=entry,
        )
        assert said["code"] == SUCCESS and said["endIndex"] == 2, said
    followers = others(group, leader)
    saw("after TRUNCATE of a stranger:", *map(group.status, followers))
    group.stop(leader)
    heir = group.wait_leader(*followers)
    saw("after an election:", *map(group.status, followers))
    assert group.status(heir)["end"] == 2, "entries 3 to 9, acknowledged by all three, are gone"


@on_demand
def test_an_entry_larger_than_a_data_file(make_ledgers, make_peer):
    """It is refused, but the leader has filled files with blanks, and the followers have not.

    Each attempt to push the next entry leaves a misplaced copy of it in the followers' logs, until
    one happens to lie where the leader has it. Later these logs are not recovered.
    """
    peer = make_peer()
    group = make_ledgers(peer=peer, **LONG)
    leader = elect(group)
    assert codes(group.append(leader, *[OLD] * 3)) == [SUCCESS] * 3
    assert codes(group.append(leader, bytes(DATA_BYTES))) == [DISK_ERROR]
    saw("refused; the leader's data files:", sorted(os.listdir(group.store(leader) / "data")))
    print("the next append:", group.append(leader, NEW))
    followers = others(group, leader)
    for name in followers:
        group.wait_state(name, end=3, committed=3)
    group.stop(*followers)
    with pytest.raises(PeerError):  # the server ends its process
        group.start(followers[0])
    peer.process.wait(60)
    assert "The processOffset is too small" in peer.last_words(40)
    saw("a follower after a restart:", peer.last_words(1))


@on_demand
def test_a_truncated_tail_returns(make_ledgers, make_peer):
    """TRUNCATE moves a pointer; after a kill the old bytes are entries again, and are committed."""
    peer = make_peer()
    group = make_ledgers(peer=peer, **LONG)
    first = elect(group)
    assert codes(group.append(first, b"0")) == [SUCCESS]
    for name in others(group, first):
        group.wait_state(name, committed=0)
    group.stop(*others(group, first))
    group.begin_append(first, *[OLD] * 5)
    group.wait_state(first, end=5, committed=0)
    group.stop(first)
    second = elect(group, *others(group, first))
    group.start(first)
    group.wait_state(first, role="FOLLOWER", end=0)
    saw("truncated:", group.status(first))
    peer.kill()
    again = make_peer()
    (third,) = others(group, first, second)
    for name in (first, third):
        group.use(name, again)
    assert elect(group, first, third) == first
    group.wait_state(third, committed=5)
    saw("after kill -9 of all, two of three started:", *map(group.status, (first, third)))
    assert group.get(third if group.status(third)["role"] == "LEADER" else first, 5) == OLD


def test_flipped_bits_are_served(make_ledgers):
    group = make_ledgers(1)
    elect(group)
    assert codes(group.append("n0", OLD)) == [SUCCESS]
    group.stop("n0")
    (file,) = (group.store("n0") / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[HEAD.size] ^= 1
    file.write_bytes(data)
    elect(group)
    served = group.get("n0", 0)
    saw(f"written {OLD[:4]!r}, served {served[:4]!r}", group.status("n0"))
    assert served == bytes([OLD[0] ^ 1]) + OLD[1:]


def test_uncommitted_entries_are_served(make_ledgers):
    group = make_ledgers(**LONG)
    leader = elect(group)
    assert codes(group.append(leader, b"0")) == [SUCCESS]
    group.stop(*others(group, leader))
    group.begin_append(leader, OLD)
    group.wait_state(leader, end=1)
    assert group.get(leader, 1) == OLD
    saw("GET served entry 1:", group.status(leader))
    assert group.status(leader)["committed"] == 0
