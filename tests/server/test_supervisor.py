"""What systemd is told of a node, and the unit that asks for it."""

from __future__ import annotations

import logging
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

from hastore.server.node import Node
from hastore.server.run import Supervisor, state_of
from hastore.testing import Group
from tests.server.kit import config_of

UNIT = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "hastore@.service"


@pytest.fixture
def manager(tmp_path: pathlib.Path) -> Iterator[socket.socket]:
    """A socket as systemd makes it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(60)
        yield made


def said(manager: socket.socket) -> list[str]:
    """Return all that was said up to now."""
    found: list[str] = []
    manager.setblocking(False)
    try:
        while True:
            found += manager.recv(65_536).decode().splitlines()
    except BlockingIOError:
        return found


def test_the_watchdog_is_told_twice_in_its_time(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "600000"}
    one = Supervisor(environment, 7)
    one.ready(0.0)
    assert said(manager) == ["READY=1"]
    assert not one.is_due(299.0) and one.is_due(300.0)
    one.alive("SLAVE, epoch 1", 300.0)
    assert said(manager) == ["WATCHDOG=1", "STATUS=SLAVE, epoch 1"]
    assert not one.is_due(599.0)
    one.alive("SLAVE, epoch 1", 600.0)
    assert said(manager) == ["WATCHDOG=1"]
    one.stopping()
    assert said(manager) == ["STOPPING=1"]


def test_without_a_watchdog_only_news_are_told(manager: socket.socket) -> None:
    for more in ({}, {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "8"}, {"WATCHDOG_USEC": "x"}):
        one = Supervisor({"NOTIFY_SOCKET": manager.getsockname(), **more}, 7)
        assert not one.is_due(999.0) and one.is_due(1_000.0)
        one.alive("a\nb", 1_000.0)
        one.alive("a\nb", 2_000.0)
        assert said(manager) == ["STATUS=a b"]


def test_an_abstract_address() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0hastore-test-notify")
        Supervisor({"NOTIFY_SOCKET": "@hastore-test-notify"}, 7).ready(0.0)
        assert said(manager) == ["READY=1"]


def test_without_systemd_nothing_is_due(caplog: pytest.LogCaptureFixture) -> None:
    one = Supervisor({}, 7)
    one.ready(0.0)
    one.stopping()
    assert not one.is_there and not one.is_due(1e9) and not caplog.records


def test_a_manager_that_is_gone_is_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Supervisor({"NOTIFY_SOCKET": str(tmp_path / "gone")}, 7).ready(0.0)
    assert "systemd was not told 'READY=1'" in caplog.text


def test_what_a_full_buffer_did_not_take_is_told_again(manager: socket.socket) -> None:
    """Without READY=1 systemd kills a node that serves, at the end of TimeoutStartSec."""
    one = Supervisor({"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "600000"}, 7)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
        others.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                others.sendto(b"STATUS=busy", manager.getsockname())
    one.ready(0.0)
    one.alive("SLAVE, epoch 1", 300.0)
    assert set(said(manager)) == {"STATUS=busy"}
    one.alive("SLAVE, epoch 1", 600.0)
    assert said(manager) == ["READY=1", "WATCHDOG=1", "STATUS=SLAVE, epoch 1"]
    one.alive("SLAVE, epoch 1", 900.0)
    assert said(manager) == ["WATCHDOG=1"]


def test_a_status_that_fails_does_not_end_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(config_of(tmp_path / "store"), lambda: None)
    monkeypatch.setattr(node.backend, "status", lambda: {}["role"])
    with caplog.at_level(logging.ERROR):
        for _ in range(50):
            assert state_of(node) == "the node's status failed: KeyError('role')"
    assert len(caplog.records) == 1


def test_a_real_node_tells_what_it_is(
    manager: socket.socket, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    manager.settimeout(60)
    with Group(tmp_path, nodes=1) as group:
        group.start()
        assert manager.recv(65_536) == b"READY=1"
        text = manager.recv(65_536).decode()
        assert text.startswith("WATCHDOG=1\nSTATUS=ASYNC_MASTER, epoch ")
        assert manager.recv(65_536) == b"WATCHDOG=1"
        group.stop()
    assert said(manager)[-1] == "STOPPING=1"


def test_a_node_with_a_wrong_file_stays_down() -> None:
    """RestartPreventExitStatus= is about the main process: one that ExecStartPre= runs is repeated.

    Five failures within five minutes then refuse the start that comes after the correction.
    """
    lines = UNIT.read_text().splitlines()
    assert "RestartPreventExitStatus=2 3" in lines and "Restart=on-failure" in lines
    assert [one for one in lines if one.startswith("Exec") and "hastore" in one] == [
        "ExecStart=/opt/hastore/bin/hastore serve -c /etc/hastore/%i.yaml"
    ]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs Debian's systemd")
def test_systemd_takes_the_unit(tmp_path: pathlib.Path) -> None:
    text = UNIT.read_text()
    assert text.count("/opt/hastore/bin/hastore serve -c /etc/hastore/%i.yaml") == 1
    unit = tmp_path / "hastore@node1.service"
    unit.write_text(text.replace("/opt/hastore/bin/hastore", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
