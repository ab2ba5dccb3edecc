"""Run the same loads on several systems in turn, and keep the samples and the CPU of each."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from benchmarks.common import Cost, Target, figure, percentile, say
from benchmarks.loads import over_zmq
from benchmarks.maven import NoPeer

OURS = "hastore"
ZMQ = "hastore over zmq+tcp"  # the same nodes, and a client whose transport is libzmq
ZMQ_LABEL = "hastore's client over zmq+tcp://"
IDLE_US = 2.0  # a process that used less per message had no part in the load
Costs = Callable[[], dict[str, Cost]]
Loads = Mapping[str, "tuple[int, Callable[[int], Any]]"]  # system -> (count, load of that count)


@dataclasses.dataclass(slots=True)
class Row:
    """One load: the function that runs it on each system, and the samples of each."""

    name: str
    unit: str
    loads: Loads
    peers: Mapping[str, tuple[str, Target | None]]  # system -> (its name in reports, target)
    samples: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    cpu_us: dict[str, dict[str, list[float]]] = dataclasses.field(default_factory=dict)
    # system -> the costs of its processes after the last repeat
    held: dict[str, dict[str, Cost]] = dataclasses.field(default_factory=dict)

    def run(self, system: str, costs: Costs | None, scale: float, keep: bool) -> None:
        """Run the load once on one system; `keep` is false in the warm-up round."""
        if system not in self.loads:
            return
        count, load = self.loads[system]
        count = max(100, int(count * scale))
        before = costs() if costs else {}
        result = load(count)
        after = costs() if costs else {}
        if not keep:
            return
        self.samples.setdefault(system, []).append(result)
        self.held[system] = after
        for who, cost in after.items():
            used = (cost.cpu_s - before[who].cpu_s) / count * 1e6
            self.cpu_us.setdefault(system, {}).setdefault(who, []).append(used)

    def cpu(self, system: str) -> dict[str, float]:
        """Return the median CPU us per message of each process of a system that had work."""
        used = self.cpu_us.get(system, {})
        medians = {who: round(statistics.median(each), 1) for who, each in used.items()}
        return {who: median for who, median in medians.items() if median >= IDLE_US}

    def used(self, system: str) -> dict[str, Any]:
        """Return each process's CPU per message and memory, for the JSON results."""
        if not self.held.get(system):
            return {}
        memory = {who: cost.memory() for who, cost in self.held[system].items()}
        return {"cpu_us_per_message": self.cpu(system), "memory_mib": memory}

    def figures(self, name: str = "", pick: Callable[[Any], float] = float) -> list[dict[str, Any]]:
        """Return a figure for each peer, or one without a peer."""
        ours = [pick(one) for one in self.samples[OURS]]
        more = self.used(OURS)
        out = []
        for system, (peer, target) in self.peers.items():
            theirs = [pick(one) for one in self.samples.get(system, [])]
            extra = {f"peer_{key}": value for key, value in self.used(system).items()}
            label = name or self.name
            out.append(figure(label, self.unit, ours, peer, theirs, target, **more, **extra))
        return out or [figure(name or self.name, self.unit, ours, **more)]


def share(of: float) -> Callable[[Any], float]:
    """Return a function that picks a percentile, for rows whose samples are lists of times."""
    return lambda times: percentile(times, of)


def times_and_rates(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the figures of rows: p50 and p99 of lists of times, in ms, and rates as they are."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if row.unit == "ms":
            found += row.figures(f"{row.name}, p50", share(0.50))
            found += row.figures(f"{row.name}, p99", share(0.99))
        else:
            found += row.figures()
    return found


def start_peer(stack: ExitStack, name: str, make: Callable[[], Any]) -> Any:
    """Start a peer, which ends with the stack; return None, and say why, if it cannot run."""
    try:
        peer = make()
    except NoPeer as reason:
        say(f"{name} is left out: {reason}")
        return None
    stack.enter_context(peer)
    return peer.start()


def zmq_hosts(bootstrap: list[str]) -> list[str] | None:
    """Return the nodes' addresses over libzmq; return None, and say why, without pyzmq."""
    try:
        return over_zmq(bootstrap)
    except NoPeer as reason:
        say(f"{ZMQ} is left out: {reason}")
        return None


def run_rounds(
    rows: list[Row],
    systems: Mapping[str, Costs | None],
    repeats: int,
    scale: float,
    after_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Run every row on every system, in turn: one warm-up round, then `repeats` rounds that count.

    The system that goes first changes from round to round.
    """
    names = list(systems)
    for number in range(-1, repeats):
        turn = max(number, 0) % len(names)
        for row in rows:
            for system in names[turn:] + names[:turn]:
                row.run(system, systems[system], scale, number >= 0)
        if number >= 0:
            after_round(number)


def with_client(costs: Costs) -> Costs:
    """Return a function that adds the costs of the client: this process and its ended children."""

    def all_costs() -> dict[str, Cost]:
        own, times = Cost.of(os.getpid()), os.times()
        cpu_s = own.cpu_s + times.children_user + times.children_system
        return {**costs(), "client": dataclasses.replace(own, cpu_s=cpu_s)}

    return all_costs
