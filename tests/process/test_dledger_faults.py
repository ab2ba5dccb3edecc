"""What the real DLedger does wrong (tests/interop/test_dledger_faults.py), provoked in hastore.

Where a leader must have been cut off with entries that nobody else has, its store gets them while
its node is down: these are the bytes that it would have written. Each test leaves all nodes
running.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.clock import SYSTEM_CLOCK
from hastore.dledger.core.events import HardState, OwnEntry
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import MessageIllegalError
from hastore.ha.hello.peer import call
from hastore.protocol.dledger import TruncateRequest
from hastore.protocol.dledger_link import message_frame
from hastore.protocol.hello import Linked, Purpose, Refused
from tests.dledger.store.kit import put as put_entries
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Node, wait_until
from tests.protocol.test_hello import make_hello
from tests.store.kit import FILE_SIZE, HOST, config, message

TOPIC = "t"
QUIET_POLLS = 100  # at least 2 s, several election timeouts


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DLedgerGroup]:
    with DLedgerGroup(tmp_path_factory.mktemp("faults")) as group:
        yield group.start()


@contextlib.contextmanager
def store_of(node: Node) -> Iterator[DLedgerMmapFileStore]:
    """Open the store of a node that does not run."""
    settings = config(node.store, commitlog_file_size=FILE_SIZE, consume_queue_units=300,
                      index_slots=100, index_entries=400)  # fmt: skip
    store = DLedgerMmapFileStore(settings, node=node.number, store_host=HOST)
    store.open()
    try:
        yield store
    finally:
        store.close()


def put(group: DLedgerGroup, *bodies: bytes) -> None:
    with Producer(group.bootstrap) as producer:
        for body in bodies:
            assert producer.send_sync(TOPIC, body).level == "QUORUM_DISK"


def served(node: Node, *bodies: bytes) -> list[bytes]:
    """Return what a consumer gets from this node, once it has got all of `bodies`."""
    found: list[bytes] = []
    with Consumer(TOPIC, [node.api]) as consumer:
        while not found or not set(bodies) <= set(found):
            messages = consumer.poll(1_000, timeout_s=60)
            assert messages, f"{set(bodies) - set(found)} are missing"
            found += [one.body for one in messages]
        found += [one.body for one in consumer.poll(1_000, timeout_s=0.5)]
    return found


def body(number: int) -> bytes:
    """Return the body that `append_alone` writes."""
    return (b"%08d" % number) * 10


def in_log(group: DLedgerGroup, node: Node, number: int) -> bool:
    """Return whether the log that all nodes have agreed on has a message of `append_alone`."""
    return body(number) in group.log_bytes(node, group.wait_same()["max_offset"])


def stop_all(group: DLedgerGroup) -> tuple[Node, list[Node]]:
    """Stop all nodes with the same log; return the last leader and the others."""
    group.wait_same()
    leader = group.wait_leader()
    others = group.followers(leader)
    for node in group:
        node.kill()
    return leader, others


def append_alone(node: Node, term: int | None, *numbers: int) -> int:
    """Append messages to a stopped node's log; return the index of the first.

    With `term`, as the leader of that term that was elected with the node's own vote; else in the
    last term.
    """
    with store_of(node) as store:
        if term is not None:
            store.save_hard_state(HardState(term, node.number))
            store.append_own(OwnEntry(store.end_index + 1, term))
        first = store.end_index + 1
        put_entries(store, store.end_term, *(message(n, topic=TOPIC, size=80) for n in numbers))
        return first


def term_at(node: Node, index: int) -> int:
    with store_of(node) as store:
        return store.term_of(index)


@pytest.mark.full
def test_figure_8(group: DLedgerGroup) -> None:
    """An old term's entry is committed with one of the present term, and then never replaced."""
    put(group, b"before")
    first, (second, third) = stop_all(group)
    index = append_alone(first, None, 1)
    with store_of(third) as store:
        term = store.hard_state.term + 1
        store.save_hard_state(HardState(term, second.number))
    append_alone(second, term, 2)
    group.start(first.number, third.number)
    assert group.wait_leader() is first, "its log is longer"
    put(group, b"in the third term")
    assert body(1) in served(first, b"in the third term")
    first.kill()
    third.kill()
    group.start(second.number, third.number)
    assert group.wait_leader() is third, "the second leader's last term is older"
    group.start(first.number)
    assert in_log(group, second, 1) and not in_log(group, second, 2)
    second.wait_log("were cut")
    for node in group:
        node.kill()
    assert term_at(second, index) < term
    group.start()


@pytest.mark.full
def test_a_wiped_node_elects_no_leader_that_lacks_entries(group: DLedgerGroup) -> None:
    put(group, b"all have it")
    group.wait_same()
    leader = group.wait_leader()
    wiped, late = group.followers(leader)
    late.kill()
    bodies = [b"acknowledged %d" % number for number in range(10)]
    put(group, *bodies)
    leader.kill()
    wiped.kill()
    shutil.rmtree(wiped.store)
    wiped.start("dledger", wait=False)
    late.start("dledger", wait=False)
    wiped.wait_log("has lost its disk")
    wiped.kill()  # also after another restart it knows that it has lost its disk
    since = len(late.log)
    wiped.start("dledger", wait=False)
    late.wait_log("CANDIDATE", since=since)  # it asks for votes, and lacks entries
    asked = 0

    def quiet() -> bool:
        nonlocal asked
        status = late.status()
        assert status is None or not status["writable"], status
        asked += 1
        return asked > QUIET_POLLS

    wait_until(quiet, 60, "the polls took too long")
    group.start(leader.number)
    group.wait_same()
    for node in (wiped, late):
        served(node, *bodies)
    assert group.wait_leader().status()["remembers"]  # type: ignore[index]


def test_an_entry_larger_than_a_data_file(group: DLedgerGroup) -> None:
    before = group.wait_same()["max_offset"]
    with Producer(group.bootstrap) as producer, pytest.raises(MessageIllegalError):
        producer.send_sync(TOPIC, bytes(FILE_SIZE))
    assert group.wait_same()["max_offset"] == before, "nothing was written"
    put(group, b"the next")
    group.wait_same()


@pytest.mark.full
def test_a_truncated_tail_does_not_return(group: DLedgerGroup) -> None:
    put(group, b"x")
    first, (second, third) = stop_all(group)
    append_alone(first, None, *range(100, 105))
    group.start(second.number, third.number)
    group.start(first.number)
    group.wait_same()
    first.wait_log("were cut")
    for node in group:
        node.kill()
    group.start(first.number, third.number)
    assert not any(in_log(group, first, number) for number in range(100, 105))
    group.start(second.number)


@pytest.mark.full
def test_uncommitted_entries_are_not_served(group: DLedgerGroup) -> None:
    put(group, b"committed")
    first, others = stop_all(group)
    index = append_alone(first, None, 200)
    first.start("dledger", wait=False)
    status = first.wait_status(lambda s: s["ledger_end_index"] == index, "the entry is there")
    assert status["committed_index"] < index
    assert body(200) not in served(first, b"committed")
    group.start(*(node.number for node in others))
    group.wait_same()


def test_a_missing_currterm_is_no_fresh_start(group: DLedgerGroup) -> None:
    """A node without the file knows that it has voted; it does not vote as if it never had."""
    _, (node, *_) = stop_all(group)
    folder = node.store / f"dledger-n{node.number}"
    (folder / "currterm").rename(folder / "currterm.tmp")
    group.start()
    node.wait_log("currterm is missing: this node does not remember its votes")
    node.wait_status(lambda s: s["remembers"], "the group has told it the term")
    put(group, b"goes on")


@pytest.mark.full
def test_flipped_bits_are_not_served(tmp_path: pathlib.Path) -> None:
    """A committed entry's body is damaged on one node: consumers get the bytes that were put."""
    with DLedgerGroup(tmp_path) as group:
        group.start()
        bodies = [b"%04d" % number * 100 for number in range(5)]
        put(group, *bodies)
        group.wait_same()
        leader = group.wait_leader()
        hurt = group.followers(leader)[0]
        hurt.kill()
        (file,) = (hurt.store / f"dledger-n{hurt.number}" / "data").iterdir()
        data = bytearray(file.read_bytes())
        data[data.index(bodies[2])] ^= 1
        file.write_bytes(data)
        hurt.start("dledger", wait=False)
        wait_until(
            lambda: not hurt.running or (hurt.status() or {}).get("leader"), 60, "up, or ended"
        )
        print(hurt.last_lines(5))
        if hurt.running:
            assert set(served(hurt, *bodies)) == set(bodies)
        assert set(served(leader, *bodies)) == set(bodies)


@pytest.mark.full
def test_a_stranger_truncates_nothing(group: DLedgerGroup) -> None:
    """It takes the name and the store id of a member that is down, in a group without a secret."""
    put(group, *(b"stranger %d" % number for number in range(10)))
    before = group.wait_same()
    # Of two nodes the one with the greater number calls.
    other, asleep = sorted(group.followers(group.wait_leader()), key=lambda node: node.number)
    known = json.loads((asleep.store / "hastore" / "node.json").read_text())
    asleep.kill()
    since = len(other.log)
    truncate = TruncateRequest(before["term"] + 100, 2, before["term"], before["term"] + 100)
    answers = []
    for store_id in ("cd" * 16, known["store_id"]):
        hello = make_hello(
            purpose=Purpose.DLEDGER, cluster="test", group="g0", node=asleep.number,
            store_id=store_id, mode="dledger", file_size=FILE_SIZE, history=(), promised_epoch=0,
            max_offset=0, confirmed_offset=0, nonce=os.urandom(32),
        )  # fmt: skip
        made = call(other.ha, hello, None, SYSTEM_CLOCK, 20_000)
        answers.append(made.answer)
        with made.sock as sock, contextlib.suppress(ConnectionError, TimeoutError):
            sock.settimeout(20)
            sock.sendall(message_frame(truncate))
            while sock.recv(65_536):
                pass
    print(answers, other.log[since:])
    assert isinstance(answers[0], Refused) and answers[1] == Linked()
    group.start(asleep.number)
    after = group.wait_same()
    assert after["committed_index"] >= before["committed_index"]
    assert {b"stranger %d" % number for number in range(10)} <= set(served(other))


def test_a_vote_that_cannot_be_written_is_not_given(group: DLedgerGroup) -> None:
    group.wait_same()
    leader = group.wait_leader()
    voter, other = group.followers(leader)
    blocked = voter.store / f"dledger-n{voter.number}" / "currterm.tmp"
    blocked.mkdir()  # as with a full disk, the file cannot be written
    since = len(voter.log)
    leader.kill()
    voter.wait_log("currterm", since=since)
    status = voter.wait_status(lambda s: s["problems"], "it says what fails")
    print(status["problems"], voter.log[since:])
    other.wait_status(lambda s: not s["writable"], "no leader without the other's vote")
    voter.kill()
    blocked.rmdir()
    group.start()
    put(group, b"voted again")
