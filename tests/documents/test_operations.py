"""The blocks of docs/operations.md, run with a group of three real nodes."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from hastore import Consumer, Producer
from hastore.config.file import load_config
from tests.documents.blocks import ROOT, fields, take
from tests.documents.shell import Shell

PAGE = "docs/operations.md"
LOOK = take(PAGE, "hastore status  ")
SYSTEMD = take(PAGE, "useradd --system")
RESTART = take(PAGE, "hastore can-stop")
NODES = take(PAGE, "hastore node add")
BACKUP = take(PAGE, "hastore backup take")
RESCUED = take(PAGE, "hastore rescued list")
TOPICS = take(PAGE, "hastore topics create")
MESSAGES = take(PAGE, "hastore produce orders --key-separator")
COMPLETION = take(PAGE, "hastore completion bash")
GROUPS = take(PAGE, "hastore groups list")
OF_THE_COMMAND = {"address", "answers"}  # `hastore status` adds them, as the page says
# Lines of SYSTEMD that would change this machine.
NOT_TYPED = ("useradd ", "python3 -m venv ")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("operations"))
    try:
        shell.make_group("--nodes", "3")
        yield shell
    finally:
        shell.close()


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    try:
        shell.make_group()
        yield shell
    finally:
        shell.close()


def test_the_first_look(shell: Shell) -> None:
    typed = LOOK.text.replace("hastore top -c", "hastore top --once --every 0.1 -c")  # ends by q
    told = shell.run(typed, FILE=shell.service("node1").config)
    assert "bad" not in told.stdout, told.stdout


def test_the_fields_of_the_status(shell: Shell) -> None:
    """Those of the page are there, and those that are there are on the page."""
    listed = fields(PAGE, "\n## Reading the status\n")
    told = shell.run("hastore status --json").stdout.splitlines()
    assert len(told) == 3 and listed
    for one in map(json.loads, told):
        assert listed - set(one) == set() and set(one) - listed - OF_THE_COMMAND == set()


def test_under_systemd(shell: Shell) -> None:
    lines = SYSTEMD.text.splitlines()
    assert [line.startswith(NOT_TYPED) for line in lines].count(True) == len(NOT_TYPED)
    typed = "\n".join(line for line in lines if not line.startswith(NOT_TYPED))
    typed = typed.replace("-o root -g hastore ", "")  # a user of the machine
    service = shell.service("node1")
    service.stop()
    file = shell.folder / "node1.yaml"
    service.config.rename(file)
    (shell.folder / "deploy").symlink_to(ROOT / "deploy")
    shell.run(typed, **{"/etc/systemd": shell.folder / "systemd"})
    unit = (shell.folder / "systemd" / "system" / "hastore@.service").read_text()
    assert "ExecStart=/opt/hastore/bin/hastore serve -c /etc/hastore/%i.yaml" in unit
    assert service.running and service.config.stat().st_mode & 0o777 == 0o640
    shell.run("hastore status --wait 60")


def test_a_restart_of_one_node_after_the_other(shell: Shell) -> None:
    service = shell.service("node2")
    before = service.pid
    told = shell.run(RESTART.text, FILE=service.config)
    assert told.stdout.startswith("yes") and service.pid != before


def test_the_nodes_of_a_group_are_changed(shell: Shell) -> None:
    """On copies of the files, because a line is an alternative to the one before."""
    there = shell.etc / "g0"
    for line in NODES.text.splitlines():
        for number in (1, 2, 3):
            shutil.copy(shell.etc / f"node{number}.yaml", there)
        hosts = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"][: line.count("HOST:PORT")]
        shell.run(line, **({"HOST:PORT": hosts} if hosts else {}))
        nodes = load_config(str(there / "node1.yaml")).nodes
        words = line.split()
        left = {1, 2, 3} - ({int(words[5])} if words[2] != "add" else set())
        assert set(nodes) == left | ({4} if words[2] != "remove" else set())


def test_a_backup(shell: Shell) -> None:
    file = shell.service("node2").config
    shell.run("echo one | hastore produce kept")
    told = shell.run(BACKUP.text, **{"node2.yaml": file, "/backup": shell.folder / "backup"})
    assert "backup 1 of node 2" in told.stdout and "backup 1 is whole" in told.stdout


def test_what_is_in_rescued(pair: Shell) -> None:
    old, new = pair.service("node1"), pair.service("node2")
    new.kill()
    with Producer(old.api, acks=1) as producer:
        for number in range(3):
            producer.send_sync("orders", b"only here %d" % number)
    old.kill()
    new.start()
    pair.run("hastore promote -c FILE", FILE=new.config)
    old.start()
    pair.run("hastore status --wait 60")
    status = old.status()
    assert status is not None and status["cut_messages"] == 3
    folder = pathlib.Path(status["cuts"][0]["folder"])
    told = pair.run(
        RESCUED.text, **{"node1.yaml": old.config, "STORE/rescued/65537-4711": folder}
    )  # fmt: skip
    assert "only here 2" in told.stdout
    after = old.status()
    assert after is not None and after["cuts"] == []
    with Consumer("orders", pair.variables["HASTORE_BOOTSTRAP"].split(",")) as consumer:
        bodies: set[bytes] = set()
        while len(bodies) < 3:
            bodies |= {message.body for message in consumer.poll(timeout_s=60)}
    assert bodies == {b"only here %d" % number for number in range(3)}


def test_topics(shell: Shell) -> None:
    told = shell.run(TOPICS.text)
    assert "orders" in told.stdout and "32" in told.stdout


def test_messages_by_hand(shell: Shell) -> None:
    (shell.folder / "lines").write_text("4711:one pear\n4712:two pears\n")
    told = shell.run(MESSAGES.text)
    assert " 4711 one pear\n" in told.stdout and told.stdout.count("two pears\n") == 1
    copied = shell.run("hastore consume copy --json")
    assert [json.loads(line)["tags"] for line in copied.stdout.splitlines()] == ["new", "new"]


def test_completion(shell: Shell) -> None:
    (shell.folder / ".config" / "fish" / "completions").mkdir(parents=True)
    shell.run(COMPLETION.text.replace("> ~/", f"> {shell.folder}/"))
    for name in (".bash_completion", ".zshrc", ".config/fish/completions/hastore.fish"):
        assert "hastore" in (shell.folder / name).read_text()


def test_consumer_groups(shell: Shell) -> None:
    shell.run("seq 20 | hastore produce orders && hastore consume orders --group billing --max 5")
    typed = GROUPS.text.replace("hastore groups delete", "echo y | hastore groups delete")
    told = shell.run(typed)
    assert "billing" in told.stdout
    asked = shell.run("hastore groups lag --group billing --max 1", code=4)
    assert "billing" in asked.stdout + asked.stderr
