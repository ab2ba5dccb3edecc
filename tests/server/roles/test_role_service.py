"""Changes of a role that cannot be carried out or saved now, and orders to become master that came
long ago.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from hastore.cli.flip import NO_NEW_EPOCH
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, Role
from hastore.errors import PromotionRefused, StoreBrokenError
from hastore.fs.filesystem import REAL
from hastore.ha import promoter
from hastore.ha.hello import peer
from hastore.ha.hello.peer import SurveyReply
from hastore.ha.node.member import Member
from hastore.ha.node.node_state import NodeState
from hastore.ha.promoter import Flags
from hastore.ha.rules.epochs import next_epoch
from hastore.ha.slave import ha_client
from hastore.protocol.hello import Purpose
from hastore.record.codec import NO_HOST, build_record
from hastore.registry.remembered import RegistryMemory
from hastore.server import role_service
from hastore.server.node import Node
from hastore.server.role_service import RoleMode
from hastore.server.role_source import OneShotFlags, RegistryRoles
from hastore.service import raise_failure
from hastore.store import replay
from hastore.store.state.limits import LimitsPage, read_limits
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.retention.kit import Nodes, fill


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replay and promotions try again soon; busy nodes have 30 s to answer each other."""
    monkeypatch.setattr(promoter, "REPLAY_WAIT_S", 0.01)
    monkeypatch.setattr(replay, "_RETRY_S", 0.01)
    monkeypatch.setattr(role_service, "RETRY_MS", 10.0)
    with pytest.MonkeyPatch.context() as patched:  # undone after the nodes have stopped
        patched.setitem(peer.ask_all.__kwdefaults__, "timeout_ms", 30_000.0)
        yield


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[Nodes]:
    """Node 1 is master, node 2 follows it."""
    nodes = Nodes(tmp_path, 2, 1)
    try:
        one, two = nodes.start(1, Role.SYNC_MASTER), nodes.start(2, Role.SLAVE)
        # A link begins before the master's epoch is saved.
        wait_for(lambda: linked(two) and two.state.last_epoch == one.state.last_epoch)
        yield nodes
    finally:
        nodes.stop()


def fill_a_little(node: Node) -> None:
    record = build_record(
        "t", b"x" * 900, queue_id=0, properties=(), born_timestamp_ms=1, born_host=NO_HOST
    )
    node.backend.put_encoded([record])


def linked(node: Node) -> bool:
    return node.roles.client is not None and node.roles.client.linked


def writable(node: Node) -> bool:
    return node.backend.writable_reason() is None


def order(nodes: Nodes, number: int, role: Role) -> None:
    """Edit the role in a running node's file."""
    nodes.changed[number] = nodes.config(number, role)
    nodes.running[number].roles.wake()


def once_file(node: Node) -> pathlib.Path:
    return pathlib.Path(node.config.store.root) / "hastore" / "once.json"


def command(node: Node, name: str = "promote", ahead_ms: int = 0, **flags: Any) -> None:
    """Do what `hastore promote` does for a node whose file has the role already."""
    note = {"command": name, "epoch": node.state.last_epoch,
            "wall_ms": int(time.time() * 1000) + ahead_ms, **flags}  # fmt: skip
    # The node may read it at any time.
    REAL.replace_bytes(str(once_file(node)), json.dumps(note).encode())
    node.roles.wake()


@contextlib.contextmanager
def no_room(store: Any) -> Iterator[None]:
    """Let the disk have no room for what replay writes."""

    def full(_batch: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.queues.dispatch = full
    try:
        yield
    finally:
        del store.queues.dispatch


def at_the_wait(node: Node, then: Callable[[], object]) -> None:
    """Call `then` when a promotion has synced the log, right before it waits for replay."""
    synced = node.store.flush

    def flush() -> int:
        flushed = synced()
        then()
        return flushed

    node.store.flush = flush  # type: ignore[method-assign]


def test_a_blocked_candidate_waits_before_the_fence_and_then_goes_on(pair: Nodes) -> None:
    one, two = pair.running[1], pair.running[2]
    with no_room(two.store):
        fill(one, 1)
        wait_for(lambda: two.store.replay.blocked_reason)
        order(pair, 2, Role.SYNC_MASTER)
        wait_for(lambda: "replay stopped" in str(two.roles.reason))
        assert two.roles.mode is RoleMode.PROMOTING and linked(two)
        assert writable(one) and one.state.data.promised_epoch == one.state.last_epoch
        assert "waiting to be master: replay stopped" in str(two.backend.writable_reason())
    wait_for(lambda: writable(two))


def test_a_demotion_ends_the_wait_and_the_old_master_serves_again(pair: Nodes) -> None:
    one, two = pair.running[1], pair.running[2]
    at_the_wait(two, lambda: order(pair, 2, Role.SLAVE))
    with two.store.replay.paused():
        fill(one, 1)
        wait_for(lambda: two.store.max_offset == one.store.max_offset)
        order(pair, 2, Role.SYNC_MASTER)
        wait_for(lambda: not writable(one))
        wait_for(lambda: two.roles.mode is RoleMode.FOLLOWING and two.roles.reason is None)
        assert two.roles.configured_role is Role.SLAVE
        wait_for(lambda: "To make it master again run `hastore promote`" in str(one.roles.reason))
        command(one)
        wait_for(lambda: writable(one))
        wait_for(lambda: linked(two))


def test_a_superseded_master_says_so_before_its_next_tick(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair.running[1], pair.running[2]
    with monkeypatch.context() as patched:
        patched.setattr(one.roles, "_tick", lambda: None)
        order(pair, 2, Role.SYNC_MASTER)
        wait_for(lambda: two.member.open_epoch)
        assert one.roles.mode is RoleMode.MASTER
        said = f"superseded by node 2 (epoch {two.member.open_epoch}); this node follows"
        assert str(one.backend.writable_reason()).startswith(said)
        patched.setattr(one.roles, "_superseded", None)  # it is taken right before the mode changes
        said = "waiting to be master: its role changes in this moment"
        assert one.backend.writable_reason() == said
    one.roles.note_superseded(two.member.open_epoch, "node 2")
    wait_for(lambda: linked(one))


@pytest.mark.parametrize("how", ["file", "command"])
def test_a_superseded_master_that_is_made_a_slave_keeps_its_link(pair: Nodes, how: str) -> None:
    """A planned flip does so at its end: the new master's puts need this slave."""
    one, two = pair.running[1], pair.running[2]
    order(pair, 2, Role.SYNC_MASTER)
    wait_for(lambda: writable(two) and linked(one))
    wait_for(lambda: two.ha.can_confirm(flushed=False) is None)
    assert one.roles.client is not None
    stream = one.roles.client._stream
    if how == "command":
        command(one, "demote")
    order(pair, 1, Role.SLAVE)
    wait_for(lambda: one.state.data.role_followed is Role.SLAVE)
    wait_for(lambda: not once_file(one).exists())
    assert one.member.gate.epoch == two.member.open_epoch
    fill(two, 1)
    wait_for(lambda: one.store.max_offset == two.store.max_offset)
    assert one.roles.client._stream is stream and two.ha.can_confirm(flushed=False) is None


def test_a_later_command_elsewhere_ends_an_order_that_waits(pair: Nodes) -> None:
    """The order was given before the later master's, so it does not take the role from it."""
    one, two = pair.running[1], pair.running[2]
    with no_room(two.store):
        fill(one, 1)
        wait_for(lambda: two.store.replay.blocked_reason)
        order(pair, 2, Role.SYNC_MASTER)
        wait_for(lambda: "replay stopped" in str(two.roles.reason))
        command(one)
        wait_for(lambda: "node 1 has opened epoch" in str(two.roles.reason))
        wait_for(lambda: two.roles.mode is RoleMode.FOLLOWING)
    wait_for(lambda: linked(two) and two.store.dispatched_offset == one.store.max_offset)
    assert writable(one) and two.roles.mode is RoleMode.FOLLOWING


def test_a_returning_master_whose_replay_is_blocked_can_be_demoted(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pair.running[1], 1)
    pair.stop(2)
    pair.stop(1)
    (pathlib.Path(pair.config(1, Role.SLAVE).store.root) / "hastore" / "replay").unlink()
    open_store = Node._open_store

    def opened(self: Node) -> None:
        block.enter_context(no_room(self.store))
        open_store(self)

    monkeypatch.setattr(Node, "_open_store", opened)
    with contextlib.ExitStack() as block:
        one = pair.start(1, Role.SYNC_MASTER)
        assert one.roles.mode is RoleMode.RESUMING and "replay stopped" in str(one.roles.reason)
        order(pair, 1, Role.SLAVE)
        wait_for(lambda: one.roles.mode is RoleMode.FOLLOWING)


@pytest.mark.parametrize("later", ["of the present master", "first start"])
def test_an_order_from_while_it_was_down_spares_a_master_of_a_newer_epoch(
    pair: Nodes, later: str, tmp_path: pathlib.Path
) -> None:
    """Whoever set the role did not mean the master that came after it."""
    one = pair.running[1]
    pair.stop(2)
    if later == "first start":
        os.rename(tmp_path / "node2", tmp_path / "node2-away")
        pair.running[1].state.save(known_stores={})  # a node 2 that nobody knows
    else:
        command(one)
        wait_for(lambda: one.state.last_epoch >> 16 == 2 and writable(one))
    epoch = one.state.last_epoch
    two = pair.start(2, Role.SYNC_MASTER)
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason))
    wait_for(lambda: two.roles.mode is RoleMode.FOLLOWING)
    wait_for(lambda: linked(two) and two.state.last_epoch == epoch)
    assert writable(one) and one.state.last_epoch == epoch
    command(two)
    wait_for(lambda: writable(two))


def test_an_order_from_while_it_was_down_is_meant_for_the_master_that_it_knows(
    pair: Nodes,
) -> None:
    pair.stop(2)
    two = pair.start(2, Role.SYNC_MASTER)
    wait_for(lambda: writable(two))
    assert not writable(pair.running[1])


def test_an_order_that_arrives_late_spares_a_master_of_a_newer_epoch(pair: Nodes) -> None:
    """ZooKeeper was out of reach of node 2 alone, and node 1 was promoted since the order."""
    one, two = pair.running[1], pair.running[2]
    meant = one.state.last_epoch
    command(one)
    wait_for(lambda: one.state.last_epoch > meant and writable(one))
    epoch = one.state.last_epoch
    wait_for(lambda: linked(two) and two.state.last_epoch == epoch)
    two.roles._one_shot.meant_epoch = lambda: meant  # type: ignore[method-assign]
    order(pair, 2, Role.SYNC_MASTER)
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason))
    wait_for(lambda: linked(two))
    assert writable(one) and one.state.last_epoch == epoch
    two.roles._one_shot.meant_epoch = lambda: None  # type: ignore[method-assign]
    command(two)
    wait_for(lambda: writable(two))


def test_an_order_to_a_node_that_was_stopped_spares_a_master_of_a_newer_epoch(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP, a machine that was suspended, or a disk that hung while the file was read."""
    one, two = pair.running[1], pair.running[2]
    stopped, goes_on = threading.Event(), threading.Event()
    read = two.roles._read_config

    def held() -> Config | None:
        stopped.set()
        goes_on.wait()
        return read()

    two.roles._read_config = held
    try:
        assert stopped.wait(60)
        order(pair, 2, Role.SYNC_MASTER)
        before = one.state.last_epoch
        command(one)
        wait_for(lambda: one.state.last_epoch > before and writable(one))
        epoch = one.state.last_epoch
        wait_for(lambda: linked(two) and two.state.last_epoch == epoch)
        monkeypatch.setattr(role_service, "LATE_MS", 0.0)
    finally:
        goes_on.set()
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason))
    assert writable(one) and one.state.last_epoch == epoch
    command(two)
    wait_for(lambda: writable(two))


@pytest.mark.parametrize("late", ["it was stopped", "its disk failed", "without ZooKeeper"])
def test_a_command_that_a_superseded_master_takes_late_spares_a_master_of_a_newer_epoch(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Its file says master, so that only the options of the command are new. It gave no answer, and
    another node was promoted.
    """
    one, two = pair.running[1], pair.running[2]
    order(pair, 2, Role.SYNC_MASTER)
    wait_for(lambda: writable(two) and linked(one))
    before, disk = two.state.last_epoch, FailingDisk("remove")
    wait_for(lambda: one.state.last_epoch == before)
    give = partial(command, one)
    if late == "without ZooKeeper":
        give = partial(orders_by("ZooKeeper", pair, 1), Role.SYNC_MASTER, no_catch_up=False)
        source: Any = one.roles._one_shot
        wait_for(lambda: source._epoch_then == before)
        source.registry._connected = False
        wait_for(lambda: not source._in_touch)
    elif late == "its disk failed":
        one.roles._one_shot = OneShotFlags(disk, one.config.store.root, SYSTEM_CLOCK)
    with monkeypatch.context() as patched:
        # It does not follow meanwhile.
        patched.setattr(ha_client, "ask_all", partial(peer.ask_all, skip=frozenset({2})))
        with unread(one) if late == "it was stopped" else contextlib.nullcontext():
            if late != "without ZooKeeper":
                give()
            assert late != "its disk failed" or disk.failed.wait(60)
            command(two)
            wait_for(lambda: two.state.last_epoch > before and writable(two))
            if late == "it was stopped":
                patched.setattr(role_service, "LATE_MS", 0.0)
        disk.bad = False
        if late == "without ZooKeeper":
            give()
            source.registry._connected = True
        epoch = two.state.last_epoch
        said = f"node 2 has opened epoch {epoch} since this node was told to become master"
        wait_for(lambda: said in str(one.roles.reason) or writable(one))
        assert writable(two) and two.state.last_epoch == epoch


def test_an_order_with_options_to_a_node_that_was_stopped_spares_a_master_of_a_newer_epoch(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are good for a minute, and it was stopped for less: nor are they of this moment."""
    one, two = pair.running[1], pair.running[2]
    before = one.state.last_epoch
    monkeypatch.setattr(ha_client, "ask_all", partial(peer.ask_all, skip=frozenset({1})))
    with unread(two):
        command(two)
        order(pair, 2, Role.SYNC_MASTER)
        command(one)
        wait_for(lambda: one.state.last_epoch > before and writable(one))
        monkeypatch.setattr(role_service, "LATE_MS", 0.0)
    epoch = one.state.last_epoch
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason) or writable(two))
    assert writable(one) and one.state.last_epoch == epoch


def test_an_order_during_a_slow_start_spares_a_master_of_a_newer_epoch(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store took a minute to open; `hastore promote` had no answer, and was given elsewhere."""
    one = pair.running[1]
    pair.stop(2)
    before = one.state.last_epoch
    command(one)
    wait_for(lambda: one.state.last_epoch > before and writable(one))
    epoch, open_store = one.state.last_epoch, Node._open_store

    def opened(self: Node) -> None:
        open_store(self)
        self.roles._looked_ms -= 60_000  # since the file was read
        pair.changed[2] = pair.config(2, Role.SYNC_MASTER)

    with monkeypatch.context() as patched:
        patched.setattr(Node, "_open_store", opened)
        two = pair.start(2, Role.SLAVE)
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason) or writable(two))
    assert writable(one) and one.state.last_epoch == epoch
    wait_for(lambda: linked(two) and two.state.last_epoch == epoch)
    command(two)
    wait_for(lambda: writable(two))


def test_an_order_in_a_file_that_was_refused_spares_a_master_of_a_newer_epoch(pair: Nodes) -> None:
    """A key in the file was open to others, and nobody looked for an hour."""
    one, two = pair.running[1], pair.running[2]
    two.roles._refused_ms = lambda: 1.0
    wait_for(lambda: two.roles._refused is not None)
    before = one.state.last_epoch
    command(one)
    wait_for(lambda: one.state.last_epoch > before and writable(one))
    epoch = one.state.last_epoch
    wait_for(lambda: linked(two) and two.state.last_epoch == epoch)
    order(pair, 2, Role.SYNC_MASTER)
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason))
    assert writable(one) and one.state.last_epoch == epoch
    command(two)
    wait_for(lambda: writable(two))


def test_a_master_goes_on_until_its_new_epoch_can_begin(tmp_path: pathlib.Path) -> None:
    """A changed `acks` needs every node's answer; one that is down must stop nobody."""
    nodes = Nodes(tmp_path, 3, 1)
    try:
        one, two = nodes.start(1, Role.SYNC_MASTER), nodes.start(2, Role.SLAVE)
        wait_for(lambda: linked(two) and writable(one))
        epoch = one.state.last_epoch
        nodes.acks = 2
        order(nodes, 1, Role.SYNC_MASTER)
        command(one)
        said = f"{NO_NEW_EPOCH}: promotion needs 3 clean nodes and has 2; waiting for node 3"
        wait_for(lambda: any(said in each for each in one.backend.problems()))
        assert writable(one) and one.state.data.promised_epoch == epoch and linked(two)
        fill(one, 1)
        two.stop()
        order(nodes, 1, Role.ASYNC_MASTER)  # meanwhile it may go on alone
        fill(one, 1)
        wait_for(lambda: one.store.readable_offset == one.store.max_offset)
        nodes.start(3, Role.SLAVE)
        nodes.start(2, Role.SLAVE)
        wait_for(lambda: writable(one) and one.state.history[-1].acks == 2)
        assert not any("no new epoch" in each for each in one.backend.problems())
    finally:
        nodes.stop()


def test_a_waiting_order_outlives_a_change_of_the_masters_role_and_a_restart(
    tmp_path: pathlib.Path,
) -> None:
    """The first start of a group: a change of SYNC_MASTER to ASYNC_MASTER is no promotion yet."""
    nodes = Nodes(tmp_path, 3, 1)
    try:
        one = nodes.start(1, Role.SYNC_MASTER)
        wait_for(lambda: "waiting for node 2, 3" in str(one.roles.reason))
        order(nodes, 1, Role.ASYNC_MASTER)
        wait_for(lambda: one.roles.configured_role is Role.ASYNC_MASTER)
        nodes.stop(1)
        one = nodes.start(1, Role.ASYNC_MASTER)
        two = nodes.start(2, Role.SLAVE)
        wait_for(lambda: linked(two) and writable(one))
    finally:
        nodes.stop()


class FailingDisk:
    """The real file system; what `step` does fails while `bad`."""

    def __init__(self, step: str) -> None:
        self.bad, self.failed = True, threading.Event()
        self._step = step

    def __getattr__(self, name: str) -> Any:
        if name != self._step or not self.bad:
            return getattr(REAL, name)
        return self._fail

    def _fail(self, *_: object) -> None:
        self.failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def role_unsaved(node: Node) -> Iterator[threading.Event]:
    """Let the disk fail when the node's role is saved; the event says that it has."""
    real, failed = node.state.save, threading.Event()

    def save(**changes: object) -> None:
        if "role_followed" in changes:
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(**changes)

    node.state.save = save  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        node.state.save = real  # type: ignore[method-assign]


Order = Callable[..., None]


def orders_by(kind: str, nodes: Nodes, number: int, fs: Any = REAL) -> Order:
    """Return what gives a node a role, and the options of `hastore promote` with it, by its file
    or by ZooKeeper. `fs` has what the node writes to use the options only once.
    """
    node = nodes.running[number]

    def by_file(role: Role, **flags: bool) -> None:
        if flags:
            command(node, "promote", **flags)
        order(nodes, number, role)

    if kind == "file":
        node.roles._one_shot = OneShotFlags(fs, node.config.store.root, SYSTEM_CLOCK)
        return by_file
    pytest.importorskip("kazoo")
    from hastore.registry.entry import Once
    from hastore.registry.node_registry import AssignedRole

    config = msgspec.structs.replace(node.config, registry="zk://127.0.0.1:1")
    source = RegistryRoles(
        config, lambda: None, RegistryMemory(fs, config.store.root, config.node), lambda: "", fs=fs,
        clock=SYSTEM_CLOCK, on_addresses=lambda _moved: None, on_failure=raise_failure,
        greatest_epoch=lambda: node.state.last_epoch,
    )  # fmt: skip
    source.registry._connected = source._in_touch = True
    node.roles._one_shot, node.roles._read_config = source, source.read

    def by_zookeeper(role: Role, ahead_ms: int = 0, id: str = "1", **flags: Any) -> None:
        now, epoch = int(time.time() * 1000) + ahead_ms, node.state.last_epoch
        once = Once(id=id, command="promote", epoch=epoch, wall_ms=now, **flags)
        source.registry.wanted = AssignedRole(role, once if flags else None)
        node.roles.wake()

    return by_zookeeper


def cannot_be_saved(node: Node) -> bool:
    return "the node's state cannot be saved" in str(node.roles.reason)


SOURCES = pytest.mark.parametrize("kind", ["file", "ZooKeeper"])


@SOURCES
@pytest.mark.parametrize(
    ("number", "role"), [(1, Role.SLAVE), (1, Role.ASYNC_MASTER), (2, Role.SYNC_MASTER)]
)
def test_a_role_that_cannot_be_saved_is_followed_and_saved_later(
    pair: Nodes, kind: str, number: int, role: Role
) -> None:
    node = pair.running[number]
    give = orders_by(kind, pair, number)
    with role_unsaved(node) as failed:
        give(role)
        assert failed.wait(60)
        wait_for(lambda: node.roles.mode is not RoleMode.PROMOTING)
        assert node.roles.mode is (RoleMode.MASTER if role.is_master else RoleMode.FOLLOWING)
        assert writable(node) is role.is_master
        wait_for(lambda: cannot_be_saved(node))
    wait_for(lambda: node.state.data.role_followed is role)
    wait_for(lambda: node.roles.reason is None)
    assert node.roles.configured_role is role


@SOURCES
def test_a_new_master_whose_role_was_never_saved_can_be_demoted(pair: Nodes, kind: str) -> None:
    """The operator takes the role from it because its disk is bad."""
    two = pair.running[2]
    give = orders_by(kind, pair, 2)
    with role_unsaved(two):
        give(Role.SYNC_MASTER)
        wait_for(lambda: writable(two) and cannot_be_saved(two))
        give(Role.SLAVE)
        wait_for(lambda: two.roles.mode is RoleMode.FOLLOWING)
        assert not writable(two) and two.roles.configured_role is Role.SLAVE
        wait_for(lambda: cannot_be_saved(two))
    wait_for(lambda: two.roles.reason is None)
    assert two.roles.mode is RoleMode.FOLLOWING and two.state.data.role_followed is Role.SLAVE


@SOURCES
def test_a_demotion_that_cannot_be_saved_ends_an_order_that_waits(pair: Nodes, kind: str) -> None:
    one, two = pair.running[1], pair.running[2]
    give = orders_by(kind, pair, 2)
    with no_room(two.store):
        fill(one, 1)
        wait_for(lambda: two.store.replay.blocked_reason)
        give(Role.SYNC_MASTER)
        wait_for(lambda: "replay stopped" in str(two.roles.reason))
        with role_unsaved(two) as failed:
            give(Role.SLAVE)
            assert failed.wait(60)
            wait_for(lambda: two.roles.mode is RoleMode.FOLLOWING)
    wait_for(lambda: two.roles.reason is None)
    assert two.roles.mode is RoleMode.FOLLOWING and writable(one) and linked(two)


def test_a_demotion_while_the_node_was_down_is_followed_before_it_can_be_saved(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.stop(1)
    real = NodeState.save

    def save(self: NodeState, **changes: object) -> None:
        if "role_followed" in changes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, **changes)

    with monkeypatch.context() as patched:
        patched.setattr(NodeState, "save", save)
        one = pair.start(1, Role.SLAVE)
        wait_for(lambda: cannot_be_saved(one))
        assert one.roles.mode is RoleMode.FOLLOWING and not one.failed.is_set()
    wait_for(lambda: one.state.data.role_followed is Role.SLAVE and one.roles.reason is None)


def test_a_master_that_crashed_while_it_began_a_new_epoch_says_so(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other node supersedes it: the epoch that it has promised is its own. In the version before
    it did not note the order.
    """
    epoch, open_store = next_epoch(pair.running[1].state.last_epoch, 1), Node._open_store

    def opened(self: Node) -> None:
        open_store(self)
        self.state.promise(epoch)

    pair.stop(1)
    with monkeypatch.context() as patched:
        patched.setattr(Node, "_open_store", opened)
        one = pair.start(1, Role.SYNC_MASTER)
    wait_for(lambda: one.roles.mode is RoleMode.FOLLOWING)
    said = f"the promotion of this node to epoch {epoch} has not come to its end before a restart"
    assert str(one.roles.reason).startswith(said)
    assert ("demote", "superseded") not in dict(one.audit.counted())
    command(one)
    wait_for(lambda: writable(one) and one.roles.reason is None)


def test_a_superseded_master_whose_role_was_never_saved_stays_superseded(pair: Nodes) -> None:
    """Else a restart would take its role for an order that came since, and take it back."""
    one, two = pair.running[1], pair.running[2]
    with role_unsaved(two):
        order(pair, 2, Role.SYNC_MASTER)
        wait_for(lambda: writable(two) and cannot_be_saved(two))
        # A command is for the epoch that its node knows.
        wait_for(lambda: linked(one) and one.state.last_epoch == two.state.last_epoch)
        command(one)
        wait_for(lambda: writable(one) and two.roles.mode is RoleMode.FOLLOWING)
    wait_for(lambda: two.state.data.role_followed is Role.SYNC_MASTER)
    said = f"superseded by node 1 (epoch {one.state.last_epoch}); this node follows"
    wait_for(lambda: str(two.roles.reason).startswith(said))
    pair.stop(2)
    two = pair.start(2, Role.SYNC_MASTER)
    assert str(two.roles.reason).startswith(said) and writable(one)


def test_an_order_that_is_refused_for_good_is_refused_once(pair: Nodes) -> None:
    """Also if that cannot be saved: the node does not try again until its disk works."""
    one, two = pair.running[1], pair.running[2]
    meant = one.state.last_epoch
    command(one)
    wait_for(lambda: one.state.last_epoch > meant and writable(one))
    wait_for(lambda: linked(two) and two.state.last_epoch == one.state.last_epoch)
    two.roles._one_shot.meant_epoch = lambda: meant  # type: ignore[method-assign]
    with role_unsaved(two):
        order(pair, 2, Role.SYNC_MASTER)
        wait_for(lambda: two.roles.mode is RoleMode.FOLLOWING and cannot_be_saved(two))
    wait_for(lambda: two.state.data.role_followed is Role.SYNC_MASTER)
    wait_for(lambda: "since this node was told to become master" in str(two.roles.reason))
    assert dict(two.audit.counted())["promote", "refused"] == 1 and writable(one)


OPTIONS = pytest.mark.parametrize(
    ("kind", "step"),
    [("file", "read_bytes"), ("file", "remove"), ("file", "sync_dir"),
     ("ZooKeeper", "replace_bytes")],
)  # fmt: skip


@OPTIONS
def test_an_order_waits_until_its_options_are_taken_durably(
    pair: Nodes, kind: str, step: str
) -> None:
    """Without them a promotion could do what the operator has ruled out."""
    one, two, disk = pair.running[1], pair.running[2], FailingDisk(step)
    give = orders_by(kind, pair, 2, disk)
    give(Role.SYNC_MASTER, no_catch_up=True)
    assert disk.failed.wait(60)
    wait_for(lambda: cannot_be_saved(two))
    assert two.roles.mode is RoleMode.FOLLOWING and linked(two) and writable(one)
    disk.bad = False
    wait_for(lambda: writable(two) and two.roles.reason is None)
    assert two.roles._flags.no_catch_up
    assert dict(two.audit.counted())["promote", "asked"] == 1
    assert two.roles._one_shot.take_flags("promote", two.state.last_epoch) is None, "once"


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_flip_keeps_its_condition_though_the_clocks_differ(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Without the answer of the master its puts that no slave has confirmed would be cut."""
    one, two = pair.running[1], pair.running[2]
    give = orders_by("ZooKeeper", pair, 2)
    ask_all = peer.ask_all
    with monkeypatch.context() as patched:
        silent = frozenset({1})
        patched.setattr(promoter, "ask_all", partial(ask_all, skip=silent))
        give(Role.SYNC_MASTER, ahead_ms=hours * 3_600_000, needed_node=1, no_catch_up=True)
        wait_for(lambda: "waiting for node 1, which may have" in str(two.roles.reason))
        assert two.roles._flags == Flags(needed_node=1, meant_epoch=two.state.last_epoch)
        assert writable(one) and not writable(two)
    wait_for(lambda: writable(two) and two.roles.reason is None)


@contextlib.contextmanager
def unread(node: Node) -> Iterator[None]:
    """Let the node's thread of roles read nothing meanwhile: its process is stopped, say."""
    stopped, goes_on = threading.Event(), threading.Event()
    read = node.roles._read_config

    def held() -> Config | None:
        stopped.set()
        goes_on.wait()
        return read()

    node.roles._read_config = held
    assert stopped.wait(60)
    try:
        yield
    finally:
        node.roles._read_config = read
        goes_on.set()


@pytest.mark.parametrize("late", ["by time", "by epoch"])
def test_a_flip_by_file_keeps_its_condition_though_it_is_taken_late(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """SIGSTOP, or a disk that was too full to take the options: the role is followed later."""
    one, two = pair.running[1], pair.running[2]
    epoch = two.state.last_epoch
    with monkeypatch.context() as patched:
        patched.setattr(promoter, "ask_all", partial(peer.ask_all, skip=frozenset({1})))
        with unread(two):
            if late == "by time":
                command(two, ahead_ms=-3_600_000, needed_node=1, force_unclean=True)
            else:
                command(two, needed_node=1, force_unclean=True)
                command(one)
                wait_for(lambda: two.state.last_epoch > epoch and writable(one))
            order(pair, 2, Role.SYNC_MASTER)
        said = "waiting for node 1, which may"
        if late == "by epoch":  # it has followed the later one since
            said = f"node 1 has opened epoch {one.state.last_epoch} since this node was told"
        wait_for(lambda: said in str(two.roles.reason) or writable(two))
        assert writable(one) and two.roles._flags == Flags(needed_node=1, meant_epoch=epoch)
        assert not once_file(two).exists()
        if late == "by time":
            assert two.state.data.needed_node == 1
    if late == "by time":
        wait_for(lambda: writable(two))
    else:
        wait_for(lambda: two.state.data.needed_node is None)
        assert writable(one)


def test_a_flip_keeps_its_condition_though_its_node_was_down_before_it_took_it(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It crashed right after the command, and came back after an hour."""
    two = pair.running[2]
    pair.stop(2)
    command(two, ahead_ms=-3_600_000, needed_node=1, no_catch_up=True)
    with monkeypatch.context() as patched:
        patched.setattr(promoter, "ask_all", partial(peer.ask_all, skip=frozenset({1})))
        two = pair.start(2, Role.SYNC_MASTER)
        wait_for(lambda: "waiting for node 1, which may" in str(two.roles.reason) or writable(two))
        assert not writable(two) and not two.roles._flags.no_catch_up
        command(two)  # "if it is gone for good, `hastore promote` goes on without it"
        wait_for(lambda: writable(two) and two.state.data.needed_node is None)


def test_a_flip_in_zookeeper_keeps_its_condition_though_its_node_was_down(pair: Nodes) -> None:
    two = pair.running[2]
    give, epoch = orders_by("ZooKeeper", pair, 2), two.state.last_epoch
    source = two.roles._one_shot
    assert isinstance(source, RegistryRoles)
    with unread(two):
        give(Role.SYNC_MASTER, ahead_ms=-3_600_000, needed_node=1)
        assert source.first().role is Role.SYNC_MASTER  # as at a start
        kept: list[Flags] = []
        found = source.take_flags("promote", epoch, kept.append, new_role=True)
        assert found == Flags(needed_node=1, meant_epoch=epoch) and kept == [found]
        assert source.take_flags("promote", epoch, new_role=True) is None, "once"


@pytest.mark.parametrize("kind", ["file", "ZooKeeper"])
def test_a_flip_keeps_its_condition_though_its_role_is_replaced_before_its_options_are_taken(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another operator calls it off in that moment: the node must not become master without it."""
    one, two = pair.running[1], pair.running[2]
    give = orders_by(kind, pair, 2)
    source, read, turns = two.roles._one_shot, two.roles._read_config, []

    def call_off() -> None:
        if isinstance(source, RegistryRoles):
            from hastore.registry.node_registry import AssignedRole

            source.registry.wanted = AssignedRole(Role.SLAVE)
        else:  # the role first, then the options: FilePlace.change
            pair.changed[2] = pair.config(2, Role.SLAVE)
            once_file(two).unlink()

    def replaced() -> Config | None:
        changed = read()
        if changed is not None and changed.role is Role.SYNC_MASTER:
            call_off()
        elif turns or changed is not None:
            turns.append(changed)
        return changed

    two.roles._read_config = replaced
    monkeypatch.setattr(promoter, "ask_all", partial(peer.ask_all, skip=frozenset({1})))
    give(Role.SYNC_MASTER, needed_node=1)
    wait_for(lambda: len(turns) > 2)  # it has read that it is a slave, and done so
    assert ("promote", "done") not in dict(two.audit.counted()) and writable(one)


def test_a_master_that_a_flip_has_made_waits_for_nobody_after_a_crash(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the answer when it opened its epoch; the old master may be gone since."""
    two = pair.running[2]
    with role_unsaved(two):
        orders_by("file", pair, 2)(Role.SYNC_MASTER, needed_node=1)
        wait_for(lambda: writable(two) and cannot_be_saved(two))
        assert two.state.data.role_followed is Role.SLAVE
        pair.stop(2)
    monkeypatch.setattr(promoter, "ask_all", partial(peer.ask_all, skip=frozenset({1})))
    two = pair.start(2, Role.SYNC_MASTER)
    wait_for(lambda: "waiting for node 1, which may" in str(two.roles.reason) or writable(two))
    assert writable(two)


def test_a_flip_of_long_ago_spares_a_master_of_a_newer_epoch(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node was stopped since: the options came late because the order is old."""
    two = pair.running[2]
    give, epoch = orders_by("ZooKeeper", pair, 2), two.state.last_epoch
    later = next_epoch(epoch, 1)

    def ask_all(*args: Any, **kwargs: Any) -> list[SurveyReply]:
        """Node 1 has opened an epoch of which node 2 has not heard."""
        return [
            each if each.hello is None else dataclasses.replace(
                each,
                hello=msgspec.structs.replace(
                    each.hello, promised_epoch=later, open_epoch=later
                ),
            )
            for each in peer.ask_all(*args, **kwargs)
        ]  # fmt: skip

    monkeypatch.setattr(promoter, "ask_all", ask_all)
    give(Role.SYNC_MASTER, ahead_ms=-3_600_000, needed_node=1)
    wait_for(lambda: dict(two.audit.counted()).get(("promote", "asked")) == 1)
    wait_for(lambda: two.roles.mode is not RoleMode.PROMOTING)
    said = f"node 1 has opened epoch {later} since this node was told to become master"
    assert said in str(two.roles.reason)
    assert two.state.last_epoch == epoch and not writable(two)


@SOURCES
def test_a_flip_keeps_its_condition_over_a_restart(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its options are used up by then, and its role was not followed yet."""
    one, two = pair.running[1], pair.running[2]
    give = orders_by(kind, pair, 2)
    with monkeypatch.context() as patched:
        patched.setattr(promoter, "ask_all", partial(peer.ask_all, skip=frozenset({1})))
        give(Role.SYNC_MASTER, needed_node=1)
        said = "waiting for node 1, which may have"
        wait_for(lambda: said in str(two.roles.reason))
        pair.stop(2)
        two = pair.start(2, Role.SYNC_MASTER)
        wait_for(lambda: said in str(two.roles.reason) or writable(two))
        assert writable(one) and not writable(two)
    wait_for(lambda: writable(two))
    pair.stop(2)
    two = pair.start(2, Role.SYNC_MASTER)
    assert two.roles._flags == Flags()


def test_a_flip_to_a_node_whose_file_says_master_keeps_its_condition_over_a_restart(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node was promoted by hand; the flip goes back before anybody has made it a slave."""
    one, two = pair.running[1], pair.running[2]
    order(pair, 2, Role.SYNC_MASTER)
    wait_for(lambda: writable(two) and linked(one))
    wait_for(lambda: one.state.last_epoch == two.state.last_epoch)
    with monkeypatch.context() as patched:
        patched.setattr(promoter, "ask_all", partial(peer.ask_all, skip=frozenset({2})))
        command(one, needed_node=2)
        said = "waiting for node 2, which may have"
        wait_for(lambda: said in str(one.roles.reason))
        pair.stop(1)
        one = pair.start(1, Role.SYNC_MASTER)
        assert said in str(one.roles.reason) and writable(two) and not writable(one)
    wait_for(lambda: writable(one) and one.state.data.needed_node is None)


def test_a_masters_order_that_a_restart_has_interrupted_goes_on(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked for promises, so nobody takes puts; no other node was ordered to."""
    one = pair.running[1]
    epoch = one.state.last_epoch
    with monkeypatch.context() as patched:

        def refused(*_: object) -> None:
            raise PromotionRefused("waiting")

        patched.setattr(promoter.Promoter, "_open", refused)
        command(one)
        wait_for(lambda: one.state.data.promised_epoch > epoch and not writable(one))
        pair.stop(1)
    one = pair.start(1, Role.SYNC_MASTER)
    wait_for(lambda: writable(one))
    assert one.state.last_epoch > epoch and not one.state.data.promoting
    pair.stop(1)
    one = pair.start(1, Role.SYNC_MASTER)
    assert dict(one.audit.counted()).get(("promote", "asked")) is None, "it resumes its epoch"


@pytest.mark.parametrize("promised", [False, True])
def test_a_master_whose_epoch_is_over_takes_an_order_before_every_node_answers(
    pair: Nodes, promised: bool
) -> None:
    """It says itself: or run `hastore promote`. `promised`: it was restarted in its own return."""
    epoch = pair.running[1].state.last_epoch
    pair.stop(1, 2)
    state = NodeState(REAL, pair.config(1, Role.SYNC_MASTER).store.root)
    state.load(1, "test", "g0")
    state.save(epoch_over=True, promised_epoch=next_epoch(epoch, 1) if promised else epoch)
    one = pair.start(1, Role.SYNC_MASTER)
    assert "must answer, missing: node 2 (or run `hastore promote`)" in str(one.roles.reason)
    command(one)
    wait_for(lambda: writable(one))


@pytest.mark.parametrize("kind", ["while it was down", "it waits"])
def test_an_old_order_spares_a_master_that_only_another_node_reaches(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It came after the order, and serves, though it is cut off from this node."""
    silent = {1} if kind == "while it was down" else {1, 3}

    def ask_all(member: Member, purpose: Purpose, **more: Any) -> list[SurveyReply]:
        skip = more.pop("skip", frozenset()) | (silent if member.config.node == 2 else set())
        return peer.ask_all(member, purpose, skip=frozenset(skip), **more)

    nodes = Nodes(tmp_path, 3, 1)
    try:
        one, two = nodes.start(1, Role.SYNC_MASTER), nodes.start(2, Role.SLAVE)
        three = nodes.start(3, Role.SLAVE)
        wait_for(lambda: writable(one) and linked(two) and linked(three))
        before = one.state.last_epoch
        wait_for(lambda: two.state.last_epoch == three.state.last_epoch == before)
        if kind == "while it was down":
            nodes.stop(2)
        for module in (promoter, role_service, ha_client):
            monkeypatch.setattr(module, "ask_all", ask_all)
        if kind == "it waits":
            order(nodes, 2, Role.SYNC_MASTER)
            wait_for(lambda: "waiting for node" in str(two.roles.reason))
        command(one)
        wait_for(lambda: one.state.last_epoch > before and writable(one))
        epoch = one.state.last_epoch
        wait_for(lambda: linked(three) and three.state.last_epoch == epoch)
        if kind == "while it was down":
            two = nodes.start(2, Role.SYNC_MASTER)
        silent.discard(3)
        wait_for(lambda: writable(two) or two.roles.mode is RoleMode.FOLLOWING)
        assert f"node 1 has opened epoch {epoch} since this node" in str(two.roles.reason)
        assert writable(one) and linked(three)
        command(two)
        wait_for(lambda: writable(two))
    finally:
        nodes.stop()


def test_late_options_without_a_new_role_promote_nothing(pair: Nodes) -> None:
    """They may be those of a command of long ago."""
    one = pair.running[1]
    give = orders_by("ZooKeeper", pair, 1)
    source, before, turns = one.roles._one_shot, dict(one.audit.counted()), []
    assert isinstance(source, RegistryRoles)
    one.roles._read_config = lambda: turns.append(1) or source.read()
    give(Role.SYNC_MASTER, ahead_ms=-3_600_000, needed_node=2)
    wait_for(lambda: source._memory.data.once == "1")
    seen = len(turns)
    one.roles.wake()
    wait_for(lambda: len(turns) > seen + 1)
    assert dict(one.audit.counted()) == before and writable(one)


@pytest.mark.parametrize("hours", [-1, 1])
def test_options_that_do_not_count_are_a_problem_of_the_status(pair: Nodes, hours: int) -> None:
    """Else who gives `--force-unclean` again and again sees only that it has no effect."""
    two = pair.running[2]
    give = orders_by("ZooKeeper", pair, 2)
    source = two.roles._one_shot
    assert isinstance(source, RegistryRoles) and source.registry.problems() == []
    give(Role.SYNC_MASTER, ahead_ms=hours * 3_600_000, force_unclean=True)
    wait_for(lambda: writable(two))
    (problem,) = source.registry.problems()
    when = "3[56].. s " + ("in the future" if hours > 0 else "ago")
    assert re.search(f"the options of `hastore promote` do not count, .* {when}", problem)
    give(Role.SLAVE)
    give(Role.SYNC_MASTER, id="2", force_unclean=True)
    wait_for(lambda: source.registry.problems() == [])


@OPTIONS
def test_a_demotion_ends_an_order_whose_options_cannot_be_taken(
    pair: Nodes, kind: str, step: str
) -> None:
    one, two, disk = pair.running[1], pair.running[2], FailingDisk(step)
    give = orders_by(kind, pair, 2, disk)
    give(Role.SYNC_MASTER, no_catch_up=True)
    assert disk.failed.wait(60)
    give(Role.SLAVE)
    wait_for(lambda: two.roles._changed is None)
    disk.bad = False
    wait_for(lambda: two.roles.reason is None)
    assert two.roles.mode is RoleMode.FOLLOWING and writable(one) and linked(two)
    assert ("promote", "asked") not in dict(two.audit.counted())


def test_a_command_to_a_master_waits_until_its_options_are_taken_durably(pair: Nodes) -> None:
    one, disk = pair.running[1], FailingDisk("sync_dir")
    one.roles._one_shot = OneShotFlags(disk, one.config.store.root, SYSTEM_CLOCK)
    before = one.state.last_epoch
    command(one)
    assert disk.failed.wait(60)
    wait_for(lambda: cannot_be_saved(one))
    assert writable(one) and one.state.last_epoch == before
    disk.bad = False
    wait_for(lambda: one.state.last_epoch > before and writable(one))


@OPTIONS
def test_an_order_whose_options_were_taken_late_spares_a_master_of_a_newer_epoch(
    pair: Nodes, kind: str, step: str
) -> None:
    one, two, disk = pair.running[1], pair.running[2], FailingDisk(step)
    give = orders_by(kind, pair, 2, disk)
    give(Role.SYNC_MASTER, no_catch_up=True)
    assert disk.failed.wait(60)
    before = one.state.last_epoch
    command(one)
    wait_for(lambda: one.state.last_epoch > before and writable(one))
    epoch = one.state.last_epoch
    wait_for(lambda: linked(two) and two.state.last_epoch == epoch)
    disk.bad = False
    said = f"node 1 has opened epoch {epoch} since this node was told to become master"
    wait_for(lambda: said in str(two.roles.reason))
    assert writable(one) and one.state.last_epoch == epoch


def test_a_master_that_cannot_save_who_supersedes_it_follows_all_the_same(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair.running[1]
    higher = one.state.last_epoch + (1 << 16) + 1  # of node 2

    def fails(*_: object, **_more: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(one.state, "promise", fails)
    observed = partial(one.member.observe_epoch, higher, "node 2")
    monkeypatch.setattr(one.roles, "_watch_group", observed)
    wait_for(lambda: one.roles.mode is RoleMode.FOLLOWING)
    assert not writable(one)
    wait_for(lambda: str(one.roles.reason).startswith(f"superseded by node 2 (epoch {higher})"))
    assert dict(one.audit.counted())["demote", "superseded"] == 1


def moved(nodes: Nodes, number: int) -> None:
    """Give a node that is stopped new ports in the files that are written from now on."""
    ports = Ports()
    places = {"api": f"tcp://127.0.0.1:{ports.take()}", "ha": f"127.0.0.1:{ports.take()}"}
    one = msgspec.structs.replace(nodes.addresses[number], **places)
    nodes.addresses = {**nodes.addresses, number: one}


def test_a_master_finds_a_slave_that_has_moved_once_it_is_the_master(pair: Nodes) -> None:
    """The group would have no node in sync, and no way back, before the old master's restart."""
    one = pair.running[1]
    pair.stop(2)
    moved(pair, 2)
    order(pair, 1, Role.SYNC_MASTER)
    two = pair.start(2, Role.SLAVE)
    wait_for(lambda: linked(two))
    assert one.backend.status()["config_pending"] == []
    order(pair, 2, Role.SYNC_MASTER)
    wait_for(lambda: writable(two) and linked(one))
    assert one.backend.master_map().master_api == pair.addresses[2].api, "clients find it too"
    order(pair, 1, Role.SLAVE)
    wait_for(lambda: one.roles.configured_role is Role.SLAVE)
    order(pair, 1, Role.SYNC_MASTER)  # and back
    wait_for(lambda: writable(one) and linked(two))


def test_a_slave_names_the_address_at_which_it_finds_no_master(pair: Nodes) -> None:
    pair.stop(1)
    two = pair.running[2]
    wait_for(lambda: f"node 1 at {pair.addresses[1].ha} (" in str(two.roles.client.problem))


def drop_unsynced(nodes: Nodes, number: int, end: int) -> None:
    """Let the disk of a node that was killed lose what its log has from `end` on, in silence."""
    root = pathlib.Path(nodes.config(number, Role.SLAVE).store.root)
    with open(root / "commitlog" / f"{0:020d}", "r+b") as file:
        file.seek(end)
        left = len(file.read())
        file.seek(end)
        file.write(bytes(left))
    page = LimitsPage(REAL, str(root))
    known = read_limits(REAL, str(root))
    assert known is not None
    page.open(known._replace(
        flushed_offset=end, record_end=end, confirmed_offset=min(known.confirmed_offset, end)
    ))  # fmt: skip
    page.close()
    (root / "abort").touch()
    state = NodeState(REAL, str(root))
    state.load(number, "test", "g0")
    state.save(clean_stop=False)


@pytest.mark.parametrize("late", [False, True])
def test_a_master_whose_slave_has_more_of_its_epoch_begins_a_new_one(
    pair: Nodes, late: bool
) -> None:
    """Whatever took the end of its log: in its old epoch it would write other bytes there. `late`:
    it has resumed the epoch before that slave answers.
    """
    one, two = pair.running[1], pair.running[2]
    fill_a_little(one)
    kept = one.store.max_offset
    fill_a_little(one)
    end, epoch = one.store.max_offset, one.state.last_epoch
    wait_for(lambda: two.store.confirmed_offset == end)
    pair.stop(1)
    drop_unsynced(pair, 1, kept)
    if late:
        pair.stop(2)
    one = pair.start(1, Role.SYNC_MASTER)
    if late:
        assert one.member.open_epoch == epoch
        two = pair.start(2, Role.SLAVE)
        wait_for(lambda: one.state.last_epoch > epoch)
    wait_for(lambda: writable(one))
    assert one.state.last_epoch > epoch and one.state.history[-1].start == end
    assert not one.state.data.unclean
    wait_for(lambda: linked(two) and two.state.last_epoch == one.state.last_epoch)
    with one.store.view(kept, end - kept) as mine, two.store.view(kept, end - kept) as theirs:
        assert mine == theirs and any(mine)


def test_a_slave_that_missed_what_was_written_over_a_lost_end_is_known_in_the_next_epoch(
    pair: Nodes,
) -> None:
    """By the histories without resumptions the old epoch reaches beyond that slave's end."""
    one, two = pair.running[1], pair.running[2]
    fill_a_little(one)
    kept = one.store.max_offset
    fill_a_little(one)
    end, epoch = one.store.max_offset, one.state.last_epoch
    wait_for(lambda: two.store.confirmed_offset == end)
    pair.stop(1)
    drop_unsynced(pair, 1, kept)
    pair.stop(2)
    one = pair.start(1, Role.ASYNC_MASTER)
    assert one.member.open_epoch == epoch and one.store.max_offset == kept
    fill_a_little(one)
    fill_a_little(one)
    command(one)
    wait_for(lambda: one.state.last_epoch > epoch and writable(one))
    assert one.state.history[-1].start > end
    two = pair.start(2, Role.SLAVE)
    problem = "the group disagrees"
    wait_for(lambda: linked(two) or problem in str(two.roles.client and two.roles.client.problem))
    assert not linked(two) and two.store.max_offset == end
    command(two, "demote", accept_loss=True)
    wait_for(lambda: linked(two) and two.state.history == one.state.history)
    size = one.store.max_offset
    assert two.store.max_offset == size
    with one.store.view(0, size) as mine, two.store.view(0, size) as theirs:
        assert mine == theirs


def test_an_accepted_loss_counts_for_the_master_that_the_operator_saw_and_no_later_one(
    pair: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """To a later one more may be lost, which nobody has accepted."""
    one, two = pair.running[1], pair.running[2]
    fill_a_little(one)
    kept = one.store.max_offset
    fill_a_little(one)
    end, epoch = one.store.max_offset, one.state.last_epoch
    wait_for(lambda: two.store.confirmed_offset == end)
    pair.stop(1)
    drop_unsynced(pair, 1, kept)
    pair.stop(2)
    one = pair.start(1, Role.ASYNC_MASTER)
    fill_a_little(one)
    fill_a_little(one)
    command(one)
    wait_for(lambda: one.state.last_epoch > epoch and writable(one))
    seen, two = one.state.last_epoch, pair.start(2, Role.SLAVE)
    problem = "the group disagrees"
    wait_for(lambda: problem in str(two.roles.client and two.roles.client.problem))
    pair.stop(1)
    command(two, "demote", accept_loss=True)
    wait_for(lambda: two.roles.client and two.roles.client.accept_loss)
    one = pair.start(1, Role.SLAVE)
    assert two.store.max_offset == end
    order(pair, 1, Role.SYNC_MASTER)
    wait_for(lambda: one.state.last_epoch > seen and writable(one))
    wait_for(lambda: two.roles.client and not two.roles.client.accept_loss)
    wait_for(lambda: linked(two) or problem in str(two.roles.client and two.roles.client.problem))
    assert not linked(two) and two.store.max_offset == end
    assert "--accept-loss was given before node 1 was known as the master of epoch" in caplog.text
    pair.stop(1)
    command(two, "demote", accept_loss=True)
    wait_for(lambda: two.roles.client and two.roles.client.accept_loss)
    one = pair.start(1, Role.SYNC_MASTER)  # the same epoch
    wait_for(lambda: linked(two) and two.state.history == one.state.history)


def test_a_master_whose_disk_is_dead_goes_on_read_only_when_another_has_a_higher_epoch(
    pair: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its promise cannot be kept, so nobody gets it, and the store refuses the limits too."""
    one, dead = pair.running[1], OSError(errno.EIO, os.strerror(errno.EIO))

    def refuse(*_args: Any, **_limits: Any) -> None:
        raise StoreBrokenError("a sync has failed") from dead

    with monkeypatch.context() as broken:
        broken.setattr(one.store, "set_limits", refuse)
        higher = (one.state.last_epoch & ~0xFFFF) + (1 << 16) + 2
        reply = SurveyReply(2, "node 2", hello=one.member.hello(Purpose.SURVEY))
        broken.setattr(role_service, "ask_all", lambda *_args, **_given: [reply])
        broken.setattr(role_service, "_greatest_epoch", lambda _replies: higher)
        wait_for(lambda: not writable(one))
        wait_for(lambda: cannot_be_saved(one) or one.failure is not None)
        assert one.failure is None and not one.failed.is_set()
        assert one.roles.alive
    wait_for(lambda: one.roles.mode is RoleMode.FOLLOWING)
