"""The jobs `export` and `compact` beside a live RocketMQ broker: its own store and its slave."""

from hastore.pipeline.compact import compact
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.where import Where
from hastore.store.offline.reader import StoreReader
from tests.interop.test_hastore_slave import broker, follow, make_slave, wait_at
from tests.spark.conftest import spark

__all__ = ["broker", "make_slave", "spark"]
TOPICS = ("single", "compressed")


def exported(spark, target):
    rows = spark.read.parquet(str(target)).collect()
    found = {(r.topic, r.partition, r.offset): bytes(r.value) for r in rows}
    assert len(found) == len(rows)
    return found


def compacted(spark, target):
    return {bytes(row.key): bytes(row.value) for row in spark.read.parquet(str(target)).collect()}


def test_jobs_beside_a_live_broker(broker, make_slave, spark, tmp_path):
    group = make_slave(broker)
    broker.start(topics=TOPICS)
    node = follow(group[1])
    places = {
        "broker": {"path": str(broker.root)},
        "slave": {"path": str(node.store)},
        "servers": {"servers": ",".join(group.bootstrap)},
    }
    # The second run of each adds what the broker has stored since.
    for count, names in ((60, ("broker", "slave")), (40, ("broker", "slave", "servers"))):
        for topic in TOPICS:
            broker.produce(topic, count, seed=count)
        wait_at(node, broker.wait_quiet())
        with StoreReader(str(node.store)) as reader:
            records = [record for record in reader.records() if record.topic in TOPICS]
        assert len(records) >= count * len(TOPICS)
        bodies = {}
        for name in names:
            target = tmp_path / f"export-{name}"
            export(spark, Where(**places[name], topics=TOPICS), str(target), ExportOptions())
            bodies[name] = exported(spark, target)
            places_in_log = {(r.topic, r.queue_id, r.queue_offset) for r in records}
            assert set(bodies[name]) == places_in_log, name
            single = {place: body for place, body in bodies[name].items() if place[0] == "single"}
            assert single == {
                (r.topic, r.queue_id, r.queue_offset): r.body
                for r in records
                if r.topic == "single"
            }, name
            target = tmp_path / f"compact-{name}"
            compact(spark, Where(**places[name], topics=("single",)), str(target))
            latest = {}
            for record in records:
                key = dict(record.property_pairs).get("KEYS")
                if record.topic == "single" and key is not None:
                    latest[key.encode()] = record.body
            assert compacted(spark, target) == latest, name
        assert all(found == bodies["broker"] for found in bodies.values())
