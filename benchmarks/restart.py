"""Restart a node with 4 GiB of log, after a clean stop and after SIGKILL, until it serves.

    python -m benchmarks.restart [--repeats 5] [--scale 1] [--dir FOLDER]

Both systems are masters without slaves, with the same log: RocketMQ's broker has a copy, which it
has opened and closed once before. The time is that from the start of the process to hastore's ready
line, or until RocketMQ's broker has started. Before each SIGKILL the benchmark puts new messages,
so that the log ends after everything that a clean stop recorded.
"""

import contextlib
import shutil
import signal
import time

from benchmarks.common import (
    MIB,
    Cost,
    Group,
    arguments,
    at_most,
    figure,
    fill_store,
    save,
    say,
    scratch,
)
from benchmarks.loads import pipelined
from benchmarks.maven import peer_version
from benchmarks.rocketmq import RocketPair
from benchmarks.side_by_side import start_peer

FRESH_PUTS = 5_000
LOG_GIB = 4


class Rocket(RocketPair):
    """A broker without a slave that starts and stops many times."""

    def restart(self) -> float:
        """Start the broker's process; return the seconds until it has started."""
        began = time.perf_counter()
        self.jvm("master")
        self.begin_broker("master")
        self.jvms["master"].finish()
        return time.perf_counter() - began

    def stop(self) -> None:
        """Stop it cleanly."""
        jvm = self.jvms.pop("master")
        jvm.call("broker.stop")
        jvm.kill()

    def put(self, count: int) -> None:
        """Put new messages."""
        self.jvms["client"].call("load.until_acknowledged", limit_s=60)
        self.jvms["client"].call("load.asynchronous", in_flight=512, count=count)


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    size, file_size = int(LOG_GIB * 1024 * MIB * given.scale), 1024 * MIB
    clean: dict[str, list[float]] = {"hastore": [], "RocketMQ": []}
    killed: dict[str, list[float]] = {"hastore": [], "RocketMQ": []}
    costs: dict[str, list[Cost]] = {"hastore": [], "RocketMQ": []}  # of the starts after SIGKILL
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 4 * file_size + 3 * size))
        group = stack.enter_context(
            Group(folder, 1, role="ASYNC_MASTER", store={"commitlog_file_size": file_size})
        )
        node = group[1]
        say(f"restart: writing {size / 2**30:g} GiB of log")
        fill_store(node.store, size, file_size)

        def make() -> Rocket:
            pair = Rocket(folder, slave=False, role="ASYNC_MASTER")
            ignored = shutil.ignore_patterns("hastore")
            shutil.copytree(node.store, pair.root("master"), ignore=ignored)
            return pair

        rocket: Rocket | None = start_peer(stack, "RocketMQ", make)
        if rocket is not None:
            rocket.stop()
        node.start()
        node.stop()
        for repeat in range(given.repeats):
            clean["hastore"].append(node.start())
            pipelined(group.bootstrap, in_flight=512, count=FRESH_PUTS, acks=1)
            node.stop(signal.SIGKILL)
            killed["hastore"].append(node.start())
            costs["hastore"].append(node.cost())
            node.stop()
            if rocket is not None:
                clean["RocketMQ"].append(rocket.restart())
                rocket.put(FRESH_PUTS)
                rocket.kill_master()
                killed["RocketMQ"].append(rocket.restart())
                costs["RocketMQ"].append(rocket.jvms["master"].cost())
                rocket.stop()
            say(
                f"restart {repeat + 1}/{given.repeats}: "
                + "; ".join(
                    f"{name} clean {took[-1]:.2f} s, after SIGKILL {killed[name][-1]:.2f} s"
                    for name, took in clean.items()
                    if took
                )
            )
    name, peer = f"restart with {LOG_GIB} GiB of log, ", "RocketMQ's broker"
    ours, theirs = "hastore", "RocketMQ"
    figures = [
        figure(name + "clean", "s", clean[ours], peer, clean[theirs], at_most(0.3)),
        figure(name + "after SIGKILL", "s", killed[ours], peer, killed[theirs], at_most(0.5)),
    ]
    cpu = [[cost.cpu_s for cost in costs[who]] for who in (ours, theirs)]
    memory = [[cost.anonymous_mib for cost in costs[who]] for who in (ours, theirs)]
    figures += [
        figure("CPU of a start after SIGKILL", "s", cpu[0], peer, cpu[1]),
        figure("memory then that is not mapped log", "MiB", memory[0], peer, memory[1]),
    ]
    settings = {"bytes": size, "file_size": file_size, "fresh_puts": FRESH_PUTS}
    save("restart", figures, settings | {"rocketmq": peer_version("rocketmq")})


if __name__ == "__main__":
    main()
