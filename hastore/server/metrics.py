"""Render a node's status as Prometheus metrics."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

# key of the status -> help text
_NODE_GAUGES = {
    "epoch": "The last epoch of the node's history",
    "min_offset": "Start of the log, in bytes",
    "max_offset": "End of the log, in bytes",
    "flushed_offset": "End of the part of the log that is synced to the disk, in bytes",
    "confirmed_offset": "End of the part of the log known to be on acks + 1 nodes, in bytes",
    "readable_offset": "End of the part of the log that consumers may read, in bytes",
    "writable": "1 while the node takes writes",
    "term": "The node's term (mode dledger)",
    "ledger_begin_index": "Index of the log's first entry (mode dledger)",
    "ledger_end_index": "Index of the log's last entry (mode dledger)",
    "committed_index": "Index of the last entry known to be committed (mode dledger)",
    "unclean": "1 while the node may lack bytes that it once acknowledged",
    "waiting_puts": "Synchronous puts that wait for their confirmation",
}
_SLAVE_GAUGES = {
    "ack_offset": "The slave's last report, in bytes",
    "ack_index": "Index of the last entry that the follower has on its disk (mode dledger)",
    "lag_bytes": "Bytes of the log that the slave has not reported",
    "in_sync": "1 while the slave counts as in sync",
    "files_kept": "1 while retention keeps the files that the slave needs",
}


def render_metrics(status: Mapping[str, Any]) -> bytes:
    """Return one status object in the text format of Prometheus; missing keys are left out."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    return generate_latest(registry)


class _StatusCollector(Collector):
    """Render the numbers of a status as gauges with the label `node`."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterable[GaugeMetricFamily | InfoMetricFamily]:
        """Yield each family once."""
        status = self._status
        node = str(status.get("node", ""))
        info = InfoMetricFamily("hastore_node", "The node and its role", labels=["node"])
        info.add_metric([node], {"role": str(status.get("role", ""))})
        yield info
        for key, text in _NODE_GAUGES.items():
            if isinstance(status.get(key), int | float):
                family = GaugeMetricFamily(f"hastore_{key}", text, labels=["node"])
                family.add_metric([node], float(status[key]))
                yield family
        zookeeper = status.get("registry")
        if zookeeper is not None:
            text = "1 while the node is connected to ZooKeeper"
            family = GaugeMetricFamily("hastore_registry_connected", text, labels=["node"])
            family.add_metric([node], float(zookeeper["connected"]))
            yield family
        slaves = status.get("slaves") or []
        yield GaugeMetricFamily("hastore_slaves", "Linked slaves", value=len(slaves))
        in_sync = sum(1 for slave in slaves if slave.get("in_sync"))
        yield GaugeMetricFamily(
            "hastore_slaves_in_sync", "Linked slaves that are in sync", value=in_sync
        )
        problems = len(status.get("problems") or [])
        yield GaugeMetricFamily(
            "hastore_problems",
            "Problems that an operator must look at; `hastore status` lists them",
            value=problems,
        )
        for key, text in _SLAVE_GAUGES.items():
            family = GaugeMetricFamily(f"hastore_slave_{key}", text, labels=["slave", "address"])
            for slave in slaves:
                value = slave.get(key)
                if isinstance(value, int | float):
                    labels = [str(slave.get("node")), str(slave.get("address"))]
                    family.add_metric(labels, float(value))
            yield family
