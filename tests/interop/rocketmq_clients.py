"""RocketMQ's own clients in a JVM, and what they talk to: RocketMQ, or a hastore group.

    jvm = Clients(program, folder, "clients-5")        # the program of CLIENTS_5 or CLIENTS_4
    site = RocketSite(make_peer, ports)                # or HastoreSite(group)
    jvm.call("producer.start", name="p", namesrv=site.namesrv)
    jvm.send("p", [{"topic": "T", "body": "x", "tags": "a"}], how="async")
    jvm.mqadmin(site, "topicList")

The operations are those of hastore/demo/java; AdminTool.java adds `mqadmin` and `property`.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tests.interop.java_process import JavaProcess
from tests.process.harness import Group, Node, Ports, wait_until

CLUSTER, BROKER = "test", "g0"
_OPTIONS = (
    *("-Xms64m", "-Xmx512m", "-Djava.net.preferIPv4Stack=true"),
    # What waits by default for up to 20 s and 1 s: the search for a new share of the queues.
    "-Drocketmq.client.rebalance.waitInterval=1000",
    "-Drocketmq.client.rebalance.minInterval=200",
    "-Dcom.rocketmq.sendMessageWithVIPChannel=false",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
)
LIMIT_S = 180.0  # a hang, on a busy machine too
Found = dict[str, Any]


class Clients(JavaProcess):
    """A JVM with RocketMQ's clients and mqadmin of one version."""

    def __init__(
        self,
        program: tuple[str, str],
        folder: pathlib.Path,
        name: str,
        options: Sequence[str] = (),
    ) -> None:
        conf = folder / f"{name}.home" / "conf"
        conf.mkdir(parents=True)
        # mqadmin 4 wants this file.
        (conf / "logback_tools.xml").write_text(
            '<configuration><root level="OFF"/></configuration>'
        )
        super().__init__(
            program,
            folder,
            name,
            [*_OPTIONS, *options],
            {"ROCKETMQ_HOME": str(folder / f"{name}.home")},
            main="hastore.clients.Clients",
        )
        self._numbers = itertools.count()

    def unique(self, name: str) -> str:
        """Return a name that was not returned before."""
        return f"{name}-{self.name}-{next(self._numbers)}"

    def producer(self, site: Site, **options: Any) -> str:
        """Start a producer; return its name.

        It waits for an answer as long as a loaded machine may need. RocketMQ's own 3 s are too
        few for a broker that makes a topic. Tests of failover pass them as `timeout_ms`.
        """
        name = self.unique("producer")
        if "timeout_ms" not in options:
            options = {"timeout_ms": 60_000, "api_timeout_ms": 60_000, **options}
        self.call("producer.start", name=name, namesrv=site.namesrv, **options)
        return name

    def push(self, site: Site, group: str, *topics: str, **options: Any) -> str:
        """Start a push consumer of `topics`; return its name."""
        name = self.unique("push")
        self.call(
            "push.start", name=name, group=group, topics=topics, namesrv=site.namesrv, **options
        )
        return name

    def lite(self, site: Site, group: str, **options: Any) -> str:
        """Start a lite pull consumer; return its name."""
        name = self.unique("lite")
        self.call("lite.start", name=name, group=group, namesrv=site.namesrv, **options)
        return name

    def puller(self, site: Site, group: str) -> str:
        """Start an old pull consumer; return its name."""
        name = self.unique("pull")
        self.call("pull.start", name=name, group=group, namesrv=site.namesrv)
        return name

    def send(
        self, producer: str, messages: Sequence[Mapping[str, Any]], how: str = "sync", **more: Any
    ) -> list[Found]:
        """Send messages; return the result of each, or the one of the batch."""
        sent: list[Found] = self.call(
            "send", name=producer, messages=list(messages), how=how, **more
        )
        return sent

    def received(self, consumer: str, count: int, limit_s: float = LIMIT_S) -> list[Found]:
        """Return what a push consumer has received, once it is `count` messages at least."""
        found: list[Found] = self.call(
            "push.wait", name=consumer, count=count, limit_s=limit_s, timeout_s=limit_s + LIMIT_S
        )
        assert len(found) >= count, f"{consumer} received {len(found)} of {count}: {found}"
        return found

    def all_of(self, puller: str, topic: str) -> list[Found]:
        """Return all messages of a topic, queue by queue, read with the old pull consumer."""
        found: list[Found] = []
        for _, broker, queue in sorted(self.call("pull.queues", name=puller, topic=topic)):
            offset = 0
            while True:
                one = self.call(
                    "pull.once", name=puller, topic=topic, broker=broker, queue=queue, offset=offset
                )
                if one.get("status") != "FOUND":
                    assert one.get("status") in ("NO_NEW_MSG", "OFFSET_ILLEGAL"), one
                    break
                found += one["messages"]
                offset = one["next"]
        return found

    def mqadmin(self, site: Site, command: str, *arguments: str) -> str:
        """Run a command of mqadmin; return what it printed."""
        given = [command, "-n", site.namesrv, *map(str, arguments)]
        printed: str = self.call("mqadmin", arguments=given)
        return printed


class Site:
    """What clients talk to: `namesrv` is the address that an application is configured with."""

    name: str
    namesrv: str
    master: str  # HOST:PORT of the master as a broker
    nodes = 1


class RocketSite(Site):
    """RocketMQ itself: a name server and one broker, in one JVM."""

    name = "rocketmq"

    def __init__(self, peer: JavaProcess, ports: Ports, root: pathlib.Path) -> None:
        listen, name_server, ha = broker_port(ports), ports.take(), ports.take()
        self.namesrv = f"127.0.0.1:{name_server}"
        self.master = f"127.0.0.1:{listen}"
        peer.call("namesrv.start", port=name_server)
        peer.call(
            "broker.start",
            store={
                "storePathRootDir": str(root),
                "storePathCommitLog": str(root / "commitlog"),
                "mappedFileSizeCommitLog": 16 * 1024 * 1024,
                "mappedFileSizeConsumeQueue": 20 * 3000,
                "maxHashSlotNum": 10_000,
                "maxIndexNum": 40_000,
                "brokerRole": "ASYNC_MASTER",
                "haListenPort": ha,
                "timerWheelEnable": True,  # without it, deleting a topic fails in 5.3.3
                "mappedFileSizeTimerLog": 1024 * 1024,
            },
            broker={
                "brokerName": BROKER,
                "brokerClusterName": CLUSTER,
                "namesrvAddr": self.namesrv,
                "listenPort": listen,
                "flushConsumerOffsetInterval": 500,
                "autoCreateTopicEnable": True,
                "defaultTopicQueueNums": 4,
                "enablePropertyFilter": True,
            },
        )
        peer.call("broker.topic", topic="warm", queues=4)  # waits until the broker is registered


def broker_port(ports: Ports) -> int:
    """Return a free port for a broker, which takes the port minus 2 too."""
    return ports.take(-2)


class HastoreSite(Site):
    """A group of hastore nodes, of either mode."""

    def __init__(self, group: Group, name: str) -> None:
        self.group = group
        self.name = name
        self.nodes = len(group.nodes)

    @property
    def namesrv(self) -> str:  # type: ignore[override]
        """The addresses of all nodes: each of them answers as a name server."""
        return ";".join(address(node) for node in self.group)

    @property
    def master(self) -> str:  # type: ignore[override]
        """The address of the node that takes puts."""
        return address(self.writable())

    def writable(self, besides: int = 0) -> Node:
        """Wait until one node, not `besides`, takes puts; return it."""

        def look() -> Node | None:
            for node in self.group:
                if node.number != besides and node.running:
                    status = node.status()
                    if status is not None and status["writable"]:
                        return node
            return None

        found: Node = wait_until(look, LIMIT_S, "no node takes puts")
        return found


def address(node: Node) -> str:
    """Return HOST:PORT of a node's door."""
    return node.api.removeprefix("tcp://")
