"""The clients of a soak, each kind in a process of its own: python -m tests.soak.clients KIND JSON.

    crowd         bare connections (crowd.py)
    producers     one producer that stays, whose acknowledged messages are kept to be looked for at
                  the end; others that come with a new id, send a little, and go
    consumers     readers from the beginning, members of a group that shares its queues, commits
    transactions  transactions that are committed, rolled back or left open, delays up to a minute
    topics        topics that are made, filled a little, looked at and deleted, again and again
    fill          new producers until the node remembers as many as it may, and a position of each
                  group in each queue; it ends by itself

A kind prints a line of JSON when it is ready, and what it has counted when its stdin has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial

from hastore import Admin, Consumer, Producer, Security
from hastore.client.connections.bulk_link import BulkLink
from hastore.client.connections.proving import Prover
from hastore.errors import HastoreError
from hastore.protocol import api
from hastore.record.codec import Host, build_record
from tests.attack.strangers import Stranger
from tests.process.api_attacks import message
from tests.soak.crowd import QUIET, WAIT_S, crowd, in_threads

KEPT = "soak-kept"
KEPT_BYTES = (200, 4_000)
KEPT_PAUSE_S = 0.025
OWN_GROUPS = 40
SHARED_MEMBERS = 4
TEMPORARY = 100  # names of topics that come and go
PRODUCERS = 4_096 + 61_440  # that a node remembers (store/append/dedup_window.py)
FILL_BATCH = 1_000
CLOSE_S = 5.0


def security_of(one: Stranger) -> Security:
    """Return who the clients of hastore are."""
    return Security(identity=one.identity, key_file=one.key_file)


def apis(one: Stranger) -> list[str]:
    """Return the nodes' addresses for clients."""
    return [node["api"] for node in one.nodes]


def producer(one: Stranger, **options: object) -> Producer:
    """Return a new producer."""
    return Producer(apis(one), security=security_of(one), **options)  # type: ignore[arg-type]


def _together(one: Stranger, *works: Callable[[random.Random], None]) -> None:
    """Repeat each of these in a thread of its own until the end; errors of nodes are counted."""

    def repeat(work: Callable[[random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        while one.going():
            try:
                work(chance)
            except HastoreError as failure:
                one.count[f"({type(failure).__name__})"] += 1
                one.ended.wait(0.5)

    in_threads(one, [partial(repeat, work, one.chance.getrandbits(32)) for work in works])


def producers(one: Stranger) -> None:
    """Put messages that must be there at the end, and let other producers come and go."""
    numbers = iter(range(1 << 60))
    acked = open(one.acknowledged, "a")  # noqa: SIM115 - until the process ends

    def keep(chance: random.Random) -> None:
        with producer(one, delivery_timeout_s=WAIT_S) as steady:
            while one.going():
                number = next(numbers)
                body = b"kept-%d:" % number + chance.randbytes(chance.randint(*KEPT_BYTES))
                found = steady.send_sync(KEPT, body, queue=number % 4)
                acked.write(f"{found.offset} {number}\n")
                acked.flush()
                one.count["kept"] += 1
                one.ended.wait(KEPT_PAUSE_S)

    def come_and_go(chance: random.Random) -> None:
        numbered = chance.random() < 0.7
        made = producer(one, idempotent=numbered, delivery_timeout_s=WAIT_S)
        try:
            for _ in range(chance.randrange(1, 5)):
                topic = f"soak-{chance.randrange(one.topics)}"
                made.send(topic, chance.randbytes(100), key=f"k{chance.randrange(500)}")
            made.flush(WAIT_S)
            one.count["short producers"] += 1
        finally:
            made.close(CLOSE_S)
        one.ended.wait(one.pause_s)

    _together(one, keep, come_and_go, come_and_go)


def consumers(one: Stranger) -> None:
    """Read from the beginning; share the queues of a topic among members that come and go."""

    def read(chance: random.Random) -> None:
        number = chance.randrange(OWN_GROUPS)  # each has one topic: their pairs are soon all there
        topic = KEPT if number % 2 else f"soak-{number % one.topics}"
        group = f"own-g{number}" if chance.random() < 0.5 else None
        with Consumer(
            topic, apis(one), group=group, on_lost="earliest", timeout_s=WAIT_S,
            read_from=chance.choice(("slaves", "master")), security=security_of(one),
        ) as consumer:  # fmt: skip
            for _ in range(chance.randrange(1, 8)):
                one.count["read"] += len(consumer.poll(200, timeout_s=0.3))
            if group is not None:
                consumer.commit()
        one.ended.wait(one.pause_s)

    def share(chance: random.Random) -> None:
        leaves = time.monotonic() + chance.uniform(0.5, 2.0) * one.life_s / 4
        with Consumer(
            f"soak-{chance.randrange(2)}", apis(one), group="shared", share=True,
            on_lost="earliest", timeout_s=WAIT_S, security=security_of(one),
        ) as consumer:  # fmt: skip
            one.count["members that share"] += 1
            while one.going() and time.monotonic() < leaves:
                one.count["read"] += len(consumer.poll(100, timeout_s=0.5))
                if chance.random() < 0.1:
                    consumer.commit()
                one.ended.wait(one.pause_s)

    _together(one, read, *[share] * SHARED_MEMBERS)


def transactions(one: Stranger) -> None:
    """Begin transactions, of which a third never ends, and put messages that come late."""

    def once(chance: random.Random) -> None:
        topic = f"soak-{chance.randrange(one.topics)}"
        with producer(one, transaction_group="soak-tx", delivery_timeout_s=WAIT_S) as made:
            for _ in range(20):
                begun = made.transaction(topic, chance.randbytes(100))
                end = chance.choice((begun.commit, begun.rollback, begun.leave_open))
                end()
                one.count["transactions"] += 1
                level = chance.choice((1, 2, 3, 4, 5))
                made.send_sync(topic, chance.randbytes(100), delay_level=level)
                one.count["delays"] += 1
                if one.ended.wait(one.pause_s):
                    return

    _together(one, once)


def topics(one: Stranger) -> None:
    """Make topics and delete them; names come back."""

    def once(chance: random.Random) -> None:
        with (
            Admin(apis(one), security=security_of(one), timeout_s=WAIT_S) as admin,
            producer(one, delivery_timeout_s=WAIT_S) as made,
        ):
            for _ in range(20):
                name = f"temporary-{chance.randrange(TEMPORARY)}"
                known = admin.topic_configs()
                if name in known:
                    admin.delete_topic(name)
                    one.count["topics deleted"] += 1
                else:
                    with contextlib.suppress(HastoreError):
                        admin.create_topic(name, queues=chance.randrange(1, 9))
                    made.send_sync(name, b"x", key="k1", queue=0)
                    one.count["topics made"] += 1
                admin.query_key(f"soak-{chance.randrange(one.topics)}", "k5")
                one.count["queries"] += 1
                if one.ended.wait(one.pause_s * 2):
                    return

    _together(one, once)


def fill(one: Stranger) -> None:
    """Let as many producers write as the nodes remember; commit for each group; make the topics."""
    prover = Prover(security_of(one))
    with producer(one) as made:
        made.send_sync(KEPT, b"the first")
        for queue in range(4):
            made.send_sync(QUIET, b"x", queue=queue)
        for number in range(one.topics):
            made.send_sync(f"soak-{number}", b"x", queue=0)
        master = made.master
    assert master is not None
    link = BulkLink(master, WAIT_S, prover)
    host, prefix = Host.parse("127.0.0.1:1"), api.own_prefix(one.identity)
    for first in range(0, one.producers, FILL_BATCH):
        records = [
            build_record(
                KEPT, b"x", queue_id=number % 4, born_timestamp_ms=1, born_host=host,
                properties=[("HS_PID", f"{prefix}f{number}"), ("HS_SEQ", "0")],
            )
            for number in range(first, min(first + FILL_BATCH, one.producers))
        ]  # fmt: skip
        link._sock.sendall(message(api.Put(first, 1, timeout_ms=60_000), b"".join(records)))
        reply, _ = link.receive()
        assert isinstance(reply, api.PutDone) and reply.status.is_stored, reply
        one.count["filled"] += len(records)
    for number in range(one.groups):
        places = dict.fromkeys(range(4), api.Position(0))
        link.send(api.Commit(number, f"soak-g{number}", f"soak-{number % one.topics}", places))
        link.receive()
    link.close()
    one.ready()


KINDS: dict[str, Callable[[Stranger], None]] = {
    kind.__name__: kind for kind in (crowd, producers, consumers, transactions, topics, fill)
}
# What each must have counted: a soak whose clients do nothing proves nothing.
NEEDED = {
    "crowd": (
        *("members", "lists", "pulls with messages", "commits", "locks", "sends", "idle"),
        *("waiting pulls", "half open", "refused", "pages"),
    ),
    "producers": ("kept", "short producers"),
    "consumers": ("read", "members that share"),
    "transactions": ("transactions", "delays"),
    "topics": ("topics made",),
    "fill": (),
}


if __name__ == "__main__":
    stranger = Stranger(json.loads(sys.argv[2]))
    KINDS[sys.argv[1]](stranger)
    print(json.dumps(stranger.count), flush=True)
    os._exit(0)
