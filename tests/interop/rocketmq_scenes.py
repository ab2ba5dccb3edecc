"""What applications do with RocketMQ's clients, as functions that run against any place.

Each scene takes a JVM with clients and a place (rocketmq_clients.py), and returns what an
application sees, without what differs from run to run: ids, times, addresses. A scene is right for
a hastore group if it returns what it returned for RocketMQ; what must hold in itself is asserted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.interop.rocketmq_clients import LIMIT_S, Clients, Found, Site

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
    deadline = time.monotonic() + LIMIT_S
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
    deadline = time.monotonic() + LIMIT_S
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
    """Two consumers share a topic; others filter by tags, by SQL, broadcast, and order."""
    names = Names(jvm)
    topic = names("Push")
    producer = jvm.producer(site)
    ready(jvm, producer, topic)
    first = jvm.push(site, names("shared"), topic)
    second = jvm.push(site, names("shared"), topic)
    tagged = jvm.push(site, names("tagged"), topic, expression="red || blue")
    sql = "TAGS IN ('red') OR n BETWEEN 40 AND 44"
    filtered = jvm.push(site, names("filtered"), topic, sql=sql)
    everyone = [jvm.push(site, names("all"), topic, broadcasting=True) for _ in range(2)]
    orderly = jvm.push(site, names("orderly"), topic, orderly=True, refuse=1, suspend_ms=100)
    messages = [
        {"topic": topic, "body": f"m{n}", "tags": ("red", "green", "blue")[n % 3],
         "properties": {"n": str(n)}}
        for n in range(48)
    ]  # fmt: skip
    for n, message in enumerate(messages):
        (sent,) = jvm.send(producer, [message], "queue", **on(("g0", n % 4), topic))
        assert sent["status"] == "SEND_OK", sent
    wanted = Counter(["first", *(one["body"] for one in messages)])
    seen: dict[str, Any] = {}
    deadline = time.monotonic() + LIMIT_S
    while True:
        shared = jvm.received(first, 0) + jvm.received(second, 0)
        got = Counter(bodies(shared))
        if got >= wanted or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert set(got) == set(wanted), wanted - got
    seen["tagged"] = sorted(bodies(jvm.received(tagged, 32)))
    seen["filtered"] = sorted(bodies(jvm.received(filtered, 20)))
    for one in everyone:
        seen.setdefault("all", []).append(len(set(bodies(jvm.received(one, 49)))))
    ordered = jvm.received(orderly, 2 * 49)
    for queue in range(4):
        mine = [one["body"] for one in ordered if one["queue"] == queue and one["body"] != "first"]
        seen[f"orderly {queue}"] = list(dict.fromkeys(mine))
        assert Counter(mine) == dict.fromkeys(mine, 2), "each is refused once"
    for consumer in (first, second, tagged, filtered, *everyone, orderly):
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
    deadline = time.monotonic() + LIMIT_S
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
    found = jvm.call("lite.poll", name=consumer, count=41, limit_s=LIMIT_S)
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
    deadline = time.monotonic() + LIMIT_S
    while not wanted <= got and time.monotonic() < deadline:
        got.update(bodies(jvm.call("lite.poll", name=consumer, count=1, limit_s=LIMIT_S)))
    seen["assigned"] = sorted(wanted & got)
    seen["at"] = [
        jvm.call("lite.at", name=consumer, time=moment, **queue) for moment in (0, before)
    ]
    jvm.call("lite.stop", name=consumer)
    tagged = jvm.lite(site, names("tagged"), topic=topic, expression="green || red")
    found = jvm.call("lite.poll", name=tagged, count=40, limit_s=LIMIT_S)
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
        deadline = time.monotonic() + LIMIT_S  # a busy broker fills its queues after the sends
        late = range(40) if what in ("all", "some", "end", "other tag") else ()
        while got.get("max") in late and time.monotonic() < deadline:
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
        deadline = time.monotonic() + LIMIT_S
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
    deadline = time.monotonic() + LIMIT_S
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


SCENES: dict[str, Scene] = {
    "sends": sends,
    "push": push,
    "retries": retries,
    "delays": delays,
    "lite": lite,
    "old pull": old_pull,
    "queries": queries,
}
