"""Two groups beside one: what a second group adds, and what a cluster of many groups costs.

    python -m benchmarks.groups [--repeats 5] [--scale 1] [--dir FOLDER]

Messages of 1 KiB; each group is a pair whose slave acknowledges. Both groups run all the time.

  * Load: for each group that takes part a client process sends with 1,024 in flight. In turn: one
    group, two groups. A machine whose cores one group fills carries no more with two: then the
    rates show what a second group costs, as does the CPU of the nodes for a message.
  * Cluster: what a group of 1,000 topics costs the others: its registration at a name server, and
    its note in ZooKeeper, which each node of the other groups reads. The answer to a client's
    question for a route over many groups, each with two write twins. A producer for one more group.
"""

import contextlib
import multiprocessing
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import (
    MIB,
    Cost,
    Group,
    arguments,
    ended,
    figure,
    save,
    say,
    scratch,
)
from benchmarks.loads import pipelined
from hastore.client.producer.producer import Producer
from hastore.protocol.group_note import (
    GroupRoutes,
    OtherBroker,
    OtherTopic,
    decode_note,
    encode_note,
)
from hastore.protocol.registration import Queues, Version, encode_topics
from hastore.protocol.remoting import encode_body

GROUPS = 2
TOPICS = 1_000
PRODUCERS = 50
GROUPS_OF_A_CLUSTER = (3, 33, 333)
MESSAGES = 100_000  # of each group in one round
FILE_BYTES = 256 * MIB


def load(bootstrap: list[str], count: int, begin: Any, rates: Any) -> None:
    """Send to one group, in a process of its own; put the moments of begin and end."""
    begin.wait()
    began = time.monotonic()
    pipelined(bootstrap, in_flight=1_024, count=count)
    rates.put((began, time.monotonic()))


def run_load(groups: list[Group], count: int) -> tuple[float, float]:
    """Return the messages per second of all groups, and the nodes' CPU us for a message."""
    context = multiprocessing.get_context("spawn")
    begin, rates = context.Barrier(len(groups)), context.Queue()
    before = [group.costs() for group in groups]
    clients = [
        context.Process(target=load, args=(group.bootstrap, count, begin, rates))
        for group in groups
    ]
    with ended(*clients):
        for one in clients:
            one.start()
        times = [rates.get(timeout=600) for _ in clients]
    cpu_s = sum(
        after.cpu_s - then[name].cpu_s
        for group, then in zip(groups, before, strict=True)
        for name, after in group.costs().items()
    )
    took = max(end for _, end in times) - min(began for began, _ in times)
    return len(groups) * count / took, 1e6 * cpu_s / (len(groups) * count)


def cpu_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Return the CPU ms of each of some repetitions."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        found.append(1_000 * (time.process_time() - began))
    return found


def route_over(groups: int) -> dict[str, Any]:
    """Return a route as a node answers it, of a topic that so many groups have."""
    names = [f"g{number}{twin}" for number in range(groups) for twin in ("", "@2", "@3")]
    at = {number: f"10.0.0.{number}:10911" for number in (0, 2, 3)}
    queues = {"perm": 6, "readQueueNums": 8, "topicSysFlag": 0, "writeQueueNums": 8}
    broker = {"brokerAddrs": at, "cluster": "bench", "enableActingMaster": False}
    return {
        "brokerDatas": [{**broker, "brokerName": name} for name in names],
        "filterServerTable": {},
        "queueDatas": [{**queues, "brokerName": name} for name in names],
    }


def memory_of_producers(group: Group) -> float:
    """Return the KiB of this process that a further producer takes."""
    with contextlib.ExitStack() as ends:
        ends.enter_context(Producer(group.bootstrap)).send_sync("memory", b"")
        before = Cost.of(os.getpid()).anonymous_mib
        for _ in range(PRODUCERS):
            ends.enter_context(Producer(group.bootstrap)).send_sync("memory", b"")
        return 1_024 * (Cost.of(os.getpid()).anonymous_mib - before) / PRODUCERS


def cluster_figures(repeats: int) -> list[dict[str, Any]]:
    """Return what a further group, or its topics, costs the rest of a cluster."""
    table = [Queues(f"application-topic-{number}", 8, 8, 6) for number in range(TOPICS)]
    routes = GroupRoutes(
        "g0", 65_537, [OtherBroker("g0", {0: "10.0.0.1:10911", 2: "10.0.0.2:10911"})],
        [OtherTopic(*one) for one in table],
    )  # fmt: skip
    body, _ = encode_topics(table, Version(0, 1, 65_537))
    note = encode_note(routes)
    of = f"of {TOPICS:,} topics"

    def encode() -> None:
        encode_topics(table, Version(0, 1, 1))

    routes_over = []
    for groups in GROUPS_OF_A_CLUSTER:
        answer = route_over(groups)
        took = cpu_ms(lambda answer=answer: encode_body(answer, standard=True), repeats)
        routes_over.append(figure(f"a route over {groups} groups", "ms of CPU", took))
    return [
        *routes_over,
        figure(f"a registration {of}", "KiB", [len(body) / 1024]),
        figure(f"its encoding {of}", "ms of CPU", cpu_ms(encode, repeats)),
        figure(f"a note in ZooKeeper {of}", "KiB", [len(note) / 1024]),
        figure(f"encoding a note {of}", "ms of CPU", cpu_ms(lambda: encode_note(routes), repeats)),
        figure(f"reading a note {of}", "ms of CPU", cpu_ms(lambda: decode_note(note), repeats)),
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark and save its figures."""
    given = arguments(__doc__)
    count = max(2_000, int(MESSAGES * given.scale))
    rates: dict[int, list[float]] = {1: [], GROUPS: []}
    costs: dict[int, list[float]] = {1: [], GROUPS: []}
    need = 2 * GROUPS * (given.repeats + 1) * count * 2_048 + 4 * GROUPS * FILE_BYTES
    with scratch(given.dir, need) as folder, contextlib.ExitStack() as ends:
        groups = [ends.enter_context(started(folder, name)) for name in ("g0", "g1")]
        for repeat in range(given.repeats + 1):  # the first one warms up
            for number in rates:
                rate, cost = run_load(groups[:number], count)
                say(f"{number} groups: {rate:,.0f} messages/s, {cost:.1f} us of CPU for each")
                if repeat:
                    rates[number].append(rate)
                    costs[number].append(cost)
        memory = [memory_of_producers(groups[0]) for _ in range(given.repeats)]
    one = "one group"
    figures = [
        figure("messages of two groups", "1/s", rates[GROUPS], one, rates[1]),
        figure("their nodes' CPU for a message", "us", costs[GROUPS], one, costs[1]),
        figure("memory of a producer", "KiB", memory),
        *cluster_figures(given.repeats),
    ]
    save("groups", figures, {"messages": count, "topics": TOPICS})
    ratio = statistics.median(rates[GROUPS]) / statistics.median(rates[1])
    say(f"two groups have {ratio:.2f} times the rate of one")


def started(folder: pathlib.Path, name: str) -> Group:
    """Return a running pair."""
    (folder / name).mkdir()
    group = Group(folder / name, store={"commitlog_file_size": FILE_BYTES})
    try:
        group.start()
    except BaseException:
        group.close()
        raise
    return group


if __name__ == "__main__":
    main()
