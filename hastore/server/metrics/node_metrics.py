"""NodeMetrics: gathers what a node has counted, and renders /metrics of it.

It runs in the thread of the HTTP port. It takes neither the API's lock nor the log's: it reads
single numbers, and small tables that are copied at one moment. So a scrape costs puts no more than
the interpreter's time that it takes itself.

Those of the process have the names that Prometheus' own libraries give them. A group's lag in a
topic, by its committed positions, is the sum over the queues in which it has a position. A queue in
which it has none is left out: where such a consumer would begin is its own choice. What retention
has removed does not count, since nobody can read it any more.
"""

import os
import platform
import resource
from collections.abc import Callable, Mapping
from typing import Any

from hastore import __version__
from hastore.clock import Clock
from hastore.counters import OTHER, ReplicationCounts, Traffic
from hastore.fs.filesystem import REAL, SYNCS
from hastore.protocol.committed_positions import Place, with_kept
from hastore.security.audit_log import AuditLog
from hastore.security.identities import Identities
from hastore.security.identity import Identity
from hastore.security.tls_contexts import NodeTls
from hastore.server.api.server import ApiServer
from hastore.server.metrics.from_status import add_status, named_slaves, page_of
from hastore.server.metrics.page import Page
from hastore.store.log_store import LogStore

Kept = Callable[[str, str], Mapping[int, Place]]  # of a group in a topic
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PAIRS_MAX = 1_000
Pair = tuple[str, str]  # group, topic
MayCount = Callable[[str, str | None], bool]  # a topic, with None or a group that reads it
Ranges = Mapping[int, tuple[int, int]]  # of a topic: by queue its first and its next queue offset


class NodeMetrics:
    """The metrics of one node. Any thread may call `render`, one at a time."""

    def __init__(
        self,
        status: Callable[[], Mapping[str, Any]],
        store: LogStore,
        api: ApiServer,
        replication: ReplicationCounts,
        audit: AuditLog,
        tls: NodeTls,
        identities: Identities | None,
        kept_positions: Kept,
        clock: Clock,
    ) -> None:
        """Prepare; `kept_positions` returns those that retention has saved."""
        self._status = status
        self._store = store
        self._api = api
        self._replication = replication
        self._audit = audit
        self._tls = tls
        self._identities = identities
        self._kept_positions = kept_positions
        self._clock = clock
        self._started_ms = clock.wall_ms()

    def render(self, identity: Identity | None = None) -> bytes:
        """Return the page. A number that cannot be had now, such as of a full disk, is left out.

        It names the topics and groups that `identity` may know of; all, if None: a node that has no
        identities asks nobody.
        """
        may_count = _everything if identity is None else identity.may_count
        status = self._status()
        page = page_of(status)
        page.add("hastore_build_info", 1, __version__, platform.python_version())
        add_status(page, status)
        self._add_store(page)
        self._add_slaves(page, status)
        self._add_puts(page, may_count)
        self._add_pulls(page, may_count)
        if status.get("writable"):
            self._add_lag(page, may_count)
        self._add_clients(page)
        self._add_security(page)
        add_process(page, self._started_ms)
        return page.render()

    def _add_store(self, page: Page) -> None:
        store, log = self._store, self._store.log
        files = len(log.queue.files)
        page.add("hastore_log_files", files)
        page.add("hastore_log_bytes", files * store.file_size)
        try:
            page.add("hastore_disk_free_bytes", store.free_bytes())
        except OSError:  # the status has the problem
            pass
        page.add("hastore_retention_deleted_files_total", store.retention.removed_files)
        page.add("hastore_retention_deleted_bytes_total", store.retention.removed_bytes)
        page.add("hastore_flushed_bytes_total", store.flush_service.synced_bytes)
        page.add("hastore_file_syncs_total", SYNCS.count)
        page.add_times("hastore_flush_duration_seconds", store.flush_service.times)
        page.add("hastore_flush_running_seconds", store.flush_service.running_ms / 1000.0)

    def _add_slaves(self, page: Page, status: Mapping[str, Any]) -> None:
        counts, growth = self._replication, self._store.growth
        now_ms = self._clock.monotonic_ms()
        for name, slave in named_slaves(status.get("slaves") or ()):
            if slave.get("ack_offset") is not None:
                behind_ms = growth.behind_ms(slave["ack_offset"], now_ms)
                page.add("hastore_slave_lag_seconds", behind_ms / 1000.0, name)
        page.add("hastore_promotions_total", counts.promotions)
        if status.get("mode") == "dledger":
            page.add("hastore_elections_total", counts.elections)
        page.add_all("hastore_links_opened_total", counts.links.items())
        page.add_times("hastore_replication_duration_seconds", counts.round_trips.times)

    def _add_puts(self, page: Page, may_count: MayCount) -> None:
        counts = self._api.counts
        page.add("hastore_puts_total", counts.puts)
        _add_traffic(page, "in", self._store.taken, may_count)
        page.add_all("hastore_refused_messages_total", counts.refused_messages.items())
        page.add_all("hastore_puts_unconfirmed_total", counts.unconfirmed.items())
        page.add("hastore_waiting_put_bytes", self._api.pending_bytes)
        for level, times in list(counts.put_times.items()):
            page.add_times("hastore_put_duration_seconds", times, level)
        page.add_times("hastore_append_duration_seconds", counts.append_times)

    def _add_pulls(self, page: Page, may_count: MayCount) -> None:
        counts = self._api.counts
        page.add("hastore_pulls_total", counts.pulls)
        _add_traffic(page, "out", counts.sent, may_count)
        page.add("hastore_parked_pulls", self._api.parked_pulls)
        page.add_times("hastore_pull_duration_seconds", counts.pull_times, "memory")
        page.add_times("hastore_pull_duration_seconds", counts.cold_pull_times, "disk")

    def _add_lag(self, page: Page, may_count: MayCount) -> None:
        """Add the lag of groups, with the positions whose records retention has removed."""
        found, first = self._api.positions(), self._store.min_offset
        for pair, places in found.items():
            kept = self._kept_positions(*pair)
            if kept:
                found[pair] = with_kept(kept, places, first)
        add_group_lag(page, found, self._store.queues.queues_of, may_count)

    def _add_clients(self, page: Page) -> None:
        found, counts = self._api.counted(), self._api.counts
        page.add("hastore_connections", found.get("open"))
        for name in ("accepted", "refused", "evicted", "malformed"):
            page.add(f"hastore_connections_{name}_total", found.get(name))
        page.add("hastore_failures_total", found["failures"])
        page.add_all("hastore_refusals_total", counts.refusals.items())
        if "logins" in found:
            page.add("hastore_logins_total", found["logins"], "accepted")
            page.add("hastore_logins_total", found["refused_logins"], "refused")
        page.add("hastore_tls_handshakes_total", found.get("tls_handshakes"))

    def _add_security(self, page: Page) -> None:
        events = dict(self._audit.counted())
        for (action, outcome), count in events.items():
            page.add("hastore_audit_events_total", count, action, outcome)
        page.add("hastore_ha_refusals_total", events.get(("ha", "refused"), 0))
        for port in ("api", "ha", "http"):
            refused = events.get((f"tls {port}", "refused"), 0)
            page.add("hastore_tls_refusals_total", refused, port)
        for name, end_ms in self._tls.ends_ms().items():
            page.add("hastore_certificate_end_timestamp_seconds", end_ms / 1000.0, name)
        if self._identities is not None:
            page.add("hastore_identities", self._identities.count)
            page.add("hastore_identities_version", self._identities.checksum)


def _everything(_topic: str, _group: str | None = None) -> bool:
    return True


def _add_traffic(page: Page, direction: str, traffic: Traffic, may_count: MayCount) -> None:
    for topic, messages, size in traffic.rows():
        if not may_count(topic, None):
            continue
        page.add(f"hastore_messages_{direction}_total", messages, topic)
        page.add(f"hastore_message_bytes_{direction}_total", size, topic)


def add_process(page: Page, started_ms: int) -> None:
    """Add CPU, memory and descriptors; what /proc does not say is left out."""
    page.add("process_start_time_seconds", started_ms / 1000.0)
    times = os.times()
    page.add("process_cpu_seconds_total", times.user + times.system)
    page.add("process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        virtual, resident = REAL.read_bytes("/proc/self/statm").split()[:2]
        descriptors = len(REAL.list_dir("/proc/self/fd")) - 1  # without that of the look itself
    except (OSError, ValueError):  # no /proc, or no free descriptor
        return
    page.add("process_virtual_memory_bytes", int(virtual) * _PAGE_BYTES)
    page.add("process_resident_memory_bytes", int(resident) * _PAGE_BYTES)
    page.add("process_open_fds", descriptors)


def add_group_lag(
    page: Page,
    positions: Mapping[Pair, Mapping[int, Place]],
    queues_of: Callable[[str], Ranges],
    may_count: MayCount,
) -> None:
    """Add the lag of each pair that may be shown; pairs beyond PAIRS_MAX are added up as one."""
    known: dict[str, Ranges] = {}
    rest, others = 0, False
    shown = (pair for pair in positions.items() if may_count(pair[0][1], pair[0][0]))
    for number, ((group, topic), places) in enumerate(shown):
        ranges = known.get(topic)
        if ranges is None:
            ranges = known[topic] = queues_of(topic)
        lag = lag_of(ranges, places)
        if number < PAIRS_MAX and (group, topic) != (OTHER, OTHER):
            page.add("hastore_consumer_lag_messages", lag, group, topic)
        else:
            rest, others = rest + lag, True
    if others:
        page.add("hastore_consumer_lag_messages", rest, OTHER, OTHER)
    page.add("hastore_consumer_groups", len(positions))


def lag_of(ranges: Ranges, places: Mapping[int, Place]) -> int:
    """Return how many messages of a topic's queues are at or beyond these positions."""
    lag = 0
    for queue, place in places.items():
        first, following = ranges.get(queue, (0, 0))
        lag += max(0, following - max(first, place.queue_offset))
    return lag
