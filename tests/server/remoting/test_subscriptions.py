"""The settings of consumer groups as mqadmin changes them, and what they change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.remoting import Answer, Code, Frame
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.api.server import ApiServer
from hastore.server.remoting.door import Door
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.subscriptions import (
    ATTRIBUTE,
    DEFAULT,
    GROUP_NOT_EXIST,
    MAX_SETTINGS_BYTES,
    Subscriptions,
)
from hastore.server.remoting.topics import Topics
from tests.api_fakes import FakeBackend
from tests.server.api.kit import until
from tests.server.remoting.desk import Desk, StoreBackend
from tests.server.remoting.kit import RemotingClient, served
from tests.server.remoting.test_topics import asked
from tests.store import kit

UPDATE, UPDATE_LIST, DELETE, ALL, ONE = 200, 225, 207, 201, 352
# What mqadmin 5.3.3 sends for `updateSubGroup -g g -r 5 -q 2 -s false`.
GIVEN = {
    "attributes": {}, "brokerId": 0, "consumeBroadcastEnable": True, "consumeEnable": False,
    "consumeFromMinEnable": True, "consumeMessageOrderly": False, "consumeTimeoutMinute": 15,
    "groupName": "g", "groupRetryPolicy": {"type": "CUSTOMIZED"}, "groupSysFlag": 0,
    "notifyConsumerIdsChangedEnable": True, "retryMaxTimes": 5, "retryQueueNums": 2,
    "whichBrokerWhenConsumeSlowly": 1,
}  # fmt: skip


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def made() -> list[Subscriptions]:
    return []


@pytest.fixture
def server(backend: FakeBackend, made: list[Subscriptions]) -> Iterator[ApiServer]:
    def fill(door: Door) -> None:
        made.append(Subscriptions(door, TopicView(backend, auto_create=True)))
        door.join(made[0].handlers())
        door.join(Topics(door, "g0").handlers())

    with served(backend, fill) as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Iterator[RemotingClient]:
    found = RemotingClient(server.endpoint)
    yield found
    found.close()


def update(client: RemotingClient, **changes: object) -> Frame:
    return client.ask(UPDATE, {}, json.dumps(GIVEN | changes).encode())


def test_settings_are_set_read_changed_and_deleted(
    client: RemotingClient, backend: FakeBackend, made: list[Subscriptions]
) -> None:
    [settings] = made
    assert client.ask(ONE, {"group": "g"}).code == GROUP_NOT_EXIST
    assert settings.find("g") is DEFAULT and settings.refusal("g") is None
    assert update(client).code == Answer.SUCCESS
    found = settings.find("g")
    assert (found.retry_max_times, found.retry_queue_nums) == (5, 2)
    assert settings.refusal("g") == "subscription group no permission, g"
    assert json.loads(client.ask(ONE, {"group": "g"}).body) == GIVEN
    retries = backend.store.topic_table.recorded("%RETRY%g")
    assert (retries.read_queues, retries.write_queues) == (2, 2)
    assert update(client, consumeEnable=True, retryQueueNums=0).code == Answer.SUCCESS
    assert settings.refusal("g") is None and settings.find("g").retry_queue_nums == 0
    retries = backend.store.topic_table.recorded("%RETRY%g")
    assert (retries.read_queues, retries.write_queues) == (2, 1), "its messages stay readable"
    both = client.ask(DELETE, {"groupName": "g", "cleanOffset": "true"})
    assert both.code == Answer.INVALID_PARAMETER and "positions stay" in (both.remark or "")
    assert settings.find("g").retry_queue_nums == 0, "nothing was done"
    assert client.ask(DELETE, {"groupName": "g", "cleanOffset": "false"}).code == Answer.SUCCESS
    assert settings.find("g") is DEFAULT
    assert client.ask(DELETE, {"groupName": "never"}).code == Answer.SUCCESS


def test_attributes_are_changed_by_their_signs(
    client: RemotingClient, made: list[Subscriptions]
) -> None:
    """As mqadmin 5.3 sends them; what a change does not name stays."""
    for changes, wanted in (
        ({"+a": "1", "+b": "2"}, {"a": "1", "b": "2"}),
        ({}, {"a": "1", "b": "2"}),
        (None, {"a": "1", "b": "2"}),
        ({"-a": "", "+b": "3"}, {"b": "3"}),
    ):
        assert update(client, attributes=changes).code == Answer.SUCCESS
        assert made[0].find("g").attributes == wanted
        assert json.loads(client.ask(ONE, {"group": "g"}).body)["attributes"] == wanted
    assert update(client, attributes={"-": ""}).code == Answer.INVALID_PARAMETER


def test_a_change_of_the_topic_keeps_the_settings(
    client: RemotingClient, made: list[Subscriptions]
) -> None:
    assert update(client).code == Answer.SUCCESS
    changed = asked("%RETRY%g", 4, 4, attributes="+message.type=FIFO")
    assert client.ask(Code.UPDATE_AND_CREATE_TOPIC, changed).code == Answer.SUCCESS
    assert made[0].find("g").retry_max_times == 5


def test_a_deletion_of_the_topic_keeps_the_settings(tmp_path: Path) -> None:
    """`mqadmin deleteTopic` of %RETRY%g let a group consume that may not, without an error."""
    with kit.opened(tmp_path) as store:
        kit.put(store, *[kit.message(n, topic="%RETRY%g", queue_id=n) for n in range(4)])
        assert store.wait_dispatched(store.max_offset, 60)
        desk = Desk(StoreBackend(store))
        view = TopicView(desk.backend, auto_create=True)
        settings = Subscriptions(desk.door, view)
        desk.door.join(settings.handlers())
        desk.door.join(Topics(desk.door, "g0", view).handlers())
        ask = desk.client().ask
        assert ask(UPDATE, {}, json.dumps(GIVEN).encode()).code == Answer.SUCCESS
        for _ in range(2):
            answer = ask(Code.DELETE_TOPIC_IN_BROKER, {"topic": "%RETRY%g"})
            assert answer.code == Answer.SUCCESS
            assert json.loads(ask(ONE, {"group": "g"}).body) == GIVEN
            assert settings.refusal("g") is not None
            shape = view.find("%RETRY%g")
            assert shape is not None and (shape.read, shape.write) == (2, 2)
            assert store.wait_dispatched(store.max_offset, 60)
            assert not store.queues.shown("%RETRY%g"), "the retries are hidden"
        assert ask(DELETE, {"groupName": "g"}).code == Answer.SUCCESS
        assert ask(Code.DELETE_TOPIC_IN_BROKER, {"topic": "%RETRY%g"}).code == Answer.SUCCESS
        assert store.topic_table.recorded("%RETRY%g") is None, "and makes room for another group"


def test_the_settings_are_no_attribute_that_others_see_or_change(
    client: RemotingClient, made: list[Subscriptions]
) -> None:
    assert update(client).code == Answer.SUCCESS
    shown = json.loads(client.ask(Code.GET_TOPIC_CONFIG, {"topic": "%RETRY%g"}).body)
    assert shown["attributes"] == {}
    for change in (f"-{ATTRIBUTE}", f"+{ATTRIBUTE}={{}}"):
        changed = asked("%RETRY%g", 4, 4, attributes=change)
        answer = client.ask(Code.UPDATE_AND_CREATE_TOPIC, changed)
        assert answer.code == Answer.INVALID_PARAMETER and "own" in (answer.remark or "")
    listed = {"topicName": "%RETRY%g", "attributes": {f"-{ATTRIBUTE}": ""}}
    body = json.dumps({"topicConfigList": [listed]}).encode()
    answer = client.ask(Code.UPDATE_AND_CREATE_TOPIC_LIST, {}, body)
    assert answer.code == Answer.INVALID_PARAMETER
    assert made[0].find("g").retry_max_times == 5 and made[0].refusal("g") is not None


def test_all_groups_with_settings_or_retries_are_listed(
    client: RemotingClient, backend: FakeBackend
) -> None:
    body = {"groupConfigList": [GIVEN, GIVEN | {"groupName": "h", "retryMaxTimes": 1}]}
    assert client.ask(UPDATE_LIST, {}, json.dumps(body).encode()).code == Answer.SUCCESS
    client.ask(Code.UPDATE_AND_CREATE_TOPIC, asked("%RETRY%plain", 1, 1))
    client.ask(Code.UPDATE_AND_CREATE_TOPIC, asked("other", 1, 1))
    found = json.loads(client.ask(ALL).body)["subscriptionGroupTable"]
    assert found.keys() == {"g", "h", "plain"}
    assert found["g"] == GIVEN and found["h"]["retryMaxTimes"] == 1
    assert found["plain"]["retryMaxTimes"] == 16 and found["plain"]["groupName"] == "plain"


def test_a_group_without_retries_has_settings_once_it_is_known(
    client: RemotingClient, made: list[Subscriptions]
) -> None:
    """RocketMQ makes them with the first heartbeat; `getConsumerConfig` and dashboards ask."""
    assert client.ask(ONE, {"group": "g"}).code == GROUP_NOT_EXIST
    made[0].known_groups = lambda: {"g", "HASTORE_X"}
    answer = client.ask(ONE, {"group": "g"})
    assert answer.code == Answer.SUCCESS
    found = json.loads(answer.body)
    assert found["groupName"] == "g" and found["retryMaxTimes"] == 16
    assert json.loads(client.ask(ALL).body)["subscriptionGroupTable"].keys() == {"g"}
    for other in ("h", "HASTORE_X"):
        assert client.ask(ONE, {"group": other}).code == GROUP_NOT_EXIST


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "no settings"),
        (b"[]", "no settings"),
        (b'{"groupName":"G","x":' + b"[" * 100_000, "no settings"),
        (b"{}", "groupName"),
        (json.dumps(GIVEN | {"groupName": "a b"}).encode(), "topic"),
        (json.dumps(GIVEN | {"groupName": "x" * 249}).encode(), "topic"),
        (json.dumps(GIVEN | {"retryQueueNums": -1}).encode(), "retryQueueNums"),
        (json.dumps(GIVEN | {"retryQueueNums": 5_000}).encode(), "retryQueueNums"),
        (json.dumps(GIVEN | {"retryMaxTimes": "x"}).encode(), "retryMaxTimes"),
        (json.dumps(GIVEN | {"retryMaxTimes": 2**40}).encode(), "retryMaxTimes"),
        (json.dumps(GIVEN | {"attributes": {"a": "x" * MAX_SETTINGS_BYTES}}).encode(), "bytes of"),
    ],
)
def test_bad_settings_are_refused(
    client: RemotingClient, backend: FakeBackend, body: bytes, text: str
) -> None:
    answer = client.ask(UPDATE, {}, body)
    assert answer.code == Answer.INVALID_PARAMETER and text in (answer.remark or ""), answer
    answer = client.ask(UPDATE_LIST, {}, b'{"groupConfigList":[' + body + b"]}")
    assert answer.code == Answer.INVALID_PARAMETER
    assert backend.store.max_offset == 0


@pytest.mark.parametrize("count", [0, 1_001])
def test_a_list_without_groups_or_with_too_many_is_refused(
    client: RemotingClient, count: int
) -> None:
    body = json.dumps({"groupConfigList": [GIVEN] * count}).encode()
    answer = client.ask(UPDATE_LIST, {}, body)
    assert answer.code == Answer.INVALID_PARAMETER and "list of" in (answer.remark or "")


def test_settings_of_a_later_version_count_as_the_default_ones(
    client: RemotingClient, backend: FakeBackend, made: list[Subscriptions]
) -> None:
    later = TopicConfig("%RETRY%g", 1, 1, attributes={ATTRIBUTE: "later"})
    backend.put_encoded([build_change(TopicChange(later), 1)])
    assert client.ask(Code.GET_TOPIC_CONFIG, {"topic": "%RETRY%g"}).code == Answer.SUCCESS
    assert isinstance(backend.store.topic_table.recorded("%RETRY%g"), TopicConfig)
    assert made[0].find("g") is DEFAULT


def test_a_change_is_answered_with_what_became_of_it(
    client: RemotingClient, backend: FakeBackend
) -> None:
    backend.writable = False
    assert update(client).code == Answer.SERVICE_NOT_AVAILABLE
    backend.writable = True
    backend.transfer.hold = True
    for outcome, code in (
        (Outcome.FLUSH_SLAVE_TIMEOUT, Answer.SYSTEM_ERROR),
        (Outcome.CONFIRMED, Answer.SUCCESS),
    ):
        opaque = client.send(UPDATE, {}, json.dumps(GIVEN | {"retryMaxTimes": code}).encode())
        until(lambda: backend.transfer.waiting)
        backend.transfer.end_all(outcome)
        assert client.answer_of(opaque).code == code
    client.send(UPDATE, {}, json.dumps(GIVEN | {"retryMaxTimes": 7}).encode())
    until(lambda: backend.transfer.waiting)
    backend.transfer.end_all(Outcome.TERM_CHANGED)
    assert client.ended(), "nobody knows whether it is stored"


def test_new_settings_hide_no_retries_in_other_queues(tmp_path: Path) -> None:
    """RocketMQ, and hastore's producers, may have put them into queues that no record names."""
    with kit.opened(tmp_path) as store:
        kit.put(store, *[kit.message(n, topic="%RETRY%g", queue_id=n) for n in range(4)])
        assert store.wait_dispatched(store.max_offset, 60)
        desk = Desk(StoreBackend(store))
        view = TopicView(desk.backend, auto_create=True)
        desk.door.join(Subscriptions(desk.door, view).handlers())
        body = json.dumps(GIVEN | {"retryQueueNums": 1}).encode()
        for _ in range(2):
            assert desk.client().ask(UPDATE, {}, body).code == Answer.SUCCESS
            shape = view.find("%RETRY%g")
            assert shape is not None and (shape.read, shape.write) == (4, 1)
