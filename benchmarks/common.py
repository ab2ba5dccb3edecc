"""Shared parts of the benchmarks: nodes as processes, their CPU and memory, figures and targets.

    with Group(folder) as group:
        group.start(1)
        group.start(2)
        group.wait_in_sync()

However its block ends, a Group leaves no process running; `scratch` removes the stores.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

from benchmarks import interpreter

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = pathlib.Path(__file__).resolve().parent / "results"
BODY_BYTES = 1024
MIB = 1024 * 1024
START_S = 30.0
Status = dict[str, Any]


# ---- figures


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The minimum, median and maximum of a figure's repeats."""

    minimum: float
    median: float
    maximum: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Summarise samples."""
        return cls(min(samples), statistics.median(samples), max(samples))

    def as_dict(self) -> dict[str, float]:
        """Return the JSON form."""
        return {"min": self.minimum, "median": self.median, "max": self.maximum}


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample below which the fraction `share` of all samples lies."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A target of the project, for the ratio to the peer or for the figure itself."""

    limit: float
    sense: str  # "at least" | "at most"
    of: str = "ratio"  # | "figure"

    def met(self, value: float) -> bool:
        """Return whether a median meets the target."""
        return value >= self.limit if self.sense == "at least" else value <= self.limit


def at_least(limit: float) -> Target:
    """Return the target of a ratio of which more is better."""
    return Target(limit, "at least")


def at_most(limit: float) -> Target:
    """Return the target of a ratio of which less is better."""
    return Target(limit, "at most")


def figure(
    name: str,
    unit: str,
    samples: Sequence[float],
    peer: str | None = None,
    peer_samples: Sequence[float] = (),
    target: Target | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return one figure; its ratio is ours over the peer's, computed for each repeat.

    A peer without samples did not run; the figure then has no ratio.
    """
    out: dict[str, Any] = {"name": name, "unit": unit, "ours": Spread.of(samples).as_dict()}
    if peer is not None and peer_samples:
        ratios = [ours / theirs for ours, theirs in zip(samples, peer_samples, strict=True)]
        out |= {"peer": peer, "theirs": Spread.of(peer_samples).as_dict()}
        out["ratio"] = Spread.of(ratios).as_dict()
    judged = out["ours"] if target is not None and target.of == "figure" else out.get("ratio")
    if target is not None:
        out["target"] = {"limit": target.limit, "sense": target.sense, "of": target.of}
        out["met"] = None if judged is None else target.met(judged["median"])
        out.setdefault("peer", peer)
    return out | {"repeats": len(samples)} | more


def machine() -> dict[str, Any]:
    """Return the properties of the machine on which the figures depend, without its name."""
    model = "unknown"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = int(re.findall(r"\d+", pathlib.Path("/proc/meminfo").read_text())[0])
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / MIB, 1),
        "linux": platform.release().split("-")[0],
        "python": platform.python_version(),
        "interpreter": interpreter.describe(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "load": round(os.getloadavg()[0], 2),
    }


def save(name: str, figures: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Write `results/NAME.json`, and print the figures to stdout, one JSON object per line."""
    RESULTS.mkdir(exist_ok=True)
    document = {"benchmark": name, "machine": machine(), "settings": settings, "figures": figures}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    for one in figures:
        print(json.dumps(one), flush=True)


def say(text: str) -> None:
    """Print a line for the person at the terminal, on stderr."""
    print(text, file=sys.stderr, flush=True)


def arguments(text: str | None, **numbers: int) -> argparse.Namespace:
    """Parse the options of every benchmark: repeats, a scale for trials, the folder of the stores.

    `numbers` are the names and defaults of further options.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all amounts")
    parser.add_argument("--dir", help="folder for the stores (default: the temporary folder)")
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


# ---- processes


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What a process has used so far: CPU seconds of all threads, and memory in MiB.

    `anonymous_mib` is the part of the resident memory that is not mapped files.
    """

    cpu_s: float
    resident_mib: float
    anonymous_mib: float

    @classmethod
    def of(cls, pid: int) -> "Cost":
        """Read /proc."""
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
        sizes = {name: int(kib) / 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
        return cls(ticks / os.sysconf("SC_CLK_TCK"), sizes["VmRSS"], sizes["RssAnon"])

    def memory(self) -> dict[str, float]:
        """Return the memory in the form of the JSON results, MiB."""
        not_mapped = round(self.anonymous_mib, 1)
        return {"resident": round(self.resident_mib, 1), "not_mapped": not_mapped}


def wait_until(what: Callable[[], Any], timeout_s: float, text: str, poll_s: float = 0.01) -> Any:
    """Return the first true value of `what()`; raise TimeoutError with `text` if there is none."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(text)
        time.sleep(poll_s)


class Node:
    """One node: its configuration file, its store, and its process while it runs."""

    def __init__(self, number: int, folder: pathlib.Path, settings: dict[str, Any]) -> None:
        self.number = number
        self.settings = settings
        self.store = pathlib.Path(settings["store"]["root"])
        self.http: str = settings["nodes"][number]["http"]
        self.api: str = settings["nodes"][number]["api"]
        self.config = folder / f"node{number}.yaml"
        self.config.write_text(yaml.safe_dump(settings, sort_keys=False))
        self._errors = folder / f"node{number}.err"
        self.process: subprocess.Popen[str] | None = None
        self.token: str | None = None  # NAME:KEY, for a node that asks who its clients are

    @property
    def pid(self) -> int:
        """The process id."""
        if self.process is None:
            raise RuntimeError(f"node {self.number} does not run")
        return self.process.pid

    def start(self) -> float:
        """Start the node by its command; return the seconds until its ready line."""
        began = self.launch()
        return self.wait_ready() - began

    def launch(self) -> float:
        """Start the node's process; return the time, for `wait_ready`."""
        settings = yaml.safe_load(self.config.read_text())
        kind = "slave" if settings.get("role") == "SLAVE" else "master"
        kind = "dledger" if settings.get("mode") == "dledger" else kind
        command = [sys.executable, str(ROOT / "bin" / f"hastore-{kind}"), "-c", str(self.config)]
        began = time.perf_counter()
        with open(self._errors, "a") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        return began

    def wait_ready(self) -> float:
        """Return the time of its ready line."""
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        ready = time.perf_counter()
        if not line.startswith("ready "):
            raise RuntimeError(f"node {self.number} did not start: {self.last_words()}")
        return ready

    def check_alive(self) -> None:
        """Raise RuntimeError, with the end of its log, if the process has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"node {self.number} has ended: {self.last_words()}")

    def last_words(self) -> str:
        """Return the last lines of its stderr."""
        return " | ".join(self._errors.read_text().strip().splitlines()[-4:])

    def said(self, text: str) -> float | None:
        """Return the time of its last log line with `text`, in seconds since 1970."""
        for line in reversed(self._errors.read_text().splitlines()):
            if text in line:
                when = datetime.datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")
                return when.timestamp()
        return None

    def become(self, role: str) -> None:
        """Change the role in its file; the node applies it within a second, or at its start."""
        settings = yaml.safe_load(self.config.read_text()) | {"role": role}
        self.config.write_text(yaml.safe_dump(settings, sort_keys=False))

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and reap the process; kill it after 15 s."""
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def status(self) -> Status:
        """Return its status object."""
        request = urllib.request.Request(f"http://{self.http}/status")
        if self.token is not None:
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            status: Status = json.loads(answer.read())
        return status

    def cost(self) -> Cost:
        """Return what the process has used."""
        return Cost.of(self.pid)


def loopback_addresses(count: int) -> dict[int, dict[str, str]]:
    """Return the addresses of the nodes 1 to `count`, on free ports."""
    ports = free_ports(3 * count)
    nodes = {}
    for number in range(1, count + 1):
        api, link, http = (f"127.0.0.1:{ports.pop()}" for _ in range(3))
        nodes[number] = {"api": f"tcp://{api}", "ha": link, "http": http}
    return nodes


class Group:
    """The nodes of one group on loopback: node 1 is the master, the others are slaves."""

    def __init__(
        self,
        folder: pathlib.Path,
        count: int = 2,
        *,
        role: str = "SYNC_MASTER",
        store: Mapping[str, Any] | None = None,
        ha: Mapping[str, Any] | None = None,
        api: Mapping[str, Any] | None = None,
        security: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the nodes' files; `security` returns a node's section of that name."""
        self.folder = folder
        nodes = loopback_addresses(count)
        self._nodes = {}
        for number in nodes:
            settings: dict[str, Any] = {
                "cluster": "bench",
                "group": "g0",
                "node": number,
                "role": role if number == 1 else "SLAVE",
                "nodes": {key: dict(value) for key, value in nodes.items()},
                "store": {"root": str(folder / f"store{number}"), **(store or {})},
                "ha": dict(ha or {}),
                "api": dict(api or {}),
                **({} if security is None else {"security": dict(security(number))}),
            }
            self._nodes[number] = Node(number, folder, settings)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    def running(self) -> list[Node]:
        """Return the nodes that run."""
        return [node for node in self._nodes.values() if node.process is not None]

    def replace(self, gone: Node, new: Node) -> None:
        """Let a node take the place of one."""
        del self._nodes[gone.number]
        self._nodes[new.number] = new

    @property
    def bootstrap(self) -> list[str]:
        """The addresses for clients."""
        return [node.api for node in self._nodes.values()]

    def start(self, limit_s: float = START_S) -> None:
        """Start all nodes and wait until every slave is in sync."""
        for node in self._nodes.values():
            node.start()
        self.wait_in_sync(limit_s)

    def wait_in_sync(self, limit_s: float = START_S) -> None:
        """Wait until the master has all slaves in sync."""
        master, due = self[1], len(self._nodes) - 1

        def right() -> bool:
            for node in self._nodes.values():
                node.check_alive()
            status = master.status()
            return bool(status["writable"]) and due == sum(s["in_sync"] for s in status["slaves"])

        wait_until(right, limit_s, "the slaves did not get in sync")

    def costs(self) -> dict[str, Cost]:
        """Return what each running node has used."""
        return {
            "master" if number == 1 else f"slave {number}": node.cost()
            for number, node in self._nodes.items()
            if node.process is not None
        }

    def close(self) -> None:
        """Kill all nodes at once; their stores are not needed any more."""
        for node in self._nodes.values():
            node.stop(signal.SIGKILL)


_ports_given: set[int] = set()  # they may be bound long after `free_ports` returned them


def free_ports(count: int) -> list[int]:
    """Return free ports of loopback, outside the range of ports of outgoing connections.

    No port is returned twice in one process.
    """
    text = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    top = min(int(text.split()[0]), 60_000)
    found: list[int] = []
    candidates = range(top - 1, 1_024, -1) if top > 12_000 else range(65_535, 61_000, -1)
    skip = os.getpid() % 1_000  # two runs at the same time search different ports
    for port in candidates[skip:]:
        if port in _ports_given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            _ports_given.update(found)
            return found
    raise RuntimeError("no free ports on loopback")


@contextlib.contextmanager
def scratch(parent: str | None, need_bytes: int) -> Iterator[pathlib.Path]:
    """Lend a temporary folder with room for `need_bytes`, and remove it afterwards.

    From here on SIGTERM raises SystemExit, so that the folder is removed in that case too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="hastore-bench-", dir=parent))
    try:
        free = shutil.disk_usage(folder).free
        if free < need_bytes:
            raise SystemExit(
                f"{folder}: {free / 2**30:.1f} GiB free, {need_bytes / 2**30:.1f} needed; "
                "give another folder with --dir"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def touch_memory(folder: pathlib.Path, size: int) -> None:
    """Write and remove a file, so that the pages of the page cache have been used before.

    A virtual machine may get its memory from the host at the first touch, which costs about 2 s of
    CPU per GiB. Without this the first writer would pay for all later ones.
    """
    piece = os.urandom(MIB)
    with open(folder / "touch", "wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(piece)
    (folder / "touch").unlink()


@contextlib.contextmanager
def ended(*processes: Any) -> Iterator[None]:
    """Join the processes of multiprocessing when the block ends; kill them after 5 s."""
    try:
        yield
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()


def fill_store(root: pathlib.Path, size: int, file_size: int) -> int:
    """Write a store with about `size` bytes of 1 KiB messages, close it, return its end offset.

    The store's own append writes it, in this process, so the log is the same as a node's.
    """
    from hastore.config.model import StoreConfig
    from hastore.record.codec import Host, build_record
    from hastore.store.message_store import MessageStore

    host = Host.parse("127.0.0.1:10911")
    body = os.urandom(BODY_BYTES)
    payload = b"".join(
        build_record("bench", body, queue_id=n % 4, born_timestamp_ms=1, born_host=host)
        for n in range(500)
    )
    config = StoreConfig(root=str(root), commitlog_file_size=file_size)
    store = MessageStore(config, store_host=host)
    store.open()
    try:
        while store.max_offset + len(payload) <= size:
            store.put_encoded([payload])
        if not store.wait_dispatched(store.max_offset, 60.0):
            raise TimeoutError("replay did not reach the log's end within 60 s")
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        return store.max_offset
    finally:
        store.close()
