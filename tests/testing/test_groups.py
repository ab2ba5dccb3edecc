"""hastore.testing: real groups, and what a test does to them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import hastore
from hastore import Consumer, Producer, Status
from hastore.cli.common import run_code
from hastore.cli.main import cli
from hastore.client.messages import Message
from hastore.config.file import edit_role, load_config
from hastore.config.model import Role
from hastore.errors import ConfigError, DurabilityError, HastoreError, UsageError
from hastore.testing import Group, group, groups

ROOT = pathlib.Path(hastore.__file__).parents[1]


def send(producer: Producer, body: bytes) -> Status:
    return producer.send("orders", body).result(60).status


def bodies(made: Group, count: int) -> list[bytes]:
    """Return the bodies of the messages, in the order of the log."""
    found: list[Message] = []
    with Consumer("orders", made.bootstrap) as consumer:
        while len(found) < count:
            found += consumer.poll(timeout_s=60)
    return [one.body for one in sorted(found, key=lambda one: one.offset)]


def test_a_pair_through_a_crash_a_flip_and_a_hang() -> None:
    with group() as pair, Producer(pair.bootstrap) as producer:
        folder = pair[1].config.parent
        assert pair.master is pair[1] and send(producer, b"1") is Status.PUT_OK
        pair[1].kill()
        assert not pair[1].running and pair[1].status() is None
        assert pair.promote(2) is pair[2] is pair.master
        pair[1].start()
        assert send(producer, b"2") is Status.PUT_OK
        assert pair.flip() is pair[1]
        assert pair.flip(to=1) is pair[1], "it is the master already"
        assert send(producer, b"3") is Status.PUT_OK
        pair[1].pause()
        assert pair[1].running and pair[1].status() is None
        pair[1].resume()
        assert pair.wait_in_sync() is pair[1]
        assert bodies(pair, 3) == [b"1", b"2", b"3"]
        pids = [node.pid for node in pair]
    assert not folder.exists() and not any(map(is_there, pids))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_group_that_elects_goes_on_without_its_leader() -> None:
    with group("dledger") as made, Producer(made.bootstrap) as producer:
        first = made.master
        assert send(producer, b"1") is Status.PUT_OK
        first.kill()
        second = made.wait_master(but=first)
        assert send(producer, b"2") is Status.PUT_OK
        first.start()
        assert made.flip(to=first.number) is first is made.master is not second
        with pytest.raises(UsageError, match="elect their leader by themselves"):
            made.promote(1)
        assert bodies(made, 2) == [b"1", b"2"]


def test_a_cut_link_is_silent_until_it_is_healed() -> None:
    settings = {"ha": {"slave_timeout": "300ms"}}
    with group(cuttable=True, settings=settings) as pair, Producer(pair.bootstrap) as producer:
        assert send(producer, b"1") is Status.PUT_OK
        pair.cut(2)
        with pytest.raises(DurabilityError):
            with Producer(pair.bootstrap, delivery_timeout_s=2) as hasty:
                hasty.send("orders", b"2").result(60)
        pair.heal()
        pair.wait_in_sync()
        assert send(producer, b"3") is Status.PUT_OK


def test_a_group_in_a_folder_stays(tmp_path: pathlib.Path) -> None:
    with group(nodes=1, folder=tmp_path) as one, Producer(one.bootstrap) as producer:
        assert send(producer, b"1") is Status.PUT_OK
        assert one[1].stop() == 0 and not one[1].running
    assert one[1].config.exists() and (one[1].store / "commitlog").is_dir()
    with group(nodes=1, folder=tmp_path) as again:
        assert bodies(again, 1) == [b"1"]


def test_what_is_wrong_is_said_at_once(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="'classic' or 'dledger'"):
        Group(tmp_path, "raft")
    with pytest.raises(UsageError, match="from 1 to 9"):
        Group(tmp_path, nodes=10)
    with pytest.raises(ConfigError, match="flush"):
        Group(tmp_path, settings={"store": {"flush": "sometimes"}})
    with Group(tmp_path) as pair:
        with pytest.raises(UsageError, match="cuttable=True"):
            pair.cut(1)
        for call in (pair.promote, pair.cut):
            with pytest.raises(UsageError, match="no node 3; nodes 1 to 2|cuttable=True"):
                call(3)
        with pytest.raises(UsageError, match="node 1 does not run"):
            pair[1].pause()
        pair[1].store.mkdir()
        (pair[1].store / "lock").mkdir()  # its store cannot be opened
        with pytest.raises(HastoreError, match="node 1 has ended: .*store1"):
            pair[1].start()


def test_a_group_goes_on_with_roles_and_edits_in_its_folder(tmp_path: pathlib.Path) -> None:
    """Node 2 may have acknowledged by itself what node 1 lacks: the first roles would lose it."""
    with Group(tmp_path) as pair:
        files, first = [node.config for node in pair], pair[1].api
        assert roles(pair) == [Role.SYNC_MASTER, Role.SLAVE]
    edit_role(str(files[0]), Role.SLAVE)
    edit_role(str(files[1]), Role.ASYNC_MASTER)
    with files[0].open("a") as file:
        file.write("api:\n  max_connections: 77  # mine\n")
    with Group(tmp_path) as again:
        assert roles(again) == [Role.SLAVE, Role.ASYNC_MASTER] and again[1].api != first
        assert "# mine" in files[0].read_text()
        for node in again:
            config = load_config(str(node.config))
            assert [config.nodes[each.number].ha for each in again] == [each.ha for each in again]
    settings = {"acks": 1, "store": {"flush": "sync"}}
    with Group(tmp_path, settings=settings) as more:
        assert roles(more) == [Role.SLAVE, Role.ASYNC_MASTER]
        assert load_config(str(files[0])).api.max_connections == 77
        assert all("flush: sync" in each.read_text() for each in files)


def roles(made: Group) -> list[Role | None]:
    return [load_config(str(node.config)).role for node in made]


def test_a_folder_is_of_one_group_at_a_time(tmp_path: pathlib.Path) -> None:
    with Group(tmp_path) as pair:
        before = [node.config.read_bytes() for node in pair]
        with pytest.raises(UsageError, match="another group runs on it"):
            Group(tmp_path)
        assert [node.config.read_bytes() for node in pair] == before
    Group(tmp_path).close()
    with pytest.raises(UsageError, match="cannot be used: No such file"):
        Group(tmp_path / "none")


def test_no_files_but_those_of_such_a_group_are_changed(tmp_path: pathlib.Path) -> None:
    kept, foreign = tmp_path / "kept", tmp_path / "foreign"
    kept.mkdir()
    Group(kept, "dledger").close()
    before = [each.read_bytes() for each in sorted(kept.glob("*.yaml"))]
    for given, what in (
        (("classic",), "a group of mode dledger, not classic"),
        (("dledger", 5), "a group of 3 nodes, not 5"),
    ):
        with pytest.raises(UsageError, match=what):
            Group(kept, *given)
    assert [each.read_bytes() for each in sorted(kept.glob("*.yaml"))] == before
    (kept / "node1.yaml").unlink()
    with pytest.raises(UsageError, match="put the missing one back"):
        Group(kept, "dledger")
    assert not (kept / "node1.yaml").exists(), "with the first role, it may be one too many"
    assert run_code(cli, "hastore", ["init", str(foreign)]) == 0
    before = [each.read_bytes() for each in sorted(foreign.glob("*.yaml"))]
    with pytest.raises(UsageError, match="node1.yaml is of another group"):
        Group(foreign)
    assert [each.read_bytes() for each in sorted(foreign.glob("*.yaml"))] == before


def test_wrong_settings_leave_no_file(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="flush"):
        Group(tmp_path, settings={"store": {"flush": "sometimes"}})
    assert not list(tmp_path.glob("*.yaml"))


def test_ports_that_are_taken_are_named(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} .*--port"):
            Group(tmp_path, first_port=port)


@pytest.mark.parametrize("kernels", ["1024\t65535", "32768\t60999", "9000\t65535", "1500\t60000"])
def test_there_are_ports_whatever_the_kernel_takes_for_outgoing_connections(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Hosts for many connections take nearly all: a group ended with a ValueError there."""
    (tmp_path / "range").write_text(f"{kernels}\n")
    monkeypatch.setattr(groups, "_RANGE", str(tmp_path / "range"))
    with contextlib.closing(groups.Ports()) as ports:
        assert all(1_024 < ports.take() < 60_000 for _ in range(9))


def test_a_thread_that_ends_while_its_node_is_paused_runs_no_more() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    task = pathlib.Path(f"/proc/self/task/{thread.native_id}")
    while task.exists():
        time.sleep(0.001)
    assert groups._is_stopped(task)


def test_a_node_that_ends_within_its_answer_has_no_status(tmp_path: pathlib.Path) -> None:
    """As one that is killed while `wait_in_sync` asks it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            asking, _ = server.accept()
            with asking:
                asking.recv(65_536)
                asking.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{")

        threading.Thread(target=answer, daemon=True).start()
        places = {"api": "tcp://127.0.0.1:1", "ha": "127.0.0.1:1"}
        places["http"] = f"127.0.0.1:{server.getsockname()[1]}"
        node: Any = groups.Node(1, tmp_path, {"nodes": {1: places}, "store": {"root": "s"}})
        node._process = subprocess.Popen(["sleep", "60"])
        try:
            assert node.status() is None
        finally:
            node.kill()


def test_pytest_gives_a_test_a_pair(tmp_path: pathlib.Path) -> None:
    """In a process of its own, as users run pytest, with nothing but the plugin."""
    (tmp_path / "test_it.py").write_text(
        "from hastore import Producer\n\n\n"
        "def test_it(hastore_group):\n"
        "    with Producer(hastore_group.bootstrap) as producer:\n"
        "        assert producer.send('orders', b'1').result(60).offset == 0\n"
        "    hastore_group.cut(2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "hastore.pytest_plugin", "test_it.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={
            **os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # an installed hastore would add it again
        },
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_dev_runs_a_group_until_it_is_told_to_stop(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "hastore", "dev", "--port", "0", "--dir", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert process.stdout is not None
            said = []
            while not said or not said[-1].startswith("Ctrl-C"):
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                said.append(line)
            [bootstrap] = [line.split("=")[1].strip() for line in said if "BOOTSTRAP" in line]
            with Producer(bootstrap) as producer:
                assert send(producer, b"1") is Status.PUT_OK
            process.send_signal(signal.SIGTERM)
            _, rest = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and rest == "stopping\n"
    assert "node 1  master" in said[0]
