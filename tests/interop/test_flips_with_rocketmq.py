"""From a RocketMQ broker, 5.3.3 or 4.9.7, to hastore and back: each consumer goes on at its place.

Nobody moves a file by hand: each side asks the other for what is not in the log.
"""

import json
import re
import subprocess
import time
from collections import Counter

import pytest

from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import decode_record
from hastore.record.delays import SCHEDULE_TOPIC
from tests.documents.blocks import take
from tests.interop.compare import read_lines, rocketmq_sizes, sizes
from tests.interop.rocketmq_clients import BROKER, CLUSTER, HastoreSite, address, broker_port
from tests.interop.test_hastore_slave import follow, wait_at
from tests.interop.test_rocketmq_sends import SEND, UNIQUE, fields, log_of
from tests.process.harness import hastore, wait_until
from tests.process.stores import read_log
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
LEVELS = "1s 20s 100s"
SOON, LATER, LATE = 1, 2, 3
TOPIC, GROUP = "Orders", "readers"
LIMIT_S = 240.0
BUILT_ANEW = take("docs/migrate-from-rocketmq.md", "rm -rf BROKER_STORE")


class Broker:
    """A name server and a broker; `start` makes a new JVM on the same store."""

    def __init__(self, make_peer, ports, root):
        self._make_peer, self._ports, self.root = make_peer, ports, root
        self.listen, self.name_server, self.ha = broker_port(ports), ports.take(), ports.take()
        self.address, self.namesrv = f"127.0.0.1:{self.listen}", f"127.0.0.1:{self.name_server}"

    def start(self, *, slave_of=None):
        self.peer = peer = self._make_peer()
        peer.call("namesrv.start", port=self.name_server)
        peer.call(
            "broker.start",
            store={
                **rocketmq_sizes(self.root), "haListenPort": self.ha,
                "brokerRole": "ASYNC_MASTER" if slave_of is None else "SLAVE",
                "messageDelayLevel": LEVELS,
            },
            broker={
                "brokerName": BROKER, "brokerClusterName": CLUSTER, "listenPort": self.listen,
                "brokerId": 0 if slave_of is None else 1,
                "namesrvAddr": self.namesrv if slave_of is None else slave_of,
                "flushConsumerOffsetInterval": 500, "autoCreateTopicEnable": False,
                "autoCreateSubscriptionGroup": False,
            },
        )  # fmt: skip
        return self

    def table(self, name, member):
        """Return a table of a file of the broker's; empty while there is none."""
        return table_in(self.root / "config" / name, member)


def table_in(path, member):
    text = path.read_text() if path.exists() else "{}"
    plain = re.sub(r"([{,]\s*)(\d+)(\s*:)", r'\1"\2"\3', text)
    try:
        return json.loads(plain).get(member, {})
    except ValueError:  # while it is written
        return {}


def ask(address, code, body=b"", **given):
    client = RemotingClient(address)
    try:
        answer = client.ask(code, given, body)
        assert answer.code == Answer.SUCCESS, answer.remark
        return answer
    finally:
        client.close()


def make_topics(address, topics, group):
    """Make topics with these permissions, and a group that tries each message 3 times."""
    settings = json.dumps({"groupName": group, "retryMaxTimes": 3}).encode()
    ask(address, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, settings)
    for name, perm in topics.items():
        ask(
            address, Code.UPDATE_AND_CREATE_TOPIC,
            topic=name, defaultTopic="TBW102", readQueueNums="6", writeQueueNums="4", perm=perm,
            topicFilterType="SINGLE_TAG", topicSysFlag="0", order="false",
        )  # fmt: skip


class Sender:
    """Sends messages with names of their own, and knows when the delayed ones are due."""

    def __init__(self):
        self.due_ms = {}
        self._count = 0

    def send(self, address, count, level=None):
        client = RemotingClient(address)
        names = []
        for _ in range(count):
            self._count += 1
            name = f"message-{self._count:05d}"
            given = fields(TOPIC, e=str(self._count % 4))
            given["i"] = UNIQUE.replace("AC1100010A2B18B4AAC27F2F0A2B0000", name)
            if level is not None:
                given["i"] += f"DELAY\x01{level}\x02"
                delay_ms = int(LEVELS.split()[level - 1][:-1]) * 1000
                self.due_ms[name] = int(time.time() * 1000) + delay_ms
            assert client.ask(SEND, given, name.encode()).code == Answer.SUCCESS
            names.append(name)
        client.close()
        return names


def records(root):
    return [decode_record(raw) for raw in log_of(root / "commitlog")]


def delivered(root):
    """Return how often each body is in the topic."""
    return Counter(one.body.decode() for one in records(root) if one.topic == TOPIC)


class Reader:
    """The consumers of a group, one after the other; what the group has seen."""

    def __init__(self, peer, folder):
        self._peer, self._folder, self.seen, self._runs = peer, folder, Counter(), 0

    def read(self, namesrv, count, *, delayed=0):
        """Read `count` messages, and commit that.

        Of `delayed` others some may be due already, on a busy machine; return how many came.
        """
        if not count:
            return 0
        self._runs += 1
        file = self._folder / f"read{self._runs}"
        got = self._peer.call(
            "consume", namesrv=namesrv, topics=[TOPIC], count=count, group=GROUP, timeout=120,
            file=str(file), timeout_s=LIMIT_S,
        )  # fmt: skip
        places = [tuple(line.split("\t")[1:3]) for line in read_lines(file)]
        assert got == len(places) and 0 <= got - count <= delayed, f"{len(places)} of {count}"
        self.seen.update(places)
        return got - count


def check_seen(reader, root):
    """Nothing was skipped, and nothing came twice: all that was committed is known everywhere."""
    wanted = {
        (str(one.queue_id), str(one.queue_offset)) for one in records(root) if one.topic == TOPIC
    }
    assert reader.seen.keys() == wanted
    assert set(reader.seen.values()) == {1}


def check_times(sender, root):
    for one in records(root):
        name = one.body.decode()
        if one.topic == TOPIC and name in sender.due_ms:
            late_ms = one.store_timestamp_ms - sender.due_ms[name]
            assert -500 <= late_ms < 60_000, (name, late_ms)


@pytest.mark.slow("brokers start, and a RocketMQ slave asks for the tables once a minute")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["5.3.3", pytest.param("4.9.7", marks=pytest.mark.long)])
def test_consumers_and_delays_go_on_there_and_back(
    make_group, make_peer, ports, tmp_path, request, version
):
    make = make_peer if version == "5.3.3" else request.getfixturevalue("make_old_broker")
    broker, sender = Broker(make, ports, tmp_path / "rocketmq").start(), Sender()
    reader = Reader(make_peer(), tmp_path)
    make_topics(broker.address, {TOPIC: "6", "Closed": "4", f"%RETRY%{GROUP}": "6"}, GROUP)
    group = make_group(
        2, master_role="SLAVE", store={**sizes(), "message_delay_level": LEVELS},
        ha={
            "classic_master": f"127.0.0.1:{broker.ha}", "classic_broker": broker.address,
            "allow_classic_peers": True,
        },
    )  # fmt: skip
    for node in group:
        follow(node)

    # At the broker: 60 messages are read, 25 are not, some are delayed.
    sender.send(broker.address, 60)
    soon = sender.send(broker.address, 4, SOON)
    wait_until(lambda: set(soon) <= delivered(broker.root).keys(), 60, "none is delivered")
    reader.read(broker.namesrv, 64)
    unread = sender.send(broker.address, 25)
    end = read_log(broker.root).end
    for node in group:
        wait_at(node, end)
        place = node.store / "config" / "consumerOffset.json"
        wait_until(
            lambda place=place: sum(
                table_in(place, "offsetTable").get(f"{TOPIC}@{GROUP}", {}).values()
            ) == 64,
            LIMIT_S, lambda place=place: place.read_text(),
        )  # fmt: skip
        assert node.status()["problems"] == []
    later = sender.send(broker.address, 5, LATER)
    end = read_log(broker.root).end
    for node in group:
        wait_at(node, end)
    broker.peer.kill()

    # The flip to hastore.
    done = hastore("promote", "-c", str(group[1].path), "--json")
    assert done.returncode == 0, done.stderr
    assert group[2].stop() == 0
    group[2].write(ha={"classic_master": None})
    group[2].start("slave")
    group[1].wait_in_sync(2)
    group[1].wait_log("took over from a RocketMQ broker")
    site = HastoreSite(group, "pair")
    topics = json.loads(ask(site.master, Code.GET_ALL_TOPIC_CONFIG).body)["topicConfigTable"]
    assert (topics[TOPIC]["readQueueNums"], topics[TOPIC]["writeQueueNums"]) == (6, 4)
    assert topics["Closed"]["perm"] == 4
    groups = json.loads(ask(site.master, Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)
    assert groups["subscriptionGroupTable"][GROUP]["retryMaxTimes"] == 3
    came = reader.read(site.namesrv, len(unread), delayed=len(later))
    log = group[1].store
    wait_until(lambda: set(later) <= delivered(log).keys(), 120, lambda: str(delivered(log)))
    reader.read(site.namesrv, len(later) - came)
    check_seen(reader, log)
    check_times(sender, log)

    # And back: the old broker follows, and learns what hastore did.
    make_topics(site.master, {"Made": "4"}, "made")
    ask(
        site.master, Code.UPDATE_AND_CREATE_TOPIC,
        topic="Typed", readQueueNums="4", writeQueueNums="4", perm="6",
        attributes="+message.type=NORMAL,+queue.type=SimpleCQ",
    )  # fmt: skip
    ask(site.master, Code.DELETE_TOPIC_IN_BROKER, topic="Closed")
    unread = sender.send(site.master, 30)
    built_anew = BUILT_ANEW.text.replace("BROKER_STORE", str(broker.root))
    subprocess.run(["bash", "-ec", built_anew], check=True, timeout=60)
    slave = broker.start(slave_of=site.namesrv)
    late = sender.send(site.master, 5, LATE)
    read = 64 + 25 + 5
    wait_until(
        lambda: sum(
            slave.table("consumerOffset.json", "offsetTable").get(f"{TOPIC}@{GROUP}", {}).values()
        ) == read,
        LIMIT_S, lambda: str(slave.table("consumerOffset.json", "offsetTable")),
    )  # fmt: skip
    waited = Counter(one.queue_id + 1 for one in records(log) if one.topic == SCHEDULE_TOPIC)
    wanted = {str(level): count - (len(late) if level == LATE else 0)
              for level, count in sorted(waited.items())}  # fmt: skip
    wait_until(
        lambda: slave.table("delayOffset.json", "offsetTable") == wanted,
        LIMIT_S, lambda: str((slave.table("delayOffset.json", "offsetTable"), wanted)),
    )  # fmt: skip
    wait_until(
        lambda: {TOPIC, "Made", "Typed"} <= slave.table("topics.json", "topicConfigTable").keys()
        and "made" in slave.table("subscriptionGroup.json", "subscriptionGroupTable"),
        LIMIT_S, lambda: str(slave.table("topics.json", "topicConfigTable")),
    )  # fmt: skip
    end = group[1].status()["max_offset"]
    wait_until(lambda: slave.peer.call("store.status")["max"] == end, 60, "the slave is behind")
    group[1].kill()
    group[2].kill()
    slave.peer.call("broker.stop")
    slave.peer.kill()
    broker.start()
    topics = broker.table("topics.json", "topicConfigTable")
    assert topics["Made"]["perm"] == 4 and topics[TOPIC]["writeQueueNums"] == 4
    assert "Closed" not in topics
    if version == "5.3.3":  # 4.9 knows no attributes
        typed = {"message.type": "NORMAL", "queue.type": "SimpleCQ"}
        assert topics["Typed"]["attributes"] == typed
    groups = broker.table("subscriptionGroup.json", "subscriptionGroupTable")
    assert groups[GROUP]["retryMaxTimes"] == groups["made"]["retryMaxTimes"] == 3
    came = reader.read(broker.namesrv, len(unread), delayed=len(late))
    wait_until(lambda: set(late) <= delivered(broker.root).keys(), 180,
               lambda: str(delivered(broker.root)))  # fmt: skip
    reader.read(broker.namesrv, len(late) - came)
    check_seen(reader, broker.root)
    check_times(sender, broker.root)


@pytest.mark.long
@pytest.mark.slow("messages are sent and read for a minute, and the last delays are waited for")
@pytest.mark.timeout(600)
def test_a_kill_of_the_master_loses_nothing_of_what_its_rocketmq_slave_has(
    make_group, make_peer, make_old_broker, ports, tmp_path
):
    """The slave's tables are up to 10 s old then: what they do not say is repeated, never lost."""
    group = make_group(
        1, store={**sizes(), "message_delay_level": LEVELS},
        ha={"allow_classic_peers": True, "count_classic_peers": True, "slave_timeout": "1s"},
    )  # fmt: skip
    node = group[1].start("master")
    site = HastoreSite(group, "alone")
    broker = Broker(make_old_broker, ports, tmp_path / "rocketmq").start(slave_of=address(node))
    node.wait_status(
        lambda s: [one["classic"] for one in s["slaves"]] == [True], "a RocketMQ slave"
    )
    make_topics(site.master, {TOPIC: "6", f"%RETRY%{GROUP}": "6"}, GROUP)
    sender, reading, seen = Sender(), make_peer(), set()

    def read(namesrv, file, seconds):
        """Begin to read for some time; the group's positions are committed every 5 s."""
        return reading.begin(
            "consume", namesrv=namesrv, topics=[TOPIC], count=1_000_000, group=GROUP,
            timeout=seconds, file=str(tmp_path / file), timeout_s=LIMIT_S,
        )  # fmt: skip

    first = read(site.namesrv, "first", 45)
    names = []
    until = time.monotonic() + 35
    while time.monotonic() < until or not placed(broker):
        names += sender.send(site.master, 2)
        names += sender.send(site.master, 1, SOON)
        names += sender.send(site.master, 1, LATER)
    node.kill()
    first.result(120)
    broker.peer.call("broker.stop")
    broker.peer.kill()
    assert placed(broker) > 0
    table = broker.table("delayOffset.json", "offsetTable")
    broker.start()
    wait_until(
        lambda: set(names) <= delivered(broker.root).keys(), 120,
        lambda: str(set(names) - delivered(broker.root).keys()),
    )  # fmt: skip
    read(broker.namesrv, "second", 30).result(120)
    check_times(sender, broker.root)
    for file in ("first", "second"):
        lines = [line.split("\t") for line in read_lines(tmp_path / file)]
        seen |= {(queue, place) for _, queue, place, *_ in lines}
    wanted = {
        (str(one.queue_id), str(one.queue_offset))
        for one in records(broker.root)
        if one.topic == TOPIC
    }
    assert seen == wanted
    # What the slave's table named as delivered is in its log, once: only later ones come again.
    counts, known = delivered(broker.root), 0
    for one in records(broker.root):
        if one.topic == SCHEDULE_TOPIC and one.queue_offset < table.get(str(one.queue_id + 1), 0):
            assert counts[one.body.decode()] == 1
            known += 1
    again = sum(counts.values()) - len(names)
    print(f"{len(names)} messages; {known} delays were known, {again} were delivered twice")
    assert known


def placed(broker):
    found = broker.table("consumerOffset.json", "offsetTable").get(f"{TOPIC}@{GROUP}", {})
    return sum(found.values())
