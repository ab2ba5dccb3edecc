"""`hastore dledger add --wait` waits for the link, and `remove` warns of few members."""

import pathlib
import types

import pytest

from hastore.cli import dledger, remote_nodes
from hastore.config.file import load_config
from hastore.dledger.driver.requests import _not_addable, request_path
from hastore.errors import HastoreError, NotAuthenticatedError
from hastore.protocol.dledger import MemberSet
from tests.process.harness import ROOT

LEARNER = {"node": 1, "term": 4, "leader": 1, "members": [1, 2, 3], "learners": [{"node": 4}]}
MEMBER = {**LEARNER, "members": [1, 2, 3, 4], "learners": []}


class Leader:
    """Refuses a node until its link is there, as the driver of a leader does."""

    def __init__(self, clock, linked_at):
        self.asked = 0
        self._clock = clock
        self._linked_at = linked_at

    def request(self, command, node, by=None):
        self.asked += 1
        new = node if by is None else by
        linked = {2, 3} | ({new} if self._clock.now >= self._linked_at else set())
        group = MemberSet((1, 2, 3))
        why = _not_addable(new, group, {1, 2, 3, 4}, linked, ())
        if why is not None:
            raise HastoreError(f"node 1 (tcp://127.0.0.1:1): REFUSED: {why}")
        return load_config(str(ROOT / "conf" / "dledger-n0.yaml")), LEARNER


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds

    time = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
    monkeypatch.setattr(dledger, "time", time)
    monkeypatch.setattr(dledger, "ask_node", lambda _config: MEMBER)
    return clock


def test_an_addition_that_waits_waits_for_the_link_too(clock, capsys):
    leader = Leader(clock, linked_at=4.0)
    dledger._add(leader, 4, None, 15.0, False)
    out, err = capsys.readouterr()
    assert "node 4 is a member" in out and err.count("node 4 is not linked") == 1
    assert 4.0 <= clock.now < 6.0 and leader.asked < 7
    replaced = Leader(clock, linked_at=clock.now + 2.0)
    assert dledger._ask_linked(replaced, 4, 3, clock.now + 15.0)[1] == LEARNER
    assert replaced.asked == 3


def test_the_link_is_not_waited_for_beyond_the_time_or_without_a_wait(clock):
    for wait_s, asked in ((0.0, 1), (3.0, 4)):
        leader = Leader(clock, linked_at=1e9)
        with pytest.raises(HastoreError, match="node 4 is not linked with this node; start it"):
            dledger._add(leader, 4, None, wait_s, False)
        assert leader.asked == asked
    with pytest.raises(HastoreError, match="node 2 is a member already"):
        dledger._add(Leader(clock, linked_at=0.0), 2, None, 15.0, False)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([1], "warning: node 1 is the only member: no other node has a copy"),
        ([1, 2], "warning: node 1, 2 are the only members: a put needs both"),
        ([1, 2, 3], ""),
    ],
)
def test_a_removal_says_that_few_are_left(monkeypatch, capsys, members, text):
    status = {**MEMBER, "members": members}
    monkeypatch.setattr(dledger.Ask, "request", lambda *_given: (None, status))
    dledger.remove_command.main(
        ["-c", "node1.yaml", "--node", "4", "--json"], standalone_mode=False
    )
    assert capsys.readouterr().err.startswith(text)


def test_of_two_operators_each_gets_his_own_outcome(clock, monkeypatch, tmp_path):
    """The node takes one request each 200 ms; the second must not replace the first's file."""
    path = tmp_path / "n1.yaml"
    text = (ROOT / "conf" / "dledger-n0.yaml").read_text()
    path.write_text(text.replace("root: data/dledger1", f"root: {tmp_path}"))
    config = load_config(str(path))
    assert config.store.root == str(tmp_path)
    (tmp_path / "hastore").mkdir()
    file = pathlib.Path(request_path(config.store.root))
    first = dledger._write(config, MEMBER, "remove", 2, None, 10.0)
    with pytest.raises(HastoreError, match="has not taken another administrator's request"):
        dledger._write(config, MEMBER, "remove", 3, None, 10.0)
    assert first in file.read_text() and 10.0 < clock.now < 11.0

    def take_it(seconds):
        file.unlink()

    monkeypatch.setattr(dledger.time, "sleep", take_it)
    second = dledger._write(config, MEMBER, "remove", 3, None, 10.0)
    assert second in file.read_text()
    ended = [{"id": first, "outcome": "DONE"}, {"id": second, "outcome": "REFUSED", "reason": "no"}]
    status = {**MEMBER, "request": ended[-1], "requests": ended}
    monkeypatch.setattr(dledger, "ask_node", lambda _config: status)
    assert dledger._wait(config, first, 10.0) is status
    with pytest.raises(HastoreError, match="REFUSED: no"):
        dledger._wait(config, second, 10.0)


def test_a_leader_whose_disk_hangs_is_not_waited_for(clock, monkeypatch):
    """What takes a request there waits for the disk; after 10 s nothing would be known."""
    path = str(ROOT / "conf" / "dledger-n0.yaml")
    status = {**MEMBER, "sync_hangs": True, "request": {"id": "earlier", "outcome": "DONE"}}
    monkeypatch.setattr(dledger, "ask_node", lambda _config: status)
    monkeypatch.setattr(dledger, "refuse_other_file", lambda *_: None)
    with pytest.raises(HastoreError, match=r"its disk hangs, .*within 60 s, it may still"):
        dledger._wait(load_config(path), "given", 10.0)
    with pytest.raises(HastoreError, match="its disk hangs, so it takes no request"):
        dledger.request(path, "transfer", 2, 10.0)
    monkeypatch.setattr(remote_nodes, "ask_statuses", lambda _config: ({1: status}, {}))
    with pytest.raises(HastoreError, match="its disk hangs, so it takes no request"):
        remote_nodes.ask_leader(path, "transfer", 2, None)
    assert clock.now == 0.0


@pytest.mark.parametrize(
    ("members", "learners", "leaving", "told"),
    [
        ([1, 2, 3], [], [], None),
        ([1, 2, 3], [4], [], None),
        ([1, 2, 3], [4], [3], "node 4 is replacing node 3 already"),
        ([1, 2, 3, 4], [], [3], "node 4 is replacing node 3 already"),
        ([1, 2], [4], [], "node 4 is a learner already, and node 3 no member"),
        ([1, 2, 4], [], [], "node 4 is a member already, and node 3 none any more"),
    ],
)
def test_a_replacement_that_is_given_again_goes_on_where_it_is(members, learners, leaving, told):
    """A dead member is removed before the other becomes one: a repeat was refused then."""
    status = {"members": members, "learners": [{"node": n} for n in learners], "leaving": leaving}
    assert remote_nodes._already(status, "replace", 3, 4) == told


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({}, None),
        ({2: MEMBER}, "node 2 of the group answers, and nothing was changed: if a majority"),
        ({2: MEMBER, 3: MEMBER}, "node 2, 3 of the group answers"),
        ({2: {**MEMBER, "members": []}}, None),
        ({2: {**MEMBER, "group": "another"}}, None),
        ({2: None}, "address of node 2 does not accept this command, .* out of `nodes` in FILE"),
    ],
    ids=["nobody", "one", "two", "an empty store", "another group", "a stranger"],
)
def test_a_store_is_recovered_if_no_other_node_of_the_group_answers(monkeypatch, found, text):
    config = load_config(str(ROOT / "conf" / "dledger-n0.yaml"))
    names = {"cluster": config.cluster, "group": config.group}

    def ask(_config, number, _timeout_s):
        if number in found and found[number] is None:
            raise NotAuthenticatedError("no certificate")
        return names | found[number] if number in found else None

    monkeypatch.setattr(dledger, "ask_own_status", ask)
    if text is None:
        dledger.refuse_living("FILE", config)
    else:
        with pytest.raises(HastoreError, match=text):
            dledger.refuse_living("FILE", config)
