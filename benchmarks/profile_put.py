"""Where the microseconds of one blocking put go: CPU, context switches and system calls.

    python -m benchmarks.profile_put [--repeats 5] [--scale 1] [--dir FOLDER]

A client puts 1 KiB messages one after the other; a master and its slave store them. Each is a
process of its own, and nothing else runs. /proc is read before and after 3,000 puts, for all
threads of each process: CPU in user space and in the kernel, voluntary context switches (the thread
went to sleep, so another thread had to wake it) and involuntary ones. Then `strace -c` counts the
system calls of 300 puts, one process at a time. Traced processes are slower, so these puts are not
timed. If both transports of the client are available, they run in turn.

The total CPU is exact (schedstat, nanoseconds). Depending on the kernel, its division between user
space and kernel may be sampled: ask for more repeats in that case.
"""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import interpreter
from benchmarks.bare import BODY
from benchmarks.common import (
    BODY_BYTES,
    MIB,
    ROOT,
    Group,
    arguments,
    figure,
    machine,
    percentile,
    save,
    say,
    scratch,
)
from benchmarks.side_by_side import OURS, ZMQ, ZMQ_LABEL, zmq_hosts
from hastore.client.producer.producer import Producer

AS_CLIENT = "--as-client"
PUTS, TRACED_PUTS, WARM_PUTS = 3_000, 300, 1_000
ANSWER_S = 120.0
LABELS = {
    "cpu": ("CPU", "us a put"),
    "user": ("CPU in user space", "us a put"),
    "system": ("CPU in the kernel", "us a put"),
    "voluntary": ("voluntary context switches", "a put"),
    "involuntary": ("involuntary context switches", "a put"),
    "calls": ("system calls", "a put"),
}
Profile = dict[str, float]  # per put, by the keys of LABELS


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used so far."""

    user_ticks: int
    system_ticks: int
    thread_ns: dict[int, int]
    thread_names: dict[int, str]
    voluntary: int
    involuntary: int

    @classmethod
    def of(cls, pid: int) -> "Usage":
        """Read /proc. Threads that have ended are not counted."""
        process = pathlib.Path(f"/proc/{pid}")
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        ran: dict[int, int] = {}
        names: dict[int, str] = {}
        switches = [0, 0]
        for task in sorted((process / "task").iterdir(), key=lambda one: int(one.name)):
            thread = int(task.name)
            ran[thread] = int((task / "schedstat").read_text().split()[0])
            names[thread] = (task / "comm").read_text().strip()
            status = (task / "status").read_text()
            for place, kind in enumerate(("voluntary", "nonvoluntary")):
                found = re.search(rf"^{kind}_ctxt_switches:\s+(\d+)", status, re.M)
                switches[place] += int(found.group(1)) if found else 0
        return cls(int(fields[11]), int(fields[12]), ran, names, *switches)

    def since(self, before: "Usage", puts: int) -> Profile:
        """Return the usage per put since `before`."""
        cpu_us = sum(self.threads_us(before, puts).values())
        user = self.user_ticks - before.user_ticks
        system = self.system_ticks - before.system_ticks
        share = user / (user + system) if user + system else 1.0
        return {
            "cpu": cpu_us,
            "user": cpu_us * share,
            "system": cpu_us * (1 - share),
            "voluntary": (self.voluntary - before.voluntary) / puts,
            "involuntary": (self.involuntary - before.involuntary) / puts,
        }

    def threads_us(self, before: "Usage", puts: int) -> dict[int, float]:
        """Return the CPU us per put of each thread."""
        return {
            thread: (ns - before.thread_ns.get(thread, 0)) / 1e3 / puts
            for thread, ns in self.thread_ns.items()
        }


class Client:
    """A process with one Producer, which puts as many messages as `put` asks for."""

    def __init__(self, bootstrap: list[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.profile_put", AS_CLIENT, *bootstrap]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()  # this ends the process
        try:
            self._process.wait(ANSWER_S)
        finally:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def put(self, count: int) -> list[float]:
        """Return the duration of each of `count` blocking puts, in ms."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the client has ended")
        took: list[float] = json.loads(line)
        return took


def serve_puts(bootstrap: list[str]) -> None:
    """Run the client's process: put as many messages as each line of stdin says."""
    with Producer(bootstrap, max_in_flight=1) as producer:
        for line in sys.stdin:
            clock, took = time.perf_counter, []
            for _ in range(int(line)):
                began = clock()
                producer.send_sync("blocking", BODY)
                took.append((clock() - began) * 1_000.0)
            print(json.dumps(took), flush=True)


def parse_counts(text: str) -> dict[str, int]:
    """Return the number of calls of each system call from the table of `strace -c`."""
    # % time, seconds, usecs/call, calls, errors (may be empty), name
    row = re.compile(r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?([a-z]\w+)$", re.M)
    counts = {name: int(calls) for calls, name in row.findall(text)}
    counts.pop("total", None)
    return counts


def traced(pid: int, folder: pathlib.Path, client: Client, count: int) -> dict[str, float]:
    """Return how often one process made each system call, per put.

    Raises RuntimeError if strace may not attach to it.
    """
    table = folder / "strace"
    strace = subprocess.Popen(
        ["strace", "-c", "-f", "-o", str(table), "-p", str(pid)], stderr=subprocess.PIPE, text=True
    )
    assert strace.stderr is not None
    try:
        first = strace.stderr.readline()
        if "attached" not in first or strace.poll() is not None:
            raise RuntimeError(first.strip() or "strace has ended")
        client.put(count)
    finally:
        strace.send_signal(signal.SIGINT)  # strace writes its table and detaches
        try:
            strace.communicate(timeout=ANSWER_S)
        finally:
            strace.kill()
    return {name: calls / count for name, calls in parse_counts(table.read_text()).items()}


class Runs:
    """The measurements of one transport, for each repeat."""

    def __init__(self, client: Client, group: Group) -> None:
        self._client = client
        self._pids = {"client": client.pid, "master": group[1].pid, "slave": group[2].pid}
        self.took: list[list[float]] = []
        self.profiles: dict[str, list[Profile]] = {who: [] for who in self._pids}
        self.threads: dict[str, list[tuple[str, float]]] = {}  # of the last repeat
        self.calls: dict[str, dict[str, float]] = {}  # of the last repeat

    def measure(self, count: int) -> None:
        """Put `count` messages, and keep what each process used."""
        before = {who: Usage.of(pid) for who, pid in self._pids.items()}
        self.took.append(self._client.put(count))
        for who, pid in self._pids.items():
            after = Usage.of(pid)
            self.profiles[who].append(after.since(before[who], count))
            used = after.threads_us(before[who], count)
            self.threads[who] = [
                (after.thread_names[thread], round(us, 1)) for thread, us in used.items()
            ]

    def trace(self, folder: pathlib.Path, count: int) -> None:
        """Count the system calls of each process, one process after the other."""
        for who, pid in self._pids.items():
            self.calls[who] = traced(pid, folder, self._client, count)
            self.profiles[who][-1]["calls"] = sum(self.calls[who].values())

    def median(self, who: str, key: str) -> float | None:
        """Return the median of one number of one process; None if it was not measured."""
        found = [profile[key] for profile in self.profiles[who] if key in profile]
        return statistics.median(found) if found else None


def figures_of(all_runs: dict[str, Runs]) -> list[dict[str, Any]]:
    """Return the figures, against those over libzmq if that ran."""
    ours, other = all_runs[OURS], all_runs.get(ZMQ)
    out = []
    for label, of in (("p50", 0.50), ("p99", 0.99)):
        times = [[percentile(took, of) for took in run.took] for run in (ours, other) if run]
        theirs = times[1] if other else []
        out.append(figure(f"one blocking put alone, {label}", "ms", times[0], ZMQ_LABEL, theirs))
    for who, profiles in ours.profiles.items():
        for key, (label, unit) in LABELS.items():
            mine = [one[key] for one in profiles if key in one]
            theirs = [one[key] for one in other.profiles[who] if key in one] if other else []
            if all(theirs) and mine:
                out.append(figure(f"{who}, {label}", unit, mine, ZMQ_LABEL, theirs))
            elif mine:  # the peer's figure is 0 or missing: no ratio
                out.append(figure(f"{who}, {label}", unit, mine))
    return out


def show(all_runs: dict[str, Runs]) -> None:
    """Print a table of the medians to stderr, then the CPU of each thread and the calls."""
    heads = ("process", "CPU us", "user", "system", "voluntary", "involuntary", "system calls")
    table = Table("client's transport", *heads, title="a put, medians", box=None)
    for system, runs in all_runs.items():
        for who in runs.profiles:
            medians = [runs.median(who, key) for key in LABELS]
            numbers = ["" if value is None else f"{value:.2f}" for value in medians]
            table.add_row(system, who, *numbers)
    console = Console(stderr=True, width=120)
    console.print(table)
    for system, runs in all_runs.items():
        for who, threads in runs.threads.items():
            used = ", ".join(f"{name} {us:g}" for name, us in threads if us >= 0.5)
            say(f"{system}, {who}, CPU us by thread, oldest first: {used}")
        for who, calls in runs.calls.items():
            often = sorted(calls.items(), key=lambda item: -item[1])
            said = ", ".join(f"{name} {number:.2f}" for name, number in often if number >= 0.02)
            say(f"{system}, {who}, system calls: {said}")


def start_clients(stack: contextlib.ExitStack, group: Group, puts: int) -> dict[str, Runs]:
    """Start a client for each available transport, and warm it up."""
    all_runs: dict[str, Runs] = {}
    for name, hosts in ((OURS, group.bootstrap), (ZMQ, zmq_hosts(group.bootstrap))):
        if hosts is not None:
            client = stack.enter_context(Client(hosts))
            client.put(puts)
            all_runs[name] = Runs(client, group)
    return all_runs


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    count = max(100, int(PUTS * given.scale))
    strace = shutil.which("strace") is not None
    if not strace:
        say("system calls are left out: strace is not installed")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 4 * 1024 * MIB))
        group = stack.enter_context(Group(folder))
        group.start()
        all_runs = start_clients(stack, group, max(100, int(WARM_PUTS * given.scale)))
        names = list(all_runs)
        for repeat in range(given.repeats):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                all_runs[name].measure(count)
                try:
                    if strace:
                        all_runs[name].trace(folder, min(count, TRACED_PUTS))
                except RuntimeError as reason:
                    say(f"system calls are left out: {reason}")
                    strace = False
            p50 = {name: percentile(runs.took[-1], 0.5) for name, runs in all_runs.items()}
            text = ", ".join(f"{name} {value:.3f} ms" for name, value in p50.items())
            say(f"profile_put {repeat + 1}/{given.repeats}: {text}")
    say(interpreter.text_of(machine()))
    show(all_runs)
    settings = {
        "body": BODY_BYTES,
        "puts": count,
        "threads_us": {name: runs.threads for name, runs in all_runs.items()},
        "calls": {name: runs.calls for name, runs in all_runs.items()},
    }
    save("profile_put", figures_of(all_runs), settings)


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_CLIENT]:
        serve_puts(sys.argv[2:])
    else:
        main()
