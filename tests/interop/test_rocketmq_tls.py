"""RocketMQ's own Java clients over TLS, with the settings that docs/rocketmq-clients.md names.

Both versions send, consume and ask by mqadmin, through kill -9 of the master, in both modes.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from hastore.security.tls_engine import NodeName
from tests.interop.rocketmq_clients import Clients, HastoreSite, address
from tests.interop.rocketmq_scenes import bodies, ready
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until
from tests.security.pki import Pki

pytestmark = [pytest.mark.full, pytest.mark.slow("starts JVMs, and kills a master under them")]
LIMIT_S = 60.0
TLS = "-Dtls.enable=true"
MakeJvm = Callable[..., Clients]


def verified(pki: Pki) -> list[str]:
    """Return the properties with which a client checks the node's certificate."""
    return [
        TLS,
        "-Dtls.test.mode.enable=false",
        "-Dtls.client.authServer=true",
        f"-Dtls.client.trustCertPath={pki.ca}",
    ]


def secured(group: Group, pki: Pki) -> HastoreSite:
    """Start a group whose API and links speak TLS."""
    for node in group:
        files = pki.node(NodeName("test", "g0", node.number))
        node.write(security={
            "ca": files.ca, "certificate": files.certificate, "key": files.key,
            "api": "tls", "ha": "tls",
        })  # fmt: skip
    return HastoreSite(group.start(), "tls")


class Shop:
    """A producer and a push consumer of one version; all that was sent must come."""

    def __init__(self, jvm: Clients, site: HastoreSite) -> None:
        self.jvm = jvm
        self.topic = jvm.unique("Shop").replace(".", "_")
        self.sent: list[str] = []
        self.producer = jvm.producer(site)
        ready(jvm, self.producer, self.topic)
        # Its route is the master's: a slave's names no other slaves, and its queues may wait 30 s.
        name = jvm.unique("push")
        self.consumer = name
        jvm.call(
            "push.start", name=name, group=self.topic.lower(), topics=[self.topic],
            namesrv=site.master,
        )  # fmt: skip

    def send(self, count: int) -> None:
        for _ in range(count):
            body = f"m{len(self.sent)}"
            (result,) = self.jvm.send(self.producer, [{"topic": self.topic, "body": body}])
            assert result.get("status") == "SEND_OK", result
            self.sent.append(body)

    def all_came(self) -> None:
        def missing() -> set[str]:
            return set(self.sent) - set(bodies(self.jvm.received(self.consumer, 0)))

        wait_until(lambda: not missing(), LIMIT_S, lambda: f"did not come: {missing()}")


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_clients_work_over_tls_and_through_a_kill(
    tmp_path: pathlib.Path, make_jvm: MakeJvm, mode: str
) -> None:
    pki = Pki(tmp_path / "pki")
    folder = tmp_path / "group"
    folder.mkdir()
    with Group(folder, 3) if mode == "classic" else DLedgerGroup(folder) as group:
        site = secured(group, pki)
        shops = [
            Shop(make_jvm(f"tls-{version}", version, *verified(pki)), site)
            for version in ("5.3.3", "4.9.8")
        ]
        for shop in shops:
            shop.send(20)
            shop.all_came()
        master = site.writable()
        master.kill()
        if mode == "classic":
            master.edit_role("SLAVE")
            group[2].edit_role("SYNC_MASTER")
        for shop in shops:  # at once: a node that lives holds the sends meanwhile
            shop.send(20)
            shop.all_came()
        lives = address(site.writable(master.number))  # mqadmin asks one name server only
        for shop in shops:
            asked = ["topicRoute", "-n", lives, "-t", shop.topic]
            printed = shop.jvm.call("mqadmin", arguments=asked)
            assert f'0:"{lives}"' in printed.replace(" ", ""), printed


def test_a_client_refuses_what_it_cannot_check(tmp_path: pathlib.Path, make_jvm: MakeJvm) -> None:
    """A client with another CA or without TLS gets nothing; one in test mode checks nothing."""
    pki, other = Pki(tmp_path / "pki"), Pki(tmp_path / "other", "another CA")
    folder = tmp_path / "group"
    folder.mkdir()
    with Group(folder, 1, master_role="ASYNC_MASTER", acks=0) as group:
        site = secured(group, pki)
        message = {"topic": "Checked", "body": "x"}

        def sent(name: str, *options: str) -> str:
            jvm = make_jvm(name, "5.3.3", *options)
            (result,) = jvm.send(jvm.producer(site), [message])
            jvm.kill()
            return str(result.get("status") or result["error"])

        assert sent("right", *verified(pki)) == "SEND_OK"
        assert sent("unchecked", TLS) == "SEND_OK"
        for refused in (sent("wrong", *verified(other)), sent("plain")):
            assert "RemotingConnectException" in refused or "RemotingSend" in refused, refused
