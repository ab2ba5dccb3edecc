"""A slave whose log is damaged before a cut, or before replay, repairs it, and goes on."""

from __future__ import annotations

import contextlib
import pathlib

from msgspec.structs import replace

from hastore import Producer
from hastore.config.model import Config, NodeAddress, Role
from hastore.record.layout import MIN_RECORD_SIZE
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.kit import config_in_group
from tests.store.kit import log_file, scribble

COUNT = 20


def _send(node: Node, count: int, acks: int | str) -> list[int]:
    wait_for(lambda: node.backend.status()["writable"], "a master")
    with Producer(node.api.endpoint, acks=acks) as producer:
        sent = [producer.send("TopicA", b"%04d" % number * 200) for number in range(count)]
        return [one.result().offset or 0 for one in sent]


def test_damage_at_which_replay_stops_is_repaired_from_the_master(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Ports()) as ports, contextlib.ExitStack() as stack:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        first, second = (Node(config_in_group(tmp_path, n, nodes), lambda: None) for n in nodes)
        for node in (first, second):
            node.start()
            stack.callback(node.stop)
        wait_for(lambda: first.backend.status()["takes_default"], "synchronous puts")
        store, path = second.backend.store, log_file(tmp_path / "node2")
        with store.replay.paused():  # a long one; on a slave nobody knows where an item ends then
            places = _send(first, COUNT, "all")
            end = store.flush()
            assert places[-1] < end and store.log.record_end < end
            whole = pathlib.Path(path).read_bytes()
            scribble(path, places[3] + 4, b"????")
        wait_for(lambda: store.dispatched_offset == end, "replay")
        assert pathlib.Path(path).read_bytes() == whole
        assert second.scrub.repaired_bytes == places[4] - places[3]
        wait_for(lambda: store.replay_problem is None and not second.scrub.problems(), "no problem")


def test_damage_before_a_cut_is_repaired_from_the_master_by_itself(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Ports()) as ports, contextlib.ExitStack() as stack:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        configs = {number: config_in_group(tmp_path, number, nodes) for number in nodes}

        def start(config: Config) -> Node:
            node = Node(config, lambda: None)
            node.start()
            stack.callback(node.stop)
            return node

        first, second = start(configs[1]), start(configs[2])
        wait_for(lambda: first.backend.status()["takes_default"], "synchronous puts")
        places = _send(first, COUNT, "all")
        end = first.backend.store.max_offset
        wait_for(lambda: second.backend.store.confirmed_offset >= end, "what is confirmed")
        second.stop()
        tail = _send(first, 3, 1)
        first.stop()

        first = start(replace(configs[1], role=Role.SLAVE))
        wait_for(lambda: first.backend.store.dispatched_offset > tail[-1], "replay")
        path = log_file(tmp_path / "node1")
        whole = pathlib.Path(path).read_bytes()
        for place in (places[3], tail[0]):  # sizes lead from the one to the other
            scribble(path, place + 4, b"????")
        # The other node promotes itself without this one's tail: it does not reach this one.
        away = {**nodes, 1: replace(nodes[1], ha=f"127.0.0.1:{ports.take()}")}
        second = start(replace(configs[2], role=Role.SYNC_MASTER, nodes=away))
        wait_for(lambda: second.backend.status()["writable"], "the new master")
        wait_for(lambda: first.backend.master_node() == 2, "the follower")
        wait_for(lambda: second.backend.status()["takes_default"], "synchronous puts")
        _send(second, 1, "all")
        assert first.scrub.repaired_bytes > MIN_RECORD_SIZE
        assert pathlib.Path(path).read_bytes()[: tail[0]] == whole[: tail[0]]
        (cut,) = first.backend.status()["cuts"]
        assert (cut["start_offset"], cut["end_offset"]) == (tail[0], len(whole.rstrip(b"\0")))
