"""The jobs of `hastore pipeline` beside a live RocketMQ broker: on its own store and its slave.

One broker and one slave for all of them, because a broker takes long to start: first `export` and
`compact`, then `stats`, then `index`, for which both are stopped.
"""

import shutil

import pytest

from hastore.pipeline.compact import compact
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.stats import StatsOptions, run_stats
from hastore.pipeline.where import Where
from hastore.store.offline.reader import StoreReader
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
from tests.interop.test_hastore_slave import KINDS, broker, follow, make_slave, wait_at
from tests.process.stores import read_log
from tests.spark.conftest import spark
from tests.store.rebuild.kit import REAL, how

__all__ = ["broker", "make_slave", "spark"]
pytestmark = pytest.mark.full
TOPICS = ("single", "compressed")
SIZES = Sizes(QUEUE_UNITS, SLOTS, ENTRIES)


def exported(spark, target):
    rows = spark.read.parquet(str(target)).collect()
    found = {(r.topic, r.partition, r.offset): bytes(r.value) for r in rows}
    assert len(found) == len(rows)
    return found


def compacted(spark, target):
    return {bytes(row.key): bytes(row.value) for row in spark.read.parquet(str(target)).collect()}


@pytest.mark.slow("a whole broker starts twice, and finishes what it does in the background")
@pytest.mark.timeout(900)
def test_jobs_beside_a_live_broker(broker, make_slave, spark, tmp_path):
    group = make_slave(broker)
    broker.start()
    node = follow(group[1])
    # Clients are not told the end of this slave's master.
    servers = ",".join(address.removeprefix("tcp://") for address in group.bootstrap)
    places = {
        "broker": {"path": str(broker.root)},
        "slave": {"path": str(node.store)},
        "servers": {"servers": servers},
    }
    # The second run of each adds what the broker has stored since.
    for count, names in ((60, ("broker", "slave")), (40, ("broker", "slave", "servers"))):
        for topic in TOPICS:
            broker.produce(topic, count, seed=count)
        wait_at(node, broker.wait_quiet())
        check_export_and_compact(spark, node, tmp_path, {name: places[name] for name in names})
    for kind in KINDS:
        broker.produce(kind, {"batch": 40, "transactional": 60}.get(kind, 600))
    end = broker.wait_quiet()
    wait_at(node, end)
    check_stats(spark, node, places.values())
    check_lost_queues(broker, node, end, tmp_path)


def check_export_and_compact(spark, node, tmp_path, places):
    """Compare the targets of all places with the messages of the slave's log."""
    with StoreReader(str(node.store)) as reader:
        records = [record for record in reader.records() if record.topic in TOPICS]
    assert len(records) >= 60 * len(TOPICS)
    bodies = {}
    for name, place in places.items():
        target = tmp_path / f"export-{name}"
        export(spark, Where(**place, topics=TOPICS), str(target), ExportOptions())
        bodies[name] = exported(spark, target)
        places_in_log = {(r.topic, r.queue_id, r.queue_offset) for r in records}
        assert set(bodies[name]) == places_in_log, name
        single = {place: body for place, body in bodies[name].items() if place[0] == "single"}
        assert single == {
            (r.topic, r.queue_id, r.queue_offset): r.body for r in records if r.topic == "single"
        }, name
        target = tmp_path / f"compact-{name}"
        compact(spark, Where(**place, topics=("single",)), str(target))
        latest = {}
        for record in records:
            key = dict(record.property_pairs).get("KEYS")
            if record.topic == "single" and key is not None:
                latest[key.encode()] = record.body
        assert compacted(spark, target) == latest, name
    assert all(found == bodies["broker"] for found in bodies.values())


def check_stats(spark, node, places):
    """Compare the figures of all places."""
    counts = []
    for place in places:
        where = Where(**place)
        summary = run_stats(spark, where, StatsOptions(last_minutes=0))
        counts.append({row["topic"]: (row["messages"], row["bytes"]) for row in summary.topics})
        assert counts[-1] == counts[0]
        assert [one["max_bytes"] for one in summary.lag] == ([None] if where.servers else [])
    assert counts[0]["single"][0] == number_of_singles(node.store) == 60 + 40 + 600


def number_of_singles(root):
    return sum(found.topic == "single" for found in read_log(root).records)


def check_lost_queues(broker, node, end, tmp_path):
    """Remove the queues and indexes of both; with those that `index` builds both serve as before.

    Both stores are in use first: their files agree with their logs.
    """
    for root in (broker.root, node.store):
        built, difference = rebuild_to_verify(REAL, str(root), str(tmp_path / "work"), SIZES, how())
        assert (built.end_offset, difference) == (end, None)
    assert node.stop() == 0
    broker.peer.kill()
    singles = number_of_singles(broker.root)
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
        "consume", namesrv=broker.namesrv, topics=["single"], count=singles + 50, timeout=120,
        file=str(tmp_path / "consumed"),
    )  # fmt: skip
    assert got == singles + 50
    wanted = [line for line in lines_of(read_log(broker.root)) if line.startswith("single\t")]
    assert read_lines(tmp_path / "consumed") == wanted
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
