"""What applications do with RocketMQ's clients, as functions that run against any place.

Each scene takes a JVM with clients and a place (rocketmq_clients.py), and returns what an
application sees, without what differs from run to run: ids, times, addresses. A scene is right for
a hastore group if it returns what it returned for RocketMQ; what must hold in itself is asserted.
"""

from __future__ import annotations

import pathlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.interop.rocketmq_clients import Clients, Found, Site

CHANGING = (
    *("UNIQ_KEY", "MIN_OFFSET", "MAX_OFFSET", "ORIGIN_MESSAGE_ID", "CONSUME_START_TIME"),
    "HS_DELAYED",  # with which hastore marks the delivery of a delayed message
)
RICH = {
    "tags": "red",
    "keys": "first second",
    "flag": 7,
    "properties": {"number": "1", "ümläut": "日本 🚀", "empty.no": "x y"},
}
Scene = Callable[[Clients, Site], Any]


class Names:
    """Topics and groups of one scene; `plain` takes their unique part away again."""

    def __init__(self, jvm: Clients) -> None:
        self._tail = jvm.unique("").replace(".", "_")

    def __call__(self, name: str) -> str:
        return name + self._tail

    def plain(self, value: Any) -> Any:
        """Return a value without the unique part of the names, wherever it stands in it."""
        if isinstance(value, str):
            return value.replace(self._tail, "")
        if isinstance(value, dict):
            return {self.plain(key): self.plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(one) for one in value]
        return value


def told(names: Names, sent: list[Found]) -> Any:
    """Return what results of sends say for good: status, or failure with its code."""
    for one in sent:
        if one.get("status") == "SEND_OK":
            assert len(one["msgId"].split(",")[0]) == 32, one
    return [names.plain({key: one.get(key) for key in ("status", "code", "error")}) for one in sent]


def content(names: Names, messages: list[Found]) -> Any:
    """Return what messages are for good, in a fixed order."""
    found = [
        {
            **{key: one[key] for key in ("topic", "queue", "offset", "body", "size")},
            **{key: one.get(key) for key in ("tags", "keys", "flag", "sysFlag", "reconsume")},
            "properties": {
                key: value for key, value in one["properties"].items() if key not in CHANGING
            },
        }
        for one in messages
    ]
    return names.plain(sorted(found, key=lambda one: (one["queue"], one["offset"])))


def bodies(messages: list[Found]) -> list[str]:
    """Return the bodies in the order in which they came."""
    return [one["body"] for one in messages]


def on(site_queue: tuple[str, int], topic: str) -> dict[str, Any]:
    """Return the arguments that name a queue."""
    return {"topic": topic, "broker": site_queue[0], "queue": site_queue[1]}


def fill(jvm: Clients, site: Site, topic: str, count: int, **more: Any) -> list[Found]:
    """Send `count` messages, "0" to "count - 1", to queue 0 of the group's broker."""
    producer = jvm.producer(site)
    ready(jvm, producer, topic)
    messages = [{"topic": topic, "body": str(number), **more} for number in range(count)]
    sent = jvm.send(producer, messages, "queue", **on(("g0", 0), topic))
    assert {one["status"] for one in sent} == {"SEND_OK"}, sent
    jvm.call("producer.stop", name=producer)
    return sent


def ready(jvm: Clients, producer: str, topic: str) -> None:
    """Make the topic by a message of its own, in queue 3, and wait until its route is there."""
    first = {"topic": topic, "body": "first"}
    (made,) = jvm.send(producer, [first], "queue", **on(("g0", 3), topic))
    if "error" in made:  # RocketMQ makes a topic only by a send that looks for its route
        jvm.send(producer, [{**first, "tags": "made"}])
    deadline = time.monotonic() + 60
    while "error" in made:
        assert time.monotonic() < deadline, made
        (made,) = jvm.send(producer, [first], "queue", **on(("g0", 3), topic))


# ---- sending


def sends(jvm: Clients, site: Site) -> Any:
    """Send in every way, and read back what was stored."""
    names = Names(jvm)
    topic = names("Sends")
    producer = jvm.producer(site)
    made = jvm.send(producer, [{"topic": topic, "body": "made"}])  # the topic comes into being
    queue = on(("g0", 1), topic)
    seen = {"made": told(names, made)}
    plain = {"topic": topic, "body": "plain"}
    rich = {"topic": topic, "body": "rich", **RICH}
    for how in ("sync", "async", "ordered"):
        seen[how] = told(names, jvm.send(producer, [plain, rich], how, key=2))
    one = {"topic": topic, "body": "one way"}
    seen["oneway"] = told(names, jvm.send(producer, [one] * 3, "oneway"))
    batch = [{"topic": topic, "body": f"b{n}", "keys": f"k{n}", "tags": "t"} for n in range(30)]
    seen["batch"] = told(names, jvm.send(producer, batch, "batch"))
    fixed = names("Fixed")
    ready(jvm, producer, fixed)
    queue = on(("g0", 1), fixed)
    large = {"body": "compresses ", "repeat": 2000}
    messages = [
        {"body": "first"},
        {"body": "rich", **RICH},
        {**large, "keys": "large"},
        {"body": "master alone", "wait": False},
        {"body": "", "keys": "none"},
        {"body": "x", "repeat": 5 * 1024 * 1024},
        {"body": "last"},
    ]
    sent = jvm.send(producer, [{**m, "topic": fixed} for m in messages], "queue", **queue)
    seen["fixed"] = [
        [one.get("status"), one.get("queue"), one.get("offset")] if "status" in one else "refused"
        for one in sent
    ]
    jvm.call("producer.stop", name=producer)
    puller = jvm.puller(site, names("Reader"))
    stored = jvm.all_of(puller, topic)
    deadline = time.monotonic() + 60
    while len(stored) < 40 and time.monotonic() < deadline:  # one way: when they have come
        stored = jvm.all_of(puller, topic)
    counts = Counter(bodies(stored))
    seen["counts"] = dict(counts)
    in_fixed = [one for one in jvm.all_of(puller, fixed) if one["queue"] == 1]
    seen["stored"] = content(names, in_fixed)
    by_offset = {one["offset"]: one for one in in_fixed}
    for result in sent:
        if result.get("status") == "SEND_OK":
            assert by_offset[result["offset"]]["msgId"] == result["msgId"]
    batched = [one for one in stored if one["body"].startswith("b")]
    assert len({one["queue"] for one in batched}) == 1, "a batch goes to one queue"
    ordered = sorted(batched, key=lambda one: one["offset"])
    assert bodies(ordered) == [f"b{n}" for n in range(30)]
    jvm.call("pull.stop", name=puller)
    return seen


# ---- push consumers


def push(jvm: Clients, site: Site) -> Any:
    """Two consumers share a topic, a third has only a tag, a fourth broadcasts, a fifth orders."""
    names = Names(jvm)
    topic = names("Push")
    producer = jvm.producer(site)
    ready(jvm, producer, topic)
    first = jvm.push(site, names("shared"), topic)
    second = jvm.push(site, names("shared"), topic)
    tagged = jvm.push(site, names("tagged"), topic, expression="red || blue")
    everyone = [jvm.push(site, names("all"), topic, broadcasting=True) for _ in range(2)]
    orderly = jvm.push(site, names("orderly"), topic, orderly=True, refuse=1)
    messages = [
        {"topic": topic, "body": f"m{n}", "tags": ("red", "green", "blue")[n % 3]}
        for n in range(48)
    ]
    for n, message in enumerate(messages):
        (sent,) = jvm.send(producer, [message], "queue", **on(("g0", n % 4), topic))
        assert sent["status"] == "SEND_OK", sent
    wanted = Counter(["first", *(one["body"] for one in messages)])
    seen: dict[str, Any] = {}
    deadline = time.monotonic() + 60
    while True:
        shared = jvm.received(first, 0) + jvm.received(second, 0)
        got = Counter(bodies(shared))
        if got >= wanted or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert set(got) == set(wanted), wanted - got
    seen["tagged"] = sorted(bodies(jvm.received(tagged, 32)))
    for one in everyone:
        seen.setdefault("all", []).append(len(set(bodies(jvm.received(one, 49)))))
    ordered = jvm.received(orderly, 2 * 49)
    for queue in range(4):
        mine = [one["body"] for one in ordered if one["queue"] == queue and one["body"] != "first"]
        seen[f"orderly {queue}"] = list(dict.fromkeys(mine))
        assert Counter(mine) == dict.fromkeys(mine, 2), "each is refused once"
    for consumer in (first, second, tagged, *everyone, orderly):
        jvm.call("push.stop", name=consumer)
    jvm.call("producer.stop", name=producer)
    return seen


def retries(jvm: Clients, site: Site) -> Any:
    """A consumer asks for a message again; one that has had enough of it finds it in %DLQ%."""
    names = Names(jvm)
    topic, group = names("Retry"), names("again")
    fill(jvm, site, topic, 2, **RICH)
    consumer = jvm.push(site, group, topic, refuse=2, delay_level=1)
    found = jvm.received(consumer, 9)
    by_body: dict[str, list[Found]] = {}
    for one in found:
        by_body.setdefault(one["body"], []).append(one)
    seen: dict[str, Any] = {
        body: [[one["reconsume"], names.plain(one["topic"])] for one in sorted(
            tries, key=lambda one: one["reconsume"])]
        for body, tries in sorted(by_body.items())
    }  # fmt: skip
    last = max(by_body["1"], key=lambda one: one["reconsume"])
    seen["properties"] = sorted(key for key in last["properties"] if key not in CHANGING)
    first = min(by_body["1"], key=lambda one: one["reconsume"])
    assert last["msgId"] == first["msgId"]
    waited = sorted(one["ms"] for one in by_body["1"])
    assert waited[1] - waited[0] > 900, "level 1 is a second"
    jvm.call("push.stop", name=consumer)
    dead = names("dead")
    consumer = jvm.push(site, dead, topic, refuse=9, delay_level=1, max_reconsume=1)
    found = jvm.received(consumer, 6)
    puller = jvm.puller(site, names("Reader"))
    deadline = time.monotonic() + 60
    letters: list[Found] = []
    while len(letters) < 3 and time.monotonic() < deadline:
        try:
            letters = jvm.all_of(puller, f"%DLQ%{dead}")
        except AssertionError:
            time.sleep(0.2)  # the topic comes with its first message
    seen["dead"] = sorted([one["body"], one["reconsume"]] for one in letters)
    jvm.call("push.stop", name=consumer)
    jvm.call("pull.stop", name=puller)
    return seen


def delays(jvm: Clients, site: Site) -> Any:
    """Messages with a delay come after it, in the order of their times."""
    names = Names(jvm)
    topic = names("Delay")
    producer = jvm.producer(site)
    ready(jvm, producer, topic)
    consumer = jvm.push(site, names("late"), topic)
    jvm.received(consumer, 1)
    began = time.monotonic() * 1000
    messages = [
        {"topic": topic, "body": "5 s", "delay": 2, **RICH},
        {"topic": topic, "body": "1 s", "delay": 1},
        {"topic": topic, "body": "now"},
    ]
    sent = jvm.send(producer, messages, "queue", **on(("g0", 2), topic))
    found = [one for one in jvm.received(consumer, 4) if one["body"] != "first"]
    for one, at_least in zip(found, (0, 1000, 5000), strict=True):
        assert one["ms"] - began >= at_least, one
    jvm.call("push.stop", name=consumer)
    jvm.call("producer.stop", name=producer)
    return {
        "sent": told(names, sent),
        "bodies": bodies(found),
        "properties": [
            names.plain({k: v for k, v in one["properties"].items() if k not in CHANGING})
            for one in found
        ],
        "queues": [one["queue"] for one in found],
    }


# ---- pull consumers


def lite(jvm: Clients, site: Site) -> Any:
    """The lite pull consumer, with a subscription and with queues of its choice."""
    names = Names(jvm)
    topic = names("Lite")
    before = int(time.time() * 1000)
    fill(jvm, site, topic, 40, tags="red")
    group = names("lite")
    consumer = jvm.lite(site, group, topic=topic)
    seen: dict[str, Any] = {}
    found = jvm.call("lite.poll", name=consumer, count=41, limit_s=60)
    seen["subscribed"] = sorted(bodies(found))
    jvm.call("lite.commit", name=consumer)
    queue = on(("g0", 0), topic)
    seen["committed"] = jvm.call("lite.committed", name=consumer, **queue)
    jvm.call("lite.stop", name=consumer)
    consumer = jvm.lite(site, names("assigned"))
    seen["queues"] = jvm.call("lite.assign", name=consumer, topic=topic)
    jvm.call("lite.seek", name=consumer, offset=35, **queue)
    # The client may hand out what it pulled before the seek.
    wanted, got = {"first", *map(str, range(35, 40))}, set[str]()
    deadline = time.monotonic() + 60
    while not wanted <= got and time.monotonic() < deadline:
        got.update(bodies(jvm.call("lite.poll", name=consumer, count=1, limit_s=60)))
    seen["assigned"] = sorted(wanted & got)
    seen["at"] = [
        jvm.call("lite.at", name=consumer, time=moment, **queue) for moment in (0, before)
    ]
    jvm.call("lite.stop", name=consumer)
    tagged = jvm.lite(site, names("tagged"), topic=topic, expression="green || red")
    found = jvm.call("lite.poll", name=tagged, count=40, limit_s=60)
    seen["tagged"] = [len(found), {one["tags"] for one in found} == {"red"}]
    jvm.call("lite.stop", name=tagged)
    return seen


def old_pull(jvm: Clients, site: Site) -> Any:
    """Each status of the old pull consumer, and the group's position."""
    names = Names(jvm)
    topic = names("Old")
    fill(jvm, site, topic, 40, tags="red")
    puller = jvm.puller(site, names("old"))
    queue = on(("g0", 0), topic)
    seen: dict[str, Any] = {"before": jvm.call("pull.position", name=puller, **queue)}
    asked = {
        "all": {"offset": 0, "max": 32},
        "some": {"offset": 10, "max": 5},
        "end": {"offset": 40},
        "beyond": {"offset": 1000},
        "before the start": {"offset": -5},
        "other tag": {"offset": 0, "expression": "green"},
        "empty queue": {"offset": 0, "queue": 2},
        "beyond an empty queue": {"offset": 9, "queue": 2},
        "no such queue": {"offset": 0, "queue": 77},
    }
    for what, arguments in asked.items():
        got = jvm.call("pull.once", name=puller, **{**queue, **arguments})
        for _ in range(10):  # a slave that consumers read from names the master instead
            if not what.startswith("beyond") or got.get("status") != "NO_MATCHED_MSG":
                break
            got = jvm.call("pull.once", name=puller, **{**queue, **arguments})
        seen[what] = [
            *(got.get(key) for key in ("status", "code", "next", "min", "max")),
            bodies(got.get("messages", [])),
        ]
    for what, offset in (("set", 17), ("back", 3)):  # the commit has no answer
        seen[what] = jvm.call("pull.position", name=puller, offset=offset, **queue)
        deadline = time.monotonic() + 60
        while seen[what] != offset and time.monotonic() < deadline:
            seen[what] = jvm.call("pull.position", name=puller, **queue)
    unknown = jvm.call("pull.once", name=puller, offset=0, **on(("g0", 0), names("Nowhere")))
    seen["unknown"] = [unknown.get("status"), unknown.get("code")]
    jvm.call("pull.stop", name=puller)
    return seen


def queries(jvm: Clients, site: Site) -> Any:
    """Find messages by key and by both ids, and offsets by time."""
    names = Names(jvm)
    topic = names("Query")
    producer = jvm.producer(site)
    ready(jvm, producer, topic)
    queue = on(("g0", 0), topic)
    before = int(time.time() * 1000)
    messages = [{"topic": topic, "body": f"q{n}", **RICH} for n in range(5)]
    sent = jvm.send(producer, messages, "queue", **queue)
    time.sleep(0.05)
    middle = int(time.time() * 1000)
    sent += jvm.send(producer, [{"topic": topic, "body": "after"}], "queue", **queue)
    seen: dict[str, Any] = {}
    for key in ("first", "second", "third"):
        seen[key] = found_by(jvm, producer, topic, key, 0 if key == "third" else 5)
    for name in ("msgId", "offsetMsgId"):
        one = jvm.call("query.id", name=producer, topic=topic, message=sent[3][name])
        assert one["offset"] == sent[3]["offset"], one
        seen[name] = content(names, [one])
    offsets = jvm.call("query.offsets", name=producer, time=middle, **queue)
    early = jvm.call("query.offsets", name=producer, time=before - 10_000, **queue)
    late = jvm.call("query.offsets", name=producer, time=before + 10**9, **queue)
    seen["offsets"] = [
        [one["min"], one["max"], one["at"], before - 1 <= one["earliest"] <= middle]
        for one in (offsets, early, late)
    ]
    empty = jvm.call("query.offsets", name=producer, time=before, **on(("g0", 1), topic))
    seen["empty"] = [empty["min"], empty["max"], empty["at"]]
    jvm.call("producer.stop", name=producer)
    return seen


def found_by(jvm: Clients, producer: str, topic: str, key: str, count: int) -> Any:
    """Return the bodies that a query by key finds, once it finds `count`: the index is late."""
    deadline = time.monotonic() + 60
    while True:
        try:
            found = jvm.call("query.key", name=producer, topic=topic, key=key)
        except AssertionError as failure:
            found = []
            if not count:
                return "nothing: " + str("no message" in str(failure))
        if len(found) >= count or time.monotonic() > deadline:
            return sorted(bodies(found))
        time.sleep(0.1)


# ---- mqadmin


def rows(printed: str, *, of: str = "g0") -> list[list[str]]:
    """Return the cells of a table's rows that name the group's broker."""
    lines = [line.split() for line in printed.splitlines() if not line.startswith("#")]
    return [cells for cells in lines if of in cells]


def pairs(printed: str, *keys: str) -> list[str]:
    """Return the values of lines "key: value"."""
    found = {
        key.strip(): value.strip()
        for key, colon, value in (line.partition(":") for line in printed.splitlines())
        if colon
    }
    return [found[key] for key in keys]


MESSAGE = ("Topic", "Tags", "Keys", "Queue ID", "Queue Offset", "Reconsume Times", "System Flag")


def mqadmin(jvm: Clients, site: Site) -> Any:
    """Run the commands of mqadmin that an operator needs, and read what they print."""
    names = Names(jvm)
    topic, other, group, makers = names("Tool"), names("Other"), names("users"), names("makers")

    def run(command: str, *arguments: str) -> str:
        printed = jvm.mqadmin(site, command, *arguments)
        assert "\n\tat " not in printed, printed
        return printed

    seen: dict[str, Any] = {}
    made = run("updateTopic", "-b", site.master, "-t", topic, "-r", "4", "-w", "4")
    seen["made"] = names.plain(made.splitlines()[-1])
    made = run("updateTopic", "-c", "test", "-t", other, "-r", "2", "-w", "3", "-p", "6")
    seen["in the cluster"] = names.plain(made.splitlines()[-1])  # after a line for each broker
    sent = fill(jvm, site, topic, 5, keys="k1 k2", tags="red")
    consumer = jvm.push(site, group, topic)
    jvm.received(consumer, 6)
    producer = jvm.producer(site, group=makers)
    queue = on(("g0", 1), topic)
    jvm.send(producer, [{"topic": topic, "body": "more"}], "queue", **queue)
    jvm.received(consumer, 7)
    seen |= lists(run, site, topic, other)
    seen |= members(run, topic, group, makers, names)
    seen |= lookups(run, topic, sent, names)
    seen["subscription group"] = "success" in run(
        "updateSubGroup", "-b", site.master, "-g", names("new"), "-r", "3"
    )
    assert "#MasterCommitLogMaxOffset" in run("haStatus", "-b", site.master)
    seen["configuration"] = [
        line.split() for line in run("getBrokerConfig", "-b", site.master).splitlines()
        if line.startswith(("brokerName ", "brokerClusterName "))
    ]  # fmt: skip
    before = len(jvm.received(consumer, 8))
    run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0", "-f", "true")
    seen["read again"] = sorted(set(bodies(jvm.received(consumer, before + 8)[before:])))
    jvm.call("push.stop", name=consumer)
    jvm.call("producer.stop", name=producer)
    run("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0", "-f", "true")
    progress = run("consumerProgress", "-g", group)
    seen["reset offline"] = sorted(
        cells[2:6] for cells in rows(progress) if cells[0] == topic
    )  # fmt: skip
    run("deleteTopic", "-c", "test", "-t", other)
    gone = jvm.mqadmin(site, "topicRoute", "-t", other)
    seen["deleted"] = "CODE: 17" in gone
    return seen


def lists(run: Callable[..., str], site: Site, topic: str, other: str) -> dict[str, Any]:
    """Return what the commands say about clusters, brokers and topics."""
    status = run("brokerStatus", "-b", site.master)
    for key in ("bootTimestamp", "brokerVersionDesc", "commitLogMaxOffset", "putTps"):
        assert key in status, status
    assert "getTransferredTps" in status or "getTransferedTps" in status, status
    listed = run("topicList").split()
    route = run("topicRoute", "-t", topic)
    data = [part for part in route.split("{") if '"brokerName":"g0"' in part and "perm" in part]
    return {
        "cluster": [cells[:3] for cells in rows(run("clusterList")) if cells[2] == "0"],
        "listed": [name in listed for name in (topic, other)],
        "route": [
            "".join(line.split()) for part in data for line in part.splitlines()
            if "Queue" in line or "perm" in line
        ],
        "topic": [cells[:4] for cells in rows(run("topicStatus", "-t", topic))],
    }  # fmt: skip


def members(
    run: Callable[..., str], topic: str, group: str, makers: str, names: Names
) -> dict[str, Any]:
    """Return what the commands say about groups, once the positions have been reported."""
    deadline = time.monotonic() + 60
    while True:
        progress = run("consumerProgress", "-g", group)
        mine = sorted(cells[1:6] for cells in rows(progress) if cells[0] == topic)
        if sum(int(cells[3]) for cells in mine) >= 7 or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    connected = run("consumerConnection", "-g", group)
    lines = [line for line in connected.splitlines() if ":" in line or "*" in line]
    overview = rows(run("consumerProgress"), of=group)
    return {
        "progress": mine,
        "overview": [[cells[1], cells[3], cells[4], cells[6]] for cells in overview],
        "consumers": sorted(names.plain([
            " ".join(line.split()) for line in lines
            if line.startswith(("Consume", "MessageModel", topic, "%RETRY%"))
        ])),
        "producers": "JAVA" in run("producerConnection", "-g", makers, "-t", topic),
    }  # fmt: skip


def lookups(run: Callable[..., str], topic: str, sent: list[Found], names: Names) -> dict[str, Any]:
    """Return what the commands say about messages."""
    seen: dict[str, Any] = {
        "sent": run("sendMessage", "-t", topic, "-p", "by hand", "-b", "g0", "-i", "2").count(
            "SEND_OK"
        )
    }
    deadline = time.monotonic() + 60
    while True:  # the index of keys is late
        found = run("queryMsgByKey", "-t", topic, "-k", "k1")
        if all(one["msgId"] in found for one in sent) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    seen["by key"] = [one["msgId"] in found for one in sent]
    two = sent[2]
    asked = {
        "by id": ("queryMsgById", "-t", topic, "-i", two["offsetMsgId"]),
        "by unique key": ("queryMsgByUniqueKey", "-t", topic, "-i", two["msgId"]),
        "by offset": ("queryMsgByOffset", "-t", topic, "-b", "g0", "-i", "0", "-o", "2"),
    }
    for what, command in asked.items():
        printed = run(*command)
        seen[what] = names.plain(pairs(printed, *MESSAGE))
        # mqadmin leaves the body there
        pathlib.Path("/tmp/rocketmq/msgbodys", two["msgId"]).unlink(missing_ok=True)
    seen["printed"] = run("printMsg", "-t", topic).count("MSGID: ")
    return seen


SCENES: dict[str, Scene] = {
    "sends": sends,
    "push": push,
    "retries": retries,
    "delays": delays,
    "lite": lite,
    "old pull": old_pull,
    "queries": queries,
    "mqadmin": mqadmin,
}
