"""`hastore demo --zookeeper`: the roles are in ZooKeeper, which is killed twice.

First while the master serves: it goes on, and so does the producer. Then in the middle of the flip,
right after the new role was written: the flip goes on when ZooKeeper is back, or before.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

from hastore.cli.asking import ANSWER_S, ask_status
from hastore.cli.common import program
from hastore.cli.demo_report import SYNC_TIMEOUT_S, TOPIC, DemoReport, WaitFor, print_next_steps
from hastore.cli.role_place import RegistryPlace
from hastore.config.file import load_config
from hastore.config.model import Role
from hastore.demo.nodes import Node, free_ports
from hastore.demo.produce import FlightProducer
from hastore.demo.proof import ProofError
from hastore.demo.zookeeper import ZooKeeper

_SHARE_WITHOUT = 10  # one flight in so many is sent while ZooKeeper is down
_POLL_S = 0.02


class RolesInZooKeeper:
    """The server, and what the demo does with it."""

    def __init__(self, report: DemoReport, folder: pathlib.Path) -> None:
        (port,) = free_ports(1)
        self._server = ZooKeeper(folder / "zookeeper", port)
        self._report = report
        self._facts: dict[str, Any] = {"kills": 0}
        report.facts["zookeeper"] = self._facts

    @property
    def registry(self) -> str:
        """The value of the nodes' key `registry`."""
        return f"zk://{self._server.address}"

    @property
    def group(self) -> str:
        """The address of the group for clients."""
        return f"{self.registry}/demo/flights"

    def start(self) -> None:
        """Start the server."""
        self._server.start()
        self._server.wait_ready()
        self._report.print(f"    ZooKeeper: {self.group}")

    def stop(self) -> None:
        """Stop the server, if it runs."""
        self._server.stop()

    def go_on_without(self, producer: FlightProducer, wait_for: WaitFor, rows: int) -> None:
        """Kill ZooKeeper while the master serves; wait for acknowledgements; start it again."""
        wait_for(rows // _SHARE_WITHOUT)
        self._kill()
        before = producer.count
        wait_for(min(rows // 2, before + max(1, rows // _SHARE_WITHOUT)))
        count = producer.count - before
        self._facts["acknowledged_without"] = count
        self._server.start()
        self._server.wait_ready()
        self._report.print(
            f"    ZooKeeper was killed (SIGKILL) meanwhile: {count:,} flights were acknowledged "
            "without it, and no role changed; now it is back"
        )

    def promote(self, node: Node) -> dict[str, Any]:
        """Give a node the role SYNC_MASTER, and kill ZooKeeper at once; return the node's status
        once it takes writes. Raises ProofError if it never does.
        """
        RegistryPlace(load_config(node.config)).change(Role.SYNC_MASTER)
        self._kill()
        self._report.print("    ZooKeeper is killed right after the new role was written to it")
        self._server.start()
        self._server.wait_ready()
        deadline = time.monotonic() + SYNC_TIMEOUT_S
        while time.monotonic() < deadline:
            status = ask_status(node.api, ANSWER_S)
            if status is not None and status["writable"]:
                return status
            time.sleep(_POLL_S)
        raise ProofError(f"node {node.number} is not master after {SYNC_TIMEOUT_S:.0f} s")

    def print_next_steps(self, nodes: Sequence[Node]) -> None:
        """Print the commands with which the stores can be explored; ZooKeeper is gone then."""
        addresses = ",".join(node.api for node in nodes)
        print_next_steps(
            self._report,
            (
                f"{program('hastore')} log stat --store {nodes[0].store}",
                *(f"{program('hastore')} serve -c {node.config} &" for node in nodes),
                f"{program('hastore')} status --wait 30 --bootstrap {addresses}",
                f"{program('hastore')} query --topic {TOPIC} --key UA-1545 --bootstrap {addresses}",
            ),
        )

    def _kill(self) -> None:
        self._server.kill()
        self._facts["kills"] += 1
