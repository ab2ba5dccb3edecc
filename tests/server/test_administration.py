"""What a node does for an administrator over the network: its file, and requests to a leader."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pathlib

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import MAX_FILE_BYTES, load_config, parse_config
from hastore.config.model import Config
from hastore.dledger.driver.requests import request_path
from hastore.errors import ConfigError, UsageError
from hastore.fs import private_files
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import folder_locked
from hastore.ha.promoter import Flags
from hastore.protocol import api
from hastore.server import administration
from hastore.server.administration import Administration, Leading
from hastore.server.role_source import GOOD_FOR_MS, OneShotFlags

PLACES = api.NodePlaces("tcp://127.0.0.1:41", "127.0.0.1:42", "127.0.0.1:43")
SLY = 'tcp://127.0.0.1:41", ha: "127.0.0.1:42", http: "127.0.0.1:43"} # '  # ends the line
Change = api.NodesChange | api.MembersChange | api.RoleChange
ADD = api.NodesChange(new=4, address=PLACES)


def write(folder: pathlib.Path, number: int = 2, **changes: object) -> pathlib.Path:
    """Write a node's file as a person would, with comments."""
    lines = "".join(
        f'  {n}: {{api: "tcp://127.0.0.1:{n}1", ha: "127.0.0.1:{n}2", http: "127.0.0.1:{n}3"}}'
        f"  # rack {n}\n"
        for n in (1, 2, 3)
    )
    settings = {"cluster": "c", "group": "g", "node": number, "acks": 1, "role": "SLAVE", **changes}
    text = yaml.safe_dump({key: value for key, value in settings.items() if value is not None})
    path = folder / f"node{number}.yaml"
    root = folder / f"data{number}"
    path.write_text(f"# node {number}\n{text}nodes:\n{lines}store:\n  root: {root}\n")
    return path


def node_of(path: pathlib.Path, **more: object) -> Administration:
    return Administration(
        load_config(str(path)),
        str(path),
        fs=REAL,
        clock=SYSTEM_CLOCK,
        **more,  # type: ignore[arg-type]
    )


def order(change: Change, version: str | None = None, node: int = 2) -> api.Administer:
    return api.Administer(7, "c", "g", node, change, version)


def done(node: Administration, change: Change, version: str | None = None) -> api.Administered:
    reply = node.carry_out(order(change, version))
    assert isinstance(reply, api.Administered) and reply.rid == 7, reply
    return reply


def test_a_look_then_the_change_then_back(tmp_path: pathlib.Path) -> None:
    path, news = write(tmp_path), []
    path.chmod(0o640)
    before = path.read_bytes()
    node = node_of(path, on_change=lambda: news.append(1))
    look = done(node, ADD)
    assert look.changed and path.read_bytes() == before and not news
    assert look.version == hashlib.sha256(before).hexdigest()
    assert (look.file, look.role, sorted(look.nodes)) == (str(path), "SLAVE", [1, 2, 3])
    made = done(node, ADD, look.version)
    assert made.changed and made.nodes[4] == PLACES and news == [1]
    assert made.version == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(load_config(str(path)).nodes) == [1, 2, 3, 4]
    assert "# rack 3" in path.read_text() and path.stat().st_mode & 0o777 == 0o640
    again = done(node, ADD, look.version)  # a repeat, whatever its version
    assert not again.changed and again.version == made.version and news == [1]
    back = done(node, api.NodesChange(gone=4), again.version)
    assert back.changed and path.read_bytes() == before


def test_a_node_is_replaced_and_one_that_leaves_keeps_its_file(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    node, change = node_of(path), api.NodesChange(3, 4, PLACES)
    assert sorted(done(node, change, done(node, change).version).nodes) == [1, 2, 4]
    look = done(node, api.NodesChange(gone=2))
    assert not look.changed


def test_the_second_of_two_administrators_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    node = node_of(path)
    seen = done(node, ADD).version
    done(node, api.NodesChange(gone=3), seen)
    now = path.read_bytes()
    reply = node.carry_out(order(ADD, seen))
    assert isinstance(reply, api.Failed) and reply.status == api.FILE_CHANGED
    assert "lists node 1, 2 now" in reply.reason and path.read_bytes() == now


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (api.NodesChange(new=3, address=PLACES), "with other addresses"),
        (api.NodesChange(), "names no node"),
        (api.NodesChange(4, 4, PLACES), "one twice"),
        (api.NodesChange(new=4), "needs its addresses"),
        (api.NodesChange(new=4, address=api.NodePlaces("h", "h:2", "h:3")), "not be valid"),
        (api.NodesChange(new=4, address=api.NodePlaces('a"', "h:2", "h:3")), "not valid YAML"),
        (api.NodesChange(new=4, address=api.NodePlaces(SLY, "h:2", "h:3")), "cannot be edited"),
        (
            api.NodesChange(
                new=4, address=api.NodePlaces("tcp://127.0.0.1:11", "127.0.0.1:12", "h:3")
            ),
            "is also nodes.1",
        ),
        (api.MembersChange("12345678", "add", 4, 1, [1]), "mode classic"),
    ],
)
def test_what_must_not_be_done_is_refused_at_the_look(
    tmp_path: pathlib.Path, change: api.NodesChange, match: str
) -> None:
    path = write(tmp_path)
    before = path.read_bytes()
    for version in (None, hashlib.sha256(before).hexdigest()):
        with pytest.raises(UsageError, match=match):
            node_of(path).carry_out(order(change, version))
    assert path.read_bytes() == before


ENDS = (*"1\"'}{,\n\r#\\\0", ":1", " #", ": ", "tcp://127.0.0.1:4")
ODD = st.lists(st.sampled_from(ENDS), max_size=4).map("".join)
TEXTS = st.tuples(st.sampled_from(("h:1", "h:2", "")), ODD).map("".join).filter(bool)
API_TEXTS = st.tuples(st.sampled_from(("tcp://h:4", "tcp://h")), ODD).map("".join)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.tuples(API_TEXTS, TEXTS, TEXTS), st.booleans())
def test_no_address_says_more_than_an_address(
    tmp_path: pathlib.Path, texts: tuple[str, str, str], replaces: bool
) -> None:
    """Whatever is asked for, the file lists exactly that, and all else stays; or all stays."""
    path = write(tmp_path)
    before, was = path.read_bytes(), load_config(str(path))
    change = api.NodesChange(3 if replaces else None, 4, api.NodePlaces(*texts))
    try:
        node_of(path).carry_out(order(change, hashlib.sha256(before).hexdigest()))
    except UsageError:
        assert path.read_bytes() == before
        return
    now = load_config(str(path))
    one = now.nodes[4]
    assert (one.api, one.ha, one.http) == texts
    assert msgspec.structs.replace(now, nodes=was.nodes) == was
    assert set(now.nodes) == ({1, 2, 4} if replaces else {1, 2, 3, 4})


def test_a_list_that_acks_would_rule_out(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, acks=2)
    with pytest.raises(UsageError, match="not be valid: .*acks"):
        node_of(path).carry_out(order(api.NodesChange(gone=3)))


@pytest.mark.parametrize("cluster, group, node", [("d", "g", 2), ("c", "h", 2), ("c", "g", 3)])
def test_only_the_node_that_is_named_does_it(
    tmp_path: pathlib.Path, cluster: str, group: str, node: int
) -> None:
    path = write(tmp_path)
    request = api.Administer(1, cluster, group, node, ADD)
    with pytest.raises(UsageError, match="this is node 2 of c/g, not node"):
        node_of(path).carry_out(request)


def test_files_that_are_not_changed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    node = node_of(path)
    good = path.read_text()
    nowhere = Administration(load_config(str(path)), None, fs=REAL, clock=SYSTEM_CLOCK)
    with pytest.raises(ConfigError, match="follows no configuration file"):
        nowhere.carry_out(order(ADD))
    path.write_text(good + "x: 1\n")  # half of an operator's edit
    with pytest.raises(UsageError, match="does not follow its file as it is now"):
        node.carry_out(order(ADD))
    path.write_bytes(good.encode() + b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        node.carry_out(order(ADD))
    path.write_text(good.replace("node: 2", "node: 3"))
    with pytest.raises(UsageError, match="is now the file of node 3"):
        node.carry_out(order(ADD))
    other = good.replace("role: SLAVE\n", "mode: dledger\n").replace("acks: 1\n", "")
    path.write_text(other)
    with pytest.raises(UsageError, match="says mode dledger, and the node does not follow it"):
        node.carry_out(order(ADD))
    path.write_text(good + "#" * MAX_FILE_BYTES)
    with pytest.raises(UsageError, match="is larger than"):
        node.carry_out(order(ADD))
    path.write_text(good.replace("nodes:", "nodes: &all", 1) + "# *all\n")
    assert done(node, ADD).changed, "an anchor alone is no obstacle"
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        node.carry_out(order(ADD))
    path.write_text(good)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(ConfigError, match="the node's user may not write into"):
        node.carry_out(order(ADD))


def test_overrides_of_the_command_line_count_in_the_check(tmp_path: pathlib.Path) -> None:
    def parse(text: str, path: str) -> Config:
        return parse_config(text, path, {"acks": "2"})

    path = write(tmp_path)
    with pytest.raises(UsageError, match="-o acks"):
        node_of(path, parse=parse).carry_out(order(api.NodesChange(gone=3)))


def test_a_link_stays_and_its_file_is_changed(tmp_path: pathlib.Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    path = write(real)
    link = tmp_path / "node.yaml"
    link.symlink_to(path)
    node = node_of(link)
    done(node, ADD, done(node, ADD).version)
    assert link.is_symlink() and sorted(load_config(str(path)).nodes) == [1, 2, 3, 4]


def test_a_command_that_holds_the_lock_is_waited_for_only_so_long(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "LOCK_WAIT_S", 0.01)
    path = write(tmp_path)
    with folder_locked(str(path)), pytest.raises(ConfigError, match="has held its lock"):
        node_of(path).carry_out(order(ADD))


# -- the role


def test_the_role_is_changed_and_changed_back(tmp_path: pathlib.Path) -> None:
    path, news = write(tmp_path), []
    node, before = node_of(path, on_change=lambda: news.append(1)), path.read_bytes()
    master, slave = api.RoleChange("12345678", "SYNC_MASTER"), api.RoleChange("87654321", "SLAVE")
    look = done(node, master)
    assert look.changed and look.role == "SLAVE" and path.read_bytes() == before
    made = done(node, master, look.version)
    assert made.changed and made.role == "SYNC_MASTER" and news == [1]
    assert load_config(str(path)).assigned_role.value == "SYNC_MASTER"
    assert not done(node, master, made.version).changed
    assert not done(node, master, look.version).changed, "a repeat"
    reply = node.carry_out(order(slave, look.version))
    assert isinstance(reply, api.Failed) and reply.status == api.FILE_CHANGED
    assert done(node, slave).changed, "the look"
    assert done(node, slave, made.version).changed and path.read_bytes() == before
    assert not (tmp_path / "data2").exists()


def test_options_of_a_promotion_are_given_once(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path)
    (tmp_path / "data2" / "hastore").mkdir(parents=True)
    once = tmp_path / "data2" / "hastore" / "once.json"
    node = node_of(path)
    asked = api.RoleChange(
        "12345678", "SYNC_MASTER", api.OnceOptions("promote", 65537, needed_node=1)
    )
    look = done(node, asked)
    assert not once.exists()
    assert done(node, asked, look.version).changed
    flags = OneShotFlags(REAL, str(tmp_path / "data2"), SYSTEM_CLOCK).take_flags("promote", 65537)
    assert flags == Flags(needed_node=1) and not once.exists()
    assert not done(node, asked, look.version).changed and not once.exists(), "a repeat"
    later = api.RoleChange("87654321", asked.role, asked.once)
    look = done(node, later)
    assert done(node, later, look.version).changed and once.exists(), "a new epoch"


def test_options_of_a_node_that_was_killed_are_not_those_of_the_next_order(
    tmp_path: pathlib.Path,
) -> None:
    """It wrote them, but not the role any more. A plain promotion would be --force-unclean then."""
    path = write(tmp_path)
    once = tmp_path / "data2" / "hastore" / "once.json"
    once.parent.mkdir(parents=True)
    wall_ms = SYSTEM_CLOCK.wall_ms()
    left = {"command": "promote", "force_unclean": True, "epoch": 65537, "wall_ms": wall_ms}
    once.write_text(json.dumps(left))
    node, plain = node_of(path), api.RoleChange("12345678", "SYNC_MASTER")
    version = done(node, plain).version
    assert once.exists(), "the look"
    assert done(node, plain, version).role == "SYNC_MASTER" and not once.exists()


class Clocks:
    """Both clocks, as far as they are said to go on."""

    def __init__(self) -> None:
        self.wall, self.mono = SYSTEM_CLOCK.wall_ms(), 0.0

    def monotonic_ms(self) -> float:
        return self.mono

    def wall_ms(self) -> int:
        return self.wall


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_change_of_the_role_that_was_held_up_is_not_done(
    tmp_path: pathlib.Path, stands_still: bool
) -> None:
    """A machine was suspended with the request in a buffer; its group has another master now."""
    path, clock = write(tmp_path), Clocks()
    (tmp_path / "data2" / "hastore").mkdir(parents=True)
    node = Administration(load_config(str(path)), str(path), fs=REAL, clock=clock)
    before, once = path.read_bytes(), api.OnceOptions("promote", 65537, force_unclean=True)
    for options in (None, once):
        asked = api.RoleChange("12345678", "SYNC_MASTER", options)
        version = done(node, asked).version
        unknown = api.RoleChange("87654321", "SYNC_MASTER", options)
        for change, waits_ms in ((unknown, 0), (asked, GOOD_FOR_MS + 1)):
            clock.wall += waits_ms
            clock.mono += 0 if stands_still else waits_ms  # while the machine is suspended
            reply = node.carry_out(order(change, version))
            assert isinstance(reply, api.Failed) and reply.status == api.FILE_CHANGED
            assert "an old one" in reply.reason and "look again" in reply.reason
        assert path.read_bytes() == before and not list((tmp_path / "data2/hastore").iterdir())
    assert done(node, asked, done(node, asked).version).changed, "after another look"


@pytest.mark.parametrize("name", ["replace", "rename"])  # of the role, of the options
def test_options_do_not_stay_for_others_if_the_role_is_not_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else a plain promotion a moment later would be one with --force-unclean."""
    path, full = write(tmp_path), [True]
    folder = tmp_path / "data2" / "hastore"
    folder.mkdir(parents=True)
    node, before, real = node_of(path), path.read_bytes(), getattr(os, name)

    def renamed(source: str, target: str) -> None:
        if full[0]:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    once = api.OnceOptions("promote", 65537, force_unclean=True)
    asked = api.RoleChange("12345678", "SYNC_MASTER", once)
    version = done(node, asked).version
    monkeypatch.setattr(os, name, renamed)
    with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
        node.carry_out(order(asked, version))
    assert path.read_bytes() == before and not list(folder.glob("once.json"))
    full[0] = False
    assert done(node, asked, version).changed and (folder / "once.json").exists(), "a repeat"


def test_a_file_beside_the_options_of_its_node(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "data2" / "hastore"
    folder.mkdir(parents=True)
    path = folder / "node2.yaml"
    path.write_text(write(tmp_path).read_text())
    node, once = node_of(path), api.OnceOptions("promote", 65537)
    asked = api.RoleChange("12345678", "SYNC_MASTER", once)
    assert done(node, asked, done(node, asked).version).changed
    assert (folder / "once.json").exists()


def test_no_change_makes_a_file_that_cannot_be_read_at_the_next_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path)
    monkeypatch.setattr("hastore.config.file.MAX_FILE_BYTES", path.stat().st_size)
    node, before = node_of(path), path.read_bytes()
    for change in (ADD, api.RoleChange("12345678", "SYNC_MASTER")):
        version = hashlib.sha256(before).hexdigest()
        if isinstance(change, api.RoleChange):
            version = done(node, change).version
        with pytest.raises(UsageError, match="not be valid: .* is larger than"):
            node.carry_out(order(change, version))
    assert path.read_bytes() == before and load_config(str(path))


def test_options_stay_if_the_role_is_there_but_not_durable(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flip's promotion must not lose the node that it needs."""
    path = write(tmp_path)
    folder = tmp_path / "data2" / "hastore"
    folder.mkdir(parents=True)
    once = api.OnceOptions("promote", 65537, needed_node=1)
    asked = api.RoleChange("12345678", "SYNC_MASTER", once)
    node = node_of(path)
    version = done(node, asked).version

    def broken(_path: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(private_files, "_sync_folder", broken)
    with pytest.raises(ConfigError, match="Input/output error"):
        node.carry_out(order(asked, version))
    assert "SYNC_MASTER" in path.read_text() and (folder / "once.json").exists()


@pytest.mark.parametrize(("role", "command"), [("SLAVE", "promote"), ("SYNC_MASTER", "demote")])
def test_options_go_with_their_own_command(tmp_path: pathlib.Path, role: str, command: str) -> None:
    """Else they would wait in the store, for the next such command of somebody else."""
    path = write(tmp_path)
    once = api.OnceOptions(command, 65537, accept_loss=True)
    with pytest.raises(UsageError, match="do not go with the role"):
        node_of(path).carry_out(order(api.RoleChange("12345678", role, once)))


@pytest.mark.parametrize(
    ("changes", "role", "match"),
    [
        ({}, "LEADER", "is no role"),
        ({"registry": "zk://127.0.0.1:1"}, "SYNC_MASTER", "in the registry"),
        ({"mode": "dledger", "role": None, "acks": None}, "SLAVE", "elect their leader"),
    ],
)
def test_roles_that_are_not_changed(
    tmp_path: pathlib.Path, changes: dict[str, object], role: str, match: str
) -> None:
    path = write(tmp_path, **changes)
    before = path.read_bytes()
    for version in (None, hashlib.sha256(before).hexdigest()):
        with pytest.raises(UsageError, match=match):
            node_of(path).carry_out(order(api.RoleChange("12345678", role), version))
    assert path.read_bytes() == before


# -- mode dledger


def members(**changes: object) -> api.MembersChange:
    fields: dict[str, object] = {
        "id": "12345678", "command": "add", "node": 4, "term": 7, "members": [1, 2, 3], **changes,
    }  # fmt: skip
    return api.MembersChange(**fields)  # type: ignore[arg-type]


def leader_of(folder: pathlib.Path, now: Leading | None = None) -> Administration:
    now = now or Leading(True, 2, (1, 2, 3))
    path = write(folder, mode="dledger", role=None, acks=None)
    (folder / "data2" / "hastore").mkdir(parents=True)
    return node_of(path, leading=lambda: now)


def test_a_request_is_written_once(tmp_path: pathlib.Path) -> None:
    node = leader_of(tmp_path)
    assert done(node, members(command="replace", node=3, by=4)).changed
    path = pathlib.Path(request_path(str(tmp_path / "data2")))
    written = json.loads(path.read_text())
    assert abs(written.pop("wall_ms") - SYSTEM_CLOCK.wall_ms()) < 60_000
    assert written == {
        "id": "12345678", "command": "replace", "node": 3, "by": 4, "term": 7, "members": [1, 2, 3],
    }  # fmt: skip
    reply = node.carry_out(order(members(id="another1")))
    assert isinstance(reply, api.Failed) and reply.status == "BUSY"
    path.unlink()  # the leader has taken it
    assert not done(node, members(command="replace", node=3, by=4)).changed
    assert not path.exists()
    assert done(node, members(id="another1")).changed


@pytest.mark.parametrize(
    "change",
    [members(command="recover"), members(command="replace"), members(by=5)],
    ids=["command", "no by", "by"],
)
def test_what_is_no_request_to_a_leader(tmp_path: pathlib.Path, change: Change) -> None:
    with pytest.raises(UsageError):
        leader_of(tmp_path).carry_out(order(change))
    assert not os.path.exists(request_path(str(tmp_path / "data2")))


@pytest.mark.parametrize(("leader", "text"), [(1, "node 1 leads"), (None, "no leader is known")])
def test_a_node_that_does_not_lead_names_the_leader(
    tmp_path: pathlib.Path, leader: int | None, text: str
) -> None:
    reply = leader_of(tmp_path, Leading(False, leader, (1, 2, 3))).carry_out(order(members()))
    assert isinstance(reply, api.Failed) and text in reply.reason
    assert not os.path.exists(request_path(str(tmp_path / "data2")))


def test_the_list_of_a_node_of_mode_dledger_loses_no_member(tmp_path: pathlib.Path) -> None:
    node = leader_of(tmp_path, Leading(False, 1, (1, 2)))
    path = tmp_path / "node2.yaml"
    before = path.read_bytes()
    assert sorted(done(node, ADD, done(node, ADD).version).nodes) == [1, 2, 3, 4]
    back = api.NodesChange(gone=4)
    assert done(node, back, done(node, back).version).changed and path.read_bytes() == before
    assert done(node, api.NodesChange(gone=3)).changed, "it is no member"
    with pytest.raises(UsageError, match="node 1 is a member"):
        node.carry_out(order(api.NodesChange(gone=1)))
    starting = node_of(path, leading=lambda: Leading(False, None, None))
    with pytest.raises(UsageError, match="does not know the members yet"):
        starting.carry_out(order(api.NodesChange(gone=3)))
