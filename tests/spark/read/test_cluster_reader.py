"""All groups of a cluster, read together; without ZooKeeper and without nodes."""

import contextlib
from types import SimpleNamespace

import pytest

from hastore.addresses import parse_cluster_address
from hastore.client.consumer import range_reader
from hastore.errors import PositionLostError, UnreachableError, UsageError
from hastore.ha.rules.epochs import Standing
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import QueueRange, Stored
from hastore.spark.options.source_options import Patience, parse_options, parse_stream_options
from hastore.spark.read import clusters, servers
from hastore.spark.read.backend import PlaceVerdict, QueuePlace
from hastore.spark.read.clusters import ClusterBackend, ClusterHead, partition_of
from hastore.spark.read.planning import open_backend, open_head
from hastore.spark.stream_driver import StreamDriver
from hastore.spark.stream_offsets import StreamOffset
from tests.api_fakes import FakeBackend
from tests.spark.read.test_server_reader import ALL, fill, serving

CLUSTER = parse_cluster_address("zk://127.0.0.1:1/shop")
SPAN = OffsetRange(0, 5)


class Found:
    """What ZooKeeper tells of groups: g0 and g1, of which g1 may not be read at first."""

    def __init__(self):
        self.groups = {"g0": SimpleNamespace(addresses=("127.0.0.1:2",))}
        self.unread = {"g1": "ZooKeeper refuses access to /hastore/shop/g1"}
        self.problem = self.unread["g1"]

    def __getattr__(self, _name):
        return lambda *_: None

    def admit(self):
        self.groups = {**self.groups, "g1": SimpleNamespace(addresses=("127.0.0.1:3",))}
        self.unread, self.problem = {}, None


@pytest.fixture
def found(monkeypatch):
    found = Found()
    monkeypatch.setattr(clusters, "ClusterGroups", lambda *_: found)
    for part in (clusters.ServerBackend, clusters.ServerHead):
        monkeypatch.setattr(part, "available", lambda *_: {TopicPartition("t", 0): SPAN})
    return found


def queues(*groups, queues=(0,)):
    return {
        TopicPartition("t", partition_of(group, queue)): SPAN
        for group in groups
        for queue in queues
    }


def test_a_group_that_cannot_be_read_in_zookeeper_is_not_left_out(found):
    """Its messages would be missing without an error."""
    with ClusterBackend(CLUSTER, fail_on_data_loss=True) as backend:
        with pytest.raises(UnreachableError, match="group g1 of zk://.*refuses access"):
            backend.available()
        found.admit()
        assert backend.available() == queues("g0", "g1")
    found.unread = {"g2": "ZooKeeper refuses access to /hastore/shop/g2"}
    with ClusterBackend(CLUSTER, fail_on_data_loss=True) as backend:
        assert backend._known.of(TopicPartition("t", partition_of("g1", 3)))[1].partition == 3


def test_a_stream_begins_with_all_groups_and_goes_on_beside_one_that_comes_later(found):
    with contextlib.closing(ClusterHead(CLUSTER)) as head:
        with pytest.raises(UnreachableError, match="group g1"):
            head.available()
        found.admit()
        assert head.available() == queues("g0", "g1")
        found.unread = {"g2": "ZooKeeper refuses access to /hastore/shop/g2"}
        assert head.available() == queues("g0", "g1"), "it is read from its start, once it can be"


def test_a_group_that_an_option_names_is_not_left_out(found):
    """As when ZooKeeper was set up anew, and no node of the group has run since."""
    found.unread, found.problem = {}, None
    raw = {"hastore.bootstrap.servers": str(CLUSTER), "subscribe": "t", "hastore.groups": "g1, g0"}
    options = parse_options(raw)
    with open_backend(options) as backend, contextlib.closing(open_head(options)) as head:
        for part in (backend, head):
            with pytest.raises(UnreachableError, match="group g1 of zk://.*'hastore.groups' names"):
                part.available()
        found.admit()
        for part in (backend, head):
            assert part.available() == queues("g0", "g1")
    for wrong in ("zk://127.0.0.1:1/shop/g0", "tcp://127.0.0.1:1"):
        with pytest.raises(UsageError, match="'hastore.groups' is for all groups of a cluster"):
            parse_options({**raw, "hastore.bootstrap.servers": wrong})


def test_each_group_tells_where_deletions_ended_its_queues(found, monkeypatch):
    found.admit()
    for part, number in ((clusters.ServerBackend, 5), (clusters.ServerHead, 7)):
        monkeypatch.setattr(part, "ended", lambda _self, keys, n=number: dict.fromkeys(keys, n))
    keys = queues("g0", "g1").keys()
    with ClusterBackend(CLUSTER, fail_on_data_loss=True) as backend:
        assert backend.ended(keys) == dict.fromkeys(keys, 5)
    with contextlib.closing(ClusterHead(CLUSTER)) as head:
        assert head.ended(keys) == dict.fromkeys(keys, 7)


def test_a_task_waits_for_zookeeper_as_for_nodes(found, monkeypatch):
    """Its query runs: `retryTimeout` bounds the wait, not that of a query that begins."""
    there, waits = found.groups, []
    found.groups, found.unread, found.problem = {}, {}, "zk://127.0.0.1:1 is out of reach"

    def comes_back(seconds):
        waits.append(seconds)
        if seconds > 60:
            found.groups, found.problem = there, None

    found.wait_read = comes_back
    monkeypatch.setattr(clusters.ServerBackend, "read_queue", lambda *_: iter(("batch",)))
    span = QueueRange("t", partition_of("g0", 0), 0, 5)
    with ClusterBackend(CLUSTER, True, None, Patience(7.0, 300.0)) as backend:
        with pytest.raises(UnreachableError, match="out of reach.*raise the option retryTimeout"):
            backend.available()
        assert list(backend.read_queue(span, None)) == ["batch"]
    assert waits == [7.0, 300.0]


@pytest.mark.parametrize("task", [False, True])
def test_a_group_that_moves_while_it_is_waited_for_is_found(monkeypatch, task):
    found = Found()
    found.unread = {}
    monkeypatch.setattr(clusters, "ClusterGroups", lambda *_: found)
    monkeypatch.setattr(servers, "SEARCH_S", 0.05)
    monkeypatch.setattr(range_reader, "SURVEY_S", 0.05)
    for module in (servers, range_reader):
        monkeypatch.setattr(module, "WARN_S", 0.1)
    node, patience = FakeBackend(), Patience(10.0, 20.0)
    fill(node.store, 10)
    span = QueueRange("t", partition_of("g0", 0), 0, 5)

    def name(addresses):
        found.groups = {"g0": SimpleNamespace(addresses=addresses)}

    with contextlib.ExitStack() as stack:
        with serving(node) as before:
            name(before)
            head = stack.enter_context(contextlib.closing(ClusterHead(CLUSTER, None, patience)))
            backend = stack.enter_context(ClusterBackend(CLUSTER, True, None, patience))
            for part in (head, backend):
                assert part.available() == queues("g0", queues=(0, 1))

        def move(text, *_values):
            assert "waiting %.0f s more" in text  # it looks for a node now
            name(stack.enter_context(serving(node)))

        monkeypatch.setattr((range_reader if task else servers).log, "warning", move)
        if task:
            batches = list(backend.read_queue(span, BatchBuilder(ALL)))
            assert [row["offset"] for one in batches for row in one.to_pylist()] == [*range(5)]
        else:
            assert head.available() == queues("g0", queues=(0, 1))
        assert backend.available() == queues("g0", queues=(0, 1))
        assert head.offset_by_time(TopicPartition("t", partition_of("g0", 0)), 0) == 0


def test_all_searches_by_time_in_a_group_share_connections_that_the_end_closes(
    requesters, monkeypatch
):
    found = Found()
    found.unread = {}
    monkeypatch.setattr(clusters, "ClusterGroups", lambda *_: found)
    node = FakeBackend()
    fill(node.store, 10)
    with serving(node) as addresses:
        found.groups = {"g0": SimpleNamespace(addresses=addresses)}
        for part in (ClusterBackend(CLUSTER, True), contextlib.closing(ClusterHead(CLUSTER))):
            with part as opened:
                for queue in (0, 1):
                    key = TopicPartition("t", partition_of("g0", queue))
                    assert [opened.offset_by_time(key, ms) for ms in (0, 2**42)] == [0, None]
                assert [one.surveys for one in requesters] == [1]
            assert requesters.pop().closing


@pytest.mark.parametrize("limit", [{}, {"maxOffsetsPerTrigger": "1"}])
@pytest.mark.parametrize("fails", [True, False])
def test_a_group_that_has_left_the_cluster_ends_a_stream_or_is_gone_on_without(
    found, monkeypatch, fails, limit
):
    def located(_self, ends, _lows):
        return {key: QueuePlace(end, Stored(1, end)) for key, end in ends.items()}

    def agreed(_self, places):
        return {key: PlaceVerdict(Standing.AGREED, place) for key, place in places.items()}

    for name, call in (("token", lambda _: ("n", 1)), ("locate", located), ("check", agreed)):
        monkeypatch.setattr(clusters.ServerHead, name, call)
    found.unread = {}
    options = parse_stream_options(
        {
            "hastore.bootstrap.servers": str(CLUSTER), "subscribe": "t",
            "startingOffsets": "earliest", "failOnDataLoss": str(fails), **limit,
        }
    )  # fmt: skip
    stayed, left = (TopicPartition("t", partition_of(group, 0)) for group in ("g0", "g1"))
    start = StreamOffset({stayed: QueuePlace(3, Stored(1, 3)), left: QueuePlace(4, Stored(1, 4))})
    with contextlib.closing(StreamDriver(ClusterHead(CLUSTER), options)) as driver:
        if fails:
            with pytest.raises(PositionLostError, match=f"{left} is gone"):
                driver.latest_offset(start, limited=True)
            return
        end = driver.latest_offset(start, limited=True)
        to = 4 if limit else 5
        assert {key: place.next for key, place in end.places.items()} == {stayed: to, left: 4}
        pieces = driver.tasks(start, end)
        assert [(one.partition, one.start, one.end) for one in pieces] == [
            (stayed.partition, 3, to)
        ]
        found.admit()  # it is back: each message is read once
        driver._ends.look(now=True)
        again = driver.latest_offset(StreamOffset(end.places), limited=True)
        assert {key: place.next for key, place in again.places.items()} == {stayed: 5, left: 5}
