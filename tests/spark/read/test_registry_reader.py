"""Spark reads where its option names a group in ZooKeeper: a real one, a real node."""

import contextlib
import json

import pytest

from hastore import Producer
from hastore.errors import UnreachableError, UsageError
from hastore.spark.read import clusters
from hastore.spark.read.clusters import partition_of
from tests.process.harness import Group
from tests.registry.servers import Servers, registered
from tests.spark.direct import rows
from tests.spark.late import finish

pytestmark = pytest.mark.full


def test_spark_reads_by_the_address_of_zookeeper(spark, tmp_path):
    with contextlib.ExitStack() as stack:
        servers = Servers(tmp_path)
        stack.callback(servers.close)
        servers.start()
        group = stack.enter_context(Group(tmp_path, 1, master_role="ASYNC_MASTER"))
        group[1].write(registry=servers.registry)
        group[1].start()
        where = f"{servers.registry}/test/g0"
        with Producer(where) as producer:
            sent = [producer.send("t", b"%d" % n) for n in range(500)]
            assert {one.result(60).status for one in sent} == {"PUT_OK"}

        options = {"hastore.bootstrap.servers": where}
        frame = spark.read.format("hastore").options(**options, subscribe="t").load()
        found = sorted(int(row.value) for row in frame.select("value").collect())
        assert found == list(range(500))
        stream = spark.readStream.format("hastore").options(
            **options, subscribe="t", startingOffsets="earliest"
        )
        writer = (
            stream.load().writeStream.format("memory").queryName("by_zookeeper")
            .trigger(availableNow=True)
        )  # fmt: skip
        finish(writer.start, 120)  # without a checkpoint: it may start twice
        assert spark.table("by_zookeeper").count() == 500


def two_groups(tmp_path, stack):
    """Return ZooKeeper, and two groups with numbered messages of topic t; u is in one of them."""
    servers = Servers(tmp_path)
    stack.callback(servers.close)
    servers.start()
    groups = []
    for name in ("g0", "g1"):
        (tmp_path / name).mkdir()
        group = stack.enter_context(Group(tmp_path / name, 1, master_role="ASYNC_MASTER", acks=0))
        group[1].write(group=name)
        groups.append(registered(group, servers))
    with Producer(f"{servers.registry}/test/g1") as producer:
        producer.send_sync("u", b"only")
    return servers, groups


def fill(groups, first, count):
    """Send messages to the queues of each group, by turns."""
    for place, group in enumerate(groups):
        with Producer(group.bootstrap) as producer:
            sent = [
                producer.send("t", b"%d" % n, queue=n // 2 % 4)
                for n in range(first + place, first + count, len(groups))
            ]
            assert {one.result(60).status for one in sent} == {"PUT_OK"}


@pytest.mark.slow("a ZooKeeper, two groups, and a query that starts twice")
def test_spark_reads_all_groups_of_a_cluster(spark, tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        servers, groups = two_groups(tmp_path, stack)
        fill(groups, 0, 400)
        options = {"hastore.bootstrap.servers": f"{servers.registry}/test"}

        found = rows(**options, subscribe="t")
        assert sorted(int(row["value"]) for row in found) == list(range(400))
        queues = {partition_of(name, queue) for name in ("g0", "g1") for queue in range(4)}
        assert {row["partition"] for row in found} == queues and len(queues) == 8
        places = {(row["partition"], row["offset"]) for row in found}
        assert len(places) == 400, "partition and offset name one message"
        only = rows(**options, subscribe="u")
        assert [row["value"] for row in only] == [b"only"]
        low = min(queues)
        starts = {"t": {str(one): -2 for one in queues} | {str(low): 7}}  # -2: the earliest
        some = rows(**options, subscribe="t", startingOffsets=json.dumps(starts))
        assert len(some) == 393
        assert min(row["offset"] for row in some if row["partition"] == low) == 7

        def stream():
            reader = spark.readStream.format("hastore").options(
                **options, subscribe="t", startingOffsets="earliest"
            )
            writer = (
                reader.load().writeStream.format("parquet").trigger(availableNow=True)
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
            )  # fmt: skip
            finish(lambda: writer.start(str(tmp_path / "out")), 180)
            table = spark.read.parquet(str(tmp_path / "out")).select("value").collect()
            return sorted(int(row.value) for row in table)

        assert stream() == list(range(400))
        fill(groups, 400, 100)
        groups[0][1].kill()
        groups[0][1].start()
        assert stream() == list(range(500)), "each message once, from the checkpoint"

        monkeypatch.setattr(clusters, "NUMBERS", 1)
        with pytest.raises(UsageError, match="have one number, and cannot be read together"):
            rows(**options, subscribe="t")
        with pytest.raises(UnreachableError, match="/hastore/nowhere has no groups"):
            rows(**{"hastore.bootstrap.servers": f"{servers.registry}/nowhere"}, subscribe="t")
