"""A node that comes back, and RocketMQ's consumers that connect to it again one after the other.

The consumers are bare frames. The first one that is back asks the node for the members of its
group, and for its positions: as Java's clients do at once, while the others have not come yet.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator

import pytest

from hastore.protocol.remoting import Code
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, Node, wait_until
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.test_groups import java

pytestmark = pytest.mark.full
LIMIT_S = 120.0
PAIR, TRIO = 2, 3


class Consumer:
    """A member of the group G, with a connection to each node."""

    def __init__(self, group: Group | DLedgerGroup, name: str) -> None:
        self.name = name
        self._at: dict[int, RemotingClient] = {}
        for node in group:
            self.connect(node)

    def connect(self, node: Node) -> None:
        """Connect to a node, and say which group this is in."""
        self.close(node.number)
        client = self._at[node.number] = RemotingClient(node.api)
        assert client.ask(Code.HEART_BEAT, {}, java(self.name)).code == 0

    def members(self, node: Node) -> list[str] | str:
        """Ask a node who is in the group; return the text if it does not say that."""
        answer = self._at[node.number].ask(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
        if answer.code:
            return str(answer.remark)
        return list(json.loads(answer.body)["consumerIdList"])

    def commit(self, node: Node, offset: int) -> None:
        fields = {"consumerGroup": "G", "topic": "T", "queueId": "0", "commitOffset": f"{offset}"}
        answer = self._at[node.number].ask(Code.UPDATE_CONSUMER_OFFSET, fields)
        assert answer.code == 0, answer.remark

    def position(self, node: Node) -> int:
        fields = {"consumerGroup": "G", "topic": "T", "queueId": "0"}
        answer = self._at[node.number].ask(Code.QUERY_CONSUMER_OFFSET, fields)
        assert answer.code == 0, answer.remark
        return int(answer.fields["offset"])

    def close(self, *numbers: int) -> None:
        for number in numbers or list(self._at):
            client = self._at.pop(number, None)
            if client is not None:
                client.close()


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def check_return(back: Node, master: Node, first: Consumer, *others: Consumer) -> None:
    """The first consumer that is back at a node hears of all, and where the group is."""
    first.connect(back)
    expected = sorted([first.name, *(one.name for one in others)])
    assert first.members(back) == expected, "it would take all queues"
    if back is not master:
        others[0].commit(master, 200)
    assert first.position(back) == (100 if back is master else 200), "a node that has lagged"
    for one in others:
        one.connect(back)
    assert others[0].members(back) == expected


@pytest.mark.parametrize("how", ["slave", "master in place", "master as slave"])
def test_who_is_in_a_group_when_a_node_is_back(
    tmp_path: pathlib.Path, ends: contextlib.ExitStack, how: str
) -> None:
    group = ends.enter_context(Group(tmp_path, TRIO if how == "master as slave" else PAIR))
    group.start()
    consumers = [Consumer(group, f"c{number}") for number in range(3)]
    for one in consumers:
        ends.callback(one.close)
    consumers[0].commit(group[1], 100)
    back, master = group[1], group[1]
    if how == "slave":
        back = group[2]
    back.kill()
    if how == "master as slave":
        master = group[2]
        back.edit_role("SLAVE")
        master.edit_role("SYNC_MASTER")
        master.wait_writable()
    back.start()
    back.wait_ready()
    master.wait_in_sync(*(node.number for node in group if node is not master))
    check_return(back, master, *consumers)


def test_who_is_in_a_group_when_a_member_of_mode_dledger_is_back(
    tmp_path: pathlib.Path, ends: contextlib.ExitStack
) -> None:
    group = ends.enter_context(DLedgerGroup(tmp_path, TRIO))
    group.start()
    consumers = [Consumer(group, f"c{number}") for number in range(3)]
    for one in consumers:
        ends.callback(one.close)

    def leader(besides: Node | None = None) -> Node | None:
        for node in group:
            status = node.status() if node.running and node is not besides else None
            if status is not None and status["writable"]:
                return node
        return None

    back = wait_until(leader, LIMIT_S, "no leader")
    consumers[0].commit(back, 100)
    back.kill()
    master = wait_until(lambda: leader(back), LIMIT_S, "no new leader")
    back.start()
    back.wait_ready()
    wait_until(
        lambda: (status := back.status()) is not None and status["leader"] == master.number,
        LIMIT_S, "it follows nobody",
    )  # fmt: skip
    check_return(back, master, *consumers)
