"""Spark reads where its option names a group in ZooKeeper: a real one, a real node."""

import contextlib

import pytest

from hastore import Producer
from tests.process.harness import Group
from tests.registry.servers import Servers

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
        query = (
            stream.load().writeStream.format("memory").queryName("by_zookeeper")
            .trigger(availableNow=True)
            .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        )  # fmt: skip
        assert query.awaitTermination(120)
        assert spark.table("by_zookeeper").count() == 500
