"""Ends and positions, from a store's files and from nodes: a cut, retention, an unreadable end."""

import contextlib
import json

import pytest

from hastore.config.model import ApiConfig
from hastore.errors import (
    ClientError,
    CorruptRecordError,
    PositionLostError,
    StoreBrokenError,
    UnreachableError,
)
from hastore.fs.filesystem import REAL
from hastore.ha.rules.epochs import FORGOTTEN_EPOCH, Standing
from hastore.record.codec import build_record
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.partitions import QueueRange, Stored
from hastore.spark.options.source_options import Patience, parse_options, parse_stream_options
from hastore.spark.read import servers
from hastore.spark.read.backend import QueuePlace
from hastore.spark.read.planning import plan
from hastore.spark.read.servers import ServerBackend, ServerHead
from hastore.spark.read.stores import EpochFile, PathBackend, PathHead, valid_end
from hastore.spark.stream_driver import StreamDriver
from hastore.store.offline.reader import StoreReader
from hastore.store.state.limits import Limits, LimitsPage
from tests.api_fakes import FakeBackend
from tests.spark.read.test_server_reader import ALL, HOST, fill, serving
from tests.spark.stores import numbered, write_store

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class HastoreStore:
    """A store of 20 messages in two queues, with the files by which a node states its limits."""

    def __init__(self, root, messages=20):
        self.root = root
        self.placed = write_store(root, numbered(messages, queues=2))
        self.page = LimitsPage(REAL, str(root))
        self.end = self.placed[-1].physical_offset + self.placed[-1].size
        (root / "hastore").mkdir()
        self.page.open(Limits(file_size=1 << 20, record_end=self.end, readable_offset=self.end))
        self.set_history([65_537, 0])

    def set_history(self, *entries):
        path = self.root / "hastore" / "node.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"history": [[*entry, 1, [1, 2]] for entry in entries]}))
        new.replace(path)

    def set_readable(self, offset):
        self.page.update(readable=offset)

    def at(self, number):
        return self.placed[number].physical_offset


@pytest.fixture
def store(tmp_path):
    made = HastoreStore(tmp_path)
    yield made
    made.page.close()


def standings(head, **places):
    verdicts = head.check({TopicPartition("t", int(k[1:])): p for k, p in places.items()})
    return {f"q{key.partition}": verdict for key, verdict in verdicts.items()}


def test_a_path_gives_ends_with_epochs_up_to_the_readable_offset(store):
    head = PathHead(str(store.root))
    store.set_readable(store.at(15))
    assert head.available(("t", "no such")) == {T0: (0, 8), T1: (0, 7)}
    assert head.available() == head.available({"t"})
    assert head.locate({T0: 8, T1: 3}, {T0: 0, T1: 0}) == {
        T0: QueuePlace(8, Stored(65_537, store.at(14))),
        T1: QueuePlace(3, Stored(65_537, store.at(5))),
    }
    assert head.token() == ((65_537, 0),)
    assert head.limit_offset() == store.at(15)


def test_a_path_finds_a_cut_and_the_common_position(store):
    head = PathHead(str(store.root))
    before = head.locate({T0: 10, T1: 4}, {T0: 0, T1: 0})
    store.set_history([65_537, 0], [131_074, store.at(12)])
    found = standings(head, q0=before[T0], q1=before[T1])
    assert found["q0"].standing is Standing.LOST
    assert found["q0"].common == QueuePlace(6, Stored(65_537, store.at(10)))
    assert found["q1"].standing is Standing.AGREED
    assert (
        standings(head, q0=QueuePlace(10, Stored(131_074, store.at(18))))["q0"][0]
        is Standing.AGREED
    )
    store.set_readable(store.at(14))
    assert (
        standings(head, q0=QueuePlace(10, Stored(131_074, store.at(18))))["q0"][0]
        is Standing.BEHIND
    )


def test_a_path_gives_the_readable_end_if_the_log_changes_after_it_was_listed(store, monkeypatch):
    head = PathHead(str(store.root))
    ends = {key: span.end for key, span in head.available().items()}
    store.set_readable(store.at(12))
    assert head.locate(ends, {T0: 0, T1: 6}) == {T0: QueuePlace(6, Stored(65_537, store.at(10)))}
    assert head.locate({T0: 8}, {T0: 8}) == {T0: QueuePlace(8)}
    monkeypatch.setattr(StoreReader, "min_offset", store.at(12))  # retention
    assert head.locate({T0: 5}, {T0: 0}) == {T0: QueuePlace(6)}


@pytest.mark.parametrize(("starting", "look"), [("latest", 1), ('{"t":{"0":9,"1":-1}}', 2)])
def test_a_query_begins_at_the_end_of_a_log_that_is_cut_meanwhile(
    store, monkeypatch, starting, look
):
    given = {"path": str(store.root), "subscribe": "t", "startingOffsets": starting}
    head = PathHead(given["path"])
    locate, looks = head.locate, []

    def cut(*args):
        looks.append(args)
        if len(looks) == look:
            store.set_readable(store.at(12))
            store.set_history([65_537, 0], [131_074, store.at(12)])
        return locate(*args)

    monkeypatch.setattr(head, "locate", cut)
    places = StreamDriver(head, parse_stream_options(given)).initial_offset().places
    assert places[T0] == QueuePlace(6, Stored(65_537, store.at(10)))
    assert places[T1].next == (6 if look == 1 else 10)


def test_a_rocketmq_store_has_no_epochs_but_a_changed_record_is_noticed(tmp_path):
    write_store(tmp_path, numbered(20))
    head = PathHead(str(tmp_path))
    assert head.available() == {T0: (0, 20)}
    assert head.token() is None
    place = head.locate({T0: 20}, {T0: 0})[T0]
    assert place.before.epoch is None
    assert standings(head, q0=place)["q0"].standing is Standing.AGREED
    moved = QueuePlace(20, Stored(None, place.before.offset + 1))
    assert standings(head, q0=moved)["q0"] == (Standing.LOST, QueuePlace(0))
    beyond = standings(head, q0=QueuePlace(25, Stored(None, 9_999)))["q0"]
    assert beyond == (Standing.LOST, place)


def test_a_path_finds_that_the_log_is_another_one_of_the_same_epoch(store):
    head = PathHead(str(store.root))
    other = QueuePlace(7, Stored(65_537, store.at(12) + 1))
    assert standings(head, q0=other)["q0"] == (Standing.LOST, QueuePlace(0))
    # Eleven messages of the queue, but the log is longer: the last of the ten is beyond.
    beyond = QueuePlace(11, Stored(65_537, store.at(17)))
    assert standings(head, q0=beyond)["q0"] == (Standing.LOST, QueuePlace(0))


def test_over_a_path_only_what_differs_for_certain_is_another_log(store, monkeypatch):
    head = PathHead(str(store.root))
    last = QueuePlace(10, Stored(65_537, store.at(18)))
    not_replayed = QueuePlace(11, Stored(65_537, store.at(19)))
    forgotten = QueuePlace(7, Stored(FORGOTTEN_EPOCH, store.at(12) + 1))
    for place in (last, not_replayed, forgotten):
        assert standings(head, q0=place)["q0"] == (Standing.AGREED, place)
    store.set_readable(store.at(12))  # this replica is behind
    assert standings(head, q0=last)["q0"] == (Standing.BEHIND, last)
    store.set_readable(store.end)
    gone = QueuePlace(5, Stored(65_537, store.at(8) + 1))
    monkeypatch.setattr(StoreReader, "min_offset", store.at(12))  # retention
    assert standings(head, q0=gone)["q0"] == (Standing.AGREED, gone)


def test_a_task_over_a_path_stops_where_a_later_epoch_begins(store, monkeypatch):
    last = Stored(65_537, store.at(18))
    span = QueueRange("t", 0, 0, 10, store.end, last=last)
    with PathBackend(str(store.root), False) as backend:
        batches = backend.read_queue(span, BatchBuilder(ALL))
        store.set_history([65_537, 0], [131_074, store.at(12)])  # cut, and grown again
        assert [row["offset"] for b in batches for row in b.to_pylist()] == list(range(6))
    with (
        PathBackend(str(store.root), True) as backend,
        pytest.raises(PositionLostError, match="failOnDataLoss"),
    ):
        list(backend.read_queue(span, BatchBuilder(ALL)))


def test_a_task_over_a_path_keeps_what_a_cut_in_the_middle_left(store):
    store.set_readable(store.at(12))
    with PathBackend(str(store.root), False) as backend:
        batches = backend.read_queue(QueueRange("t", 0, 0, 10, store.end), BatchBuilder(ALL))
        assert [row["offset"] for b in batches for row in b.to_pylist()] == list(range(6))


@pytest.mark.parametrize("text", ["{", '{"history": 5}', '{"history": [[1]]}', "{}"])
def test_a_damaged_state_is_named(tmp_path, text):
    (tmp_path / "hastore").mkdir()
    (tmp_path / "hastore" / "node.json").write_text(text)
    with pytest.raises(StoreBrokenError, match=r"node\.json is not the state of a node"):
        EpochFile(str(tmp_path)).read()


@pytest.mark.parametrize(
    ("history", "last", "end"),
    [
        (None, Stored(5, 100), None),
        (((5, 0), (7, 300)), None, None),
        (((5, 0), (7, 300)), Stored(None, 100), None),
        (((5, 0), (7, 300)), Stored(5, 299), 300),
        (((5, 0), (7, 300)), Stored(5, 300), 300),  # cut
        (((5, 0), (7, 300)), Stored(7, 900), None),
        (((5, 0), (7, 300)), Stored(6, 900), 0),  # nobody knows where epoch 6 began
        (((5, 0),), Stored(6, 900), None),  # this node does not know of epoch 6 yet
        (((65_537, 0),), Stored(FORGOTTEN_EPOCH, 100), None),  # this node remembers more epochs
    ],
)
def test_where_the_records_of_a_log_end(history, last, end):
    assert valid_end(history, last) == end


# -- nodes


def other_record(number):
    return build_record(
        "other",
        str(number).encode(),
        queue_id=0,
        properties=[],
        born_timestamp_ms=number,
        born_host=HOST,
    )


def cut(node, count, epoch):
    """Remove the last messages of a fake node, as a failover does; it goes on in a new epoch."""
    store = node.store
    at = sorted(store.starts)[-count]
    del store.log[at:]
    store.starts = {start for start in store.starts if start < at}
    for key, units in store.units.items():
        store.units[key] = [unit for unit in units if unit[0] < at]
    node.entries = [*node.entries, (epoch, at)]


ENDS = '{"t":{"0":9,"1":9}}'


def offsets_of(backend, piece):
    batches = backend.read_queue(piece, BatchBuilder(ALL))
    return [row["offset"] for batch in batches for row in batch.to_pylist()]


def test_nodes_give_ends_with_epochs():
    node = FakeBackend()
    fill(node.store, 10)
    with serving(node) as bootstrap:
        head = ServerHead(bootstrap)
        available = head.available(["t"])
        assert available == head.available() == {T0: (0, 5), T1: (0, 5)}
        assert head.available(["no"]) == {}
        found = head.locate({T0: 5, T1: 2}, {T0: 0, T1: 0})
        assert found[T0].next == 5
        assert found[T0].before == Stored(65_537, node.store.units["t", 0][4][0])
        assert found[T1] == QueuePlace(2, Stored(65_537, node.store.units["t", 1][1][0]))
        assert head.token() == (bootstrap[0], 65_537)
        assert head.check(found)[T1].standing is not Standing.LOST
        head.close()


def test_messages_that_are_not_confirmed_are_not_in_a_batch():
    node = FakeBackend()
    fill(node.store, 40)
    node.store.confirmed = node.store.units["t", 0][13][0]
    with serving(node) as bootstrap:
        head = ServerHead(bootstrap)
        ends = {key: span.end for key, span in head.available().items()}
        assert ends == {T0: 20, T1: 20}
        found = head.locate(ends, {T0: 0, T1: 5})
        assert {key: place.next for key, place in found.items()} == {T0: 13, T1: 13}
        assert head.locate({T0: 20}, {T0: 13}) == {}
        head.close()


def test_a_batch_read_is_not_planned_beyond_the_readable_offset():
    node = FakeBackend()
    fill(node.store, 40)
    node.store.confirmed = node.store.units["t", 0][13][0]
    node.store.queue_offset_by_time = lambda *_: 15  # not confirmed
    options = {"startingTimestamp": "9", "startingOffsetsByTimestampStrategy": "latest"}
    with serving(node) as bootstrap:
        given = {"hastore.bootstrap.servers": bootstrap[0], "subscribe": "t"}
        with ServerBackend(bootstrap, True) as backend:
            pieces = plan(backend, parse_options(given))
            assert [(p.partition, p.start, p.end) for p in pieces] == [(0, 0, 13), (1, 0, 13)]
            assert plan(backend, parse_options({**given, **options})) == []
            node.store.confirmed = 0
            assert plan(backend, parse_options(given)) == []


def test_nodes_find_a_cut_and_a_task_stops_there():
    node = FakeBackend()
    fill(node.store, 20)
    with serving(node) as bootstrap:
        head = ServerHead(bootstrap)
        head.available()
        places = head.locate({T0: 10, T1: 4}, {T0: 0, T1: 0})
        cut(node, 8, 131_073)
        fill(node.store, 20)
        verdicts = head.check(places)
        assert verdicts[T0].standing is Standing.LOST
        assert verdicts[T0].common == QueuePlace(6, Stored(65_537, node.store.units["t", 0][5][0]))
        assert verdicts[T1].standing is Standing.AGREED
        assert head.available() and head.token() == (bootstrap[0], 131_073)
        span = QueueRange("t", 0, 2, 10, last=places[T0].before)
        with ServerBackend(bootstrap, False) as backend:
            batches = list(backend.read_queue(span, BatchBuilder(ALL)))
        assert [r["offset"] for b in batches for r in b.to_pylist()] == [2, 3, 4, 5]
        with (
            ServerBackend(bootstrap, True) as backend,
            pytest.raises(PositionLostError, match="failOnDataLoss"),
        ):
            list(backend.read_queue(span, BatchBuilder(ALL)))
        head.close()


def test_a_batch_read_of_nodes_does_not_mix_two_histories():
    """It is planned before a failover that cuts messages; some of its tasks run after that."""
    node = FakeBackend()
    fill(node.store, 20)
    with serving(node) as bootstrap:
        given = {"hastore.bootstrap.servers": bootstrap[0], "subscribe": "t"}
        options = parse_options({**given, "maxRecordsPerPartition": "5", "endingOffsets": ENDS})
        with ServerBackend(bootstrap, True) as backend:
            first, second = [p for p in plan(backend, options) if p.partition == 0]
            assert offsets_of(backend, first) == [0, 1, 2, 3]
            assert offsets_of(backend, second) == [4, 5, 6, 7, 8]
            cut(node, 8, 131_073)  # offset 6 of t-0 and later
            fill(node.store, 40)
            assert offsets_of(backend, first) == [0, 1, 2, 3]
            with pytest.raises(PositionLostError, match="cut by a failover during the read"):
                offsets_of(backend, second)
        with ServerBackend(bootstrap, False) as backend:
            assert offsets_of(backend, second) == [4, 5]


def test_a_batch_read_of_a_path_does_not_mix_two_histories(store):
    given = {"path": str(store.root), "subscribe": "t", "endingOffsets": ENDS}
    with PathBackend(str(store.root), True) as backend:
        [first, *_] = plan(backend, parse_options(given))
        assert (first.partition, first.end) == (0, 9)
        assert offsets_of(backend, first) == list(range(9))
        store.set_history([65_537, 0], [131_074, store.at(12)])  # cut, and grown again
        with pytest.raises(PositionLostError, match="cut by a failover during the read"):
            offsets_of(backend, first)
    with PathBackend(str(store.root), False) as backend:
        assert offsets_of(backend, first) == list(range(6))


@pytest.mark.parametrize(("count", "others"), [(8, 0), (20, 0), (60, 0), (8, 40), (0, 0), (0, 9)])
def test_nodes_find_that_the_log_is_another_one_of_the_same_epoch(count, others):
    """As after all disks were lost: the first epoch of the new group is that of the old one."""
    old, new = FakeBackend(), FakeBackend()
    fill(old.store, 40)
    with serving(old) as bootstrap:
        head = ServerHead(bootstrap)
        places = head.locate({T0: 10, T1: 10}, {T0: 0, T1: 0})
        head.close()
    fill(new.store, count, body_bytes=30 if count > 20 else 9)
    for n in range(others):
        new.store.put_encoded([other_record(n)])
    with serving(new) as bootstrap:
        head = ServerHead(bootstrap)
        head.available(["t"])
        assert head.check(places)[T0] == (Standing.LOST, QueuePlace(0))
        head.close()


def test_of_nodes_only_what_differs_for_certain_is_another_log():
    node = FakeBackend()
    fill(node.store, 20)
    with serving(node) as bootstrap:
        head = ServerHead(bootstrap)
        head.available(["t"])
        places = head.locate({T0: 10}, {T0: 0})
        offset = places[T0].before.offset
        assert head.check(places)[T0] == (Standing.AGREED, places[T0])
        node.store.confirmed = offset  # its slaves are new: the record is not confirmed again
        assert head.check(places)[T0].standing is Standing.BEHIND
        node.store.confirmed = None
        later = {T0: QueuePlace(12, Stored(131_074, offset + 500))}
        assert head.check(later)[T0] == (Standing.BEHIND, later[T0])  # a master that was replaced
        node.writable = False
        behind = {T0: QueuePlace(12, Stored(65_537, offset + 500))}
        assert head.check(behind)[T0] == (Standing.BEHIND, behind[T0])  # a slave may lag
        unnamed = {T0: QueuePlace(5, Stored(FORGOTTEN_EPOCH, offset + 1))}
        assert head.check(unnamed)[T0].standing is not Standing.LOST
        head.close()


def test_a_master_that_dies_is_replaced_by_a_slave_and_that_by_the_next_master(monkeypatch):
    monkeypatch.setattr(servers, "ANSWER_S", 0.2)
    monkeypatch.setattr(servers, "SURVEY_S", 0.0)
    master, slave = FakeBackend(1), FakeBackend(2, writable=False)
    slave.master = 1
    fill(master.store, 40)
    fill(slave.store, 20)
    with serving(slave) as (second,):
        with serving(master) as (first,):
            head = ServerHead((first, second))
            assert head.available()[T0] == (0, 20)
            assert head.token() == (first, 65_537)
        assert head.available()[T0] == (0, 10)
        assert head.token() == (second, 65_537)
        slave.writable, slave.entries = True, [(65_537, 0), (131_074, len(slave.store.log))]
        fill(slave.store, 2)
        assert head.available()[T0] == (0, 11)
        assert head.token() == (second, 131_074)
        head.close()


def test_a_master_that_is_cut_off_from_its_group_is_left_for_its_successor(monkeypatch):
    """It answers, and does not know: a stream that asked it alone found nothing new for ever."""
    monkeypatch.setattr(servers, "SEARCH_AGAIN_S", 3_600.0)
    old, new = FakeBackend(1), FakeBackend(2, writable=False)
    new.master = 1
    for node in (old, new):
        fill(node.store, 20)
    with serving(old, new) as bootstrap, contextlib.closing(ServerHead(bootstrap)) as head:
        assert head.available()[T0] == (0, 10)
        new.writable, new.master = True, 2
        new.entries = [(65_537, 0), (131_074, len(new.store.log))]
        fill(new.store, 4)
        assert head.available()[T0] == (0, 10)
        assert head.token() == (bootstrap[0], 65_537)
        monkeypatch.setattr(servers, "SEARCH_AGAIN_S", 0.0)
        assert head.available()[T0] == (0, 12)
        assert head.token() == (bootstrap[1], 131_074)


def test_nodes_that_go_while_a_master_is_searched_for_are_waited_for(monkeypatch):
    monkeypatch.setattr(servers, "SEARCH_AGAIN_S", 0.0)
    node = FakeBackend()
    fill(node.store, 20)
    with serving(node) as bootstrap, contextlib.closing(ServerHead(bootstrap)) as head:
        head.available()
        choose, searches = head._choose, []

        def fail_once(timeout_s):
            searches.append(timeout_s)
            if len(searches) == 1:
                raise UnreachableError("all nodes are down, as in a restart")
            choose(timeout_s)

        head._choose = fail_once
        assert head.available()[T0] == (0, 10)
        assert len(searches) == 2


def test_a_stream_searches_by_time_at_the_node_that_it_follows(requesters, monkeypatch):
    monkeypatch.setattr(servers, "TIME_PAUSE_S", 0.01)
    master, slave = FakeBackend(1), FakeBackend(2, writable=False)
    slave.master = 1
    fill(master.store, 40)
    fill(slave.store, 20)
    future_ms = 2**42
    with serving(slave) as (second,):
        with serving(master) as (first,), contextlib.closing(ServerHead((first, second))) as head:
            assert head.available()[T1] == (0, 20)
            assert [head.offset_by_time(key, 0) for key in (T0, T1)] == [0, 0]
            assert head.offset_by_time(T1, future_ms) is None
            assert [one.surveys for one in requesters] == [1]
        with serving(master) as (first,):
            head = ServerHead((first, second))
            assert head.offset_by_time(T1, future_ms) is None
        monkeypatch.setattr(servers, "ANSWER_S", 0.2)
        monkeypatch.setattr(servers, "TIME_S", 0.2)
        assert head.offset_by_time(T1, future_ms) is None  # the slave's queues end elsewhere
        assert head.offset_by_time(T1, 0) == 0
        head.close()


def test_a_node_that_refuses_for_a_while_is_asked_again(monkeypatch):
    monkeypatch.setattr(servers, "RETRY_S", 0.01)
    node = FakeBackend()
    fill(node.store, 10)
    pull, refused = node.store.pull, []

    def refuse(failure, times):
        def answer(*args, **more):
            if len(refused) < times:
                refused.append(failure)
                raise failure
            return pull(*args, **more)

        refused.clear()
        node.store.pull = answer

    with serving(node) as bootstrap:
        head = ServerHead(bootstrap)
        refuse(CorruptRecordError("a record is damaged"), 3)  # the node mends it meanwhile
        assert head.locate({T0: 5}, {T0: 0})[T0].next == 5
        assert len(refused) == 3
        monkeypatch.setattr(servers, "REPAIR_S", 0.05)
        refuse(CorruptRecordError("a record is damaged"), 1_000)  # no node has it whole
        with pytest.raises(ClientError, match="a record is damaged"):
            head.locate({T0: 5}, {T0: 0})
        assert 1 < len(refused) < 1_000
        refuse(StoreBrokenError("the log is being cut"), 3)
        assert head.locate({T0: 5}, {T0: 0})[T0].next == 5
        assert len(refused) == 3
        head._patience = Patience(0.2, 0.2)
        refuse(StoreBrokenError("the disk is gone"), 10**6)
        with pytest.raises(ClientError, match="the disk is gone"):
            head.locate({T0: 5}, {T0: 0})
        head.close()


def test_without_any_node_the_error_names_the_addresses_and_the_option():
    head = ServerHead(("tcp://127.0.0.1:9",), patience=Patience(0.3, 1e6))
    text = "within 0.3 s, which the option retryTimeout changes: no answer from tcp://127.0.0.1:9"
    with pytest.raises(UnreachableError, match=text) as failed:
        head.available()
    assert "check option 'hastore.bootstrap.servers', that" in str(failed.value)
    head.close()


def test_a_restart_of_the_nodes_does_not_end_a_query(monkeypatch):
    """Once a node has answered, a query waits longer than for the first answer."""
    monkeypatch.setattr(servers, "ANSWER_S", 0.1)
    monkeypatch.setattr(servers, "SEARCH_S", 0.05)
    monkeypatch.setattr(servers, "WARN_S", 0.2)
    node = FakeBackend()
    fill(node.store, 10)
    with contextlib.ExitStack() as stack:
        with serving(node) as bootstrap:
            head = ServerHead(bootstrap, patience=Patience(0.1, 1e6))
            stack.callback(head.close)
            assert head.available()[T0] == (0, 5)

        def restart(text, *values):
            assert "waiting %.0f s more" in text  # it has waited longer than for a first answer
            server = ApiServer(bootstrap[0], node, ApiConfig(), on_failure=raise_failure)
            server.start()
            stack.callback(server.stop)

        monkeypatch.setattr(servers.log, "warning", restart)
        assert head.available()[T0] == (0, 5)
