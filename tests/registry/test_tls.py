"""TLS to a real ZooKeeper: nodes, commands and clients; each wrong certificate is refused."""

import datetime
import pathlib
import threading

import pytest

from hastore import Admin, Consumer, Producer, Security
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ConfigError, UnreachableError, UsageError
from hastore.registry import session
from hastore.registry.session import Session, Unreachable, registry_contexts
from hastore.security.tls_engine import NodeName
from tests.process.harness import Ports, hastore, wait_until
from tests.registry.servers import CREDENTIALS, Wire
from tests.security.pki import Pki, now

SERVER = NodeName("zookeeper", "zookeeper", 1)
SETTINGS = """\
maxSessionTimeout=3000
serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory
secureClientPort={port}
secureClientPortAddress=127.0.0.1
ssl.keyStore.location={keys}
ssl.trustStore.location={ca}
ssl.protocol={version}
ssl.clientAuth={asks}
"""
OTHER_CA = "certificate is not signed by the CA of this side"
CIPHERS = "ssl.ciphersuites=TLS_AES_128_GCM_SHA256\n"  # its default names none of TLS 1.3


class Secure:
    """A server with a port for TLS, and the files of those who use it."""

    def __init__(self, folder, make_servers, *, version="TLSv1.2", asks="need", hosts=None):
        self.pki = Pki(folder / "pki")
        own = self.pki.node(SERVER, hosts=hosts or ("127.0.0.1",), stem="server")
        keys = folder / "pki" / "both.pem"
        keys.write_text(pathlib.Path(own.certificate).read_text())
        with open(keys, "a") as file:
            file.write(pathlib.Path(own.key).read_text())
        self.make = lambda port: make_servers(
            settings=SETTINGS.format(
                port=port, keys=keys, ca=self.pki.ca, version=version, asks=asks
            )
            + (CIPHERS if version == "TLSv1.3" else "")
        )

    def start(self, port):
        self.servers, self.registry = self.make(port), f"zk://127.0.0.1:{port}"
        self.where = f"{self.registry}/test/g0"
        return self

    def files(self, name):
        """The settings of one who has a certificate of ZooKeeper's CA."""
        made = self.pki.client(name)
        return {"registry_ca": made.ca, "registry_certificate": made.certificate,
                "registry_key": made.key}  # fmt: skip


@pytest.fixture
def make_secure(tmp_path, make_servers):
    ports = Ports()
    yield lambda **options: Secure(tmp_path, make_servers, **options).start(ports.take())
    ports.close()


class Recorder(Wire):
    """A path that keeps what both sides send."""

    def __init__(self, port):
        self.seen = bytearray()
        super().__init__(port)

    def note(self, data):
        self.seen += data


@pytest.mark.full
def test_nodes_commands_and_clients_speak_tls(make_secure, make_group, tmp_path):
    """ZooKeeper's default is TLS 1.2. Neither password nor object crosses the network openly."""
    secure = make_secure()
    acl = tmp_path / "acl"
    acl.write_text(CREDENTIALS)
    acl.chmod(0o600)
    wire = Recorder(int(secure.registry.rpartition(":")[2]))
    try:
        pair = make_group()
        pair[1].write(registry=f"zk://{wire.address}")
        pair[2].write(registry=secure.registry)
        for node in pair:
            node.write(registry_acl_file=str(acl), **secure.files(f"node{node.number}"))
            node.start(wait=False)
        pair[1].wait_writable()
        pair[1].wait_in_sync(2)
        security = Security(**secure.files("app"))
        with Producer(secure.where, security=security, delivery_timeout_s=60.0) as producer:
            assert producer.send_sync("t", b"1").status == "PUT_OK"
            done = hastore("promote", "-c", str(pair[2].path))
            assert done.returncode == 0, done.stderr
            assert hastore("demote", "-c", str(pair[1].path)).returncode == 0
            assert producer.send_sync("t", b"2").status == "PUT_OK"
            assert producer.master == pair[2].api
        with Consumer("t", secure.where, security=security) as consumer:
            found = []
            while len(found) < 2:
                found += [one.body for one in consumer.poll(timeout_s=30.0)]
            assert set(found) == {b"1", b"2"}
        assert "the role is SYNC_MASTER" in hastore("doctor", "-c", str(pair[2].path)).stdout
        pair[1].wait_status(lambda s: s["role"] == "SLAVE" and not s["problems"], "no problem")
        # The server is restarted, and everybody finds it again.
        secure.servers.kill()
        pair[1].wait_status(lambda s: not s["registry"]["connected"], "out of reach")
        secure.servers.start()
        for node in pair:
            node.wait_status(lambda s: s["registry"]["connected"] and not s["problems"], "back")
    finally:
        wire.close()
    assert len(wire.seen) > 1_000
    assert b"s3cret" not in wire.seen and b"SYNC_MASTER" not in wire.seen


def refused(registry, text, **settings):
    """Wait until a session fails for this reason; a busy machine may need more than one attempt."""
    tls = registry_contexts(*(settings.get(f"registry_{one}") for one in ("ca", "certificate",
                                                                          "key")))  # fmt: skip
    seen = set()

    def look():
        with pytest.raises(Unreachable) as failure:
            Session(
                registry.removeprefix("zk://"), None, SYSTEM_CLOCK, tls=tls,
                stopping=threading.Event(), on_event=lambda: None,
            )  # fmt: skip
        seen.add(str(failure.value))
        assert "\n" not in str(failure.value)
        return text in str(failure.value)

    wait_until(look, 60, lambda: f"not {text!r}: {seen}")


@pytest.mark.slow("ZooKeeper says nothing to some certificates: each waits for an answer")
@pytest.mark.full
def test_each_wrong_certificate_is_refused(make_secure, make_group, tmp_path, monkeypatch):
    monkeypatch.setattr(session, "ANSWER_S", 0.6)
    secure = make_secure(version="TLSv1.3")
    own, other = secure.files("app"), Pki(tmp_path / "other")
    theirs = other.client("app")
    refused(secure.registry, OTHER_CA, **{**own, "registry_ca": other.ca})
    refused(secure.registry, "the other end", **{
        **own, "registry_certificate": theirs.certificate, "registry_key": theirs.key,
    })  # fmt: skip
    refused(secure.registry, "the other end", registry_ca=own["registry_ca"])  # it asks for one
    refused(secure.servers.registry, "name its secureClientPort", **own)
    refused(secure.registry, "no answer")  # in the clear to the port for TLS
    refused(secure.registry.replace("127.0.0.1", "localhost"), "is not for localhost", **own)
    expired = secure.pki.client("late", days=1, made=now() - datetime.timedelta(days=3))
    refused(secure.registry, "the other end", **{
        **own, "registry_certificate": expired.certificate, "registry_key": expired.key,
    })  # fmt: skip
    # A client and a node say the same, and the node keeps its role.
    wrong = {**own, "registry_ca": other.ca}
    with Admin(secure.where, timeout_s=2.0, security=Security(**wrong)) as admin:
        with pytest.raises(UnreachableError, match=OTHER_CA):
            admin.status()
    (node,) = make_group(1, master_role="ASYNC_MASTER")
    node.write(registry=secure.registry, **wrong)
    node.start()
    status = node.wait_status(lambda s: s["problems"], "a problem")
    assert OTHER_CA in status["problems"][0] and status["role"] == "ASYNC_MASTER"
    shown = hastore("doctor", "-c", str(node.path))
    assert shown.returncode == 1 and OTHER_CA in shown.stdout
    node.stop()
    pathlib.Path(own["registry_key"]).chmod(0o644)
    with pytest.raises(ConfigError, match="is open to other users; run chmod 600"):
        Admin(secure.where, security=Security(**own))
    node.start(wait=False)
    assert node.exit_code() == 2 and "is open to other users" in node.log


@pytest.mark.full
def test_a_certificate_is_replaced_without_a_restart(make_secure, make_group):
    """The new one counts at the next connection."""
    secure = make_secure(version="TLSv1.3", asks="none")
    (node,) = registered_alone(make_group, secure)
    ca = pathlib.Path(node.settings["registry_ca"])
    right = ca.read_bytes()
    ca.write_bytes(pathlib.Path(Pki(ca.parent / "other").ca).read_bytes())
    secure.servers.kill()
    wait_until(
        lambda: node.status() and "are in force now" in node.log, 60, "the new CA is not read"
    )
    secure.servers.start()
    node.wait_status(lambda s: OTHER_CA in " ".join(s["problems"]), "refused")
    ca.write_bytes(right)
    node.wait_status(lambda s: s["registry"]["connected"] and not s["problems"], "connected")


def registered_alone(make_group, secure):
    group = make_group(1, master_role="ASYNC_MASTER")
    for node in group:
        node.write(registry=secure.registry, registry_ca=secure.pki.ca)
        node.start()
        node.wait_status(lambda s: s["registry"]["connected"], "connected")
    return group


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"registry_key": "k"}, "security.registry_certificate is missing"),
        ({"registry_certificate": "c"}, "security.registry_key is missing"),
        ({"registry_certificate": "c", "registry_key": "k"}, "security.registry_ca is missing"),
        ({"registry_ca": ""}, "security.registry_ca"),
    ],
)
def test_incomplete_settings_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        Security(**given)
