"""Nodes as processes whose links speak TLS, with certificates from `hastore keys`."""

import datetime
import os
import shutil

import pytest

from hastore import Producer
from hastore.cli.common import run_code
from hastore.cli.main import cli
from hastore.security.tls_engine import NodeName
from tests.cli.kit import hastore
from tests.process.dledger_group import DLedgerGroup
from tests.security.pki import Pki, now


def make_certificates(group, *extra):
    """Make a CA and a certificate for each node, as an operator does; use them for `ha`."""
    folder = group.folder / "tls"
    done = hastore("keys", "ca", "--dir", str(folder))
    assert done.returncode == 0, done.stderr
    files = [word for node in group for word in ("-c", str(node.path))]
    done = hastore("keys", "cert", "--dir", str(folder), *files, *extra)
    assert done.returncode == 0, done.stderr
    for node in group:
        stem = folder / f"node{node.number}"
        node.write(
            security={
                "ca": str(folder / "ca.pem"),
                "certificate": f"{stem}.pem",
                "key": f"{stem}.key",
                "ha": "tls",
            }
        )
    return folder


def put(group, count):
    """Put messages, each confirmed by `acks` nodes, or by a majority."""
    with Producer(group.bootstrap, delivery_timeout_s=60) as producer:
        for number in range(count):
            producer.send_sync("T", b"%d" % number)


def test_a_pair_replicates_flips_and_takes_new_certificates(make_group):
    group = make_group(2)
    folder = make_certificates(group)
    group.start()
    put(group, 50)
    one, two = group[1], group[2]
    done = hastore("doctor", "-c", str(two.path))
    assert "by TLS, without a secret" in done.stdout and "node2.pem is this node's" in done.stdout

    for node in group:
        done = hastore("keys", "cert", "--dir", str(folder), "-c", str(node.path), "--renew")
        assert done.returncode == 0, done.stderr
    for node in group:  # a node looks at the files every 2 s, when it is called, asked or calls
        node.wait_status(lambda _, node=node: "are in force now" in node.log, "new certificates")
    done = hastore("promote", "-c", str(two.path))
    assert done.returncode == 0, done.stderr
    one.edit_role("SLAVE")
    one.wait_status(lambda s: "superseded" not in s["reason"], "its file says slave too")
    two.wait_in_sync(1)
    put(group, 50)
    group.wait_equal()
    assert {node.status()["epoch"] for node in group} == {two.status()["epoch"]}

    # The master dies; the slave takes over, and the old master comes back.
    two.kill()
    done = hastore("promote", "-c", str(one.path), "--async")
    assert done.returncode == 0, done.stderr
    put(group, 20)
    two.edit_role("SLAVE")
    two.start()
    one.wait_in_sync(2)
    one.wait_status(lambda s: s["confirmed_offset"] == s["max_offset"], "all confirmed")


def test_a_node_without_tls_is_kept_out_and_told_why(make_group):
    group = make_group(2)
    make_certificates(group)
    group[1].start(wait=True)
    two = group[2]
    two.write(security={"ha": "plain"})
    two.start()
    words = "speaks TLS only; set security.ha: tls on this node too"
    two.wait_status(lambda s: words in str(s["reason"]) or words in str(s["problems"]), words)
    group[1].wait_log("does not speak TLS, and nothing else is accepted here")
    done = hastore("doctor", "-c", str(two.path))
    assert words in done.stdout
    before = group[1].status()
    assert before["role"] == "SYNC_MASTER" and before["slaves"] == []
    two.stop()
    two.write(security={"ha": "tls"})
    two.start()
    group[1].wait_in_sync(2)
    put(group, 3)


def refused(node, capsys, says):
    """The node would end with exit code 2 and one line; return the line."""
    assert run_code(cli, "hastore", ["serve", "-c", str(node.path), "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and line.startswith("error: "), line
    return line


def test_a_node_does_not_start_with_a_wrong_certificate(make_group, tmp_path, capsys):
    group = make_group(2)
    folder = make_certificates(group)
    one = group[1]
    certificate, key = folder / "node1.pem", folder / "node1.key"
    pki = Pki(tmp_path / "other")

    os.chmod(key, 0o644)
    refused(one, capsys, "node1.key is open to other users; run chmod 600")
    os.chmod(key, 0o600)
    good = certificate.read_bytes(), key.read_bytes()
    shutil.copy(folder / "node2.pem", certificate)
    refused(one, capsys, "is not the key of")
    shutil.copy(folder / "node2.key", key)
    refused(one, capsys, "is that of test/g0 node 2, not that of test/g0 node 1")
    past = now() - datetime.timedelta(days=9)
    ca = folder / "ca.pem"
    own_ca = ca.read_bytes()
    shutil.copy(pki.ca, ca)
    refused(one, capsys, "is not signed by the CA")
    later = now() + datetime.timedelta(days=3)
    for made, says in ((past, "has expired"), (later, "is not valid yet")):
        files = pki.node(NodeName("test", "g0", 1), made=made, days=8)
        shutil.copy(files.certificate, certificate)
        shutil.copy(files.key, key)
        line = refused(one, capsys, says)
    one.start(wait=False)
    assert one.exit_code() == 2 and one.log.splitlines() == [line]
    ca.write_bytes(own_ca)
    certificate.write_bytes(good[0])
    key.write_bytes(good[1])
    one.start()


@pytest.fixture
def dledger(tmp_path):
    with DLedgerGroup(tmp_path, cold=True) as group:
        yield group


@pytest.mark.full
def test_a_dledger_group_elects_replicates_and_survives_its_leader(dledger):
    make_certificates(dledger)
    dledger.start()
    put(dledger, 50)
    leader = dledger.wait_leader()
    leader.kill()
    put(dledger, 50)
    leader.start("dledger")
    dledger.wait_equal()
    for node in dledger:
        assert "Traceback" not in node.log
