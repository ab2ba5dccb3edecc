"""How long 64 members of a group take to share its queues anew.

    python -m benchmarks.rebalance [--repeats 5] [--scale 1] [--dir FOLDER]

A pair of nodes, a topic with 128 queues, and asyncio consumers with `share=True` in four processes.
The time is that until each queue has an owner again and no member has more than its share: when all
start at the same time, when one more joins, and when one closes. With it the CPU of the master.
"""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import (
    MIB,
    Cost,
    Group,
    Target,
    arguments,
    ended,
    figure,
    save,
    say,
    scratch,
    wait_until,
)
from hastore import Admin
from hastore.aio import Consumer, SharedConsumer

TOPIC, GROUP = "shared", "shared"
MEMBERS, QUEUES = 64, 128
PROCESSES = 4
POLL_S = 0.2
LIMIT_S = 120.0
ABSENT = -1  # of a member that is not there
STARTING = -2  # of one whose process has not begun


def members(addresses: list[str], places: list[int], wanted: Any, held: Any) -> None:
    """Be these members as long as each is wanted; runs in its own process."""
    asyncio.run(_members(addresses, places, wanted, held))


async def _members(addresses: list[str], places: list[int], wanted: Any, held: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for place in places:
            tasks.create_task(_member(addresses, place, wanted, held))


async def _member(addresses: list[str], place: int, wanted: Any, held: Any) -> None:
    """Poll while it is wanted; `held` says how many queues it has."""
    held[place] = ABSENT
    while wanted[place] >= 0:
        if not wanted[place]:
            await asyncio.sleep(0.005)
            continue
        consumer = Consumer(TOPIC, addresses, group=GROUP, share=True, timeout_s=30.0)
        assert isinstance(consumer, SharedConsumer)
        async with consumer:
            while wanted[place] > 0:
                await consumer.poll(timeout_s=POLL_S)
                held[place] = len(consumer.assignment)
        held[place] = ABSENT


class Members:
    """The members of all processes."""

    def __init__(self, stack: contextlib.ExitStack, addresses: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.wanted = context.Array("i", MEMBERS, lock=False)
        self.held = context.Array("i", [STARTING] * MEMBERS, lock=False)
        processes = [
            context.Process(
                target=members,
                args=(addresses, list(range(at, MEMBERS, PROCESSES)), self.wanted, self.held),
            )
            for at in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        stack.enter_context(ended(*processes))
        stack.callback(self._end)
        wait_until(lambda: set(self.held) == {ABSENT}, LIMIT_S, "the processes do not begin")

    def _end(self) -> None:
        for place in range(MEMBERS):
            self.wanted[place] = -1

    def shared(self, count: int) -> bool:
        """Whether so many members have all queues, each its share."""
        sizes = [size for size in self.held if size != ABSENT]
        least, more = divmod(QUEUES, count)
        shares = [least + 1] * more + [least] * (count - more)
        return sorted(sizes, reverse=True) == shares

    def until(self, count: int, act: Callable[[], None]) -> float:
        """Return the seconds from an act until so many members share the queues."""
        began = time.perf_counter()
        act()
        wait_until(lambda: self.shared(count), LIMIT_S, f"{list(self.held)}", poll_s=0.001)
        return time.perf_counter() - began

    def want(self, wanted: int, *places: int) -> Callable[[], None]:
        """Return a function that lets these members come or leave."""

        def act() -> None:
            for place in places:
                self.wanted[place] = wanted

        return act


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 1024 * MIB))
        group = stack.enter_context(Group(folder))
        group.start()
        with Admin(group.bootstrap) as admin:
            admin.create_topic(TOPIC, queues=QUEUES)
        all_of = Members(stack, group.bootstrap)
        starts, joins, leaves, costs = [], [], [], []
        others, last = list(range(MEMBERS - 1)), MEMBERS - 1
        pid = group[1].pid
        for number in range(given.repeats):
            starts.append(all_of.until(MEMBERS - 1, all_of.want(1, *others)))
            before = Cost.of(pid).cpu_s
            joins.append(all_of.until(MEMBERS, all_of.want(1, last)))
            costs.append(1000 * (Cost.of(pid).cpu_s - before))
            leaves.append(all_of.until(MEMBERS - 1, all_of.want(0, last)))
            say(
                f"rebalance {number + 1}/{given.repeats}: start {starts[-1]:.2f} s, join "
                f"{joins[-1]:.2f} s ({costs[-1]:.0f} ms of CPU), leave {leaves[-1]:.2f} s"
            )
            all_of.want(0, *others)()
            wait_until(lambda: set(all_of.held) == {ABSENT}, LIMIT_S, "they do not leave")
    limit = Target(3.0, "at most", "figure")
    figures = [
        figure(f"{MEMBERS - 1} members start, until each has its share", "s", starts),
        figure(f"one more joins, of {MEMBERS}", "s", joins, target=limit),
        figure(f"one of {MEMBERS} closes", "s", leaves, target=limit),
        figure("CPU of the master, one joins", "ms", costs),
    ]
    save("rebalance", figures, {"members": MEMBERS, "queues": QUEUES, "processes": PROCESSES})


if __name__ == "__main__":
    main()
