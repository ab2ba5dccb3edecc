"""A slave of a RocketMQ master asks it for its tables: what it keeps, and what never harms them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.classic_key import Credentials, read_credentials
from hastore.errors import ConfigError
from hastore.fs.filesystem import REAL
from hastore.protocol.remoting import Answer, Code, Frame, RemotingWire, answer_to, encode_frame
from hastore.record.delays import DEFAULT_LEVELS
from hastore.security.rocketmq_acl import ACCESS_KEY, SIGNATURE, signer
from hastore.server import broker_client
from hastore.server.broker_tables import (
    DELAYS,
    GROUPS,
    POSITIONS,
    TABLES,
    TOPICS,
    LogRange,
    Table,
    read_topics,
)
from hastore.server.broker_tables_service import BrokerTables, broker_address
from hastore.server.take_over import read_offsets
from hastore.service import raise_failure

GOOD = {
    TOPICS: b'{"dataVersion":{"counter":1},"topicConfigTable":{"T":{"perm":6}}}',
    POSITIONS: b'{"offsetTable":{"T@g":{0:5,1:6}}}',
    DELAYS: b'{"offsetTable":{1:7,2:0}}',
    GROUPS: b'{"subscriptionGroupTable":{"g":{"retryMaxTimes":3}}}',
}
Reply = Callable[[socket.socket, Frame], None]


def body(raw: bytes) -> Reply:
    return lambda sock, asked: sock.sendall(encode_frame(answer_to(asked, 0, {}, raw, None)))


def code(number: int) -> Reply:
    def send(sock: socket.socket, asked: Frame) -> None:
        sock.sendall(encode_frame(answer_to(asked, number, {}, b"", "no right")))

    return send


def bytes_only(raw: bytes) -> Reply:
    def send(sock: socket.socket, _: Frame) -> None:
        sock.sendall(raw)
        sock.shutdown(socket.SHUT_WR)

    return send


def silence(_sock: socket.socket, _asked: Frame) -> None:
    pass


class Broker:
    """Answers as the test says."""

    def __init__(self) -> None:
        self.replies: dict[int, Reply] = {}
        self.asked: list[Frame] = []
        self.give(GOOD)
        self.has_log(0, 5000)
        self.has_settings("brokerName=g0")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def give(self, tables: dict[Table, bytes]) -> None:
        self.replies.update({table.code: body(raw) for table, raw in tables.items()})

    def has_log(self, first: object, end: object) -> None:
        table = {"commitLogMinOffset": first, "commitLogMaxOffset": end, "brokerVersion": "1"}
        raw = json.dumps({"table": table}).encode()
        self.replies[Code.GET_BROKER_RUNTIME_INFO] = body(raw)

    def has_settings(self, *lines: str) -> None:
        """As RocketMQ 5.3.3 and 4.9 write them."""
        raw = "".join(f"{line}\n" for line in ("brokerId=0", *lines, "storePathRootDir=/a=b"))
        self.replies[Code.GET_BROKER_CONFIG] = body(raw.encode())

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(sock,), daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        wire = RemotingWire()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError), sock:
            while data := sock.recv(65_536):
                for asked in wire.receive(data):
                    self.asked.append(asked)
                    # A question of its own and a late answer come first.
                    sock.sendall(encode_frame(Frame(40, 1, 2)))
                    sock.sendall(encode_frame(answer_to(Frame(43, 999), 0, {}, b"late", None)))
                    self.replies[asked.code](sock, asked)

    def close(self) -> None:
        self._listener.close()


class Slave:
    def __init__(self, root: Path, broker: Broker, key: Path | None = None) -> None:
        self.root = root
        self.follows = True
        self.log: LogRange | None = LogRange(0, 5000)
        self.service = BrokerTables(
            REAL, str(root), broker.address,
            lambda: None if key is None else read_credentials(str(key)), SYSTEM_CLOCK,
            group="g0", follows=lambda: self.follows, own_log=lambda: self.log,
            file_size=1 << 30, on_failure=raise_failure,
        )  # fmt: skip

    def file(self, table: Table) -> bytes:
        path = self.root / table.file
        return path.read_bytes() if path.exists() else b""


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.close()


@pytest.fixture
def slave(tmp_path: Path, broker: Broker) -> Slave:
    return Slave(tmp_path, broker)


def test_all_tables_are_kept(slave: Slave, broker: Broker) -> None:
    slave.service.turn()
    assert slave.service.problem is None and slave.service.taken_ms is not None
    assert {table: slave.file(table) for table in TABLES} == GOOD
    assert [frame.code for frame in broker.asked] == [21, 43, 45, 201, 28, 26]
    assert read_offsets(REAL, str(slave.root)) == {1: 7, 2: 0}


def test_later_answers_replace_it_and_what_they_do_not_name_stays(
    slave: Slave, broker: Broker
) -> None:
    slave.service.turn()
    broker.give({
        POSITIONS: b'{"offsetTable":{"T@g":{0:2,1:9},"T@h":{0:1}}}',
        DELAYS: b'{"offsetTable":{1:8}}',
        TOPICS: b'{"topicConfigTable":{"U":{"perm":6}}}',
    })  # fmt: skip
    slave.service.turn()
    assert slave.file(POSITIONS) == b'{"offsetTable":{"T@g":{0:2,1:9},"T@h":{0:1}}}'
    assert slave.file(DELAYS) == b'{"offsetTable":{1:8,2:0}}'
    assert b'"T"' not in slave.file(TOPICS)
    broker.give({POSITIONS: b'{"offsetTable":{}}', DELAYS: b'{"offsetTable":{}}'})
    slave.service.turn()  # a broker that has lost its own files
    assert b'"T@g":{0:2,1:9}' in slave.file(POSITIONS) and b"1:8" in slave.file(DELAYS)


def test_positions_of_a_deleted_topic_go(slave: Slave, broker: Broker) -> None:
    """It may be made again, and begins at 0 then."""
    both = b'{"topicConfigTable":{"T":{"perm":6},"U":{"perm":6}}}'
    broker.give({TOPICS: both, POSITIONS: b'{"offsetTable":{"T@g":{0:5},"T@h":{0:4},"U@g":{0:3}}}'})
    slave.service.turn()
    broker.give({
        TOPICS: b'{"topicConfigTable":{"U":{"perm":6}}}',
        POSITIONS: b'{"offsetTable":{"T@h":{0:4}}}',
    })  # fmt: skip
    slave.service.turn()
    assert slave.file(POSITIONS) == b'{"offsetTable":{"T@h":{0:4},"U@g":{0:3}}}'
    broker.give({TOPICS: both})
    slave.service.turn()
    assert slave.file(POSITIONS) == b'{"offsetTable":{"T@h":{0:4},"U@g":{0:3}}}'


def test_nothing_is_written_for_the_same_answer(slave: Slave) -> None:
    slave.service.turn()
    for table in TABLES:
        os.utime(slave.root / table.file, (1, 1))
    slave.service.turn()
    assert {int((slave.root / table.file).stat().st_mtime) for table in TABLES} == {1}


def test_a_damaged_file_of_before_is_replaced(slave: Slave) -> None:
    (slave.root / "config").mkdir()
    (slave.root / POSITIONS.file).write_bytes(b'{"offsetTable":{"T@x":{0:')
    slave.service.turn()
    assert slave.file(POSITIONS) == GOOD[POSITIONS]


BAD: dict[str, Reply] = {
    "refused": code(Answer.NO_PERMISSION),
    "not known": code(Answer.REQUEST_CODE_NOT_SUPPORTED),
    "no JSON": body(b"<html>"),
    "empty": body(b""),
    "another table": body(b'{"other":{}}'),
    "cut JSON": body(b'{"offsetTable":{"T@g":{0:'),
    "no frame": bytes_only(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a huge frame": bytes_only(struct.pack(">I", 2**31)),
    "a tiny frame": bytes_only(struct.pack(">I", 1) + b"x"),
    "a wrong header": bytes_only(struct.pack(">II", 8, 2**24 * 9) + b"abcd"),
    "cut frame": bytes_only(struct.pack(">II", 100, 8) + b"abc"),
    "silence": silence,
    "the end": bytes_only(b""),
}


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("table", [TOPICS, POSITIONS, DELAYS, GROUPS])
def test_what_is_no_answer_changes_nothing_and_is_said_once(
    slave: Slave, broker: Broker, how: str, table: Table,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    slave.service.turn()
    monkeypatch.setattr(broker_client, "TIMEOUT_MS", 100.0 if how == "silence" else 60_000.0)
    broker.replies[table.code] = BAD[how]
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            slave.service.turn()
    assert {each: slave.file(each) for each in TABLES} == GOOD
    assert slave.service.problem is not None and len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert broker.address in line and "ha.classic_broker" in line
    assert slave.service.problems() == [line]
    caplog.clear()
    broker.give(GOOD)
    with caplog.at_level(logging.INFO):
        slave.service.turn()
        slave.service.turn()
    assert slave.service.problem is None and not slave.service.problems()
    assert len(caplog.records) == 1  # it is well again


def test_a_refused_table_does_not_keep_the_others_from_being_kept(
    slave: Slave, broker: Broker
) -> None:
    broker.replies[TOPICS.code] = code(Answer.NO_PERMISSION)
    slave.service.turn()
    assert slave.file(POSITIONS) == GOOD[POSITIONS] and slave.file(GROUPS) == GOOD[GROUPS]
    assert not slave.file(TOPICS)
    assert "refuses request 21 with 16: no right" in str(slave.service.problem)


def test_nobody_there(slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker.close()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            slave.service.turn()
    assert len(caplog.records) == 1 and "refused" in caplog.text


def test_a_name_that_no_host_can_have(tmp_path: Path, broker: Broker) -> None:
    broker.address = "a" * 64 + ".x:10911"
    slave = Slave(tmp_path, broker)
    slave.service.turn()
    assert "no name of a host" in str(slave.service.problem)


def test_what_cannot_be_is_named_once(
    slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.give({TOPICS: b'{"topicConfigTable":{"T":{"perm":6},"X":{"perm":99}}}'})
    with caplog.at_level(logging.WARNING):
        slave.service.turn()
        broker.give({TOPICS: b'{"topicConfigTable":{"T":{"perm":4},"X":{"perm":99}}}'})
        slave.service.turn()
    assert len(caplog.records) == 1 and "topic 'X'" in caplog.text
    assert json.loads(slave.file(TOPICS))["topicConfigTable"]["T"]["perm"] == 4


def test_a_compaction_topic_is_kept_and_what_is_not_in_the_log_is_named(
    slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """After the promotion such a topic was empty, and nobody had said so."""
    broker.give({
        TOPICS: b'{"topicConfigTable":{"S":{"attributes":{"cleanup.policy":"COMPACTION"}},"T":{}}}'
    })  # fmt: skip
    slave.service.turn()
    slave.service.turn()
    (line,) = [one.getMessage() for one in caplog.records]
    assert "topic 'S': the messages that compaction" in line and "'T'" not in line
    assert slave.service.notes() == [line] and not slave.service.problems()
    assert [config.name for config in read_topics(slave.file(TOPICS)).found] == ["S", "T"]


def test_a_static_topic_is_kept_and_its_mapping_is_named(
    slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Its positions in logical queues do not fit after the promotion, and nobody had said so."""
    broker.give({
        TOPICS: b'{"topicConfigTable":{"S":{},"T":{}},"topicQueueMappingDetailMap":{"S":{"bname":'
        b'"g0","hostedQueues":{0:[{"bname":"g0","logicOffset":0,"queueId":0}]},"totalQueues":1}}}'
    })  # fmt: skip
    slave.service.turn()
    slave.service.turn()
    (line,) = [one.getMessage() for one in caplog.records]
    assert "topic 'S': the mapping of a static topic's logical queues" in line and "'T'" not in line
    assert slave.service.notes() == [line] and not slave.service.problems()
    assert [config.name for config in read_topics(slave.file(TOPICS)).found] == ["S", "T"]


@pytest.mark.parametrize("mapped", [b"", b',"topicQueueMappingDetailMap":null'])
def test_topics_without_a_mapping_are_whole(slave: Slave, broker: Broker, mapped: bytes) -> None:
    name = b"topicQueueMappingDetailMap"
    broker.give({TOPICS: b'{"topicConfigTable":{"%b":{}}%b}' % (name, mapped)})
    slave.service.turn()
    assert not slave.service.notes() and slave.service.problem is None


def test_only_a_follower_asks_and_writes(slave: Slave, broker: Broker) -> None:
    slave.follows = False
    slave.service.turn()
    assert not broker.asked and not slave.file(POSITIONS)
    slave.follows = True

    def promoted(sock: socket.socket, asked: Frame) -> None:
        slave.follows = False
        body(GOOD[POSITIONS])(sock, asked)

    broker.replies[POSITIONS.code] = promoted
    slave.service.turn()
    assert slave.file(TOPICS) and not slave.file(POSITIONS)


def test_requests_are_signed(tmp_path: Path, broker: Broker) -> None:
    key = tmp_path / "tools.yml"
    key.write_text('accessKey: "rocketmq2"\nsecretKey: 12345678\n')
    key.chmod(0o600)
    slave = Slave(tmp_path, broker, key)
    slave.service.turn()
    assert len(broker.asked) == 6
    for asked in broker.asked:
        fields = asked.fields
        assert fields[ACCESS_KEY] == "rocketmq2"
        assert signer(["12345678"], fields, b"", fields[SIGNATURE]) == "12345678"
    key.chmod(0o644)
    slave.service.turn()
    assert str(key) in str(slave.service.problem)


def test_how_much_of_the_brokers_log_is_missing(slave: Slave, broker: Broker) -> None:
    assert slave.service.lag() is None
    slave.log = LogRange(0, 4000)
    broker.has_log("0", "5000")
    slave.service.turn()
    assert slave.service.lag() == 1000 and not slave.service.problems()
    slave.follows = False  # the broker was stopped, or is gone
    assert "lacks 1000 bytes" in slave.service.problems()[0]
    slave.log = LogRange(0, 6000)  # what came since it was asked
    assert slave.service.lag() == 0 and not slave.service.problems()
    slave.log = None  # this node was promoted
    assert slave.service.lag() is None and not slave.service.problems()


def test_a_broker_that_has_removed_the_place_where_this_log_ends(
    slave: Slave, broker: Broker
) -> None:
    """It sends heartbeats, and nothing more for ever."""
    broker.has_log("5000", "9000")
    slave.service.turn()
    assert not slave.service.problems(), "it goes on there"
    broker.has_log("5001", "9000")
    slave.service.turn()
    for slave.follows in (True, False):
        (problem,) = slave.service.problems()
        assert "ends at 5000" in problem and "nothing before 5001" in problem
    slave.log = LogRange(0, 0)  # an empty store begins where the broker begins
    assert not slave.service.problems()


@pytest.mark.parametrize("how", BAD)
def test_a_broker_that_does_not_say_where_its_log_is(
    slave: Slave, broker: Broker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slave.service.turn()
    monkeypatch.setattr(broker_client, "TIMEOUT_MS", 100.0 if how == "silence" else 60_000.0)
    broker.replies[Code.GET_BROKER_RUNTIME_INFO] = BAD[how]
    slave.service.turn()
    assert slave.service.lag() == 0 and slave.service.problem is None


@pytest.mark.parametrize("first", [-1, None, "x", 1.5, "9" * 30])
def test_a_place_that_no_log_has(slave: Slave, broker: Broker, first: object) -> None:
    broker.has_log(first, 7000)
    slave.service.turn()
    assert slave.service.lag() is None


def test_a_broker_with_another_name_than_the_group(
    slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Broadcasting consumers keep positions by that name: they skipped what they had not read."""
    slave.service.turn()
    assert slave.service.notes() == [] and not caplog.records
    broker.has_settings("brokerName=broker-a")
    slave.service.turn()
    slave.service.turn()
    (note,) = slave.service.notes()
    assert "brokerName broker-a, and this group is g0" in note and "broadcasting" in note
    assert [one.getMessage() for one in caplog.records] == [f"before the migration: {note}"]
    assert not slave.service.problems()
    slave.follows = False  # the broker was stopped: it is not too late
    assert slave.service.notes() == [note]
    slave.log = None  # this node was promoted
    assert slave.service.notes() == []


def test_a_broker_whose_log_files_have_another_size(
    slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Replay stopped at the broker's first blank, and nothing named the reason."""
    broker.has_settings("brokerName=g0", "mappedFileSizeCommitLog=1073741824")
    slave.service.turn()
    assert slave.service.problems() == [] and not caplog.records
    broker.has_settings("brokerName=g0", "mappedFileSizeCommitLog=536870912")
    slave.service.turn()
    slave.service.turn()
    (problem,) = slave.service.problems()
    assert "536870912 bytes (mappedFileSizeCommitLog), and those of this node 1073741824" in problem
    assert [one.getMessage() for one in caplog.records] == [problem]
    slave.log = None  # this node was promoted
    assert slave.service.problems() == []


def test_a_broker_with_other_delays(
    slave: Slave, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """What waited for 10 minutes there came after a second here, and nothing said so."""
    broker.has_settings("brokerName=g0", f"messageDelayLevel={DEFAULT_LEVELS} ")
    slave.service.turn()
    assert slave.service.notes() == [] and not caplog.records
    for levels in ("10m 1h", f"{DEFAULT_LEVELS} 3h", "1x"):
        broker.has_settings("brokerName=g0", f"messageDelayLevel={levels}")
        slave.service.turn()
        (note,) = slave.service.notes()
        assert f"messageDelayLevel '{levels}'" in note and f"is '{DEFAULT_LEVELS}'" in note
    slave.log = None  # this node was promoted
    assert slave.service.notes() == []


def test_a_broker_with_light_queues(slave: Slave, broker: Broker) -> None:
    broker.has_settings("brokerName=g0", "enableLmq=true", "enableMultiDispatch=false")
    slave.service.turn()
    assert slave.service.notes() == []  # nothing comes into them
    broker.has_settings("enableMultiDispatch=true", "enableLmq=true", "brokerName=g0")
    slave.service.turn()
    (note,) = slave.service.notes()
    assert "light queues" in note and "do not move" in note


@pytest.mark.parametrize("how", BAD)
def test_a_broker_that_does_not_say_its_settings(
    slave: Slave, broker: Broker, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.has_settings("brokerName=broker-a")
    slave.service.turn()
    monkeypatch.setattr(broker_client, "TIMEOUT_MS", 100.0 if how == "silence" else 60_000.0)
    broker.replies[Code.GET_BROKER_CONFIG] = BAD[how]
    slave.service.turn()
    assert len(slave.service.notes()) == 1 and slave.service.problem is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("accessKey: a\nsecretKey: b\n", Credentials("a", "b")),
        ("# x\nsecretKey: 'b b'\n", None),
        ("accessKey: a\n", None),
        ("", None),
        ('accessKey:   "a:1"  \nsecretKey: "s#x"', Credentials("a:1", "s#x")),
        ("accessKey: \xe9\nsecretKey: b\n", None),
        ("\ufeffaccessKey: a\r\nsecretKey: 'b'\r\n", Credentials("a", "b")),
        ("accessKey: a # of mqadmin\nsecretKey: b#c  # its secret\n", Credentials("a", "b#c")),
    ],
)
def test_credentials(tmp_path: Path, text: str, found: Credentials | None) -> None:
    path = tmp_path / "key"
    path.write_bytes(text.encode())
    path.chmod(0o600)
    if found is None:
        with pytest.raises(ConfigError, match="accessKey: NAME"):
            read_credentials(str(path))
    else:
        assert read_credentials(str(path)) == found


def test_where_the_broker_is() -> None:
    assert broker_address("10.0.0.1:10912", None) == "10.0.0.1:10911"
    assert broker_address("[::1]:10912", None) == "[::1]:10911"
    assert broker_address("10.0.0.1:10912", "b:1") == "b:1"
