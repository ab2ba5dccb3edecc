"""A cluster moves from a RocketMQ pair to a hastore pair and back while Java clients send and read.

The steps are those of docs/rocketmq-clients.md, "Move a cluster over without stopping": its
commands of mqadmin are read from the page, and each of them is given.
"""

from __future__ import annotations

import contextlib
import pathlib
import re

import pytest

from hastore.demo.java_clients import Told, longest_gap, prove_consumed, told
from tests.interop.build import CLIENTS_5, ROCKETMQ_5, command
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import (
    CLUSTER,
    LIMIT_S,
    Clients,
    HastoreSite,
    RocketSite,
    Site,
)
from tests.interop.test_mqadmin import RocketPair
from tests.process.harness import Group, Ports, wait_until

pytestmark = pytest.mark.full
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "rocketmq-clients.md"
TOPIC, GROUP = "Orders", "billing"
EVERY_MS = 10
STREAMS = 2
SETTLED = 200  # messages of each place, at least


def commands() -> list[list[str]]:
    """Return the page's commands, in order."""
    text = PAGE.read_text().split("\n## Move a cluster over without stopping\n", 1)[1]
    blocks = re.findall(r"```sh\n(.*?)```", text.split("\n## ", 1)[0], re.DOTALL)
    return [line.split() for block in blocks for line in block.strip().splitlines()]


class Walk:
    """An application on its way: its producer and its consumers, and the operator's commands."""

    def __init__(self, jvm: Clients) -> None:
        self.jvm = jvm
        self.sites: dict[str, Site] = {}
        self.commands = commands()
        self.consumers: dict[str, str] = {}
        self.seen: dict[str, Told] = {}

    def given(self, *names: str) -> str:
        """Give the page's next commands, which must have these names; return what the last said."""
        said = ""
        for name in names:
            what, command_name, *arguments = self.commands.pop(0)
            assert (what, command_name) == ("mqadmin", name)
            said = self.mqadmin(command_name, arguments)
        return said

    def mqadmin(self, name: str, arguments: list[str]) -> str:
        site = self.sites[arguments[arguments.index("-n") + 1]]
        meant = {"CLUSTER": CLUSTER, "TOPIC": TOPIC, "GROUP": GROUP}
        rest = [meant.get(one, one) for one in arguments if one not in ("-n", *self.sites)]
        return self.jvm.mqadmin(site, name, *rest)

    def consume(self, place: str, at: str) -> None:
        """Start the consumer application at a site, beside those that run."""
        consumer = self.jvm.push(self.sites[at], GROUP, TOPIC, compact=True)
        self.consumers[place] = consumer

    def produce(self, place: str, at: str) -> None:
        """Start a producer application at a site, and wait until it is under way."""
        producer = self.jvm.producer(self.sites[at], timeout_ms=3_000)
        self.jvm.call(
            "load.start", load=place, name=producer, topic=TOPIC, streams=STREAMS,
            every_ms=EVERY_MS,
        )  # fmt: skip
        self.wait(place, SETTLED)

    def wait(self, place: str, count: int) -> None:
        """Wait until a place's consumer has received so many messages."""
        name = self.consumers[place]
        wait_until(
            lambda: self.jvm.call("push.count", name=name) >= count, LIMIT_S,
            f"{place}: nothing comes",
        )  # fmt: skip

    def stop_producing(self, place: str) -> None:
        self.seen[place] = told(self.jvm.call("load.stop", load=place), [])

    def drain(self, place: str) -> None:
        """Wait until the page's next command says that the group has consumed all; stop then."""
        _, name, *arguments = self.commands.pop(0)
        said = ""

        def consumed() -> bool:
            nonlocal said
            said = self.mqadmin(name, arguments)
            return re.search(r"Diff Total: 0\b", said) is not None

        wait_until(consumed, LIMIT_S, lambda: f"{place}: {said}")
        received = self.jvm.call("push.numbers", name=self.consumers[place])
        self.jvm.call("push.stop", name=self.consumers[place])
        sent = self.seen[place]
        self.seen[place] = Told(
            sent.acknowledged, sent.failed, sent.statuses, [(one, at) for one, at in received]
        )


def old_cluster(
    folder: pathlib.Path, ports: Ports, ends: contextlib.ExitStack, name: str
) -> RocketSite:
    peers = []
    for part in ("master", "slave"):
        peers.append(Peer(command(ROCKETMQ_5), folder, f"{name}-{part}"))
        ends.callback(peers[-1].kill)
    return RocketPair(peers, ports, folder / "stores")


@pytest.mark.slow("two clusters one after the other, and each is consumed to its end")
def test_a_cluster_moves_over_and_back_under_load(tmp_path: pathlib.Path) -> None:
    with contextlib.ExitStack() as ends:
        ports = ends.enter_context(contextlib.closing(Ports()))
        jvm = Clients(command(CLIENTS_5), tmp_path, "clients-moving")
        ends.callback(jvm.kill)
        walk = Walk(jvm)
        old = ends.enter_context(contextlib.ExitStack())
        walk.sites["ROCKETMQ"] = old_cluster(tmp_path, ports, old, "old")
        jvm.mqadmin(walk.sites["ROCKETMQ"], "updateTopic", "-c", CLUSTER, "-t", TOPIC)
        walk.consume("before", "ROCKETMQ")
        walk.produce("before", "ROCKETMQ")

        (tmp_path / "hastore").mkdir()
        group = ends.enter_context(Group(tmp_path / "hastore"))
        walk.sites["HASTORE"] = HastoreSite(group.start(), "hastore")
        walk.given("topicRoute", "updateTopic", "updateSubGroup")
        walk.consume("in hastore", "HASTORE")
        walk.produce("in hastore", "HASTORE")
        walk.stop_producing("before")
        walk.drain("before")
        old.close()

        walk.sites["ROCKETMQ"] = old_cluster(tmp_path, ports, ends, "new")
        walk.consume("back", "ROCKETMQ")
        walk.produce("back", "ROCKETMQ")
        walk.stop_producing("in hastore")
        walk.drain("in hastore")
        walk.stop_producing("back")
        walk.commands.append(["mqadmin", "consumerProgress", "-n", "ROCKETMQ", "-g", "GROUP"])
        walk.drain("back")
        assert not walk.commands, "each command of the page was given"
        times = []
        for place, seen in walk.seen.items():
            again = prove_consumed(seen)
            assert not seen.failed and len(seen.acknowledged) >= SETTLED
            more = sum(count > 1 for count in again.values())
            print(f"{place}: {len(seen.acknowledged)} acknowledged, {more} consumed again")
            times += seen.acknowledged.values()
        print(f"acknowledgements stopped for {longest_gap(times).ms:.0f} ms at most")
