"""What was acknowledged before a command is found by it: it waits for the master's replay."""

import pytest

from hastore.cli import asking, consume, query
from hastore.cli.asking import wait_replayed
from tests.process.harness import Group, hastore


class ThreeNodes:
    """Three nodes, one of them a master whose replay comes on with each question."""

    def __init__(self, monkeypatch, dispatched, end=100, writable="b"):
        self.asked = []
        self.left = list(dispatched)
        self.end = end
        self.writable = writable
        monkeypatch.setattr(asking, "ask_status", self.status)

    def status(self, address, timeout_s):
        self.asked.append(address)
        if address == "a":
            return None  # it does not answer
        if address != self.writable:
            return {"max_offset": 7, "dispatched_offset": 7, "writable": False}
        if not self.left:
            return None
        self.end += 1_000  # others go on writing: what comes later is not waited for
        return {"max_offset": self.end - 1_000, "dispatched_offset": self.left.pop(0),
                "writable": True}  # fmt: skip


def test_the_masters_replay_is_waited_for(monkeypatch):
    group = ThreeNodes(monkeypatch, [0, 50, 100, 100])
    wait_replayed("abc")
    assert group.asked == ["a"] + ["b"] * 3


@pytest.mark.parametrize("why", ["no master", "it left", "replay stands"])
def test_nobody_waits_for_ever(monkeypatch, why):
    monkeypatch.setattr(asking, "REPLAY_S", 0.0)
    left = {"no master": [100], "it left": [0], "replay stands": [0] * 3}[why]
    group = ThreeNodes(monkeypatch, left, writable="" if why == "no master" else "b")
    wait_replayed("abc")
    assert len(group.asked) <= 3


def test_consume_and_query_wait(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(consume, "wait_replayed", lambda addresses: called.append("consume"))
    monkeypatch.setattr(query, "wait_replayed", lambda addresses: called.append("query"))
    with Group(tmp_path, 1, master_role="ASYNC_MASTER") as one:
        one[1].start("master").wait_writable()
        address = one[1].api
        sent = hastore("produce", "t", "--key", "k", "--bootstrap", address, stdin=b"x\n")
        assert sent.returncode == 0, sent.stderr
        for command, arguments in (
            (consume.consume_command, ["t"]),
            (query.query_command, ["--topic", "t", "--key", "k"]),
        ):
            command.main([*arguments, "--bootstrap", address], standalone_mode=False)
    assert called == ["consume", "query"]
