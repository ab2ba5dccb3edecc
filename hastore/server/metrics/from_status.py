"""The metrics that a node's status has already: the same numbers as in `hastore status`."""

from collections.abc import Iterable, Mapping
from typing import Any

from hastore.server.metrics.page import Page

# Keys of the status, each a metric of the same name.
_PLAIN = (
    *("epoch", "promised_epoch", "term", "acks", "unclean", "writable", "takes_default"),
    *("min_offset", "max_offset", "flushed_offset", "confirmed_offset", "readable_offset"),
    *("dispatched_offset", "ledger_begin_index", "ledger_end_index", "committed_index"),
    *("topics", "rescued_bytes", "cut_messages", "waiting_puts", "classic_lag_bytes"),
)
_FORWARDING = ("forwarded", "received", "held", "refused", "unknown")
_ACL = ("signed", "unproved", "forbidden")
_QUOTAS = ("requests", "bytes", "slowed", "refused")
_DELAYED = ("delivered", "lost")
# Key of the status' `transactions` -> value of the label `ended`.
_ENDED = {"committed": "committed", "rolled_back": "rolled back", "set_aside": "set aside"}
_SLAVE = ("ack_offset", "ack_index", "lag_bytes", "in_sync", "files_kept")


def page_of(status: Mapping[str, Any]) -> Page:
    """Return an empty page of the node whose status this is."""
    return Page(*(str(status.get(name, "")) for name in ("cluster", "group", "node")))


def render_metrics(status: Mapping[str, Any]) -> bytes:
    """Return the metrics of a status alone; keys that it lacks are left out."""
    page = page_of(status)
    add_status(page, status)
    return page.render()


def add_status(page: Page, status: Mapping[str, Any]) -> None:
    """Add what a status says."""
    mode, role = (str(status.get(name, "")) for name in ("mode", "role"))
    page.add("hastore_node_info", 1, mode, role)
    for key in _PLAIN:
        if isinstance(status.get(key), int | float):
            page.add(f"hastore_{key}", status[key])
    page.add("hastore_problems", len(status.get("problems") or ()))
    for key in ("cuts", "unlinked"):
        if key in status:
            page.add(f"hastore_{key}", len(status[key]))
    if status.get("registry") is not None:
        page.add("hastore_registry_connected", bool(status["registry"]["connected"]))
    for server in status.get("name_servers") or ():
        page.add("hastore_name_server_registered", bool(server["brokers"]), str(server["address"]))
    scrub = status.get("scrub") or {}
    page.add("hastore_damaged_bytes", scrub.get("damaged_bytes"))
    page.add("hastore_repaired_bytes_total", scrub.get("repaired_bytes"))
    page.add("hastore_scrubbed_bytes_total", scrub.get("scrubbed_bytes"))
    page.add("hastore_scrub_passes_total", scrub.get("passes"))
    _add_slaves(page, status)
    _add_requests(page, status)
    _add_quotas(page, status.get("quotas") or {})
    _add_messages(page, status)


def _add_slaves(page: Page, status: Mapping[str, Any]) -> None:
    slaves = status.get("slaves") or []
    in_sync = sum(1 for slave in slaves if slave.get("in_sync"))
    page.add("hastore_slaves", len(slaves))
    page.add("hastore_slaves_in_sync", in_sync)
    leads = status.get("role") == "LEADER" or status.get("role_state") == "master"
    if leads and isinstance(status.get("acks"), int):
        # A leader counts as one of the majority, but not while its own disk hangs.
        less = status.get("mode") == "dledger" and bool(status.get("sync_hangs"))
        page.add("hastore_quorum_margin", in_sync - status["acks"] - less)
    for name, slave in named_slaves(slaves):
        for key in _SLAVE:
            if isinstance(slave.get(key), int | float):
                page.add(f"hastore_slave_{key}", slave[key], name)


def named_slaves(slaves: Iterable[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return slaves by the value of their label: the node's number, a RocketMQ slave's host.

    The port of a RocketMQ slave changes with each link, so it is no label. Of several at one host
    the one that is most behind is shown.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for slave in slaves:
        node, address = slave.get("node"), str(slave.get("address"))
        name = address.rpartition(":")[0] if node is None else str(node)
        other = found.get(name)
        if other is None or (slave.get("lag_bytes") or 0) > (other.get("lag_bytes") or 0):
            found[name] = slave
    return sorted(found.items())


def _add_requests(page: Page, status: Mapping[str, Any]) -> None:
    forwarding, acl = status.get("forwarding") or {}, status.get("acl") or {}
    page.add("hastore_requests_waiting", forwarding.get("waiting"))
    for key in _FORWARDING:
        page.add(f"hastore_requests_{key}_total", forwarding.get(key))
    for key in _ACL:
        page.add(f"hastore_acl_{key}_total", acl.get(key))


def _add_quotas(page: Page, quotas: Mapping[str, Any]) -> None:
    if not quotas:
        return
    page.add("hastore_quota_kept_out_total", quotas["kept_out"])
    for identity, counts in quotas["identities"].items():
        for key in _QUOTAS:
            page.add(f"hastore_quota_{key}_total", counts[key], identity)


def _add_messages(page: Page, status: Mapping[str, Any]) -> None:
    delayed, transactions = status.get("delayed") or {}, status.get("transactions") or {}
    for level, count in (delayed.get("levels") or {}).items():
        page.add("hastore_delayed_messages", count, str(level))
    for key in _DELAYED:
        page.add(f"hastore_delayed_{key}_total", delayed.get(key))
    if "open" in transactions:
        page.add("hastore_open_transactions", transactions["open"])
        for key, label in _ENDED.items():
            page.add("hastore_transactions_total", transactions.get(key, 0), label)
