"""1,000 transactional and 1,000 delayed messages of hastore's own producers, three failovers.

Each transaction ends in one of four ways: committed or rolled back by its block, or left open and
decided by a check. The producers that leave theirs open are closed early: others of their group
are asked. Afterwards each committed message is in its topic once, on every node, and no other one;
each delayed message is in its topic once, and none of them was delivered early.
"""

import os
import random
import threading
from collections import Counter

import pytest

import hastore
from hastore import Decision
from hastore.record.delays import DELAYS_MS, SCHEDULE_TOPIC, marked
from hastore.record.transactions import ASIDE_TOPIC, HALF_TOPIC
from hastore.store.offline.reader import StoreReader
from tests.process.harness import wait_until
from tests.process.test_delays import Elected, Pair

SEED = int(os.environ.get("HASTORE_SEED", "0")) or random.SystemRandom().getrandbits(32)
SENDERS = 4
TOPIC, DELAYED = "Orders", "Reminders"
REMOTING = {"transaction_timeout": "2s", "transaction_check_interval": "1s",
            "transaction_check_max": "60"}  # fmt: skip
WAYS = ("commit", "raise", "open-commit", "open-rollback")


class RolledBack(Exception):
    """Ends a block whose transaction is to be rolled back."""


class Sender(threading.Thread):
    """Sends its share of the messages, each transaction in its way; notes what was promised."""

    def __init__(self, producer, numbers, ways, allowed):
        super().__init__()
        self.producer, self.numbers, self.ways, self.allowed = producer, numbers, ways, allowed
        self.outcomes = Counter()
        self.delayed = {}  # by number: the Future
        self.failure = None

    def run(self):
        try:
            for number in self.numbers:
                self.allowed.acquire()
                level = 1 + number % 2
                body = f"{number}".encode()
                self.delayed[number] = self.producer.send(DELAYED, body, delay_level=level)
                self.transact(number, body)
        except BaseException as failure:
            self.failure = failure

    def transact(self, number, body):
        way = self.ways[number]
        try:
            with self.producer.transaction(TOPIC, body, key=f"{number}") as transaction:
                if way == "raise":
                    raise RolledBack
                if way.startswith("open"):
                    transaction.leave_open()
        except RolledBack:
            pass
        self.outcomes[way, transaction.outcome] += 1


def progress(senders):
    for sender in senders:
        assert sender.failure is None, sender.failure
    return sum(sender.outcomes.total() for sender in senders)


def bodies(records, topic):
    return Counter(int(record.body) for record in records if record.topic == topic)


def check_log(node, count, committed):
    """Compare a node's log with what must be in it."""
    with StoreReader(str(node.store)) as reader:
        records = list(reader.records())
    stored = bodies(records, TOPIC)
    assert stored.keys() == committed, sorted(stored.keys() ^ committed)[:10]
    assert set(stored.values()) == {1}, [one for one in stored.items() if one[1] > 1]
    assert not bodies(records, ASIDE_TOPIC)
    assert bodies(records, HALF_TOPIC).keys() == set(range(count))
    waited = {r.physical_offset: r for r in records if r.topic == SCHEDULE_TOPIC}
    delivered = [record for record in records if record.topic == DELAYED]
    times = Counter(int(record.body) for record in delivered)
    assert times.keys() == set(range(count)) and set(times.values()) == {1}
    for record in delivered:
        mark = marked(record.properties)
        early_ms = waited[mark.offset].store_timestamp_ms + DELAYS_MS[mark.level - 1]
        assert record.store_timestamp_ms >= early_ms, f"{record.body} was delivered early"


@pytest.mark.slow("masters are killed, and producers are asked")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "count", "failovers"),
    [
        (Pair, 60, 1),
        pytest.param(Pair, 1_000, 3, marks=pytest.mark.full),
        pytest.param(Elected, 1_000, 3, marks=pytest.mark.full),
    ],
)
def test_each_message_is_there_once_and_none_early(tmp_path, mode, count, failovers):
    print(f"HASTORE_SEED={SEED}")
    rng = random.Random(SEED)
    ways = [rng.choice(WAYS) for _ in range(count)]
    committed = {number for number, way in enumerate(ways) if way.endswith("commit")}
    asked = Counter()

    def check(message):
        asked[int(message.body)] += 1
        if rng.random() < 0.2:
            return Decision.UNKNOWN
        return Decision.COMMIT if int(message.body) in committed else Decision.ROLLBACK

    site = mode(tmp_path, remoting=REMOTING)
    settings = {"transaction_group": "shop", "delivery_timeout_s": 120.0}
    addresses = [node.api for node in site.group]

    def writable():
        for node in site.group:
            status = node.status() if node.running else None
            if status is not None and status["takes_default"]:
                return node
        return None

    try:
        wait_until(writable, 60, "no node takes puts")
        part = count // (failovers + 1)
        allowed = threading.Semaphore(part // 2)  # so that each kill comes before the last message
        with hastore.Producer(addresses, check=check, **settings):
            senders = []
            for number in range(SENDERS):  # two of them leave without being asked
                producer = hastore.Producer(
                    addresses, check=check if number % 2 else None, **settings
                )
                senders.append(Sender(producer, range(number, count, SENDERS), ways, allowed))
            for sender in senders:
                sender.start()
            for number in range(failovers):  # each while they send
                allowed.release(part)
                due = int((number + rng.random()) * part)
                wait_until(lambda due=due: progress(senders) >= due, 400, "nothing is sent")
                wait_until(writable, 60, "no node takes puts")
                print(f"killed after {progress(senders)} of {count}")
                site.kill()
            allowed.release(count)
            for sender in senders:
                sender.join(400)
                assert sender.failure is None and not sender.is_alive(), sender.failure
                for future in sender.delayed.values():
                    future.result(60)
                sender.producer.close()
            outcomes = sum((sender.outcomes for sender in senders), Counter())
            print(f"{mode.__name__}: {dict(outcomes)}")

            def is_over():
                node = writable()
                status = node.status() if node is not None else None
                if status is None:  # the last kill was a moment ago
                    return False
                return not status["transactions"]["open"] and not status["delayed"]["waiting"]

            wait_until(is_over, 120, "transactions stay open, or messages wait")
        print(f"{len(asked)} transactions were asked for, {sum(asked.values())} times")
        assert {n for n, way in enumerate(ways) if way.startswith("open")} <= asked.keys()
        site.settled()
        for node in site.group:
            check_log(node, count, committed)
    finally:
        site.group.close()
