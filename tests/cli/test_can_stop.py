"""`hastore can-stop` beside what happens when the node is stopped all the same."""

import json
import socket

import msgspec
import pytest

from hastore.cli import can_stop
from hastore.cli.can_stop import verdict
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.config.file import load_config
from hastore.config.model import Mode
from hastore.errors import NotAuthenticatedError
from hastore.testing import group
from tests.cli.fake_group import FakeGroup
from tests.cli.kit import hastore

GONE = NoAnswer(Quiet.REFUSED, "Connection refused: no node listens there")


def ask(node):
    done = hastore("can-stop", "-c", str(node.config), "--json")
    found = json.loads(done.stdout)
    assert found["node"] == node.number
    assert done.returncode == {True: 0, False: 4, None: 1}[found["may_stop"]], done.stderr
    return found["may_stop"], found["why"]


def test_three_nodes_of_mode_classic():
    with group(nodes=3) as made:
        may, why = ask(made[1])
        assert may is False and f"hastore flip -c {made[2].config} --to 2` on node 2" in why
        may, why = ask(made[3])
        assert may is True and "needs 1 slaves in sync, and has 1 without node 3" in why
        made[3].stop()
        assert made.wait_master() is made[1], "what was promised"
        assert ask(made[3])[0] is True
        may, why = ask(made[2])
        assert may is False and "has 0 without node 2" in why
        made[1].kill()
        may, why = ask(made[2])
        assert may is None and "no master answers" in why
        may, why = ask(made[1])
        assert may is None and "its file says SYNC_MASTER" in why


def test_a_master_alone_and_one_that_waits_for_nobody():
    with group(nodes=1) as made:
        may, why = ask(made[1])
        assert may is False and "no slave is in sync" in why
    with group() as pair:
        assert hastore("promote", "--async", "-c", str(pair[2].config)).returncode == 0
        pair.wait_in_sync()
        may, why = ask(pair[1])
        assert may is True and "waits for no slave" in why


def test_three_nodes_of_mode_dledger():
    with group("dledger") as made:
        leader = made.master
        one, other = (node for node in made if node is not leader)
        may, why = ask(leader)
        assert may is False and "hastore dledger transfer" in why
        assert ask(one)[0] is True
        one.stop()
        assert made.wait_master() is leader
        may, why = ask(other)
        assert may is False and "needs 2 of 3 members, and 1 are in sync" in why


def test_the_answer_for_people(tmp_path):
    with group(nodes=1) as made:
        done = hastore("can-stop", "-c", str(made[1].config))
        assert done.returncode == 4 and done.stdout.startswith("no: node 1 is the master")
    assert hastore("can-stop", "-c", str(tmp_path / "gone.yaml")).returncode == 2


def slave(number, master=None, **more):
    return {"node": number, "master": master, "writable": False, "slaves": [], "epoch": 1, **more}


def master(number, *slaves, **more):
    near = [{"node": one, "state": "streaming", "in_sync": True} for one in slaves]
    return slave(number, number) | {
        "writable": True, "slaves": near, "default_acks": "all", "acks": 1,
        "config": "m.yaml", **more,
    }  # fmt: skip


@pytest.fixture
def configs(tmp_path):
    made = FakeGroup(tmp_path, 3)  # node 1 is the SYNC_MASTER in its file
    return {number: load_config(str(made[number].path)) for number in made.nodes}


@pytest.mark.parametrize("kind", [each for each in Quiet if each is not Quiet.REFUSED])
def test_a_node_that_does_not_answer_may_run(configs, kind):
    others = {1: master(1, 3), 3: slave(3, 1)}
    may, why = verdict(configs[2], NoAnswer(kind, "the reason"), others)
    assert may is None and "node 2" in why and "it may run, and be the master: the reason" in why


def test_a_node_that_is_gone_may_be_stopped(configs):
    assert verdict(configs[2], GONE, {1: master(1, 3), 3: slave(3, 1)}).may is True
    assert verdict(configs[2], GONE, {}).may is True
    assert verdict(configs[1], GONE, {2: master(2, 3), 3: slave(3, 2)}).may is True, "superseded"


@pytest.mark.parametrize(
    ("number", "others", "said"),
    [
        (1, {}, "its file says SYNC_MASTER"),
        (1, {2: slave(2), 3: slave(3)}, "its file says SYNC_MASTER"),
        (1, {2: slave(2, 1), 3: slave(3, 1)}, "open at node 2, 3"),
        (2, {1: master(1, 2, 3)}, "open at node 1"),
        (2, {3: slave(3, links=[{"node": 2, "linked": True}])}, "open at node 3"),
    ],
)
def test_without_a_listener_a_node_may_run_if_others_have_links(configs, number, others, said):
    may, why = verdict(configs[number], GONE, others)
    assert may is None and said in why


def test_a_lost_link_says_nothing(configs):
    gone = {"node": 2, "state": "NO_LINK", "in_sync": False}
    others = {1: master(1, 3), 3: slave(3, links=[{"node": 2, "linked": False}])}
    others[1]["slaves"].append(gone)
    assert verdict(configs[2], GONE, others).may is True


def test_a_full_master_is_the_master(configs):
    full = {"writable": False, "reason": "the disk is full", "default_acks": None}
    may, why = verdict(configs[1], master(1, 2, 3, **full), {2: slave(2, 1, config="x.yaml")})
    assert may is False and "it takes no puts now (the disk is full)" in why
    assert "hastore flip -c x.yaml --to 2" in why
    may, why = verdict(configs[1], master(1, **full), {})
    assert may is False and "no slave is in sync with it: it takes no puts now" in why
    may, why = verdict(configs[2], slave(2, 1), {1: master(1, 2, 3, **full), 3: slave(3, 1)})
    assert may is True and "has 1 without node 2" in why
    may, why = verdict(configs[2], slave(2, 1), {1: master(1, 2, **full), 3: slave(3)})
    assert may is False and "has 0 without node 2" in why, "it is the one to flip to"
    may, why = verdict(configs[2], slave(2, 1), {1: master(1, 2, role="ASYNC_MASTER", **full)})
    assert may is True and "waits for no slave" in why


@pytest.mark.parametrize("mode", Mode)
def test_a_node_whose_store_is_closed_needs_its_restart(configs, mode):
    """No put waits for it, and no other node can be brought in sync in its place."""
    config = msgspec.structs.replace(configs[2], mode=mode)
    closed = slave(2, reason="the store is closed: a sync of bytes [0, 100) failed")
    link = {"node": 2, "state": "NO_LINK", "in_sync": False}
    leader = master(1, members=[1, 2, 3], slaves=[link])
    for others in ({1: leader, 3: slave(3)}, {3: slave(3)}):
        may, why = verdict(config, closed, others)
        assert may is True and "closed: a sync" in why and "look at its disk, and restart it" in why


def test_a_master_whose_store_is_closed_is_flipped_or_restarted(configs):
    why = "the store is closed: a sync of bytes [0, 100) failed"
    closed = master(1, 2, writable=False, reason=why)
    may, said = verdict(configs[1], closed, {2: slave(2, 1, config="x.yaml")})
    assert may is False and "hastore flip -c x.yaml --to 2" in said
    closed["slaves"] = []
    may, said = verdict(configs[1], closed, {2: slave(2, 1)})
    assert may is False and said.endswith("look at its disk, and restart it")


def test_only_a_follower_that_could_lead_is_offered_a_transfer(configs):
    """One whose replay has stopped is in sync, one whose disk is full is not; neither can lead."""
    config = msgspec.structs.replace(configs[1], mode=Mode.DLEDGER)
    others = {2: slave(2, 1), 3: slave(3, 1)}
    leader = master(1, 2, 3, members=[1, 2, 3])
    blocked, full = leader["slaves"][0], leader["slaves"][1]
    assert "`hastore dledger transfer -c FILE --to 2`" in verdict(config, leader, others).why
    blocked["able"] = False
    assert "`hastore dledger transfer -c FILE --to 3`" in verdict(config, leader, others).why
    full.update(able=False, in_sync=False)
    assert "; no follower in sync can take over" in verdict(config, leader, others).why
    blocked["in_sync"] = False
    assert "; no follower is in sync" in verdict(config, leader, others).why


def test_a_preferred_leader_would_lead_again_before_it_is_stopped(configs):
    config = msgspec.structs.replace(configs[1], mode=Mode.DLEDGER)
    leader, others = master(1, 2, 3, members=[1, 2, 3]), {2: slave(2, 1), 3: slave(3, 1)}
    for preferred, said in ((None, False), (2, False), (1, True)):
        group = msgspec.structs.replace(config.dledger, preferred_leader=preferred)
        made = msgspec.structs.replace(config, dledger=group)
        assert ("it leads again" in verdict(made, leader, others).why) is said


def test_a_leader_whose_disk_hangs_counts_for_no_put(configs):
    config = msgspec.structs.replace(configs[2], mode=Mode.DLEDGER)
    leader = master(1, 2, 3, members=[1, 2, 3], sync_hangs=True)
    may, why = verdict(config, slave(2, 1), {1: leader, 3: slave(3, 1)})
    assert may is False and "1 are in sync without 2; the disk of node 1, the leader, hangs" in why
    leader["sync_hangs"] = False
    assert verdict(config, slave(2, 1), {1: leader, 3: slave(3, 1)}).may is True


def test_a_slave_counts_once_its_list_is_in_force(configs):
    """`hastore node add` has changed the files, and the master was not promoted yet."""
    pending = [{"key": "nodes", "in_force": [1, 2], "in_file": [1, 2, 3],
                "counts_from": "promotion"}]  # fmt: skip
    one = {1: master(1, 2, 3, config_pending=pending), 3: slave(3, 1)}
    may, why = verdict(configs[2], slave(2, 1), one)
    assert may is False and "has 0 without node 2" in why
    assert verdict(configs[3], slave(3, 1), one).may is True, "no put waits for node 3"


def test_a_slave_that_does_not_answer_may_not_take_the_place_of_another(configs):
    """It is cut off or hangs, and its master counts it for up to 26 s more."""
    one = {1: master(1, 2, 3)}
    may, why = verdict(configs[2], slave(2, 1), one, {3: "it is connected and does not answer"})
    assert may is None and "but node 3 does not answer (it is connected and" in why
    assert verdict(configs[2], slave(2, 1), one).may is True, "it does not tell its state here"
    more = {1: master(1, 2, 3, 4), 4: slave(4, 1)}
    assert verdict(configs[2], slave(2, 1), more, {3: "no"}).may is True, "node 4 suffices"


@pytest.mark.parametrize("counted", [False, True])
def test_a_slave_of_rocketmq_counts_where_the_files_say_so(configs, counted):
    ha = msgspec.structs.replace(configs[2].ha, count_classic_peers=counted)
    config = msgspec.structs.replace(configs[2], ha=ha)
    one = master(1, 2)
    one["slaves"].append({"node": None, "state": "streaming", "in_sync": True, "classic": True})
    may, why = verdict(config, slave(2, 1), {1: one})
    assert may is counted and f"has {int(counted)} without node 2" in why


def test_the_acks_in_force_count_and_not_those_of_a_changed_file(configs):
    """They count from the next promotion: until then the master refuses puts with fewer slaves."""
    may, why = verdict(configs[2], slave(2, 1), {1: master(1, 2, 3, acks=2), 3: slave(3, 1)})
    assert may is False and "needs 2 slaves in sync, and has 1 without node 2" in why


def test_what_the_command_sees_of_a_node_that_hangs(tmp_path):
    file = FakeGroup(tmp_path)[2].path
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel accepts, nobody answers
        file.write_text(file.read_text().replace("7002", str(hanging.getsockname()[1])))
        done = hastore("can-stop", "-c", str(file))
    assert done.returncode == 1 and done.stdout.startswith("not known: node 2 "), done
    assert "it may run, and be the master" in done.stdout
    done = hastore("can-stop", "-c", str(file))
    assert done.returncode == 0 and "does not run (Connection refused" in done.stdout, done


@pytest.mark.parametrize(
    ("refuses", "may", "code"), [({3}, True, 0), ({1}, None, 1), ({2}, None, 1), ({1, 2}, None, 1)]
)
def test_a_node_that_refuses_the_identity_is_no_failure(
    tmp_path, configs, monkeypatch, refuses, may, code
):
    """A program that asks with --json got no object, though the other nodes know the answer."""
    waits_for_none = master(1, 3) | {"default_acks": 1}
    says = {1: waits_for_none, 2: slave(2, 1), 3: slave(3, 1)}

    def ask_own(config, number, timeout_s):
        if number in refuses:
            raise NotAuthenticatedError(f"node {number} does not know `ops`")
        return says[number]

    monkeypatch.setattr(can_stop, "ask_own", ask_own)
    done = hastore("can-stop", "-c", str(tmp_path / "node2.yaml"), "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["may_stop"]) == (code, may), told
    for number in refuses - {2}:
        assert f"node {number} does not tell its state: node {number} does not know" in done.stderr
    if 2 in refuses:
        assert "node 2 does not know `ops`" in told["why"]
