"""Starting nodes: `--check`, the ready line, exit codes."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from hastore.cli.common import bootstrap_addresses
from hastore.errors import UsageError
from tests.cli.kit import hastore, program
from tests.process.harness import ROOT, Group, wait_until


def process(name, *arguments):
    """Run `bin/NAME` to its end as a process, because a node begins to start."""
    return subprocess.run(
        [sys.executable, str(ROOT / "bin" / name), *arguments],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


@pytest.fixture
def group(tmp_path):
    with Group(tmp_path) as group:
        yield group


def test_check_validates_and_exits(group):
    done = program("hastore-master", "-c", str(group[1].path), "--check")
    assert (done.returncode, done.stdout) == (0, "")
    assert not group[1].store.exists()


def test_a_full_disk_under_stdout_ends_no_node(tmp_path):
    """A node may have to take over in such an hour."""
    with Group(tmp_path) as group, open("/dev/full", "w") as full:
        node = subprocess.Popen(
            [sys.executable, str(ROOT / "bin" / "hastore"), "serve", "-c", str(group[1].path)],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said = iter(node.stderr.readline, "")
            assert any(
                "the ready line was not written to stdout: No space" in line for line in said
            )
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0
        finally:
            node.kill()
            node.communicate()


def test_what_the_terminal_cannot_show_ends_no_command(tmp_path):
    """A group may have any name, and an old terminal few letters."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / "hastore"), "init", str(tmp_path / "\u540d")],
        env={**os.environ, "PYTHONIOENCODING": "iso-8859-1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "\\u540d/node1.yaml" in done.stdout, done.stderr


def test_a_node_without_standard_streams_gives_their_numbers_to_no_file(tmp_path):
    """What ends a process writes to descriptor 2, whatever that is; and a clean stop is none."""
    closed = 'exec "$0" "$@" <&- >&- 2>&-'
    words = ["sh", "-c", closed, sys.executable, str(ROOT / "bin" / "hastore")]
    assert subprocess.run([*words, "completion", "bash"], check=False).returncode == 0
    with Group(tmp_path) as group:
        node = subprocess.Popen([*words, "serve", "-c", str(group[1].path)])
        try:
            limits = group[1].store / "hastore" / "limits"
            wait_until(limits.exists, 60, "the node has not opened its store")
            for number in range(3):
                assert os.readlink(f"/proc/{node.pid}/fd/{number}") == os.devnull
            wait_until(group[1].status, 60, "the node does not answer")
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0
        finally:
            node.kill()
            node.wait()


@pytest.mark.parametrize(("name", "number"), [("hastore-master", 2), ("hastore-slave", 1)])
def test_the_other_role_is_refused(group, name, number):
    path = group[number].path
    done = program(name, "-c", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(rf"error: {re.escape(str(path))}:\d+: role: is ", done.stderr)
    assert done.stderr.count("\n") == 1


def test_the_other_mode_is_refused(group):
    dledger = str(ROOT / "conf" / "dledger-n0.yaml")
    for name, path, says in (
        ("hastore-master", dledger, "mode: is dledger, but hastore-master starts"),
        ("hastore-slave", dledger, "start it with hastore-dledger"),
        ("hastore-dledger", str(group[1].path), "mode: is classic, but hastore-dledger starts"),
    ):
        done = program(name, "-c", path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {path}") and says in done.stderr


def test_check_of_a_dledger_file_notes_an_even_group():
    path = str(ROOT / "conf" / "dledger-n0.yaml")
    extra = [f"nodes.4.{kind}=tcp://127.0.0.1:{at}" for at, kind in ((1, "api"),)]
    extra += [f"nodes.4.{kind}=127.0.0.1:{at}" for at, kind in ((2, "ha"), (3, "http"))]
    done = program("hastore-dledger", "-c", path, "--check", *(f"-o{each}" for each in extra))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "node 1 of 4" in done.stderr and "use an odd number of members" in done.stderr


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_check_looks_at_the_identities(mode, tmp_path):
    assert hastore("init", str(tmp_path / "g"), "--tls", "--mode", mode).returncode == 0
    tls, ids = tmp_path / "g" / "tls", tmp_path / "g" / "identities.yaml"
    files = [str(tmp_path / "g" / f"node{number}.yaml") for number in (1, 2, 3)]
    files = [one for one in files if os.path.exists(one)]

    def check():
        done = hastore("serve", "-c", files[0], "--check")
        assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
        return done.returncode, done.stderr

    code, said = check()
    assert code == 2 and "tls/ca.pem cannot be read" in said
    assert said.endswith("make it with `hastore keys ca`, or correct the path\n")
    assert hastore("keys", "ca", "--dir", str(tls)).returncode == 0
    code, said = check()
    assert code == 2 and said.endswith("make it with `hastore keys cert`, or correct the path\n")
    given = [word for one in files for word in ("-c", one)]
    assert hastore("keys", "cert", "--dir", str(tls), *given).returncode == 0
    code, said = check()
    assert code == 2 and f"error: {ids}: cannot be read: No such file or directory" in said
    assert said.endswith("make it with `hastore keys new`, or correct the path\n")
    new = ("keys", "new", "ops", "--admin", "--file", str(ids), "--out", str(tmp_path / "ops.key"))
    assert hastore(*new).returncode == 0
    code, said = check()
    assert code == 0 and "is valid" in said
    ids.write_text("identities: 1\n")
    assert check()[0] == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-o", "role=SLAVE"), "-o role: "),
        (("-o", "ha.hartbeat=1s"), "-o ha.hartbeat: is unknown"),
        (("-o", "nodes.1.ha=10.0.0.1:1"), "beyond loopback"),
        (("-o", "x"), "not an assignment"),
        (("--nosuch",), "No such option"),
    ],
)
def test_wrong_arguments_are_exit_code_2(group, arguments, expected):
    done = program("hastore-master", "-c", str(group[1].path), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_file_is_exit_code_2(tmp_path):
    done = program("hastore-slave", "-c", str(tmp_path / "none.yaml"))
    assert done.returncode == 2 and "none.yaml: cannot be read" in done.stderr


def test_the_ready_line_and_a_clean_stop(group):
    one = group[1].start("master", "-o", "nodes.1.http=127.0.0.1:0", wait=False)
    two = group[2].start("slave")
    ready = one.wait_ready()
    keys = ["node", "role", "epoch", "api", "ha", "http", "min_offset", "max_offset"]
    assert list(ready) == keys
    assert (ready["node"], ready["role"]) == ("1", "SYNC_MASTER")
    assert ready["api"] == one.api and not ready["http"].endswith(":0")
    assert two.ready["role"] == "SLAVE"
    assert one.stop() == 0 and two.stop() == 0


def test_a_port_in_use_is_exit_code_2_and_named(group):
    group[2].start("slave")
    group[1].write(nodes={2: group[2].settings["nodes"][2], 1: group[2].settings["nodes"][2]})
    done = process(
        "hastore-master",
        *("-c", str(group[1].path), "-o", "nodes.2.api=tcp://127.0.0.1:1"),
        *("-o", "nodes.2.ha=127.0.0.1:2", "-o", "nodes.2.http=127.0.0.1:3"),
    )
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "in use" in last


def test_a_store_that_cannot_be_written_is_named(group):
    group[1].write(store={"root": "/proc/hastore"})  # not even root may write there
    done = process("hastore-master", "-c", str(group[1].path))
    assert done.returncode == 3 and "/proc/hastore" in done.stderr.splitlines()[-1]


def test_a_store_below_a_file_is_named(group, tmp_path):
    (tmp_path / "file").touch()
    group[1].write(store={"root": str(tmp_path / "file" / "store")})
    done = process("hastore-master", "-c", str(group[1].path))
    assert done.returncode in (1, 3)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and str(tmp_path / "file") in last


def test_help_and_version():
    done = hastore("--help")
    for name in ("status", "produce", "consume", "promote", "demote", "log", "perf", "demo"):
        assert f"\n  {name} " in done.stdout
    assert "0.1.0" in hastore("--version").stdout
    for name in ("hastore-master", "hastore-slave", "hastore-dledger"):
        there, here = process(name, "--help"), program(name, "--help")
        assert (there.returncode, there.stdout) == (0, here.stdout)


def test_signals_end_a_node(group):
    group[2].start("slave")
    group[2].send(signal.SIGINT)
    assert group[2].exit_code() == 0


def test_the_nodes_of_a_folder_conf_are_known(tmp_path, monkeypatch):
    """Those of master.yaml and slave.yaml; else those of the files of mode dledger."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HASTORE_BOOTSTRAP", raising=False)
    (tmp_path / "conf").mkdir()
    for name in ("dledger-n2.yaml", "dledger-n0.yaml"):
        shutil.copy(ROOT / "conf" / name, tmp_path / "conf" / name)
    three = [f"tcp://127.0.0.1:{port}" for port in (10911, 10921, 10931)]
    assert bootstrap_addresses(None) == three
    shutil.copy(ROOT / "conf" / "slave.yaml", tmp_path / "conf" / "slave.yaml")
    assert bootstrap_addresses(None) == three[:2]


@pytest.mark.parametrize("wrong", ["nowhere", "zk://127.0.0.1:1"])
def test_a_wrong_address_is_named_where_it_was_given(monkeypatch, wrong):
    with pytest.raises(UsageError, match="^--bootstrap: "):
        bootstrap_addresses(wrong)
    monkeypatch.setenv("HASTORE_BOOTSTRAP", wrong)
    with pytest.raises(UsageError, match="^HASTORE_BOOTSTRAP: "):
        bootstrap_addresses(None)
