"""A producer as RocketMQ's, at real nodes, through the end of their master: who acknowledges what.

The producer has one blocking send at a time. It knows all nodes as brokers of different names, and
after a failed attempt tries the next one, as RocketMQ's clients do. Those are in tests/torture.
"""

import itertools
import json
import threading
import time

import pytest

from hastore.protocol.remoting import Code
from hastore.record.codec import decode_record
from hastore.store.offline.reader import StoreReader
from tests.cli.kit import hastore
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until
from tests.server.remoting.kit import RemotingClient

# Of a send, with all its attempts: short where a node hangs; else a busy machine may take longer
# for a failover than the 3 s that RocketMQ's clients wait. The longest gap is printed.
HANGS_S, TIMEOUT_S = 3.0, 15.0
ATTEMPTS = 3
NOT_STORED = frozenset({1, 2, 14})


class Producer(threading.Thread):
    """Sends numbered messages, one each few ms, to each node in turn."""

    def __init__(self, nodes, pause_s=0.005, timeout_s=TIMEOUT_S):
        super().__init__(daemon=True)
        self.acknowledged = {}  # number -> (monotonic time, message id)
        self.refused = []  # answers that say that nothing was stored
        self.failed = []
        self.unknown = 0  # attempts without an answer
        self.wrong = []
        self._nodes = [node.api for node in nodes]
        self._clients = {}
        self._pause_s, self._timeout_s = pause_s, timeout_s
        self._ends = threading.Event()

    def run(self):
        names = itertools.cycle(self._nodes)
        for number in itertools.count():
            if self._ends.is_set():
                return
            if not self._send(names, number, time.monotonic() + self._timeout_s):
                self.failed.append(number)
            time.sleep(self._pause_s)

    def _send(self, names, number, until_s):
        for _ in range(ATTEMPTS):
            if time.monotonic() < until_s and self._attempt(next(names), number, until_s):
                return True
        return False

    def _attempt(self, api, number, until_s):
        fields = {
            "a": "group", "b": "T", "c": "TBW102", "d": "4", "e": str(number % 4), "f": "0",
            "g": "1700000000123", "h": "0", "i": f"UNIQ_KEY\x01{number:032X}\x02WAIT\x01true\x02",
            "j": "0", "k": "false", "m": "false", "n": "g0",
        }  # fmt: skip
        try:
            client = self._clients.get(api)
            if client is None:
                client = self._clients[api] = RemotingClient(api)
            client.sock.settimeout(max(0.001, until_s - time.monotonic()))
            answer = client.ask(Code.SEND_MESSAGE_V2, fields, b"%d" % number)
        except (OSError, AssertionError):  # the connection has ended, or nothing came in time
            self.unknown += 1
            client = self._clients.pop(api, None)
            if client is not None:
                client.close()
            return False
        if answer.code == 0:
            self.acknowledged[number] = time.monotonic(), answer.fields["msgId"]
            return True
        self.refused.append((answer.code, answer.remark))
        if answer.code not in NOT_STORED:
            self.wrong.append((answer.code, answer.remark))
        return False

    def since(self, then_s):
        """How many were acknowledged after a time."""
        return sum(1 for at, _ in list(self.acknowledged.values()) if at > then_s)

    def wait(self, count, limit_s=120.0):
        """Wait until so many more are acknowledged."""
        now = time.monotonic()
        wait_until(lambda: self.since(now) >= count, limit_s, lambda: f"nothing: {self.refused}")

    def stop(self):
        self._ends.set()
        self.join(60)
        assert not self.is_alive()
        for client in self._clients.values():
            client.close()

    @property
    def longest_gap_s(self):
        times = sorted(at for at, _ in self.acknowledged.values())
        return max(b - a for a, b in itertools.pairwise(times))


def judge(group, producer, what):
    """Each acknowledged message is in the log of every node, where it was said to be."""
    producer.stop()
    group.wait_equal()
    for node in group:
        if node.running:
            node.stop()
        at = {}
        with StoreReader(str(node.store)) as reader:
            for _, raw in reader.raw_records():
                one = decode_record(raw)
                if one.topic == "T":
                    at.setdefault(int(one.body), []).append(one.physical_offset)
        lost = [n for n in producer.acknowledged if n not in at]
        assert not lost, f"node {node.number} lost {lost}"
        for number, (_, ids) in producer.acknowledged.items():
            assert int(ids[-16:], 16) in at[number]
        twice = sum(len(offsets) - 1 for offsets in at.values())
        assert twice <= producer.unknown, "only what had no answer may be there twice"
    print(
        f"{what}: {len(producer.acknowledged)} acknowledged, longest gap "
        f"{producer.longest_gap_s * 1000:.0f} ms, {len(producer.failed)} failed, "
        f"{producer.unknown} attempts without an answer, {len(producer.refused)} refused "
        f"{producer.refused[:3]}"
    )
    assert not producer.wrong


@pytest.fixture
def three(tmp_path):
    with Group(tmp_path, 3, ha={"ack_point": "written"}) as group:
        yield group.start()


@pytest.fixture
def elected(tmp_path):
    with DLedgerGroup(tmp_path) as group:
        yield group.start()


def test_a_killed_master_and_a_promotion(three):
    producer = Producer(three)
    producer.start()
    producer.wait(50)
    idle = RemotingClient(three[1].api)
    idle.ask(Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})
    three[1].kill()
    assert idle.was_reset(), "RocketMQ 4's clients do not notice anything else"
    idle.close()
    done = hastore("promote", "-c", str(three[2].path), "--json")
    assert done.returncode == 0, done.stderr
    producer.wait(50)
    three[1].edit_role("SLAVE")
    three[1].start("slave")
    three[2].wait_in_sync(1, 3)
    producer.wait(50)
    judge(three, producer, "kill -9 and promote")
    assert not producer.failed


@pytest.mark.full
def test_a_flip_by_the_operator(three):
    producer = Producer(three)
    producer.start()
    for new, old in ((2, 1), (3, 2), (1, 3)):
        producer.wait(30)
        done = hastore("promote", "-c", str(three[new].path), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["node"] == new
        three[old].edit_role("SLAVE")
        three[new].wait_in_sync(*({1, 2, 3} - {new}))
    producer.wait(30)
    judge(three, producer, "three flips")
    assert not producer.failed


@pytest.mark.full
def test_a_demotion_with_a_promotion_after_it(three):
    producer = Producer(three)
    producer.start()
    producer.wait(30)
    assert hastore("demote", "-c", str(three[1].path)).returncode == 0
    assert hastore("promote", "-c", str(three[3].path)).returncode == 0
    three[3].wait_in_sync(1, 2)
    producer.wait(30)
    judge(three, producer, "demote and promote")
    assert not producer.failed


@pytest.mark.full
@pytest.mark.slow("sends to the hanging node wait for their own timeout")
def test_a_master_that_hangs(three):
    producer = Producer(three, timeout_s=HANGS_S)
    producer.start()
    producer.wait(30)
    three[1].pause()
    assert hastore("promote", "-c", str(three[2].path)).returncode == 0
    producer.wait(6)  # every third name is the master that hangs
    three[1].resume()
    three[1].wait_status(lambda s: s["role"] == "SLAVE" and not s["writable"], "superseded")
    three[2].wait_in_sync(1, 3)
    producer.wait(30)
    judge(three, producer, "SIGSTOP and promote")


def test_a_killed_leader(elected):
    producer = Producer(elected)
    producer.start()
    producer.wait(50)
    leader = next(node for node in elected if node.status()["writable"])
    leader.kill()
    producer.wait(50)
    leader.start("serve")
    producer.wait(50)
    judge(elected, producer, "kill -9 of the leader")
    assert not producer.failed


@pytest.mark.full
def test_a_leader_that_stops_hands_over(elected):
    producer = Producer(elected)
    producer.start()
    producer.wait(30)
    leader = next(node for node in elected if node.status()["writable"])
    assert leader.stop() == 0
    producer.wait(30)
    leader.start("serve")
    producer.wait(30)
    judge(elected, producer, "a clean stop of the leader")
    assert not producer.failed


@pytest.mark.full
@pytest.mark.slow("sends to the hanging node wait for their own timeout")
def test_a_leader_that_hangs(elected):
    producer = Producer(elected, timeout_s=HANGS_S)
    producer.start()
    producer.wait(30)
    leader = next(node for node in elected if node.status()["writable"])
    leader.pause()
    producer.wait(6)
    leader.resume()
    producer.wait(30)
    judge(elected, producer, "SIGSTOP of the leader")
