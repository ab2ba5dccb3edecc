"""`hastore demo --clients rocketmq`: RocketMQ's own clients through a kill of the master.

An unmodified Java producer sends all the time, two push consumers of one group read. The master of
three nodes is killed; in mode classic a slave is promoted at once, a group of mode dledger elects a
leader by itself.
At the end the demo prints how long acknowledgements and deliveries stopped, and proves that each
acknowledged message is stored once and was consumed.
"""

import contextlib
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from hastore.cli.flip import promote
from hastore.cli.own_node import ANSWER_S, ask_status, role_place
from hastore.config.file import load_config
from hastore.config.model import Mode, Role
from hastore.demo.java_clients import (
    VERSION,
    JavaClients,
    Told,
    build,
    prove_consumed,
    prove_stored,
    told,
)
from hastore.demo.nodes import DemoNode, make_group, make_trio
from hastore.demo.proof import ProofError
from hastore.errors import HastoreError

TOPIC = "flights"
EVERY_MS = 5
STREAMS = 4
CONSUMERS = ("first", "second")
QUIET_S = 6.0  # of load before the kill, and after it
SETTLE_S = 60.0
STEPS = 4
_POLL_S = 0.01
_FILE_SIZE = "64MiB"
Say = Callable[[str | Table], None]
Step = Callable[[int, str], None]


def run_clients_demo(
    folder: pathlib.Path, mode: Mode, quiet_s: float, say: Say, step: Step
) -> dict[str, Any]:
    """Run all steps; return the facts. Raises ProofError or the failed step's error.

    Nodes and clients have ended when this returns or raises.
    """
    trio = mode is Mode.CLASSIC
    nodes = make_trio(folder, _FILE_SIZE) if trio else make_group(folder, 3, _FILE_SIZE)
    with contextlib.ExitStack() as stack:
        step(1, f"Start {len(nodes)} nodes on loopback; stores are in {folder}")
        for node in nodes:
            stack.callback(node.stop)
            node.start()
        for node in nodes:
            node.wait_ready()
        master = _writable(nodes)
        say(f"    node {master.number} takes puts; clients get {_addresses(nodes)}")
        step(2, f"Start RocketMQ's Java clients {VERSION}: a producer, and two push consumers")
        clients = JavaClients(build(folder.with_name("java-clients")), folder)
        stack.callback(clients.close)
        _start_load(clients, nodes)
        time.sleep(quiet_s)
        step(3, f"Kill node {master.number}, the master (SIGKILL), and start it again")
        killed_ms, open_s = _kill(master, nodes, mode)
        say(f"    another node took puts after {open_s:.2f} s")
        time.sleep(quiet_s)
        step(4, "Stop the producer, wait until everything was consumed, and prove it")
        seen = _settle(clients)
    facts = _prove(nodes, seen, killed_ms, say)
    facts |= _gaps(seen, killed_ms, say)
    facts["seconds_to_open"] = round(open_s, 3)
    return facts


def _addresses(nodes: Sequence[DemoNode]) -> str:
    return ";".join(node.client for node in nodes)


def _writable(nodes: Sequence[DemoNode], besides: DemoNode | None = None) -> DemoNode:
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        for node in nodes:
            if node is besides or node.process is None:
                continue
            status = ask_status(node.api, ANSWER_S)
            if status is not None and status["writable"]:
                return node
        time.sleep(_POLL_S)
    raise ProofError(f"no node takes puts after {SETTLE_S:.0f} s; see {nodes[0].log}")


def _start_load(clients: JavaClients, nodes: Sequence[DemoNode]) -> None:
    """Start the clients as an application does: with default settings, but for the addresses."""
    servers = _addresses(nodes)
    clients.call("producer.start", name="producer", namesrv=servers)
    for name in CONSUMERS:
        clients.call(
            "push.start", name=name, group="demo", topics=[TOPIC], namesrv=servers, compact=True
        )
    clients.call(
        "load.start", load="load", name="producer", topic=TOPIC, every_ms=EVERY_MS,
        streams=STREAMS, size=1024,
    )  # fmt: skip
    deadline = time.monotonic() + SETTLE_S
    while not all(clients.call("push.count", name=name) for name in CONSUMERS):
        if time.monotonic() > deadline:
            raise HastoreError(f"the consumers received nothing; see {clients.log}")
        time.sleep(_POLL_S)


def _kill(master: DemoNode, nodes: Sequence[DemoNode], mode: Mode) -> tuple[float, float]:
    """Kill the master, promote a slave in mode classic; return when, and the seconds it took.

    The killed node comes back as a slave, or as a follower.
    """
    killed = time.monotonic()
    master.kill()
    if mode is Mode.CLASSIC:
        heir = next(node for node in nodes if node is not master)
        promote(heir.config, Role.SYNC_MASTER)
    _writable(nodes, besides=master)
    open_s = time.monotonic() - killed
    if mode is Mode.CLASSIC:
        role_place(master.config, load_config(master.config)).change(Role.SLAVE)  # it is down
    master.start()
    master.wait_ready()
    return killed * 1000, open_s


def _settle(clients: JavaClients) -> Told:
    """End the load; return what the clients saw once all that is acknowledged was delivered."""
    streams = clients.call("load.stop", load="load")
    wanted = {
        f"{stream['stream']}:{number}"
        for stream in streams
        for number, _, _ in stream["acknowledged"]
    }
    deadline = time.monotonic() + SETTLE_S
    while True:
        received = [
            one for name in CONSUMERS for one in clients.call("push.numbers", name=name)
        ]  # fmt: skip
        if wanted <= {name for name, _ in received} or time.monotonic() > deadline:
            return told(streams, received)
        time.sleep(0.1)


def _prove(
    nodes: Sequence[DemoNode], seen: Told, killed_ms: float, say: Say
) -> dict[str, Any]:
    count = len(seen.acknowledged)
    prove_consumed(seen)
    for node in nodes:
        stored = prove_stored(node.store, TOPIC, seen)
    twice = sum(number > 1 for name, number in stored.items() if name in seen.acknowledged)
    again = seen.consumed_again(killed_ms)
    say(f"    {count:,} messages were acknowledged with SEND_OK")
    for status, number in sorted(seen.statuses.items()):
        if status != "SEND_OK":
            say(f"    {number:,} more were stored, and not confirmed in time: {status}")
    say(f"    each node has each of them; {twice:,} are stored twice, by the client's own retry")
    say(f"    each of them was consumed; {again:,} once more since the kill")
    return {
        "acknowledged": count,
        "statuses": dict(seen.statuses),
        "failed": len(seen.failed),
        "stored_twice": twice,
        "consumed_again": again,
    }


def _gaps(seen: Told, killed_ms: float, say: Say) -> dict[str, Any]:
    """Print the table of the longest gaps, before the kill and over it; return them in seconds."""
    table = Table("longest gap", "before the kill", "over the kill", box=None, pad_edge=False)
    facts: dict[str, Any] = {}
    for name, gap in (
        ("acknowledgements", seen.acknowledgement_gap),
        ("deliveries", seen.delivery_gap),
    ):
        quiet, over = gap(0.0, killed_ms), gap(killed_ms - 500)
        table.add_row(name, f"{quiet.ms / 1000:.3f} s", f"{over.ms / 1000:.3f} s")
        facts[f"{name}_gap_s"] = round(over.ms / 1000, 3)
        facts[f"{name}_gap_before_s"] = round(quiet.ms / 1000, 3)
    table.add_row("failed sends", "", str(len(seen.failed)))
    say(table)
    for failure in dict.fromkeys(text.partition("\n")[0] for text in seen.failed.values()):
        say(f"    a send failed: {failure}")
    return facts
