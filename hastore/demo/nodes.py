"""The demo's nodes: two configuration files in one folder, and the processes that use them."""

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

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_CONFIG = """\
# Written by `hastore demo`; every key is explained in conf/master.yaml.
cluster: demo
group: flights
node: {node}
role: {role}
acks: 1
nodes:
{nodes}
store: {{root: "{root}", commitlog_file_size: {file_size}}}
ha: {{heartbeat_interval: 1s, housekeeping_interval: 5s}}
"""


@dataclass(slots=True)
class Node:
    """A node of the demo, running or not."""

    number: int
    folder: pathlib.Path
    api: str
    process: subprocess.Popen[str] | None = None
    ready: dict[str, str] = field(default_factory=dict)  # fields of the latest ready line

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

    def start(self, kind: str) -> None:
        """Start `hastore-master` or `hastore-slave` as a process; `kind` is master or slave."""
        command = [sys.executable, "-m", "hastore.cli.nodes", kind, "-c", self.config]
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


def make_pair(folder: pathlib.Path, file_size: str) -> tuple[Node, Node]:
    """Write the configurations of a master (node 1) and a slave (node 2) on free loopback ports."""
    ports = free_ports(6)
    nodes = []
    lines = []
    for number in (1, 2):
        api, ha, http = ports[3 * number - 3 : 3 * number]
        lines.append(
            f'  {number}: {{api: "tcp://127.0.0.1:{api}", ha: "127.0.0.1:{ha}", '
            f'http: "127.0.0.1:{http}"}}'
        )
        nodes.append(Node(number, folder, f"tcp://127.0.0.1:{api}"))
    for node, role in zip(nodes, ("SYNC_MASTER", "SLAVE"), strict=True):
        text = _CONFIG.format(
            node=node.number,
            role=role,
            nodes="\n".join(lines),
            root=node.store,
            file_size=file_size,
        )
        pathlib.Path(node.config).write_text(text)
    return nodes[0], nodes[1]


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
