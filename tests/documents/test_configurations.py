"""Configurations and JSON in the documents: hastore's own loaders take them, output has them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import click
import pytest
import yaml

from hastore.cli.main import pipeline_group
from hastore.cli.pipeline.jobs_file import read_jobs
from hastore.client.security import read_security
from hastore.config.file import load_config
from hastore.config.model import Config, Role
from hastore.fs.filesystem import REAL
from hastore.registry.entry import parse_entry
from hastore.security.audit_log import AuditLog
from hastore.security.identity_file import parse_identities
from hastore.service import raise_failure
from tests.cli.kit import hastore
from tests.documents.blocks import ROOT, take

OPERATIONS, SECURITY = "docs/operations.md", "docs/security.md"
ROCKETMQ = "docs/rocketmq-clients.md"
PORTS = take(OPERATIONS, "nodes:")
REGISTRY = take(OPERATIONS, "pip install 'hastore[zk]'")
REGISTRY_TLS = take(OPERATIONS, "registry: zk://")
ENTRY = take(OPERATIONS, '{"role": "SYNC_MASTER"')
LOG = take(OPERATIONS, "log:")
IDENTITIES = take(SECURITY, "challenge_secret:")
CLIENT = take(SECURITY, "tls_ca: ca.pem")
AUDIT = take(SECURITY, '{"time":')
SCRAPES = (take(SECURITY, "scrape_configs:"), take("docs/metrics.md", "scrape_configs:"))
REMOTING = take(ROCKETMQ, "remoting:\n  enabled")
JOBS = take("docs/pipeline-jobs.md", "spark: {memory: 2g")
NAME_SERVERS = take(ROCKETMQ, "remoting:\n  name_servers")

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load the file of node 1 of a pair with keys of a document."""
    monkeypatch.chdir(tmp_path)
    assert hastore("init", "group").returncode == 0
    base = yaml.safe_load(pathlib.Path("group/node1.yaml").read_text())

    def load(text: str, **more: object) -> Config:
        found = yaml.safe_load(text)
        for key, value in (*found.items(), *more.items()):
            mine = base.get(key)
            base[key] = {**mine, **value} if isinstance(mine, dict) else value
        pathlib.Path("node1.yaml").write_text(yaml.safe_dump(base))
        return load_config("node1.yaml")

    return load


def test_addresses_for_others_and_what_is_bound(load: Load) -> None:
    config = load(PORTS.text, api={"allow_unauthenticated": True})
    assert config.nodes[2].ha == "n2.example:10912"
    assert config.bound("http") == "0.0.0.0:10913"


def test_the_log_of_the_node(load: Load) -> None:
    config = load(LOG.text)
    assert config.log.file == "/var/log/hastore/node1.log"


def test_rocketmqs_clients(load: Load) -> None:
    """The block has every key, with its default."""
    assert load(NAME_SERVERS.text).remoting.name_servers == ("ns1:9876", "ns2:9876")
    shown = yaml.safe_load(REMOTING.text)["remoting"]
    template = yaml.safe_load((ROOT / "conf" / "master.yaml").read_text())["remoting"]
    assert shown == template
    load(REMOTING.text)


def test_roles_in_zookeeper(load: Load) -> None:
    install, _, text = REGISTRY.text.partition("\n")
    setup = (ROOT / "setup.cfg").read_text()
    assert install.startswith("pip install 'hastore[zk]'") and "\nzk =\n" in setup
    acl = pathlib.Path("registry-acl")
    acl.write_text("hastore:secret\n")
    acl.chmod(0o600)
    assert hastore("keys", "ca", "--dir", "zoo").returncode == 0
    made = hastore("keys", "cert", "--dir", "zoo", "-c", "group/node1.yaml")
    assert made.returncode == 0, made.stderr
    assert load(text).registry == "zk://zoo1:2281,zoo2:2281,zoo3:2281"
    ours, comment, theirs = REGISTRY_TLS.text.partition("# zoo.cfg")
    assert comment and str(load(ours).registry_key).endswith("zoo/node1.key")
    used = (ROOT / "tests" / "registry" / "servers.py").read_text()
    used += (ROOT / "tests" / "registry" / "test_tls.py").read_text()
    for line in theirs.splitlines()[1:]:
        assert line.partition("=")[0] in used, line


def test_the_object_of_a_node_in_zookeeper() -> None:
    text = ENTRY.text.replace("tcp://HOST:PORT", "tcp://h:1").replace("HOST:PORT", "h:1")
    entry = parse_entry(text.encode(), "/hastore/demo/g0/1")
    assert entry.node == 1 and entry.role is Role.SYNC_MASTER


def test_identities(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hastore("keys", "new", "a", "--file", "ids.yaml").returncode == 0
    made = yaml.safe_load(pathlib.Path("ids.yaml").read_text())
    real = made["identities"]["a"]["keys"][0]["verifier"]
    text = IDENTITIES.text
    for shown, value in (
        ("SCRAM-SHA-256$4096:SALT$STORED_KEY:SERVER_KEY", real),
        ("q83vEjRWeJ...=", made["challenge_secret"]),
        ("9f3c...", "9f3c" * 16),
    ):
        assert shown in text
        text = text.replace(shown, value)
    (one,) = parse_identities(text.encode(), "ids.yaml").identities.values()
    assert one.name == "orders" and one.quota is not None


def test_the_file_of_a_client(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(CLIENT.text)
    found = read_security(str(path))
    assert found.tls_ca == str(tmp_path / "ca.pem") and found.identity == "orders-app"


def test_scrapes_of_prometheus() -> None:
    """The job is named as the rules name it; there is no Prometheus here to load it."""
    rules = (ROOT / "deploy" / "prometheus" / "hastore.rules.yml").read_text()
    for block in SCRAPES:
        (job,) = yaml.safe_load(block.text)["scrape_configs"]
        assert job["job_name"] == "hastore" and 'job="hastore"' in rules
        assert job["scheme"] == "https" and job["tls_config"]["ca_file"]
        targets = job["static_configs"][0]["targets"]
        assert all(each.rpartition(":")[2].isdigit() for each in targets)


def test_a_line_of_the_audit_log(tmp_path: pathlib.Path) -> None:
    shown = json.loads(AUDIT.text)
    log = AuditLog(REAL, str(tmp_path / "audit.log"), shown["node"], on_failure=raise_failure)
    given = {name: shown[name] for name in ("outcome", "identity", "address", "reason")}
    log.start()
    log.note(shown["action"], **given)
    log.stop()
    written = json.loads((tmp_path / "audit.log").read_text())
    assert [*written] == [*shown]
    assert {**written, "time": ""} == {**shown, "time": ""}
    assert len(written["time"]) == len(shown["time"])


def test_the_file_of_jobs_is_one() -> None:
    names = ("audit", "compact", "export", "index", "stats")
    context = click.Context(pipeline_group)
    commands = {name: pipeline_group.get_command(context, name) for name in names}
    found = read_jobs("jobs.yaml", JOBS.text, commands)
    assert [one.name for one in found.jobs] == ["flights", "planes", "audit-3", "stats-4"]
