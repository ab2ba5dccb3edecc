"""Strangers attack a node that asks who its clients are: it goes on, and its memory is bounded."""

from __future__ import annotations

import json
import pathlib
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hastore.client import Admin, Producer
from hastore.client.security import Security
from hastore.errors import NotAuthenticatedError, OutcomeUnknown
from hastore.security.tls_engine import NodeName
from tests.cli.kit import hastore
from tests.process.harness import ROOT, audit_lines, wait_until
from tests.process.test_api_attacks import GROWTH_BYTES_MAX, Watch, Worker
from tests.security.conftest import IdentitiesText
from tests.security.pki import Pki

PATIENCE_S = 60.0  # far beyond the 5 s that a stranger has, on a busy machine
FLOOD_S = 2.0


@pytest.fixture
def secured(make_group, tmp_path, monkeypatch):
    """A master with TLS and identities; the environment has the security of identity "orders"."""
    group = make_group(1, master_role="ASYNC_MASTER", cold=True)  # /proc has its command line
    pki = Pki(tmp_path / "tls")
    files = pki.node(NodeName("test", "g0", 1))
    key = secrets.token_hex(32)
    text = IdentitiesText().add("orders", key, produce='["*"]', consume='["*"]')
    group.identities = tmp_path / "identities.yaml"
    text.write(group.identities)
    key_file = tmp_path / "orders.key"
    key_file.write_text(key + "\n")
    key_file.chmod(0o600)
    group[1].write(
        security={
            "ca": files.ca, "certificate": files.certificate, "key": files.key,
            "api": "tls", "identities": str(group.identities),
        }
    )  # fmt: skip
    client = tmp_path / "client.yaml"
    client.write_text(f"tls_ca: {files.ca}\nidentity: orders\nkey_file: orders.key\n")
    monkeypatch.setenv("HASTORE_SECURITY", str(client))
    group[1].start()
    group.text, group.key, group.pki = text, key, pki
    return group


def attack(kind, node, seconds, ca):
    """Run an attack to its end; return its connections, and how many of them were ended."""
    host, _, port = node.api.removeprefix("tcp://").rpartition(":")
    done = subprocess.run(
        [sys.executable, "-m", "tests.process.identity_attacks", kind, host, port, str(seconds),
         ca],
        cwd=ROOT, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout.splitlines()[-1])
    return found["connections"], found["ended"]


# It takes 10 s: a stranger has 5 s to prove who it is, and the attacks last until it is sent away.
@pytest.mark.full
def test_strangers_do_not_stop_a_node(secured):
    node = secured[1]
    worker = Worker(secured.bootstrap)
    watch = None
    try:
        wait_until(lambda: len(worker.acknowledged) > 100, 60, lambda: repr(worker.failure))
        watch = Watch(secured)
        for kinds, seconds in ((("crowd", "drops"), PATIENCE_S), (("garbage", "keys"), FLOOD_S)):
            worker.take_slowest_s()
            before = len(worker.acknowledged)
            with ThreadPoolExecutor(2) as pool:
                found = list(
                    pool.map(lambda kind, s=seconds: attack(kind, node, s, secured.pki.ca), kinds)
                )
            wait_until(
                lambda before=before: len(worker.acknowledged) > before + 5 or worker.failure,
                60, f"{kinds}: the client is not served",
            )  # fmt: skip
            growth = watch.take_growth()[1]
            slowest = worker.take_slowest_s()
            text = f"{kinds}: made and ended {found}, {growth / 2**20:.1f} MiB, "
            print(text + f"{len(worker.acknowledged) - before} puts, slowest {slowest:.3f} s")
            assert worker.failure is None, f"{kinds}: {worker.failure!r}"
            assert all(made >= 10 and ended == made for made, ended in found), text
            assert growth < GROWTH_BYTES_MAX, text
            assert node.running and "Traceback" not in node.log, node.last_lines(40)
    finally:
        worker.end()
        if watch is not None:
            watch.end()
    assert worker.failure is None
    seen = json.dumps(node.status()) + pathlib.Path(f"/proc/{node.pid}/cmdline").read_text()
    assert node.stop() == 0
    lines = audit_lines(node.store)  # what was left out is counted when the node stops
    refused = [line for line in lines if line["action"] == "authenticate"]
    assert refused and all(line["outcome"] == "refused" for line in refused)
    assert any(line.get("left_out") for line in refused) and len(lines) < 2_000
    seen += node.log + json.dumps(lines)
    assert secured.key not in seen
    for line in secured.text.text().splitlines():
        if "SCRAM-SHA-256$" in line:
            assert line.rpartition("$")[2].strip('"') not in seen


def test_commands_prove_who_they_are(secured, tmp_path, monkeypatch):
    node = secured[1]
    where = ("--bootstrap", node.api)
    assert hastore("status", *where).returncode == 0
    other = tmp_path / "other.yaml"
    (tmp_path / "wrong.key").write_text("0" * 64)
    (tmp_path / "wrong.key").chmod(0o600)
    other.write_text(f"tls_ca: {secured.pki.ca}\nidentity: orders\nkey_file: wrong.key\n")
    begun = time.monotonic()
    refused = hastore("status", *where, "--security", str(other))
    assert refused.returncode == 1 and time.monotonic() - begun < PATIENCE_S
    assert refused.stderr.count("\n") == 1 and "orders" in refused.stderr, refused.stderr
    # The commands on the node's machine know TLS from its file, and the identity as the others.
    again = hastore("promote", "-c", str(node.path), "--async")
    assert again.returncode == 0, again.stderr
    monkeypatch.delenv("HASTORE_SECURITY")
    stranger = hastore("promote", "-c", str(node.path), "--async")
    assert stranger.returncode == 1 and "--security" in stranger.stderr, stranger.stderr
    assert stranger.stderr.count("\n") == 1
    checked = hastore("doctor", "-c", str(node.path))
    assert "asks its clients who they are" in checked.stdout + checked.stderr


def test_revocation_and_rotation_reach_a_running_node(secured, tmp_path):
    node = secured[1]
    newer = secrets.token_hex(32)
    path = tmp_path / "newer.key"
    path.write_text(newer)
    path.chmod(0o600)
    after = Security(tls_ca=secured.pki.ca, identity="orders", key_file=str(path))
    with Producer(secured.bootstrap) as producer:
        producer.send_sync("t", b"1")
        secured.text.add("orders", secured.key, newer, produce='["*"]', consume='["*"]')
        secured.text.write(secured.identities)

        def accepted():
            try:
                with Admin(secured.bootstrap, security=after) as admin:
                    return admin.status()
            except NotAuthenticatedError:
                return None

        wait_until(accepted, 60, "the new key is not accepted")
        producer.send_sync("t", b"2")
        secured.text.add("orders", newer, produce='["*"]', consume='["*"]')
        secured.text.write(secured.identities)
        node.wait_log("identity orders was revoked, or this key")
        # A put that was sent just before the connection ended has no known outcome.
        with pytest.raises((NotAuthenticatedError, OutcomeUnknown), match="orders"):
            producer.send_sync("t", b"3")
    with Producer(secured.bootstrap, security=after) as producer:
        producer.send_sync("t", b"4")
    assert any(line["outcome"] == "ended" for line in audit_lines(node.store))


def test_a_node_does_not_start_with_a_wrong_file(secured, tmp_path):
    node = secured[1]
    node.stop()
    good = dict(node.settings["security"])
    (tmp_path / "open").write_text("identities: {}\n")
    (tmp_path / "open").chmod(0o644)
    for key, name in (("identities", "open"), ("key", "missing")):
        node.write(security={**good, key: str(tmp_path / name)})
        node.start(wait=False)
        assert node.exit_code() == 2
        last = node.log.strip().splitlines()[-1]
        assert last.startswith("error: ") and str(tmp_path / name) in last, last
