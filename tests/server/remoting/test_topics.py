"""Topics as mqadmin changes them: the record that is stored, and what each outcome is answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hastore.errors import CorruptRecordError, Status
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.remoting import Answer, BatchMessage, Frame, encode_batch
from hastore.record.topic_records import (
    MAX_QUEUES,
    TOPICS_TOPIC,
    TopicChange,
    TopicConfig,
    build_change,
)
from hastore.server.api.server import ApiServer
from hastore.server.remoting.door import Door
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.sends import Sends
from hastore.server.remoting.topics import Topics
from hastore.store.append import topic_table
from tests.api_fakes import FakeBackend, FakePut
from tests.server.api.kit import until
from tests.server.remoting.desk import Desk, StoreBackend
from tests.server.remoting.kit import RemotingClient, served
from tests.server.remoting.test_sends import fields as send_fields
from tests.store import kit

UPDATE, UPDATE_LIST, DELETE, DELETE_ROUTE = 17, 18, 215, 216
CONFIG, ALL, STATS, SEND, SEND_BATCH = 351, 21, 202, 310, 320
INVALID = Answer.INVALID_PARAMETER


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def server(backend: FakeBackend) -> Iterator[ApiServer]:
    def fill(door: Door) -> None:
        door.join(Topics(door, "g0").handlers())
        view = TopicView(backend, auto_create=False)
        door.join(Sends(door, view, "test").handlers())

    with served(backend, fill) as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Iterator[RemotingClient]:
    made = RemotingClient(server.endpoint)
    yield made
    made.close()


def asked(topic: str = "T", read: int = 8, write: int = 4, **more: str) -> dict[str, str]:
    """Return the fields of a change as mqadmin 5.3.3 writes them."""
    return {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(read),
        "writeQueueNums": str(write), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false", "attributes": "", "force": "false", **more,
    }  # fmt: skip


def make(client: RemotingClient, **more: str) -> Frame:
    return client.ask(UPDATE, asked(**more))


def test_a_topic_is_created_changed_and_deleted(
    client: RemotingClient, backend: FakeBackend
) -> None:
    table = backend.store.topic_table
    assert client.ask(CONFIG, {"topic": "T"}).code == Answer.TOPIC_NOT_EXIST
    assert client.ask(SEND, send_fields(), b"body").code == Answer.TOPIC_NOT_EXIST
    assert make(client).code == Answer.SUCCESS
    assert table.find("T") == TopicConfig("T", 8, 4)
    assert client.ask(SEND, send_fields(), b"body").code == Answer.SUCCESS
    assert json.loads(client.ask(CONFIG, {"topic": "T"}).body) == {
        "topicName": "T", "readQueueNums": 8, "writeQueueNums": 4, "perm": 6, "order": False,
        "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "attributes": {},
    }  # fmt: skip
    changes = "+message.type=FIFO,+reserve.time=x y"
    assert make(client, perm="4", order="true", attributes=changes).code == Answer.SUCCESS
    assert client.ask(SEND, send_fields(), b"body").code == Answer.NO_PERMISSION
    assert make(client, perm="4", attributes="-message.type").code == Answer.SUCCESS
    assert table.find("T") == TopicConfig("T", 8, 4, 4, attributes={"reserve.time": "x y"})
    assert client.ask(DELETE, {"topic": "T"}).code == Answer.SUCCESS
    assert client.ask(DELETE_ROUTE, {"topic": "T"}).code == Answer.SUCCESS
    assert table.recorded("T") is None
    records = backend.store.units[TOPICS_TOPIC, 0]
    assert len(records) == 4


def test_what_is_so_already_takes_no_room_in_the_log(
    client: RemotingClient, backend: FakeBackend
) -> None:
    for _ in range(3):
        assert make(client).code == Answer.SUCCESS
        assert client.ask(DELETE, {"topic": "unknown"}).code == Answer.SUCCESS
    assert len(backend.store.units[TOPICS_TOPIC, 0]) == 1
    backend.store.confirmed = 0  # the record is not confirmed: a failover may take it away
    assert make(client).code == Answer.SUCCESS
    assert len(backend.store.units[TOPICS_TOPIC, 0]) == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"topic": "a.b"}, "characters"), ({"topic": "HASTORE_X"}, "own"),
        ({"topic": "TBW102"}, "system topic"), ({"topic": "rmq_sys_x"}, "system topic"),
        ({"topic": "CHECKPOINT_TOPIC"}, "system topic"),
        ({"topic": "x" * 128}, "127"), ({"topic": ""}, "lacks the field topic"),
        ({"perm": "8"}, "perm"), ({"perm": "x"}, "perm"),
        ({"readQueueNums": "-1"}, "readQueueNums"),
        ({"writeQueueNums": str(MAX_QUEUES + 1)}, str(MAX_QUEUES)),
        ({"writeQueueNums": "9" * 30}, "writeQueueNums"),
        ({"attributes": "a"}, "+NAME=VALUE"), ({"attributes": "-hastore.group"}, "own"),
        ({"attributes": "+message.type=" + "b" * 9_000}, "attributes"),
        ({"attributes": "+nonsense=1"}, "unsupported key: nonsense"),
        ({"attributes": "+cleanup.policy=COMPACTION"}, "retention would remove the latest message"),
    ],
)  # fmt: skip
def test_what_no_topic_can_be_is_refused(
    client: RemotingClient, backend: FakeBackend, more: dict[str, str], said: str
) -> None:
    answer = client.ask(UPDATE, asked() | more)
    assert answer.code in (Answer.INVALID_PARAMETER, Answer.SYSTEM_ERROR)
    assert said in str(answer.remark)
    assert not backend.store.log


@pytest.mark.parametrize("name", ["HASTORE_POSITIONS", "TBW102", "a.b"])
def test_what_cannot_be_made_cannot_be_deleted(client: RemotingClient, name: str) -> None:
    assert client.ask(DELETE, {"topic": name}).code == Answer.INVALID_PARAMETER


@pytest.mark.parametrize("code", [UPDATE, DELETE])
def test_each_outcome_has_its_answer(
    client: RemotingClient, backend: FakeBackend, code: int
) -> None:
    assert make(client, topic="U").code == Answer.SUCCESS
    wanted = asked("U", 1, 1)
    backend.writable = False
    answer = client.ask(code, wanted)
    assert (answer.code, answer.remark) == (Answer.SERVICE_NOT_AVAILABLE, "this node is a slave")
    backend.writable, backend.unconfirmable = True, "no slave is in sync"
    assert client.ask(code, wanted).code == Answer.SERVICE_NOT_AVAILABLE
    backend.unconfirmable = None
    backend.transfer.hold = True
    opaque = client.send(code, wanted)
    until(lambda: backend.transfer.waiting)
    backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    answer = client.answer_of(opaque)
    assert answer.code == Answer.SYSTEM_ERROR
    assert "not confirmed" in str(answer.remark)
    backend.transfer.hold = False
    assert make(client, topic="U").code == Answer.SUCCESS
    backend.transfer.hold = True
    opaque = client.send(code, asked("U", 2, 2))
    until(lambda: backend.transfer.waiting)
    backend.transfer.end_all(Outcome.TERM_CHANGED)
    assert client.ended()


def test_a_refused_record_is_no_success(client: RemotingClient, backend: FakeBackend) -> None:
    refused = FakePut(Status.SERVICE_NOT_AVAILABLE, reason="the disk is full")
    backend.store.put_encoded = lambda payloads, guards=None: [[refused]]
    assert make(client).code == Answer.SERVICE_NOT_AVAILABLE


def test_a_list_of_topics_is_made_up_to_the_first_that_fails(
    client: RemotingClient, backend: FakeBackend
) -> None:
    def listed(*names: str) -> bytes:
        topics = [{"topicName": name, "readQueueNums": 2, "writeQueueNums": 1} for name in names]
        return json.dumps({"topicConfigList": topics}).encode()

    assert client.ask(UPDATE_LIST, {}, listed("A", "B", "C")).code == Answer.SUCCESS
    assert [one.name for one in backend.store.topic_table.all()] == ["A", "B", "C"]
    assert client.ask(UPDATE_LIST, {}, listed("D", "a.b", "E")).code == Answer.INVALID_PARAMETER
    assert backend.store.topic_table.find("E") is None
    assert client.ask(UPDATE_LIST, {}, listed("F", "TBW102")).code == Answer.INVALID_PARAMETER
    assert backend.store.topic_table.find("F") is None
    deep = b'{"topicConfigList":' + b"[" * 100_000
    for body in (b"", b"[]", b"{", deep, listed(), b'{"topicConfigList":[{"topicName":1}]}'):
        assert client.ask(UPDATE_LIST, {}, body).code == Answer.INVALID_PARAMETER


def test_a_list_changes_attributes_as_a_single_request_does(
    client: RemotingClient, backend: FakeBackend
) -> None:
    """What it does not name stays: of a group's retries that is the group's settings."""
    table = backend.store.topic_table
    first = "+queue.type=SimpleCQ,+reserve.time=2"
    assert make(client, topic="%RETRY%g", attributes=first).code == Answer.SUCCESS
    for changes, wanted in (
        (None, {"queue.type": "SimpleCQ", "reserve.time": "2"}),
        (
            {"+message.type": "FIFO", "-queue.type": "", "reserve.time": "3"},
            {"reserve.time": "3", "message.type": "FIFO"},
        ),
    ):
        one = {"topicName": "%RETRY%g", "readQueueNums": 2, "attributes": changes}
        body = json.dumps({"topicConfigList": [one]}).encode()
        assert client.ask(UPDATE_LIST, {}, body).code == Answer.SUCCESS
        config = table.recorded("%RETRY%g")
        assert config is not None and (config.read_queues, config.attributes) == (2, wanted)
    for name in ("+", "+nonsense", "cleanup.policy"):
        one = {"topicName": "U", "attributes": {name: "COMPACTION"}}
        body = json.dumps({"topicConfigList": [one]}).encode()
        assert client.ask(UPDATE_LIST, {}, body).code == Answer.INVALID_PARAMETER


def test_attributes_that_a_topic_has_from_a_broker_do_not_hinder_other_changes(
    client: RemotingClient, backend: FakeBackend
) -> None:
    from_broker = TopicConfig("T", 4, 4, attributes={"cleanup.policy": "COMPACTION", "new": "1"})
    backend.put_encoded([build_change(TopicChange(from_broker), 1)])
    assert make(client, attributes="+reserve.time=1,-new").code == Answer.SUCCESS
    assert make(client, attributes="+cleanup.policy=DELETE").code == Answer.SUCCESS
    config = backend.store.topic_table.recorded("T")
    assert config is not None
    assert config.attributes == {"cleanup.policy": "DELETE", "reserve.time": "1"}


def test_a_topic_without_queues_for_producers_takes_nothing(
    client: RemotingClient, backend: FakeBackend
) -> None:
    assert make(client, topic="T", writeQueueNums="0").code == Answer.SUCCESS
    for queue in (-1, 0):  # -1: any queue
        answer = client.ask(SEND, send_fields("T", queue), b"x")
        assert answer.code == Answer.NO_PERMISSION
        assert "it has no queue for producers" in str(answer.remark)
    too_many = make(client, topic="T", readQueueNums=str(MAX_QUEUES + 1))
    assert too_many.remark == "topic T: 4097 read queues; 0 to 4096 are allowed"


def test_a_send_to_a_queue_that_producers_lose_is_stored_in_another_one(
    client: RemotingClient, backend: FakeBackend
) -> None:
    """Clients know the old number for up to 30 s, and try nothing else after code 29."""
    assert make(client, topic="T", readQueueNums="4", writeQueueNums="2").code == Answer.SUCCESS
    for code, body in ((SEND, b"x"), (SEND_BATCH, encode_batch([BatchMessage(0, b"x", b"")]))):
        answer = client.ask(code, send_fields("T", 3), body)
        assert (answer.code, answer.fields.get("queueId")) == (Answer.SUCCESS, "1")
    assert len(backend.store.units["T", 1]) == 2
    assert client.ask(SEND, send_fields("T", 4), b"x").code == Answer.INVALID_PARAMETER


def test_no_room_is_said_clearly_and_a_deletion_makes_room(
    client: RemotingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MAX_TOPICS", "MAX_GROUPS", "MAX_DELETED"):
        monkeypatch.setattr(topic_table, limit, 1)
    assert make(client, topic="A").code == Answer.SUCCESS
    assert make(client, topic="%RETRY%g").code == Answer.SUCCESS
    full = make(client, topic="B")
    assert full.code == Answer.SYSTEM_BUSY
    assert "1 topics have a configuration" in str(full.remark)
    assert make(client, topic="%RETRY%h").code == Answer.SYSTEM_BUSY
    assert make(client, topic="A", perm="4").code == Answer.SUCCESS
    assert client.ask(DELETE, {"topic": "A"}).code == Answer.SUCCESS
    assert make(client, topic="B").code == Answer.SUCCESS
    kept = client.ask(DELETE, {"topic": "B"})
    assert kept.code == Answer.SYSTEM_BUSY and "topics set B --perm none" in str(kept.remark)
    assert client.ask(DELETE, {"topic": "A"}).code == Answer.SUCCESS


def test_a_producer_that_wants_fewer_queues_creates_a_topic_with_these(
    backend: FakeBackend,
) -> None:
    def fill(door: Door) -> None:
        view = TopicView(backend, auto_create=True)
        door.join(Topics(door, "g0", view).handlers())
        door.join(Sends(door, view, "test").handlers())

    with served(backend, fill) as server:
        client = RemotingClient(server.endpoint)
        opaques = [client.send(SEND, send_fields(queue=0, d="1"), b"x") for _ in range(5)]
        assert [client.answer_of(opaque).code for opaque in opaques] == [0] * 5
        assert backend.store.topic_table.recorded("T") == TopicConfig("T", 1, 1)
        assert client.ask(SEND, send_fields(queue=1, d="4"), b"x").code != Answer.SUCCESS
        assert client.ask(SEND, send_fields("U", 3, d="9"), b"x").code == Answer.SUCCESS
        assert backend.store.topic_table.recorded("U") is None  # as many as every topic has
        assert client.ask(SEND, send_fields("V", 1, d="1"), b"x").code != Answer.SUCCESS
        client.close()


def test_a_damaged_message_does_not_hide_the_ranges(
    client: RemotingClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(client)
    assert client.ask(SEND, send_fields(), b"body").code == Answer.SUCCESS

    def pull(*_: object, **_more: object) -> None:
        raise CorruptRecordError("the record at offset 0 is damaged")

    monkeypatch.setattr(backend.store, "pull", pull)
    answer = client.ask(STATS, {"topic": "T"})
    assert answer.code == Answer.SUCCESS
    assert b'{"lastUpdateTimestamp":0,"maxOffset":1,"minOffset":0}' in answer.body


def test_all_topics_and_the_ranges_of_one(client: RemotingClient, backend: FakeBackend) -> None:
    make(client, topic="A")
    make(client)
    for _ in range(2):
        assert client.ask(SEND, send_fields(), b"body").code == Answer.SUCCESS
    found = json.loads(client.ask(ALL).body)
    assert sorted(found["topicConfigTable"]) == ["A", "T"]
    assert found["topicConfigTable"]["A"]["readQueueNums"] == 8
    assert found["dataVersion"]["stateVersion"] == 0
    stats = client.ask(STATS, {"topic": "T"}).body.decode()
    assert stats.startswith('{"offsetTable":{{"brokerName":"g0","queueId":0,"topic":"T"}:')
    assert stats.count('"maxOffset":0') == 7
    assert '"queueId":1,"topic":"T"}:{"lastUpdateTimestamp":1' in stats
    assert '"maxOffset":2,"minOffset":0' in stats
    assert client.ask(STATS, {"topic": "none"}).code == Answer.TOPIC_NOT_EXIST
    assert client.ask(STATS, {"topic": TOPICS_TOPIC}).code == Answer.TOPIC_NOT_EXIST


@pytest.mark.parametrize(
    ("sends", "codes", "count"),
    [
        ([("1", 0), ("2", 1)], [0, INVALID], 1),
        ([("1", 0), ("4", 3)], [0, INVALID], 1),
        ([("2", 1), ("4", -1), ("1", 0)], [0, 0, 0], 2),
        ([("4", 3), ("1", 0)], [0, 0], 4),
        ([("9", 3), ("0", -1), ("2", 1)], [0, 0, 0], 4),
    ],
)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_producers_that_begin_a_topic_together_agree_on_its_queues(
    tmp_path: Path, sends: list[tuple[str, int]], codes: list[int], count: int,
    apart: bool, fails: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Their sends fall into one append, or before replay has come to the first one's."""
    with kit.opened(tmp_path) as store:
        desk = Desk(StoreBackend(store))
        view = TopicView(desk.backend, auto_create=True)
        for one in (Sends(desk.door, view, "test"), Topics(desk.door, "g0", view)):
            desk.door.join(one.handlers())
        if fails:  # the topic gets no record, and so the default number of queues
            monkeypatch.setattr(store.topic_table, "no_room_for", lambda _name: "it is full")
        client, asked_for = desk.client(), []
        with store.replay.paused() if apart else contextlib.nullcontext():
            for number, queue in sends:
                asked_for.append(client.send(SEND, send_fields("New", queue, d=number), b"x"))
                if apart:
                    desk.run()
            desk.run()
        answers = [client.answers.pop(opaque) for opaque in asked_for]
        assert store.wait_dispatched(store.max_offset, 60)
        config = store.topic_table.find("New")
        assert config is not None
        found = [int(each.fields["queueId"]) for each in answers if each.code == 0]
        assert max(found) < config.read_queues, "an acknowledged message is hidden"
        if not fails:
            assert [each.code for each in answers] == codes and config.read_queues == count
        assert not view.making
