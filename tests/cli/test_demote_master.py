"""When a master that serves may be demoted: another node can take over, or the operator insists."""

import pathlib

import pytest

from hastore.cli import flip, own_node
from hastore.errors import HastoreError
from tests.cli.fake_group import FakeGroup, scripted


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Let the node of a file answer what the test says, see `scripted`."""
    return scripted(tmp_path, monkeypatch, flip)


def slaves(*numbers, in_sync=True):
    return [{"node": number, "in_sync": in_sync, "classic": False} for number in numbers]


PENDING = [
    {"key": "nodes", "in_force": [1, 2, 3], "in_file": [1, 2, 3, 4], "counts_from": "promotion"}
]


@pytest.mark.parametrize(
    ("master", "why"),
    [
        ({"slaves": slaves(2, 3)}, None),
        ({"slaves": slaves(2)}, None),
        ({"slaves": []}, "no slave is in sync with it"),
        ({"slaves": slaves(2, 3, in_sync=False)}, "no slave is in sync with it"),
        ({"slaves": slaves(2), "acks": 0}, "node 3 does not answer"),
        ({"slaves": slaves(2), "acks": 0, "unlinked": [{"node": 3, "why": None}]}, None),
        ({"slaves": slaves(2, 3), "config_pending": PENDING}, "node 4 does not answer"),
        ({"slaves": slaves(2), "config_pending": PENDING}, "node 3, 4 do not answer"),
        ({"slaves": slaves(2, 3, 4), "config_pending": PENDING}, None),
    ],
)
def test_a_master_is_demoted_only_if_another_node_can_take_over(ask, capsys, master, why):
    slave = {"role": "SLAVE", "reason": "this node is a slave", "writable": False}
    path = ask(1, master, slave) if why is None else ask(1, master)
    if why is None:
        assert flip.demote(path)["role"] == "SLAVE"
        assert "until another one is promoted" in capsys.readouterr().err
        return
    with pytest.raises(HastoreError, match=why) as refused:
        flip.demote(path)
    assert "nothing was changed" in str(refused.value) and "--leave-no-master" in str(refused.value)
    assert "role: SYNC_MASTER" in pathlib.Path(path).read_text()
    ask(1, master, slave)
    assert flip.demote(path, leave_no_master=True)["role"] == "SLAVE"


def test_a_slave_that_is_in_sync_in_a_moment_can_take_over(ask):
    slave = {"role": "SLAVE", "reason": "this node is a slave", "writable": False}
    path = ask(1, {}, {}, {"slaves": slaves(2)}, slave)
    assert flip.demote(path)["role"] == "SLAVE"


@pytest.mark.parametrize("master", [None, 1, 2])
def test_a_loss_that_is_accepted_before_a_master_is_known_says_so(
    ask, capsys, monkeypatch, tmp_path, master
):
    """It counts for no master that is promoted later."""
    monkeypatch.setattr(flip, "SUCCESSOR_S", 0.0)
    (tmp_path / "node1" / "hastore").mkdir(parents=True, exist_ok=True)
    slave = {"role": "SLAVE", "reason": "it refuses this node", "writable": False, "master": master}
    path = ask(1, slave)
    assert flip.demote(path, flip.OneShotFlags(accept_loss=True))["role"] == "SLAVE"
    assert ("follows no master now" in capsys.readouterr().err) is (master != 2)


@pytest.mark.parametrize(
    ("master", "silent", "note"),
    [
        ("following", (), "no node takes puts now: run `hastore promote -c {}` for node 1, which"),
        ("following", (3,), "no node that answers takes puts now; `hastore status` says"),
        ("master", (), ""),
    ],
    ids=["it has fenced the master", "perhaps another is the master", "the master goes on"],
)
def test_a_promotion_that_is_called_off_says_whether_a_master_is_left(
    tmp_path, monkeypatch, capsys, master, silent, note
):
    fakes = FakeGroup(tmp_path, 3)
    monkeypatch.setattr(own_node, "ask_own_status", fakes.status)
    fakes[2].refusal = "the disk became full"
    fakes[1].end = 5_000
    fakes.promote(2)
    fakes[1].state = master
    for number in silent:
        fakes[number].alive = False
    assert flip.demote(str(fakes[2].path))["role"] == "SLAVE"
    said = capsys.readouterr().err
    assert note.format(fakes[1].path) in said and bool(said) == bool(note)
