"""The members of RocketMQ's groups: heartbeats of every client, good and bad, in virtual time."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hastore.errors import UsageError
from hastore.record.hashes import java_hash_code
from hastore.server.remoting import groups
from hastore.server.remoting.groups import EXPIRED_MS, Membership, tags_of

GO = {  # it leaves consumerDataSet out, or the group's subscriptions are null
    "clientID": "10.0.0.9@55",
    "producerDataSet": [{"groupName": "P"}],
}
CPP = {  # ordinal numbers, and numbers as texts
    "clientID": "cpp@1",
    "producerDataSet": None,
    "consumerDataSet": [
        {
            "groupName": "G",
            "consumeType": 1,
            "messageModel": 1,
            "consumeFromWhere": 4,
            "subscriptionDataSet": [
                {"topic": "T", "subString": "a||b", "subVersion": "17", "codeSet": ["1"]}
            ],
        }
    ],
}


def subscribed(topic: str = "T", expression: str = "*", version: int = 1) -> dict[str, Any]:
    return {
        "classFilterMode": False,
        "codeSet": [4711],
        "expressionType": "TAG",
        "subString": expression,
        "subVersion": version,
        "tagsSet": [],
        "topic": topic,
    }


def java(
    client: str = "c1", groups: tuple[str, ...] = ("G",), *subscriptions: Any, **more: Any
) -> bytes:
    """Return a heartbeat as Java's clients send it."""
    of_one = list(subscriptions) or [subscribed()]
    beat = {
        "clientID": client,
        "consumerDataSet": [
            {
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "consumeType": "CONSUME_PASSIVELY",
                "groupName": group,
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": of_one,
                "unitMode": False,
            }
            for group in groups
        ],
        "heartbeatFingerprint": 0,
        "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
        "withoutSub": False,
    }
    return json.dumps(beat | more).encode()


def hear(members: Membership[str], key: str, body: bytes, now_ms: float = 0.0) -> bool:
    return members.hear(key, body, now_ms, language="JAVA", version=479, address="127.0.0.1:9")


def test_heartbeats_of_every_language() -> None:
    members: Membership[str] = Membership()
    hear(members, "go", json.dumps(GO).encode())
    hear(members, "cpp", json.dumps(CPP).encode())
    hear(members, "java", java("j@1", ("G", "H")))
    assert [one.client_id for one in members.producers("P")] == ["10.0.0.9@55"]
    assert members.client_ids("G") == ["cpp@1", "j@1"]
    assert json.loads(members.id_list("G") or b"") == {"consumerIdList": ["cpp@1", "j@1"]}
    group = members.consumers("G")[0].consumers["G"]
    assert group[:4] == ("G", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_FIRST_OFFSET")
    found = members.subscription("G", "T")
    assert found is not None and (found.version, found.expression) == (17, "a||b")
    assert members.groups_of_topic("T") == ["G", "H"]


def test_hashes_come_from_the_text_and_not_from_the_client() -> None:
    members: Membership[str] = Membership()
    hear(members, "k", java("c", ("G",), subscribed("T", " a || b||a|| ", 3)))
    found = members.subscription("G", "T")
    assert found is not None and found.tags == ("a", "b")
    assert found.codes == {java_hash_code("a"), java_hash_code("b")}
    assert found.as_json()["codeSet"] == sorted(found.codes)
    for text in ("*", "", " * "):
        assert tags_of(text) == ()


def test_only_a_change_of_the_members_counts_as_a_change() -> None:
    members: Membership[str] = Membership()
    hear(members, "k1", java("c1"), 0.0)
    assert members.take_changed() == ["G"]
    assert members.repeats("k1", java("c1"), 1.0)
    assert not members.repeats("k2", java("c1"), 1.0)
    hear(members, "k1", java("c1", ("G",), subscribed("T", "*", 2), subscribed("U")), 2.0)
    assert members.take_changed() == [], "other subscriptions, the same members"
    hear(members, "k2", java("c1"), 3.0)  # the client reconnects before its old connection ends
    members.end("k1")
    assert members.take_changed() == []
    assert members.client_ids("G") == ["c1"]
    hear(members, "k3", java("c2", ("G", "H")), 4.0)
    assert sorted(members.take_changed()) == ["G", "H"]
    members.leave("k3", "somebody else", None, "G")
    assert members.take_changed() == []
    members.leave("k3", "c2", "CLIENT_INNER_PRODUCER", "G")
    assert members.take_changed() == ["G"]
    assert not members.repeats("k3", java("c2", ("G", "H")), 5.0), "the same bytes bring it back"
    hear(members, "k3", java("c2", ("G", "H")), 5.0)
    assert members.take_changed() == ["G"]


def test_the_latest_version_of_a_subscription_counts() -> None:
    members: Membership[str] = Membership()
    hear(members, "k1", java("c1", ("G",), subscribed("T", "new", 7)))
    hear(members, "k2", java("c2", ("G",), subscribed("T", "old", 6), subscribed("U", "u", 1)))
    found = members.subscription("G", "T")
    assert found is not None and found.expression == "new"
    assert set(members.subscriptions("G")) == {"T", "U"}
    members.end("k1")
    found = members.subscription("G", "T")
    assert found is not None and found.expression == "old"
    hear(members, "k2", java("c2", ("G",), subscribed("U", "u", 1)))
    assert set(members.subscriptions("G")) == {"U"}
    members.end("k2")
    assert members.subscription("G", "U") is None
    assert members.id_list("G") is None
    assert (members.count, members.memory_bytes) == (0, 0)


def test_a_client_that_leaves_its_subscriptions_out_must_have_said_them() -> None:
    members: Membership[str] = Membership()
    full = java("c1", ("G",), subscribed("T", "a", 1), heartbeatFingerprint=5)
    short = json.loads(java("c1", ("G",), heartbeatFingerprint=5, withoutSub=True))
    short["consumerDataSet"][0]["subscriptionDataSet"] = []
    brief = json.dumps(short).encode()
    assert hear(members, "k", brief), "unknown: the node has started since"
    assert hear(members, "k", brief)
    assert members.client_ids("G") == ["c1"]
    assert not hear(members, "k", full)
    assert not hear(members, "k", brief)
    assert members.repeats("k", brief, 1.0)
    found = members.subscription("G", "T")
    assert found is not None and found.expression == "a"
    short["heartbeatFingerprint"] = 6
    assert hear(members, "k", json.dumps(short).encode())


def test_silent_clients_go() -> None:
    members: Membership[str] = Membership()
    for number in range(3):
        hear(members, f"k{number}", java(f"c{number}"), float(number))
    members.take_changed()
    assert members.repeats("k0", java("c0"), 1_000.0)
    assert members.expire(EXPIRED_MS) == []
    assert members.expire(EXPIRED_MS + 2.0) == ["k1", "k2"]
    assert members.take_changed() == ["G"]
    assert members.client_ids("G") == ["c0"]
    assert members.expire(EXPIRED_MS + 1_000.0) == ["k0"]
    assert members.consumer_groups() == []


BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "no client": b"{}",
    "an empty client": b'{"clientID":""}',
    "not text": b'\xff\xfe{"clientID":"a"}',
    "a long client": json.dumps({"clientID": "x" * 256}).encode(),
    "a group without a name": java("c", ("",)),
    "an unknown model": java().replace(b"CLUSTERING", b"CLUSTERED"),
    "a model that is no name": java().replace(b'"CLUSTERING"', b"7"),
    "groups as a number": json.dumps({"clientID": "a", "consumerDataSet": 7}).encode(),
    "a version that is none": java("c", ("G",), subscribed() | {"subVersion": "one"}),
    "a long expression": java("c", ("G",), subscribed("T", "x" * 9_000)),
    "no topic": java("c", ("G",), subscribed("")),
    "many groups": java("c", tuple(f"g{number}" for number in range(1_000))),
    "many subscriptions": java("c", ("G",), *({"topic": "t"},) * 4_001),
    "too large": b'{"clientID":"' + b" " * groups.MAX_HEARTBEAT_BYTES + b'"}',
    "nested": b'{"clientID":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_heartbeat_has_one_clear_answer_and_changes_nothing(what: str) -> None:
    members: Membership[str] = Membership()
    hear(members, "k", java())
    members.take_changed()
    with pytest.raises(UsageError) as refused:
        hear(members, "k", BAD[what], 1.0)
    assert len(str(refused.value)) < 400
    assert members.client_ids("G") == ["c1"] and members.take_changed() == []
    assert members.repeats("k", java(), 2.0)


def test_an_identity_with_many_members_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some 190 connections of one identity kept everybody else out of the groups."""
    monkeypatch.setattr(groups, "MAX_BYTES", 200_000)
    members: Membership[str] = Membership()

    def join(key: str, owner: str) -> None:
        members.hear(
            key, java(key, tuple(f"g{i}" for i in range(20))), 0.0,
            language="JAVA", version=0, address="", owner=owner,
        )  # fmt: skip

    assert members.problems() == []
    with pytest.raises(UsageError, match="too many groups"):
        for number in range(1_000):
            join(f"h{number}", "hoarder")
    assert 0 < members.memory_bytes <= 100_000
    (problem,) = members.problems()
    size = members.memory_bytes
    assert f"take {size:,} bytes, {size:,} those of identity hoarder; at most" in problem
    join("o", "others")
    join("h0", "hoarder")  # as large as before
    for key in [*(f"h{number}" for number in range(1_000)), "o"]:
        members.end(key)
    assert members.memory_bytes == 0 and members.problems() == [] and not members._owned


def test_the_memory_of_all_members_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_BYTES", 200_000)
    members: Membership[str] = Membership()
    taken = 0
    with pytest.raises(UsageError, match="too many groups"):
        for number in range(1_000):
            hear(members, f"k{number}", java(f"c{number}", tuple(f"g{i}" for i in range(20))))
            taken += 1
    assert 1 <= taken < 200 and members.count == taken
    assert members.memory_bytes <= 200_000
    hear(members, "k0", java("c0"), 1.0)  # a smaller one has room
    for number in range(taken):
        members.end(f"k{number}")
    assert members.memory_bytes == 0 and members.consumer_groups() == []


def test_random_members_agree_with_a_plain_model() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    members: Membership[int] = Membership()
    model: dict[int, tuple[str, dict[str, tuple[str, ...]]]] = {}
    known: dict[str, frozenset[str]] = {}

    def ids(group: str) -> frozenset[str]:
        return frozenset(client for client, said in model.values() if group in said)

    for now in range(2_000):
        key = rng.randrange(12)
        action = rng.random()
        if action < 0.6:
            client = f"c{rng.randrange(6)}"
            said = {
                f"g{one}": tuple(f"t{rng.randrange(4)}" for _ in range(rng.randrange(1, 3)))
                for one in rng.sample(range(5), rng.randrange(4))
            }
            beat = json.loads(java(client, tuple(said)))
            for one in beat["consumerDataSet"]:
                one["subscriptionDataSet"] = [subscribed(topic) for topic in said[one["groupName"]]]
            body = json.dumps(beat).encode()
            if not members.repeats(key, body, float(now)):
                members.hear(key, body, float(now), language="GO", version=1, address="a")
            model[key] = client, said
        elif action < 0.8 and key in model:
            group = f"g{rng.randrange(5)}"
            client, said = model[key]
            members.leave(key, client, None, group)
            said.pop(group, None)
        elif key in model:
            members.end(key)
            del model[key]
        changed = members.take_changed()
        for group in (f"g{one}" for one in range(5)):
            now_there = ids(group)
            assert members.client_ids(group) == sorted(now_there)
            if known.get(group, frozenset()) != now_there:
                assert group in changed, (seed, now)
            known[group] = now_there
            topics = {topic for _, said in model.values() if group in said for topic in said[group]}
            assert set(members.subscriptions(group)) == topics, (seed, now)
