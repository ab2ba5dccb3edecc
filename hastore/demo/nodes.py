"""The demo's nodes: their configuration files in one folder, and the processes that use them."""

import contextlib
import os
import pathlib
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hastore.errors import HastoreError

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
        with open(self.log, "a") as output:
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
    pathlib.Path(node.config).write_text(text)


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
