"""Run nodes as real processes: start, flip, kill and query them; they are always reaped.

    with Group(tmp_path) as group:
        group.start()                       # node 1 SYNC_MASTER, the others SLAVE
        group[1].kill()
        group[2].edit_role("SYNC_MASTER")
        group[2].wait_writable()

Ports are reserved for the life of a Group. They are below the kernel's range of ephemeral ports, so
that no outgoing connection takes one while its node is down. A socket that is bound but does not
listen holds each of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from hastore.testing import warm
from hastore.testing.groups import Ports

if TYPE_CHECKING:
    from tests.process.networks import Network

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Limits that only a hang exceeds, on a busy machine with slow cores too.
START_S = 120.0
STOP_S = 120.0
SETTLE_S = 120.0
POLL_S = 0.02
SMALL_FILES = {
    "commitlog_file_size": "64KiB",
    "consume_queue_units": 300,
    "index_slots": 100,
    "index_entries": 400,
}  # so that tests reach the ends of files
# No master appends by itself (it states the ends of quiet queues) while a test compares logs.
NO_OWN_RECORDS = {"check_interval": "24h"}
Status = dict[str, Any]
# Ignores the proxies that the environment may set.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def audit_lines(store: str | os.PathLike[str], action: str = "") -> list[dict[str, Any]]:
    """Return the lines of a node's audit log; not the last one while the node still writes it."""
    path = pathlib.Path(store) / "hastore" / "audit.log"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [one for one in map(json.loads, whole.splitlines()) if action in ("", one["action"])]


def wait_until(what: Callable[[], Any], timeout_s: float, text: str | Callable[[], str]) -> Any:
    """Return the first true value of `what()`; raise AssertionError with `text` if none comes."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(text() if callable(text) else text)
        time.sleep(POLL_S)


def hastore(
    *arguments: str, timeout_s: float = 180.0, stdin: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `hastore ARGUMENTS` to its end; return its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / "hastore"), *arguments],
        capture_output=True,
        input=stdin,
        timeout=timeout_s,
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


class Node:
    """One node: its configuration file, its store and, while it runs, its process."""

    def __init__(
        self,
        number: int,
        folder: pathlib.Path,
        settings: dict[str, Any],
        namespace: str | None = None,
    ) -> None:
        self.number = number
        self._namespace = namespace  # the path of its network; None: that of this process
        self.launcher: list[str] = []  # a script that runs the program (faulty_node.py)
        self.token: str | None = None  # NAME:KEY of who asks for the status, with identities
        self.cold = False  # whether a new interpreter runs it, not a fork of one (warm.py)
        self.settings = settings
        self.path = folder / f"node{number}.yaml"
        self.store = pathlib.Path(settings["store"]["root"])
        own = settings["nodes"][number]
        self.api: str = own["api"]
        self.ha: str = own["ha"]
        self.http: str = own["http"]
        self.process: subprocess.Popen[bytes] | warm.WarmProcess | None = None
        self.ready: dict[str, str] = {}
        self._out = folder / f"node{number}.out"
        self._err = folder / f"node{number}.err"
        self._err.touch()
        self._paused = False
        self.write()

    # ---- the file

    def write(self, **changes: Any) -> None:
        """Rewrite the configuration with `changes`; a dict is merged into its section."""
        for key, value in changes.items():
            if isinstance(value, Mapping) and isinstance(self.settings.get(key), dict):
                self.settings[key] = {**self.settings[key], **value}
            else:
                self.settings[key] = value
        self.replace_file(yaml.safe_dump(self.settings, sort_keys=False))

    def replace_file(self, text: str) -> None:
        """Give the configuration file another text in one step: a running node reads no half."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.path)

    @property
    def file_role(self) -> str:
        """The role in the configuration file."""
        return str(yaml.safe_load(self.path.read_text())["role"])

    def edit_role(self, role: str) -> None:
        """Change the line with the role in place, as a person would: a node may read half of it."""
        lines = self.path.read_text().splitlines()
        text = "\n".join(f"role: {role}" if line.startswith("role:") else line for line in lines)
        self.path.write_text(text + "\n")
        self.settings["role"] = role

    # ---- the process

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None, f"node {self.number} does not run"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def start(self, kind: str = "serve", *arguments: str, wait: bool = True) -> Node:
        """Start `hastore-master`, `hastore-slave` or `hastore serve`; wait for the ready line."""
        assert self.process is None, f"node {self.number} runs already"
        program = ["hastore", "serve"] if kind == "serve" else [f"hastore-{kind}"]
        command = [*self.launcher, str(ROOT / "bin" / program[0]), *program[1:]]
        command += ["-c", str(self.path), *arguments]
        self.ready = {}
        with open(self._out, "wb") as out, open(self._err, "ab") as err:
            if self.cold:
                enter = [] if self._namespace is None else ["nsenter", f"--net={self._namespace}"]
                self.process = subprocess.Popen(
                    [*enter, sys.executable, *command],
                    stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                )  # fmt: skip
            else:
                self.process = warm.start(
                    command, stdout=out, stderr=err, namespace=self._namespace
                )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = START_S) -> dict[str, str]:
        """Wait for the ready line; return its fields."""

        def look() -> bool:
            text = self._out.read_text()
            if "\n" in text:
                word, *pairs = text.splitlines()[0].split()
                assert word == "ready", text
                self.ready = dict(pair.split("=", 1) for pair in pairs)
                return True
            assert self.running, f"node {self.number} ended: {self.last_words()}"
            return False

        wait_until(look, timeout_s, lambda: f"node {self.number} not ready: {self.last_words()}")
        return self.ready

    def exit_code(self, timeout_s: float = START_S) -> int:
        """Wait until the process ends by itself; return its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        finally:
            if self.process.poll() is not None:
                self.process = None
                self._paused = False

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self._paused = False

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Send SIGTERM; return the exit code. Fails if the process does not end in time."""
        self.send(signal.SIGTERM)
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = STOP_S) -> int:
        """Return the exit code after SIGTERM. Fails if the process does not end in time."""
        try:
            return self.exit_code(timeout_s)
        except subprocess.TimeoutExpired:
            stacks = self.last_words(40)
            self.kill()
            raise AssertionError(
                f"node {self.number} did not stop within {timeout_s:g} s: {stacks}"
            ) from None

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Send SIGSTOP, and wait until every thread has stopped."""
        self.send(signal.SIGSTOP)
        self._paused = True
        tasks = pathlib.Path(f"/proc/{self.pid}/task")
        wait_until(
            lambda: all(
                (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for task in tasks.iterdir()
            ),
            60,
            f"node {self.number} does not stop",
        )

    def resume(self) -> None:
        """Send SIGCONT."""
        self.send(signal.SIGCONT)
        self._paused = False

    def resident_bytes(self) -> int:
        """Return the size of the resident set."""
        for line in pathlib.Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def clients(self) -> int:
        """Return the number of the API's connections, accepted or not, that it has not ended."""
        port = f":{int(self.api.rpartition(':')[2]):04X}"
        rows = pathlib.Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        fields = [row.split() for row in rows]
        open_states = ("01", "08")  # ESTABLISHED, CLOSE_WAIT
        return sum(own.endswith(port) and state in open_states for _, own, _, state, *_ in fields)

    # ---- logs and status

    @property
    def log(self) -> str:
        """The node's stderr, of all its starts."""
        return self._err.read_text(errors="replace")

    def last_words(self, lines: int = 8) -> str:
        """Return the last lines of stderr as one line."""
        return " | ".join(self.log.strip().splitlines()[-lines:])

    def last_lines(self, lines: int) -> str:
        """Return the last lines of stderr."""
        return "\n".join(self.log.strip().splitlines()[-lines:])

    def wait_log(self, text: str, timeout_s: float = SETTLE_S, *, since: int = 0) -> str:
        """Wait until stderr holds `text` (from character `since` on); return that line."""
        wait_until(
            lambda: text in self.log[since:],
            timeout_s,
            lambda: f"node {self.number} never said {text!r}: {self.last_words()}",
        )
        return next(line for line in self.log[since:].splitlines() if text in line)

    def status(self) -> Status | None:
        """Return the status object over HTTP, or None without an answer."""
        asked = urllib.request.Request(f"http://{self.http}/status")
        if self.token is not None:
            asked.add_header("Authorization", f"Bearer {self.token}")
        try:
            with _DIRECT.open(asked, timeout=30) as answer:
                status: Status = json.loads(answer.read())
                return status
        except (OSError, urllib.error.URLError, ValueError):
            return None

    def wait_status(
        self, right: Callable[[Status], Any], text: str, timeout_s: float = SETTLE_S
    ) -> Status:
        """Wait until `right(status)` is true; return the status."""
        seen: list[Status | None] = [None]

        def look() -> Status | None:
            assert self.process is None or self.running, (
                f"node {self.number} died while waiting for: {text}: {self.last_words()}"
            )
            seen[0] = status = self.status()
            return status if status is not None and right(status) else None

        status: Status = wait_until(
            look,
            timeout_s,
            lambda: f"node {self.number}, waiting for {text}: {seen[0]}; {self.last_words()}",
        )
        return status

    def wait_writable(self, timeout_s: float = SETTLE_S) -> Status:
        """Wait until the node accepts puts."""
        return self.wait_status(lambda s: s["writable"], "writable", timeout_s)

    def wait_in_sync(self, *numbers: int, timeout_s: float = SETTLE_S) -> Status:
        """Wait until the slaves `numbers` of this master are in sync."""

        def right(status: Status) -> bool:
            good = {slave["node"] for slave in status["slaves"] if slave["in_sync"]}
            return good.issuperset(numbers)

        return self.wait_status(right, f"in sync: {numbers}", timeout_s)


class Group:
    """The nodes of a group, with their files and ports; its end leaves no process running."""

    def __init__(
        self,
        folder: pathlib.Path,
        count: int = 2,
        *,
        acks: int = 1,
        master_role: str = "SYNC_MASTER",
        store: Mapping[str, Any] | None = None,
        retention: Mapping[str, Any] = NO_OWN_RECORDS,
        ha: Mapping[str, Any] | None = None,
        network: Network | None = None,
        cold: bool = False,
    ) -> None:
        self.folder = folder
        self._ports = Ports()
        self.nodes: dict[int, Node] = {}
        addresses = network.addresses if network else self._ports.addresses(count)
        beyond = network.settings(folder) if network else {}
        for number in addresses:
            self.nodes[number] = Node(
                number,
                folder,
                {
                    "cluster": "test",
                    "group": "g0",
                    "node": number,
                    "role": master_role if number == 1 else "SLAVE",
                    "acks": acks,
                    "nodes": {
                        n: dict(a)
                        for n, a in (network.seen_by(number) if network else addresses).items()
                    },
                    "store": {
                        "root": str(folder / f"store{number}"),
                        **SMALL_FILES,
                        **(store or {}),
                    },
                    "retention": dict(retention),
                    "ha": {
                        "heartbeat_interval": "1s",
                        "housekeeping_interval": "5s",
                        **beyond.get("ha", {}),
                        **(ha or {}),
                    },
                    "api": beyond.get("api", {}),
                },
                network.namespace(number) if network else None,
            )
            self.nodes[number].cold = cold

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __getitem__(self, number: int) -> Node:
        return self.nodes[number]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    @property
    def bootstrap(self) -> list[str]:
        """The addresses for clients."""
        return [node.api for node in self]

    def start(self) -> Group:
        """Start all nodes at the same time; wait until every slave of the master is in sync."""
        for node in self:
            node.start("slave" if node.file_role == "SLAVE" else "master", wait=False)
        for node in self:
            node.wait_ready()
        masters = [node for node in self if node.file_role != "SLAVE"]
        if masters:
            masters[0].wait_writable()
            masters[0].wait_in_sync(*(n for n in self.nodes if n != masters[0].number))
        return self

    def wait_equal(self, timeout_s: float = SETTLE_S) -> int:
        """Wait until all nodes have the same end offset, confirmed and replayed; return it."""

        def look() -> int | None:
            statuses = [node.status() for node in self if node.running]
            ends = {status["max_offset"] if status else None for status in statuses}
            if len(ends) != 1 or None in ends:
                return None
            end: int = ends.pop()
            done = all(
                status is not None
                and status["dispatched_offset"] == end
                and status["confirmed_offset"] == end
                for status in statuses
            )
            return end + 1 if done else None

        def text() -> str:
            keys = ("node", "role", "epoch", "max_offset", "dispatched_offset")
            keys += ("confirmed_offset", "reason")
            seen = [
                {key: status[key] for key in keys} if (status := node.status()) else None
                for node in self
            ]
            return f"the logs did not become equal: {seen}"

        return int(wait_until(look, timeout_s, text)) - 1

    def stop(self) -> None:
        """Stop all nodes that run at the same time; each must end with code 0."""
        running = [node for node in self if node.running]
        for node in running:
            node.send(signal.SIGTERM)
        for node in running:
            assert node.ended() == 0, f"node {node.number}: {node.last_words()}"

    def close(self) -> None:
        """Kill and reap all nodes, and release the ports."""
        for node in self:
            with contextlib.suppress(ProcessLookupError):
                node.kill()
        self._ports.close()
