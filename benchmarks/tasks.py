"""An operator's tasks, with the times that they take, beside RocketMQ, Kafka, NATS and Redis.

    python -m benchmarks.tasks [--repeats 3] [--scale 1] [--dir FOLDER]

It ends with the table for docs/benchmarks.md. Each system is started anew for each repeat, one
after the other; operated.py says how each does the task. A sender puts one after the other and
tries again at once if one fails; the pause of a task is the longest time between two confirmed
messages. Every system keeps each message on another node before it confirms it; how durably differs
(docs/benchmarks.md).
"""

import contextlib
import pathlib
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import MIB, Spread, arguments, figure, save, say, scratch
from benchmarks.maven import NoPeer, peer_version
from benchmarks.operated import SYSTEMS, Operated
from benchmarks.report import spread_text, table_of

FILL_MIB = 256
AROUND = 20  # confirmed messages before a task, and after it
LIMIT_S = 180.0
TASKS = {
    "start": "start: from nothing to the first confirmed message",
    "planned": "planned switch: the longest pause of sends",
    "planned_whole": "planned switch: the command's own time",
    "crash": "SIGKILL of the node that takes puts: the longest pause of sends",
    "empty_disk": f"a node with an empty disk has {FILL_MIB} MiB",
    "backup": f"backup of {FILL_MIB} MiB, live",
    "restore": f"restore of {FILL_MIB} MiB, until it serves",
}


class Sender:
    """Sends one message after the other in a thread, and notes when each was confirmed."""

    def __init__(self, system: Operated) -> None:
        self._system = system
        self._over = threading.Event()
        self._more = threading.Condition()
        self.times = [time.perf_counter()]
        self.last: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sender":
        self._thread.start()
        self.wait_for(AROUND)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join(LIMIT_S)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._system.send()
            except Exception as failure:  # each system has errors of its own; it is tried again
                self.last = failure
                self._over.wait(0.005)
                continue
            with self._more:
                self.times.append(time.perf_counter())
                self._more.notify_all()

    def wait_for(self, count: int) -> None:
        """Wait until so many more messages are confirmed."""
        with self._more:
            due = len(self.times) + count
            if not self._more.wait_for(lambda: len(self.times) >= due, LIMIT_S):
                raise RuntimeError(f"{self._system.name} confirms nothing: {self.last!r}")

    def longest(self, since: float) -> float:
        """Return the longest pause that ended after a moment."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(after - before for before, after in pairs if after > since)


def pause(system: Operated, task: Callable[[], None]) -> tuple[float, float]:
    """Do a task while messages are sent; return the longest pause, and the task's seconds."""
    with Sender(system) as sender:
        began = time.perf_counter()
        task()
        took = time.perf_counter() - began
        sender.wait_for(AROUND)
        return sender.longest(began), took


def timed(task: Callable[[], None]) -> float:
    """Return the seconds of a task."""
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def run_system(system: Operated, folder: pathlib.Path, size: int) -> dict[str, float]:
    """Do all tasks once; return their seconds."""
    found: dict[str, float] = {"start": timed(system.start)}
    found["planned"], found["planned_whole"] = pause(system, system.planned)
    if system.planned_stops:
        system.heal()
    found["crash"] = pause(system, system.crash)[0]
    system.heal()
    system.fill(size)
    system.lose_disk()
    found["empty_disk"] = timed(system.empty_disk)
    target = folder / "backup"
    with contextlib.suppress(NotImplementedError):
        found["backup"] = timed(lambda: system.backup(target))
        found["restore"] = timed(lambda: system.restore(target))
    return found


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    size = int(FILL_MIB * MIB * given.scale)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    missing: set[str] = set()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 12 * 1024 * MIB))
        for repeat in range(given.repeats):
            for make in SYSTEMS:
                place = folder / "one"
                place.mkdir()
                try:
                    with make(place / "system") as system:
                        found = run_system(system, place, size)
                        name = system.name
                except NoPeer as reason:
                    name = make.name
                    if name not in missing:
                        say(f"{name} is left out: {reason}")
                    missing.add(name)
                    continue
                finally:
                    shutil.rmtree(place)
                for task, took in found.items():
                    seconds[task][name].append(took)
                say(
                    f"tasks {repeat + 1}/{given.repeats}, {name}: "
                    + ", ".join(f"{task} {took:.2f} s" for task, took in found.items())
                )
    figures: list[dict[str, Any]] = []
    for task, text in TASKS.items():
        figures += [
            figure(f"{text}; {name}", "s", found) for name, found in seconds[task].items()
        ]
    versions = {one: peer_version(one) for one in ("rocketmq", "kafka")}
    save("tasks", figures, {"fill_mib": FILL_MIB * given.scale, **versions})
    print(table(seconds), end="")


def table(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return the table of docs/benchmarks.md: seconds by task and system, and how it is done."""
    systems = [system for system in SYSTEMS if system.name in seconds["start"]]
    lines = []
    for task, text in TASKS.items():
        cells = []
        for system in systems:
            took = seconds[task].get(system.name)
            cell = "" if took is None else spread_text(Spread.of(took).as_dict())
            cells.append("; ".join(filter(None, (cell, system.note.get(task, "")))))
        lines.append((text, *cells))
    return table_of(("seconds", *(system.name for system in systems)), lines)


if __name__ == "__main__":
    main()
