"""Let nodes work for a long time under clients that come and go, and say what grows: make soak.

The exit code is 1 if a series grows, a message is lost or a node is not idle at the end, and 2 if
the soak itself failed, or its clients did nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hastore.config.model import Mode
from tests.process.harness import wait_until
from tests.soak.sampler import Sample, Sampler, not_idle, write_csv, write_plot
from tests.soak.series import COLUMNS, Verdict, cells, warm_up_s
from tests.soak.watched_node import LEAKS
from tests.soak.world import Clients, World, cpu_count, raise_descriptors

TOPICS = 20
SAMPLES = 180
LEAST_S, MOST_S = 0.25, 10.0  # between two samples
IDLE_S = 150.0  # within which nodes are idle after the last client
TYPES = 12  # shown, of those that have grown


@dataclass
class Outcome:
    """What a soak has found."""

    verdicts: list[Verdict] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # lost messages, nodes that are not idle
    looked: int = 0  # acknowledged messages that were looked for
    counts: Counter[str] = field(default_factory=Counter)
    # By node: the types of objects of which there are more than after the warm-up, and how many
    # were garbage; with HASTORE_SOAK_TRACE the places where more bytes were taken.
    grown: dict[int, dict[str, dict[str, int]]] = field(default_factory=dict)

    @property
    def growing(self) -> list[Verdict]:
        """The series that grow."""
        return [one for one in self.verdicts if one.grows]


def parsed(words: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1_800.0)
    parser.add_argument("--seed", type=int, default=0, help="repeats the choices; 0: a new one")
    parser.add_argument("--mode", choices=[one.value for one in Mode], default="classic")
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--no-fill", action="store_true", help="do not fill tables beforehand")
    parser.add_argument("--leak", choices=LEAKS, help="plant this in node 1: the run must fail")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--csv", metavar="FILE", help="all samples")
    parser.add_argument("--plot", metavar="FILE", help="a picture, if matplotlib is there")
    return parser.parse_args(words)


def soak(folder: pathlib.Path, given: argparse.Namespace) -> Outcome:
    """Run a soak in a folder."""
    chance = random.Random(given.seed)
    outcome = Outcome()
    mode = Mode(given.mode)
    # Of a node: all of them may be there while it alone is up.
    most = given.connections + 200
    with World(folder, mode, chance, connections=most, leak=given.leak) as world:
        short = min(1.0, given.seconds / 120.0)
        shared = {
            "topics": TOPICS, "groups": given.groups, "life_s": 60.0 * short,
            "step_s": 20.0 * short, "ramp_s": 30.0 * short, "pause_s": 0.2,
            "connections": given.connections,
        }  # fmt: skip
        filling = {"producers": 0} if given.no_fill else {}
        _say("the nodes run; tables are filled")
        filler = Clients("fill", world.arguments(**shared, **filling))
        filler.leave()
        filler.ended()
        interval_s = min(MOST_S, max(LEAST_S, given.seconds / SAMPLES))
        sampler = Sampler(world.slots, world.gauges_of, interval_s)
        lives = sampler.lives
        world.on_start = lambda: lives.update({3: lives[3] + 1})
        idle = {place: _looked(sampler, place) for place in lives}
        _say("the clients begin")
        running = [
            Clients(kind, world.arguments(**shared))
            for kind in ("crowd", "producers", "consumers", "transactions", "topics")
        ]
        try:
            _go_on(world, running, sampler, given.seconds, outcome)
            _say("the clients end")
            for one in running:
                one.leave()
            for one in running:
                one.ended()
        finally:
            for one in running:
                one.kill()
        _say("the clients have ended")
        for one in running:
            outcome.counts.update(one.counts)
        outcome.samples = sampler.samples
        outcome.verdicts = sampler.verdicts()
        for place in lives:
            outcome.wrong += _idle_again(sampler, place, idle[place].values)
        _say("the nodes are idle; acknowledged messages are looked for")
        outcome.counts["MiB removed by retention"] = world.removed_bytes() >> 20
        outcome.counts.update(world.done)
        outcome.looked, lost = world.lost()
        outcome.wrong += lost
    return outcome


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _looked(sampler: Sampler, place: int) -> Sample:
    found: Sample = wait_until(lambda: sampler.look(place), 60.0, f"node {place} is silent")
    return found


def _go_on(
    world: World, running: list[Clients], sampler: Sampler, seconds: float, outcome: Outcome
) -> None:
    """Let things happen for so many seconds, and sample; compare objects of the steady nodes."""
    steady = world.steady
    begin = time.monotonic()
    world.pause_s = min(15.0, seconds / 12.0)
    before: dict[int, dict[str, Any]] = {}
    sampler.start()
    try:
        for _ in world.rounds():
            for one in running:
                one.check()
            now = time.monotonic() - begin
            if not before and now >= warm_up_s(seconds):
                before = {node.number: world.dump(node) for node in steady}
            if now >= seconds and world.done["hand_over"]:
                break
    finally:
        world.end()
        sampler.stop()
    for node in steady:
        then, now = before.get(node.number, {}), world.dump(node)
        outcome.grown[node.number] = {what: _more(then, now, what) for what in sorted(now)}


def _more(then: dict[str, Any], now: dict[str, Any], what: str) -> dict[str, int]:
    """Return what there is more of than then, the most first."""
    after = Counter(now[what])
    after.subtract(then.get(what, {}))
    return {name: count for name, count in after.most_common(TYPES) if count > 0}


def _idle_again(sampler: Sampler, place: int, before: Mapping[str, float]) -> list[str]:
    """Return what does not go back to the figure of an idle node in IDLE_S."""
    until = time.monotonic() + IDLE_S
    while (left := not_idle(before, _looked(sampler, place).values)) and time.monotonic() < until:
        time.sleep(0.5)
    return [f"node {place} is not idle again: {one}" for one in left]


def report(outcome: Outcome) -> str:
    """Return what a run has found, as text."""
    rows = [COLUMNS, *map(cells, outcome.verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines.append("")
    lines += [f"{name}: {count:,}" for name, count in sorted(outcome.counts.items())]
    for node, kinds in outcome.grown.items():
        for what, more in kinds.items():
            lines.append(f"node {node}, more {what} than after the warm-up:")
            lines += [f"    {count:12,}  {name}" for name, count in more.items()]
    lines.append(f"{outcome.looked:,} acknowledged messages looked for")
    lines += [f"WRONG: {one}" for one in outcome.wrong]
    lines += [f"GROWS: node {one.node}, {one.name}" for one in outcome.growing]
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return what a run has found, as JSON."""
    series = [
        {
            "node": one.node, "name": one.name, "first": one.first, "last": one.last,
            "per_hour": one.trend and [one.trend.low, one.trend.middle, one.trend.high],
            "judged": one.rule is not None and one.trend is not None, "grows": one.grows,
        }
        for one in outcome.verdicts
    ]  # fmt: skip
    return {"series": series, "wrong": outcome.wrong, "counts": dict(outcome.counts),
            "looked": outcome.looked, "samples": len(outcome.samples)}  # fmt: skip


def main(words: list[str]) -> int:
    """Run a soak with these options; return the exit code."""
    given = parsed(words)
    given.seed = given.seed or random.SystemRandom().getrandbits(32)
    logging.basicConfig(level=logging.CRITICAL)  # clients warn of what the soak does to them
    raise_descriptors()
    print(f"seed {given.seed}, mode {given.mode}, {given.seconds:g} s, {given.connections:,} "
          f"connections, {given.groups:,} groups, {cpu_count()} CPUs, "
          f"{time.strftime('%Y-%m-%d %H:%M')}", file=sys.stderr)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hastore-soak-") as place:
        try:
            outcome = soak(pathlib.Path(place), given)
        except Exception:
            traceback.print_exc()
            return 2
    print(report(outcome))
    if given.csv:
        write_csv(pathlib.Path(given.csv), outcome.samples)
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(as_json(outcome), indent=1) + "\n")
    if given.plot and not write_plot(pathlib.Path(given.plot), outcome.samples):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return 1 if outcome.wrong or outcome.growing else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no process
    sys.exit(main(sys.argv[1:]))
