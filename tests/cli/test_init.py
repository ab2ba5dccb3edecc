"""`hastore init`: its files are valid, start a group, and never replace existing files."""

import contextlib
import json
import pathlib
import shlex
import signal
import socket
import stat
import subprocess
import sys

import pytest

from hastore.cli.common import run_code
from hastore.cli.init import render
from hastore.cli.main import cli
from hastore.client.security import read_security
from hastore.config.file import load_config, load_names
from hastore.config.model import Mode, Role, Wire
from hastore.errors import ConfigError
from hastore.security.identities import Identities
from tests.cli.kit import hastore
from tests.process.harness import ROOT, Ports


def test_the_files_of_conf_equal_the_template():
    ports = {1: 10911, 2: 10921}
    for number, role, name, other in (
        (1, Role.SYNC_MASTER, "master", "slave"),
        (2, Role.SLAVE, "slave", "master"),
    ):
        text = render(
            number, ports, role=role, acks=1, root=f"data/node{number}", secret_file=None,
            title=f"the {name} of a pair on this machine. conf/{other}.yaml is the other half.",
            command=f"bin/hastore-{name}", file=f"conf/{name}.yaml",
        )  # fmt: skip
        assert text == (ROOT / "conf" / f"{name}.yaml").read_text()


def test_the_dledger_files_of_conf_equal_the_template():
    ports = {1: 10911, 2: 10921, 3: 10931}
    for number in ports:
        name = f"conf/dledger-n{number - 1}.yaml"
        text = render(
            number, ports, role=None, root=f"data/dledger{number}", secret_file=None,
            title=(
                f"node {number} of a group of three on this machine; conf/dledger-n0.yaml to "
                "-n2.yaml belong together."
            ),
            command="bin/hastore-dledger", file=name,
        )  # fmt: skip
        assert text == (ROOT / name).read_text()
        assert all(len(line) <= 120 for line in text.splitlines())


def free_base():
    """Return a port from which all nine ports that `init` gives three nodes are free."""
    with contextlib.closing(Ports()) as ports:
        for _ in range(1_000):
            base = ports.take()
            try:
                for port in (base + 10 * node + which for node in range(3) for which in range(3)):
                    if port != base:
                        socket.create_server(("127.0.0.1", port)).close()
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


def test_a_group_is_written_and_starts(tmp_path):
    base = free_base()
    folder = tmp_path / "group"
    done = hastore("init", str(folder), "--nodes", "3", "--port", str(base), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert stat.S_IMODE(pathlib.Path(told["secret"]).stat().st_mode) == 0o600
    configs = [load_config(path) for path in told["files"]]
    assert [config.role for config in configs] == [Role.SYNC_MASTER, Role.SLAVE, Role.SLAVE]
    assert all(len(config.nodes) == 3 and config.acks == 1 for config in configs)
    before = {path: pathlib.Path(path).read_text() for path in told["files"]}
    with contextlib.ExitStack() as stack:
        nodes = []
        for number, path in enumerate(told["files"]):
            kind = "slave" if number else "master"
            command = [sys.executable, str(ROOT / "bin" / f"hastore-{kind}"), "-c", path]
            node = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            nodes.append(stack.enter_context(node))
            stack.callback(node.kill)
        up = hastore("status", "--wait", "300", "--bootstrap", told["bootstrap"])
        assert up.returncode == 0, up.stderr
        for node in nodes:
            node.send_signal(signal.SIGTERM)
            node.communicate()
            assert node.returncode == 0
    again = hastore("init", str(folder), "--nodes", "3")
    assert again.returncode == 2 and "already exists" in again.stderr
    assert {path: pathlib.Path(path).read_text() for path in told["files"]} == before


def test_a_group_of_one(tmp_path):
    assert hastore("init", str(tmp_path / "one"), "--nodes", "1").returncode == 0
    config = load_config(str(tmp_path / "one" / "node1.yaml"))
    assert config.role is Role.ASYNC_MASTER and config.effective_acks == 0
    address = ("--api", "tcp://127.0.0.1:1", "--ha", "127.0.0.1:2", "--http", "127.0.0.1:3")
    done = hastore("node", "add", str(tmp_path / "one"), "--node", "2", *address)
    assert done.returncode == 0, done.stderr
    assert load_config(str(tmp_path / "one" / "node1.yaml")).effective_acks == 1


def test_a_dledger_group_is_written(tmp_path):
    done = hastore("init", str(tmp_path / "g"), "--mode", "dledger")
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "g" / f"node{number}.yaml" for number in (1, 2, 3)]
    configs = [load_config(str(path)) for path in paths]
    assert {config.mode for config in configs} == {Mode.DLEDGER}
    assert len({config.store.root for config in configs}) == 3
    assert all(config.ha.secret_file == str(tmp_path / "g" / "secret") for config in configs)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{ROOT / 'bin'}/hastore-dledger -c {paths[0]} &"
    assert lines[-2].startswith("export HASTORE_BOOTSTRAP=127.0.0.1:")
    assert lines[-2].count(",127.0.0.1:") == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    done = hastore("init", str(tmp_path / "file" / "below"))
    assert done.returncode == 2 and "cannot be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["a #1", "b: c", "d 'e' \"f\"", "g\\h", "i\u00e9", "j{k}[l]&*!"])
def test_a_folder_whose_name_has_a_meaning_in_yaml(tmp_path, name):
    folder = tmp_path / name
    for group, more in (("plain", ()), ("tls", ("--tls",))):
        done = hastore("init", str(folder / group), *more)
        assert done.returncode == 0, done.stderr
        for number in (1, 2):
            config = load_names(str(folder / group / f"node{number}.yaml"))
            assert config.store.root == str(folder / group / "data" / f"node{number}")
            assert config.ha.secret_file == str(folder / group / "secret")
    assert config.security.identities == str(folder / "tls" / "identities.yaml")
    assert config.security.key == str(folder / "tls" / "tls" / "node2.key")


def test_init_prints_the_commands_to_run(tmp_path):
    done = hastore("init", str(tmp_path / "g"))
    lines = done.stdout.splitlines()
    bin_folder = ROOT / "bin"  # the folder of the command that was called
    assert lines[0] == f"{bin_folder}/hastore-master -c {tmp_path / 'g' / 'node1.yaml'} &"
    assert lines[-2] == "export HASTORE_BOOTSTRAP=127.0.0.1:10911,127.0.0.1:10921"
    assert lines[-1].startswith(f"{bin_folder}/hastore status --wait 30 --bootstrap 127.0.0.1:")
    assert subprocess.run(["sh", "-n", "-c", done.stdout], check=False).returncode == 0


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_a_group_with_tls_and_identities_is_valid_once_its_keys_are_made(tmp_path, mode):
    folder = tmp_path / "a folder"  # with a blank, which the printed commands must quote
    done = hastore("init", str(folder), "--tls", "--mode", mode)
    assert done.returncode == 0, done.stderr
    *keys, environment = done.stdout.splitlines()[:4]
    starts = done.stdout.splitlines()[4:-2]
    with pytest.raises(ConfigError, match="tls/ca.pem cannot be read"):
        load_config(str(folder / "node1.yaml"))
    for line in keys:
        words = shlex.split(line)
        assert run_code(cli, "hastore", words[words.index("keys") :]) == 0, line
    name, _, client = shlex.split(environment)[1].partition("=")
    assert name == "HASTORE_SECURITY" and read_security(client).identity == "ops"
    for number in range(1, len(starts) + 1):
        config = load_config(str(folder / f"node{number}.yaml"))
        security = config.security
        assert {security.api, security.ha, security.http} == {Wire.TLS}
        assert config.ha.secret_file == str(folder / "secret")
        ops = Identities(security.identities).find("ops")
        assert ops.is_admin and ops.produce == ops.consume == ("*",)
    text = (folder / "node1.yaml").read_text()
    assert text.count("  key: ") == 1 and "# its private key (PEM, mode 0600)" in text
    again = hastore("init", str(folder), "--tls")
    assert again.returncode == 2 and "already exists" in again.stderr
