"""A Consumer over all groups of a cluster, without ZooKeeper: turns, silence and interrupts."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from hastore import Consumer, Message
from hastore.client.consumer import cluster_consumer
from hastore.client.consumer.consumer_core import ConsumerCore
from hastore.errors import ClientError, PositionLostError, UnreachableError
from tests.client import interrupts
from tests.client.conftest import Node
from tests.client.consumer.test_consumer_positions import (
    Cut,
    fill,
    handler,  # noqa: F401
    interrupts_calls,
    new_seed,
)

LIMIT_S = 120.0


class Seen(NamedTuple):
    addresses: tuple[str, ...]


class Groups:
    """What ZooKeeper would say of a cluster's groups."""

    problem = "it is not there"

    def __init__(self, *_given: object) -> None:
        self.groups: dict[str, Seen] = {}

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        pass

    def holding(self, topic: str) -> list[str]:
        return sorted(self.groups)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """The groups that each consumer of a cluster finds."""
    one = Groups()
    monkeypatch.setattr(cluster_consumer, "ClusterGroups", lambda *_given: one)
    return one


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of what takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def read(consumer: Consumer, number: int, most: int) -> list[Message]:
    found: list[Message] = []
    while len(found) < number:
        found += consumer.poll(most, timeout_s=LIMIT_S)
    return found


def make(**named: Any) -> Consumer:
    return Consumer("t", "zk://127.0.0.1:1/shop", **named)


def test_a_busy_group_leaves_the_turn_to_others(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    busy, calm = make_node(), make_node()
    fill(busy, 2_000)
    fill(calm, 8)
    groups.groups = {"a": Seen((busy.address,)), "b": Seen((calm.address,))}
    with make() as consumer:
        consumer.positions()
        fetcher = consumer.in_group("b")._core.fetcher
        found: list[Message] = []
        while not any(queue.ready or queue.chunk for queue in fetcher.queues.values()):
            found += consumer.poll(1, timeout_s=LIMIT_S)
        # Something of b is there: it comes within one round of turns.
        for _ in range(2):
            found += consumer.poll(1, timeout_s=LIMIT_S)
        assert "b" in {one.cluster_group for one in found}
        found += read(consumer, 2_008 - len(found), 7)
        assert len({(one.cluster_group, one.body) for one in found}) == 2_008


def test_a_silent_group_holds_up_no_other(
    make_node: Callable[..., Node], groups: Groups, silent: str
) -> None:
    node = make_node()
    fill(node, 100)
    groups.groups = {"a": Seen((silent,)), "b": Seen((node.address,))}
    with make(group="g", timeout_s=0.3) as consumer:
        found = read(consumer, 100, 9)
        assert {one.cluster_group for one in found} == {"b"}
        consumer.commit()  # nothing has come of a, so nothing is missing
        assert sum(at.queue_offset for at in consumer.in_group("b").committed().values()) == 100
        with pytest.raises(UnreachableError, match="^group a: "):
            consumer.positions()
        groups.groups = {"b": Seen((node.address,))}
        assert consumer.poll(timeout_s=0.01) == [] and consumer.groups == ("b",)
        assert len(consumer.positions()) == 4


def test_a_group_that_has_moved_is_found(make_node: Callable[..., Node], groups: Groups) -> None:
    node, other = make_node(), make_node()
    fill(other, 12)
    groups.groups = {"a": Seen((node.address,))}
    with make() as consumer:
        assert len(consumer.positions()) == 4
        node.server.stop()
        groups.groups = {"a": Seen((other.address,))}
        assert len(read(consumer, 12, 500)) == 12
        transport = consumer.in_group("a")._requester.transport

        def is_forgotten() -> bool:
            groups.groups = dict(groups.groups)  # as ZooKeeper is read again
            consumer.poll(timeout_s=0.01)
            return node.address not in transport.addresses

        while not is_forgotten():
            pass


def test_closing_a_groups_consumer_ends_nothing(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    node, other = make_node(), make_node()
    fill(node, 12)
    groups.groups = {"a": Seen((node.address,)), "b": Seen((other.address,))}
    with make() as consumer:
        with consumer.in_group("a") as one:
            one.seek_to_latest()
        fill(node, 8, first=12)
        assert {message.body for message in read(consumer, 8, 500)} == {
            b"%d" % number for number in range(12, 20)
        }
        assert sum(at.queue_offset for at in one.positions().values()) == 20
    with pytest.raises(ClientError, match="is closed"):
        one.poll()


def test_commits_repeat_only_what_is_missing(
    make_node: Callable[..., Node], groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {"a": make_node(), "b": make_node()}
    for node in nodes.values():
        fill(node, 8)
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    done: list[ConsumerCore] = []
    commit = ConsumerCore.commit

    def counted(core: ConsumerCore) -> Any:
        done.append(core)
        return commit(core)

    monkeypatch.setattr(ConsumerCore, "commit", counted)
    with make(group="g", timeout_s=0.5) as consumer:
        read(consumer, 16, 500)
        nodes["a"].backend.writable = False
        with pytest.raises(Exception, match=r"^group a: .*the other groups are committed") as one:
            consumer.commit()
        assert one.value.cluster_group == "a" and len(done) == 2
        nodes["a"].backend.writable = True
        consumer.commit()
        assert done[2:] == [consumer.in_group("a")._core]
        consumer.commit()
        assert len(done) == 3, "nothing is missing"
        assert sum(at.queue_offset for at in consumer.committed().values()) == 16
        consumer.seek(("b", 1), 0)
        consumer.seek(("b", 1), 2)
        consumer.commit()
        assert done[3:] == [consumer.in_group("b")._core], "a seek counts, also to the same place"


def test_a_commit_of_one_group_alone_is_not_taken_for_the_last_of_all(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    """The group would stay behind: its messages would come again after a restart."""
    nodes = {"a": make_node(), "b": make_node()}
    for node in nodes.values():
        fill(node, 8)
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    with make(group="g") as consumer:
        read(consumer, 16, 500)
        consumer.commit()
        alone = consumer.in_group("a")
        alone.seek(1, 0)
        alone.commit()
        read(consumer, 2, 500)
        consumer.commit()
        assert sum(at.queue_offset for at in consumer.committed().values()) == 16


def test_a_seek_of_one_group_alone_ends_the_failure_that_was_kept(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    nodes = {"a": make_node(), "b": make_node()}
    for node in nodes.values():
        fill(node, 8)
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    with make() as consumer:
        consumer.positions()
        alone = consumer.in_group("a")
        for queue in alone._core.fetcher.queues.values():
            queue.lost = PositionLostError("it is gone", queue.queue_id)
        found: list[Message] = []
        while len(found) < 8:
            with contextlib.suppress(PositionLostError):
                found += consumer.poll(500, timeout_s=LIMIT_S)
        assert {one.cluster_group for one in found} == {"b"}
        assert consumer._core._failures, "it was kept"  # type: ignore[attr-defined]
        alone.seek_to_earliest()
        assert {one.cluster_group for one in read(consumer, 8, 500)} == {"a"}
        for queue in alone._core.fetcher.queues.values():
            queue.lost = PositionLostError("it is gone", queue.queue_id)
        with pytest.raises(PositionLostError, match="^group a: it is gone"):
            consumer.poll()


@interrupts_calls
def test_an_exception_of_a_signal_handler_loses_no_message(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    count = 2_000
    nodes = [make_node() for _ in range(3)]
    for node in nodes:
        fill(node, count)
    groups.groups = {f"g{n}": Seen((node.address,)) for n, node in enumerate(nodes)}
    rng = random.Random(new_seed())
    cut, found = Cut(rng), list[Message]()
    with make(group="g", max_bytes=9_000, timeout_s=LIMIT_S) as consumer:
        while len(found) < 3 * count:
            what = rng.random()
            if what < 0.6:
                most = rng.randint(1, 120)
                found += cut(lambda most=most: consumer.poll(most, LIMIT_S))
            elif what < 0.7:
                found += consumer.poll(rng.randint(1, 30), LIMIT_S)
            elif what < 0.8:
                cut.iterate(consumer, found, 3 * count)
            elif what < 0.9:
                cut(consumer.commit)  # type: ignore[arg-type]
                consumer.commit()
                kept = consumer.committed()
                assert sum(place.queue_offset for place in kept.values()) == len(found)
            else:
                place = consumer.in_group("g1").position(1)
                cut(lambda place=place: consumer.seek(("g1", 1), place))  # type: ignore[arg-type]
            at = consumer.positions().values()
            assert sum(place.queue_offset for place in at) == len(found)
        assert consumer.poll(timeout_s=0.05) == []
    keys = [(one.cluster_group, one.queue_id, one.queue_offset) for one in found]
    assert len(set(keys)) == len(keys) == 3 * count
    print(f"{cut.count} calls were interrupted")
    assert cut.count > 20


@pytest.fixture
def two(make_node: Callable[..., Node], groups: Groups) -> Iterator[Consumer]:
    """A consumer of two groups, a and b, with four messages each."""
    nodes = {"a": make_node(), "b": make_node()}
    for node in nodes.values():
        fill(node, 4)
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    with make(timeout_s=LIMIT_S) as consumer:
        consumer.positions()
        yield consumer


def fetch_all(consumer: Consumer) -> None:
    """Go back to the first messages, and wait until a poll would return all of them."""
    cores = [consumer.in_group(name)._core for name in ("a", "b")]
    consumer.seek_to_earliest()
    while not all(
        queue.ready or queue.chunk for core in cores for queue in core.fetcher.queues.values()
    ):
        consumer._run(consumer._core.ready(0.01))


def moved(consumer: Consumer) -> list[int]:
    """Return how many messages of each group have been taken."""
    return [
        sum(at.queue_offset for at in consumer.in_group(name).positions().values())
        for name in ("a", "b")
    ]


@interrupts_calls
def test_an_interrupted_poll_moves_nothing_in_any_group(two: Consumer) -> None:
    """Wherever it is interrupted: all groups have moved, or none."""
    taken: list[Message] = []

    def ready() -> Consumer:
        fetch_all(two)
        taken.clear()
        return two

    points = 0
    for _ in interrupts.interrupt_everywhere(
        ready, lambda one: taken.extend(one.poll(timeout_s=LIMIT_S))
    ):
        points += 1
        assert moved(two) == ([4, 4] if taken else [0, 0])
    assert len(taken) == 8 and points > 50
    print(f"interrupted at {points - 1} points")


@interrupts_calls
def test_the_moves_of_a_poll_become_final_in_all_groups_at_once(two: Consumer) -> None:
    """As above, from when the steps have ended: each of these few points is met for certain."""
    taken: list[Message] = []

    def ended() -> Consumer:
        fetch_all(two)
        taken.clear()
        found = two._run(two._core.poll(500, LIMIT_S))
        two._run = lambda _steps: found  # type: ignore[method-assign]
        return two

    points = 0
    for _ in interrupts.interrupt_everywhere(ended, lambda one: taken.extend(one.poll())):
        del two._run
        points += 1
        assert moved(two) == ([4, 4] if taken else [0, 0])
    assert len(taken) == 8 and points > 2


@interrupts_calls
def test_an_interrupted_call_takes_nothing_back_that_a_poll_has_returned(two: Consumer) -> None:
    """The next call makes the moves of all groups final, and may be interrupted between two."""

    def polled() -> Consumer:
        fetch_all(two)
        assert len(two.poll(timeout_s=LIMIT_S)) == 8
        return two

    points = 0
    for _ in interrupts.interrupt_everywhere(polled, lambda one: one.positions()):
        points += 1
        assert moved(two) == [4, 4]
    assert points > 20
    print(f"interrupted at {points - 1} points")
