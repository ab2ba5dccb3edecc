"""A node's start and stop: what happens in which order."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pathlib
import resource
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from hastore.client import Admin, Producer
from hastore.client.messages import next_file_lack
from hastore.config.model import BindConfig, Config, NodeAddress, RetentionConfig, Role
from hastore.errors import (
    ConfigError,
    Status,
    StoreBrokenError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    UsageError,
)
from hastore.fs.filesystem import REAL, RealFile
from hastore.ha.hello.peer import split_address
from hastore.ha.node.node_state import BOOT_ID_PATH, NodeState
from hastore.record.codec import NO_HOST, build_record
from hastore.server import run
from hastore.server.node import Node
from hastore.server.role_service import RoleMode
from hastore.store.state.limits import LimitsPage, read_limits
from tests.server.kit import config_of, running
from tests.store.kit import message


class Watched:
    """The real file system; notes whether the store is locked when node.json is used."""

    def __init__(self) -> None:
        self.locked = False
        self.seen: list[tuple[str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(REAL, name)
        if not callable(real):
            return real

        def call(*given: Any, **named: Any) -> Any:
            if any("node.json" in str(each) for each in given):
                self.seen.append((name, self.locked))
            return real(*given, **named)

        return call

    def lock(self, path: str) -> Any:
        file = REAL.lock(path)
        self.locked = True
        return _Unlocking(file, self)


class Refusing:
    """The real file system, but node.json cannot be written while `full`."""

    def __init__(self) -> None:
        self.full = False
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def replace_bytes(self, path: str, data: bytes) -> None:
        if self.full and path.endswith("node.json"):
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        REAL.replace_bytes(path, data)


class Rebooted:
    """The real file system, after another boot of the machine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def read_bytes(self, path: str, *limit: int) -> bytes:
        if path == BOOT_ID_PATH:
            return b"12345678-1234-1234-1234-123456789abc\n"
        return REAL.read_bytes(path, *limit)


class Mounted:
    """The real file system, as `mount` says; "": what is mounted is not known."""

    def __init__(self, mount: str) -> None:
        self._mount = mount

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def mount_id(self, path: str) -> str:
        del path
        return self._mount


def node_on(config: Config, fs: Any) -> Node:
    return Node(config, lambda: None, fs=fs)


class _Unlocking:
    def __init__(self, file: Any, watched: Watched) -> None:
        self._file = file
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._watched.locked = False
        self._file.close()


def test_node_json_is_read_and_written_under_the_stores_lock(tmp_path: pathlib.Path) -> None:
    watched = Watched()
    node = Node(config_of(tmp_path / "s"), lambda: None, fs=watched)  # type: ignore[arg-type]
    node.start()
    assert node.roles.settled.wait(60)
    node.stop()
    used = {name for name, _ in watched.seen}
    assert len(used) > 1, "node.json was not read and written"
    assert all(locked for _, locked in watched.seen), watched.seen
    assert not watched.locked


def test_a_second_start_while_the_node_runs_changes_nothing(tmp_path: pathlib.Path) -> None:
    node = Node(config_of(tmp_path / "s"), lambda: None)
    node.start()
    try:
        assert node.roles.settled.wait(60)
        node.state.promise(node.state.data.promised_epoch + (1 << 16))
        promised = node.state.data.promised_epoch
        with pytest.raises(StoreInUseError):
            Node(config_of(tmp_path / "s"), lambda: None).start()
    finally:
        node.stop()
    state = NodeState(REAL, str(tmp_path / "s"))
    state.load(1, "test", "g0")
    assert state.data.promised_epoch == promised
    assert state.data.clean_stop
    assert not [t for t in threading.enumerate() if "Service" in t.name]


def test_a_role_that_cannot_be_saved_yet_opens_its_epoch_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second opening would reset the reports of slaves that stay linked."""
    first = Node(config_of(tmp_path / "s"), lambda: None)
    first.start()
    assert first.roles.settled.wait(60)
    first.stop()
    files = Refusing()
    node = Node(config_of(tmp_path / "s"), lambda: None, fs=files)  # type: ignore[arg-type]
    opened: list[int] = []
    real = node.ha.open_epoch

    def open_epoch(entry: Any, *, sync: bool) -> None:
        files.full = not opened
        opened.append(entry.epoch)
        real(entry, sync=sync)

    monkeypatch.setattr(node.ha, "open_epoch", open_epoch)
    node.start()
    try:
        until(lambda: files.refused >= 3)
        assert node.backend.writable_reason() is None
        files.full = False
        until(lambda: node.roles.reason is None and node.roles.settled.is_set())
        assert node.state.data.role_followed is Role.ASYNC_MASTER
    finally:
        files.full = False
        node.stop()
    assert len(opened) == 1


def test_retention_goes_on_after_a_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path / "s")
    store = msgspec.structs.replace(config.store, retention=RetentionConfig(check_interval_ms=10))
    node = Node(msgspec.structs.replace(config, store=store), lambda: None)
    calls: list[Exception | None] = [StoreError("a file is gone"), OSError(5, "EIO"), None]

    def delete_expired(*_: object) -> int:
        failure = calls.pop(0) if len(calls) > 1 else None
        if failure is not None:
            raise failure
        calls.clear()
        return 0

    monkeypatch.setattr(node.store.retention, "delete_expired", delete_expired)
    node.start()
    try:
        until(lambda: not calls)
        assert not node.failed.is_set()
    finally:
        node.stop()


def until(condition: Any, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def stopped_with_20_messages(root: pathlib.Path) -> pathlib.Path:
    """Let a node alone take 20 messages, and leave its store as kill -9 does; return its log."""
    node = Node(config_of(root), lambda: None)
    with running(node):
        for number in range(20):
            results = node.backend.put_encoded([message(number, size=1000)])
            assert results[0][0].status is Status.PUT_OK
        node.store.flush()
    (root / "abort").write_text("1")
    return root / "commitlog" / f"{0:020}"


@pytest.mark.parametrize("page", [None, bytes(4096)], ids=["no page", "zeros"])
def test_without_its_limits_page_a_log_is_not_cut_at_damage(
    tmp_path: pathlib.Path, page: bytes | None
) -> None:
    file = stopped_with_20_messages(tmp_path)
    limits = tmp_path / "hastore" / "limits"
    limits.unlink() if page is None else limits.write_bytes(page)
    raw = bytearray(file.read_bytes())
    raw[len(message(0, size=1000)) * 10 + 200] ^= 1
    file.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(StoreBrokenError, match=r"whole records follow.*nothing was cut"):
            Node(config_of(tmp_path), lambda: None).start()
    assert file.read_bytes() == raw


def test_a_member_without_its_limits_page_is_unclean(tmp_path: pathlib.Path) -> None:
    file = stopped_with_20_messages(tmp_path)
    (tmp_path / "hastore" / "limits").unlink()
    raw = file.read_bytes()
    at = len(message(0, size=1000)) * 10
    file.write_bytes(raw[:at] + bytes(len(raw) - at))  # nobody can see what is missing
    config = config_of(tmp_path)
    other = NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:9", http="127.0.0.1:0")
    config = msgspec.structs.replace(config, role=Role.SLAVE, nodes={**config.nodes, 2: other})
    for _ in range(2):  # a restart does not make it clean
        node = Node(config, lambda: None)
        node.start()
        node.stop()
        assert node.state.data.unclean and node.store.max_offset <= at


@pytest.mark.parametrize("alone", [False, True])
def test_a_member_that_cuts_what_was_confirmed_is_unclean(
    tmp_path: pathlib.Path, alone: bool
) -> None:
    """As a slave whose last record is damaged: its page says less of the log than was confirmed."""
    file = stopped_with_20_messages(tmp_path)
    at = sum(len(message(number, size=1000)) for number in range(19))
    found = read_limits(REAL, str(tmp_path))
    assert found is not None and found.confirmed_offset > at
    page = LimitsPage(REAL, str(tmp_path))
    page.open(found._replace(flushed_offset=at, record_end=at))
    page.close()
    raw = bytearray(file.read_bytes())
    raw[at + 200] ^= 1
    file.write_bytes(raw)
    config = config_of(tmp_path)
    if not alone:
        other = NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:9", http="127.0.0.1:0")
        config = msgspec.structs.replace(config, role=Role.SLAVE, nodes={**config.nodes, 2: other})
    node = Node(config, lambda: None)
    node.start()
    node.stop()
    assert node.state.data.unclean is not alone and node.store.max_offset == at


class Waits:
    """A node that does nothing. A signal comes at step `step` of the main thread's wait for it."""

    def __init__(self, number: int, step: int) -> None:
        self.passes = self.woken = self.stopped = 0
        self._number, self._left = number, step
        self._in_pass = False
        settled = threading.Event()
        settled.set()
        self.roles = types.SimpleNamespace(settled=settled)
        self.failed = self.backend = self.store = self  # all that is asked of these is below
        self.failure = self.broken_reason = None

    def start(self) -> None:
        sys.settrace(self._trace)

    def _trace(self, frame: types.FrameType, event: str, _arg: object) -> Any:
        if os.path.basename(frame.f_code.co_filename) not in ("run.py", "threading.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._in_pass and self._left >= 0:
            if self._left == 0:
                signal.raise_signal(self._number)
            self._left -= 1
        return self._trace

    def ready_line(self) -> str:
        caller = sys._getframe(2)  # was called before it was traced
        caller.f_trace, caller.f_trace_opcodes = self._trace, True
        sys.settrace(self._trace)  # Python 3.12 learns only here that opcodes are traced
        self._in_pass = True
        return "ready"

    def is_set(self) -> bool:
        self.passes += 1
        return False

    def wake(self) -> None:
        self.woken += 1
        sys.settrace(None)
        signal.raise_signal(signal.SIGTERM)

    def stop(self) -> None:
        sys.settrace(None)
        self.stopped += 1


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Put back what a process's node sets for all of it, and end what waits for ever."""

    def expired(*_: object) -> None:
        raise AssertionError(f"the main thread waits for ever; it is traced by {sys.gettrace()}")

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    switch, trace = sys.getswitchinterval(), sys.gettrace()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        yield
    finally:
        sys.settrace(trace)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        sys.setswitchinterval(switch)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_obeyed_at_whatever_step_of_the_wait_it_comes(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler runs in the thread that waits, which may hold the lock of what it waits for."""
    monkeypatch.setattr(run, "ConfigWatch", lambda *_: None)
    monkeypatch.setattr(run, "LOOK_S", 0.001)
    for step in itertools.count():
        node = Waits(number, step)
        monkeypatch.setattr(run, "_make", lambda *_, made=node: made)
        with as_before():
            assert run.run_node("", {}, None) == 0
        assert (node.stopped, node.woken) == (1, int(number == signal.SIGHUP))
        if node.passes > 3:  # it came after a whole pass: all steps were tried
            break
    assert step > 20


def test_a_power_loss_counts_though_the_other_nodes_were_taken_out_of_the_file(
    tmp_path: pathlib.Path,
) -> None:
    """They may have what this node has lost, and was acknowledged."""
    alone = config_of(tmp_path / "node")
    other = NodeAddress(api="tcp://127.0.0.1:1", ha="127.0.0.1:1", http="127.0.0.1:1")
    pair = msgspec.structs.replace(alone, nodes={**alone.nodes, 2: other}, acks=1)
    with running(Node(pair, lambda: None)) as node:
        assert node.state.history[-1].nodes == (1, 2)
    state = NodeState(REAL, alone.store.root)
    state.load(1, "test", "g0")
    state.save(clean_stop=False)
    with running(Node(alone, lambda: None, fs=Rebooted())) as node:
        assert node.state.data.unclean and not node.member.open_epoch
        assert "unclean: node 1" in str(node.roles.reason)
        assert "node 2 is in the list in force, but not in `nodes`" in str(node.roles.reason)


def stopped_master(root: pathlib.Path, *, clean: bool) -> int:
    """Let a node alone become master and stop, cleanly or by a power loss; return its epoch."""
    with running(Node(config_of(root), lambda: None)) as node:
        assert node.roles.mode is RoleMode.MASTER
    if not clean:
        node.state.save(clean_stop=False)
    return node.state.last_epoch


def start_on_a_taken_port(root: pathlib.Path, kind: str, fs: Any = REAL) -> None:
    """Start a node whose configuration names a port that another process has."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        bind = BindConfig(**{kind: f"tcp://{address}" if kind == "api" else address})
        config = msgspec.structs.replace(config_of(root), bind=bind)
        node = Node(config, lambda: None, fs=fs)
        with pytest.raises(ConfigError, match="cannot (bind|listen)"):
            node.start()
    if kind != "ha":
        socket.create_server(split_address(node.ha_address)).close()  # it is free again
    if kind == "api":
        assert node._http is not None and node._http._listener.fileno() == -1


@pytest.mark.parametrize("kind", ["ha", "http", "api"])
def test_a_clean_stop_outlives_a_start_that_cannot_bind(tmp_path: pathlib.Path, kind: str) -> None:
    """The address is taken, or its interface not up yet; then the machine boots again."""
    epoch = stopped_master(tmp_path, clean=True)
    start_on_a_taken_port(tmp_path, kind)
    with running(Node(config_of(tmp_path), lambda: None, fs=Rebooted())) as node:
        assert node.roles.mode is RoleMode.MASTER and node.member.open_epoch == epoch
        assert not node.state.data.epoch_over and not node.state.data.unclean


def test_a_power_loss_outlives_a_start_that_cannot_bind(tmp_path: pathlib.Path) -> None:
    epoch = stopped_master(tmp_path, clean=False)
    start_on_a_taken_port(tmp_path, "ha", Rebooted())
    with running(Node(config_of(tmp_path), lambda: None, fs=Rebooted())) as node:
        assert node.roles.mode is RoleMode.MASTER and node.member.open_epoch > epoch


@pytest.mark.parametrize(
    ("before", "after", "over"),
    [("1", "2", True), ("1", "", True), ("1", "1", False), ("", "2", False)],
)
def test_a_new_mount_in_the_same_boot_counts_as_a_power_loss(
    tmp_path: pathlib.Path, before: str, after: str, over: bool
) -> None:
    """The kernel may have shut the file system down: what was not synced went with it. Where it was
    not known what is mounted, as with the version before, nothing changes.
    """
    for clean in (False, True):
        root = tmp_path / str(clean)
        with running(node_on(config_of(root), Mounted(before))) as node:
            epoch = node.state.last_epoch
        if not clean:
            node.state.save(clean_stop=False)
            (root / "abort").touch()
        with running(node_on(config_of(root), Mounted(after))) as node:
            assert (node.member.open_epoch > epoch) is (over and not clean)
        with running(node_on(config_of(root), Mounted(after))) as again:
            assert again.member.open_epoch == node.state.last_epoch


class FailingSyncs(Mounted):
    """A disk whose log cannot be synced while `fails`."""

    fails = False

    def open(self, path: str, **how: Any) -> Any:
        file = REAL.open(path, **how)
        if "/commitlog/" in path:
            sync = file.sync

            def refused() -> None:
                if self.fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
                sync()

            file.sync = refused  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize("role", [Role.ASYNC_MASTER, Role.SLAVE])
def test_a_failed_sync_counts_as_a_power_loss_at_the_next_start(
    tmp_path: pathlib.Path, role: Role
) -> None:
    """The kernel may have dropped what it could not write: nothing else tells in the same boot."""
    config = msgspec.structs.replace(config_of(tmp_path), role=role)
    if role is Role.SLAVE:
        other = NodeAddress(api="tcp://127.0.0.1:1", ha="127.0.0.1:1", http="127.0.0.1:1")
        config = msgspec.structs.replace(config, nodes={**config.nodes, 2: other}, acks=1)
    disk = FailingSyncs("")
    with running(node_on(config_of(tmp_path), disk)) as node:
        epoch = node.state.last_epoch
        record = build_record("t", b"x", queue_id=0, properties=(), born_timestamp_ms=1,
                              born_host=NO_HOST)  # fmt: skip
        disk.fails = True
        node.backend.put_encoded([record])
        with pytest.raises(StoreBrokenError):
            node.store.flush()
        with pytest.raises(StoreBrokenError):
            node.store.close(unlock=False)
        node.state.save(clean_stop=False)
    disk.fails = False
    for _ in range(2):  # the mark outlives a second start
        with running(node_on(config, disk)) as node:
            if role is Role.SLAVE:
                assert node.state.data.unclean and node.state.data.epoch_over
            else:
                assert node.member.open_epoch > epoch and not node.state.data.unclean
                epoch = node.member.open_epoch - 1


@pytest.mark.parametrize("step", ["kept positions", "boot"])
def test_a_power_loss_outlives_a_start_that_fails_before_it_is_noted(
    tmp_path: pathlib.Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = stopped_master(tmp_path, clean=False)

    def fails(*_: object, **_more: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    node = Node(config_of(tmp_path), lambda: None, fs=Rebooted())
    if step == "boot":
        monkeypatch.setattr(node.state, "begin_boot", fails)
    else:
        monkeypatch.setattr(node.retention.kept, "load", fails)
    with pytest.raises(OSError, match="Input/output"):
        node.start()
    with running(Node(config_of(tmp_path), lambda: None, fs=Rebooted())) as node:
        assert node.roles.mode is RoleMode.MASTER and node.member.open_epoch > epoch


def test_a_status_while_the_node_becomes_master_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """The epoch may open between two steps of the status, which has read the history before."""
    config = config_of(tmp_path)
    other = NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:9", http="127.0.0.1:0")
    config = msgspec.structs.replace(config, role=Role.SLAVE, nodes={**config.nodes, 2: other})
    with running(Node(config, lambda: None)) as node:
        member = node.member

        def opens(*_: object) -> list[str]:
            member.open_epoch = 1 << 16 | 1
            return []

        monkeypatch.setattr("hastore.server.backend.pending_changes", opens)
        status = node.backend.status()
        member.open_epoch = 0
    assert (status["epoch"], status["acks"]) == (0, node.config.effective_acks)


def test_a_topic_exists_once_a_message_of_it_is_acknowledged(tmp_path: pathlib.Path) -> None:
    """Replay may read the message later; until then the queues do not know the topic."""
    with running(Node(config_of(tmp_path), lambda: None)) as node:
        address = [node.api.endpoint]
        with Producer(address) as producer, Admin(address) as admin:
            with node.store.replay.paused():
                for topic in ("kept", "gone", "anew"):
                    producer.send_sync(topic, b"", queue=3)
                with pytest.raises(UsageError, match="topic kept exists, with 4 queues"):
                    admin.create_topic("kept", queues=1)
                assert admin.set_topic("kept", order=True).read_queues == 4
                admin.delete_topic("gone")
                end = node.store.max_offset
                admin.delete_topic("gone")
                admin.delete_topic("never")
                assert node.store.max_offset == end, "there is nothing to delete"
                with pytest.raises(UsageError, match="there is no topic gone"):
                    admin.set_topic("gone", queues=1)
                admin.delete_topic("anew")
                producer.send_sync("anew", b"")
                with pytest.raises(UsageError, match="topic anew exists"):
                    admin.create_topic("anew")
                producer.send_sync("last", b"")
                admin.delete_topic("last")
            assert node.store.wait_dispatched(node.store.max_offset, 60)
            assert sorted(admin.topic_configs()) == ["anew", "kept"]


def test_the_problem_of_a_node_without_room_for_its_next_log_file_is_known_to_a_flip(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command knows it by how it begins."""
    with running(Node(config_of(tmp_path), lambda: None)) as node:
        assert next_file_lack(node.backend.status()) is None

        def refuse(file: RealFile, size: int) -> None:
            raise StoreFullError(f"{file.path}: no room for {size} bytes")

        monkeypatch.setattr(RealFile, "allocate", refuse)
        with Producer(node.api.endpoint) as producer:
            for _ in range(3):
                producer.send("t", bytes(30_000))
            until(lambda: next_file_lack(node.backend.status()) is not None)
            monkeypatch.undo()
            until(lambda: next_file_lack(node.backend.status()) is None)
