"""A group of mode dledger as processes: kills, a pause, a clean stop, restarts, the commands."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.messages import SendResult
from hastore.client.producer.producer import Producer
from hastore.errors import NotStoredError, OutcomeUnknown
from tests.cli.kit import hastore
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Node, wait_until

TOPIC = "t"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DLedgerGroup]:
    """Three nodes; each test leaves them running and in sync."""
    with DLedgerGroup(tmp_path_factory.mktemp("dledger")) as group:
        yield group.start()


class Sender(threading.Thread):
    """Send numbered messages until told to stop; keep what was acknowledged."""

    def __init__(self, group: DLedgerGroup, name: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: dict[bytes, SendResult] = {}
        self.sent = 0
        self.failures: list[BaseException] = []
        self.count = 0
        self._name = name
        self._over = threading.Event()
        self._producer = Producer(group.bootstrap, delivery_timeout_s=120.0)
        self.start()

    def run(self) -> None:
        with self._producer:
            while not self._over.is_set():
                body = f"{self._name}-{self.sent}".encode()
                self.sent += 1
                future = self._producer.send(TOPIC, body)
                future.add_done_callback(lambda done, body=body: self._settle(done, body))
                if self.sent % 16 == 0:
                    time.sleep(0.02)  # a load that a busy machine bears
            self._producer.flush()

    def _settle(self, future: Future[SendResult], body: bytes) -> None:
        failure = future.exception()
        if failure is not None:
            self.failures.append(failure)
            return
        self.acknowledged[body] = future.result()
        self.count += 1

    def wait_for(self, more: int) -> None:
        """Wait until so many more messages are acknowledged."""
        wanted = self.count + more
        wait_until(
            lambda: self.count >= wanted or self.failures, 60, lambda: f"{self.count} of {wanted}"
        )
        assert self.failures == []

    def finish(self) -> dict[bytes, SendResult]:
        """Stop; return what was acknowledged, which is all that was sent."""
        self._over.set()
        self.join(120)
        assert not self.is_alive() and self.failures == []
        assert len(self.acknowledged) == self.sent
        return self.acknowledged


def check(group: DLedgerGroup, acknowledged: dict[bytes, SendResult]) -> None:
    """All nodes have the same bytes, with every acknowledged message once, at its place."""
    end = group.wait_same()["max_offset"]
    assert len({group.log_bytes(node, end) for node in group if node.running}) == 1
    found: dict[bytes, tuple[int, int | None]] = {}
    with Consumer(TOPIC, group.bootstrap) as consumer:
        while len(found) < len(acknowledged):
            messages = consumer.poll(1_000, timeout_s=120)
            assert messages, f"{len(acknowledged) - len(found)} messages are missing"
            for one in messages:
                if one.body in acknowledged:
                    assert one.body not in found, f"{one.body!r} is there twice"
                    found[one.body] = one.offset, one.queue_offset
        for one in consumer.poll(1_000, timeout_s=0.2):
            assert one.body not in acknowledged, f"{one.body!r} is there twice"
    assert found == {body: (r.offset, r.queue_offset) for body, r in acknowledged.items()}
    assert {result.level for result in acknowledged.values()} == {"QUORUM_DISK"}


def put(group: DLedgerGroup, body: bytes, **options: object) -> SendResult:
    with Producer(group.bootstrap, **options) as producer:  # type: ignore[arg-type]
        return producer.send_sync(TOPIC, body)


def test_the_ready_lines_and_the_status(group: DLedgerGroup) -> None:
    leader = group.wait_leader()
    for node in group:
        ready = node.ready
        assert ready["role"] in ("LEADER", "FOLLOWER") and int(ready["term"]) >= 1
        assert int(ready["ledger_end_index"]) >= int(ready["committed_index"]) >= -1
        assert {"epoch", "api", "ha", "http", "min_offset", "max_offset"} <= set(ready)
    put(group, b"first")
    group.wait_same()
    leader = group.wait_leader()
    leader.wait_status(
        lambda s: all(one["ack_index"] == s["ledger_end_index"] for one in s["slaves"]),
        "the leader knows what the others have",
    )
    done = hastore("status", "--json", "--wait", "30", "--bootstrap", ",".join(group.bootstrap))
    assert done.returncode == 0, done.stderr
    statuses = {one["node"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert sorted(statuses) == [1, 2, 3]
    for number, status in statuses.items():
        assert status["mode"] == "dledger" and status["leader"] == leader.number
        assert status["term"] == status["epoch"] >= 1 and status["members"] == [1, 2, 3]
        assert status["ledger_begin_index"] == 0
        assert status["ledger_end_index"] == status["committed_index"] >= 1
        assert status["voted_for"] in (1, 2, 3, None) and status["problems"] == []
        assert status["role"] == ("LEADER" if number == leader.number else "FOLLOWER")
        assert status["writable"] is (number == leader.number)
    slaves = statuses[leader.number]["slaves"]
    assert {one["node"] for one in slaves} == {1, 2, 3} - {leader.number}
    for one in slaves:
        assert one["in_sync"] and one["ack_index"] == statuses[1]["ledger_end_index"]
    text = hastore("status", "--bootstrap", ",".join(group.bootstrap)).stdout
    assert "LEADER" in text and "committed" in text and "term" in text
    with urllib.request.urlopen(f"http://{leader.http}/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    for name in ("hastore_term", "hastore_committed_index", "hastore_slave_ack_index"):
        assert f"\n{name}{{" in metrics


@pytest.mark.parametrize("acks", [1, "all", None])
def test_every_acknowledgement_is_a_majoritys(group: DLedgerGroup, acks: object) -> None:
    result = put(group, f"acks {acks}".encode(), acks=acks, sync_flush=acks == "all")
    assert result.level == "QUORUM_DISK"
    assert result.epoch == group.wait_leader().status()["term"]  # type: ignore[index]


def test_a_put_without_a_reply_is_committed(group: DLedgerGroup) -> None:
    put(group, b"no reply", acks=0)
    with Consumer(TOPIC, group.bootstrap) as consumer:
        wait_until(
            lambda: any(one.body == b"no reply" for one in consumer.poll(100, timeout_s=1)),
            60,
            "the message did not come",
        )


def test_leaders_are_killed_while_a_producer_sends(group: DLedgerGroup) -> None:
    sender = Sender(group, "kill")
    terms = []
    for _ in range(2):
        sender.wait_for(150)
        old = group.wait_leader()
        old.kill()
        new = group.wait_leader()
        assert new is not old
        terms.append(new.status()["term"])  # type: ignore[index]
        sender.wait_for(150)
        group.start(old.number)
    assert terms == sorted(set(terms))
    check(group, sender.finish())


def test_a_paused_leader_acknowledges_nothing_when_it_wakes(group: DLedgerGroup) -> None:
    sender = Sender(group, "pause")
    sender.wait_for(150)
    old = group.wait_leader()
    old.pause()
    group.wait_leader(but=old)
    sender.wait_for(150)
    old.resume()
    old.wait_status(lambda s: s["leader"] == group.wait_leader().number, "following the leader")
    sender.wait_for(50)
    check(group, sender.finish())


def test_a_leader_that_stops_hands_over(group: DLedgerGroup) -> None:
    sender = Sender(group, "stop")
    sender.wait_for(100)
    old = group.wait_leader()
    assert old.stop() == 0
    assert group.wait_leader() is not old
    sender.wait_for(100)
    group.start(old.number)
    check(group, sender.finish())


def test_all_nodes_are_killed_and_start_again(group: DLedgerGroup) -> None:
    sender = Sender(group, "all")
    sender.wait_for(150)
    term = group.wait_leader().status()["term"]  # type: ignore[index]
    for node in group:
        node.kill()
    group.start()
    assert group.wait_leader().status()["term"] > term  # type: ignore[index]
    sender.wait_for(50)
    check(group, sender.finish())


def test_without_a_majority_nothing_is_acknowledged_and_all_is_read(group: DLedgerGroup) -> None:
    put(group, b"before")
    group.wait_same()
    leader = group.wait_leader()
    followers = group.followers(leader)
    for node in followers:
        node.kill()
    with pytest.raises((OutcomeUnknown, NotStoredError)):
        put(group, b"lonely", delivery_timeout_s=1.5, idempotent=False)
    leader.wait_status(lambda s: s["leader"] is None, "stepped down")
    done = hastore("status", "--bootstrap", leader.api)
    assert done.returncode == 4 and "1 of the 3 members answer" in done.stderr, done.stderr
    with Consumer(TOPIC, [leader.api]) as consumer:
        bodies = set()
        while b"before" not in bodies:
            messages = consumer.poll(1_000, timeout_s=120)
            assert messages
            bodies |= {one.body for one in messages}
    group.start(*(node.number for node in followers))
    assert put(group, b"after").level == "QUORUM_DISK"
    group.wait_same()


def test_the_leadership_is_transferred(group: DLedgerGroup) -> None:
    group.wait_same()
    leader = group.wait_leader()
    other, third = group.followers(leader)
    wrong = hastore("dledger", "transfer", "-c", str(other.path), "--to", str(third.number))
    assert wrong.returncode == 1 and f"machine of node {leader.number}" in wrong.stderr
    assert str(leader.path) in wrong.stderr
    same = hastore("dledger", "transfer", "-c", str(leader.path), "--to", str(leader.number))
    assert same.returncode == 1 and "is the leader already" in same.stderr

    def transferred() -> tuple[Node, Node] | None:
        """Return who has handed over, and to whom; None if there was an election meanwhile."""
        leader = group.wait_leader()
        _, third = group.followers(leader)
        done = hastore(
            "dledger", "transfer", "-c", str(leader.path), "--to", str(third.number), "--json"
        )
        if done.returncode:
            assert "knows no leader" in done.stderr or "machine of node" in done.stderr, done.stderr
            return None
        assert json.loads(done.stdout)["node"] == leader.number
        return leader, third

    leader, third = wait_until(transferred, 60, "no transfer succeeds")
    assert group.wait_leader() is third
    for command in ("promote", "demote"):
        refused = hastore(command, "-c", str(leader.path))
        assert refused.returncode == 2 and "elect" in refused.stderr
    doctor = hastore("doctor", "-c", str(third.path))
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert f"node {third.number} runs as LEADER" in doctor.stdout
    assert doctor.stdout.count("answers, without a secret") == 2


@pytest.mark.full
def test_a_node_that_begins_late_goes_on_with_a_quiet_queue(tmp_path: pathlib.Path) -> None:
    """Retention has removed the queue's messages before it gets the log (INSTALL), and leads."""
    kept = {"max_size": "128KiB", "check_interval": "100ms", "hold": "500ms"}
    with DLedgerGroup(tmp_path, 3, retention=kept) as group:
        group.start()
        group[3].stop()
        shutil.rmtree(group[3].store)
        group.wait_leader()
        with Producer(group.bootstrap) as producer:
            for _ in range(10):
                producer.send_sync("quiet", b"q", queue=0)
            first = group.wait_same()["max_offset"]
            for _ in range(40):
                producer.send_batch(TOPIC, [b"x" * 1_000] * 10)
            producer.flush()
        for number in (1, 2):
            group[number].wait_status(lambda s: s["min_offset"] > first, "the messages are gone")
        group.start(3)
        group[3].wait_status(lambda s: s["min_offset"] > first, "it has the rest of the log")
        group.wait_same()
        leader = group.wait_leader()
        done = hastore("dledger", "transfer", "--to", "3", "-c", str(leader.path))
        assert done.returncode == 0, done.stderr
        assert group.wait_leader(but=leader).number == 3
        with Producer(group.bootstrap) as producer:
            assert producer.send_sync("quiet", b"q", queue=0).queue_offset == 10


def test_a_node_is_added_and_removed(tmp_path: pathlib.Path) -> None:
    with DLedgerGroup(tmp_path, 2, listed=1) as group:
        first, second = group
        group.start(1)
        put(group, b"alone")
        first.write(nodes={2: dict(group.addresses[2])})
        second.start("dledger", wait=False)
        first.wait_status(lambda s: any(one["linked"] for one in s["links"]), "linked with node 2")
        # The file of node 2 lists itself, but the group that has begun has not added it yet.
        assert second.status()["members"] == [1]  # type: ignore[index]
        done = hastore("dledger", "add", "-c", str(first.path), "--node", "2", "--wait", "30")
        assert done.returncode == 0, done.stderr
        assert "the members are 1, 2" in done.stdout
        second.wait_ready()
        assert put(group, b"together").level == "QUORUM_DISK"
        assert group.wait_same()["members"] == [1, 2]
        again = hastore("dledger", "add", "-c", str(group.wait_leader().path), "--node", "2")
        assert again.returncode == 1 and "member already" in again.stderr
        leader = group.wait_leader()
        done = hastore("dledger", "remove", "-c", str(leader.path), "--node", "2", "--json")
        assert done.returncode == 0, done.stderr
        first.wait_status(lambda s: s["members"] == [1] and s["writable"], "alone again")
        assert second.stop() == 0
        assert put(group, b"alone again").level == "QUORUM_DISK"


@pytest.mark.full
def test_a_node_that_stops_when_it_is_added_stops_nobody(tmp_path: pathlib.Path) -> None:
    """One more member fails, and puts go on. Then the dead member is replaced by that node."""
    with DLedgerGroup(tmp_path, 4, listed=3) as group:
        group.start(1, 2, 3)
        four = {number: dict(address) for number, address in group.addresses.items()}
        for node in group:
            node.write(nodes=four)
        group[4].start("dledger", wait=False)
        leader = group.wait_leader()
        file = str(leader.path)
        leader.wait_status(
            lambda s: {one["node"] for one in s["links"] if one["linked"]} >= {4}, "linked"
        )
        dead = group.followers(leader)[0]
        group[4].pause()
        added = hastore("dledger", "add", "-c", file, "--node", "4")
        assert added.returncode == 0, added.stderr
        assert "node 4 is a learner" in added.stdout and "remove -c FILE --node 4" in added.stdout
        dead.kill()
        gone = "there is no link to it: start it"
        leader.wait_status(lambda s: s["learners"][0]["waits_for"] == gone, "node 4 is silent")
        assert put(group, b"without both").level == "QUORUM_DISK"
        shown = hastore("status", "--bootstrap", ",".join(group.bootstrap))
        assert f"node {leader.number} <- learner 4 (" in shown.stdout, shown.stdout
        removed = hastore("dledger", "remove", "-c", file, "--node", "4")
        assert removed.returncode == 0, removed.stderr
        group[4].resume()
        leader.wait_status(
            lambda s: {one["node"] for one in s["links"] if one["linked"]} >= {4}, "linked again"
        )
        replaced = hastore(
            *("dledger", "replace", "-c", file, "--node", str(dead.number)),
            *("--by", "4", "--wait", "60", "--json"),
        )
        assert replaced.returncode == 0, replaced.stderr
        told = json.loads(replaced.stdout)
        assert told["members"] == sorted({1, 2, 3, 4} - {dead.number}) and told["learners"] == []
        assert put(group, b"with the new one").level == "QUORUM_DISK"
        group.wait_same()


def test_stores_and_files_of_the_other_mode_are_refused(tmp_path: pathlib.Path) -> None:
    with DLedgerGroup(tmp_path, 1) as group:
        (node,) = group
        group.start()
        node.wait_log("LEADER")
        with contextlib.suppress(OSError):
            node.write(mode="classic", role="ASYNC_MASTER", dledger={})
        settings = node.settings
        del settings["dledger"]
        node.write()
        node.send(signal.SIGHUP)
        node.wait_log("this node runs in mode dledger")
        assert node.stop() == 0
        node.start("master", wait=False)
        assert node.exit_code() == 3 and "is a log of mode dledger" in node.last_words()
        node.write(store={"root": str(tmp_path / "classic")})
        node.start("master")
        put(group, b"classic", acks=1)
        assert node.stop() == 0
        del settings["role"]
        node.write(mode="dledger")
        node.start("dledger", wait=False)
        assert node.exit_code() == 3 and "is a log of mode classic" in node.last_words()
