"""`hastore flip`: the steps, what it refuses, and what it leaves when something fails."""

import json
import threading

import pytest

from hastore import Producer
from hastore.cli import classic_flip, group_files
from hastore.client.consumer.admin import Admin
from hastore.config.model import Role
from hastore.errors import HastoreError, NotAuthenticatedError, UsageError
from hastore.testing import group as real_group
from tests.cli.fake_group import FakeGroup
from tests.cli.kit import hastore
from tests.ha.nodes import wait_for


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a fake group that the command asks; it waits a moment only where it waits in vain."""
    monkeypatch.setattr(group_files, "POLL_S", 0.0)
    monkeypatch.setattr(classic_flip, "REFUSED_AFTER_S", -1.0)
    monkeypatch.setattr(classic_flip, "CALL_OFF_S", 0.05)

    def made(count=2, **more):
        fakes = FakeGroup(tmp_path, count, **more)
        monkeypatch.setattr(group_files, "ask_own_status", fakes.status)
        return fakes

    return made


def flip(fakes, to, *more, file=1, timeout="0.05"):
    done = hastore(
        "flip", "-c", str(fakes[file].path), "--to", str(to), "--timeout", timeout, "--json", *more
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def roles(fakes):
    return [one.role for one in fakes.nodes.values()]


@pytest.mark.parametrize("file", [1, 2], ids=["the master's file", "the slave's file"])
def test_a_flip_and_the_way_back(make, file):
    fakes = make()
    fakes[1].end = 1_500  # what only the master has
    code, steps, problems = flip(fakes, 2, file=file)
    assert code == 0, problems
    assert [one["step"] for one in steps] == [
        "found", "in sync", "asked", "promoted", "demoted", "whole", "complete",
    ]  # fmt: skip
    assert (fakes.master, roles(fakes)) == (2, ["SLAVE", "SYNC_MASTER"])
    assert fakes[2].flags["needed_node"] == 1, "nothing of the master is left behind"
    last = steps[-1]
    assert (last["node"], last["from"], last["role"], last["writable"]) == (
        2, 1, "SYNC_MASTER", True,
    )  # fmt: skip
    assert last["max_offset"] == 1_500 and last["epoch"] == fakes.epoch
    assert fakes[1].path.read_text().startswith("# mine\n")
    code, _, problems = flip(fakes, 1, file=file)
    assert (code, fakes.master, roles(fakes)) == (0, 1, ["SYNC_MASTER", "SLAVE"]), problems


def test_the_new_master_has_the_role_of_the_old_one(make):
    fakes = make(role="ASYNC_MASTER")
    assert flip(fakes, 2)[0] == 0
    assert roles(fakes) == ["SLAVE", "ASYNC_MASTER"]


def test_for_people_each_step_is_a_line(make):
    fakes = make()
    done = hastore("flip", "-c", str(fakes[1].path), "--to", "2")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("node 1 is the SYNC_MASTER of epoch 65537; node 2 follows it, in")
    assert lines[-1].startswith("node 2 takes puts, its log ends at 1,000 (")
    assert done.returncode == 0 and len(lines) == 7


def test_only_a_check_changes_nothing(make):
    fakes = make(3)
    code, steps, _ = flip(fakes, 2, "--dry-run")
    assert code == 0 and fakes.master == 1 and roles(fakes) == ["SYNC_MASTER", "SLAVE", "SLAVE"]
    told = [one["text"] for one in steps if one["step"] == "would"]
    assert told[0] == "would make node 2 the master" and "node 1 a slave in the file" in told[1]


def test_a_check_refuses_a_node_that_could_take_no_puts_and_tells_other_problems(make):
    fakes = make()
    fakes[2].more["problems"] = ["the log's disk is slow"]
    code, steps, _ = flip(fakes, 2, "--dry-run")
    assert code == 0 and "node 2 has a problem: the log's disk is slow" in str(steps)
    replay_stopped(fakes)
    code, steps, problems = flip(fakes, 2, "--dry-run")
    assert code == 1 and not steps and "replay stopped" in problems and "make room" in problems
    assert flip(fakes, 1, "--dry-run")[0] == 0, "the master itself is no such node"


def test_the_waits_say_what_they_wait_for(make, monkeypatch):
    monkeypatch.setattr(classic_flip, "TELL_AFTER_S", 0.0)
    fakes = make()
    fakes[2].refusal = "this node's disk has 9 bytes free"
    code, steps, _ = flip(fakes, 2)
    waits = [one["text"] for one in steps if one["step"] == "waits"]
    assert code == 1 and len(waits) == 1
    assert waits[0].startswith("node 2: ") and "9 bytes free" in waits[0]
    (asked,) = (one["text"] for one in steps if one["step"] == "asked")
    assert "becomes that once it can, also if this command is killed" in asked
    assert f"`hastore flip -c {fakes[1].path} --to 1`" in asked
    behind(fakes)
    _, steps, _ = flip(fakes, 2)
    (waits,) = (one["text"] for one in steps if one["step"] == "waits")
    assert waits.startswith("node 2 is 134,217,728 bytes behind node 1; the flip goes on once")


def test_it_is_the_master_already(make):
    fakes = make()
    code, steps, _ = flip(fakes, 1)
    assert code == 0 and "already" in steps[1]["text"]
    assert fakes.epoch == 1 << 16 | 1, "no new epoch"


def unclean(fakes):
    fakes[2].unclean = True


def gone(fakes):
    fakes[2].alive = False


def follows_rocketmq(fakes):
    fakes[2].more["classic_master"] = "10.0.0.1:10912"


def replay_stopped(fakes):
    fakes[2].more["problems"] = ["replay stopped at offset 7: No space left on device"]


def disk_full(fakes):
    spare = f"{fakes[2].store}/hastore/spare: no room for 8388608 bytes; free space on its disk"
    fakes[2].more["problems"] = [spare]


def behind(fakes):
    fakes.lag[2] = 1 << 27


def apart(fakes):
    fakes.apart.add(frozenset({1, 2}))


def resumes(fakes):
    fakes[1].state = "resuming"


def no_master(fakes):
    fakes[1].state, fakes[3].alive = "following", False


def is_another(fakes):
    fakes[2].more["group"] = "other"


REFUSED = [
    (unclean, 1, "let it follow the master first"),
    (gone, 1, "start it first"),
    (follows_rocketmq, 1, "follows the RocketMQ master 10.0.0.1:10912"),
    (replay_stopped, 1, "could take no puts as the master: replay stopped at offset 7: No space"),
    (disk_full, 1, "no room for 8388608 bytes; free space on its disk; nothing was changed: make"),
    (behind, 1, "wait until it is in sync"),
    (apart, 1, "does not follow node 1, the master"),
    (resumes, 1, "try again in a moment"),
    (no_master, 1, "a flip needs the master's answer"),
    (is_another, 2, "correct `nodes`"),
]


@pytest.mark.parametrize(("fault", "code", "text"), REFUSED)
def test_what_is_refused_before_anything_is_changed(make, fault, code, text):
    fakes = make(3)
    fault(fakes)
    before = roles(fakes)
    found, _, problems = flip(fakes, 2)
    assert found == code and text in problems and problems.count("\n") == 1
    assert roles(fakes) == before and not (fakes[2].store / "hastore" / "once.json").exists()


@pytest.mark.parametrize("master", ["is none", "takes no puts"])
def test_without_a_master_that_takes_puts_a_node_whose_disk_is_full_may_become_it(make, master):
    """Its last file has room for some messages; without it the group takes none."""
    fakes = make()
    if master == "is none":
        fakes[1].state = "following"
    else:
        why = "the store is closed: a sync of bytes [0, 100) failed"
        fakes[1].more.update(writable=False, reason=why)
    disk_full(fakes)
    code, steps, problems = flip(fakes, 2)
    assert code == 0 and fakes.master == 2, problems
    assert "node 2 has a problem" in str(steps)


def test_wrong_usage(make, tmp_path):
    fakes = make()
    assert flip(fakes, 7)[0] == 2 and "its nodes are 1, 2" in flip(fakes, 7)[2]
    assert hastore("flip", "-c", str(tmp_path / "no.yaml"), "--to", "1").returncode == 2
    assert hastore("flip", "-c", str(fakes[1].path)).returncode == 2
    both = hastore("flip", "-c", str(fakes[1].path), "--to", "2", "--bootstrap", "127.0.0.1:1")
    assert both.returncode == 2 and "not both" in both.stderr


def test_the_file_of_the_wanted_node_must_be_here(make):
    fakes = make()
    fakes.hidden = {2}
    code, _, problems = flip(fakes, 2)
    assert code == 2 and "hastore flip -c /elsewhere/node2.yaml --to 2` there" in problems
    assert fakes.master == 1


def test_a_file_of_the_old_master_that_is_elsewhere_is_named(make):
    fakes = make()
    fakes.hidden = {1}
    code, steps, problems = flip(fakes, 2, file=2)
    assert code == 0, problems
    left = next(one["text"] for one in steps if one["step"] == "left")
    assert "hastore demote -c /elsewhere/node1.yaml" in left


def test_a_refused_promotion_is_called_off_while_the_old_master_goes_on(make):
    fakes = make()
    fakes[2].refusal = "replay stopped"
    code, steps, problems = flip(fakes, 2)
    assert code == 1 and "replay stopped" in problems
    assert "called off: node 1 goes on as the master" in problems
    assert (fakes.master, roles(fakes)) == (1, ["SYNC_MASTER", "SLAVE"])
    fakes[2].final = True
    code, _, problems = flip(fakes, 2)
    assert code == 1 and "called off" in problems and fakes.master == 1


@pytest.mark.parametrize("number", [1, 2], ids=["the old master", "the wanted node"])
def test_a_node_that_cannot_follow_its_registry_says_so(make, monkeypatch, number):
    fakes = make()
    lost = "the registry zk://zoo:2181 is out of reach: no answer; the node keeps its role, SLAVE"
    status = fakes.status

    def without(config, node, timeout_s):
        found = status(config, node, timeout_s)
        if node == number and found is not None:
            found["problems"] = [*found["problems"], lost, found["reason"]]
        return found

    if number == 2:
        fakes[2].refusal = "this node is a slave"
    monkeypatch.setattr(group_files, "ask_own_status", without)
    code, _, problems = flip(fakes, 2)
    assert code == 1 and lost in problems, problems


def test_a_flip_that_cannot_be_called_off_says_that_it_goes_on(make, monkeypatch):
    """The node does not answer any more, and its file makes it the master when it does again."""
    fakes = make()
    fakes[2].refusal = "replay stopped"
    real = group_files.FilePlace.change

    def change(place, role):
        if role is Role.SLAVE:
            raise HastoreError("node 2: no answer; its role was not changed")
        real(place, role)

    with monkeypatch.context() as patched:
        patched.setattr(group_files.FilePlace, "change", change)
        code, _, problems = flip(fakes, 2)
    assert code == 1 and "replay stopped" in problems and "no answer" in problems
    assert "Node 1 is still the master, and node 2 takes over as soon as it can" in problems
    assert problems.count(f"hastore flip -c {fakes[1].path} --to ") == 2
    code, _, problems = flip(fakes, 1)  # what it says
    assert code == 0 and roles(fakes) == ["SYNC_MASTER", "SLAVE"], problems


def test_without_the_masters_answer_nobody_is_promoted(make):
    """The wanted node follows, and then does not reach the master any more."""
    fakes = make(3)

    def cut(number):
        if fakes[2].role != "SLAVE":
            fakes.apart.add(frozenset({1, 2}))

    fakes.on_ask = cut
    code, _, problems = flip(fakes, 2)
    assert code == 1 and "waiting for node 1" in problems and "called off" in problems
    assert fakes.master == 1 and roles(fakes)[1] == "SLAVE"


@pytest.fixture
def interrupted(make):
    """A flip that stopped when the old master had promised, and the new one was not ready."""
    fakes = make()
    fakes[2].refusal = "replaying the log"

    def fence(number):
        if fakes[2].state == "promoting":
            fakes[1].state = "following"

    fakes.on_ask = fence
    code, _, problems = flip(fakes, 2)
    assert code == 1 and fakes.master is None
    assert "Perhaps no node takes puts now" in problems and "with --to 1" in problems
    fakes.on_ask = lambda number: None
    return fakes


def test_the_same_command_completes_an_interrupted_flip(interrupted):
    interrupted[2].refusal = None
    code, _, problems = flip(interrupted, 2)
    assert code == 0, problems
    assert (interrupted.master, roles(interrupted)) == (2, ["SLAVE", "SYNC_MASTER"])


def test_the_old_masters_number_undoes_an_interrupted_flip(interrupted):
    code, steps, problems = flip(interrupted, 1)
    assert code == 0, problems
    assert "called off" in [one["step"] for one in steps]
    assert (interrupted.master, roles(interrupted)) == (1, ["SYNC_MASTER", "SLAVE"])


def test_a_candidate_that_tries_again_with_another_epoch_is_no_other_operator(interrupted):
    """Its promise grows each second. The flip back took that for an order of somebody else."""

    def again(number):
        interrupted[2].more["promised_epoch"] = interrupted.epoch + (interrupted.asked << 16)

    interrupted.on_ask = again
    code, steps, problems = flip(interrupted, 1)
    assert code == 0, problems
    assert "called off" in [one["step"] for one in steps]
    assert (interrupted.master, roles(interrupted)) == (1, ["SYNC_MASTER", "SLAVE"])


@pytest.mark.parametrize("at", range(1, 19))
@pytest.mark.parametrize("other", [2, 3], ids=["the same node", "another node"])
def test_another_operators_master_stays_the_master(make, at, other):
    """At any question of the flip, another one takes place: the group is left with a master."""
    fakes = make(3)
    fakes[1].end = 1_500

    def promoted(number):
        if fakes.asked == at and fakes[other].role == "SLAVE":
            fakes.promote(other)

    fakes.on_ask = promoted
    code, _, problems = flip(fakes, 2, timeout="5")
    assert fakes.master in (2, other) and fakes.asked < 40, "it waits for nothing in vain"
    assert code == 0 or f"another operator has made node {other} the master" in problems


def test_a_promotion_that_succeeds_as_it_is_called_off_leaves_a_master(make):
    fakes = make(3)
    fakes[3].refusal = "replaying the log"
    fakes.promote(3)

    def slave(number):
        if fakes[3].role == "SLAVE":  # it had just opened its epoch
            fakes[1].state = "following"

    fakes.on_ask = slave
    code, _, problems = flip(fakes, 2, timeout="5")
    assert (code, fakes.master) == (0, 2), problems


@pytest.mark.parametrize("at", range(1, 25))
def test_it_may_be_killed_anywhere_and_run_again(make, at):
    """After any number of questions: the group has a master then, and the files agree."""
    fakes = make(3)

    def die(number):
        if fakes.asked == at:
            raise KeyboardInterrupt

    fakes.on_ask = die
    code, _, problems = flip(fakes, 2, timeout="5")
    assert code in (0, 130) and (code == 0 or "again to complete the flip" in problems)
    fakes.on_ask = lambda number: None
    to = 2 if at % 2 else 1
    code, _, problems = flip(fakes, to, timeout="5")
    assert code == 0, problems
    assert fakes.master == to
    assert roles(fakes) == ["SYNC_MASTER" if n == to else "SLAVE" for n in fakes.nodes]


@pytest.mark.parametrize("kind", [NotAuthenticatedError, UsageError])
def test_a_node_that_refuses_in_the_middle_leaves_no_doubt_of_the_state(make, kind):
    """Its own text alone would not say that another node is the master now."""
    fakes = make(3)

    def refuse(number):
        if number == 3 and fakes.master == 2:
            raise kind("node 3 does not know `ops`")

    fakes.on_ask = refuse
    fakes[3].path.write_text(fakes[3].path.read_text().replace("role: SLAVE", "role: SYNC_MASTER"))
    fakes[3].read = "SYNC_MASTER"
    code, _, problems = flip(fakes, 2)
    assert code == 1 and "node 3 does not know `ops`; node 2 is the master, or becomes" in problems
    assert "--to 2` again to complete the flip, or with --to 1 to undo it" in problems
    fakes.on_ask = lambda number: None
    assert flip(fakes, 2)[0] == 0


@pytest.mark.parametrize("kind", [NotAuthenticatedError, UsageError])
def test_a_node_that_refuses_before_anything_was_changed_says_that_alone(make, kind):
    fakes = make(3)
    fakes.on_ask = lambda number: refuse(number)

    def refuse(number):
        if number == 3:
            raise kind("node 3 does not know `ops`")

    code, _, problems = flip(fakes, 2)
    assert code in (1, 2) and "becomes" not in problems and fakes.master == 1


def test_messages_that_were_cut_off_all_the_same_are_an_error(make):
    fakes = make()

    def cut(number):
        if fakes.master == 2:
            fakes[1].cuts = [{"id": 1, "messages": 3}]

    fakes.on_ask = cut
    code, _, problems = flip(fakes, 2)
    assert code == 1 and "3 messages were cut off the log of node 1" in problems
    assert "hastore rescued list -c" in problems


def test_a_node_that_was_behind_before_does_not_hold_up_the_flip(make):
    fakes = make(4)
    fakes.lag[3] = 1 << 30
    fakes[4].alive = False
    code, steps, problems = flip(fakes, 2)
    assert code == 0 and fakes.master == 2, problems
    assert "node 4 does not answer" in steps[1]["text"]


def test_an_old_master_whose_store_is_closed_does_not_hold_up_the_flip(make):
    fakes = make(3)
    why = "the store is closed: a sync of bytes [0, 100) failed"
    fakes[1].more.update(writable=False, reason=why)

    def cut_off(number):
        if fakes.master == 2:
            fakes.apart.add(frozenset({1, 2}))

    fakes.on_ask = cut_off
    code, steps, problems = flip(fakes, 2)
    assert code == 0 and fakes.master == 2, problems
    (left,) = (one["text"] for one in steps if one["step"] == "left")
    assert "node 1 follows once it is restarted" in left


def test_a_slave_that_does_not_come_back_is_an_error_that_says_who_is_master(make):
    fakes = make()

    def lose(number):
        if fakes.master == 2:
            fakes.apart.add(frozenset({1, 2}))

    fakes.on_ask = lose
    code, _, problems = flip(fakes, 2)
    assert code == 1
    assert "node 2 is the master, but node 1 is not in sync with it yet" in problems


def test_a_real_pair_flips_under_load_without_a_loss():
    """Puts that wait for the slave, and puts that wait for the master alone."""
    with real_group() as pair:
        stop, sent = threading.Event(), []

        def put(acks):
            with Producer(pair.bootstrap, acks=acks, delivery_timeout_s=60) as producer:
                number = 0
                while not stop.is_set():
                    bodies = [f"{acks} {number + n}".encode() for n in range(50)]
                    number += len(bodies)
                    futures = [producer.send("t", body) for body in bodies]
                    sent.extend(one.result().msg_id for one in futures)

        threads = [threading.Thread(target=put, args=(acks,)) for acks in ("all", 1)]
        for one in threads:
            one.start()
        try:
            file, nodes = ["-c", str(pair[1].config)], ["--bootstrap", ",".join(pair.bootstrap)]
            for to, where in ((2, file), (1, nodes)):
                least = len(sent) + 200
                wait_for(lambda: len(sent) >= least, "puts between the flips")  # noqa: B023
                done = hastore("flip", *where, "--to", str(to))
                assert done.returncode == 0, done.stderr
        finally:
            stop.set()
            for one in threads:
                one.join()
        assert pair[1].status()["cut_messages"] == pair[2].status()["cut_messages"] == 0
        assert len(sent) == len(set(sent))

        def stored():
            with Admin(pair.bootstrap) as admin:
                return sum(end - first for first, end in admin.topics()["t"].values())

        wait_for(lambda: stored() >= len(sent), "replay of all messages")
        assert stored() == len(sent), "each message once"


def test_a_real_leader_hands_over():
    with real_group("dledger") as made:
        leader = made.master
        other = next(node for node in made if node is not leader)
        done = hastore("flip", "-c", str(other.config), "--to", str(other.number), "--json")
        assert done.returncode == 0, done.stderr
        assert made.wait_master() is other
        steps = [json.loads(line) for line in done.stdout.splitlines()]
        assert steps[-1]["step"] == "complete" and steps[-1]["from"] == leader.number
        again = hastore("flip", "-c", str(other.config), "--to", str(other.number))
        assert again.returncode == 0 and "already" in again.stdout
