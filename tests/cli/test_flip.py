"""`hastore promote` and `hastore demote`: the edited file, once.json, the wait, refusals."""

import errno
import json
import os
import pathlib
from types import SimpleNamespace

import pytest

from hastore.cli import flip as flip_command
from hastore.cli import own_node
from hastore.cli.own_node import FilePlace
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_config
from hastore.config.model import Role
from hastore.errors import ConfigError
from hastore.fs import private_files
from hastore.fs.filesystem import REAL
from hastore.server.role_source import OneShotFlags
from tests.cli.fake_group import FakeGroup
from tests.cli.kit import hastore
from tests.process.harness import ROOT, Group


@pytest.fixture
def group(tmp_path):
    with Group(tmp_path) as group:
        yield group


def flip(command, node, *arguments):
    done = hastore(command, "-c", str(node.path), "--json", *arguments)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_the_pair_flips_and_flips_back(group):
    group.start()
    group[1].replace_file("# mine\n" + group[1].path.read_text())
    code, answer, problems = flip("promote", group[2])
    assert code == 0, problems
    assert list(answer) == ["node", "role", "epoch", "max_offset", "writable", "seconds"]
    assert (answer["node"], answer["role"], answer["writable"]) == (2, "SYNC_MASTER", True)
    assert answer["epoch"] % 65536 == 2
    assert group[2].file_role == "SYNC_MASTER"
    code, answer, problems = flip("demote", group[1])
    assert (code, answer["role"], group[1].file_role) == (0, "SLAVE", "SLAVE"), problems
    assert group[1].path.read_text().startswith("# mine\n")
    group[2].wait_in_sync(1)
    code, answer, problems = flip("promote", group[1], "--async")
    assert (code, answer["role"]) == (0, "ASYNC_MASTER"), problems
    assert "only this node has" in problems


def test_promote_does_not_write_through_a_planted_link(tmp_path):
    """It may be root's, in a folder where another user may write."""
    assert hastore("init", str(tmp_path / "g")).returncode == 0
    path = tmp_path / "g" / "node2.yaml"
    config = load_config(str(path))
    folder = pathlib.Path(config.store.root, "hastore")
    folder.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "once.json.tmp").symlink_to(victim)
    place = FilePlace(str(path), config)
    place.change_once(Role.SYNC_MASTER, "promote", {"no_catch_up": True}, {"epoch": 1})
    assert victim.read_text() == "precious"
    assert json.loads((folder / "once.json").read_text())["no_catch_up"] is True
    assert "role: SYNC_MASTER" in path.read_text()


def test_flags_do_not_stay_for_others_if_the_file_cannot_be_edited(tmp_path, monkeypatch):
    assert hastore("init", str(tmp_path / "g")).returncode == 0
    path = tmp_path / "g" / "node2.yaml"
    config = load_config(str(path))
    folder = pathlib.Path(config.store.root, "hastore")
    folder.mkdir(parents=True)
    place = FilePlace(str(path), config)

    def full(*_given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(ConfigError, match="No space left"):
        patched.setattr(os, "replace", full)
        place.change_once(Role.SYNC_MASTER, "promote", {"force_unclean": True}, {"epoch": 1})
    assert not (folder / "once.json").exists() and "role: SLAVE" in path.read_text()


def test_flags_do_not_stay_for_others_if_the_command_is_interrupted(tmp_path, monkeypatch):
    """It may wait for seconds, for a command that has the folder of the file locked."""
    assert hastore("init", str(tmp_path / "g")).returncode == 0
    path = tmp_path / "g" / "node2.yaml"
    config = load_config(str(path))
    folder = pathlib.Path(config.store.root, "hastore")
    folder.mkdir(parents=True)
    place = FilePlace(str(path), config)

    def interrupt(*_given):
        raise KeyboardInterrupt

    for name, written in (("_lock_within", False), ("_sync_folder", True)):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(private_files, name, interrupt)
            place.change_once(Role.SYNC_MASTER, "promote", {"force_unclean": True}, {"epoch": 1})
        assert ("role: SYNC_MASTER" in path.read_text()) is written
        assert (folder / "once.json").exists() is written, "the promotion needs them"


def test_flags_of_a_command_that_was_killed_are_not_those_of_the_next_one(tmp_path, monkeypatch):
    """A plain `hastore promote` would have been --force-unclean then."""
    assert hastore("init", str(tmp_path / "g")).returncode == 0
    path = tmp_path / "g" / "node2.yaml"
    config = load_config(str(path))
    folder = pathlib.Path(config.store.root, "hastore")
    folder.mkdir(parents=True)
    place = FilePlace(str(path), config)
    place.change(Role.SLAVE)  # there is nothing to remove
    wall_ms = SYSTEM_CLOCK.wall_ms()
    left = {"command": "promote", "force_unclean": True, "epoch": 1, "wall_ms": wall_ms}
    (folder / "once.json").write_text(json.dumps(left))
    place.change(Role.SYNC_MASTER)
    assert OneShotFlags(REAL, config.store.root, SYSTEM_CLOCK).take_flags("promote", 1) is None
    assert "role: SYNC_MASTER" in path.read_text()


@pytest.mark.parametrize(("command", "first"), [("promote", "role"), ("demote", "once.json")])
def test_flags_of_a_promotion_that_is_called_off_go_after_its_role(
    tmp_path, monkeypatch, command, first
):
    """Without them, and with the role, the node would begin it without its condition."""
    path = tmp_path / "node2.yaml"
    path.write_text("role: SYNC_MASTER\n")
    once = tmp_path / "data" / "hastore" / "once.json"
    once.parent.mkdir(parents=True)
    once.write_text(json.dumps({"command": command, "epoch": 1, "wall_ms": 1, "needed_node": 1}))
    was_there = []
    monkeypatch.setattr(own_node, "edit_role", lambda *_: was_there.append(once.exists()))
    store = SimpleNamespace(root=str(tmp_path / "data"))
    FilePlace(str(path), SimpleNamespace(store=store)).change(Role.SLAVE)
    assert was_there == [first == "role"] and not once.exists()


def test_the_present_master_begins_a_new_epoch(group):
    group.start()
    before = group[1].status()["epoch"]
    code, answer, problems = flip("promote", group[1])
    assert code == 0, problems
    assert answer["epoch"] > before and answer["epoch"] % 65536 == 1
    assert not (group[1].store / "hastore" / "once.json").exists()


def test_a_change_between_the_master_roles_keeps_the_epoch(group):
    group.start()
    before = group[1].status()["epoch"]
    code, answer, problems = flip("promote", group[1], "--async")
    assert (code, answer["epoch"], answer["role"]) == (0, before, "ASYNC_MASTER"), problems


@pytest.mark.parametrize("read", [True, False], ids=["the file was read", "not yet"])
def test_a_sync_master_has_the_changed_nodes_in_force(group, read):
    """Else a node that began alone goes on with 0 acks, or waits for a slave that is gone."""
    both = group[1].settings["nodes"]
    group[1].settings["nodes"] = {1: both[1]}
    group[1].write(role="ASYNC_MASTER")
    group[1].start()
    before = group[1].wait_writable()
    group[2].start("slave")
    group[1].write(nodes=both)
    if read:
        group[1].wait_status(lambda s: s["config_pending"], "the change is seen")
    code, answer, problems = flip("promote", group[1])
    assert code == 0, problems
    after = group[1].status()
    assert (answer["role"], after["acks"]) == ("SYNC_MASTER", 1)
    assert after["epoch"] > before["epoch"]
    pending = [one["key"] for one in after["config_pending"] if one["counts_from"] == "promotion"]
    assert pending == [] and not any("puts wait for no slave" in one for one in after["problems"])


def test_a_superseded_master_is_promoted_also_if_its_file_has_the_other_masters_role(group):
    group[1].edit_role("ASYNC_MASTER")
    group.start()
    assert flip("promote", group[2])[0] == 0
    group[2].wait_in_sync(1)
    assert group[1].file_role == "ASYNC_MASTER"
    code, answer, problems = flip("promote", group[1])
    assert (code, answer and answer["role"]) == (0, "SYNC_MASTER"), problems


@pytest.mark.parametrize("role", [Role.ASYNC_MASTER, Role.SYNC_MASTER])
def test_a_waiting_promotion_is_a_new_order_with_the_other_masters_role(
    tmp_path, monkeypatch, role
):
    """The master of a flip is gone, and the node says that `hastore promote` goes on without it."""
    fakes = FakeGroup(tmp_path)
    monkeypatch.setattr(own_node, "ask_own_status", fakes.status)
    two, waiting = fakes[2], "SYNC_MASTER" if role is Role.ASYNC_MASTER else "ASYNC_MASTER"
    two.path.write_text(two.path.read_text().replace("role: SLAVE", f"role: {waiting}"))
    two.read, two.state, two.flags = waiting, "promoting", {"needed_node": 1}
    fakes[1].alive = False
    status = flip_command.promote(str(two.path), role, patience_s=0.2)
    assert (status["role"], status["writable"]) == (role.value, True)
    assert "needed_node" not in two.flags


def test_a_sync_master_that_waits_for_no_slave_says_so(group):
    """Its epoch began when it was alone; then a person made it a SYNC_MASTER of two nodes."""
    both = group[1].settings["nodes"]
    group[1].settings["nodes"] = {1: both[1]}
    group[1].write(role="ASYNC_MASTER")
    group[1].start()
    group[1].settings["nodes"] = both
    group[1].write(role="SYNC_MASTER")
    told = group[1].wait_status(lambda s: s["problems"], "the master tells of it")
    assert told["acks"] == 0 and "puts wait for no slave: acks is 0 in epoch" in told["problems"][0]
    group[2].start("slave")
    group[1].wait_in_sync(2)
    assert f"`hastore promote -c {group[1].path}`" in group[1].status()["problems"][0]
    assert flip("promote", group[1])[0] == 0
    group[1].wait_status(lambda s: s["acks"] == 1 and not s["problems"], "all is well")


def test_a_master_that_goes_on_alone_says_what_is_not_in_force(group):
    """The new epoch would wait for node 3, which does not run; the puts must go on now."""
    group.start()
    before = group[1].status()
    nodes = {**group[1].settings["nodes"]}
    nodes[3] = {"api": "tcp://127.0.0.1:1", "ha": "127.0.0.1:2", "http": "127.0.0.1:3"}
    group[1].write(nodes=nodes)
    group[1].wait_status(lambda s: s["config_pending"], "the change is seen")
    code, answer, problems = flip("promote", group[1], "--async")
    assert (code, answer["epoch"]) == (0, before["epoch"]), problems
    assert "so nodes of the file are not in force yet" in problems


def test_a_promotion_without_enough_answers_is_late_and_the_file_stays(tmp_path):
    with Group(tmp_path, 3) as three:
        three.start()
        three[1].kill()
        three[3].kill()
        code, answer, problems = flip("promote", three[2], "--patience", "1")
        assert (code, answer) == (1, None)
        assert "node 1" in problems and "node 3" in problems and problems.count("\n") == 1
        assert "start node 1, 3" in problems
        assert f"`hastore demote -c {three[2].path}` cancels the promotion" in problems
        assert three[2].file_role == "SYNC_MASTER"
        three[3].start("slave")  # the node keeps trying by itself
        three[2].wait_writable()


def test_a_stopped_node_is_exit_code_1_and_the_file_stays(group, impatient):
    code, answer, problems = flip("promote", group[2], "--patience", "0.2")
    assert (code, answer) == (1, None)
    assert "does not answer" in problems and group[2].file_role == "SYNC_MASTER"
    assert "goes on if it hangs, unless another node has been promoted by then" in problems


def test_a_flag_for_a_stopped_node_is_refused(group, impatient):
    before = group[2].path.read_text()
    code, _, problems = flip("promote", group[2], "--force-unclean", "--patience", "0.2")
    assert code == 1 and "start it first" in problems
    assert group[2].path.read_text() == before


def test_a_wrong_file_is_exit_code_2(group):
    group[1].path.write_text("cluster: x\n")
    code, answer, problems = flip("promote", group[1])
    assert (code, answer) == (2, None) and "is missing" in problems


@pytest.mark.parametrize("command", ["promote", "demote"])
def test_a_group_that_elects_its_leader_has_nothing_to_flip(command):
    path = str(ROOT / "conf" / "dledger-n0.yaml")
    done = hastore(command, "-c", path)
    assert done.returncode == 2 and done.stdout == ""
    assert "mode: is dledger, where the nodes elect their leader: there is nothing" in done.stderr
    assert "hastore dledger transfer" in done.stderr
