"""Kill the master with SIGKILL; measure the time to the next acknowledged synchronous put.

    python -m benchmarks.failover [--repeats 5] [--scale 1] [--dir FOLDER]

hastore: three nodes, `acks: 1`. `hastore promote` runs on a slave at once, and the producer goes on
sending. Between repeats the killed node comes back as a slave.

RocketMQ cannot promote a running slave by a change of its configuration. Its master is started
again at once, on its own store, and its producer retries until both nodes have the message. This
takes long, so there are fewer messages to recover than in `restart`.
"""

import contextlib
import subprocess
import sys
import time
from typing import Any

from benchmarks.bare import BODY
from benchmarks.common import (
    MIB,
    ROOT,
    Group,
    Node,
    Target,
    arguments,
    figure,
    save,
    say,
    scratch,
    wait_until,
)
from benchmarks.loads import pipelined
from benchmarks.maven import peer_version
from benchmarks.rocketmq import RocketPair
from benchmarks.side_by_side import start_peer
from hastore.client.producer.producer import Producer

PUTS = 20_000
NODES = 3


def fail_over(group: Group, number: int, heir: int) -> tuple[float, float]:
    """Kill a master, promote another node; return the seconds to the next put and to its end."""
    node = group[heir]
    with Producer(group.bootstrap) as producer:
        producer.send_sync("failover", BODY)
        began = time.perf_counter()
        group[number].kill()
        promotion = promote(node)
        producer.send_sync("failover", BODY)
        seconds = time.perf_counter() - began
        said = promotion.communicate(timeout=30.0)[0]
        promoted = time.perf_counter() - began
    if promotion.returncode:
        raise RuntimeError(f"the promotion of node {heir} failed: {said}")
    return seconds, promoted


def promote(node: Node) -> "subprocess.Popen[str]":
    """Start `hastore promote`."""
    command = [sys.executable, str(ROOT / "bin" / "hastore"), "promote", "-c", str(node.config)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def rejoin(group: Group, number: int, master: int) -> None:
    """Bring the killed node back as a slave, and wait until all are in sync."""
    group[number].become("SLAVE")
    group[number].start()

    def right() -> bool:
        slaves = group[master].status()["slaves"]
        return sum(bool(slave["in_sync"]) for slave in slaves) == NODES - 1

    wait_until(right, 30.0, f"node {number} did not rejoin: {group[number].last_words()}")


def restart_master(rocket: RocketPair) -> float:
    """Kill and restart RocketMQ's master; return the seconds to the next acknowledged put."""
    client = rocket.jvms["client"]
    client.call("load.blocking", count=1)
    began = time.perf_counter()
    rocket.kill_master()
    rocket.jvm("master")
    rocket.begin_broker("master")
    client.call("load.until_acknowledged", limit_s=90)
    seconds = time.perf_counter() - began
    rocket.jvms["master"].finish()
    return seconds


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    ours: list[float] = []
    theirs: list[float] = []
    promotions: list[float] = []
    count = int(PUTS * given.scale)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 12 * 1024 * MIB))
        group = stack.enter_context(Group(folder, NODES))
        rocket: RocketPair | None = start_peer(stack, "RocketMQ", lambda: RocketPair(folder))
        group.start()
        pipelined(group.bootstrap, in_flight=512, count=count)
        if rocket is not None:
            rocket.threads(64, count)
        master = 1
        memory: dict[str, Any] = {}
        for repeat in range(given.repeats):
            if rocket is not None:
                theirs.append(restart_master(rocket))
                rocket.jvms["master"].wait_slaves(1)
            heir = master % NODES + 1
            seconds, promoted = fail_over(group, master, heir)
            ours.append(seconds)
            promotions.append(promoted)
            memory["memory_mib"] = {who: cost.memory() for who, cost in group.costs().items()}
            rejoin(group, master, heir)
            master = heir
            say(
                f"failover {repeat + 1}/{given.repeats}: {seconds:.2f} s, promoted after "
                f"{promoted:.2f} s" + (f"; RocketMQ {theirs[-1]:.2f} s" if theirs else "")
            )
    figures = [
        figure(
            "SIGKILL of the master to the first acknowledged put",
            "s",
            ours,
            "RocketMQ, restart as master",
            theirs,
            Target(1.0, "at most", "figure"),
            **memory,
        ),
        figure("SIGKILL of the master to the end of `hastore promote`", "s", promotions),
    ]
    settings = {"nodes": NODES, "puts": count, "rocketmq": peer_version("rocketmq")}
    save("failover", figures, settings)


if __name__ == "__main__":
    main()
