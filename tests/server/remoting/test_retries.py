"""Messages that are sent back or delayed: where they go, and what each outcome is answered with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hastore.errors import NotCachedError
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import Record, build_record
from hastore.record.delays import SCHEDULE_TOPIC
from hastore.server.api.server import ApiServer
from hastore.server.remoting.door import Door
from hastore.server.remoting.retries import Retries
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.sends import Sends
from hastore.server.remoting.subscriptions import GroupSettings
from tests.api_fakes import FakeBackend
from tests.server.api.kit import until
from tests.server.remoting.desk import Desk, StoreBackend
from tests.server.remoting.kit import RemotingClient, served
from tests.server.remoting.test_sends import fields, records
from tests.store import kit
from tests.store.kit import BORN


class Settings:
    """Settings that a test chooses."""

    settings = GroupSettings()

    def find(self, group: str) -> GroupSettings:
        return self.settings


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend()
    made.store.default_queues = 18
    return made


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def server(backend: FakeBackend, settings: Settings) -> Iterator[ApiServer]:
    def fill(door: Door) -> None:
        topics = TopicView(backend, auto_create=True)
        sends = Sends(door, topics, "test", is_ordered=lambda group: group == "ordered")
        door.join(sends.handlers())
        door.join(Retries(door, topics, settings).handlers())

    with served(backend, fill) as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Iterator[RemotingClient]:
    made = RemotingClient(server.endpoint)
    yield made
    made.close()


def stored(backend: FakeBackend, *, topic: str = "T", **more: str) -> int:
    """Put a message; return its offset."""
    properties = [("UNIQ_KEY", "key"), *more.items()]
    raw = build_record(
        topic, b"body", queue_id=1, properties=properties, flag=5, born_timestamp_ms=9,
        born_host=BORN,
    )  # fmt: skip
    [[result]] = backend.store.put_encoded([raw])
    assert result.offset is not None
    return result.offset


def back(offset: int, **more: str) -> dict[str, str]:
    """Return the fields of a message that is sent back, as Java's client writes them."""
    return {
        "offset": str(offset), "group": "g", "delayLevel": "0", "originMsgId": "key",
        "originTopic": "T", "unitMode": "false", "maxReconsumeTimes": "16", **more,
    }  # fmt: skip


def properties(record: Record) -> dict[str, str]:
    return dict(record.property_pairs)


def test_a_message_that_is_sent_back_waits_for_its_group(
    backend: FakeBackend, client: RemotingClient
) -> None:
    offset = stored(backend, TAGS="a")
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, back(offset)).code == Answer.SUCCESS
    first, again = records(backend)
    assert (again.topic, again.queue_id, again.reconsume_times) == (SCHEDULE_TOPIC, 2, 1)
    assert (again.body, again.flag, again.born_timestamp_ms, again.born_host) == (
        b"body", 5, 9, BORN,
    )  # fmt: skip
    assert properties(again) == {
        "UNIQ_KEY": "key", "TAGS": "a", "RETRY_TOPIC": "T", "WAIT": "false", "DELAY": "3",
        "REAL_TOPIC": "%RETRY%g", "REAL_QID": "0", "ORIGIN_MESSAGE_ID": first.message_id,
    }  # fmt: skip


def test_go_is_told_of_success_only(tmp_path: Path) -> None:
    """Its client takes any answer for a success, and never consumed the message again."""
    with kit.opened(tmp_path) as store:
        desk = Desk(StoreBackend(store))
        view = TopicView(desk.backend, auto_create=True)
        desk.door.join(Retries(desk.door, view, Settings()).handlers())
        kit.put(store, kit.message(0, topic="T"))
        client, code = desk.client(), Code.CONSUMER_SEND_MSG_BACK
        gone = back(10_000, originMsgId="")
        assert client.ask(code, gone, language="JAVA").code == Answer.SYSTEM_ERROR
        client.send(code, gone, language="GO")
        desk.run(60_000)
        assert not client.answers and not client.ended
        there = back(0, originMsgId="", originTopic="T")
        assert client.ask(code, there, language="GO").code == Answer.SUCCESS


@pytest.mark.parametrize("level", ["0", "-1"])
def test_a_group_may_have_a_long_name(
    backend: FakeBackend, client: RemotingClient, level: str
) -> None:
    """RocketMQ's clients take up to 255 characters, its broker then writes longer topics."""
    group = "g" * 248
    given = back(stored(backend), group=group, delayLevel=level)
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, given).code == Answer.SUCCESS
    own = f"%RETRY%{group}" if level == "0" else f"%DLQ%{group}"
    assert own in (records(backend)[-1].topic, properties(records(backend)[-1]).get("REAL_TOPIC"))
    copy = fields(b=f"%RETRY%{group}", i="UNIQ_KEY\x01k\x02", e="0")
    assert client.ask(Code.SEND_MESSAGE_V2, copy, b"x").code == Answer.SUCCESS
    assert records(backend)[-1].topic == f"%RETRY%{group}"


@pytest.mark.parametrize(("level", "times"), [("-1", "16"), ("0", "0")])
def test_a_message_that_was_tried_often_enough_goes_to_the_dead_letters(
    backend: FakeBackend, client: RemotingClient, level: str, times: str
) -> None:
    given = back(stored(backend), delayLevel=level, maxReconsumeTimes=times)
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, given).code == Answer.SUCCESS
    _, dead = records(backend)
    assert (dead.topic, dead.queue_id, dead.reconsume_times) == ("%DLQ%g", 0, 1)
    assert properties(dead)["DELAY"] == "0"


def test_the_settings_of_the_group_count_if_the_client_names_no_maximum(
    backend: FakeBackend, client: RemotingClient, settings: Settings
) -> None:
    settings.settings = GroupSettings(retry_max_times=0)
    given = back(stored(backend))
    del given["maxReconsumeTimes"]
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, given).code == Answer.SUCCESS
    assert records(backend)[-1].topic == "%DLQ%g"
    settings.settings = GroupSettings(retry_queue_nums=0)
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, given).code == Answer.SUCCESS
    assert len(records(backend)) == 2, "a group without queues for retries does not try again"


def test_a_message_is_read_by_another_thread_if_it_is_not_in_memory(
    backend: FakeBackend, client: RemotingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset = stored(backend)
    read, tries = backend.store.record_bytes, []

    def cold(at: int) -> bytes | None:
        tries.append(at)
        if len(tries) == 1:
            raise NotCachedError("not in memory")
        return read(at)

    monkeypatch.setattr(backend.store, "record_bytes", cold)
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, back(offset)).code == Answer.SUCCESS
    assert tries == [offset] * 2 and records(backend)[-1].topic == SCHEDULE_TOPIC


def test_a_read_that_fails_is_answered(
    backend: FakeBackend, client: RemotingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    offset, tries = stored(backend), []

    def broken(at: int) -> bytes | None:
        tries.append(at)
        raise NotCachedError("not in memory") if len(tries) == 1 else OSError(5, "bad sector")

    monkeypatch.setattr(backend.store, "record_bytes", broken)
    answer = client.ask(Code.CONSUMER_SEND_MSG_BACK, back(offset))
    assert answer.code == Answer.SYSTEM_ERROR and "bad sector" in (answer.remark or "")


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"offset": "1"}, Answer.SYSTEM_ERROR, "look message by offset failed, 1"),
        ({"offset": str(2**62)}, Answer.SYSTEM_ERROR, "look message"),
        ({"originMsgId": "another"}, Answer.SYSTEM_ERROR, "look message"),
        ({"offset": "-1"}, Answer.MESSAGE_ILLEGAL, "is not from 0"),
        ({"offset": "x"}, Answer.MESSAGE_ILLEGAL, "offset is missing, or no whole number"),
        ({"delayLevel": "99999999999"}, Answer.MESSAGE_ILLEGAL, "delayLevel"),
        ({"group": ""}, Answer.MESSAGE_ILLEGAL, "group is missing"),
        ({"group": "x" * 256}, Answer.MESSAGE_ILLEGAL, "too long"),
        ({"group": "a b"}, Answer.INVALID_PARAMETER, "topic"),
    ],
)
def test_what_cannot_be_sent_back_is_refused(
    backend: FakeBackend, client: RemotingClient, change: dict[str, str], code: int, text: str
) -> None:
    answer = client.ask(Code.CONSUMER_SEND_MSG_BACK, back(stored(backend)) | change)
    assert answer.code == code and text in (answer.remark or ""), answer
    assert len(records(backend)) == 1


@pytest.mark.parametrize(
    "topic", ["HASTORE_POSITIONS", "HASTORE_TOPICS", SCHEDULE_TOPIC, "RMQ_SYS_TRANS_HALF_TOPIC"]
)
def test_what_no_consumer_gets_cannot_be_sent_back(
    backend: FakeBackend, client: RemotingClient, topic: str
) -> None:
    offset = stored(backend, topic=topic, REAL_TOPIC="T", REAL_QID="0")
    for change in ({}, {"originTopic": topic}, {"originTopic": "", "originMsgId": ""}):
        answer = client.ask(Code.CONSUMER_SEND_MSG_BACK, back(offset) | change)
        assert answer.code == Answer.SYSTEM_ERROR and "look message" in (answer.remark or "")
    assert len(records(backend)) == 1


def test_the_topic_says_that_a_cut_left_another_message_there(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """A client need not say the message's id, and a message need not have one."""
    offset = stored(backend, topic="Other")
    without = back(offset)
    del without["originMsgId"]
    answer = client.ask(Code.CONSUMER_SEND_MSG_BACK, without)
    assert answer.code == Answer.SYSTEM_ERROR and len(records(backend)) == 1
    del without["originTopic"]
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, without).code == Answer.SUCCESS


@pytest.mark.parametrize(
    ("topic", "more"),
    [("%RETRY%g", {"RETRY_TOPIC": "T"}), ("%DLQ%g", {"RETRY_TOPIC": "T"}), ("space%T", {})],
)
def test_a_client_may_know_a_topic_by_another_name(
    backend: FakeBackend, client: RemotingClient, topic: str, more: dict[str, str]
) -> None:
    """Of a retry the application sees the first topic; of a name space it sees nothing."""
    offset = stored(backend, topic=topic, **more)
    assert client.ask(Code.CONSUMER_SEND_MSG_BACK, back(offset)).code == Answer.SUCCESS


def test_missing_fields_are_refused(backend: FakeBackend, client: RemotingClient) -> None:
    stored(backend)
    for name in ("offset", "group"):
        given = back(0)
        del given[name]
        assert client.ask(Code.CONSUMER_SEND_MSG_BACK, given).code == Answer.MESSAGE_ILLEGAL


def test_what_is_refused_or_unconfirmed_is_never_answered_with_0(
    backend: FakeBackend, client: RemotingClient
) -> None:
    offset = stored(backend)
    backend.writable = False
    answer = client.ask(Code.CONSUMER_SEND_MSG_BACK, back(offset))
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE and len(records(backend)) == 1
    backend.writable = True
    backend.transfer.hold = True
    for outcome, code in (
        (Outcome.FLUSH_SLAVE_TIMEOUT, Answer.SYSTEM_ERROR),
        (Outcome.CONFIRMED, Answer.SUCCESS),
    ):
        opaque = client.send(Code.CONSUMER_SEND_MSG_BACK, back(offset))
        until(lambda: backend.transfer.waiting)
        backend.transfer.end_all(outcome)
        assert client.answer_of(opaque).code == code
    client.send(Code.CONSUMER_SEND_MSG_BACK, back(offset))
    until(lambda: backend.transfer.waiting)
    backend.transfer.end_all(Outcome.TERM_CHANGED)
    assert client.ended(), "nobody knows whether it is stored"


# -- sends


def test_a_delayed_send_waits_in_the_queue_of_its_level(
    backend: FakeBackend, client: RemotingClient
) -> None:
    given = fields(i="UNIQ_KEY\x01k\x02DELAY\x014\x02HS_DELAYED\x011-7\x02")
    answer = client.ask(Code.SEND_MESSAGE_V2, given, b"x")
    assert answer.code == Answer.SUCCESS and answer.fields["queueId"] == "1"
    (record,) = records(backend)
    found = properties(record)
    assert (record.topic, record.queue_id) == (SCHEDULE_TOPIC, 3)
    assert (found["REAL_TOPIC"], found["REAL_QID"], found["DELAY"]) == ("T", "1", "4")
    assert "HS_DELAYED" not in found


@pytest.mark.parametrize("more", ["", "TRAN_MSG\x01true\x02PGROUP\x01g\x02"])
def test_a_level_that_is_no_number_is_refused(
    backend: FakeBackend, client: RemotingClient, more: str
) -> None:
    """It is the client's fault, also of the retry of a transactional message."""
    given = fields(i="DELAY\x01soon\x02" + more, j="1")
    answer = client.ask(Code.SEND_MESSAGE_V2, given, b"x")
    assert answer.code == Answer.MESSAGE_ILLEGAL and "soon" in (answer.remark or "")
    assert not records(backend)


def test_a_copy_of_a_delivered_message_is_no_delivery(
    backend: FakeBackend, client: RemotingClient
) -> None:
    given = fields(i="UNIQ_KEY\x01k\x02HS_DELAYED\x011-7\x02")
    assert client.ask(Code.SEND_MESSAGE_V2, given, b"x").code == Answer.SUCCESS
    (record,) = records(backend)
    assert record.topic == "T" and "HS_DELAYED" not in properties(record)


@pytest.mark.parametrize(("times", "topic"), [("16", SCHEDULE_TOPIC), ("17", "%DLQ%g")])
def test_a_retry_that_a_client_sends_by_itself_ends_in_the_dead_letters(
    backend: FakeBackend, client: RemotingClient, times: str, topic: str
) -> None:
    given = fields("%RETRY%g", 0, i="UNIQ_KEY\x01k\x02DELAY\x013\x02", j=times, l="16")
    assert client.ask(Code.SEND_MESSAGE_V2, given, b"x").code == Answer.SUCCESS
    (record,) = records(backend)
    assert (record.topic, record.reconsume_times) == (topic, int(times))
    if topic == "%DLQ%g":
        assert properties(record)["DELAY"] == "-1"


def test_a_retry_of_a_group_that_consumes_in_order_is_a_dead_letter(
    backend: FakeBackend, client: RemotingClient
) -> None:
    given = fields("%RETRY%ordered", 0, i="UNIQ_KEY\x01k\x02DELAY\x013\x02", j="1", l="1")
    assert client.ask(Code.SEND_MESSAGE_V2, given, b"x").code == Answer.SUCCESS
    assert records(backend)[-1].topic == "%DLQ%ordered"


@pytest.mark.parametrize(("level", "topic"), [("6", "%DLQ%g"), ("5", "SCHEDULE_TOPIC_XXXX")])
def test_a_new_master_knows_what_a_consumer_that_reads_in_order_gives_up(
    backend: FakeBackend, client: RemotingClient, level: str, topic: str
) -> None:
    """It has given no locks yet: 4.9.8's third attempt of 3 in order, and a second one of 3."""
    given = fields("%RETRY%g", 0, i=f"UNIQ_KEY\x01k\x02DELAY\x01{level}\x02", j="3", l="3")
    assert client.ask(Code.SEND_MESSAGE_V2, given, b"x").code == Answer.SUCCESS
    assert records(backend)[-1].topic == topic
