"""Who is in a group, at a node that has not known it for long: it asks the other nodes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hastore.protocol.remoting import Answer, Code, Frame
from hastore.server.remoting import members_elsewhere
from hastore.server.remoting.door import RemotingRequest
from hastore.server.remoting.group_requests import GroupRequests
from hastore.server.remoting.members_elsewhere import SILENT_MS, TICK_MS, WAIT_MS, YOUNG_MS
from tests.api_fakes import FakeBackend
from tests.server.remoting.desk import Desk, VirtualClient
from tests.server.remoting.test_groups import java

LIST = Code.GET_CONSUMER_LIST_BY_GROUP
Then = Callable[[Frame | None], None]


class OtherNodes:
    """The links to nodes 2 and 3: what is asked there waits until the test answers it."""

    def __init__(self) -> None:
        self.is_master = False
        self.reachable = {2, 3}
        self.asked: list[tuple[int | None, str, Then]] = []

    def takes(self, request: RemotingRequest) -> bool:
        return False

    def again(self, request: RemotingRequest, reason: str) -> bool:
        return False

    def ask(self, frame: Frame, then: Then, node: int | None = None) -> bool:
        if node not in self.reachable:
            return False
        assert frame.code == LIST
        self.asked.append((node, frame.fields["consumerGroup"], then))
        return True

    def say(self, node: int, *ids: str) -> None:
        """Let a node answer all that it was asked; without ids it knows nobody."""
        asked, self.asked = self.asked, [one for one in self.asked if one[0] != node]
        body = json.dumps({"consumerIdList": ids}).encode() if ids else b""
        code = Answer.SUCCESS if ids else Answer.SYSTEM_ERROR
        for number, _, then in asked:
            if number == node:
                then(Frame(code, 0, 1, {}, body))

    def end(self, node: int) -> None:
        """Let the link to a node end."""
        asked, self.asked = self.asked, [one for one in self.asked if one[0] != node]
        for number, _, then in asked:
            if number == node:
                then(None)


@pytest.fixture
def nodes() -> OtherNodes:
    return OtherNodes()


@pytest.fixture
def desk(nodes: OtherNodes) -> Desk:
    backend = FakeBackend(1, writable=False)
    backend.nodes = {number: f"tcp://127.0.0.1:{number}" for number in (1, 2, 3)}
    made = Desk(backend)
    made.door.join(GroupRequests(made.door).handlers())
    made.door.forwarding = nodes
    return made


def joined(desk: Desk, name: str, client: VirtualClient | None = None) -> VirtualClient:
    client = client or desk.client()
    assert client.ask(Code.HEART_BEAT, {}, java(name, ("G",))).code == 0
    return client


def ask(desk: Desk, client: VirtualClient) -> int:
    opaque = client.send(LIST, {"consumerGroup": "G"})
    desk.run()
    return opaque


def ids(client: VirtualClient, opaque: int) -> list[str]:
    answer = client.answers.pop(opaque)
    assert answer.code == 0, answer.remark
    return list(json.loads(answer.body)["consumerIdList"])


def test_a_restarted_node_answers_with_the_members_of_all_nodes(
    desk: Desk, nodes: OtherNodes
) -> None:
    """The first consumer that connects again is not alone: it must not take all queues."""
    first = joined(desk, "c1")
    opaque = ask(desk, first)
    assert not first.answers, "it is not known yet who else is there"
    nodes.say(2, "c1", "c2")
    desk.run()
    assert not first.answers, "node 3 may know more"
    nodes.say(3, "c1", "c3")
    desk.run()
    assert ids(first, opaque) == ["c1", "c2", "c3"]


def test_it_asks_only_while_it_does_not_know_the_group_for_long(
    desk: Desk, nodes: OtherNodes
) -> None:
    one = joined(desk, "c1")
    desk.run(YOUNG_MS - 1)
    opaque = ask(desk, one)
    assert len(nodes.asked) == 2
    nodes.say(2, "c1")
    nodes.say(3)
    desk.run(1)
    assert ids(one, opaque) == ["c1"]
    joined(desk, "c1", one)
    assert ids(one, ask(desk, one)) == ["c1"] and not nodes.asked
    one.close()
    desk.run()
    again = joined(desk, "c1")  # as after a partition: others may not have come yet
    opaque = ask(desk, again)
    assert len(nodes.asked) == 2
    nodes.say(2, "c1", "c2")
    nodes.say(3, "c1", "c2")
    desk.run()
    assert ids(again, opaque) == ["c1", "c2"]


def test_a_node_that_knows_nobody_answers_what_the_others_know(
    desk: Desk, nodes: OtherNodes
) -> None:
    client = desk.client()
    opaque = ask(desk, client)
    nodes.say(2, "c1")
    nodes.say(3)
    desk.run()
    assert ids(client, opaque) == ["c1"]
    opaque = ask(desk, client)
    nodes.say(2)
    nodes.say(3)
    desk.run()
    assert client.answers.pop(opaque).remark == "no consumer for this group, G"


def test_many_questions_become_one(desk: Desk, nodes: OtherNodes) -> None:
    clients = [joined(desk, f"c{number}") for number in range(64)]
    opaques = [ask(desk, client) for client in clients]
    assert len(nodes.asked) == 2
    nodes.say(2, "c0")
    nodes.say(3, "c0", "x")
    desk.run()
    expected = sorted(["x", *(f"c{number}" for number in range(64))])
    for client, opaque in zip(clients, opaques, strict=True):
        assert ids(client, opaque) == expected


def test_a_link_that_opens_late_is_waited_for(desk: Desk, nodes: OtherNodes) -> None:
    nodes.reachable = {2}
    one = joined(desk, "c1")
    opaque = ask(desk, one)
    nodes.say(2, "c1")
    desk.run(WAIT_MS / 2)
    assert not one.answers
    nodes.reachable = {2, 3}
    desk.run(TICK_MS)
    nodes.say(3, "c2")
    desk.run()
    assert ids(one, opaque) == ["c1", "c2"]


@pytest.mark.parametrize("how", ["unreachable", "silent", "closed"])
def test_without_any_other_node_a_slave_says_that_it_does_not_know(
    desk: Desk, nodes: OtherNodes, how: str
) -> None:
    """The consumer keeps what it has. A master answers, since nobody else can."""
    if how == "unreachable":
        nodes.reachable = set()
    one = joined(desk, "c1")
    opaque = ask(desk, one)
    if how == "closed":
        nodes.end(2)
        nodes.end(3)
        desk.run()
    else:
        desk.run(WAIT_MS)
    answer = one.answers.pop(opaque)
    assert answer.code == Answer.SYSTEM_ERROR and "no other node" in str(answer.remark)
    nodes.is_master = True
    opaque = ask(desk, one)
    desk.run(WAIT_MS if how == "silent" else 0)
    if how == "closed":
        nodes.end(2)
        nodes.end(3)
        desk.run()
    assert ids(one, opaque) == ["c1"]


def test_a_silent_node_is_waited_for_once_in_a_while(desk: Desk, nodes: OtherNodes) -> None:
    nodes.reachable = {2}
    one = joined(desk, "c1")
    opaque = ask(desk, one)
    nodes.say(2, "c2")
    desk.run(WAIT_MS)
    assert ids(one, opaque) == ["c1", "c2"]
    opaque = ask(desk, one)
    nodes.say(2, "c2")
    desk.run()
    assert ids(one, opaque) == ["c1", "c2"], "node 3 is not waited for again"
    desk.run(SILENT_MS)
    nodes.reachable = {2, 3}
    opaque = ask(desk, one)
    nodes.say(2, "c2")
    nodes.say(3, "c3")
    desk.run()
    assert ids(one, opaque) == ["c1", "c2", "c3"]


def test_who_waits_is_bounded_and_a_late_answer_harms_nobody(
    desk: Desk, nodes: OtherNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_elsewhere, "WAITING_MAX", 3)
    client = desk.client()
    opaques = [ask(desk, client) for _ in range(5)]
    refused = [client.answers.pop(opaque) for opaque in opaques[3:]]
    assert {answer.code for answer in refused} == {Answer.SYSTEM_BUSY}
    late = list(nodes.asked)
    desk.run(WAIT_MS)
    assert {client.answers.pop(opaque).code for opaque in opaques[:3]} == {Answer.SYSTEM_ERROR}
    assert not client.answers
    for _, _, then in late:
        then(Frame(0, 0, 1, {}, b'{"consumerIdList":["c9"]}'))
    desk.run()
    assert not client.answers


def test_an_answer_that_is_no_list_is_as_good_as_none(
    desk: Desk, nodes: OtherNodes, caplog: pytest.LogCaptureFixture
) -> None:
    one = joined(desk, "c1")
    opaque = ask(desk, one)
    (_, _, then), *_ = [asked for asked in nodes.asked if asked[0] == 2]
    then(Frame(0, 0, 1, {}, b"{"))
    assert "node 2 answers what is no list" in caplog.text
    nodes.say(3, "c3")
    desk.run()
    assert ids(one, opaque) == ["c1", "c3"]


def test_a_question_of_another_node_is_answered_with_what_this_one_knows(
    desk: Desk, nodes: OtherNodes
) -> None:
    joined(desk, "c1")
    said: list[Frame | None] = []
    frame = Frame(LIST, 0, fields={"consumerGroup": "G"})
    request = RemotingRequest(
        frame, desk.clock.now_ms, None, ("127.0.0.1", 0), lambda _, answer: said.append(answer)
    )
    desk.door.handle(request)
    desk.run()
    assert not nodes.asked
    assert said[0] is not None and json.loads(said[0].body) == {"consumerIdList": ["c1"]}
