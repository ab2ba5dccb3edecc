"""Delayed messages of RocketMQ's clients, while their master is killed again and again."""

import os
import random
import time

import pytest

from hastore.protocol.remoting import Answer, Code
from hastore.record.delays import SCHEDULE_TOPIC, marked
from hastore.store.offline.reader import StoreReader
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
SEED = int(os.environ.get("HASTORE_SEED", "0"))
CYCLES = 4


class Pair:
    """Mode classic: the other node is promoted, and the killed one follows it."""

    def __init__(self, folder, **settings):
        self.group = Group(folder)
        for node in self.group:
            node.write(**settings)
        self.group.start()

    def kill(self):
        old, new = self.group[1], self.group[2]
        if old.file_role == "SLAVE":
            old, new = new, old
        old.kill()
        new.edit_role("SYNC_MASTER")
        old.edit_role("SLAVE")
        old.start("slave", wait=False)

    def settled(self):
        self.group.wait_equal()


class Elected:
    """Mode dledger: the others elect a leader, and the killed one follows it."""

    def __init__(self, folder, **settings):
        self.group = DLedgerGroup(folder)
        for node in self.group:
            node.write(**settings)
        self.group.start()

    def kill(self):
        old = self.group.wait_leader()
        old.kill()
        self.group.wait_leader(but=old)
        old.start(wait=False)

    def settled(self):
        self.group.wait_same()


def send(node, bodies, level):
    """Send delayed messages to a node; return those that are stored."""
    stored = set()
    try:
        client = RemotingClient(node.api)
    except OSError:
        return stored
    try:
        for body in bodies:
            fields = {
                "a": "g", "b": "T", "c": "TBW102", "d": "4", "e": str(len(stored) % 4), "f": "0",
                "g": "1", "h": "0", "i": f"UNIQ_KEY\x01{body}\x02DELAY\x01{level}\x02", "j": "0",
                "k": "false", "m": "false",
            }  # fmt: skip
            if client.ask(Code.SEND_MESSAGE_V2, fields, body.encode()).code == Answer.SUCCESS:
                stored.add(body)
    except (OSError, AssertionError):
        return stored  # the node is gone; the outcome of the last one is unknown
    finally:
        client.close()
    return stored


def found(node):
    """Return the bodies that wait or waited in a log, and how often each was delivered."""
    waited, delivered = set(), {}
    with StoreReader(str(node.store)) as reader:
        for record in reader.records():
            body = record.body.decode()
            if record.topic == SCHEDULE_TOPIC:
                waited.add(body)
            elif record.topic == "T" and marked(record.properties) is not None:
                delivered[body] = delivered.get(body, 0) + 1
    return waited, delivered


@pytest.mark.slow("masters are killed, and delays are waited for")
@pytest.mark.parametrize("mode", [Pair, Elected])
def test_each_delayed_message_is_delivered_once(tmp_path, mode):
    print(f"HASTORE_SEED={SEED}")
    rng = random.Random(SEED)
    site = mode(tmp_path)
    try:
        acknowledged, sent = set(), 0

        def writable():
            for node in site.group:
                status = node.status() if node.running else None
                if status is not None and status["takes_default"]:
                    return node
            return None

        for cycle in range(CYCLES):
            node = wait_until(writable, 60, "no node takes puts")
            for level in (1, 2):
                bodies = [f"{cycle}-{number}" for number in range(sent, sent + 100)]
                sent += 100
                acknowledged |= send(node, bodies, level)
            time.sleep(rng.random() * 1.5)  # into the time of the deliveries, or before it
            site.kill()
        node = wait_until(writable, 60, "no node takes puts")
        assert len(acknowledged) > 100 * CYCLES

        def delivered():
            waited, times = found(node)
            return waited == times.keys()

        wait_until(delivered, 60, "not all messages are delivered")
        site.settled()
        for node in site.group:
            waited, times = found(node)
            assert acknowledged <= waited == times.keys()
            assert set(times.values()) == {1}, [one for one in times.items() if one[1] != 1]
    finally:
        site.group.close()
