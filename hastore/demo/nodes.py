"""The demo's nodes: the folder of their stores, their configuration files, and their processes.

Without --folder all demos of a checkout use one folder, so that the stores stay for a look but do
not pile up. Two things keep that safe: a running demo locks its folder, and only a folder with
MARKER, which a demo made itself, is ever emptied.
"""

import contextlib
import fcntl
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hastore.errors import HastoreError, StoreInUseError, UsageError
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import PRIVATE_MODE, append_private, open_fresh

MARKER = ".hastore-demo"
LOCK = ".hastore-demo.lock"  # is there while a demo uses the folder
_MARKER_TEXT = "`hastore demo` made this folder. Without --folder, its next run empties it.\n"
_CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_ELSE = "give another place with --folder DIR"


def default_folder() -> pathlib.Path:
    """Return data/demo in the checkout; for an installed package, hastore/demo in the cache."""
    if (_CHECKOUT / "bin" / "hastore").is_file():
        return _CHECKOUT / "data" / "demo"
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(cache, "hastore", "demo")


def folder_problem(folder: pathlib.Path, *, replace: bool) -> str | None:
    """Return why a demo must not use the folder, and the remedy; None if it may.

    With `replace`, an earlier demo may be in it, but nothing else, and no node may still use it.
    """
    if not folder.is_dir():
        return None
    try:
        with _locked(folder):
            return _content_problem(folder, replace=replace)
    except UsageError as running:
        return str(running)


def replaced_bytes(folder: pathlib.Path) -> int:
    """Return how many bytes on the disk become free when the folder is emptied."""
    paths = folder.rglob("*") if folder.is_dir() else ()
    return sum(path.lstat().st_blocks * 512 for path in paths)


@contextlib.contextmanager
def demo_folder(folder: pathlib.Path, *, replace: bool) -> Iterator[None]:
    """Make and lock the folder, and with `replace` empty it; the lock ends with the body.

    Raises UsageError as `folder_problem` says it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder):
        problem = _content_problem(folder, replace=replace)
        if problem is not None:
            raise UsageError(problem)
        if not _names(folder):
            (folder / MARKER).write_text(_MARKER_TEXT)
        if replace:
            _empty(folder)
        yield


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Lock the folder, by a file in it that is there meanwhile.

    The folder's own lock is for commands that change the nodes' files. Raises UsageError.
    """
    path = folder / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            text = f"another demo is using {folder}: wait for its end, or {_ELSE}"
            raise UsageError(text) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                break
        os.close(descriptor)  # its owner has just ended, and removed it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _names(folder: pathlib.Path) -> list[str]:
    return [name for name in os.listdir(folder) if name != LOCK]


def _content_problem(folder: pathlib.Path, *, replace: bool) -> str | None:
    if not replace:
        return f"{folder} already contains a demo; {_ELSE}" if (folder / "node1").exists() else None
    names = _names(folder)
    if names and MARKER not in names:
        return f"{folder} is not empty, and no demo made it (no {MARKER}): it is kept; {_ELSE}"
    for lock in sorted(folder.glob("node*/lock")):
        try:
            REAL.lock(str(lock)).close()
        except StoreInUseError:
            return f"a node is running on {lock.parent}, of an earlier demo: stop it, or {_ELSE}"
    return None


def _empty(folder: pathlib.Path) -> None:
    """Remove all but the marker, so that an interrupted removal is continued the next time."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (MARKER, LOCK):
            path.unlink()


PORTS_PER_NODE = 3
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_GROUP_CONFIG = """\
# Written by `hastore demo --mode dledger`; every key is explained in conf/dledger-n0.yaml.
cluster: demo
group: flights
node: {node}
mode: dledger
nodes:
{nodes}
store: {{root: "{root}", commitlog_file_size: {file_size}}}
retention: {{check_interval: 1h}}  # the master appends nothing by itself during the proof
"""
_CONFIG = """\
# Written by `hastore demo`; every key is explained in conf/master.yaml.
cluster: demo
group: flights
node: {node}
role: {role}
acks: 1{registry}
nodes:
{nodes}
store: {{root: "{root}", commitlog_file_size: {file_size}}}
retention: {{check_interval: 1h}}  # the master appends nothing by itself during the proof
ha: {{heartbeat_interval: 1s, housekeeping_interval: 5s}}
"""


@dataclass(slots=True)
class DemoNode:
    """A node of the demo, running or not."""

    number: int
    folder: pathlib.Path
    client: str  # HOST:PORT of its three ports
    ha: str
    http: str
    process: subprocess.Popen[str] | None = None
    ready: dict[str, str] = field(default_factory=dict)  # fields of the latest ready line

    @property
    def api(self) -> str:
        """Return the address for clients."""
        return f"tcp://{self.client}"

    @property
    def config(self) -> str:
        """Return the path of the configuration file."""
        return str(self.folder / f"node{self.number}.yaml")

    @property
    def store(self) -> pathlib.Path:
        """Return the store's folder."""
        return self.folder / f"node{self.number}"

    @property
    def log(self) -> pathlib.Path:
        """Return the file with the node's stderr."""
        return self.folder / f"node{self.number}.log"

    def start(self) -> None:
        """Start the node as a process, as `hastore serve` does."""
        command = [sys.executable, "-m", "hastore.cli.nodes", "serve", "-c", self.config]
        root = str(pathlib.Path(__file__).resolve().parents[2])
        paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with append_private(self.log) as output:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=output,
                stdin=subprocess.DEVNULL,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then stops its nodes
            )

    def wait_ready(self) -> dict[str, str]:
        """Wait for the ready line; return its fields. Raises HastoreError when none comes."""
        process = self.process
        assert process is not None and process.stdout is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            if select.select([process.stdout], [], [], left)[0]:
                line = process.stdout.readline()
                if line.startswith("ready "):
                    self.ready = dict(pair.split("=", 1) for pair in line.split()[1:])
                    return self.ready
                if not line:
                    raise HastoreError(f"node {self.number} ended: {self._last_words()}")
        raise HastoreError(
            f"node {self.number} is not ready after {START_TIMEOUT_S:.0f} s; see {self.log}"
        )

    def kill(self) -> None:
        """Kill the process with SIGKILL, to simulate a crash."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self) -> None:
        """Stop the process, if any, with SIGTERM. After STOP_TIMEOUT_S use SIGKILL."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reap()

    def _reap(self) -> None:
        assert self.process is not None
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


def make_pair(
    folder: pathlib.Path, file_size: str, registry: str | None = None
) -> tuple[DemoNode, DemoNode]:
    """Write the configurations of a master (node 1) and a slave (node 2) on free loopback ports.

    With a `registry` their roles are in ZooKeeper.
    """
    line = "" if registry is None else f"\nregistry: {registry}"
    master, slave = _make(folder, 2)
    for node, role in ((master, "SYNC_MASTER"), (slave, "SLAVE")):
        _write(node, (master, slave), _CONFIG, role=role, file_size=file_size, registry=line)
    return master, slave


def make_trio(folder: pathlib.Path, file_size: str) -> list[DemoNode]:
    """Write the configurations of a master (node 1) and two slaves on free loopback ports."""
    nodes = _make(folder, 3)
    for node in nodes:
        role = "SYNC_MASTER" if node.number == 1 else "SLAVE"
        _write(node, nodes, _CONFIG, role=role, file_size=file_size, registry="")
    return nodes


def make_group(folder: pathlib.Path, count: int, file_size: str) -> list[DemoNode]:
    """Write the configurations of a group that elects its leader, on free loopback ports."""
    nodes = _make(folder, count)
    for node in nodes:
        _write(node, nodes, _GROUP_CONFIG, file_size=file_size)
    return nodes


def _make(folder: pathlib.Path, count: int) -> list[DemoNode]:
    ports = [f"127.0.0.1:{port}" for port in free_ports(PORTS_PER_NODE * count)]
    return [
        DemoNode(number, folder, client, ha, http)
        for number, (client, ha, http) in enumerate(
            zip(ports[::3], ports[1::3], ports[2::3], strict=True), 1
        )
    ]


def _write(node: DemoNode, nodes: Sequence[DemoNode], template: str, **values: str) -> None:
    lines = [
        f'  {one.number}: {{api: "{one.api}", ha: "{one.ha}", http: "{one.http}"}}' for one in nodes
    ]
    text = template.format(node=node.number, nodes="\n".join(lines), root=node.store, **values)
    with open_fresh(node.config, PRIVATE_MODE) as file:
        file.write(text.encode())


def free_ports(count: int) -> Sequence[int]:
    """Return loopback ports that are free now.

    Ports below the kernel's range for outgoing connections come first: otherwise an outgoing
    connection could take the port of a node that is down for a moment.
    """
    text = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    candidates = list(range(10_000, int(text.split()[0])))
    random.shuffle(candidates)
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in [*candidates, *([0] * count)]:
            one = stack.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(one.getsockname()[1])
            if len(ports) == count:
                return ports
    raise HastoreError(f"there are not {count} free ports on 127.0.0.1")
