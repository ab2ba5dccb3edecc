"""What a real node shows at /metrics."""

from __future__ import annotations

import pathlib
import re
import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.errors import HastoreError
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.metrics.catalog import COMMON_LABELS, METRICS
from hastore.server.metrics.from_status import named_slaves
from hastore.server.metrics.page import sample_names
from hastore.server.node import Node
from tests.server.kit import config_of, group_of_one, running
from tests.server.test_node import until

Samples = dict[tuple[str, tuple[str, ...]], float]


def scrape(node: BaseNode) -> Samples:
    """Return the samples by name and the values of their own labels; check what all have."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{node.http_address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: Samples = {}
    known = {one: metric for metric in METRICS.values() for one in sample_names(metric)}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            metric, labels = known[sample.name], dict(sample.labels)
            assert labels.keys() - {"le"} == {*COMMON_LABELS, *metric.labels}
            own = tuple(labels[name] for name in metric.labels)
            key = sample.name, (*own, labels["le"]) if "le" in labels else own
            assert key not in found, "Prometheus refuses a page with a sample twice"
            assert (labels["cluster"], labels["group"], labels["node"]) == ("test", "g0", "1")
            found[key] = sample.value
    ports = {node.http_address, node.ha_address, node.api.endpoint}
    for port in {re.sub(".*:", "", one) for one in ports}:
        assert not re.search(rf'="[^"]*\b{port}"', text), "a free port is no label"
    return found


def put(node: BaseNode, topic: str, count: int, **options: object) -> None:
    with Producer(node.api.endpoint, **options) as producer:  # type: ignore[arg-type]
        for future in [producer.send(topic, b"x" * 100) for _ in range(count)]:
            assert future.result(60).status == "PUT_OK"


def read(node: BaseNode, topic: str, count: int) -> None:
    with Consumer(topic, node.api.endpoint, group="shop") as consumer:
        got = 0
        while got < count:
            got += len(consumer.poll(count - got, timeout_s=60))
        consumer.commit()


def test_a_node_counts_what_clients_put_and_pull(tmp_path: pathlib.Path) -> None:
    config = config_of(tmp_path)
    one_queue = msgspec.structs.replace(config.store, default_queues=1)
    config = msgspec.structs.replace(config, store=one_queue)
    with running(Node(config, lambda: None)) as node:
        before = scrape(node)
        assert before["hastore_puts_total", ()] == 0
        assert before["hastore_writable", ()] == before["hastore_takes_default", ()] == 1
        put(node, "Orders", 30, acks=1)
        put(node, "Bills", 5, acks=1)
        read(node, "Orders", 20)
        node.store.flush()

        def caught_up() -> bool:
            found = scrape(node)
            return found.get(("hastore_consumer_lag_messages", ("shop", "Orders"))) == 10

        until(caught_up)
        found = scrape(node)
        assert found["hastore_messages_in_total", ("Orders",)] == 30
        assert found["hastore_messages_in_total", ("Bills",)] == 5
        assert found["hastore_message_bytes_in_total", ("Bills",)] > 5 * 100
        assert found["hastore_messages_out_total", ("Orders",)] >= 20
        assert found["hastore_messages_out_total", ("other",)] == 0
        assert found["hastore_puts_total", ()] >= 3
        count = found["hastore_put_duration_seconds_count", ("MASTER_MEM",)]
        assert 3 <= count <= found["hastore_puts_total", ()]
        assert found["hastore_put_duration_seconds_sum", ("MASTER_MEM",)] < 60 * count
        assert found["hastore_flush_duration_seconds_count", ()] >= 1
        assert found["hastore_flushed_bytes_total", ()] == found["hastore_max_offset", ()]
        assert found["hastore_pull_duration_seconds_count", ("memory",)] >= 1
        assert found["hastore_pulls_total", ()] >= 1
        assert found["hastore_consumer_groups", ()] == 1
        assert found["hastore_connections_accepted_total", ()] >= 3
        assert found["hastore_promotions_total", ()] == 1
        assert found["hastore_log_bytes", ()] == 65536 * found["hastore_log_files", ()]
        assert found["hastore_disk_free_bytes", ()] > 0
        assert found["process_open_fds", ()] > 3
        assert found["hastore_file_syncs_total", ()] >= 1


def test_refusals_are_counted_by_their_status(tmp_path: pathlib.Path) -> None:
    with running(Node(config_of(tmp_path), lambda: None)) as node:
        node.backend.can_confirm = lambda sync_flush: "a test"  # type: ignore[method-assign]
        with Producer(node.api.endpoint, acks="all", delivery_timeout_s=0.5) as producer:
            with pytest.raises(HastoreError):
                producer.send_sync("Orders", b"x")
        assert scrape(node)["hastore_refusals_total", ("SLAVE_NOT_AVAILABLE",)] >= 1
        node.backend.begin_stop()
        found = scrape(node)
        assert found["hastore_writable", ()] == found["hastore_takes_default", ()] == 0
        assert ("hastore_consumer_groups", ()) not in found, "only the master knows the lag"


def test_a_node_of_mode_dledger_counts_too(tmp_path: pathlib.Path) -> None:
    with running(DLedgerNode(group_of_one(tmp_path), lambda: None)) as node:
        put(node, "Orders", 10)
        found = scrape(node)
        assert found["hastore_messages_in_total", ("Orders",)] == 10
        assert found["hastore_put_duration_seconds_count", ("QUORUM_DISK",)] >= 1
        assert found["hastore_node_info", ("dledger", "LEADER")] == 1
        assert found["hastore_promotions_total", ()] == 1
        assert found["hastore_quorum_margin", ()] == found["hastore_acks", ()] == 0
        assert found["hastore_term", ()] == found["hastore_epoch", ()] >= 1


def test_a_rocketmq_slave_is_named_by_its_host_for_its_port_changes() -> None:
    slaves = [
        {"node": 2, "address": "10.0.0.2:41022", "lag_bytes": 5},
        {"node": None, "address": "10.0.0.9:40001", "lag_bytes": None},
        {"node": None, "address": "10.0.0.9:40007", "lag_bytes": 7},
        {"node": None, "address": "[::1]:40007", "lag_bytes": 9},
    ]
    named = [(name, one["lag_bytes"]) for name, one in named_slaves(slaves)]
    assert named == [("10.0.0.9", 7), ("2", 5), ("[::1]", 9)]
