"""`hastore backup` and `hastore restore` as an operator sees them."""

import json
import os
import socket
from pathlib import Path

import pytest
import yaml

from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.clock import SYSTEM_CLOCK, SystemClock
from tests.backup.kit import FILE_SIZE, fill, running
from tests.cli.kit import as_another_user, hastore
from tests.process.harness import Group as Processes
from tests.process.harness import hastore as process
from tests.store.kit import scribble

ALONE = {"role": "ASYNC_MASTER"}


def write_file(path, number, numbers, root, **changes):
    """Write a node's file; its ports are never used."""
    nodes = {
        n: {"api": f"tcp://127.0.0.1:{n}1", "ha": f"127.0.0.1:{n}2", "http": f"127.0.0.1:{n}3"}
        for n in numbers
    }
    settings = {
        "cluster": "c", "group": "g", "node": number, "role": "SLAVE", "acks": 1, "nodes": nodes,
        "store": {"root": str(root), "commitlog_file_size": "64KiB"}, **changes,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """The file of a node that has run, and the folder of its backups."""
    with running(tmp_path) as group:
        node = group.started[0]
        fill(node, 2 * FILE_SIZE)
        root = node.config.store.root
    return write_file(tmp_path / "1.yaml", 1, [1], root, **ALONE), str(tmp_path / "backups")


def test_a_backup_of_a_clock_that_was_ahead_is_not_taken_for_a_new_one(files, monkeypatch):
    """Otherwise a check would say for months that backups are made, though none is."""
    file, place = files
    now_ms = SYSTEM_CLOCK.wall_ms()
    with monkeypatch.context() as ahead:
        ahead.setattr(SystemClock, "wall_ms", lambda _: now_ms + 90 * 86_400_000)
        assert hastore("backup", "take", "-c", file, place).returncode == 0
        assert hastore("backup", "list", place, "--max-age", "3600").returncode == 0
    checked = hastore("backup", "list", place, "--max-age", "3600")
    assert checked.returncode == 4
    assert "by this machine's clock, backup 1 is made in the future" in checked.stderr
    assert hastore("backup", "list", place).returncode == 0
    assert hastore("backup", "take", "-c", file, place).returncode == 0
    assert hastore("backup", "list", place, "--max-age", "3600").returncode == 0


def test_take_list_and_verify(files):
    file, place = files
    done = hastore("backup", "take", "-c", file, place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("backup 1 of node 1: bytes 0 to "), done.stdout
    again = json.loads(hastore("backup", "take", "-c", file, place, "--json").stdout)
    assert again["backup"] == 2 and again["copied_bytes"] == 0
    listed = hastore("backup", "list", place)
    assert [line.split(":")[0] for line in listed.stdout.splitlines()] == ["backup 2", "backup 1"]
    assert hastore("backup", "list", place, "--max-age", "3600").returncode == 0
    assert hastore("backup", "list", place, "--max-age", "0.0001").returncode == 4
    checked = hastore("backup", "verify", place)
    assert checked.returncode == 0 and "backup 2 is whole" in checked.stdout
    told = json.loads(hastore("backup", "verify", place, "--backup", "1", "--json").stdout)
    assert told["ok"] and told["records"] > 0

    name = min(os.listdir(f"{place}/log"))
    scribble(f"{place}/log/{name}", 50, b"?")
    bad = hastore("backup", "verify", place)
    assert "into a new target" in bad.stderr
    assert bad.returncode == 3 and name in bad.stderr and "is whole" not in bad.stdout
    assert hastore("backup", "verify", place, "--backup", "9").returncode == 2


def test_a_newest_backup_that_cannot_be_read_is_not_passed_over(files, tmp_path, monkeypatch):
    """The one before was called whole, and restored, though nobody had asked for an older one."""
    monkeypatch.setattr("hastore.cli.backup.ANSWER_S", 0.001)  # nobody listens there
    file, place = files
    for _ in range(2):
        hastore("backup", "take", "-c", file, place)
    scribble(f"{place}/manifests/00000002.json", 50, b"?")
    new = write_file(tmp_path / "2.yaml", 2, [2], tmp_path / "node2", **ALONE)
    restore = ("restore", place, "-c", new, "--as-only", "--accept-loss")
    for command in (("backup", "verify", place, "--json"), ("restore", place), restore):
        done = hastore(*command)
        assert (done.returncode, done.stdout) == (3, ""), command
        assert "give --backup 1 to use the one before" in done.stderr
    listed = hastore("backup", "list", place, "--json")
    bad, good = (json.loads(line) for line in listed.stdout.splitlines())
    assert listed.returncode == 3 and good["backup"] == 1
    assert (bad["backup"], bad["manifest"]) == (2, "manifests/00000002.json") and bad["unreadable"]
    assert hastore("backup", "list", place, "--max-age", "3600").returncode == 4
    assert hastore("backup", "verify", place, "--backup", "2").returncode == 3
    assert hastore("backup", "verify", place, "--backup", "1").returncode == 0
    assert hastore(*restore, "--backup", "1").returncode == 0
    taken = hastore("backup", "take", "-c", file, place, "--json")  # a newer one is whole
    assert list(json.loads(taken.stdout)["held_back"]) == ["manifests/00000002.json"]
    assert "warning: " in taken.stderr and "remove it if" in taken.stderr
    assert hastore("backup", "verify", place).returncode == 0
    assert hastore("backup", "list", place, "--max-age", "3600").returncode == 3


def test_the_first_look_changes_nothing(files, tmp_path):
    file, place = files
    hastore("backup", "take", "-c", file, place)
    look = hastore("restore", place)
    assert look.returncode == 0
    for text in ("from node 1 of c/g", "are lost", "as far as the backups here know: 1"):
        assert text in look.stdout, look.stdout
    new = write_file(tmp_path / "2.yaml", 2, [2], tmp_path / "node2", **ALONE)
    asked = hastore("restore", place, "-c", new, "--as-only")
    assert asked.returncode == 1 and "--accept-loss" in asked.stderr
    assert asked.stdout == look.stdout and not (tmp_path / "node2").exists()


def test_restore(files, tmp_path, monkeypatch):
    monkeypatch.setattr("hastore.cli.backup.ANSWER_S", 0.001)  # nobody listens there
    file, place = files
    hastore("backup", "take", "-c", file, place)
    member = write_file(tmp_path / "2.yaml", 2, [1, 2], tmp_path / "node2")
    done = hastore("restore", place, "-c", member)
    assert done.returncode == 0, done.stderr
    assert "`nodes` in the file of every node has it" in done.stdout
    again = hastore("restore", place, "-c", member)
    assert again.returncode == 2 and "is not empty" in again.stderr
    verified = hastore("log", "verify", "--store", str(tmp_path / "node2"))
    assert verified.returncode == 0, verified.stderr
    only = write_file(tmp_path / "3.yaml", 3, [3], tmp_path / "node3", **ALONE)
    done = hastore("restore", place, "-c", only, "--as-only", "--accept-loss")
    assert done.returncode == 0 and "it begins a new epoch" in done.stdout, done.stderr


def test_a_node_that_takes_connections_and_says_nothing_keeps_the_group_alive(
    files, tmp_path, monkeypatch
):
    """One that hangs, or is slow, goes on later: then there are two groups."""
    monkeypatch.setattr("hastore.cli.backup.ANSWER_S", 0.05)
    file, place = files
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = Path(file).read_text().replace("tcp://127.0.0.1:11", f"tcp://127.0.0.1:{port}")
        Path(file).write_text(text)
        hastore("backup", "take", "-c", file, place)
        only = write_file(tmp_path / "3.yaml", 3, [3], tmp_path / "node3", **ALONE)
        restore = ("restore", place, "-c", only, "--as-only", "--accept-loss")
        done = hastore(*restore)
        assert done.returncode == 1, done
        assert f"node 1 at tcp://127.0.0.1:{port} may run, since" in done.stderr, done.stderr
        assert not (tmp_path / "node3").exists()
    assert hastore(*restore).returncode == 0, "its process has gone"


def test_options_that_restore_nothing_are_no_success(files):
    """Who forgets -c in a hurry was told the contents, with exit code 0."""
    file, place = files
    hastore("backup", "take", "-c", file, place)
    for words, says in (
        (("--as-only",), "--as-only needs -c FILE"),
        (("--as-only", "--accept-loss"), "--as-only needs -c FILE"),
        (("--accept-loss", "-c", file), "--accept-loss needs --as-only"),
    ):
        done = hastore("restore", place, *words)
        assert (done.returncode, done.stdout) == (2, "") and says in done.stderr, done


def test_a_node_that_any_backup_of_the_target_knows_keeps_the_group_alive(
    files, tmp_path, monkeypatch
):
    """Its address was in no file when the backup that is restored was taken."""
    file, place = files
    hastore("backup", "take", "-c", file, place)
    write_file(tmp_path / "1.yaml", 1, [1, 2], tmp_path / "node1")
    hastore("backup", "take", "-c", file, place)
    address = "tcp://127.0.0.1:21"
    alive = {address}
    nobody = NoAnswer(Quiet.REFUSED, "nobody")
    monkeypatch.setattr(
        "hastore.cli.backup.ask_or_why", lambda at, *_: {} if at in alive else nobody
    )
    only = write_file(tmp_path / "3.yaml", 3, [3], tmp_path / "node3", **ALONE)
    restore = ("restore", place, "-c", only, "--as-only", "--accept-loss", "--backup", "1")
    done = hastore(*restore)
    assert done.returncode == 1 and f"node 2 at {address} answers" in done.stderr, done.stderr
    alive.clear()
    # Nor may its number come again: what it has promised and acknowledged is not known.
    look = hastore("restore", place, "--backup", "1")
    assert look.stdout.endswith("as far as the backups here know: 1, 2\n")
    same = write_file(tmp_path / "2.yaml", 2, [2], tmp_path / "node2", **ALONE)
    done = hastore("restore", place, "-c", same, *restore[4:])
    assert done.returncode == 2 and "node number 2 was used in the group" in done.stderr
    done = hastore(*restore)
    assert done.returncode == 0 and f"node 2 at {address}; a node that joined" in done.stderr


def test_errors(files, tmp_path):
    file, place = files
    assert hastore("backup", "verify", place).returncode == 2
    assert hastore("backup", "list", place, "--max-age", "3600").returncode == 4
    assert hastore("restore", place).stderr == f"error: {place} has no backup\n"
    (tmp_path / "file").write_bytes(b"")
    for command in (("backup", "list"), ("backup", "verify"), ("restore",)):
        done = hastore(*command, str(tmp_path / "file"))
        assert done.returncode == 3, "the target is not readable, as on a disk that has failed"
        assert done.stderr.startswith(f"error: {tmp_path}/file: ") and done.stderr.count("\n") == 1
    other = write_file(tmp_path / "9.yaml", 9, [9], tmp_path / "nothing", **ALONE)
    done = hastore("backup", "take", "-c", other, place)
    assert done.returncode == 2 and "no store of a node that has run" in done.stderr
    for rate in ("nan", "inf"):
        done = hastore("backup", "take", "-c", file, place, "--max-rate", rate)
        assert done.returncode == 2 and f"--max-rate {rate}: it is no number" in done.stderr
    theirs = write_file(tmp_path / "8.yaml", 1, [1], tmp_path / "node1", group="h", **ALONE)
    hastore("backup", "take", "-c", file, place)
    assert "another group" in hastore("backup", "take", "-c", theirs, place).stderr
    os.chmod(f"{place}/manifests", 0)
    with as_another_user():
        done = hastore("backup", "list", place)
    assert done.returncode == 3 and "run the command as the user who owns it" in done.stderr


@pytest.mark.full
def test_only_the_backup_is_left(tmp_path):
    """The drill of docs/operations.md, with real processes."""
    place = str(tmp_path / "backups")
    with Processes(tmp_path) as group:
        group.start()
        boot = ",".join(group.bootstrap)

        def produce(*bodies):
            for body in bodies:
                done = process("produce", "T", "--bootstrap", boot, stdin=body + b"\n")
                assert done.returncode == 0, done.stderr

        produce(b"one", b"two")
        taken = process("backup", "take", "-c", str(group[2].path), place)
        assert taken.returncode == 0, taken.stderr
        new = tmp_path / "node3.yaml"
        settings = dict(group[2].settings)
        settings |= {"node": 3, **ALONE, "nodes": {3: settings["nodes"][2]}}
        settings["store"] = {**settings["store"], "root": str(tmp_path / "store3")}
        new.write_text(yaml.safe_dump(settings))
        restore = ("restore", place, "-c", str(new), "--as-only", "--accept-loss")
        alive = process(*restore)
        assert alive.returncode == 1 and "the group is not lost" in alive.stderr
        group[1].kill()
        group[2].kill()
        done = process(*restore)
        assert done.returncode == 0, done.stderr
        group[2].path.write_text(new.read_text())
        group[2].settings = settings
        group[2].start("serve")
        produce(b"three")
        read = process("consume", "T", "--bootstrap", boot, "--from", "earliest", "--max", "3")
        assert set(read.stdout.split()) >= {"one", "two", "three"}, (read.stdout, read.stderr)
