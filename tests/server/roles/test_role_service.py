"""Orders to become master that cannot be carried out now, or that came long ago."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hastore.cli.promote_wait import NO_NEW_EPOCH
from hastore.config.model import Config, Role
from hastore.fs.filesystem import REAL
from hastore.ha import promoter
from hastore.ha.hello import peer
from hastore.server import role_service
from hastore.server.node import Node
from hastore.server.role_service import RoleMode
from hastore.store import replay
from tests.ha.nodes import wait_for
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


def command(node: Node, name: str = "promote", **flags: bool) -> None:
    """Do what `hastore promote` does for a node whose file has the role already."""
    note = {"command": name, "epoch": node.state.last_epoch,
            "wall_ms": int(time.time() * 1000), **flags}  # fmt: skip
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
