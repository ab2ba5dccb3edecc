"""Flips under load while ZooKeeper is killed, paused and restarted at random instants.

HASTORE_TORTURE_CYCLES=N makes N flips, HASTORE_TORTURE_SEED=N repeats a run.
"""

import contextlib
import os
import random
import threading
import time

import pytest

from hastore import Consumer, Producer
from tests.process.harness import hastore, wait_until

pytestmark = pytest.mark.full

FLIPS = int(os.environ.get("HASTORE_TORTURE_CYCLES", "4"))


class Load(threading.Thread):
    """Send numbers; each must be acknowledged, whatever happens."""

    def __init__(self, where):
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.futures = []
        self._where = where

    def run(self):
        with Producer(self._where, acks="all", delivery_timeout_s=120.0) as producer:
            while not self.ended.wait(0.002):
                body = b"%d" % len(self.futures)
                self.futures.append(producer.send("t", body, queue=0))


def fault(chance, zookeeper):
    """Disturb ZooKeeper for a moment."""
    time.sleep(chance.random() * 0.1)
    kind = chance.choice(("kill", "pause", "restart"))
    if kind == "pause":
        zookeeper.pause()
        time.sleep(chance.choice((0.1, 1.0, 5.0)))
        zookeeper.resume()
    else:
        zookeeper.kill() if kind == "kill" else zookeeper.stop()
        time.sleep(chance.random())
        zookeeper.start()
        zookeeper.wait_ready()
    return kind


@pytest.mark.slow("ZooKeeper starts anew after each fault, in the middle of a flip")
def test_no_message_is_lost_and_each_flip_ends(mortal_pair, mortal):
    seed = int(os.environ.get("HASTORE_TORTURE_SEED", "0")) or random.SystemRandom().randrange(
        2**32
    )
    print(f"HASTORE_TORTURE_SEED={seed}")
    chance = random.Random(seed)
    load = Load(f"{mortal.registry}/test/g0")
    load.start()
    wait_until(lambda: load.futures, 60, "nothing is sent")
    for number in range(FLIPS):
        old, new = mortal_pair[1 + number % 2], mortal_pair[2 - number % 2]
        by_command = chance.random() < 0.5

        def flip(old=old, new=new, by_command=by_command):
            from kazoo.exceptions import KazooException
            from kazoo.handlers.threading import KazooTimeoutError

            with contextlib.suppress(KazooException, KazooTimeoutError):
                if by_command:
                    hastore("promote", "-c", str(new.path))
                    hastore("demote", "-c", str(old.path))
                else:
                    mortal.set_role(new.number, "SYNC_MASTER")
                    mortal.set_role(old.number, "SLAVE")

        operator = threading.Thread(target=flip)
        operator.start()
        kind = fault(chance, mortal.each[0])
        operator.join()
        print(f"flip {number}: {kind}, {'command' if by_command else 'set'}")
        # The operator may have failed half-way; it is clear what to do then: the same again.
        mortal.set_role(new.number, "SYNC_MASTER")
        mortal.set_role(old.number, "SLAVE")
        told = new.wait_status(
            lambda s: s["writable"] or "since this node was told" in (s["reason"] or ""), "writable"
        )
        if not told["writable"]:  # it was without ZooKeeper meanwhile, and says what to do
            assert hastore("promote", "-c", str(new.path)).returncode == 0
        new.wait_writable()
        old.wait_status(
            lambda s: s["role"] == "SLAVE" and s["registry"]["role"] == "SLAVE", "slave"
        )
        new.wait_in_sync(old.number)
    load.ended.set()
    load.join(150)
    assert [one.result(1).status for one in load.futures if one.result(1).status != "PUT_OK"] == []
    expected = [b"%d" % number for number in range(len(load.futures))]
    found = []
    with Consumer("t", mortal_pair.bootstrap, queues=[0]) as consumer:
        while len(found) < len(expected):
            got = consumer.poll(timeout_s=120)
            assert got, f"{len(found)} of {len(expected)} messages"
            found += [one.body for one in got]
    assert found == expected
    assert len(found) > FLIPS
