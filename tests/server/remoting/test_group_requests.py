"""Requests about groups: members, what they are told, and questions that are passed on to them."""

from __future__ import annotations

import json

import pytest

from hastore.protocol.remoting import Answer, Code
from hastore.server.remoting import group_requests, groups
from hastore.server.remoting.group_requests import (
    ASK_MS,
    GAP_MS,
    GAP_OF_ONE_MS,
    STATUS_BYTES,
    STATUS_MS,
    GroupRequests,
)
from hastore.server.remoting.groups import EXPIRED_MS
from tests.api_fakes import FakeBackend
from tests.server.api.kit import record, until
from tests.server.remoting.desk import Desk, VirtualClient
from tests.server.remoting.kit import RemotingClient, served
from tests.server.remoting.test_groups import java, subscribed

NOTIFIED = Code.NOTIFY_CONSUMER_IDS_CHANGED
ASKED = Code.GET_CONSUMER_STATUS_FROM_CLIENT


@pytest.fixture
def desk() -> Desk:
    made = Desk(FakeBackend())
    made.door.join(GroupRequests(made.door).handlers())
    return made


def consumer(desk: Desk, name: str, *groups: str) -> VirtualClient:
    client = desk.client()
    assert client.ask(Code.HEART_BEAT, {}, java(name, groups or ("G",))).code == 0
    return client


def ids(client: VirtualClient, group: str = "G") -> list[str]:
    answer = client.ask(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    assert answer.code == 0, answer.remark
    return list(json.loads(answer.body)["consumerIdList"])


def test_members_come_and_go_and_the_others_are_told(desk: Desk) -> None:
    one = consumer(desk, "c1")
    assert len(one.told(NOTIFIED)) == 1
    desk.run(GAP_MS)
    other = consumer(desk, "c2", "G", "H")
    assert [frame.fields for frame in one.told(NOTIFIED)] == [{"consumerGroup": "G"}]
    told = sorted(frame.fields["consumerGroup"] for frame in other.told(NOTIFIED))
    assert told == ["G", "H"] and ids(one) == ["c1", "c2"]
    desk.run(GAP_MS)
    for _ in range(10):
        assert other.ask(Code.HEART_BEAT, {}, java("c2", ("G", "H"))).code == 0
    desk.run(1_000)
    assert not one.asked, "nothing has changed"
    other.ask(Code.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "G"})
    assert len(one.told(NOTIFIED)) == 1 and ids(one) == ["c1"]
    desk.run(GAP_MS)
    again = consumer(desk, "c2")
    desk.run(GAP_MS)
    one.told(NOTIFIED)
    again.close()
    desk.run()
    assert len(one.told(NOTIFIED)) == 1 and ids(one) == ["c1"]
    one.close()
    nobody = desk.client().ask(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
    assert (nobody.code, nobody.remark) == (1, "no consumer for this group, G")


def test_a_silent_client_goes_after_two_minutes(desk: Desk) -> None:
    one, silent = consumer(desk, "c1"), consumer(desk, "c2")
    for _ in range(int(EXPIRED_MS / 30_000) + 1):
        desk.run(30_000)
        one.ask(Code.HEART_BEAT, {}, java("c1"))
    assert ids(one) == ["c1"]
    assert silent.ask(Code.HEART_BEAT, {}, java("c2")).code == 0
    assert ids(one) == ["c1", "c2"], "it is heard again"


def test_a_storm_of_joining_consumers_causes_few_notifications(desk: Desk) -> None:
    members, told = [], 0
    for number in range(300):
        members.append(consumer(desk, f"c{number}"))
        desk.run(10)
    desk.run(5_000)
    for one in members:
        notified = len(one.told(NOTIFIED))
        told += notified
        assert notified >= 1
    assert told <= 300 + 8_000 / GAP_OF_ONE_MS, f"{told} notifications"
    desk.run(60_000)
    assert not any(one.asked for one in members)
    assert len(ids(members[0])) == 300


def test_5_000_connections_with_heartbeats_stay_within_their_bound(desk: Desk) -> None:
    clients = [desk.client() for _ in range(5_000)]
    requests = desk.door._handlers[Code.HEART_BEAT].__self__  # type: ignore[attr-defined]
    subscriptions = [subscribed(f"T{number}") for number in range(20)]
    refused = 0
    for number, client in enumerate(clients):
        body = java(f"c{number}", (f"g{number % 100}",), *subscriptions)
        answer = client.answers.pop(client.send(Code.HEART_BEAT, {}, body))
        refused += answer.code != 0
        assert answer.code == 0 or "too many groups" in str(answer.remark)
    desk.run(60_000)
    assert refused and requests.members.memory_bytes <= groups.MAX_BYTES
    assert consumer(desk, "small"), "what is small still fits"
    for client in clients:
        client.close()
    assert requests.members.count == 1


def test_the_answer_to_a_heartbeat_says_what_a_client_of_5_1_asks(desk: Desk) -> None:
    client = desk.client()
    known = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "false"}
    brief = json.loads(java("c", heartbeatFingerprint=5, withoutSub=True))
    brief["consumerDataSet"][0]["subscriptionDataSet"] = []
    body = json.dumps(brief).encode()
    assert client.ask(Code.HEART_BEAT, {}, body).fields == known | {"IS_SUB_CHANGE": "true"}
    full = java("c", heartbeatFingerprint=5)
    for sent in (full, body, body):
        assert client.ask(Code.HEART_BEAT, {}, sent).fields == known


def test_what_mqadmin_shows_of_members(desk: Desk) -> None:
    client = consumer(desk, "c1")
    client.ask(Code.HEART_BEAT, {}, java("c1", ("G",), subscribed("T", "a", 3)), language="GO")
    asked = client.ask(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert json.loads(asked.body) == {
        "connectionSet": [
            {"clientAddr": client.peer, "clientId": "c1", "language": "GO", "version": 479}
        ],
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "subscriptionTable": {
            "T": subscribed("T", "a", 3) | {"codeSet": [97], "tagsSet": ["a"]},
        },
    }
    fields = {"producerGroup": "CLIENT_INNER_PRODUCER"}
    asked = client.ask(Code.GET_PRODUCER_CONNECTION_LIST, fields)
    assert [one["clientId"] for one in json.loads(asked.body)["connectionSet"]] == ["c1"]
    asked = client.ask(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "X"})
    assert asked.code == Answer.CONSUMER_NOT_ONLINE
    assert client.ask(Code.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "X"}).code == 1


@pytest.mark.parametrize("code", [34, 35, 38, 46, 203, 204, 223, 307, 309])
def test_a_request_without_what_it_needs_has_one_clear_answer(desk: Desk, code: int) -> None:
    client = desk.client()
    for body in (b"", b"{", b"\xff", b"[" * 5_000):
        answer = client.ask(code, {}, body)
        assert answer.code == Answer.SYSTEM_ERROR and answer.remark


def test_tags_and_right_sql_are_accepted_and_other_expressions_are_not(desk: Desk) -> None:
    client = desk.client()
    body = b'{"clientId":"c","subscriptionData":{"expressionType":"%b","subString":"x %b"}}'
    assert client.ask(Code.CHECK_CLIENT_CONFIG, {}, body % (b"TAG", b"")).code == 0
    assert client.ask(Code.CHECK_CLIENT_CONFIG, {}, body % (b"SQL92", b"IS NOT NULL")).code == 0
    refused = client.ask(Code.CHECK_CLIENT_CONFIG, {}, body % (b"SQL92", b"LIKE 'a%'"))
    assert refused.code == Answer.SUBSCRIPTION_PARSE_FAILED
    assert refused.remark == "SQL filter: unexpected \"LIKE 'a%'\" at character 3"
    refused = client.ask(Code.CHECK_CLIENT_CONFIG, {}, body % (b"XPATH", b""))
    assert refused.code == 1 and "XPATH" in str(refused.remark)


def test_a_question_is_passed_on_to_a_consumer_and_its_answer_back(desk: Desk) -> None:
    client, admin = consumer(desk, "c1"), desk.client()
    fields = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "false"}
    opaque = admin.send(Code.GET_CONSUMER_RUNNING_INFO, fields)
    (asked,) = client.told(Code.GET_CONSUMER_RUNNING_INFO)
    assert asked.fields == fields
    client.answer(asked, 0, b"running")
    assert admin.answers.pop(opaque).body == b"running"
    opaque = admin.send(Code.GET_CONSUMER_RUNNING_INFO, fields)
    desk.run(ASK_MS - 1)
    assert opaque not in admin.answers
    desk.run(1)
    assert admin.answers.pop(opaque).code == Answer.CONSUME_MSG_TIMEOUT
    opaque = admin.send(Code.GET_CONSUMER_RUNNING_INFO, fields)
    client.close()
    assert admin.answers.pop(opaque).code == Answer.CONSUME_MSG_TIMEOUT
    assert admin.ask(Code.GET_CONSUMER_RUNNING_INFO, fields).code == 1


def test_the_numbers_of_the_nodes_requests_fit_into_32_bits(desk: Desk) -> None:
    """A client that reads a greater one ends its connection."""
    client, admin = consumer(desk, "c1"), desk.client()
    client.asked.clear()
    desk.door._opaque = 2**31 - 2
    for _ in range(2):
        admin.send(Code.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G", "clientId": "c1"})
    desk.run()
    assert [frame.opaque for frame in client.asked] == [2**31 - 1, 1]


def test_a_message_is_consumed_directly() -> None:
    backend = FakeBackend()
    desk = Desk(backend)
    desk.door.join(GroupRequests(desk.door, "g0").handlers())
    backend.put_encoded([record("T", b"first"), record("T", b"second")])
    client, admin = consumer(desk, "c1"), desk.client()
    offset = max(backend.store.starts)
    fields = {
        "consumerGroup": "G", "clientId": "c1", "msgId": f"7F00000100002A9F{offset:016X}",
    }  # fmt: skip
    opaque = admin.send(Code.CONSUME_MESSAGE_DIRECTLY, fields)
    desk.run()
    (asked,) = client.told(Code.CONSUME_MESSAGE_DIRECTLY)
    assert asked.body == bytes(backend.store.log[offset:])
    # Java's client tells its listener the broker's name, by this field.
    assert asked.fields == fields | {"brokerName": "g0"}
    client.answer(asked, 0, b"consumed")
    assert admin.answers.pop(opaque).body == b"consumed"
    for message_id in ("0" * 31, "x" * 32, f"7F00000100002A9F{1:016X}", "F" * 32):
        answer = admin.ask(Code.CONSUME_MESSAGE_DIRECTLY, fields | {"msgId": message_id})
        assert answer.code == 1 and answer.remark


def test_the_positions_of_consumers_are_gathered(desk: Desk) -> None:
    clients = [consumer(desk, f"c{number}") for number in range(3)]
    admin = desk.client()
    fields = {"topic": "T", "group": "G"}
    opaque = admin.send(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, fields)
    table = b'{{"brokerName":"b}","queueId":0,"topic":"T"}:%d}'
    for number, client in enumerate(clients[:2]):
        (asked,) = client.told(ASKED)
        assert asked.fields == fields
        client.answer(asked, 0, b'{"messageQueueTable":' + table % number + b"}")
    assert opaque not in admin.answers
    desk.run(STATUS_MS)
    body = admin.answers.pop(opaque).body
    assert body == b'{"consumerTable":{"c0":%b,"c1":%b}}' % (table % 0, table % 1)
    opaque = admin.send(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, fields | {"clientAddr": "c2"})
    (asked,) = clients[2].told(ASKED)[-1:]
    clients[2].answer(asked, 0, b'{"messageQueueTable":{"not":"closed"')
    assert admin.answers.pop(opaque).body == b'{"consumerTable":{}}'


def test_answers_about_positions_are_bounded_in_sum(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for those of consumers that are slow: what is beyond the bound is left out."""
    body = b'{"messageQueueTable":{}}'
    monkeypatch.setattr(group_requests, "STATUS_SUM_BYTES", 3 * len(body))
    requests = GroupRequests(desk.door)
    handle, request = requests.consumer_status, Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
    desk.door._handlers[request] = handle
    desk.door._handlers[Code.HEART_BEAT] = requests.heartbeat
    clients = [consumer(desk, f"c{number}") for number in range(6)]
    admin = desk.client()
    opaque = admin.send(request, {"topic": "T", "group": "G"})
    for client in clients[:4]:
        (asked,) = client.told(ASKED)
        client.answer(asked, 0, body)
    (asked,) = clients[4].told(ASKED)
    clients[4].answer(asked, 0, b" " * (STATUS_BYTES + 1) + body)
    assert requests._status_bytes == 3 * len(body)
    desk.run(STATUS_MS)
    assert admin.answers.pop(opaque).body == b'{"consumerTable":{"c0":{},"c1":{},"c2":{}}}'
    assert not requests._status_bytes


def test_over_sockets_a_member_goes_when_its_connection_ends() -> None:
    with served(FakeBackend(), lambda door: door.join(GroupRequests(door).handlers())) as running:
        one, other = RemotingClient(running.endpoint), RemotingClient(running.endpoint)
        for name, client in (("c1", one), ("c2", other)):
            assert client.ask(Code.HEART_BEAT, {}, java(name)).code == 0
        other.close()

        def is_told() -> bool:
            answer = one.ask(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
            return bool(json.loads(answer.body)["consumerIdList"] == ["c1"])

        until(is_told)
        one.close()
