"""A node as a member: promises and higher epochs, also when writes to its disk fail."""

import errno
import threading

import pytest

from hastore.config.model import NodeAddress
from hastore.errors import NotStoredError
from hastore.ha.replica.rewind import cut_back, finish_cut
from hastore.protocol.hello import Promised, Purpose
from tests.ha.hello.test_answering import hello


@pytest.fixture
def master(make_group):
    node = make_group(2).start(1)
    node.promote()
    node.put(b"a")
    return node


def refuse(*_args):
    raise OSError(errno.ENOSPC, "no room")


EPOCH = 9 << 16 | 2


def test_a_promise_that_cannot_be_kept_is_not_given(master, monkeypatch):
    wish = hello(master, purpose=Purpose.PROMISE, promised_epoch=EPOCH, acks=1, nodes=(1, 2))
    epoch = master.member.open_epoch
    monkeypatch.setattr(master.state, "_fs", type("Full", (), {"replace_bytes": refuse})())
    with pytest.raises(OSError):
        master.member.promise(wish)
    assert master.member.open_epoch == epoch == master.state.data.promised_epoch
    master.put(b"goes on")
    monkeypatch.undo()
    assert isinstance(master.member.promise(wish), Promised)
    assert not master.member.open_epoch and master.superseded == [EPOCH]
    assert master.state.data.superseded_by == EPOCH


def test_a_higher_epoch_ends_the_writing_even_when_it_cannot_be_noted(master, monkeypatch):
    monkeypatch.setattr(master.state, "_fs", type("Full", (), {"replace_bytes": refuse})())
    with pytest.raises(OSError):
        master.member.observe_epoch(EPOCH, "node 2")
    assert master.superseded == [EPOCH]
    with pytest.raises(NotStoredError):
        master.put(b"too late")


def test_a_lower_or_equal_epoch_changes_nothing(master):
    epoch = master.member.open_epoch
    for lower in (0, epoch - 65536, epoch):
        master.member.observe_epoch(lower, "node 2")
    assert master.member.open_epoch == epoch and not master.superseded


def test_a_cut_whose_last_write_fails_leaves_no_epoch_of_what_was_cut_in_the_answers(
    master, monkeypatch
):
    """A candidate would wait for bytes of that epoch, which this node does not have."""
    first = master.state.history
    master.promote()
    begin = master.store.max_offset
    master.put(b"b")
    master.member.step_down()
    whole = master.state.history
    assert len(whole) == len(first) + 1
    save = master.state.save

    def fails_at_the_end(**changes):
        if "history" in changes:
            raise OSError(errno.ENOSPC, "no room")
        save(**changes)

    monkeypatch.setattr(master.state, "save", fails_at_the_end)
    with master.member.gate.lock, pytest.raises(OSError):
        cut_back(master.store, master.state, begin - 1, len(first), accept_loss=True, why="a test")
    monkeypatch.undo()
    assert master.store.max_offset < begin and master.state.history == whole
    assert master.member.hello(Purpose.SURVEY).history == first
    wish = hello(master, purpose=Purpose.PROMISE, promised_epoch=EPOCH, acks=1, nodes=(1, 2))
    assert master.member.promise(wish).history == first
    finish_cut(master.store, master.state)
    assert master.state.history == first == master.member.hello(Purpose.SURVEY).history


def test_hello_never_shows_an_open_epoch_without_its_entry(master):
    """HELLO is read while another thread promotes the node repeatedly."""
    stop, wrong = threading.Event(), []

    def watch():
        while not stop.is_set():
            said = master.member.hello(Purpose.SURVEY)
            if said.open_epoch and said.open_epoch not in {e.epoch for e in said.history}:
                wrong.append(said)

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(20):
        master.promote()
    stop.set()
    thread.join(60)
    assert not wrong


def at(port):
    api, ha, http = (f"127.0.0.1:{port + n}" for n in range(3))
    return NodeAddress(api=f"tcp://{api}", ha=ha, http=http)


def test_addresses_of_others_come_from_a_changed_file_and_before_that_from_zookeeper(make_group):
    member = make_group(3).start(1).member
    own, third = member.config.nodes[1], member.config.nodes[3]
    member.learn_nodes({1: at(10), 2: at(20), 3: third})
    assert dict(member.peers) == {2: at(20).ha, 3: third.ha}
    assert member.api_addresses[1] == own.api, "its own count from a restart"
    member.relocate({1: at(11), 2: at(21), 4: at(41)})
    assert dict(member.peers) == {2: at(21).ha, 3: third.ha}
    member.learn_nodes({1: at(10), 2: at(22), 3: third})
    assert dict(member.peers)[2] == at(21).ha, "the file of a node need not follow the others"
    member.learn_nodes({1: at(10), 2: at(22), 3: at(30), 4: at(40)})
    assert dict(member.peers) == {2: at(21).ha, 3: at(30).ha, 4: at(41).ha}
    member.learn_nodes({1: at(10), 2: at(22), 3: at(30), 4: at(40)})
    member.relocate({4: at(41)})
    member.learn_nodes({1: at(10), 2: at(23), 3: at(30), 4: at(40)})
    assert dict(member.peers)[2] == at(23).ha, "ZooKeeper states none any more"
