"""Commands wait for the master's replay, so that they find all messages acknowledged before."""

import threading

import pytest

from hastore.cli import own_node, positions, read
from hastore.cli.own_node import of_each, registered, wait_replayed
from hastore.config.model import Config, NodeAddress, StoreConfig
from hastore.errors import RegistryError, UsageError
from tests.cli.kit import hastore
from tests.process.harness import Group


class ThreeNodes:
    """Three nodes; one is a master whose replay advances with each request."""

    def __init__(self, monkeypatch, dispatched, end=100, writable="b"):
        self.asked = []
        self.left = list(dispatched)
        self.end = end
        self.writable = writable
        monkeypatch.setattr(own_node, "ask_status", self.status)

    def status(self, address, timeout_s):
        self.asked.append(address)
        if address == "a":
            return None  # no answer
        if address != self.writable:
            return {"max_offset": 7, "dispatched_offset": 7, "writable": False}
        if not self.left:
            return None
        self.end += 1_000  # writes go on; the wait is only for the first end
        return {"max_offset": self.end - 1_000, "dispatched_offset": self.left.pop(0),
                "writable": True}  # fmt: skip


def test_commands_wait_for_the_masters_replay(monkeypatch):
    group = ThreeNodes(monkeypatch, [0, 50, 100, 100])
    wait_replayed("abc")
    assert group.asked == ["a"] + ["b"] * 3


@pytest.mark.parametrize("why", ["no master", "the master stops", "replay is stuck"])
def test_the_wait_ends(monkeypatch, why):
    monkeypatch.setattr(own_node, "REPLAY_S", 0.0)
    left = {"no master": [100], "the master stops": [0], "replay is stuck": [0] * 3}[why]
    group = ThreeNodes(monkeypatch, left, writable="" if why == "no master" else "b")
    wait_replayed("abc")
    assert len(group.asked) <= 3


def test_commands_that_look_at_queues_wait(monkeypatch, tmp_path):
    called = []
    for module in (read, positions):
        monkeypatch.setattr(module, "wait_replayed", lambda addresses: called.append(command))
    file = tmp_path / "consumerOffset.json"
    file.write_text('{"offsetTable": {"t@g": {"0": 1}}}')
    with Group(tmp_path, 1, master_role="ASYNC_MASTER") as one:
        one[1].start("master").wait_writable()
        address = one[1].api
        sent = hastore("produce", "t", "--key", "k", "--bootstrap", address, stdin=b"x\n")
        assert sent.returncode == 0, sent.stderr
        for command, arguments in (
            (read.consume_command, ["t"]),
            (read.query_command, ["--topic", "t", "--key", "k"]),
            (positions.import_command, [str(file)]),
        ):
            command.main([*arguments, "--bootstrap", address], standalone_mode=False)
    assert called == [read.consume_command, read.query_command, positions.import_command]


def test_the_nodes_are_asked_at_once_and_the_first_failure_counts():
    """Of four nodes, each waits until all are asked."""
    asked = threading.Barrier(4, timeout=60.0)
    assert of_each([3, 1, 2, 9], lambda number: asked.wait() >= 0 and number) == {
        3: 3, 1: 1, 2: 2, 9: 9
    }  # fmt: skip
    assert of_each([], lambda number: number) == {}

    def fail(number):
        raise UsageError(f"node {number}")

    with pytest.raises(UsageError, match="node 3"):
        of_each([3, 1], fail)


def test_a_registry_says_where_the_other_nodes_are_and_the_file_where_its_own_is(monkeypatch):
    def place(number):
        api, ha, http = (f"127.0.0.1:{number + n}" for n in range(3))
        return NodeAddress(api=f"tcp://{api}", ha=ha, http=http)

    def addresses(_place):
        if down:
            raise RegistryError("out of reach")
        return {1: place(110), 2: place(120)}

    files = {1: place(10), 2: place(20), 3: place(30)}
    config = Config(cluster="test", group="g0", node=1, nodes=files,
                    store=StoreConfig(root="/store"), registry="zk://127.0.0.1:1")  # fmt: skip
    down = False
    monkeypatch.setattr(own_node.RegistryPlace, "addresses", addresses)
    assert registered(config).nodes == {1: place(10), 2: place(120), 3: place(30)}
    copied = registered(config, copy=True)
    assert copied.nodes == {1: place(110), 2: place(120), 3: place(30)} and copied.node == 1
    down = True
    assert registered(config) == config
