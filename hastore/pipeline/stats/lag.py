"""Replication lag of running nodes, by sampling their status.

Lag is a distance in the log: how many bytes the master has appended that a node does not have. The
log has one order for all topics, so a topic has no lag of its own, and a log does not tell how late
its copies were: only what was sampled is known. The nodes answer one after the other, so a sample
is off by what was appended in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MINUTE_MS = 60_000


@dataclass(frozen=True)
class LagSample:
    """How far a node was behind the master at a moment; None if that is unknown."""

    at_ms: int
    node: str
    end_offset: int
    behind_bytes: int | None


@dataclass(frozen=True)
class LagMinute:
    """The samples of a node in one minute; bytes are None if no sample knew them."""

    minute_ms: int
    node: str
    samples: int
    end_offset: int  # of the last sample
    mean_bytes: float | None
    max_bytes: int | None


def lag_of(statuses: Sequence[dict[str, Any]], at_ms: int) -> list[LagSample]:
    """Return a sample for each node, and one named "unconfirmed" for the master's own log.

    "unconfirmed" is what the master has appended beyond the confirmed offset: what a failover may
    lose. Classic slaves, which do not answer themselves, appear as the master sees them.
    """
    masters = [one for one in statuses if one["role"] != "SLAVE" and one["writable"]]
    master = max(masters, key=lambda one: one["epoch"], default=None)
    end = None if master is None else int(master["max_offset"])
    found = []
    for one in statuses:
        own = int(one["max_offset"])
        name = f"node {one['node']}"
        if one is master:
            behind = max(0, own - int(one["confirmed_offset"]))
            found.append(LagSample(at_ms, "unconfirmed", int(one["confirmed_offset"]), behind))
        else:
            found.append(LagSample(at_ms, name, own, None if end is None else max(0, end - own)))
    if master is not None and end is not None:
        for slave in master["slaves"]:
            if slave.get("classic") and slave.get("ack_offset") is not None:
                ack = int(slave["ack_offset"])
                found.append(LagSample(at_ms, f"slave {slave['address']}", ack, max(0, end - ack)))
    return found


def by_minute(samples: Sequence[LagSample]) -> list[LagMinute]:
    """Merge samples by node and minute, in the order of time."""
    groups: dict[tuple[int, str], list[LagSample]] = {}
    for sample in samples:
        minute = sample.at_ms - sample.at_ms % MINUTE_MS
        groups.setdefault((minute, sample.node), []).append(sample)
    merged = []
    for (minute, node), group in sorted(groups.items()):
        known = [one.behind_bytes for one in group if one.behind_bytes is not None]
        merged.append(
            LagMinute(
                minute,
                node,
                len(group),
                group[-1].end_offset,
                sum(known) / len(known) if known else None,
                max(known, default=None),
            )
        )
    return merged
