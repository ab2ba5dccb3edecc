"""The commands of dledger.md, migrate-from-rocketmq.md, security.md and rocketmq-clients.md."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest
import yaml

from tests.documents.blocks import ROOT, fields, take
from tests.documents.shell import Shell, eventually

OPERATIONS = "docs/operations.md"
DLEDGER, MIGRATE = "docs/dledger.md", "docs/migrate-from-rocketmq.md"
RUN_IT = take(DLEDGER, "bin/hastore-dledger -c")
READY = take(DLEDGER, "ready node=1")
LEAD = take(DLEDGER, "hastore flip -c FILE")
REPLACE = take(DLEDGER, "hastore dledger replace")
COPY = take(MIGRATE, "mkdir -p data/node1/commitlog")
SLAVES = take(MIGRATE, "role: SLAVE")
START = take(MIGRATE, "hastore-slave -c node1.yaml")
PENDING = take(MIGRATE, "hastore log pending")
TABLES = take(MIGRATE, "mkdir -p data/node1/config")
BACK = take(MIGRATE, "hastore positions export")
CERTIFICATES = take("docs/security.md", "hastore keys ca --dir tls")
KEYS = take("docs/security.md", "hastore keys new orders --file")
OF_ROCKETMQ = take("docs/rocketmq-clients.md", "hastore keys new shop --rocketmq")


@pytest.fixture
def shell(tmp_path: pathlib.Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def test_dledger(shell: Shell) -> None:
    """With the files of `conf`, and a fourth node for the one that is replaced."""
    conf = shell.folder / "conf"
    conf.mkdir()
    files = [conf / f"dledger-n{number}.yaml" for number in range(3)]
    for file in files:
        shutil.copy(ROOT / "conf" / file.name, file)
    bootstrap = RUN_IT.text.partition("HASTORE_BOOTSTRAP=")[2].split()[0]
    hosts = shell.elsewhere(*files)
    shell.run(RUN_IT.text, **{bootstrap: hosts})
    shell.variables["HASTORE_BOOTSTRAP"] = hosts
    nodes = {one.number: one for one in shell.services.values()}
    for node in nodes.values():
        node.wait_ready()
        told = re.findall(r"(\w+)=", node.ready_line)
        promised = re.findall(r"(\w+)=", READY.text)
        assert told[: len(promised)] == promised, node.ready_line

    def leader() -> int:
        told = shell.run("hastore status --json").stdout.splitlines()
        return next(one["node"] for one in map(json.loads, told) if one["role"] == "LEADER")

    one = json.loads(shell.run("hastore status --json").stdout.splitlines()[0])
    described = fields(DLEDGER, "\n## Operate it\n") | fields(
        OPERATIONS, "\n## Reading the status\n"
    )
    assert set(one) - described - {"address", "answers"} == set()
    assert fields(DLEDGER, "\n## Operate it\n") - set(one) == set()
    flip, transfer = LEAD.text.splitlines()
    shell.run(flip, FILE=nodes[1].config)
    assert leader() == 2
    shell.run(transfer.replace("--to 2", "--to 1"), FILE=nodes[2].config)
    eventually(lambda: leader() == 1, "node 1 to lead")

    settings = yaml.safe_load(files[0].read_text())
    settings["nodes"][4] = shell.ports.addresses(1)[1]
    settings["store"]["root"], settings["node"] = "data/dledger4", 4
    fourth = conf / "dledger-n3.yaml"
    fourth.write_text(yaml.safe_dump(settings))
    for file in files:
        lines = file.read_text().splitlines()
        at = next(n for n, line in enumerate(lines) if line.startswith("  3: {"))
        lines.insert(at + 1, f"  4: {json.dumps(settings['nodes'][4])}")
        file.write_text("\n".join(lines))
    shell.run(f"hastore-dledger -c {fourth}")
    shell.run(f"{REPLACE.text.strip()} --wait 60", FILE=nodes[1].config)
    status = nodes[1].status()
    assert status is not None and status["members"] == [1, 2, 4]


def test_migrate_from_rocketmq_and_back(shell: Shell) -> None:
    """The steps of the operator; those of the broker are in tests/interop/test_migration.py.

    A store of RocketMQ 5.3 takes the place of the broker's, which has stopped.
    """
    broker = shell.folder / "broker"
    shutil.copytree(ROOT / "tests" / "golden" / "three-files", broker)
    (broker / "config").mkdir()
    for name in ("topics", "subscriptionGroup", "consumerOffset", "delayOffset"):
        (broker / "config" / f"{name}.json").write_text("{}")
    size = min(broker.glob("commitlog/*")).stat().st_size
    files = [shell.folder / f"node{number}.yaml" for number in (1, 2)]
    for number, file in enumerate(files, 1):
        own = f"cluster: c\ngroup: g\nnode: {number}\n{SLAVES.text}"
        store = f"store: {{root: data/node{number}, commitlog_file_size: {size}}}\n"
        file.write_text(own.replace("127.0.0.1:10912", f"127.0.0.1:{shell.ports.take()}") + store)
    shell.variables["HASTORE_BOOTSTRAP"] = shell.elsewhere(*files)
    for name in ("node1", "node2"):
        shell.run(COPY.text.replace("node1", name).replace("BROKER_STORE", str(broker)))
    shell.run(TABLES.text.replace("BROKER_STORE", broker.name))
    assert len(list((shell.folder / "data" / "node1" / "config").iterdir())) == 4
    shell.run(START.text)
    first, second = (shell.service(file) for file in files)
    ends = {str(node.status() and node.status()["max_offset"]) for node in (first, second)}
    assert ends != {"0"} and len(ends) == 1
    shell.run(PENDING.text)
    shell.run("hastore promote -c node1.yaml")
    assert yaml.safe_load(files[0].read_text())["ha"]["classic_master"] is None

    lines = BACK.text.splitlines()
    assert lines.pop() == "mqbroker -c broker.conf"
    pids = {"NODE1_PID": str(first.pid), "NODE2_PID": str(second.pid)}
    typed = "\n".join(lines).replace("BROKER_STORE", str(broker))
    at = lines.index("kill -TERM NODE1_PID NODE2_PID") + 1
    before, after = (typed.splitlines()[part] for part in (slice(at), slice(at, None)))
    shell.run("\n".join(before), **pids)
    for node in (first, second):
        eventually(lambda node=node: not node.running, "the node to end")
    shell.run("\n".join(after))
    assert json.loads((broker / "config" / "consumerOffset.json").read_text())
    assert not (broker / "consumequeue").exists() and (broker / "abort").exists()
    log, copy = (folder / "commitlog" for folder in (first.store, broker))
    for one in log.iterdir():
        assert (copy / one.name).read_bytes() == one.read_bytes()


def test_certificates(shell: Shell) -> None:
    shell.run("hastore init group && mv group/node1.yaml group/node2.yaml .")
    shell.run(CERTIFICATES.text)
    for name in ("ca.pem", "node1.pem", "node2.key", "client-shop.pem"):
        assert (shell.folder / "tls" / name).exists(), name


def test_keys(shell: Shell) -> None:
    told = shell.run(KEYS.text)
    assert "orders" in told.stdout
    names = yaml.safe_load((shell.folder / "identities.yaml").read_text())["identities"]
    assert sorted(names) == ["shop"] and names["shop"]["produce"] == ["Shop*"]
    (shell.folder / "identities.yaml").unlink()
    (shell.folder / "shop.rocketmq.yml").unlink()
    shell.run(OF_ROCKETMQ.text)
    again = yaml.safe_load((shell.folder / "identities.yaml").read_text())["identities"]
    assert again["shop"]["groups"] == ["shop*"] and again["shop"]["secrets"]
