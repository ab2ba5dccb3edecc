"""A real group of nodes on free ports of loopback, for the tests of applications.

Each node is a process of its own: it can be killed, paused and started again. It is a fork of a
server that has imported hastore already, so a group begins in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import yaml

from hastore.cli import nodes as cli_nodes
from hastore.cli.dledger import request
from hastore.cli.flip import promote
from hastore.config.model import Mode, Role
from hastore.errors import HastoreError, UsageError
from hastore.testing import warm
from hastore.testing.folder import Folder, text_of
from hastore.testing.links import Links

TIMEOUT_S = 60.0  # a bound for what takes less than a second on a quiet machine
_POLL_S = 0.005
# Small, so that a store takes little room and is made at once.
_STORE = {"commitlog_file_size": "16MiB", "index_slots": 10_000, "index_entries": 40_000}
# Ignores the proxies that the environment may set.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_T = TypeVar("_T")
_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


class Node:
    """A node of a `Group`: its addresses, its files and, while it runs, its process."""

    def __init__(self, number: int, folder: pathlib.Path, settings: dict[str, Any]) -> None:
        """Take the content of its configuration file; `Group` makes the nodes."""
        own = settings["nodes"][number]
        self.number = number
        self.api: str = own["api"]  # "tcp://HOST:PORT", for clients
        self.ha: str = own["ha"]  # HOST:PORT
        self.http: str = own["http"]
        self.config = folder / f"node{number}.yaml"  # its configuration file
        self.store = pathlib.Path(settings["store"]["root"])
        self.log = folder / f"node{number}.log"  # what it writes to stderr
        self._out = folder / f"node{number}.out"
        self._process: warm.WarmProcess | None = None
        self._paused = False

    def __repr__(self) -> str:
        """Name the node, and whether it runs."""
        return f"<Node {self.number} {self.api}{'' if self.running else ', not running'}>"

    @property
    def running(self) -> bool:
        """Whether its process runs; a paused one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The number of its process; raises UsageError if it does not run."""
        return self._running().pid

    def start(self, *, wait: bool = True) -> None:
        """Start it; with `wait`, return once it serves. Raises HastoreError if it ends instead."""
        if self.running:
            raise UsageError(f"node {self.number} runs already")
        command = [str(cli_nodes.__file__), "serve", "-c", str(self.config)]
        with open(self._out, "wb") as out, open(self.log, "ab") as log:
            self._process = warm.start(command, stdout=out, stderr=log)
        self._paused = False
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it serves clients; raises HastoreError if it ends instead."""

        def look() -> bool:
            if self._out.read_bytes().startswith(b"ready "):
                return True
            self.check_running()
            return False

        _wait(look, f"node {self.number} to serve")

    def check_running(self) -> None:
        """Raise HastoreError, with the last line of its log, if its process has ended."""
        if not self.running:
            raise HastoreError(f"node {self.number} has ended: {self._last_line()}")

    def stop(self) -> int:
        """Stop it as an operator does, with SIGTERM; return its exit code."""
        process = self._running()
        if self._paused:
            self.resume()
        process.terminate()
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise HastoreError(
                f"node {self.number} has not stopped in {TIMEOUT_S:g} s, and was killed"
            ) from None

    def kill(self) -> None:
        """End it with SIGKILL, as a crash of its process does; nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stop its threads with SIGSTOP: to all others it hangs, until `resume`."""
        self._running().send_signal(signal.SIGSTOP)
        tasks = pathlib.Path(f"/proc/{self.pid}/task")
        _wait(lambda: all(map(_is_stopped, tasks.iterdir())), f"node {self.number} to hang")
        self._paused = True

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self._running().send_signal(signal.SIGCONT)
        self._paused = False

    def status(self) -> dict[str, Any] | None:
        """Return the object of `hastore status --json`; None if it does not answer."""
        if self._paused or not self.running:
            return None
        try:
            with _DIRECT.open(f"http://{self.http}/status", timeout=5) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, http.client.HTTPException, ValueError):  # it may end in its answer
            return None

    def _running(self) -> warm.WarmProcess:
        if self._process is None or not self.running:
            raise UsageError(f"node {self.number} does not run")
        return self._process

    def _last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it has written nothing"


class Group:
    """A group of nodes, a context manager; see `group`."""

    def __init__(
        self,
        folder: pathlib.Path,
        mode: str = "classic",
        nodes: int | None = None,
        *,
        cuttable: bool = False,
        first_port: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the configuration files; `start` starts the nodes.

        Files that a group has left in the folder stay, but for the addresses and `settings`.
        `first_port`: 0, or the first of ports as `hastore init` gives them.
        """
        if mode not in ("classic", "dledger"):
            raise UsageError(f"mode: {mode!r}: it must be 'classic' or 'dledger'")
        if nodes is not None and not 1 <= nodes <= 9:
            raise UsageError(f"nodes: {nodes!r}: it must be a number from 1 to 9")
        self.mode = Mode(mode)
        self._ports = Ports()
        self._links: Links | None = None
        self._folder = Folder(folder)
        try:
            there = self._folder.nodes_there(self.mode, nodes)
            count = there or nodes or (2 if self.mode is Mode.CLASSIC else 3)
            if first_port:
                addresses = _addresses(first_port, count)
            else:
                addresses = self._ports.addresses(count)
            if cuttable:
                self._links = Links({number: each["ha"] for number, each in addresses.items()})
            texts = {}
            for number in addresses:
                seen = self._seen_by(number, addresses)
                if there:
                    texts[number] = self._folder.adapted(number, seen, settings)
                else:
                    texts[number] = text_of(self._first_settings(number, seen), settings or {})
            self._folder.write(texts)
            self.nodes = {
                number: Node(number, folder, yaml.safe_load(text))
                for number, text in texts.items()
            }
        except BaseException:
            self.close()
            raise

    def _seen_by(
        self, number: int, addresses: Mapping[int, Mapping[str, str]]
    ) -> dict[int, dict[str, str]]:
        """Return the addresses that a node uses; with links it reaches others through them."""
        seen = {other: dict(each) for other, each in addresses.items()}
        if self._links is not None:
            for (source, target), address in self._links.addresses.items():
                if source == number:
                    seen[target]["ha"] = address
        return seen

    def _first_settings(self, number: int, seen: dict[int, dict[str, str]]) -> dict[str, Any]:
        """Return the content of the file of a node of a new group."""
        found: dict[str, Any] = {
            "cluster": "test", "group": "g0", "node": number, "mode": self.mode.value,
            "nodes": seen,
            "store": {"root": str(self._folder.store(number)), **_STORE},
        }  # fmt: skip
        if self.mode is Mode.CLASSIC:
            master = Role.SYNC_MASTER if len(seen) > 1 else Role.ASYNC_MASTER
            found["role"] = (master if number == 1 else Role.SLAVE).value
            found["acks"] = min(1, len(seen) - 1)
        return found

    def __enter__(self) -> Self:
        """Return the group."""
        return self

    def __exit__(self, *_failure: object) -> None:
        """End all nodes."""
        self.close()

    def __getitem__(self, number: int) -> Node:
        """Return a node, by its number from 1."""
        return self.nodes[number]

    def __iter__(self) -> Iterator[Node]:
        """Return the nodes in the order of their numbers."""
        return iter(self.nodes.values())

    @property
    def bootstrap(self) -> list[str]:
        """The addresses for clients, of all nodes."""
        return [node.api for node in self]

    @property
    def master(self) -> Node:
        """The node that takes puts which wait for other nodes; waits until there is one."""
        return self.wait_master()

    def start(self) -> Self:
        """Start all nodes that do not run; return once there is a master, and all follow it."""
        started = [node for node in self if not node.running]
        for node in started:
            node.start(wait=False)
        for node in started:
            node.wait_ready()
        self.wait_in_sync()
        return self

    def wait_master(self, *, but: Node | None = None) -> Node:
        """Return the node that takes puts which wait for other nodes; not `but`.

        Raises HastoreError if there is none within a minute.
        """

        def look() -> Node | None:
            return next((node for node in self if node is not but and _is_master(node)), None)

        return _wait(look, "a master that takes puts")

    def wait_in_sync(self) -> Node:
        """Wait until all running nodes follow the master closely; return the master.

        A new put then is on each of them before its reply, or soon after.
        """

        def look() -> Node | None:
            for node in self:
                status = node.status()
                if status is not None and status["takes_default"]:
                    near = {one["node"] for one in status["slaves"] if one["in_sync"]}
                    others = {one.number for one in self if one.running} - {node.number}
                    return node if near >= others else None
            return None

        return _wait(look, "all running nodes to follow the master")

    def flip(self, to: int | None = None) -> Node:
        """Make another node the master while the present one runs, as an operator plans it.

        `to` is its number; None: another running node. Returns it once it takes puts.
        """
        master = self.wait_in_sync()
        others = [node for node in self if node.running and node is not master]
        if to is None and not others:
            raise UsageError("flip: no other node runs")
        target = others[0] if to is None else self._named("flip", to)
        if target is not master:
            if self.mode is Mode.CLASSIC:
                return self.promote(target.number)
            request(str(master.config), "transfer", target.number, TIMEOUT_S)
        return _wait(lambda: target if _is_master(target) else None, f"node {target.number}")

    def promote(self, number: int) -> Node:
        """Make a node the master after the loss of the last one; return it once it takes puts.

        It is `hastore promote`, in mode classic: where no other node runs, as an ASYNC_MASTER.
        Nodes of mode dledger elect by themselves: see `wait_master`.
        """
        if self.mode is Mode.DLEDGER:
            raise UsageError("promote: nodes of mode dledger elect their leader by themselves")
        node = self._named("promote", number)
        alone = not any(one.running for one in self if one is not node)
        role = Role.ASYNC_MASTER if alone else Role.SYNC_MASTER
        promote(str(node.config), role, patience_s=TIMEOUT_S)
        return _wait(lambda: node if _is_master(node) else None, f"node {number} to take puts")

    def cut(self, number: int) -> None:
        """Cut a node off the others, as a broken network does; clients still reach it."""
        self._cuttable().cut(self._named("cut", number).number)

    def heal(self) -> None:
        """End all cuts."""
        self._cuttable().heal()

    def _named(self, call: str, number: int) -> Node:
        node = self.nodes.get(number)
        if node is None:
            raise UsageError(f"{call}: there is no node {number!r}; nodes 1 to {len(self.nodes)}")
        return node

    def _cuttable(self) -> Links:
        if self._links is None:
            raise UsageError("cut, heal: make the group with cuttable=True")
        return self._links

    def stop(self) -> None:
        """Stop all nodes that run, as an operator does: the master first."""
        for node in sorted(self, key=_is_master, reverse=True):
            if node.running:
                node.stop()

    def close(self) -> None:
        """Kill all nodes, and free the ports."""
        for node in getattr(self, "nodes", {}).values():
            node.kill()
        if self._links is not None:
            self._links.close()
        self._ports.close()
        self._folder.close()


@contextlib.contextmanager
def group(
    mode: str = "classic",
    nodes: int | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    cuttable: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Group]:
    """Run a real group of hastore for the `with` block, on free ports of loopback.

        with hastore.testing.group() as group:
            with Producer(group.bootstrap) as producer:
                producer.send("orders", b"1").result()
                group.master.kill()
                group.promote(2)

    `mode`: "classic", with node 1 as SYNC_MASTER and acks 1, or "dledger". `nodes`: by default 2,
    and 3 in mode dledger. `folder`: where files and stores are, and stay: a group of the same mode
    and number of nodes goes on with them, and with their roles; None: a temporary folder, which
    goes. `cuttable`: see `Group.cut`; the links between the nodes then go through this
    process. `settings`: more of the configuration file, such as {"store": {"flush": "sync"}}; they
    replace what the group would set. Raises UsageError and ConfigError for wrong arguments, and
    HastoreError if the group does not start within a minute.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="hastore-"))
        else:
            place = os.fspath(folder)
            os.makedirs(place, exist_ok=True)
        path = pathlib.Path(place).absolute()
        made = stack.enter_context(
            Group(path, mode, nodes, cuttable=cuttable, settings=settings)
        )
        yield made.start()


def _addresses(port: int, count: int) -> dict[int, dict[str, str]]:
    """Return addresses from a port on; raises UsageError if one of them is taken."""
    found = {}
    for number in range(1, count + 1):
        ports = {name: port + at for at, name in enumerate(("api", "ha", "http"))}
        for each in ports.values():
            with socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    one.bind(("127.0.0.1", each))
                except OSError as failure:
                    raise UsageError(
                        f"port {each} of 127.0.0.1 cannot be used: {failure.strerror}; end what "
                        "uses it, or give another --port; 0 finds free ones"
                    ) from failure
        found[number] = {name: f"127.0.0.1:{each}" for name, each in ports.items()}
        found[number]["api"] = "tcp://" + found[number]["api"]
        port += 10
    return found


def _is_master(node: Node) -> bool:
    status = node.status()
    return status is not None and bool(status["takes_default"])


def _is_stopped(task: pathlib.Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
        return True
    return state == "T"


def _wait(look: Callable[[], _T | None], what: str) -> _T:
    """Return the first true value of `look()`; raise HastoreError if none comes."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise HastoreError(f"waited for {TIMEOUT_S:g} s in vain for {what}")
        time.sleep(_POLL_S)


class Ports:
    """Free ports of loopback, reserved until closed, or until this object is gone.

    They are below the kernel's range of ephemeral ports, if there is room, so that no outgoing
    connection takes one while its node is down. A socket that is bound but does not listen holds
    each of them.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._held)
        below = int(pathlib.Path(_RANGE).read_text().split()[0])
        self._low = 10_000 if below > 12_000 else 1_025
        if below < self._low + 1_000:  # as on hosts for many connections: 1024 to 65535
            self._low, below = 10_000, 60_000
        self._below = min(below, 60_000)

    def take(self, *beside: int) -> int:
        """Reserve and return one more port; reserve those at the distances `beside` from it too."""
        for _ in range(1_000):
            port = random.SystemRandom().randrange(self._low, self._below)
            taken: list[socket.socket] = []
            try:
                for distance in (0, *beside):
                    taken.append(socket.socket())
                    taken[-1].bind(("127.0.0.1", port + distance))
            except OSError:
                _close_all(taken)
                continue
            for one in taken:
                # Now a listener with SO_REUSEADDR can bind the port, but another Ports cannot.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held += taken
            return port
        raise HastoreError("there is no free port on 127.0.0.1: end what holds them")

    def addresses(self, count: int) -> dict[int, dict[str, str]]:
        """Return the addresses of `count` nodes, in the form of the configuration file."""
        return {
            number: {
                "api": f"tcp://127.0.0.1:{self.take()}",
                "ha": f"127.0.0.1:{self.take()}",
                "http": f"127.0.0.1:{self.take()}",
            }
            for number in range(1, count + 1)
        }

    def close(self) -> None:
        """Release all ports."""
        _close_all(self._held)


def _close_all(held: list[socket.socket]) -> None:
    while held:
        held.pop().close()
