"""What mqadmin asks about a node itself: state, replication, configuration."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import msgspec
import pytest

from hastore.config.model import (
    Config,
    Flush,
    Mode,
    NodeAddress,
    RemotingConfig,
    RetentionConfig,
    Role,
    StoreConfig,
)
from hastore.protocol.remoting import Answer, Code
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.remoting.admin import SAMPLE_MS, Admin, Rates
from tests.api_fakes import FakeBackend
from tests.server.api.kit import record
from tests.server.remoting.desk import Desk

SLAVES = [
    {"address": "10.0.0.2:9", "state": "TRANSFER", "ack_offset": 90, "lag_bytes": 10,
     "in_sync": True},
    {"address": "10.0.0.3:9", "state": "HELLO", "ack_offset": None, "lag_bytes": None,
     "in_sync": False},
    {"address": "10.0.0.4:9", "state": "NO_LINK", "ack_offset": 1, "lag_bytes": 99,
     "in_sync": False},
]  # fmt: skip


class Backend(FakeBackend):
    """A node whose status a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: dict[str, Any] = {}

    def status(self) -> dict[str, Any]:
        store = self.store
        known = {
            "min_offset": store.min_offset, "max_offset": store.max_offset,
            "flushed_offset": store.max_offset, "dispatched_offset": store.max_offset,
            "writable": self.writable, "waiting_puts": 0, "master": self.node, "slaves": SLAVES,
        }  # fmt: skip
        return {**super().status(), **known, **self.changes}


class Reads:
    """Stands for the room that answers pulls."""

    sent_records = 0


class Node:
    def __init__(self, config: Config) -> None:
        self.backend = Backend()
        self.desk = Desk(self.backend)
        self.reads: Any = Reads()
        self.desk.door.join(Admin(self.desk.door, config, self.reads).handlers())
        self.client = self.desk.client()

    def ask(self, code: int) -> bytes:
        answer = self.client.ask(code)
        assert answer.code == 0, answer.remark
        return answer.body

    def runtime(self) -> dict[str, str]:
        table: dict[str, str] = json.loads(self.ask(Code.GET_BROKER_RUNTIME_INFO))["table"]
        return table

    def replication(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask(Code.GET_BROKER_HA_STATUS))
        return found

    def settings(self) -> dict[str, str]:
        text = self.ask(Code.GET_BROKER_CONFIG).decode("ascii")
        return dict(line.split("=", 1) for line in text.splitlines())


@pytest.fixture
def config(tmp_path: pathlib.Path) -> Config:
    nodes = {
        number: NodeAddress(
            api=f"tcp://10.0.0.{number}:740{number}", ha=f"10.0.0.{number}:741{number}",
            http="127.0.0.1:0",
        )
        for number in (1, 2)
    }  # fmt: skip
    return Config(
        cluster="c", group="g", node=1, role=Role.SYNC_MASTER, nodes=nodes,
        store=StoreConfig(root=str(tmp_path)),
    )  # fmt: skip


@pytest.fixture
def node(config: Config) -> Node:
    return Node(config)


def test_the_state_is_the_nodes_own(node: Node) -> None:
    empty = node.runtime()
    assert "earliestMessageTimeStamp" not in empty and empty["commitLogMaxOffset"] == "0"
    node.backend.put_encoded([record("T", b"x" * 100)])
    node.backend.changes = {"flushed_offset": 0, "dispatched_offset": 0, "waiting_puts": 7}
    node.desk.run(90_061_000)
    found, end = node.runtime(), node.backend.store.max_offset
    assert found["commitLogMaxOffset"] == str(end) == found["dispatchBehindBytes"]
    assert found["remainHowManyDataToFlush"] == f"{end} B"
    assert int(found["earliestMessageTimeStamp"]) > 1_600_000_000_000
    assert found["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert found["waitingPuts"] == "7"
    assert 0 <= float(found["commitLogDiskRatio"]) <= 1
    assert found["brokerActive"] == "true"
    node.backend.writable = False
    assert node.runtime()["brokerActive"] == "false"


def test_mqadmin_of_both_versions_finds_what_it_needs(node: Node) -> None:
    found = node.runtime()
    assert found["getTransferedTps"] == found["getTransferredTps"]
    for key in ("putTps", "getTransferredTps"):
        assert [float(one) for one in found[key].split(" ")] == [0.0, 0.0, 0.0]
    for pool in ("send", "pull", "ack"):
        assert found[f"{pool}ThreadPoolQueueSize"] == "0"
        assert found[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] == "0"


def test_rates_are_of_ten_seconds_a_minute_and_ten(node: Node) -> None:
    node.desk.run(600_000)
    for _ in range(50):
        node.backend.put_encoded([record("T", b"x")])
    node.reads.sent_records += 20
    node.desk.run(10_000)
    found = node.runtime()
    assert [float(one) for one in found["putTps"].split()] == [5.0, 0.8333, 0.0833]
    assert [float(one) for one in found["getTransferredTps"].split()] == [2.0, 0.3333, 0.0333]
    node.desk.run(60_000)
    assert [float(one) for one in node.runtime()["putTps"].split()] == [0.0, 0.0, 0.0833]
    node.desk.run(700_000)
    assert node.runtime()["putTps"] == "0.0000 0.0000 0.0000"


def test_rates_need_a_bounded_number_of_samples() -> None:
    rates, now = Rates(0.0, (0, 0)), 0.0
    for number in range(1, 10_000):
        now = number * SAMPLE_MS
        rates.sample(now, (number, 0))
    assert len(rates._samples) < 150
    assert rates.since(now, (9_999, 0))[0] == "0.2000 0.2000 0.2000"
    assert Rates(5.0, (3, 3)).since(5.0, (3, 3)) == ("0.0000 0.0000 0.0000",) * 2


def test_a_master_says_who_copies_its_log(node: Node) -> None:
    node.backend.changes = {"max_offset": 100}
    found = node.replication()
    assert found == {
        "haConnectionInfo": [
            {"addr": "10.0.0.2:9", "diff": 10, "inSync": True, "slaveAckOffset": 90},
            {"addr": "10.0.0.3:9", "inSync": False},
        ],
        "inSyncSlaveNums": 1,
        "master": True,
        "masterCommitLogMaxOffset": 100,
    }


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1_023, "1023 B"), (1_024, "1.0 KiB"), (1_572_864, "1.5 MiB"),
     (252 << 30, "252.0 GiB"), (2**40 - 1, "1024.0 GiB"), (1 << 40, "1.0 TiB")],
)  # fmt: skip
def test_sizes_are_written_as_rocketmq_writes_them(node: Node, size: int, text: str) -> None:
    node.backend.changes = {"max_offset": size, "flushed_offset": 0}
    assert node.runtime()["remainHowManyDataToFlush"] == text


@pytest.mark.parametrize(
    ("status", "address"),
    [
        ({"master": 2}, "10.0.0.2:7412"),
        ({"master": None, "classic_master": "10.9.9.9:1"}, "10.9.9.9:1"),
        ({"master": None}, None),
        ({"master": 77}, None),
    ],
)
def test_another_node_says_whom_it_follows(
    node: Node, status: dict[str, Any], address: str | None
) -> None:
    node.backend.ha_addresses = {2: "10.0.0.2:7412"}
    node.backend.changes = {"max_offset": 100, "slaves": [], **status}
    found = node.replication()
    assert (found["master"], found["haConnectionInfo"]) == (False, [])
    followed = found["haClientRuntimeInfo"]
    assert (followed["maxOffset"], followed.get("masterAddr")) == (100, address)


def test_the_configuration_has_rocketmqs_names(config: Config) -> None:
    found = Node(config).settings()
    assert found["brokerName"] == "g" and found["brokerClusterName"] == "c"
    assert (found["brokerId"], found["inSyncReplicas"]) == ("0", "2")
    assert (found["brokerIP1"], found["listenPort"]) == ("10.0.0.1", "7401")
    assert (found["haListenPort"], found["flushDiskType"]) == ("7411", "ASYNC_FLUSH")
    assert found["mappedFileSizeConsumeQueue"] == str(300_000 * 20)
    assert found["autoCreateTopicEnable"] == "true" and "fileReservedTime" not in found
    other = msgspec.structs.replace(
        config,
        mode=Mode.DLEDGER, role=None, remoting=RemotingConfig(auto_create_topics=False),
        store=StoreConfig(
            root="/srv/a\\b ü🚀\n", flush=Flush.SYNC,
            retention=RetentionConfig(max_age_ms=5_400_000),
        ),
    )  # fmt: skip
    found = Node(other).settings()
    assert found["storePathRootDir"] == r"/srv/a\\b\u0020\u00fc\ud83d\ude80\u000a"
    assert (found["autoCreateTopicEnable"], found["fileReservedTime"]) == ("false", "1.5")
    assert (found["flushDiskType"], found["brokerRole"]) == ("SYNC_FLUSH", "SYNC_MASTER")
    assert found["enableDLegerCommitLog"] == "true" and "inSyncReplicas" not in found


def test_a_slaves_configuration_has_its_number(config: Config) -> None:
    node = Node(msgspec.structs.replace(config, node=2))
    node.backend.node, node.backend.master, node.backend.writable = 2, 1, False
    found = node.settings()
    assert (found["brokerId"], found["brokerRole"]) == ("2", "SLAVE")


def value_of(topic: str, namespace: str = "ORDER_TOPIC_CONFIG") -> dict[str, str]:
    return {"namespace": namespace, "key": topic, "value": "g:3;g@2:3"}


def test_the_order_of_a_topic_is_what_its_configuration_says(node: Node) -> None:
    waiting = node.client.send(Code.PUT_KV_CONFIG, value_of("T"))
    node.desk.run(1_000)
    assert waiting not in node.client.answers, "this node may not have the change yet"
    assert node.client.ask(Code.GET_KV_CONFIG, value_of("T")).code == Answer.QUERY_NOT_FOUND
    node.backend.put_encoded([build_change(TopicChange(TopicConfig("T", 4, 3, order=True)), 1)])
    node.desk.run(50)
    assert node.client.answers.pop(waiting).code == 0
    found = node.client.ask(Code.GET_KV_CONFIG, value_of("T"))
    assert (found.code, found.fields["value"]) == (0, "g:3")
    never = node.client.send(Code.PUT_KV_CONFIG, value_of("U"))
    node.desk.run(2_100)
    refused = node.client.answers.pop(never)
    assert refused.code == Answer.SYSTEM_ERROR and "not ordered" in str(refused.remark)
    other = node.client.ask(Code.PUT_KV_CONFIG, value_of("T", "OTHER"))
    assert other.code == Answer.REQUEST_CODE_NOT_SUPPORTED and "OTHER" in str(other.remark)
    assert node.client.ask(Code.GET_KV_CONFIG, {"key": "T"}).code == Answer.SYSTEM_ERROR


def test_the_order_of_a_topic_that_is_deleted_is_forgotten(node: Node) -> None:
    """`mqadmin deleteSubGroup -c` ended with a stack trace, and left the dead letters there."""
    forgotten = node.client.ask(Code.DELETE_KV_CONFIG, value_of("%RETRY%g"))
    assert forgotten.code == Answer.SUCCESS, "it never had one"
    node.backend.put_encoded([build_change(TopicChange(TopicConfig("T", 4, 3, order=True)), 1)])
    never = node.client.send(Code.DELETE_KV_CONFIG, value_of("T"))
    node.desk.run(2_100)
    refused = node.client.answers.pop(never)
    assert refused.code == Answer.SYSTEM_ERROR and "-o false" in str(refused.remark)
    waiting = node.client.send(Code.DELETE_KV_CONFIG, value_of("T"))
    node.desk.run(1_000)
    assert waiting not in node.client.answers, "this node may not have the deletion yet"
    node.backend.put_encoded([build_change(TopicChange(deleted="T"), 2)])
    node.desk.run(50)
    assert node.client.answers.pop(waiting).code == Answer.SUCCESS
    other = node.client.ask(Code.DELETE_KV_CONFIG, value_of("T", "OTHER"))
    assert other.code == Answer.REQUEST_CODE_NOT_SUPPORTED and "OTHER" in str(other.remark)


def test_a_disk_that_cannot_be_asked_is_said(config: Config, tmp_path: pathlib.Path) -> None:
    gone = msgspec.structs.replace(config, store=StoreConfig(root=str(tmp_path / "gone")))
    node = Node(gone)
    answer = node.client.send(Code.GET_BROKER_RUNTIME_INFO)
    node.desk._settle()
    found = node.client.answers.pop(answer)
    assert found.code == 1 and "No such file" in str(found.remark)
