"""Samples of real nodes, every few seconds: memory, descriptors, threads, files, tables.

memory          RssAnon of /proc, MiB: without the pages of files, which are the page cache's
heap, blocks    what malloc and Python have given out (watched_node.py); MiB, blocks
threads, connections, waiting puts, parked pulls, topics, groups, open transactions, delayed
open files      descriptors that are no sockets
other sockets   descriptors of sockets beyond the connections of clients
store files, store    of the whole store, MiB on the disk; `archives` is what of it is rescued/
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pathlib
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tests.process.harness import Node
from tests.soak.series import MIB, Points, Verdict, judge

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LINE = re.compile(r"^(hastore_\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_METRICS = {
    "connections": "hastore_connections",
    "waiting puts": "hastore_waiting_puts",
    "parked pulls": "hastore_parked_pulls",
    "topics": "hastore_topics",
    "groups": "hastore_consumer_groups",
    "open transactions": "hastore_open_transactions",
    "delayed": "hastore_delayed_messages",
    "log files": "hastore_log_files",
}
ORDER = (
    *("memory", "heap", "blocks", "threads", "connections", "other sockets", "open files"),
    *("store files", "store", "archives", "log files", "topics", "groups", "waiting puts"),
    *("parked pulls", "open transactions", "delayed"),
)
# What an idle node goes back to, and by how much it may differ: links on which requests of clients
# are forwarded stay for a while, and so do threads that were needed.
IDLE = {"connections": 0, "other sockets": 6, "threads": 8, "parked pulls": 0, "waiting puts": 0}


def process_values(pid: int) -> dict[str, float]:
    """Return what /proc says of a process; raises OSError if it has ended."""
    found: dict[str, float] = {}
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, text = line.partition(":")
        if name == "RssAnon":
            found["memory"] = int(text.split()[0]) * 1024 / MIB
        elif name == "Threads":
            found["threads"] = int(text)
    sockets = files = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry.path).startswith("socket:"):
                sockets += 1
            else:
                files += 1
    found["open files"], found["sockets"] = files, sockets
    return found


def store_values(store: pathlib.Path) -> dict[str, float]:
    """Return the files of a store, and what they take; files may come and go meanwhile."""
    files, size, archives = 0, 0, 0
    for folder, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                taken = os.lstat(f"{folder}/{name}").st_blocks * 512
                files += 1
                size += taken
                archives += taken if "/rescued" in folder else 0
    return {"store files": files, "store": size / MIB, "archives": archives / MIB}


def metric_values(page: str) -> dict[str, float]:
    """Return what a page of /metrics says, samples of one metric added up."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(page):
        sums[name] = sums.get(name, 0.0) + float(value)
    return {name: sums[metric] for name, metric in _METRICS.items() if metric in sums}


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of a node at a time. `life` counts its starts."""

    time_s: float
    node: int
    life: int
    values: Mapping[str, float]


def series_of(samples: Iterable[Sample], name: str, node: int) -> Points:
    """Return a series of a node, of all its lives."""
    return [
        (one.time_s, one.values[name]) for one in samples if one.node == node and name in one.values
    ]


class Sampler:
    """Samples the nodes, by their places, in a thread of its own; `lives` counts their starts."""

    def __init__(
        self,
        nodes: Callable[[], Mapping[int, Node]],
        gauges: Callable[[Node], pathlib.Path],
        interval_s: float,
    ) -> None:
        self._nodes = nodes
        self._gauges = gauges
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._begin = time.monotonic()
        self.samples: list[Sample] = []
        self.lives: dict[int, int] = dict.fromkeys(nodes(), 0)
        self.missed = 0  # looks at a node that did not answer, or did not run
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End; raises what has ended the thread."""
        self._ended.set()
        self._thread.join(120.0)
        if self.failure is not None:
            raise self.failure

    def look(self, place: int) -> Sample | None:
        """Return a node's values now; None if it does not answer."""
        node, life = self._nodes()[place], self.lives[place]
        process = node.process
        if process is None:
            return None
        try:
            values = process_values(process.pid)
            asked = urllib.request.Request(f"http://{node.http}/metrics")
            if node.token is not None:
                asked.add_header("Authorization", f"Bearer {node.token}")
            with _DIRECT.open(asked, timeout=20) as answer:
                values |= metric_values(answer.read().decode())
            heap = json.loads((self._gauges(node) / "gauges").read_text())
        except (OSError, ValueError):  # it has ended, or is not up yet
            return None
        values["blocks"] = heap["blocks"]
        if "heap_bytes" in heap:
            values["heap"] = heap["heap_bytes"] / MIB
        values["other sockets"] = values.pop("sockets") - values["connections"]
        values |= store_values(node.store)
        if self.lives[place] != life:
            return None
        return Sample(time.monotonic() - self._begin, place, life, values)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._interval_s):
                for place in self.lives:
                    found = self.look(place)
                    if found is None:
                        self.missed += 1
                    else:
                        self.samples.append(found)
        except Exception as failure:
            self.failure = failure

    def series(self, name: str, node: int) -> Points:
        """Return a series of a node, of all its lives."""
        return series_of(self.samples, name, node)

    def verdicts(self) -> list[Verdict]:
        """Judge all series of all nodes.

        A process that was restarted in the run is too young for its series; its store is not.
        """
        found = []
        for place in self.lives:
            restarted = len({one.life for one in self.samples if one.node == place}) > 1
            for name in ORDER:
                points = self.series(name, place)
                if points:
                    young = restarted and not name.startswith("store")
                    found.append(judge(place, name, points, restarted=young))
        return found


def not_idle(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Return what is not back to the figure of an idle node."""
    return [
        f"{name}: {now[name]:g}, before the clients {before[name]:g}"
        for name, more in IDLE.items()
        if now[name] > before[name] + more
    ]


def write_csv(path: pathlib.Path, samples: Iterable[Sample]) -> None:
    """Write a row for each sample."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time_s", "node", "life", *ORDER])
        for one in samples:
            row = [one.values.get(name, "") for name in ORDER]
            writer.writerow([f"{one.time_s:.1f}", one.node, one.life, *row])


def write_plot(path: pathlib.Path, samples: list[Sample]) -> bool:
    """Draw each series of each node; False, and nothing, without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(ORDER), 1, figsize=(10, 2 * len(ORDER)), sharex=True)
    for name, axis in zip(ORDER, axes, strict=True):
        for node in sorted({one.node for one in samples}):
            points = [(at / 60.0, value) for at, value in series_of(samples, name, node)]
            axis.plot(*zip(*points, strict=True), label=f"node {node}", linewidth=0.8)
        axis.set_ylabel(name, fontsize=8)
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="upper left", fontsize=7)
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=80, format=path.suffix.removeprefix(".") or "png")
    pyplot.close(figure)
    return True
