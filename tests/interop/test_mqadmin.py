"""mqadmin 5.3.3 prints of a hastore pair what it prints of a RocketMQ pair: rows, columns, words.

What differs from run to run is masked: numbers that count, times, ids, addresses. Rows of write
twins (`g0@2`) are left out, and what hastore does not know is listed here. The commands run once
against each pair and against a group that elects its leader, in a JVM for each, at the same time:
most of it is waiting, such as the 10 s for which a client stops at each reset of its positions.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from hastore.protocol.remoting import Code
from tests.interop.build import CLIENTS_5, ROCKETMQ_5, command
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import (
    BROKER,
    CLUSTER,
    Clients,
    HastoreSite,
    RocketSite,
    Site,
    broker_port,
)
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, Ports, wait_until
from tests.server.remoting.test_request_codes import rows_of_the_page

pytestmark = pytest.mark.full
FILE_BYTES = 16 * 1024 * 1024
STORE = {
    "commitlog_file_size": FILE_BYTES,
    "consume_queue_units": 3000,
    "index_slots": 10_000,
    "index_entries": 40_000,
}
TOPIC, OTHER, GROUP, MAKERS = "Tool", "Other", "users", "makers"
QUEUES, EACH = 4, 5
ALL = QUEUES * EACH
LIMIT_S = 180.0  # a hang; a reset alone takes 10 s for each node
PLACES = ("rocketmq", "pair", "dledger")
TWIN = f"{BROKER}@"
TRACE = "\n\tat "  # of an exception
CHANGING = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(,\d{3})?)|(?P<id>\b[0-9A-F]{32}\b)"
    r"|(?P<at>\b\d+\.\d+\.\d+\.\d+(:\d+|@[\w-]+)?)"
)
NUMBER = re.compile(r"\d+(\.\d+)?")
# Of these mqadmin prints more for RocketMQ: see docs/rocketmq-clients.md.
OWN_STATE = {"waitingPuts", "getTransferedTps"}
SAME_SETTINGS = (
    *("brokerName", "brokerClusterName", "brokerId", "autoCreateTopicEnable"),
    *("defaultTopicQueueNums", "mappedFileSizeCommitLog", "mappedFileSizeConsumeQueue"),
    *("maxHashSlotNum", "maxIndexNum", "flushDiskType", "maxMessageSize"),
    *("autoCreateSubscriptionGroup", "enableDLegerCommitLog"),
)
Printed = dict[str, str]


class RocketPair(RocketSite):
    """A name server, a master and a slave of RocketMQ, in two JVMs."""

    nodes = 2

    def __init__(self, peers: list[Peer], ports: Ports, folder: pathlib.Path) -> None:
        super().__init__(peers[0], ports, folder / "master")
        root = folder / "slave"
        peers[1].call(
            "broker.start",
            store={
                "storePathRootDir": str(root),
                "storePathCommitLog": str(root / "commitlog"),
                "mappedFileSizeCommitLog": FILE_BYTES,
                "mappedFileSizeConsumeQueue": 20 * 3000,
                "maxHashSlotNum": 10_000,
                "maxIndexNum": 40_000,
                "brokerRole": "SLAVE",
                "haListenPort": ports.take(),
                "timerWheelEnable": True,
                "mappedFileSizeTimerLog": 1024 * 1024,
            },
            broker={
                "brokerId": 1,
                "brokerName": BROKER,
                "brokerClusterName": CLUSTER,
                "namesrvAddr": self.namesrv,
                "listenPort": broker_port(ports),
            },
        )


class World:
    """The JVMs and the groups of this module, and what mqadmin printed of each group."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._ports = Ports()
        self._threads = ThreadPoolExecutor(len(PLACES))
        self._runs = {name: self._threads.submit(self._work, name) for name in PLACES}

    def printed(self, name: str) -> Printed:
        """Return what the commands printed of a place; raise what stopped them."""
        return self._runs[name].result()

    def _work(self, name: str) -> Printed:
        folder = self._folder / name
        folder.mkdir()
        with ExitStack() as ends:
            jvm = Clients(command(CLIENTS_5), folder, f"clients-of-{name}")
            ends.callback(jvm.kill)
            return Operator(jvm, self._site(name, folder, ends)).work()

    def _site(self, name: str, folder: pathlib.Path, ends: ExitStack) -> Site:
        if name == "rocketmq":
            peers = []
            for part in ("master", "slave"):
                peers.append(Peer(command(ROCKETMQ_5), folder, part))
                ends.callback(peers[-1].kill)
            return RocketPair(peers, self._ports, folder / "stores")
        group = ends.enter_context((Group if name == "pair" else DLedgerGroup)(folder, store=STORE))
        return HastoreSite(group.start(), name)

    def close(self) -> None:
        """Wait until all has ended, and free the ports."""
        self._threads.shutdown()
        self._ports.close()


class Operator:
    """Runs each command, and keeps what it prints by a name of its own."""

    def __init__(self, jvm: Clients, site: Site) -> None:
        self._jvm, self._site = jvm, site
        self._seen: Printed = {}

    def _run(self, name: str, *arguments: str) -> str:
        printed = self._jvm.mqadmin(self._site, *arguments)
        self._seen[name] = printed
        return printed

    def _until(self, name: str, is_right: Callable[[str], bool], *arguments: str) -> None:
        """Run a command until it prints what comes after a while; keep the last."""
        wait_until(
            lambda: is_right(self._run(name, *arguments)),
            LIMIT_S,
            lambda: f"{name}: {self._seen[name]}",
        )

    def work(self) -> Printed:
        """Run all commands."""
        jvm, site, run = self._jvm, self._site, self._run
        master = site.master
        run("updateTopic", "updateTopic", "-b", master, "-t", TOPIC, "-r", "4", "-w", "4")
        cluster = ("-c", CLUSTER, "-t", OTHER, "-r", "2", "-w", "3", "-p", "6")
        run("updateTopic in the cluster", "updateTopic", *cluster)
        run("updateTopic -o", "updateTopic", "-c", CLUSTER, "-t", "Ordered", "-o", "true")
        producer = jvm.producer(site, group=MAKERS)
        sent = [one for queue in range(QUEUES) for one in self._send(producer, queue)]
        consumer = jvm.push(site, GROUP, TOPIC)
        jvm.received(consumer, ALL)
        # A name server learns of a node after a while.
        self._until("clusterList", lambda text: len(rows(text)) == site.nodes, "clusterList")
        run("clusterList -m", "clusterList", "-m")
        run("brokerStatus", "brokerStatus", "-b", master)
        run("brokerStatus of the cluster", "brokerStatus", "-c", CLUSTER)
        run("topicList", "topicList")
        run("topicRoute", "topicRoute", "-t", TOPIC)
        run("topicRoute -l", "topicRoute", "-t", TOPIC, "-l")
        run("topicStatus", "topicStatus", "-t", TOPIC)
        run("updateSubGroup", "updateSubGroup", "-b", master, "-g", "new", "-r", "3")
        self._groups()
        self._messages(sent[2])
        self._until(
            "haStatus", lambda text: f"#InSyncSlaveNum\t{site.nodes - 1}" in text,
            "haStatus", "-b", master,
        )  # fmt: skip
        run("getBrokerConfig", "getBrokerConfig", "-b", master)
        self._resets(consumer)
        jvm.call("producer.stop", name=producer)
        run("deleteTopic", "deleteTopic", "-c", CLUSTER, "-t", OTHER)
        # mqadmin asks any name server; a node that is not the master reads of it a moment later.
        self._until("deleted", gone, "topicRoute", "-t", OTHER)
        run("getNamesrvConfig", "getNamesrvConfig")
        run("cleanExpiredCQ", "cleanExpiredCQ", "-b", master)
        return self._seen

    def _send(self, producer: str, queue: int) -> list[dict[str, Any]]:
        message = {"topic": TOPIC, "keys": "k1 k2", "tags": "red"}
        messages = [{**message, "body": f"{queue}.{number}"} for number in range(EACH)]
        sent = self._jvm.send(producer, messages, "queue", topic=TOPIC, broker=BROKER, queue=queue)
        assert {one["status"] for one in sent} == {"SEND_OK"}, sent
        return sent

    def _groups(self) -> None:
        asked = ("consumerProgress", "-g", GROUP)
        self._until(
            "consumerProgress",
            lambda text: len(rows(text)) == QUEUES + 1  # and one of the retries
            and sum(int(row[4]) for row in rows(text)) == ALL, *asked,
        )  # fmt: skip
        self._run("consumerProgress of a topic", *asked, "-t", TOPIC)
        self._run("consumerProgress with addresses", *asked, "-s", "true")
        self._run("consumerProgress of all", "consumerProgress")
        self._run("consumerConnection", "consumerConnection", "-g", GROUP)
        makers = ("-g", MAKERS, "-t", TOPIC)
        self._run("producerConnection", "producerConnection", *makers)

    def _messages(self, one: dict[str, Any]) -> None:
        run = self._run
        to = ("-b", BROKER, "-i", "2")
        run("sendMessage", "sendMessage", "-t", TOPIC, "-p", "by hand", *to)
        self._until(
            "queryMsgByKey", lambda text: len(ids(text)) >= ALL,
            "queryMsgByKey", "-t", TOPIC, "-k", "k1",
        )  # fmt: skip
        run("queryMsgById", "queryMsgById", "-t", TOPIC, "-i", one["offsetMsgId"])
        run("queryMsgByUniqueKey", "queryMsgByUniqueKey", "-t", TOPIC, "-i", one["msgId"])
        at = ("-b", BROKER, "-i", "0", "-o")
        run("queryMsgByOffset", "queryMsgByOffset", "-t", TOPIC, *at, "2")
        run("queryMsgByOffset of nothing", "queryMsgByOffset", "-t", TOPIC, *at, "2000")
        run("printMsg", "printMsg", "-t", TOPIC)
        # mqadmin leaves the body there
        pathlib.Path("/tmp/rocketmq/msgbodys", one["msgId"]).unlink(missing_ok=True)

    def _resets(self, consumer: str) -> None:
        asked = ("resetOffsetByTime", "-g", GROUP, "-t", TOPIC, "-f", "true", "-s")
        before = len(self._jvm.received(consumer, 0))
        self._run("resetOffsetByTime online", *asked, "0")
        self._jvm.received(consumer, before + ALL)
        self._jvm.call("push.stop", name=consumer)
        self._run("resetOffsetByTime offline", *asked, "0")
        self._run("progress after it", "consumerProgress", "-g", GROUP, "-t", TOPIC)
        self._run("resetOffsetByTime now", *asked, "now")
        self._run("progress after that", "consumerProgress", "-g", GROUP, "-t", TOPIC)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("mqadmin"))
    yield made
    made.close()


# ---- what is compared


def masked(text: str) -> str:
    """Return a text without what differs from run to run."""
    return CHANGING.sub(lambda found: str(found.lastgroup), text)


def lines(printed: str) -> list[str]:
    """Return the lines, with single spaces, without those of twins and of failures' places."""
    found = [" ".join(masked(line).split()) for line in printed.splitlines()]
    return [line for line in found if line and TWIN not in line and not line.startswith("at ")]


def counted(printed: str) -> list[str]:
    """Return the lines with N for each number."""
    return [NUMBER.sub("N", line) for line in lines(printed)]


def rows(printed: str) -> list[list[str]]:
    """Return the cells of the rows that name the group's broker."""
    found = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    return [cells for cells in found if BROKER in cells]


def ids(printed: str) -> list[str]:
    """Return the ids of messages."""
    return re.findall(r"^[0-9A-F]{32}", printed, re.M)


def in_order(printed: str) -> list[str]:
    """Return the lines in a fixed order: Java prints maps in any."""
    return sorted(lines(printed))


def clusters(printed: str) -> list[str]:
    """Return the rows of clusterList; a slave has another number, a hastore node its version."""
    found = [re.sub(r"V5_3_3|hastore-[\d.]+", "VERSION", line) for line in lines(printed)]
    return [NUMBER.sub("N", line) for line in found]


def route(printed: str) -> Any:
    """Return the master and the number of nodes of a route, and its queues."""
    text = re.sub(r"([{,])\s*(\d+):", r'\1"\2":', printed)
    found = json.loads(text[text.index("{") :])
    brokers = [one for one in found["brokerDatas"] if TWIN not in one["brokerName"]]
    queues = [one for one in found["queueDatas"] if TWIN not in one["brokerName"]]
    for one in brokers:
        one["brokerAddrs"] = "0" in one["brokerAddrs"], len(one["brokerAddrs"]) > 1
    return brokers, queues, sorted(set(found) - {"brokerDatas", "queueDatas"})


def short_route(printed: str) -> list[str]:
    """Return a route's rows without the nodes' addresses and the sum, which has the twins, too."""
    found = [re.sub(r"\{.*\}", "{}", line) for line in lines(printed)]
    return [line for line in found if not line.startswith("Total:")]


def known_topics(printed: str) -> list[str]:
    """Return those topics that the operator made."""
    wanted = {TOPIC, OTHER, f"%RETRY%{GROUP}"}
    return sorted(wanted & set(printed.split()))


def group_row(printed: str) -> list[str]:
    """Return the header and the row of the group."""
    return [line for line in counted(printed) if line.startswith(("#", GROUP))]


def message(printed: str) -> list[str]:
    """Return what is said of a message, and by whom it was consumed."""
    found = [
        re.sub(r"^CommitLog Offset: \d+", "CommitLog Offset: N", one) for one in lines(printed)
    ]
    track = [
        one.group()
        for one in re.finditer(rf"MessageTrack \[consumerGroup={GROUP},[^\]]*\]", printed)
    ]
    return [one for one in found if ":" in one and "MessageTrack" not in one and "See " not in one
            and "exceptionDesc" not in one] + track  # fmt: skip


def messages(printed: str) -> list[str]:
    """Return the queues and positions of messages that were printed."""
    found = re.findall(r"^minOffset=.*$|queueId=\d+, storeSize=\d+, queueOffset=\d+", printed, re.M)
    return [str(one) for one in found]


def created(printed: str) -> list[str]:
    """Return what a change says, once: with twins, it is made at each node."""
    return sorted(set(lines(printed)))


def replicas(printed: str) -> list[str]:
    """Return what is said of replication."""
    return counted(printed)


def gone(printed: str) -> bool:
    """Whether the topic has no route."""
    return "CODE: 17 " in printed


SAME: dict[str, Callable[[str], Any]] = {
    "updateTopic": created,
    "updateTopic in the cluster": created,
    "updateTopic -o": lambda text: [
        re.sub(rf";{BROKER}@\d+:\d+|{BROKER}@\d+:\d+;", "", line)
        for line in text.splitlines()
        if line.startswith(("set", "TopicConfig"))
    ],
    "clusterList": clusters,
    "clusterList -m": counted,
    "topicList": known_topics,
    "topicRoute": route,
    "topicRoute -l": short_route,
    "topicStatus": lines,
    "updateSubGroup": created,
    "consumerProgress": lambda text: [
        line for line in lines(text) if not line.startswith("Consume TPS")
    ],
    "consumerProgress of a topic": lambda text: counted(text)[:6],
    "consumerProgress with addresses": lambda text: counted(text)[:6],
    "consumerProgress of all": group_row,
    "consumerConnection": counted,
    "producerConnection": counted,
    "sendMessage": lines,
    "queryMsgByKey": in_order,
    "queryMsgById": message,
    "queryMsgByUniqueKey": message,
    "queryMsgByOffset": message,
    "queryMsgByOffset of nothing": lines,
    "printMsg": messages,
    "haStatus": replicas,
    "resetOffsetByTime online": in_order,
    "resetOffsetByTime offline": in_order,
    "progress after it": lambda text: [row[:6] for row in rows(text)],
    "resetOffsetByTime now": lambda text: sorted(rows(text)),
    "progress after that": lambda text: [row[:6] for row in rows(text)],
    "deleteTopic": created,
    "deleted": gone,
}


@pytest.mark.slow("each reset of positions stops a client for 10 s")
@pytest.mark.parametrize("name", SAME)
def test_each_command_prints_the_same_as_of_rocketmq(world: World, name: str) -> None:
    expected, found = world.printed("rocketmq")[name], world.printed("pair")[name]
    assert (TRACE in found) == (TRACE in expected), found
    assert SAME[name](found) == SAME[name](expected), f"{found}\n---- RocketMQ:\n{expected}"


def table(printed: str) -> dict[str, str]:
    """Return the lines "key : value", or "key = value"."""
    found = (re.match(r"(\S+)\s*[:=]\s(.*)", line) for line in printed.splitlines())
    return {one[1]: one[2].strip() for one in found if one is not None}


def test_the_state_has_rocketmqs_names(world: World) -> None:
    expected, found = (table(world.printed(one)["brokerStatus"]) for one in ("rocketmq", "pair"))
    assert set(found) - set(expected) == OWN_STATE
    for one in (found, expected):
        assert re.fullmatch(r"[\d.]+ (Ki|Mi)?B", one["remainHowManyDataToFlush"])
    for key in ("commitLogDirCapacity", "runtime", "brokerActive"):
        assert NUMBER.sub("N", found[key]) == NUMBER.sub("N", expected[key])
    assert abs(float(found["commitLogDiskRatio"]) - float(expected["commitLogDiskRatio"])) < 0.1
    assert found["brokerVersion"] == expected["brokerVersion"]
    age_ms = time.time() * 1000 - int(found["earliestMessageTimeStamp"])
    assert 0 < age_ms < 3_600_000
    whole = world.printed("pair")["brokerStatus of the cluster"]
    assert whole.count("bootTimestamp") == 2, "each node"


def test_the_configuration_has_rocketmqs_names_and_values(world: World) -> None:
    expected, found = (table(world.printed(one)["getBrokerConfig"]) for one in ("rocketmq", "pair"))
    assert set(found) <= set(expected)
    assert [found[key] for key in SAME_SETTINGS] == [expected[key] for key in SAME_SETTINGS]


@pytest.mark.parametrize(("name", "code"), [("getNamesrvConfig", 319), ("cleanExpiredCQ", 306)])
def test_other_commands_say_that_they_are_not_supported(world: World, name: str, code: int) -> None:
    text = f"CODE: 3  DESC: hastore does not support request code {code}"
    assert text in world.printed("pair")[name]


def test_a_group_that_elects_its_leader_says_the_same(world: World) -> None:
    pair, elected = world.printed("pair"), world.printed("dledger")
    several = {"haStatus", "clusterList", "clusterList -m"}  # it has two followers
    different = [
        name
        for name in SAME.keys() - several
        if SAME[name](pair[name]) != SAME[name](elected[name])
        or (TRACE in pair[name]) != (TRACE in elected[name])
    ]
    assert not different, [(name, pair[name], elected[name]) for name in different]
    assert len(clusters(elected["clusterList"])) == len(clusters(pair["clusterList"])) + 1
    assert counted(elected["haStatus"])[3] == "#InSyncSlaveNum N"
    assert "OK" in elected["haStatus"]
    assert table(elected["getBrokerConfig"])["enableDLegerCommitLog"] == "true"


def test_the_page_has_each_request_code_of_rocketmq() -> None:
    path = command(CLIENTS_5)[0]
    name = "org.apache.rocketmq.remoting.protocol.RequestCode"
    done = subprocess.run(
        ["javap", "-cp", path, "-constants", name], capture_output=True, text=True, check=True
    )
    found = {int(code): key for key, code in re.findall(r"int (\w+) = (\d+);", done.stdout)}
    assert {row.code: row.name for row in rows_of_the_page()} == found
    assert {code.value: code.name for code in Code}.items() <= found.items()
