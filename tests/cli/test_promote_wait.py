"""What `promote` takes for progress, and what it says while it waits."""


import pytest

from hastore.cli import flip
from hastore.config.model import Role
from hastore.errors import PromotionRefused
from hastore.ha.rules.promotion import replay_refusal
from tests.cli.fake_group import scripted

WAITS = "promotion needs 3 clean nodes and has 2; waiting for node {}"
PROBLEM = "no new epoch has begun: {}; the node goes on as master of epoch 65537"


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Let the node of a file answer what the test says, see `scripted`."""
    return scripted(tmp_path, monkeypatch, flip)


def late(path, patience_s=10.0):
    with pytest.raises(PromotionRefused) as refused:
        flip.promote(path, Role.SYNC_MASTER, patience_s=patience_s)
    return str(refused.value)


def test_puts_are_no_progress_of_a_master_that_shall_begin_a_new_epoch(ask, capsys):
    path = ask(1, {}, {"problems": [PROBLEM.format(WAITS.format(4))]})
    text = late(path, 3.0)
    assert ask.clock.now < 4.0, "its log grows, but the promotion does not go on"
    assert "start node 4, or take it out of the list of every node's file again" in text
    assert f"`hastore node remove {path} --node 4`" in text and "demote" not in text
    begins, waits = capsys.readouterr().err.splitlines()
    assert "begins a new epoch" in begins
    assert waits.startswith("node 1 (tcp://127.0.0.1:7001): no new epoch has begun: promotion nee")


def test_a_node_is_taken_out_of_the_list_from_elsewhere_too(ask):
    """The command names the node that leaves, and not also the master."""
    path = ask(1, {})
    target = flip._target(path, "promote", None)
    target = target._replace(given=f"{path} --node 1 --remote", remote=True)
    text = flip._remedy(target, {"writable": True}, WAITS.format(4))
    assert f"`hastore node remove {path} --remote --node 4`" in text and "--node 1" not in text


def test_puts_are_no_progress_of_a_slave_that_follows_while_it_waits(ask, capsys):
    slave = {"role": "SLAVE", "reason": "this node is a slave; node 1 is the master"}
    path = ask(2, slave, *[slave] * 5, {"reason": f"waiting to be master: {WAITS.format(3)}"})
    text = late(path, 3.0)
    assert ask.clock.now < 5.0 and "start node 3, or `hastore demote -c" in text
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("node 2 (tcp://127.0.0.1:7002): waiting to be master: ")


def test_a_node_that_cannot_follow_its_registry_says_so_first(ask):
    """Its own reason is that of the role that it has kept: it says nothing of this order."""
    lost = "the registry zk://zoo:2181 is out of reach: no answer; the node keeps its role, SLAVE"
    slave = {"role": "SLAVE", "reason": "this node is a slave; node 1 is the master"}
    path = ask(2, slave, {**slave, "writable": False, "problems": ["another one", lost]})
    text = late(path, 3.0)
    assert f"node 2 (tcp://127.0.0.1:7002) has not become SYNC_MASTER: {lost}; this node is" in text
    assert "another one" not in text


def test_copying_answers_and_replay_are_progress(ask, capsys):
    def waiting(reason, **more):
        return {"reason": f"waiting to be master: {reason}", "writable": False, **more}

    copies = [waiting(f"catching up from node 1: {n} of 90 bytes", master=None) for n in range(80)]
    fewer = [waiting(WAITS.format("1, 3"))] * 25 + [waiting(WAITS.format("3"))] * 25
    replay = [
        waiting(replay_refusal(None, n, 1 << 40, 1), max_offset=1 << 40, dispatched_offset=n)
        for n in range(80)
    ]
    done = {"epoch": 131074, "writable": True}
    slave = {"role": "SLAVE", "reason": "this node is a slave"}
    path = ask(2, slave, *fewer, *replay, *copies, done)
    assert flip.promote(path, Role.SYNC_MASTER, patience_s=3.0)["writable"]
    assert ask.clock.now > 18.0
    told = capsys.readouterr().err
    assert told.count("catching up") == told.count("replay is") == 1, "each reason once"
    assert told.count("waiting for node") == 2
