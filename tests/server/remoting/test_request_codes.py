"""The table of request codes in docs/rocketmq-clients.md is what the node does."""

from __future__ import annotations

import pathlib
import re
from typing import Any, NamedTuple

import pytest

from hastore.config.model import Config, NodeAddress, Role, StoreConfig
from hastore.protocol.remoting import Answer, Code
from hastore.server.remoting.forwarding import FORWARDED, ForwardCounts, Network
from hastore.server.remoting.rooms import make_door
from hastore.server.remoting.subscriptions import GROUP_NOT_EXIST
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.server.remoting.desk import Desk

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "rocketmq-clients.md"
ROW = re.compile(r"^\| (\d+) \| ([A-Z0-9_]+) \| (served|forwarded|sent|not supported)(: .+)? \|$")
# The node asks clients this: nothing of it is answered.
SENT = {
    Code.CHECK_TRANSACTION_STATE,
    Code.NOTIFY_CONSUMER_IDS_CHANGED,
    Code.RESET_CONSUMER_CLIENT_OFFSET,
    Code.GET_CONSUMER_STATUS_FROM_CLIENT,
}


class Row(NamedTuple):
    code: int
    name: str
    answer: str
    why: str


def rows_of_the_page() -> list[Row]:
    """Return the rows of the table."""
    text = PAGE.read_text().split("\n## Request codes\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[0] == "| code | name | answer |"
    found = []
    for line in lines[1:]:
        row = ROW.match(line)
        assert row is not None, line
        found.append(Row(int(row[1]), row[2], row[3], (row[4] or "")[2:]))
    return found


class WholeDesk(Desk):
    """A door with all handlers that a node has."""

    def __init__(self, root: pathlib.Path) -> None:
        super().__init__(FakeBackend())
        nothing: Any = None
        port: Any = type("Port", (), {"handler": None})()
        address = NodeAddress(api="tcp://127.0.0.1:1", ha="127.0.0.1:1", http="127.0.0.1:1")
        config = Config(
            cluster="c", group="g", node=1, role=Role.ASYNC_MASTER, nodes={1: address},
            store=StoreConfig(root=str(root)),
        )  # fmt: skip
        network = Network(port, nothing, lambda *_: None, raise_failure, ForwardCounts())
        self.door = make_door(config, network, self.door.parts)


@pytest.fixture
def desk(tmp_path: pathlib.Path) -> WholeDesk:
    return WholeDesk(tmp_path)


def by_answer(answer: str) -> set[int]:
    return {row.code for row in rows_of_the_page() if row.answer == answer}


def test_the_rows_are_in_order_and_say_why() -> None:
    rows = rows_of_the_page()
    codes = [row.code for row in rows]
    assert codes == sorted(set(codes)) and len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.why or row.answer in ("served", "forwarded"), row
    assert {code.value: code.name for code in Code}.items() <= {
        row.code: row.name for row in rows
    }.items()


def test_what_is_served_and_forwarded_is_what_has_a_handler(desk: WholeDesk) -> None:
    joined = set(desk.door.codes)
    assert by_answer("served") | by_answer("forwarded") == joined
    assert by_answer("forwarded") == joined & FORWARDED
    assert by_answer("sent") == SENT


def test_what_is_not_supported_is_answered_3(desk: WholeDesk) -> None:
    client = desk.client()
    for code in sorted(by_answer("not supported") | by_answer("sent")):
        answer = client.ask(code, {"topic": "T", "consumerGroup": "G"})
        assert answer.code == Answer.REQUEST_CODE_NOT_SUPPORTED
        assert str(code) in str(answer.remark)


def test_a_consumer_that_lets_the_broker_share_out_queues_is_told_what_to_set(
    desk: WholeDesk,
) -> None:
    """It has no queue without an answer, and its own log is the only one that tells why."""
    answer = desk.client().ask(Code.QUERY_ASSIGNMENT, {}, b'{"topic":"T","consumerGroup":"G"}')
    assert answer.code == Answer.REQUEST_CODE_NOT_SUPPORTED
    assert "code 400; consumers share out" in str(answer.remark)
    assert str(answer.remark).endswith("setClientRebalance(true)")


def test_a_group_that_is_online_has_settings(desk: WholeDesk) -> None:
    """As after RocketMQ's first heartbeat: mqadmin and dashboards ask for them."""
    client, asked = desk.client(), {"group": "online"}
    assert client.ask(Code.GET_SUBSCRIPTIONGROUP_CONFIG, asked).code == GROUP_NOT_EXIST
    beat = b'{"clientID":"c","consumerDataSet":[{"groupName":"online"}]}'
    assert client.ask(Code.HEART_BEAT, {}, beat).code == Answer.SUCCESS
    assert client.ask(Code.GET_SUBSCRIPTIONGROUP_CONFIG, asked).code == Answer.SUCCESS
