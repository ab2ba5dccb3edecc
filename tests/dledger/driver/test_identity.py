"""What a node knows of its own past and of its group: lost state files, other stores and groups."""

import errno
import logging
import os
import pathlib
import shutil
import threading

import msgspec
import pytest

from hastore import bounded_log
from hastore.config.model import Mode, RetentionConfig
from hastore.dledger.core.events import HardState
from hastore.dledger.core.learners import Learners
from hastore.dledger.driver.driver import DLedgerDriver
from hastore.dledger.driver.joining import GroupId
from hastore.dledger.links.identity import Group
from hastore.dledger.links.peer_links import PeerMember
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import StoreBrokenError
from hastore.protocol.dledger import HeartBeatRequest, MemberSet
from hastore.protocol.dledger_link import Received
from hastore.server.recover_group import recover_group
from tests.dledger.driver import groups
from tests.dledger.driver.groups import HOST, STORE, DriverGroup, record, running_group
from tests.dledger.links.groups import make_config
from tests.ha.nodes import wait_for

HASTORE_FILES = ("limits", "votes.json", "node.json", "entries.json")


@pytest.fixture
def group(tmp_path):
    with running_group(tmp_path) as made:
        yield made
        assert [node.failures for node in made.nodes.values()] == [[] for _ in made.nodes]


def state_file(node, name):
    if name in HASTORE_FILES:
        return pathlib.Path(node.config.store.root) / "hastore" / name
    return pathlib.Path(node.store.messages.directory) / name


def one_behind(group):
    """Acknowledge 20 messages on two nodes, then kill all three; return (leader, both others).

    The first of the others has the messages, the second does not.
    """
    leader = group.leader()
    leader.put_confirmed(b"first")
    group.settled()
    has, lacks = [node for node in group.running if node is not leader]
    lacks.kill()
    for number in range(20):
        assert leader.put_confirmed(b"kept %d" % number) == ("PUT_OK", "QUORUM_DISK")
    end = leader.store.end_index
    wait_for(lambda: has.store.committed_index == end, "the commit")
    has.store._save_checkpoint()
    leader.kill()
    has.kill()
    return leader, has, lacks


def cut_log(node, pos, *, rest=False):
    """Spoil the entry at `pos`; with `rest` nothing is left from there on."""
    path = pathlib.Path(node.store.messages.directory) / "data" / f"{0:020}"
    raw = bytearray(path.read_bytes())
    raw[pos:] = bytes(len(raw) - pos) if rest else b"rot" + raw[pos + 3 :]
    path.write_bytes(raw)


def lose_limits(node, how):
    """Lose the limits page; return whether the next start must be told to go on without it."""
    path = state_file(node, "limits")
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(bytes(4096) if how == "zeros" else b"rot!" * 1024)
    return how == "damaged"


@pytest.mark.parametrize(
    ("how", "checkpoint", "rest"),
    [
        ("damaged", False, False), ("damaged", True, True), ("removed", False, True),
        ("zeros", False, True),
    ],
)  # fmt: skip
def test_without_its_limits_page_a_node_never_votes_with_a_log_that_was_cut(
    group, how, checkpoint, rest
):
    leader, has, lacks = one_behind(group)
    middle = has.store.position(has.store.end_index - 10)
    cut_log(has, middle, rest=rest)
    asks = lose_limits(has, how)
    directory = pathlib.Path(has.store.messages.directory)
    if not checkpoint:
        (directory / "checkpoint").unlink()
        shutil.rmtree(directory / "index")
        state_file(has, "entries.json").unlink(missing_ok=True)
    if asks:
        with pytest.raises(StoreBrokenError, match="limits is damaged: remove it"):
            group.start(has.number)
        state_file(has, "limits").unlink()
    if checkpoint or not rest:  # it is known what is missing
        before = (directory / "data" / f"{0:020}").read_bytes()
        with pytest.raises(StoreBrokenError, match="nothing was cut"):
            group.start(has.number)
        assert (directory / "data" / f"{0:020}").read_bytes() == before
        shutil.move(has.config.store.root, f"{has.config.store.root}.away")
    group.start(lacks.number)
    (again,) = group.start(has.number)
    wait_for(lambda: again.driver.core is not None or again.driver.waits)
    wait_for(lambda: group.nodes[lacks.number].driver.core is not None)
    assert not again.store.remembers
    group.start(leader.number)
    group.put(b"after")
    wait_for(lambda: again.driver.core and again.driver.core.remembers, "the leader fills the disk")
    logs = {node.log() for node in group.settled()}
    assert len(logs) == 1
    log = logs.pop()
    assert all(b"kept %d" % number in log for number in range(20))


def others_elect(group, *numbers):
    """Start these nodes; wait until they have asked each other for votes, twice."""
    nodes = group.start(*numbers)
    wait_for(lambda: all(node.driver.core is not None for node in nodes), "the cores")
    wait_for(lambda: all(len(node.driver.links.linked) == 1 for node in nodes), "the link")
    return nodes


@pytest.mark.parametrize("name", ["currterm", "votes.json", "entries.json", "checkpoint"])
def test_the_advice_about_a_damaged_state_file_is_safe_to_follow(group, name):
    leader, has, lacks = one_behind(group)
    state_file(has, name).write_bytes(b"{rot")
    with pytest.raises(StoreBrokenError, match=rf"{name} is damaged") as refused:
        group.start(has.number)
    if "write" in (advice := str(refused.value)):
        content = advice.partition(" write ")[2].partition(" there;")[0]
        state_file(has, name).write_text(content)
    else:
        assert "remove it" in advice
        state_file(has, name).unlink()
    again, _ = others_elect(group, has.number, lacks.number)
    assert again.store.remembers is (name == "checkpoint")
    if again.store.remembers:
        assert group.put(b"without the third") is again
    group.start(leader.number)
    group.put(b"after")
    logs = {node.log() for node in group.settled()}
    assert len(logs) == 1
    log = logs.pop()
    assert all(b"kept %d" % number in log for number in range(20))
    wait_for(lambda: again.driver.core.remembers, "the leader brings the node in line")


@pytest.mark.parametrize("name", ["votes.json", "entries.json", "currterm"])
def test_a_node_whose_state_file_is_gone_knows_that_it_has_forgotten(group, name):
    leader, has, lacks = one_behind(group)
    state_file(has, name).unlink()
    again, _ = others_elect(group, has.number, lacks.number)
    assert not again.driver.core.remembers
    again.kill()
    (again,) = group.start(has.number)  # a restart does not make it remember
    wait_for(lambda: again.driver.core is not None)
    assert not again.driver.core.remembers


def test_a_node_without_its_identity_is_refused_and_an_empty_store_is_the_way(group):
    leader, has, _ = one_behind(group)
    state_file(has, "node.json").unlink()
    with pytest.raises(StoreBrokenError, match=r"node.json is missing.*move the store away"):
        group.start(has.number)
    shutil.move(has.config.store.root, f"{has.config.store.root}.away")
    group.start(*(node.number for node in group.nodes.values() if not node.running))
    group.put(b"after")
    assert b"kept 19" in group.settled()[0].log()


def test_an_older_currterm_is_found_out(tmp_path):
    with running_group(tmp_path) as group:
        leader = group.leader()
        path = state_file(leader, "currterm")
        older = path.read_bytes()
        term = leader.driver.term
        leader.kill()
        group.put(b"in a later term")
        group.start(leader.number)
        group.settled()
        assert leader.number in group.nodes and group.leader().driver.term > term
        node = group.nodes[leader.number]
        wait_for(lambda: node.store.end_term > term, "an entry of the later term")
        node.kill()
        path.write_bytes(older)
        (again,) = group.start(node.number)
        assert not again.store.remembers
        wait_for(lambda: again.driver.core and again.driver.core.remembers, "the leader's recall")


# ---- stores that were replaced, and nodes that contradict each other


def replaced(group, node):
    """Replace the node's disk by an empty one; return the node in line, and where its old disk is.

    The group must have the other nodes running.
    """
    away = f"{node.config.store.root}.{node.state.data.store_id}"
    node.stop()
    shutil.move(node.config.store.root, away)
    (again,) = group.start(node.number)
    group.put(b"while the disk is replaced")
    wait_for(lambda: again.driver.core and again.driver.core.remembers, "the leader's recall")
    group.settled()
    return again, away


def put_back(group, node, away):
    """Start the node with an earlier store; return what it and the others say."""
    node.stop()
    shutil.move(node.config.store.root, f"{node.config.store.root}.{node.state.data.store_id}")
    shutil.copytree(away, node.config.store.root)
    (old,) = group.start(node.number)
    others = [one for one in group.running if one is not old]

    def refused():
        own = any("was replaced by another one" in one for one in old.driver.problems())
        theirs = [any("was replaced" in p for p in one.driver.problems()) for one in others]
        return own or any(theirs)

    wait_for(refused, "the refusal")
    assert not old.driver.links.linked
    return old


def test_a_store_that_was_replaced_never_comes_back(group):
    node = next(one for one in group.running if one is not group.leader())
    for one in group.running:  # else the others do not know its first store
        wait_for(lambda one=one: len(one.driver.links.linked) == 2, "the links")
    first_id = node.state.data.store_id
    node, first = replaced(group, node)
    wait_for(lambda: not node.state.data.lost_disk, "the note that the node is in line")
    node, second = replaced(group, node)
    for number in range(5):
        group.put(b"kept %d" % number)
    group.settled()
    present, present_id = node.config.store.root, node.state.data.store_id
    for away in (second, first):
        old = put_back(group, node, away)
        old.stop()
        shutil.rmtree(present)
        shutil.move(f"{present}.{present_id}", present)
        (node,) = group.start(node.number)
        group.put(b"with the present store")
        wait_for(lambda now=node: len(now.driver.links.linked) == 2, "the links")
    for one in group.running:
        assert first_id in one.state.data.replaced_stores[node.number]
        assert one is node or one.state.data.known_stores[node.number] == present_id
    group.settled()


def prepared(group, numbers, body):
    """Give nodes a store with one entry of term 1, before their first start."""
    for number in numbers:
        config = make_config(group.root, number, group.ports, store=STORE)
        store = DLedgerMmapFileStore(
            config.store, node=number, store_host=HOST, index_file_bytes=32 * 4096
        )
        store.open()
        store.save_hard_state(HardState(1, None), remembers=True)
        store.put(1, [record(body % number)])
        store.close()
        shutil.rmtree(f"{config.store.root}/hastore")  # as a store of DLedger


def test_another_entry_of_the_same_term_is_a_loud_problem_and_ends_the_link(tmp_path):
    group = DriverGroup(tmp_path)
    prepared(group, (1, 2, 3), b"of leader %d")
    try:
        group.start(1, 2, 3)

        def told():
            return [
                text
                for node in group.running
                for text in node.driver.problems()
                if "entry 0 of term 1 is another one here" in text
            ]

        wait_for(told, "the problem")
        assert "acknowledged messages may be lost" in told()[0]
        assert all(node.store.committed_index == -1 for node in group.running)
    finally:
        group.stop()


def rot(node, body):
    """Flip a bit of a body in a node's log."""
    data = pathlib.Path(node.store.messages.directory) / "data"
    path = next(one for one in data.iterdir() if body in one.read_bytes())
    with open(path, "r+b") as file:
        file.seek(path.read_bytes().index(body))
        file.write(bytes([body[0] ^ 1]))


@pytest.mark.parametrize("hurt", ["leader", "follower"])
def test_rot_in_the_entry_that_is_compared_is_no_contradiction(group, hurt):
    leader = group.put(b"becomes rotten")
    end = leader.store.end_index
    wait_for(lambda: all(one.index == end for one in leader.driver.followers()), "equal logs")
    follower = next(node for node in group.running if node is not leader)
    node = leader if hurt == "leader" else follower
    damages = []
    node.store.messages.hooks.on_damage = damages.append
    rot(node, b"becomes rotten")

    def links():
        return dict(follower.driver.counts.links.items())[str(leader.number)]

    before = links()
    leader.driver.links.close(follower.number, "the test")
    wait_for(lambda: links() > before, "the next link")
    group.put(b"goes on")
    group.settled()
    assert damages, "it is looked at, and repaired"
    assert not any("contradicts" in one for each in group.running for one in each.driver.problems())


def test_two_leaders_of_a_term_are_a_loud_problem(group):
    leader = group.leader()
    group.put(b"x")
    follower, third = [node for node in group.running if node is not leader]
    wait_for(lambda: (core := follower.driver.core) and core.leader == leader.number)
    beat = HeartBeatRequest(leader.driver.term, 1, -1)
    follower.driver.on_messages(third.number, [Received(beat, None)])
    found = f"nodes {leader.number} and {third.number} lead term {beat.term}"
    assert any(found in text for text in follower.driver.problems())


# ---- one group: first members and the group's id


def test_nodes_with_other_first_members_do_not_begin(tmp_path, caplog, monkeypatch):
    """One file has three nodes, the others have five: each list would have a majority.

    Two nodes that join a group at once may say so for a moment: it is a warning once it lasts.
    """
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(bounded_log, "START_MS", 600_000.0)  # however long the machine takes
    group = DriverGroup(tmp_path, 5)
    three = {n: port for n, port in group.ports.items() if n <= 3}
    try:
        nodes = [*group.start(1, 2, ports=three), *group.start(3, 4, 5)]
        says = "the first members of node 1 are 1, 2, 3, those of node 3 are 1, 2, 3, 4, 5"
        wait_for(lambda: any(says in one for one in nodes[0].driver.problems()), "the problem")
        others = "those of node 1 are 1, 2, 3: the group would have two majorities"
        wait_for(lambda: others in str(nodes[2].driver.problems()))
        assert all(node.driver.core is None for node in nodes)

        def levels():
            lines = [one for one in caplog.records if one.getMessage().startswith("no link to")]
            return {one.levelno for one in lines if "two majorities" in one.getMessage()}

        assert levels() == {logging.INFO}
        for node in nodes:
            node.driver.links._start_phase.end()
        wait_for(lambda: levels() == {logging.INFO, logging.WARNING}, "the warning")
    finally:
        group.stop()


def test_a_group_has_an_id_and_refuses_the_nodes_of_another(tmp_path):
    with running_group(tmp_path / "a") as one, running_group(tmp_path / "b") as other:
        for group in (one, other):
            group.put(b"first")
            nodes = group.settled()
            wait_for(lambda nodes=nodes: all(n.state.data.group_id for n in nodes), "the id")
            assert len({node.state.data.group_id for node in nodes}) == 1
        ids = [group.nodes[1].state.data.group_id for group in (one, other)]
        assert ids[0] != ids[1]
        for group in (one, other):
            group.nodes[1].stop()
        root = one.nodes[1].config.store.root
        shutil.rmtree(root)
        shutil.copytree(other.nodes[1].config.store.root, root)
        for node in one.running:  # as if they had never seen node 1
            known = {n: s for n, s in node.state.data.known_stores.items() if n != 1}
            node.state.save(known_stores=known)
        (stranger,) = one.start(1)
        says = f"belongs to another group: the id of its group is {ids[0]}, that of node 1 is"
        wait_for(
            lambda: any(says in text for node in one.running for text in node.driver.problems())
        )
        assert not any(1 in node.driver.links.linked for node in one.running if node.number != 1)
        one.put(b"without the stranger")
        stranger.stop()
        shutil.rmtree(root)
        (fresh,) = one.start(1)
        wait_for(lambda: fresh.state.data.group_id == ids[0], "the id")
        one.put(b"with the new one")
        one.settled()


def test_a_node_that_knows_the_id_leads_without_reading_it_in_its_log(tmp_path, monkeypatch):
    """A bad sector under the first entry of the last term must not keep it from leading."""
    with running_group(tmp_path, 1) as group:
        group.put(b"x")
        node = group.nodes[1]
        wait_for(lambda: node.state.data.group_id, "the id")

        def fail(*_args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(node.store, "group_id", fail)
        assert node.driver._group.for_entry() == node.state.data.group_id


def test_an_id_that_could_not_be_saved_is_saved_with_the_next_entry(tmp_path, monkeypatch):
    with running_group(tmp_path, 1) as group:
        group.put(b"x")
        node = group.nodes[1]
        wait_for(lambda: node.state.data.group_id, "the id")
        known, end = node.state.data.group_id, node.store.end_index
        node.state.save(group_id="")
        made = GroupId(node.driver.member, node.store)

        def full(*_args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(node.state, "save", lambda **_fields: full())
            with pytest.raises(OSError, match="No space"):
                made.committed(end - 1)
        made.committed(end)
        assert node.state.data.group_id == known


def test_a_group_of_an_earlier_version_gets_its_id_in_the_next_term(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(GroupId, "for_entry", lambda self: "")
        patch.setattr(PeerMember, "group", Group())
        group = DriverGroup(tmp_path)
        group.start(1, 2, 3)
        group.put(b"first")
        group.settled()
        group.stop()
    assert not any(node.state.data.group_id for node in group.nodes.values())
    try:
        group.start(1, 2, 3)
        group.put(b"later")
        wait_for(lambda: all(node.state.data.group_id for node in group.running), "the id")
        assert len({node.state.data.group_id for node in group.running}) == 1
    finally:
        group.stop()


def test_a_leader_whose_log_begins_late_gives_the_group_no_second_id(tmp_path, monkeypatch):
    """It was down while the group got its id, and retention has removed the entry that has it."""
    retention = RetentionConfig(max_size_bytes=2 * STORE["commitlog_file_size"])
    group = DriverGroup(tmp_path, store={"retention": retention})
    with monkeypatch.context() as patch:  # the version before
        patch.setattr(GroupId, "for_entry", lambda self: "")
        patch.setattr(PeerMember, "group", Group())
        group.start(1, 2, 3)
        group.put(b"first")
        group.settled()
        group.stop()
    try:
        nodes = group.start(1, 2)
        for _ in range(20):
            group.put(*[bytes(3_000)] * 20)
        group.settled()
        wait_for(lambda: all(node.state.data.group_id for node in nodes), "the id")
        for node in nodes:
            log_retention = node.store.messages.retention
            end = log_retention.expired_end(None)
            node.driver.retained(node.store.index_at(end) + 1)
            log_retention.delete_expired(None)
        (late,) = group.start(3)
        group.put(b"for all")
        group.settled()
        assert late.store.begin_index > 1

        def late_leads():
            leader = group.leader()
            if leader is not late:
                leader.ask(lambda done: leader.driver.hand_over(3, done))
            return leader is late

        wait_for(late_leads, "the late one leads")
        group.put(b"by the late one")
        wait_for(lambda: late.state.data.group_id, "the id")
        assert len({node.state.data.group_id for node in group.running}) == 1
    finally:
        group.stop()


# ---- a group that had one member for a while


def grown(group, *, learner=False):
    """Start node 1 as a group of its own, and let node 2 join it; return both."""
    (one,) = group.start(1, ports={1: group.ports[1]})
    group.put(b"of a group of one")
    one.driver.set_addresses({n: f"127.0.0.1:{port}" for n, port in group.ports.items()})
    (two,) = group.start(2)
    wait_for(lambda: 2 in one.driver.links.linked, "the link")
    wanted = MemberSet((1,), (2,))
    assert one.ask(lambda done: one.driver.change_members(wanted, done)).outcome == "COMMITTED"
    if not learner:
        wait_for(lambda: one.driver.core.members == (1, 2), "the second member")
    group.put(b"for both")
    group.settled()
    return one, two


def test_new_nodes_do_not_begin_beside_a_group_that_still_starts(tmp_path, monkeypatch):
    """They are two of the three in the files, and would elect a leader of their own."""
    group = DriverGroup(tmp_path)
    go = threading.Event()

    class Slow(DLedgerDriver):
        def _begin_core(self):
            assert go.wait(60)
            super()._begin_core()

    try:
        (one,) = group.start(1, ports={1: group.ports[1]})
        group.put(b"kept")
        one.stop()
        with monkeypatch.context() as patch:
            patch.setattr(groups, "DLedgerDriver", Slow)
            group.start(1)
        new = group.start(2, 3)
        wait_for(lambda: any(node.driver.core is not None for node in new), "a core")
        assert group.nodes[1].driver.core is None
        go.set()
        wait_for(lambda: all(node.driver.core is not None for node in new), "the cores")
        assert [node.driver.core.members for node in new] == [(1,), (1,)]
        assert group.put(b"by the old one").number == 1
    finally:
        go.set()
        group.stop()


def test_the_only_member_does_not_begin_again_after_its_disk_is_lost(tmp_path, monkeypatch):
    """Its learner has what was acknowledged: a new group under the old name would hide that."""
    monkeypatch.setattr(Learners, "next_list", lambda *_: None)  # it stays a learner
    group = DriverGroup(tmp_path, 2)
    try:
        one, two = grown(group, learner=True)
        one.stop()
        shutil.rmtree(one.config.store.root)
        (again,) = group.start(1)
        wait_for(lambda: again.driver.core is not None, "the core")
        assert not again.driver.core.remembers and again.driver.core.members == (1, 2)
        wait_for(lambda: again.driver.links.linked == {2}, "the link")
        assert not again.leads and again.state.data.group_id == two.state.data.group_id
        again.kill()
        (again,) = group.start(1)  # now it knows the other one
        wait_for(lambda: again.driver.core is not None, "the core")
        assert not again.driver.core.remembers
        again.stop()
        two.stop()
        config = msgspec.structs.replace(two.config, mode=Mode.DLEDGER)
        found = recover_group(config, unsafe=True)  # the learner is what is left
        assert (found.members, found.left_behind) == ((1,), (1,))
        group.start(2)
        group.put(b"after the recovery")
        assert group.nodes[2].driver.core.members == (2,)
        assert b"for both" in group.nodes[2].log()
    finally:
        group.stop()


def test_a_log_that_is_not_whole_does_not_make_its_node_the_only_member(tmp_path):
    """The log ends where node 1 was alone: as while it is copied after a lost disk."""
    group = DriverGroup(tmp_path, 2)
    try:
        one, two = grown(group)
        data = one.state.data
        whole = [index for index, _, members in data.member_lists if members == (1, 2)]
        store = one.store
        end = store.position(whole[0])
        one.kill()
        two.kill()
        cut_log(one, end, rest=True)
        state_file(one, "limits").unlink()
        state_file(one, "entries.json").unlink()
        state_file(one, "checkpoint").unlink(missing_ok=True)
        shutil.rmtree(state_file(one, "index"))
        (again,) = group.start(1)
        wait_for(lambda: again.driver.core is not None, "the core")
        assert again.driver.core.members == (1,)
        assert not again.leads and not again.driver.core.remembers
    finally:
        group.stop()
