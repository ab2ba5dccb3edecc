"""What the status page says, from a node's own status."""

from __future__ import annotations

from typing import Any

from hastore.config.model import NodeAddress
from hastore.server.overview import overview

Found = dict[str, Any]
NODES = {
    number: NodeAddress(api=f"tcp://n{number}:1", ha=f"n{number}:2", http=f"n{number}:3")
    for number in (1, 2, 3)
}
SLAVE: Found = {
    "node": 2, "address": "n2:2", "state": "TRANSFER", "ack_offset": 900, "lag_bytes": 100,
    "in_sync": True, "classic": False, "files_kept": False,
}  # fmt: skip
MASTER: Found = {
    "node": 1, "mode": "classic", "role": "SYNC_MASTER", "epoch": 65537, "min_offset": 0,
    "max_offset": 1000, "flushed_offset": 1000, "confirmed_offset": 900, "readable_offset": 900,
    "writable": True, "takes_default": True, "default_refused": None, "slaves": [SLAVE],
    "waiting_puts": 3, "forwarding": {"waiting": 1}, "delayed": {"waiting": 2},
    "transactions": {"open": 4}, "topics": 5, "unclean": False, "reason": None, "problems": [],
    "notes": [], "cluster": "c", "group": "g", "config": "/etc/n1.yaml", "config_pending": [],
    "role_state": "master", "promised_epoch": 65537, "registry": None, "master": 1,
    "unlinked": [], "classic_master": None,
    "history": [{"epoch": 65537, "node": 1, "start_offset": 100}],
}  # fmt: skip
FOLLOWS = "this node is a slave; node 1 is the master"
OF_SLAVE: Found = {
    **MASTER, "node": 2, "role": "SLAVE", "writable": False, "takes_default": False,
    "default_refused": FOLLOWS, "reason": FOLLOWS, "slaves": [], "role_state": "following",
}  # fmt: skip
LEADER: Found = {
    **{key: value for key, value in MASTER.items() if key not in ("role_state", "unlinked")},
    "mode": "dledger", "role": "LEADER", "epoch": 7, "term": 7, "leader": 1, "members": [1, 2, 3],
    "learners": [], "history": [{"epoch": 7, "start_offset": 100}],
    "slaves": [SLAVE | {"ack_index": 5}],
    "links": [
        {"node": 2, "address": "n2:2", "linked": True, "problem": None},
        {"node": 3, "address": "n3:2", "linked": False, "problem": "Connection refused"},
    ],
}  # fmt: skip


def seen(status: Found, not_ready: str | None = None, *, https: bool = False) -> Found:
    return overview(status, NODES, not_ready, https=https)


def row(found: Found, node: int | None) -> Found:
    (one,) = [each for each in found["members"] if each["node"] == node]
    return dict(one)


def texts(found: Found) -> list[str]:
    return [f"{one['level']}: {one['what']} {one['do']}".strip() for one in found["advice"]]


def test_a_master_shows_its_slaves_and_why_it_is_the_master() -> None:
    found = seen(MASTER)
    assert found["state"] == {"level": "good", "text": "This node is the master and takes puts."}
    why = "Its role in its file is SYNC_MASTER; it has epoch 65537 since offset 100."
    assert found["master"] == {"node": 1, "why": why} and found["advice"] == []
    assert seen(MASTER | {"registry": {}})["master"]["why"].startswith("Its role in ZooKeeper is")
    own, slave, other = (row(found, number) for number in (1, 2, 3))
    assert (own["state"], own["epoch"], own["end_offset"]) == ("takes puts", 65537, 1000)
    assert own["page"] is None and slave["page"] == "http://n2:3/"
    assert (slave["level"], slave["state"], slave["lag_bytes"]) == ("good", "in sync", 100)
    assert (other["level"], other["state"]) == ("unknown", "not linked yet")
    assert row(seen(MASTER, https=True), 2)["page"] == "https://n2:3/"
    assert found["numbers"]["waiting_puts"] == 3 and found["numbers"]["open_transactions"] == 4


def test_a_slave_that_is_gone_and_one_that_answers_but_does_not_follow() -> None:
    unlinked = [
        {"node": 2, "address": "n2:2", "why": "Connection refused"},
        {"node": 3, "address": "n3:2", "why": None},
    ]
    found = seen(MASTER | {"slaves": [], "unlinked": unlinked})
    assert found["state"]["level"] == "look"
    assert row(found, 2)["state"] == "no answer: Connection refused"
    assert row(found, 3)["state"] == "answers, but does not follow"
    assert "Start node 2" in texts(found)[0] and "on node 3 itself" in texts(found)[1]


def test_a_master_that_refuses_says_what_to_do_first() -> None:
    refused = {
        "takes_default": False, "default_refused": "0 of 1 slaves are in sync", "slaves": [],
        "unlinked": [{"node": 2, "address": "n2:2", "why": "timed out"}],
        "problems": ["synchronous puts are refused: 0 of 1 slaves are in sync"],
    }  # fmt: skip
    found = seen(MASTER | refused)
    assert found["state"]["level"] == "bad" and "are refused: 0 of 1" in found["state"]["text"]
    (text,) = texts(found)
    assert "Start node 2" in text and "`hastore promote -c /etc/n1.yaml --async`" in text


def test_a_slave_behind_and_a_rocketmq_slave() -> None:
    slow = SLAVE | {"in_sync": False, "lag_bytes": 5_000}
    foreign = SLAVE | {"node": None, "address": "10.0.0.9:4", "classic": True}
    found = seen(MASTER | {"slaves": [slow, foreign]})
    assert row(found, 2)["level"] == "look" and "5,000 bytes behind" in texts(found)[0]
    assert row(found, None)["role"] == "RocketMQ slave" and row(found, None)["api"] == "10.0.0.9:4"


def test_a_follower_with_a_full_disk_does_not_catch_up_by_itself() -> None:
    full = SLAVE | {"ack_index": 5, "in_sync": False, "able": False, "full": True}
    found = seen(LEADER | {"slaves": [full]})
    assert (row(found, 2)["level"], row(found, 2)["state"]) == ("look", "its disk is full")
    assert "look: The disk of node 2 is full: it takes nothing. Make room" in str(texts(found))
    assert "catches up" not in str(texts(found))


def test_a_slave_that_takes_nothing_does_not_catch_up_by_itself() -> None:
    full = SLAVE | {"state": "stalled", "in_sync": False, "lag_bytes": 5_000}
    found = seen(MASTER | {"slaves": [full]})
    assert (row(found, 2)["level"], row(found, 2)["state"]) == ("look", "takes nothing")
    assert "look: Node 2 takes nothing, and is 5,000 bytes behind." in str(texts(found))
    assert "catches up" not in str(texts(found))


def test_a_slave_shows_what_it_knows() -> None:
    found = seen(OF_SLAVE)
    follows = "Node 1 is the master; this node follows it."
    assert found["state"] == {"level": "good", "text": follows}
    assert row(found, 1)["state"] == "this node follows it" and row(found, 2)["state"] == "follows"
    assert row(found, 3)["level"] == "unknown" and row(found, 3)["state"] == "the master knows it"
    assert "It has epoch 65537 since offset 100" in found["master"]["why"]


def test_a_slave_without_a_master_names_the_command() -> None:
    lost = "this node is a slave; no master is open; no answer from node 1"
    found = seen(OF_SLAVE | {"master": None, "reason": lost}, lost)
    assert found["state"]["level"] == "bad" and lost in found["state"]["text"]
    assert found["master"] == {"node": None, "why": "This node knows no master."}
    assert "`hastore status` asks all nodes" in texts(found)[0]
    assert "it may well take puts" in texts(found)[0]
    promised = OF_SLAVE | {"master": None, "reason": lost, "promised_epoch": 131074}
    (text, *_) = texts(seen(promised, lost))
    assert "Node 2 is to be the master" in text and "may well take puts" not in text
    waits = OF_SLAVE | {"role_state": "promoting", "reason": "waiting to be master: node 2"}
    (text,) = texts(seen(waits, "waiting to be master: node 2"))
    assert text == "bad: No puts are taken here: waiting to be master: node 2."


def test_a_slave_of_rocketmq() -> None:
    found = seen(OF_SLAVE | {"master": None, "classic_master": "b:10912"})
    assert found["state"]["text"] == "This node follows the RocketMQ master b:10912."
    assert found["advice"] == [] and "b:10912 writes this log" in found["master"]["why"]


def test_problems_name_the_file_and_notes_do_not_alarm() -> None:
    more = {
        "problems": ["messages were cut; run hastore rescued -c FILE"], "notes": ["a note"],
        "unclean": True,
        "config_pending": [
            {"key": "acks", "in_force": 1, "in_file": 2, "counts_from": "promotion"},
        ],
    }  # fmt: skip
    found = seen(MASTER | more)
    assert texts(found)[0] == "look: messages were cut; run hastore rescued -c /etc/n1.yaml"
    assert "may lack messages" in texts(found)[1]
    assert texts(found)[2].startswith("note: acks is 2 in the file, and 1 in force until the next")
    assert seen(MASTER | {"notes": ["a note"]})["state"]["level"] == "good"


def test_a_leader_and_its_followers() -> None:
    found = seen(LEADER)
    assert found["state"]["text"] == "This node is the leader and takes puts."
    assert found["master"]["why"] == "A majority of the 3 members elected it in term 7."
    assert row(found, 2)["state"] == "in sync" and row(found, 2)["role"] == "follower"
    assert row(found, 3) | {"level": "bad", "state": "no link: Connection refused"} == row(found, 3)
    learners = [{"node": 3, "address": "n3:2", "state": "APPEND", "ack_index": 4, "ack_offset": 8,
                 "lag_bytes": 992, "lag_entries": 9, "waits_for": "12 more entries"}]  # fmt: skip
    learner = row(seen(LEADER | {"learners": learners}), 3)
    assert (learner["role"], learner["state"]) == ("learner", "12 more entries")


def test_a_follower_and_a_group_without_a_leader() -> None:
    told = "node 1 is the leader of term 7"
    follower = LEADER | {
        "node": 2, "role": "FOLLOWER", "writable": False, "takes_default": False,
        "default_refused": told, "reason": told, "slaves": [],
        "links": [{"node": 3, "address": "n3:2", "linked": False, "problem": None}],
    }  # fmt: skip
    found = seen(follower)
    assert found["state"]["text"] == "Node 1 is the leader; this node follows it."
    assert row(found, 3)["state"] == "no link: not yet"
    none = "no leader is known in term 8"
    found = seen(follower | {"master": None, "leader": None, "term": 8, "reason": none}, none)
    assert found["state"]["level"] == "bad"
    assert "needs 2 of the 3 members that reach each other: see node 3" in texts(found)[0]
    assert found["master"]["why"] == "No leader is known in term 8."
