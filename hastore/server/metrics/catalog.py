"""Every metric of a node: its name, kind, meaning, and labels beside cluster, group and node.

docs/metrics.md has the same list; `python -m tests.metrics_table` writes it there.
Names and labels stay as they are: alerts and dashboards of users depend on them. No label has a
value without a bound, and none changes with a restart, as a free port does.
"""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a metric is."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"  # of seconds


class Metric(NamedTuple):
    """A metric; `labels` are those that are its own."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, text, labels)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, text, labels)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels)


# By chapter of docs/metrics.md.
CHAPTERS: dict[str, tuple[Metric, ...]] = {
    "The node and its role": (
        _gauge("hastore_build_info", "1; the versions that run", "version", "python"),
        _gauge("hastore_node_info", "1; the mode, and what the node is now", "mode", "role"),
        _gauge("hastore_writable", "1 while the node takes writes, at least those with acks=1"),
        _gauge("hastore_takes_default", "1 while the node takes puts that do not set acks"),
        _gauge("hastore_epoch", "The last epoch of the node's history; mode dledger: the term"),
        _gauge("hastore_promised_epoch", "The highest epoch that the node promised (mode classic)"),
        _gauge("hastore_term", "The node's term (mode dledger)"),
        _gauge(
            "hastore_classic_lag_bytes",
            "On a slave of a RocketMQ master: bytes of its log that this node lacks, as the broker "
            "said last",
        ),
        _gauge(
            "hastore_acks",
            "How many other nodes must confirm a put that waits; mode dledger: a majority but one",
        ),
        _gauge(
            "hastore_quorum_margin",
            "On the master or leader: how many more nodes in sync may fail before puts that wait "
            "are refused, or not confirmed; below 0 they are now",
        ),
        _counter("hastore_promotions_total", "How often the node became the master or the leader"),
        _counter(
            "hastore_elections_total",
            "Terms in which the node stood for election (mode dledger)",
        ),
        _gauge("hastore_unclean", "1 while the node may lack bytes that it once acknowledged"),
        _gauge(
            "hastore_problems",
            "Problems that an operator must look at; `hastore status` lists them",
        ),
        _gauge("hastore_registry_connected", "1 while the node is connected to ZooKeeper"),
        _gauge(
            "hastore_name_server_registered",
            "1 while the node is registered at this name server of RocketMQ",
            "address",
        ),
    ),
    "The log and the store": (
        _gauge("hastore_min_offset", "Start of the log, in bytes"),
        _gauge("hastore_max_offset", "End of the log, in bytes"),
        _gauge("hastore_flushed_offset", "End of the part of the log that is synced to the disk"),
        _gauge(
            "hastore_confirmed_offset",
            "End of the part of the log known to be on acks + 1 nodes, in bytes",
        ),
        _gauge("hastore_readable_offset", "End of the part of the log that consumers may read"),
        _gauge("hastore_dispatched_offset", "End of the part of the log that replay has read"),
        _gauge("hastore_ledger_begin_index", "Index of the log's first entry (mode dledger)"),
        _gauge("hastore_ledger_end_index", "Index of the log's last entry (mode dledger)"),
        _gauge(
            "hastore_committed_index",
            "Index of the last entry known to be committed (mode dledger)",
        ),
        _gauge("hastore_topics", "Topics with queues"),
        _gauge("hastore_log_files", "Files of the log"),
        _gauge("hastore_log_bytes", "What the files of the log take, unused room included"),
        _gauge("hastore_disk_free_bytes", "Free room on the disk of the store"),
        _gauge("hastore_rescued_bytes", "What the archives of cut bytes in rescued/ take"),
        _gauge(
            "hastore_damaged_bytes",
            "Bytes of the log that are known to be damaged; reads of them fail",
        ),
        _counter(
            "hastore_repaired_bytes_total",
            "Damaged bytes of the log that were fetched again from another node",
        ),
        _counter("hastore_scrubbed_bytes_total", "Bytes of the log that were read to find damage"),
        _counter("hastore_scrub_passes_total", "How often the log was read so from end to end"),
        _gauge("hastore_cuts", "Cuts of messages that no operator has dismissed"),
        _gauge(
            "hastore_cut_messages",
            "Messages that were cut from the log, until an operator has dismissed that",
        ),
        _counter("hastore_retention_deleted_files_total", "Files that retention removed"),
        _counter("hastore_retention_deleted_bytes_total", "Bytes of these files"),
        _counter("hastore_flushed_bytes_total", "Bytes of the log that were synced to the disk"),
        _counter("hastore_file_syncs_total", "Syncs of any file or folder of the node"),
        _histogram("hastore_flush_duration_seconds", "A sync of the log (fdatasync)"),
        _gauge(
            "hastore_flush_running_seconds",
            "For how long the sync that runs now has been running; 0: none runs",
        ),
    ),
    "Replication": (
        _gauge("hastore_slaves", "Linked slaves; mode dledger: the other members"),
        _gauge("hastore_slaves_in_sync", "Slaves that are in sync"),
        _gauge(
            "hastore_unlinked",
            "Nodes of the group that do not follow this master (mode classic)",
        ),
        _gauge("hastore_slave_ack_offset", "The slave's last report, in bytes", "slave"),
        _gauge(
            "hastore_slave_ack_index",
            "Index of the last entry that the follower has on its disk (mode dledger)",
            "slave",
        ),
        _gauge("hastore_slave_lag_bytes", "Bytes of the log that the slave lacks", "slave"),
        _gauge(
            "hastore_slave_lag_seconds",
            "For how long the slave has lacked a part of the log; below 1 s it is 0",
            "slave",
        ),
        _gauge("hastore_slave_in_sync", "1 while the slave counts as in sync", "slave"),
        _gauge(
            "hastore_slave_files_kept",
            "1 while retention keeps the files that the slave needs",
            "slave",
        ),
        _counter(
            "hastore_links_opened_total",
            "Links of replication that were opened; after the first one each is a reconnect",
            "peer",
        ),
        _counter(
            "hastore_ha_refusals_total",
            "Callers at the HA port that could not prove that they belong to the group",
        ),
        _histogram(
            "hastore_replication_duration_seconds",
            "From an append on the master or leader until another node reports it; a sample",
        ),
    ),
    "Puts": (
        _counter("hastore_puts_total", "Puts that were appended, with the node's own records"),
        _counter(
            "hastore_messages_in_total",
            "Messages that were appended by puts; topics beyond the first 200 as \"other\"",
            "topic",
        ),
        _counter("hastore_message_bytes_in_total", "Bytes of these messages in the log", "topic"),
        _counter(
            "hastore_refused_messages_total",
            "Messages that were refused on their own, by status",
            "reason",
        ),
        _counter(
            "hastore_puts_unconfirmed_total",
            "Puts that were stored, but not confirmed in time, by outcome",
            "outcome",
        ),
        _gauge("hastore_waiting_puts", "Puts that wait for their confirmation"),
        _gauge("hastore_waiting_put_bytes", "Bytes of these puts"),
        _histogram(
            "hastore_put_duration_seconds",
            "A put from its arrival to its confirmation, by the level that it got",
            "level",
        ),
        _histogram(
            "hastore_append_duration_seconds",
            "One append to the log, of all puts that came together",
        ),
    ),
    "Pulls and consumer groups": (
        _counter("hastore_pulls_total", "Pulls that were answered"),
        _counter(
            "hastore_messages_out_total",
            "Messages that were sent to consumers; topics beyond the first 200 as \"other\"",
            "topic",
        ),
        _counter("hastore_message_bytes_out_total", "Bytes of these messages", "topic"),
        _gauge("hastore_parked_pulls", "Pulls that wait for messages"),
        _histogram(
            "hastore_pull_duration_seconds",
            "One look for the messages of a pull, without its wait for new ones",
            "source",
        ),
        _gauge(
            "hastore_consumer_lag_messages",
            "On the node that takes puts: messages behind the committed positions of a group in a "
            "topic; beyond the first 1,000 pairs as \"other\"",
            "consumer_group",
            "topic",
        ),
        _gauge(
            "hastore_consumer_groups",
            "Consumer groups with committed positions, each counted in each of its topics",
        ),
        _gauge(
            "hastore_delayed_messages",
            "Delayed messages that wait, by the level of their delay",
            "level",
        ),
        _counter("hastore_delayed_delivered_total", "Delayed messages that the node delivered"),
        _counter(
            "hastore_delayed_lost_total",
            "Delayed messages that the node could not deliver, and has given up",
        ),
        _gauge("hastore_open_transactions", "Transactions that are open in the log"),
        _counter(
            "hastore_transactions_total",
            "Transactions whose end the node has read in its log",
            "ended",
        ),
    ),
    "Clients and their requests": (
        _gauge("hastore_connections", "Open connections of clients"),
        _counter("hastore_connections_accepted_total", "Connections that were accepted"),
        _counter("hastore_connections_refused_total", "Connections for which there was no room"),
        _counter(
            "hastore_connections_evicted_total",
            "Idle connections that gave way to others",
        ),
        _counter(
            "hastore_connections_malformed_total",
            "Connections that were ended because of what they sent",
        ),
        _counter("hastore_tls_handshakes_total", "TLS handshakes of clients that were completed"),
        _counter("hastore_tls_refusals_total", "Callers that TLS refused, by address", "port"),
        _counter("hastore_logins_total", "Clients that proved an identity, or did not", "outcome"),
        _counter(
            "hastore_refusals_total",
            "Requests that were refused, by status; of RocketMQ's clients by response code",
            "reason",
        ),
        _counter(
            "hastore_failures_total",
            "Requests that failed by no fault of the client; the node's log says why",
        ),
        _counter(
            "hastore_audit_events_total",
            "What the audit log is told: refusals, changes of roles and of identities",
            "action",
            "outcome",
        ),
        _gauge(
            "hastore_requests_waiting",
            "Requests of RocketMQ's clients that wait for a master or its outcome",
        ),
        _counter(
            "hastore_requests_forwarded_total",
            "Requests of RocketMQ's clients that were sent to a master",
        ),
        _counter(
            "hastore_requests_received_total",
            "Requests of RocketMQ's clients that other nodes have forwarded to this one",
        ),
        _counter(
            "hastore_requests_held_total",
            "Requests of RocketMQ's clients that had to wait for a master or its slaves",
        ),
        _counter(
            "hastore_requests_refused_total",
            "Requests of RocketMQ's clients that no master has taken in time: nothing was done",
        ),
        _counter(
            "hastore_requests_unknown_total",
            "Forwarded requests of RocketMQ's clients whose outcome is not known",
        ),
        _counter(
            "hastore_acl_signed_total",
            "Requests of RocketMQ's clients that an identity has signed and may send",
        ),
        _counter(
            "hastore_acl_unproved_total",
            "Requests of RocketMQ's clients without a valid signature",
        ),
        _counter(
            "hastore_acl_forbidden_total",
            "Requests of RocketMQ's clients whose identity lacks the right, or the quota for it",
        ),
        _counter("hastore_quota_requests_total", "Requests of identities with a quota", "identity"),
        _counter(
            "hastore_quota_bytes_total", "Bytes of these requests and their answers", "identity"
        ),
        _counter(
            "hastore_quota_slowed_total", "Requests that had to wait for their quota", "identity"
        ),
        _counter(
            "hastore_quota_refused_total",
            "Requests that were more than their quota: nothing was done",
            "identity",
        ),
        _counter("hastore_quota_kept_out_total", "Topics and positions that a quota has kept out"),
    ),
    "Certificates, identities and the process": (
        _gauge(
            "hastore_certificate_end_timestamp_seconds",
            "When a certificate ends: the node's own, and the CA's; seconds since 1970",
            "certificate",
        ),
        _gauge("hastore_identities", "Identities that are in force"),
        _gauge(
            "hastore_identities_version",
            "A checksum of the identities in force: it is the same on nodes with the same ones",
        ),
        _gauge("process_start_time_seconds", "When the node was started; seconds since 1970"),
        _counter("process_cpu_seconds_total", "CPU time of the process, of users and system"),
        _gauge("process_resident_memory_bytes", "Memory of the process"),
        _gauge("process_virtual_memory_bytes", "Address space of the process, its maps included"),
        _gauge("process_open_fds", "Open descriptors of the process"),
        _gauge("process_max_fds", "The limit of open descriptors"),
    ),
}  # fmt: skip
METRICS = {metric.name: metric for metrics in CHAPTERS.values() for metric in metrics}
COMMON_LABELS = ("cluster", "group", "node")
