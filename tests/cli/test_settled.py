"""When a node follows: how `status` shows that it does not, and when a demotion has ended."""

import contextlib
import os
import select
import signal
import time
import types

import pytest

from hastore.cli import dledger, flip
from hastore.cli.common import LONGEST_S, Seconds
from hastore.cli.own_node import best_informed
from hastore.cli.status import (
    delayed_text,
    no_master_text,
    not_following_text,
    show_learner,
    show_slave,
)
from hastore.config.file import load_config
from hastore.errors import HastoreError
from tests.cli.kit import hastore
from tests.process.harness import ROOT, Group

SUPERSEDED = "superseded by node 2 (epoch 131074); this node follows; node 2 is the master"


@pytest.mark.parametrize(
    ("reason", "headless", "shown"),
    [
        ("this node is a slave; node 2 is the master", False, False),
        ("this node is a slave", False, False),  # it follows a RocketMQ master
        ("this node is a slave; node 2 refuses this node as its slave: why", False, True),
        ("this node is a slave; no master is open; no answer from node 2 at A (why)", False, True),
        ("this node is a slave; no master is open; no answer from node 2 at A (why)", True, False),
        ("this node is a slave; node 2 refuses this node as its slave: why", True, True),
        ("the store is closed: a sync of bytes [0, 4096) failed", False, True),
    ],
)
def test_a_slave_that_does_not_follow_is_shown_with_its_reason(reason, headless, shown):
    text = not_following_text({"role": "SLAVE", "reason": reason}, headless=headless)
    assert text == (reason if shown else None)


@pytest.mark.parametrize("role", ["SYNC_MASTER", "ASYNC_MASTER"])
def test_a_node_that_waits_to_be_master_is_not_a_slave_without_a_master(role):
    status = {"role": role, "reason": "waiting to be master: why"}
    assert not_following_text(status, headless=False) is None


def test_status_shows_why_the_master_refuses_a_slave(tmp_path):
    with Group(tmp_path, 3) as group:
        group.start()
        group[3].kill()
        group[3].store.rename(tmp_path / "aside")
        group[3].start("slave")
        group[3].wait_status(lambda s: "refuses" in (s["reason"] or ""), "the slave is refused")
        done = hastore("status", "--bootstrap", ",".join(group.bootstrap))
    lines = [line for line in done.stdout.splitlines() if line.startswith("node 3: ")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout
    assert "node number 3 is known with another store" in lines[0]


def test_a_demotion_is_over_once_the_node_follows_the_edited_file(tmp_path, monkeypatch):
    """A superseded node is a SLAVE before its file says so: the role alone is not enough."""
    group = Group(tmp_path)
    with group:
        group[1].edit_role("SYNC_MASTER")
        before = {
            "node": 1, "role": "SLAVE", "epoch": 131074, "max_offset": 0, "writable": False,
            "cluster": group[1].settings["cluster"], "group": group[1].settings["group"],
            "reason": SUPERSEDED, "problems": [SUPERSEDED],
        }  # fmt: skip
        after = before | {
            "reason": "this node is a slave; node 2 is the master",
            "problems": ["the changed configuration is not followed: why"],
        }
        answers = iter([before, before, before, after])
        monkeypatch.setattr(flip, "ask_node", lambda config: next(answers))
        assert flip.demote(str(group[1].path)) == after
        assert next(answers, None) is None


@pytest.mark.parametrize("given", ["nan", "-1", "0"])
def test_an_impossible_wait_is_wrong_usage_and_nothing_is_edited(tmp_path, given):
    """With such a patience `promote` gave up at once, after it had edited the file."""
    group = Group(tmp_path)
    with group:
        path = str(group[2].path)
        for command in (("promote", "-c", path), ("demote", "-c", path)):
            done = hastore(*command, "--patience", given)
            assert done.returncode == 2 and "'--patience'" in done.stderr
        assert group[2].file_role == "SLAVE"
        api = ("--bootstrap", group[2].api)
        for command in (("status", *api), ("produce", *api, "t")):
            done = hastore(*command, "--timeout", given, stdin=b"")
            assert done.returncode == 2 and "'--timeout'" in done.stderr, done.stderr
        if given != "0":
            assert hastore("status", *api, "--wait", given).returncode == 2


def test_a_wait_without_an_end_is_a_long_one():
    """A time that the system does not take ended `top` and `--watch` with a stack."""
    longest = Seconds().convert("inf", None, None)
    assert longest == Seconds().convert("1e300", None, None) == LONGEST_S
    assert Seconds().convert("2.5", None, None) == 2.5
    end, begin = os.pipe()
    try:  # what `top` and --watch call
        assert select.select([], [begin], [], longest)[1] == [begin]
        with pytest.raises(TimeoutError), interrupted_after(0.1):
            time.sleep(longest)
    finally:
        os.close(end)
        os.close(begin)


@contextlib.contextmanager
def interrupted_after(seconds):
    """Raise TimeoutError in the main thread after so long."""

    def end(*_given):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def elector(node, members=(1, 2, 3), *, term=4, leader=None, remembers=True, reason="why"):
    """Return the status of a node of mode dledger that takes no puts."""
    return {
        "mode": "dledger", "node": node, "writable": False, "term": term, "leader": leader,
        "members": list(members), "remembers": remembers, "reason": reason,
    }  # fmt: skip


def new(node):
    """Return the status of a node that waits for the first start of its group."""
    return elector(node, (), term=0, remembers=False)


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ([new(1)], "the group has not begun: see what its nodes wait for"),
        ([new(1), new(2)], "the group has not begun: see what its nodes wait for"),
        ([new(1), new(2), elector(3, term=0)], "3 of the 3 members answer"),
        ([elector(1)], "1 of the 3 members answer, and an election needs 2"),
        ([elector(1), elector(2, (1, 2), term=3)], "2 of the 3 members answer"),
        ([elector(1, leader=2)], "node 2 leads term 4: it does not answer"),
        ([elector(2, leader=2, reason="replay")], "node 2 leads term 4: replay"),
        (
            [elector(1, remembers=False), elector(2, remembers=False), elector(3)],
            "node 1, 2 lost what it had, so no majority of the 3 members remembers its votes",
        ),
        ([elector(1, remembers=False), elector(2)], "2 of the 3 members answer"),
    ],
)  # fmt: skip
def test_status_says_why_a_group_has_no_leader(statuses, text):
    assert f"no node takes writes; {text}" in no_master_text(statuses)


@pytest.mark.parametrize(
    "idle", [elector(2, remembers=False), new(2)], ids=["lost its disk", "has not joined again"]
)
def test_a_node_whose_vote_does_not_count_yet_is_no_part_of_a_majority(idle):
    """"2 of 3 answer, see their reasons" let nobody start the third node."""
    silent = [{"node": 3, "silence": "refused", "address": "a", "reason": "no answer"}]
    assert no_master_text([elector(1), idle], silent) == (
        "no node takes writes; 2 of the 3 members answer, but the vote of node 2 does not count "
        "yet, and an election needs 2 that reach each other: start node 3, or look at the way to it"
    )


def test_a_removed_node_that_runs_still_is_not_asked_who_the_members_are():
    """It is of the same term, and its log does not say that it was removed."""
    removed = elector(1, (1, 2, 3), leader=None) | {"committed_index": 7, "ledger_end_index": 7}
    later = {"committed_index": 8, "ledger_end_index": 8}
    leader = elector(3, (2, 3), leader=3) | later | {"ledger_end_index": 9}
    assert best_informed([removed, elector(2, (2, 3), leader=3) | later, leader]) is leader
    dead = [removed, elector(2, (2, 3)) | {"committed_index": 7, "ledger_end_index": 8}]
    assert best_informed(dead)["members"] == [2, 3]
    assert best_informed([leader, elector(2, (2, 3), term=5)])["term"] == 5


@pytest.mark.parametrize(
    ("slave", "text"),
    [
        ({"ack_index": 7, "state": "COMMIT", "in_sync": True}, "in sync, entry 7"),
        ({"ack_index": -1, "state": "NO_LINK"}, "not in sync, no link, no report yet"),
        ({"ack_index": -1, "state": "COMPARE", "lag_bytes": 9}, "not in sync, no report yet"),
        (
            {"ack_index": 7, "state": "NO_LINK", "lag_bytes": 9},
            "not in sync, no link, entry 7, 9 bytes behind",
        ),
        (
            {"ack_index": 7, "state": "APPEND", "lag_bytes": 9, "full": True},
            "not in sync, its disk is full, entry 7, 9 bytes behind",
        ),
    ],
)
def test_a_follower_is_shown_with_what_the_leader_knows_of_it(slave, text, capsys):
    known = {"node": 2, "address": "a", "classic": False, "ack_offset": None, "lag_bytes": 0}
    show_slave(1, known | {"in_sync": False} | slave)
    assert capsys.readouterr().out == f"node 1 <- follower 2 (a): {text}\n"


@pytest.mark.parametrize(
    ("ack_index", "waits_for", "leaving", "words"),
    [
        (-1, "there is no link to it: start it", [], ": no report yet; there is no link to it"),
        (7, None, [], ": entry 7, 3 entries (1,200 bytes) behind; becomes a member now"),
        (7, "it lacks 3 entries", [2], ", replaces node 2: entry 7, 3 entries (1,200 bytes) beh"),
    ],
)
def test_status_shows_a_learner_and_what_it_waits_for(ack_index, waits_for, leaving, words, capsys):
    learner = {
        "node": 4, "address": "127.0.0.1:1", "ack_index": ack_index, "lag_entries": 3,
        "lag_bytes": 1_200, "waits_for": waits_for,
    }  # fmt: skip
    show_learner({"node": 1, "leaving": leaving}, learner)
    show_learner({"node": 2, "leaving": leaving}, {"node": 4})  # what a follower knows
    assert capsys.readouterr().out.startswith(f"node 1 <- learner 4 (127.0.0.1:1){words}")


def waited(monkeypatch, *statuses, others=None):
    """Wait for node 4 as `hastore dledger replace --node 3 --by 4 --wait 1` does; `others` are the
    statuses of the nodes that were not asked first.
    """
    known = {} if others is None else others
    monkeypatch.setattr(dledger, "ask_own_status", lambda _config, number, _s: known.get(number))
    config = load_config(str(ROOT / "conf" / "dledger-n0.yaml"))
    answers, clock = list(statuses), types.SimpleNamespace(now=0.0)

    def answer(_config):
        if len(answers) == 1:
            clock.now = 1.0  # the wait is over once all has been answered, and not before
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(dledger, "ask_node", answer)
    time = types.SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _s: None)
    monkeypatch.setattr(dledger, "time", time)
    return dledger.wait_member(config, 4, 3, 0.2)


def test_a_command_waits_until_the_node_is_a_member_and_the_other_is_none(monkeypatch):
    lacks = {"learners": [{"node": 4, "waits_for": "it lacks 9 entries"}], "members": [1, 2, 3]}
    first = {"learners": [], "members": [1, 2, 3, 4]}
    done = {"learners": [], "members": [1, 2, 4]}
    told = {**lacks, "learners": [{"node": 4}]}  # by a node that follows now
    assert waited(monkeypatch, None, lacks, told, first, done) == done
    for statuses, words in (
        ((lacks,), r"within 0.2 s \(it lacks 9 entries\); it still will"),
        ((first,), "node 3 is still a member"),
        ((None,), "does not answer, and no other node leads"),
        ((lacks, None), "does not answer, and no other node leads"),
        ((lacks, {"learners": [], "members": [1, 2, 3]}), "node 4 is no learner any more"),
    ):
        with pytest.raises(HastoreError, match=words):
            waited(monkeypatch, *statuses)


def test_a_command_waits_for_a_new_leader_too(monkeypatch):
    """The leader that was asked has died; the new one goes on with the addition."""
    lacks = {"learners": [{"node": 4, "waits_for": "it lacks 9 entries"}], "members": [1, 2, 3]}
    done = {"node": 2, "leader": 2, "term": 5, "learners": [], "members": [1, 2, 4]}
    older = {"node": 1, "leader": 1, "term": 4, "learners": [], "members": [1, 2, 3]}
    follows = {**older, "node": 3, "leader": 2, "term": 5}
    others = {1: older, 2: done, 3: follows}
    assert waited(monkeypatch, lacks, None, others=others) == done
    few = {**done, **lacks, "learners": [{"node": 4, "waits_for": "too few members work"}]}
    with pytest.raises(HastoreError, match=r"\(too few members work\); it still will"):
        waited(monkeypatch, lacks, None, others={1: older, 2: few, 3: follows})
    with pytest.raises(HastoreError, match="no other node leads"):
        waited(monkeypatch, lacks, None, others={3: follows})


def test_the_table_says_how_many_delayed_messages_wait_on_the_node_that_delivers_them():
    counts = {"waiting": 1_210, "levels": {"3": 1_200, "18": 10}, "delivered": 0, "lost": 0}
    master = {"node": 1, "writable": True, "delayed": counts}
    assert delayed_text(master) == (
        "delayed messages that wait: 1,210 (level 3: 1,200, level 18: 10)"
    )
    assert delayed_text(master | {"writable": False}) is None
    assert delayed_text(master | {"delayed": counts | {"waiting": 0, "levels": {}}}) is None
    assert delayed_text({"node": 1, "writable": True}) is None, "an earlier version"
