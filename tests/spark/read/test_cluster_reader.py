"""All groups of a cluster, read together; without ZooKeeper and without nodes."""

import contextlib
from types import SimpleNamespace

import pytest

from hastore.addresses import parse_cluster_address
from hastore.errors import UnreachableError
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.read import clusters
from hastore.spark.read.clusters import ClusterBackend, ClusterHead, partition_of

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


def queues(*groups):
    return {TopicPartition("t", partition_of(group, 0)): SPAN for group in groups}


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
