"""RocketMQ's own Java clients with ACL: right and wrong secrets, and missing rights.

The clients are unmodified, of both versions; they sign by AclClientRPCHook, mqadmin by its
conf/tools.yml.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest

from hastore.security.identity import Identity
from tests.interop.acl import Identified
from tests.interop.rocketmq_clients import Clients, HastoreSite, address
from tests.interop.rocketmq_scenes import bodies, ready
from tests.process.harness import Group, wait_until

pytestmark = [pytest.mark.full, pytest.mark.slow("starts JVMs, and kills a master under them")]
LIMIT_S = 60.0
SHOP = Identity("shop", ("Shop*",), ("Shop*",), groups=("shop*",))
READER = Identity("reader", (), ("Shop*",), groups=("reader",))
MakeJvm = Callable[..., Clients]
VERSIONS = pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])


@pytest.fixture
def known(tmp_path: pathlib.Path) -> Identified:
    return Identified(tmp_path, SHOP, READER)


@pytest.fixture
def group(tmp_path: pathlib.Path, known: Identified) -> Iterator[Group]:
    folder = tmp_path / "group"
    folder.mkdir()
    with Group(folder, 2) as made:
        yield known.asked_by(made).start()


def sent(jvm: Clients, site: HastoreSite, topic: str, **identity: str) -> str:
    """Send one message; return the status, or the error with its cause."""
    (result,) = jvm.send(jvm.producer(site, **identity), [{"topic": topic, "body": "x"}])
    return str(result.get("status") or f"{result['error']} {result.get('cause')}")


@VERSIONS
@pytest.mark.parametrize("wire", ["JSON", "ROCKETMQ"])
def test_right_and_wrong_secrets_and_missing_rights(
    make_jvm: MakeJvm, known: Identified, group: Group, version: str, wire: str
) -> None:
    site = HastoreSite(group, "acl")
    jvm = make_jvm("clients", version, f"-Drocketmq.serialize.type={wire}")
    shop, reader = known.of("shop"), known.of("reader")
    assert sent(jvm, site, "Shop", **shop) == "SEND_OK"
    refused = sent(jvm, site, "Payments", **shop)
    assert "CODE: 16" in refused and "identity shop has no right to produce 'Payments'" in refused
    refused = sent(jvm, site, "Shop", **reader)
    assert "CODE: 16" in refused and "identity reader has no right to produce" in refused
    wrong = shop | {"secret_key": "0" * 64}
    assert "No route info of this topic" in sent(jvm, site, "Shop", **wrong)
    assert group[1].wait_status(lambda one: one["acl"]["forbidden"], "what was forbidden")
    noted = (group[1].store / "hastore" / "audit.log").read_text()
    assert "no right to produce" in noted and known.secrets["shop"] not in noted


@VERSIONS
def test_consumers_read_as_their_own_groups(
    make_jvm: MakeJvm, known: Identified, group: Group, version: str
) -> None:
    site = HastoreSite(group, "acl")
    jvm = make_jvm("clients", version)
    producer = jvm.producer(site, **known.of("shop"))
    ready(jvm, producer, "ShopPush")
    wanted = [f"m{one}" for one in range(20)]
    jvm.send(producer, [{"topic": "ShopPush", "body": one} for one in wanted])
    own = jvm.push(site, "reader", "ShopPush", **known.of("reader"))
    others = jvm.push(site, "shop1", "ShopPush", **known.of("reader"))
    ordered = jvm.push(site, "shop2", "ShopPush", orderly=True, **known.of("shop"))
    # Each message fails once: it is sent back, and comes again by the group's %RETRY% topic.
    again = jvm.push(site, "shop3", "ShopPush", refuse=1, delay_level=1, **known.of("shop"))
    for consumer, times in ((own, 1), (ordered, 1), (again, 2)):

        def missing(consumer: str = consumer, times: int = times) -> list[str]:
            seen = bodies(jvm.received(consumer, 0))
            return [one for one in wanted if seen.count(one) < times]

        wait_until(lambda: not missing(), LIMIT_S, lambda: f"did not come: {missing()}")
    assert jvm.received(others, 0) == []
    audit = group[1].store / "hastore" / "audit.log"
    text = "identity reader has no right to be in the group 'shop1'"
    wait_until(lambda: text in audit.read_text(), LIMIT_S, "it was not noted")


@VERSIONS
def test_forwarded_requests_and_a_kill_of_the_master(
    make_jvm: MakeJvm, known: Identified, tmp_path: pathlib.Path, version: str
) -> None:
    folder = tmp_path / "three"
    folder.mkdir()
    with Group(folder, 3) as group:
        site = HastoreSite(known.asked_by(group).start(), "acl")
        jvm = make_jvm("clients", version)
        producer = jvm.producer(site, **known.of("shop"))
        ready(jvm, producer, "ShopKill")
        messages = [{"topic": "ShopKill", "body": f"m{one}"} for one in range(20)]
        assert {each.get("status") for each in jvm.send(producer, messages)} == {"SEND_OK"}
        group[1].wait_status(lambda one: one["forwarding"]["received"], "forwarded requests")
        group[1].kill()
        group[1].edit_role("SLAVE")
        group[2].edit_role("SYNC_MASTER")
        # At once: a node that lives holds the sends meanwhile.
        assert {each.get("status") for each in jvm.send(producer, messages)} == {"SEND_OK"}
        group[2].wait_status(lambda one: one["acl"]["signed"], "signed requests")
        assert not group[2].status()["acl"]["unproved"]


@VERSIONS
def test_mqadmin_signs_by_its_tools_yml(
    make_jvm: MakeJvm, known: Identified, group: Group, version: str, tmp_path: pathlib.Path
) -> None:
    site = HastoreSite(group, "acl")
    jvm = make_jvm("clients", version)
    tools = tmp_path / "clients.home" / "conf" / "tools.yml"
    asked = ["-b", address(group[1]), "-t", "Made", "-r", "4", "-w", "4"]

    tools.write_text(known.tools("shop"))
    assert "identity shop is no admin" in jvm.mqadmin(site, "updateTopic", *asked)
    tools.write_text(known.tools("ops").replace("ops", "opz"))
    assert "no identity here has this AccessKey" in jvm.mqadmin(site, "updateTopic", *asked)
    tools.write_text(known.tools("ops"))
    assert "success" in jvm.mqadmin(site, "updateTopic", *asked)
    assert "Made" in jvm.mqadmin(site, "topicList")
    assert "g0" in jvm.mqadmin(site, "clusterList")
    assert "brokerVersionDesc" in jvm.mqadmin(site, "brokerStatus", "-b", address(group[1]))
    assert "127.0.0.1" in jvm.mqadmin(site, "topicRoute", "-t", "Made")
    assert "#Group" in jvm.mqadmin(site, "consumerProgress")
    tools.unlink()
    assert "AclClientRPCHook" in jvm.mqadmin(site, "topicList")
