"""`hastore pipeline index` and `stats` on a RocketMQ store, and on a slave of a RocketMQ broker."""

import shutil

import pytest

from hastore.pipeline.stats import StatsOptions, run_stats
from hastore.pipeline.where import Where
from hastore.store.rebuild.layout import Sizes
from hastore.store.rebuild.rebuild import rebuild_in_place, rebuild_to, rebuild_to_verify
from tests.interop.compare import (
    ENTRIES,
    QUEUE_UNITS,
    SLOTS,
    assert_same_derived,
    lines_of,
    read_lines,
)
from tests.interop.test_hastore_slave import (  # noqa: F401  (fixtures)
    KINDS,
    broker,
    follow,
    make_slave,
    wait_at,
)
from tests.process.stores import read_log
from tests.spark.conftest import spark  # noqa: F401  (a fixture)
from tests.store.rebuild.kit import REAL, how

SIZES = Sizes(QUEUE_UNITS, SLOTS, ENTRIES)


@pytest.mark.timeout(900)
def test_lost_queues_of_a_broker_and_of_its_slave(
    broker,  # noqa: F811
    make_slave,  # noqa: F811
    spark,  # noqa: F811
    tmp_path,
):
    group = make_slave(broker)
    broker.start()
    node = follow(group[1])
    for kind in KINDS:
        broker.produce(kind, {"batch": 40, "transactional": 60}.get(kind, 600))
    end = broker.wait_quiet()
    wait_at(node, end)

    # Both stores are in use: their files agree with their logs.
    for root in (broker.root, node.store):
        built, difference = rebuild_to_verify(REAL, str(root), str(tmp_path / "work"), SIZES, how())
        assert (built.end_offset, difference) == (end, None)
    # Figures of the slave, by path and from the node. Its master's end is not known to clients.
    servers = ",".join(address.removeprefix("tcp://") for address in group.bootstrap)
    counts = []
    for where in (Where(str(node.store)), Where(servers=servers), Where(str(broker.root))):
        summary = run_stats(spark, where, StatsOptions(last_minutes=0))
        counts.append({row["topic"]: (row["messages"], row["bytes"]) for row in summary.topics})
        assert counts[-1] == counts[0]
        assert [one["max_bytes"] for one in summary.lag] == ([None] if where.servers else [])
    assert counts[0]["single"][0] == 600

    # The slave's lost queues: rebuilt, it serves as before.
    assert node.stop() == 0
    broker.peer.kill()
    log = read_log(broker.root)
    for root, name in ((node.store, "slave"), (broker.root, "broker")):
        copy = tmp_path / f"{name}-derived"
        rebuild_to(REAL, str(root), str(copy), SIZES, how())
        assert_same_derived(broker.root, copy)
        for kind in ("consumequeue", "index"):
            shutil.rmtree(root / kind)
        built = rebuild_in_place(REAL, str(root), SIZES, how())
        assert built.end_offset == end
        assert_same_derived(copy, root)
    # The broker opens its store, takes messages, and serves all of them.
    broker.start(topics=["single"])
    assert broker.max_offset == end
    assert {result[0] for result in broker.produce("single", 50, seed=3)} == {"SEND_OK"}
    got = broker.peer.call(
        "consume", namesrv=broker.namesrv, topics=["single"], count=650, timeout=120,
        file=str(tmp_path / "consumed"),
    )  # fmt: skip
    assert got == 650
    wanted = [line for line in lines_of(read_log(broker.root)) if line.startswith("single\t")]
    assert read_lines(tmp_path / "consumed") == wanted
    assert sum(found.topic == "single" for found in log.records) == 600
    end = broker.wait_quiet()
    # After a crash RocketMQ indexes some keys twice, so only its queues are compared.
    queues = how(index=False)
    _, difference = rebuild_to_verify(REAL, str(broker.root), str(tmp_path / "work"), SIZES, queues)
    assert difference is None
    node.start("slave")
    wait_at(node, end)
    assert node.stop() == 0
    broker.peer.kill()
    _, difference = rebuild_to_verify(REAL, str(node.store), str(tmp_path / "work"), SIZES, how())
    assert difference is None
