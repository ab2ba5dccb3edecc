"""Commands wait for the master's replay, so that they find all messages acknowledged before."""

import threading
from contextlib import ExitStack

import click
import pytest

from hastore.cli import groups, own_node, read, topics
from hastore.cli import positions as positions_cli
from hastore.cli.own_node import need_replayed, of_each, registered, wait_replayed
from hastore.client import Producer
from hastore.client.consumer.positions_client import Positions
from hastore.config.model import Config, NodeAddress, StoreConfig
from hastore.errors import HastoreError, RegistryError, UsageError
from hastore.server.api import queries
from hastore.server.node import Node
from tests.cli.kit import hastore
from tests.process.harness import Group
from tests.server.kit import config_of, running


class ThreeNodes:
    """Three nodes; one is a master whose replay advances with each request."""

    def __init__(self, monkeypatch, dispatched, end=100, writable="b"):
        self.asked = []
        self.left = list(dispatched)
        self.end = end
        self.writable = writable
        self.problems = []
        monkeypatch.setattr(own_node, "ask_status", self.status)

    def status(self, address, timeout_s):
        self.asked.append(address)
        if address == "a":
            return None  # no answer
        if address != self.writable:
            return {"max_offset": 7, "dispatched_offset": 7, "writable": False, "node": 9}
        if not self.left:
            return None
        self.end += 1_000  # writes go on; the wait is only for the first end
        problems = ["it is cold", *self.problems]
        return {"max_offset": self.end - 1_000, "dispatched_offset": self.left.pop(0),
                "writable": True, "node": 2, "problems": problems}  # fmt: skip


def test_commands_wait_for_the_masters_replay(monkeypatch):
    group = ThreeNodes(monkeypatch, [0, 50, 100, 100])
    assert wait_replayed("abc") is None
    assert group.asked == ["a"] + ["b"] * 3


@pytest.mark.parametrize("why", ["no master", "the master stops", "replay is stuck"])
def test_the_wait_ends(monkeypatch, why):
    monkeypatch.setattr(own_node, "REPLAY_S", 0.0 if why == "replay is stuck" else 60.0)
    left = {"no master": [100], "the master stops": [0], "replay is stuck": [0] * 3}[why]
    group = ThreeNodes(monkeypatch, left, writable="" if why == "no master" else "b")
    missing = wait_replayed("abc")
    assert len(group.asked) <= 3 and (missing is None) == (why == "no master")
    if why == "the master stops":
        assert missing.endswith("; it does not answer now")


def test_a_busy_master_is_not_passed_over_by_commands_that_would_do_something_wrong(monkeypatch):
    """Else messages that its replay has not read would be sent again, though it has them."""
    monkeypatch.setattr(own_node, "REPLAY_S", 0.0)
    group = ThreeNodes(monkeypatch, [10] * 3, end=1_000)
    real = group.status

    def slow(address, timeout_s):
        return real(address, timeout_s) if address != "b" or timeout_s > 1.0 else None

    monkeypatch.setattr(own_node, "ask_status", slow)
    with pytest.raises(HastoreError, match="nothing was done: node 2 has replayed its log only"):
        need_replayed("abc")
    assert wait_replayed("abc") is None, "what only shows waits for nobody"


@pytest.mark.parametrize("problem", [None, "replay stopped at offset 0: no room"])
def test_what_a_late_replay_hides_is_told(monkeypatch, problem):
    monkeypatch.setattr(own_node, "REPLAY_S", 0.0)
    group = ThreeNodes(monkeypatch, [10] * 3, end=1_000)
    group.problems = [problem] if problem else []
    missing = (
        "node 2 has replayed its log only up to offset 10 of 1,000, so what is stored after that is"
        f" missing here: {problem or 'it is late: try again'}"
    )
    assert wait_replayed("abc") == missing


def test_no_command_passes_off_a_part_of_the_log_as_all_of_it(monkeypatch, tmp_path, capfd):
    """Replay stands still at five of 15 messages, and has not read the commits at all."""
    monkeypatch.setattr(own_node, "REPLAY_S", 0.0)
    monkeypatch.setattr(queries, "REPLAY_S", 0.0)
    file = tmp_path / "consumerOffset.json"
    file.write_text('{"offsetTable": {"t@g": {"0": 15}}}')
    lag = groups.lag_command
    with running(Node(config_of(tmp_path / "store"), lambda: None)) as node, ExitStack() as stops:
        address = node.api.endpoint

        def run(command, *arguments):
            capfd.readouterr()
            code = command.main([*arguments, "--bootstrap", address], standalone_mode=False)
            out, said = capfd.readouterr()
            warns = "warning: node 1 has replayed its log only up to offset" in said
            return code, len(out.splitlines()), warns, "there are no topics" in said

        with Producer([address]) as producer, Positions([address]) as positions:
            for number in range(15):
                if number == 5:
                    positions.commit("g", "t", {0: 5})
                    assert node.store.wait_dispatched(node.store.max_offset, 60)
                    stops.enter_context(node.store.replay.paused())
                producer.send_sync("t", b"x", queue=0, key=f"k{number}")
        assert run(lag, "--max", "3") == (1, 2, True, False)
        assert run(groups.list_command) == (1, 2, True, False)
        assert run(groups.describe_command, "g") == (1, 2, True, False)
        assert run(topics.list_command) == (1, 2, True, False)
        assert run(read.consume_command, "t") == (1, 5, True, False)
        assert run(read.query_command, "--topic", "t", "--key", "k4") == (0, 1, True, False)
        with pytest.raises(HastoreError, match="BUSY: replay has come to offset"):
            run(read.query_command, "--topic", "t", "--key", "k9")
        for command, *arguments in (
            (groups.reset_command, "g", "--topic", "t", "--to", "latest", "--force"),
            (groups.delete_command, "g", "--yes"),
            (positions_cli.import_command, str(file)),
            (positions_cli.export_command,),
        ):
            with pytest.raises(HastoreError, match="nothing was done: node 1 has replayed"):
                run(command, *arguments)
        stops.close()
        assert node.store.wait_dispatched(node.store.max_offset, 60)
        assert run(lag, "--max", "3") == (4, 2, False, False)


def test_commands_that_look_at_queues_wait(monkeypatch, tmp_path):
    called = []
    for module, name in ((read, "wait_replayed"), (positions_cli, "need_replayed")):
        monkeypatch.setattr(module, name, lambda addresses: called.append(command))
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
            (positions_cli.import_command, [str(file)]),
        ):
            command.main([*arguments, "--bootstrap", address], standalone_mode=False)
    assert called == [read.consume_command, read.query_command, positions_cli.import_command]


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


def test_a_registry_says_where_the_other_nodes_are_and_the_file_where_its_own_is(
    monkeypatch, capsys
):
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
    with click.Context(click.Command("status")).scope():
        assert registered(config) == config
        down = False
        assert registered(config) == config, "it was silent for seconds: a command asks once"
    assert capsys.readouterr().err.count("the addresses are those of the file") == 2
    with click.Context(click.Command("status")).scope():
        assert registered(config) != config, "the next command asks again"
