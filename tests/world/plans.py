"""Plans of walks, drawn from a seed, and what becomes of one."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from hastore.config.model import AckPoint, Flush, Mode
from tests.world.events import KINDS, Event, draw
from tests.world.machines import Shape

# What happens beside the faults of ZooKeeper in the tour "registry".
FLIPS = ("kill", "promote", "rivals", "demote", "partition", "restart")
EVENTS_S = 14.0  # the time in which events begin


@dataclass(frozen=True)
class Plan:
    """All that a walk is."""

    seed: int
    shape: Shape
    groups: tuple[str, ...]  # the classes of its events
    preempts: float
    events: tuple[Event, ...]
    later: bool = False  # a client sends delayed messages and transactions
    rocketmq: bool = False  # RocketMQ's clients take part

    @property
    def durable(self) -> bool:
        return _is_durable(self.shape)


def _is_durable(shape: Shape) -> bool:
    """Whether what is acknowledged survives a power cut of every node."""
    written = shape.ack_point is AckPoint.WRITTEN and shape.mode is Mode.CLASSIC
    return shape.flush is Flush.SYNC and not written


def plan_of(seed: int, mode: Mode) -> Plan:
    """Draw the walk of a seed."""
    chance = random.Random(f"plan {mode.value} {seed}")
    if mode is Mode.CLASSIC:
        nodes = chance.choice((2, 2, 3))
        durable = chance.random() < 0.4
        shape = Shape(
            mode, nodes, acks=chance.choice((1, nodes - 1)),
            ack_point=AckPoint.FLUSHED if durable else AckPoint.WRITTEN,
            flush=Flush.SYNC if durable else Flush.ASYNC, secret=chance.random() < 0.5,
            registry=random.Random(f"registry {seed}").random() < 0.25,
        )  # fmt: skip
        may_fail = shape.acks
    else:
        nodes = chance.choice((3, 3, 3, 5))
        shape = Shape(
            mode, nodes, flush=Flush.SYNC if chance.random() < 0.8 else Flush.ASYNC,
            secret=chance.random() < 0.5,
        )  # fmt: skip
        may_fail = (nodes - 1) // 2
    groups = chance.choice((("tame",), ("tame",), ("tame", "loss"), ("tame", "loss", "beyond")))
    victims = chance.sample(range(nodes), may_fail)
    events = draw(
        chance, mode, nodes, EVENTS_S, set(groups), victims, durable=_is_durable(shape),
        registry=shape.registry,
    )  # fmt: skip
    preempts = chance.choice((0.0, 0.0, 0.02, 0.1))
    later = random.Random(f"later {seed}").random() < 0.3
    rocketmq = random.Random(f"rocketmq {seed}").random() < 0.3
    return Plan(seed, shape, groups, preempts, tuple(events), later, rocketmq)


def tour_of(mode: Mode, tour: str, seed: int = 0) -> Plan:
    """Return a walk with every kind once, in an order drawn from the seed.

    Those of class tame make one tour, "tame". The others, "rest", begin with those of class loss.
    Those that need ZooKeeper are in the tour "registry", with flips among them.
    """
    plan = plan_of(seed, mode)
    registry = tour == "registry"
    shape = Shape(mode, nodes=3, secret=tour != "tame", registry=registry)
    chance = random.Random(f"tour {mode.value} {tour} {seed}")
    groups = ("loss", "beyond") if tour == "rest" else ("tame",)
    kinds: list[str] = []
    for group in groups:
        of_group = [
            n for n, kind in KINDS.items()
            if mode in kind.modes and kind.group == group
            and (kind.registry or n in FLIPS if registry else not kind.registry)
        ]  # fmt: skip
        kinds += chance.sample(of_group, len(of_group))
    if "power of all" in kinds:  # only the victims lose power
        kinds.remove("power of all")
    events = []
    for i, kind in enumerate(kinds):
        lossy = KINDS[kind].group == "loss"
        node, other = (0, 1) if lossy else chance.sample(range(shape.nodes), 2)
        at, lasts = 2.0 + EVENTS_S * i / len(kinds), 0.5 + 2.0 * chance.random()
        events.append(Event(round(at, 2), kind, node, other, round(lasts, 2), chance.random()))
    return replace(
        plan, shape=shape, groups=tuple(dict.fromkeys(("tame", *groups))), preempts=0.02,
        events=tuple(events), later=True, rocketmq=True,
    )  # fmt: skip


def without(plan: Plan, dropped: set[int]) -> Plan:
    """Return the plan without the events at these places."""
    kept = tuple(event for i, event in enumerate(plan.events) if i not in dropped)
    return replace(plan, events=kept)


@dataclass
class Outcome:
    """What became of a walk."""

    plan: Plan
    problems: list[str]
    digest: int
    virtual_s: float
    switches: int
    fired: Counter[str]
    acked: int
    reads: int
    judged: dict[str, int]  # what the history checker has counted; empty beyond what is promised
    rocketmq: dict[str, int] = field(default_factory=dict)  # what RocketMQ's clients did
    log_lines: list[str] = field(default_factory=list)

    def story(self) -> str:
        """Return the walk as a text for people."""
        plan, shape = self.plan, self.plan.shape
        wait = "synced" if plan.durable else "written"
        lines = [
            f"seed {plan.seed}, mode {shape.mode.value}: {shape.nodes} nodes, acks {shape.acks}, "
            f"puts are acknowledged when {wait}; {self.acked} messages acknowledged",
            *(str(event) for event in plan.events),
            f"{2 + EVENTS_S:7.2f} s  everything is healed",
            *(f"    => {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)
