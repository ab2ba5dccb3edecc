"""Read ranges of queues from nodes on loopback: the real API server over a store in memory."""

import contextlib
import weakref
import zlib

import pytest

from hastore.client import Producer
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.consumer import range_reader
from hastore.config.model import ApiConfig
from hastore.errors import (
    ClientError,
    CorruptRecordError,
    PositionLostError,
    UnreachableError,
    UsageError,
)
from hastore.ha.rules.epochs import Standing
from hastore.record.codec import Host, build_record
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.api.server import ApiServer
from hastore.server.node import Node
from hastore.service import raise_failure
from hastore.spark.arrow import batch as arrow_batch
from hastore.spark.arrow import record_fields
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.record_fields import RecordFields
from hastore.spark.arrow.schema import project, source_schema
from hastore.spark.options.filters import Interval, WantedMessages
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.partitions import QueueRange, Stored
from hastore.spark.options.source_options import DEFAULT_PATIENCE, Patience, parse_options
from hastore.spark.read import servers
from hastore.spark.read.backend import QueuePlace
from hastore.spark.read.planning import plan
from hastore.spark.read.servers import ServerBackend, ServerHead
from hastore.store.message_reader import PullStatus
from tests.api_fakes import FakeBackend, FakeStore
from tests.server.kit import config_of, running
from tests.store.kit import scribble

HOST = Host(b"\x7f\0\0\1", 4242)
ALL = project(source_schema(include_headers=True, include_metadata=False))


def fill(store, count, *, body_bytes=10, queues=2):
    for n in range(count):
        record = build_record(
            "t",
            str(n).encode().rjust(body_bytes, b"."),
            queue_id=n % queues,
            properties=[("KEYS", f"k{n}"), ("from", "x")],
            born_timestamp_ms=n,
            born_host=HOST,
        )
        store.put_encoded([record])


@contextlib.contextmanager
def serving(*backends):
    with contextlib.ExitStack() as stack:
        for backend in backends:
            server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
            server.start()
            stack.callback(server.stop)
            backend.endpoint = server.endpoint
        nodes = {backend.node: backend.endpoint for backend in backends}
        for backend in backends:
            backend.nodes = nodes
        yield tuple(nodes.values())


def read(bootstrap, span, *, fail=True, patience=DEFAULT_PATIENCE):
    with ServerBackend(bootstrap, fail, None, patience) as backend:
        batches = list(backend.read_queue(span, BatchBuilder(ALL)))
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_range_is_read_exactly(monkeypatch):
    monkeypatch.setattr(range_reader, "PULL_BYTES", 4_000)
    node = FakeBackend()
    fill(node.store, 500)
    with serving(node) as bootstrap:
        rows = read(bootstrap, QueueRange("t", 1, 17, 230))
    assert [row["offset"] for row in rows] == list(range(17, 230))
    assert [int(row["value"].strip(b".")) for row in rows] == [2 * n + 1 for n in range(17, 230)]
    assert rows[0]["key"] == b"k35"
    assert rows[0]["headers"] == [{"key": "from", "value": b"x"}]


def test_many_ranges_need_one_survey_and_another_one_after_a_replica_that_refuses(monkeypatch):
    master, slave = FakeBackend(1), FakeBackend(2, writable=False)
    slave.master = 1
    surveys = []
    survey = range_reader.Requester.survey
    counted = lambda *args: surveys.append(1) or survey(*args)  # noqa: E731
    for backend in (master, slave):
        fill(backend.store, 40)
    with serving(master, slave) as bootstrap, ServerBackend(bootstrap, True) as backend:

        def offsets(queue, start):
            batches = backend.read_queue(QueueRange("t", queue, start, 20), BatchBuilder(ALL))
            return [offset for batch in batches for offset in batch["offset"].to_pylist()]

        monkeypatch.setattr(range_reader.Requester, "survey", counted)
        monkeypatch.setattr(range_reader, "SURVEY_AGAIN_S", 3_600.0)
        for start in range(10):
            assert offsets(start % 2, start) == [*range(start, 20)]
        assert len(surveys) == 1
        slave.removed = "it is no node of the group any more"
        assert offsets(0, 5) == [*range(5, 20)]
        assert len(surveys) == 2
        backend.available()  # a job looks whether its log was cut: its marks are of nodes of now
        before = len(surveys)
        assert offsets(1, 5) == [*range(5, 20)]
        assert len(surveys) > before


def test_the_fields_of_a_reply_that_is_one_batch_are_read_once(monkeypatch):
    node = FakeBackend()
    fill(node.store, 100)
    found = []

    class Counted(RecordFields):
        def __init__(self, *given):
            found.append(given)
            super().__init__(*given)

    for module in (arrow_batch, record_fields):
        monkeypatch.setattr(module, "RecordFields", Counted)
    with serving(node) as bootstrap:
        assert [row["offset"] for row in read(bootstrap, QueueRange("t", 1, 0, 50))] == [*range(50)]
        assert len(found) == 1
        rows = read(bootstrap, QueueRange("t", 1, 10, 20))
    assert [row["key"] for row in rows] == [f"k{2 * n + 1}".encode() for n in range(10, 20)]


def test_ranges_and_offsets_by_time_come_from_the_node():
    node = FakeBackend()
    fill(node.store, 10)
    with serving(node) as bootstrap, ServerBackend(bootstrap, True) as backend:
        available = backend.available()
        times = [backend.offset_by_time(TopicPartition("t", 0), ms) for ms in (0, 2**40 * 2)]
    assert available == {TopicPartition("t", 0): (0, 5), TopicPartition("t", 1): (0, 5)}
    assert times == [0, None]


def test_a_search_by_time_that_a_node_has_cut_short_is_no_limit(monkeypatch):
    """It ends before the message: an end there would leave out messages without an error."""
    node = FakeBackend()
    fill(node.store, 40)
    cut_short = [2]
    search = node.store.queue_offset_by_time

    def found(*args):
        node.store.time_spent = cut_short[0] > 0
        cut_short[0] -= 1
        return search(*args)

    node.store.queue_offset_by_time = found
    monkeypatch.setattr(servers, "TIME_PAUSE_S", 0.01)
    with serving(node) as bootstrap, ServerBackend(bootstrap, True) as backend:
        options = {"hastore.bootstrap.servers": bootstrap[0], "subscribe": "t"}
        read = parse_options({**options, "endingTimestamp": str(2**41)})
        pieces = plan(backend, read)
        assert [(p.partition, p.start, p.end) for p in pieces] == [(0, 0, 20), (1, 0, 20)]
        cut_short[0] = 1_000
        with pytest.raises(ClientError, match=r"t-0 .* cut short .* by offsets"):
            plan(backend, read)
        assert cut_short[0] == 1_000 - servers.TIME_TRIES


def test_queues_that_never_had_a_message_are_read_by_time_like_others():
    """A node lists them, and refuses to search them: it has no file of such a queue."""
    node = FakeBackend()
    node.store.put_encoded([build_change(TopicChange(TopicConfig("t", 4, 4)), 1)])
    fill(node.store, 40)
    given = {"subscribe": "t"}
    with serving(node) as bootstrap, ServerBackend(bootstrap, True) as backend:
        assert backend.available()[TopicPartition("t", 3)] == (0, 0)
        given["hastore.bootstrap.servers"] = bootstrap[0]
        for times in ({"startingTimestamp": "1"}, {"endingTimestamp": str(2**42)}):
            pieces = plan(backend, parse_options({**given, **times}))
            assert [(p.partition, p.start, p.end) for p in pieces] == [(0, 0, 20), (1, 0, 20)]
        assert backend.offset_by_time(TopicPartition("t", 3), 1) is None


def test_a_plan_by_time_looks_for_the_nodes_once_for_all_queues(requesters):
    """Each look waits for the nodes that do not answer: with one down, 0.2 s for each queue."""
    node = FakeBackend()
    node.store.default_queues = 16
    fill(node.store, 160, queues=16)
    times = {"startingTimestamp": "1", "endingTimestamp": str(2**42)}
    since = WantedMessages(times_ms=Interval(2**40, 2**42))
    with serving(node) as bootstrap, ServerBackend(bootstrap, True) as backend:
        given = {"hastore.bootstrap.servers": bootstrap[0], "subscribe": "t"}
        assert len(plan(backend, parse_options(given))) == 16
        others = len(requesters)
        assert len(plan(backend, parse_options({**given, **times}), since)) == 16
        searches = requesters[2 * others :]
        assert [one.surveys for one in searches] == [1]
        assert not searches[0].closing
        fill(node.store, 16, queues=16)
        pieces = plan(backend, parse_options({**given, **times}), since)
        assert {(p.start, p.end) for p in pieces} == {(0, 11)}
    assert all(one.closing for one in requesters)


def test_a_slave_is_read_first_and_the_master_if_it_lags(monkeypatch):
    master, slave = FakeBackend(1), FakeBackend(2, writable=False)
    slave.master = 1
    fill(master.store, 40)
    fill(slave.store, 20)
    asked = []
    for backend in (master, slave):
        pull = backend.store.reader.pull

        def spy(*args, node=backend.node, pull=pull, **more):
            asked.append(node)
            return pull(*args, **more)

        monkeypatch.setattr(backend.store, "pull", spy)
    with serving(master, slave) as bootstrap:
        rows = read(bootstrap, QueueRange("t", 0, 0, 20))
    assert [row["offset"] for row in rows] == list(range(20))
    assert asked[0] == 2
    assert 1 in asked  # the slave may answer its waiting pull after the master does


def test_an_offset_beyond_the_end_is_a_lost_position():
    node = FakeBackend()
    fill(node.store, 10)
    with serving(node) as bootstrap:
        with pytest.raises(PositionLostError, match="failOnDataLoss"):
            read(bootstrap, QueueRange("t", 0, 7, 9))
        assert read(bootstrap, QueueRange("t", 0, 7, 9), fail=False) == []


class TrimmedStore(FakeStore):
    """A store whose retention removed the first messages of each queue."""

    def pull(self, topic, queue_id, queue_offset, **more):
        found = super().pull(topic, queue_id, queue_offset, **more)
        if queue_offset < 3:
            found.status = PullStatus.OFFSET_TOO_SMALL
            found.records, found.count = b"", 0
        found.min_queue_offset = 3
        return found


def test_messages_that_retention_removed_are_a_lost_position():
    node = FakeBackend()
    node.store = TrimmedStore()
    fill(node.store, 10)
    with serving(node) as bootstrap:
        with pytest.raises(PositionLostError, match="before the first one kept, 3"):
            read(bootstrap, QueueRange("t", 0, 0, 5))
        rows = read(bootstrap, QueueRange("t", 0, 0, 5), fail=False)
        assert [row["offset"] for row in rows] == [3, 4]
        assert read(bootstrap, QueueRange("t", 0, 0, 2), fail=False) == []


def test_a_range_that_no_node_sends_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.5)
    monkeypatch.setattr(range_reader, "WARN_S", 0.0)
    warned = []
    monkeypatch.setattr(range_reader.log, "warning", lambda text, *values: warned.append(text))
    patience = Patience(later_s=1.0)
    slave = FakeBackend(writable=False)
    fill(slave.store, 10)
    span = QueueRange("t", 0, 0, 7)
    with (
        serving(slave) as bootstrap,
        pytest.raises(UnreachableError, match=r"queue 0 of 't' from offset 5 within 1 s.*Start a"),
    ):
        read(bootstrap, span, patience=patience)
    text = r"no node of tcp://127.0.0.1:9 sent .*hastore.bootstrap.servers.*raise.*retryTimeout"
    with pytest.raises(UnreachableError, match=text):
        read(("tcp://127.0.0.1:9",), span, patience=patience)
    assert len(warned) == 2  # once each


def test_an_invalid_address_is_refused():
    with pytest.raises(UsageError, match="tcp://HOST:PORT"):
        ServerBackend(("http://a:1",), True)


def test_spark_reads_from_a_node(spark):
    node = FakeBackend()
    fill(node.store, 300)
    with serving(node) as bootstrap:
        frame = (
            spark.read.format("hastore")
            .option("hastore.bootstrap.servers", ",".join(bootstrap))
            .option("subscribe", "t")
            .option("minPartitions", "4")
            .load()
        )
        rows = frame.selectExpr("CAST(value AS STRING) v", "offset").collect()
    assert sorted(int(row.v.strip(".")) for row in rows) == list(range(300))


COMPRESSED = {"queue_id": 0, "sys_flag": 1, "born_timestamp_ms": 1, "born_host": HOST}


def test_a_reply_that_decompresses_to_much_is_not_held_as_a_whole(monkeypatch):
    monkeypatch.setattr(arrow_batch, "MADE_BYTES_PER_BATCH", 1_000)
    bodies = [bytes([65 + n]) * 900 for n in range(9)]
    node = FakeBackend()
    for body in bodies:
        packed = zlib.compress(body)
        node.store.put_encoded([build_record("t", packed, **COMPRESSED)])
    made = []
    build = BatchBuilder.build

    def counted(*given):
        batch = build(*given)
        made.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(BatchBuilder, "build", counted)
    rows, held = [], 0
    with serving(node) as bootstrap, ServerBackend(bootstrap, True) as backend:
        for batch in backend.read_queue(QueueRange("t", 0, 0, 9), BatchBuilder(ALL)):
            rows += batch.to_pylist()
            held = max(held, sum(one() is not None for one in made))
    assert [row["value"] for row in rows] == bodies
    assert held <= 3


def test_damage_late_in_a_reply_that_decompresses_to_much_gives_no_row_twice(monkeypatch):
    monkeypatch.setattr(arrow_batch, "MADE_BYTES_PER_BATCH", 1_000)
    nodes = [FakeBackend(), FakeBackend()]
    for n in range(9):
        packed = zlib.compress(bytes([65 + n]) * 900)
        for node in nodes:
            node.store.put_encoded([build_record("t", packed, **COMPRESSED)])
    seen = []
    check = RecordFields.check_bodies

    def damaged_once(self, bodies):
        seen.append(1)
        if len(seen) == 6:
            raise CorruptRecordError("damage")
        check(self, bodies)

    monkeypatch.setattr(RecordFields, "check_bodies", damaged_once)
    with serving(nodes[0]) as first, serving(nodes[1]) as second:
        nodes[0].nodes = nodes[1].nodes = {1: first[0], 2: second[0]}
        rows = read((*first, *second), QueueRange("t", 0, 0, 9))
    assert [row["offset"] for row in rows] == list(range(9))


def test_a_batch_read_has_all_that_was_readable_or_says_what_it_lacks(monkeypatch, tmp_path):
    """The queues of a node whose replay lags, or has stopped, end before its log does."""

    def bodies(fail=True):
        options = parse_options(
            {"hastore.bootstrap.servers": address, "subscribe": "t", "failOnDataLoss": str(fail)}
        )
        with ServerBackend((address,), fail) as backend:
            spans = plan(backend, options)
        return sum(span.end - span.start for span in spans)

    with running(Node(config_of(tmp_path), lambda: None)) as node:
        address, replay = node.api.endpoint, node.store.replay
        with Producer([address]) as producer, contextlib.ExitStack() as stops:
            producer.send_sync("t", b"0")
            assert bodies() == 1
            stops.enter_context(replay.paused())
            producer.send_sync("t", b"1")
            slept, real = [], SocketTransport.sleep

            def sleep(transport, seconds):
                if seconds != 0.01:  # it is the producer
                    return real(transport, seconds)
                slept.append(seconds)
                stops.close()
                return replay.wait_dispatched(node.store.max_offset, 60)

            with monkeypatch.context() as patch:
                patch.setattr(SocketTransport, "sleep", sleep)
                assert bodies() == 2 and slept
            stops.enter_context(replay.paused())
            producer.send_sync("t", b"2")
            monkeypatch.setattr(servers, "REPLAY_S", 0.0)
            with pytest.raises(ClientError, match="node 1 .* leave out .*: it is late; read again"):
                bodies()
            assert bodies(fail=False) == 2
            monkeypatch.setattr(replay, "blocked_reason", "replay stopped at offset 9: no room")
            with pytest.raises(ClientError, match="stopped at offset 9: no room; read again"):
                bodies()


def test_a_late_replay_and_damage_that_was_read_before_are_no_other_log(tmp_path):
    config = config_of(tmp_path / "store")
    with running(Node(config, lambda: None)) as node, contextlib.ExitStack() as paused:
        sent = []
        with Producer([node.api.endpoint]) as producer:
            for number in range(15):
                if number == 5:
                    assert node.store.wait_dispatched(node.store.max_offset, 60)
                    paused.enter_context(node.store.replay.paused())
                sent.append(producer.send_sync("t", b"body-%d" % number, queue=0))
        head = ServerHead((node.api.endpoint,))
        head.available(["t"])
        queue = TopicPartition("t", 0)
        places = {queue: QueuePlace(15, Stored(head.token()[1], sent[14].offset))}
        assert head.check(places)[queue].standing is Standing.BEHIND
        paused.close()
        assert node.store.wait_dispatched(node.store.max_offset, 60)
        assert head.check(places)[queue].standing is Standing.AGREED
        (file,) = (tmp_path / "store" / "commitlog").iterdir()
        scribble(str(file), file.read_bytes().index(b"body-14"), b"BODY")
        assert head.check(places)[queue].standing is not Standing.LOST
        head.close()
