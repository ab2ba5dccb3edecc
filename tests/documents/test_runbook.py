"""The sections of docs/runbook.md, played with real nodes: their commands as printed, in order."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator

import pytest
import yaml

from hastore import Producer
from hastore.testing.groups import Node
from tests.documents.blocks import ROOT, RUNBOOK, Section, take
from tests.documents.shell import Service, Shell, eventually

INTRO = Section("Runbook")
LOOK = take(RUNBOOK, "hastore status ")
FIRST_PAIR = Section("A first pair on two machines")
FLIP = Section("A planned flip")
DEAD = Section("The master is dead")
TOO_FEW = Section("Too few slaves")
NO_MAJORITY = Section("No majority")
SITE = Section("The whole site lost its power")
DISK = Section("A dead disk")
UPGRADE = Section("An upgrade, and the way back")
KEYS = Section("Keys and certificates")
ONE_FRAME = "hastore top --once --every 0.1 "  # the page's goes on until q


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def make(shell: Shell, *options: str) -> list[Service]:
    """Make a group as by `hastore init`, and start its nodes; do what comes before the headings."""
    services = shell.make_group(*options)
    with INTRO as page:
        export = page.says("export HASTORE_BOOTSTRAP=")
    hosts = export.partition("=")[2]
    given = shell.variables["HASTORE_BOOTSTRAP"]
    assert shell.run(f"{export}; echo $HASTORE_BOOTSTRAP", **{hosts: given}).stdout == f"{given}\n"
    return services


def test_a_first_pair_a_look_a_flip_and_an_upgrade(shell: Shell) -> None:
    with FIRST_PAIR as page:
        shell.run(page.says("hastore init g0"))
        tls = shell.run(page.says("hastore init --tls g0"), g0="g1")
        assert "keys ca --dir" in tls.stdout and "keys new ops --admin" in tls.stdout
        files = [shell.folder / "g0" / f"node{number}.yaml" for number in (1, 2)]
        shell.variables["HASTORE_BOOTSTRAP"] = shell.elsewhere(*files)
        for file in files:
            shutil.move(file, shell.etc / file.name)
        first, second = (shell.service(f"node{number}") for number in (1, 2))
        doctor = page.says("hastore doctor -c FILE")
        for one in (first, second):
            found = shell.run(doctor, FILE=one.config)
            assert "bad" not in found.stdout, found.stdout
        shell.run(page.says("systemctl start hastore@node1"))
        shell.run(page.says("systemctl start hastore@node2"))
        told = shell.run(page.says("hastore status --wait 60"))
        assert "SYNC_MASTER" in told.stdout and "in sync" in told.stdout
        shell.run(page.says("echo hello | hastore produce first"))
        assert shell.run(page.says("hastore consume first --max 1")).stdout == "hello\n"

    looked = shell.run(LOOK.text.replace("hastore top ", ONE_FRAME), FILE=first.config)
    assert looked.stdout.count("SYNC_MASTER") >= 2

    with FLIP as page:
        dry = page.says("hastore flip --to 2 --dry-run")
        shell.run(dry)
        assert is_master(first)
        done = shell.run(dry.removesuffix(" --dry-run"))
        assert "node 2" in done.stdout.splitlines()[-1]
        shell.run(page.says("hastore status"))
        assert is_master(second)

    with UPGRADE as page:
        backup = page.says("hastore backup take -c FILE /backup/g0")
        shell.run(backup, FILE=first.config, **{"/backup": shell.folder / "backup"})
        asked = page.says("hastore can-stop -c FILE")
        no = shell.run(asked, code=4, FILE=first.config)  # as the page says of a pair
        assert "puts that do not set acks would be refused" in no.stdout
        shell.run(page.says("systemctl stop hastore@nodeN"), nodeN="node1")
        assert not first.running
        shell.run(page.says("systemctl start hastore@nodeN"), nodeN="node1")
        shell.run(page.says("hastore status --wait 60"))
    assert [*shell.folder.glob("backup/g0/*")]


def test_the_master_is_dead_and_there_are_too_few_slaves(shell: Shell) -> None:
    old, new = make(shell)
    with Producer(old.api) as producer:
        producer.send("first", b"hello").result()
    old.kill()
    with DEAD as page:
        told = shell.run(page.says("hastore status"), code=4)
        assert "refused" in told.stdout
        told = shell.run(page.says("hastore promote -c FILE"), FILE=new.config)
        assert is_writable(new) and not is_master(new)
        told = shell.run(page.says("hastore status"), code=4)
        assert "puts that do not set acks are refused" in told.stderr

        with TOO_FEW as later:
            told = shell.run(later.says("hastore status"), code=4)
            assert "node 1: no answer" in told.stdout
            start = later.says("systemctl start hastore@nodeN")
            look = later.says("hastore status")
            lonely = later.says("hastore promote -c FILE --async")
            told = shell.run(lonely, FILE=new.config)
            assert "only this node has" in told.stderr
            shell.run("echo alone | hastore produce first")
            shell.run(start, nodeN="node1")
            told = shell.run(f"{look} --wait 60")
            assert "ASYNC_MASTER" in told.stdout and "in sync" in told.stdout
            shell.run(later.says("hastore promote -c FILE"), FILE=new.config)
        assert is_master(new)
        shell.run(page.says("hastore demote -c FILE"), FILE=old.config)
        assert yaml.safe_load(old.config.read_text())["role"] == "SLAVE" and is_master(new)
        listed = shell.run(page.says("hastore rescued list -c FILE"), FILE=old.config)
        assert "nothing that was cut" in listed.stdout


def test_a_majority_of_the_disks_is_lost(shell: Shell) -> None:
    left, *lost = make(shell, "--mode", "dledger")
    shell.run("echo hello | hastore produce first")
    for one in (left, *lost):
        one.kill()
    for one in lost:
        shutil.rmtree(one.store)
    with NO_MAJORITY as page:
        shell.run(page.says("hastore status"), code=1)
        recover = page.says("hastore dledger recover -c FILE")
        asked = shell.run(recover, code=1, FILE=left.config)
        assert "nothing was changed" in asked.stderr and "--unsafe" in asked.stderr
        assert "compare the term first, then the entry" in asked.stdout
        shell.run(f"{recover} --unsafe", FILE=left.config)
    shell.run("systemctl start hastore@node1")
    shell.run("hastore status --wait 60", code=0)
    assert shell.run("hastore consume first --max 1").stdout == "hello\n"


def test_the_whole_site_loses_its_power(shell: Shell) -> None:
    old, new = make(shell)
    shell.run("echo hello | hastore produce first")
    for one in (old, new):
        one.kill()
    with SITE as page:
        new.start()
        shell.run(page.says("hastore promote -c FILE"), FILE=new.config)
        assert is_writable(new)
        old.start()
        shell.run(f"{page.says('hastore status')} --wait 60")
        listed = page.says("hastore rescued list -c FILE")
        for one in (old, new):
            assert "nothing that was cut" in shell.run(listed, FILE=one.config).stdout
        assert page.says("hastore top") == "hastore top"
        assert "SYNC_MASTER" in shell.run(ONE_FRAME).stdout


def test_a_disk_is_dead(shell: Shell) -> None:
    master, _second, dead = make(shell, "--nodes", "3")
    shell.run("echo hello | hastore produce first")
    dead.kill()
    shutil.rmtree(dead.store)
    [(_, place)] = shell.ports.addresses(1).items()
    api, ha, http = place["api"].removeprefix("tcp://"), place["ha"], place["http"]
    with DISK as page:
        page.says("hastore promote -c FILE")  # of a master: test_the_master_is_dead_...
        replace = page.says("hastore node replace DIR --node 3 --by 4")
        told = shell.run(replace, **{"DIR": shell.etc, "HOST:PORT": [api, ha, http]})
        settings = yaml.safe_load(dead.config.read_text())
        settings |= {"node": 4, "nodes": yaml.safe_load(master.config.read_text())["nodes"]}
        settings["store"]["root"] = str(shell.folder / "store4")
        (shell.etc / "node4.yaml").write_text(yaml.safe_dump(settings))
        assert "node 4" in told.stdout
        shell.run("systemctl start hastore@node4")
        wait = "hastore status --wait 600"
        assert f"wait until it is in sync: `{wait}`" in told.stdout
        shell.run(wait)
        assert in_sync(master, 4)
        shell.run(page.says("hastore status"), code=1)  # node 3 does not answer
        shell.run(page.says("hastore promote -c FILE"), FILE=master.config)
        assert status(master)["config_pending"] == [], "the new list is in force"
        again = Shell(shell.folder / "dledger")
        with contextlib.closing(again):
            *_, forgetful = make(again, "--mode", "dledger")
            forgetful.kill()
            shutil.rmtree(forgetful.store)
            again.run("systemctl start hastore@node3")
            look = page.says("hastore status --json")
            eventually(lambda: remembers(again, look, 3), "node 3 to remember")
            # There is no node 4 here, so it is refused; tests/torture has the replacement.
            replace = page.says("hastore dledger replace -c FILE --node 3 --by 4")
            again.run(replace, code=1, FILE=forgetful.config)
            forgetful.stop()
            (log,) = forgetful.store.glob("dledger-*/data/*")
            with open(log, "r+b") as file:
                file.write(b"\xff")
            told = again.run(page.says("hastore log repair -c FILE"), FILE=forgetful.config)
            assert "repaired from tcp://" in told.stdout
            again.run("systemctl start hastore@node3")
        verify = page.says("hastore log verify --store DIR")
        shell.run(verify, DIR=shell.folder / "store4")


def remembers(shell: Shell, command: str, number: int) -> bool:
    nodes = [json.loads(line) for line in shell.run(command).stdout.splitlines()]
    return any(one["remembers"] for one in nodes if one["node"] == number)


def test_keys_and_certificates_are_renewed(shell: Shell) -> None:
    """The commands that `hastore init --tls` prints make them first."""
    printed = shell.run("hastore init --tls g1").stdout.replace(f"{ROOT}/bin/", "")
    files = [shell.folder / "g1" / f"node{number}.yaml" for number in (1, 2)]
    old = printed.partition("HASTORE_BOOTSTRAP=")[2].split()[0]
    shell.run(printed, **{old: shell.elsewhere(*files)})
    service = shell.service(files[0])
    told = shell.run("hastore doctor --all -c FILE", code=1, FILE=files[0])
    assert "no node answers this command: see the reason of each node" in told.stdout
    shell.variables["HASTORE_SECURITY"] = str(shell.folder / "g1" / "ops.yaml")
    with KEYS as page:
        shell.run(page.says("hastore doctor --all -c FILE"), FILE=files[0])
        places = {"tls": shell.folder / "g1" / "tls", "FILE": files[0]}
        before = (shell.folder / "g1" / "tls" / "node1.pem").read_bytes()
        shell.run(page.says("hastore keys cert --dir tls -c FILE --renew"), **places)
        assert (shell.folder / "g1" / "tls" / "node1.pem").read_bytes() != before
        shell.run("hastore keys new shop --file g1/identities.yaml --out shop.key")
        places = {"NAME": "shop", "identities.yaml": "g1/identities.yaml"}
        rotate = page.says("hastore keys new NAME --rotate --file identities.yaml")
        shell.run(rotate, NEW="new.key", **places)
        revoke = page.says("hastore keys revoke NAME --old --file identities.yaml")
        shell.run(revoke, **places)
    assert service.running


def status(node: Node) -> dict[str, object]:
    found = node.status()
    assert found is not None, node
    return found


def is_master(node: Node) -> bool:
    """Whether it takes puts that wait for other nodes."""
    return bool(status(node)["takes_default"])


def is_writable(node: Node) -> bool:
    return bool(status(node)["writable"])


def in_sync(master: Node, number: int) -> bool:
    slaves = status(master)["slaves"]
    assert isinstance(slaves, list)
    return any(one["node"] == number and one["in_sync"] for one in slaves)
