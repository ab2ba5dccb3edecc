"""mqadmin sets, shows and deletes the settings of consumer groups, and consumers follow them."""

import json

import pytest

from hastore.protocol.remoting import Answer, Code
from tests.interop.build import CLIENTS_5, command
from tests.interop.rocketmq_clients import CLUSTER, Clients, HastoreSite
from tests.interop.rocketmq_scenes import on, ready
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full


@pytest.fixture(params=["pair", "dledger"])
def site(request, tmp_path):
    folder = tmp_path / "hastore"
    folder.mkdir()
    group = (Group if request.param == "pair" else DLedgerGroup)(folder)
    yield HastoreSite(group.start(), request.param)
    group.close()


@pytest.fixture
def jvm(tmp_path):
    made = Clients(command(CLIENTS_5), tmp_path, "clients")
    yield made
    made.kill()


def settings_at(node):
    client = RemotingClient(node.api)
    try:
        answer = client.ask(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g"})
        return json.loads(answer.body) if answer.code == Answer.SUCCESS else {"consumeEnable": None}
    finally:
        client.close()


@pytest.mark.slow("a consumer that may not consume asks again after 3 s")
def test_settings_of_a_group(jvm, site):
    def run(name, *arguments):
        printed = jvm.mqadmin(site, name, *arguments)
        assert "\n\tat " not in printed, printed
        return printed

    said = run("updateSubGroup", "-b", site.master, "-g", "g", "-r", "3", "-q", "2", "-s", "false")
    assert "success" in said
    shown = run("getConsumerConfig", "-g", "g")
    assert "retryMaxTimes" in shown and "3" in shown.split("retryMaxTimes", 1)[1].split("\n")[0]
    producer = jvm.producer(site)
    ready(jvm, producer, "T")
    for node in site.group:
        wait_until(
            lambda node=node: settings_at(node)["consumeEnable"] is False,
            60, f"node {node.number} does not know the settings",
        )  # fmt: skip
    consumer = jvm.push(site, "g", "T")
    jvm.send(producer, [{"topic": "T", "body": "x"}], "queue", **on(("g0", 0), "T"))
    assert jvm.call("push.wait", name=consumer, count=1, limit_s=4, timeout_s=60) == []
    run("updateSubGroup", "-b", site.master, "-g", "g", "-r", "3", "-s", "true")
    assert {one["body"] for one in jvm.received(consumer, 2)} == {"first", "x"}
    jvm.call("push.stop", name=consumer)
    run("deleteTopic", "-c", CLUSTER, "-t", "%RETRY%g")
    shown = run("getConsumerConfig", "-g", "g")
    assert "3" in shown.split("retryMaxTimes", 1)[1].split("\n")[0], "they are not the topic's"
    run("deleteSubGroup", "-c", CLUSTER, "-g", "g")
    shown = run("getConsumerConfig", "-g", "g")
    # Nothing is shown where the node knows the group no more: it has no member, and no position.
    told = shown.partition("retryMaxTimes")[2].split("\n")[0]
    assert not told or "16" in told
    jvm.call("producer.stop", name=producer)
