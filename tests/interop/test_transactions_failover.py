"""1,000 transactional messages of RocketMQ's own Java clients through three failovers.

Each message says how its transaction ends: at once, or when its producer is asked. Afterwards each
that was acknowledged and committed is in its topic once, on every node, and no other one.
"""

import os
import random
import threading
import time
from collections import Counter

import pytest

from hastore.record.transactions import ASIDE_TOPIC, HALF_TOPIC
from hastore.store.offline.reader import StoreReader
from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq_clients import Clients, HastoreSite
from tests.process.harness import wait_until
from tests.process.test_delays import Elected, Pair

pytestmark = pytest.mark.full
SEED = int(os.environ.get("HASTORE_SEED", "0")) or random.SystemRandom().getrandbits(32)
COUNT = 1_000
FAILOVERS = 3
CHUNK = 5
TOPIC = "Transactions"
# Longer than the 3 s in which a client sends a half message again by itself.
REMOTING = {"transaction_timeout": "4s", "transaction_check_interval": "2s"}
ENDINGS = [
    ("COMMIT_MESSAGE", "COMMIT_MESSAGE"), ("ROLLBACK_MESSAGE", "ROLLBACK_MESSAGE"),
    ("UNKNOW", "COMMIT_MESSAGE"), ("UNKNOW", "ROLLBACK_MESSAGE"),
]  # fmt: skip


class Sender(threading.Thread):
    """Sends messages of one JVM in chunks; notes what was acknowledged, by the way it ends."""

    def __init__(self, jvm, producer, numbers, rng, pace):
        super().__init__()
        self.jvm, self.producer, self.numbers, self.rng = jvm, producer, numbers, rng
        self.pace = pace
        self.acknowledged = {"COMMIT_MESSAGE": set(), "ROLLBACK_MESSAGE": set()}
        self.statuses = Counter()
        self.failure = None

    def run(self):
        try:
            for at in range(0, len(self.numbers), CHUNK):
                self.send(self.numbers[at : at + CHUNK])
                self.pace.wait(0.05)
        except Exception as failure:
            self.failure = failure

    def send(self, numbers):
        state, end = self.rng.choice(ENDINGS)
        messages = [
            {"topic": TOPIC, "body": f"{number}", "properties": {"whenChecked": end}}
            for number in numbers
        ]
        results = self.jvm.send(self.producer, messages, "transaction", state=state, timeout_s=300)
        for number, result in zip(numbers, results, strict=True):
            self.statuses[result.get("status", "failed")] += 1
            if result.get("status") == "SEND_OK":
                self.acknowledged[end].add(str(number))


def bodies(node, topic):
    with StoreReader(str(node.store)) as reader:
        return Counter(record.body.decode() for record in reader.records() if record.topic == topic)


@pytest.mark.slow("masters are killed, and producers are asked")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", [Pair, Elected])
def test_each_committed_message_is_there_once(tmp_path, mode):
    print(f"HASTORE_SEED={SEED}")
    rng = random.Random(SEED)
    site = mode(tmp_path, remoting=REMOTING)
    jvms = {
        "p5": Clients(command(CLIENTS_5), tmp_path, "clients-5"),
        "p4": Clients(command(CLIENTS_4), tmp_path, "clients-4"),
    }
    pace = threading.Event()
    try:
        place = HastoreSite(site.group, mode.__name__)
        senders = []
        for number, (group, jvm) in enumerate(jvms.items()):
            for half in range(2):
                producer = jvm.producer(
                    place, group=f"{group}-{half}", transactions=True, timeout_ms=3_000
                )
                numbers = range(number * 2 + half, COUNT, 4)
                senders.append(Sender(jvm, producer, numbers, random.Random(rng.random()), pace))
        consumer = jvms["p5"].push(place, "all", TOPIC)
        for sender in senders:
            sender.start()
        for _ in range(FAILOVERS):
            time.sleep(1 + 2 * rng.random())
            wait_until(lambda: writable(site), 60, "no node takes puts")
            site.kill()
        wait_until(lambda: writable(site), 60, "no node takes puts")
        for sender in senders:
            sender.join(300)
            assert sender.failure is None and not sender.is_alive(), sender.failure
        statuses = sum((sender.statuses for sender in senders), Counter())
        committed = set().union(*(one.acknowledged["COMMIT_MESSAGE"] for one in senders))
        rolled_back = set().union(*(one.acknowledged["ROLLBACK_MESSAGE"] for one in senders))
        print(f"{mode.__name__}: {statuses}, {len(committed)} committed")
        assert len(committed) > COUNT // 4 and len(rolled_back) > COUNT // 8

        def is_over():
            status = writable(site).status()
            return not status["transactions"]["open"]

        wait_until(is_over, 120, "transactions stay open")
        received = jvms["p5"].received(consumer, len(committed))
        missing = committed - {one["body"] for one in received}
        wait_until(
            lambda: committed <= {
                one["body"] for one in jvms["p5"].received(consumer, len(committed))
            },
            60, f"not delivered: {sorted(missing)[:10]}",
        )  # fmt: skip
        site.settled()
        for node in site.group:
            stored = bodies(node, TOPIC)
            assert committed <= stored.keys(), sorted(committed - stored.keys())[:10]
            assert set(stored.values()) == {1}, [one for one in stored.items() if one[1] > 1]
            assert not rolled_back & stored.keys()
            assert not bodies(node, ASIDE_TOPIC)
            assert committed | rolled_back <= bodies(node, HALF_TOPIC).keys()
        print(f"{len(stored)} in the topic, {len(bodies(node, HALF_TOPIC))} half messages")
    finally:
        pace.set()
        for jvm in jvms.values():
            jvm.kill()
        site.group.close()


def writable(site):
    for node in site.group:
        status = node.status() if node.running else None
        if status is not None and status["takes_default"]:
            return node
    return None
