"""A RocketMQ slave whose log is another one is not served: its broker is asked for some records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hastore.config.model import Role
from hastore.protocol.remoting import Answer, Code
from hastore.server.classic_slaves import (
    BROKERS_MAX,
    GRACE_MS,
    RECENT_MS,
    SLAVES_MAX,
    STARTS_MAX,
    ClassicSlaves,
)
from tests.ha.nodes import Group, HaNode
from tests.server.test_broker_tables_service import Broker, Reply, body, code


@pytest.fixture
def broker() -> Iterator[Broker]:
    made = Broker()
    yield made
    made.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[HaNode]:
    """A master in its second epoch, which begins behind the first 3 records."""
    group = Group(tmp_path, 1, acks=0, role=Role.ASYNC_MASTER)
    made = group.start(1)
    made.promote()
    made.put(b"one", b"two", b"three")
    made.promote()
    made.put(b"four", b"five")
    yield made
    group.stop()


def has(broker: Broker, log: bytes, *, first: int = 0) -> None:
    """Let the broker answer from this log, as RocketMQ does."""

    def view(sock: Any, asked: Any) -> None:
        at = int(asked.fields["offset"])
        size = int.from_bytes(log[at : at + 4], "big")
        whole = log[at : at + size] if at >= first else b""
        reply: Reply = body(whole) if len(whole) == size > 0 else code(Answer.SYSTEM_ERROR)
        reply(sock, asked)

    broker.replies[Code.VIEW_MESSAGE_BY_ID] = view
    table = {"commitLogMinOffset": str(first), "commitLogMaxOffset": str(len(log))}
    raw = json.dumps({"table": table}).encode()
    broker.replies[Code.GET_BROKER_RUNTIME_INFO] = body(raw)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.now_ms


def slaves_of(node: HaNode, clock: Any = None, *, linked: tuple[str, ...] = ()) -> ClassicSlaves:
    return ClassicSlaves(node.member, node.store, clock or node.member.clock, lambda: linked)


def refusal(node: HaNode, broker: Broker, report: int) -> str:
    slaves = slaves_of(node)
    slaves.note(broker.address)
    why = slaves.refusal("127.0.0.1", report)
    assert slaves.problems() == ([why] if why else [])
    return why or ""


def test_a_slave_with_this_log_goes_on(node: HaNode, broker: Broker) -> None:
    log, start = node.bytes(), node.state.history[-1].start
    for report in (1, start - 1, start, start + 1, start + 90, len(log) - 1, len(log)):
        has(broker, log[:report])
        assert refusal(node, broker, report) == ""


OTHER: list[Callable[[bytes], bytes]] = [
    lambda own: own[:60] + b"\xff" + own[61:],  # as long: another time
    lambda own: (60).to_bytes(4, "big") + own[4:60],  # shorter than the first record
    lambda own: (len(own) - 4).to_bytes(4, "big") + own[4:],
    lambda own: b"\xff" * len(own),  # no record begins there
]


@pytest.mark.parametrize("kind", range(len(OTHER)))
def test_a_tail_that_this_group_never_got_is_refused(
    node: HaNode, broker: Broker, kind: int
) -> None:
    log, start = node.bytes(), node.state.history[-1].start
    other = log[:start] + OTHER[kind](log[start:])
    has(broker, other)
    why = refusal(node, broker, len(other))
    assert f"{broker.address} is another one from {start} on" in why


def test_what_the_slave_has_removed_is_not_compared(node: HaNode, broker: Broker) -> None:
    has(broker, node.bytes(), first=node.state.history[-1].start + 1)
    assert refusal(node, broker, node.store.max_offset) == ""


def test_a_tail_is_found_however_many_epochs_ago_the_logs_parted(
    node: HaNode, broker: Broker
) -> None:
    start, report = node.state.history[-1].start, node.store.max_offset
    for _ in range(STARTS_MAX + 1):
        node.promote()
        node.put(b"x")
    has(broker, node.bytes()[:start] + b"\xff" * (report - start))
    assert "is another one from" in refusal(node, broker, report)


@pytest.mark.parametrize("registers", [False, True])
def test_a_slave_that_cannot_be_asked_is_served_later_and_told(
    node: HaNode, broker: Broker, registers: bool
) -> None:
    clock, end = Clock(), node.store.max_offset
    slaves = slaves_of(node, clock, linked=("127.0.0.1",))
    broker.replies[Code.GET_BROKER_RUNTIME_INFO] = code(Answer.NO_PERMISSION)
    if registers:
        slaves.note(broker.address)
    assert "nobody knows whether" in str(slaves.refusal("127.0.0.1", end))
    clock.now_ms = GRACE_MS
    assert slaves.refusal("127.0.0.1", end) is None
    assert "nobody knows whether" in slaves.problems()[0]
    clock.now_ms *= 1000
    assert len(slaves.problems()) == 1, "as long as it is served"
    for _ in range(2):
        assert slaves.refusal("127.0.0.1", end), "each new link waits anew"
        clock.now_ms += RECENT_MS + 1


def test_a_problem_ends_with_its_slave(node: HaNode, broker: Broker) -> None:
    """It has started with an empty store, as it was told, or is gone."""
    clock, end = Clock(), node.store.max_offset
    slaves = slaves_of(node, clock)
    slaves.note(broker.address)
    has(broker, b"\xff" * end)
    assert slaves.refusal("127.0.0.1", end) and slaves.refusal("10.0.0.9", end)
    assert len(slaves.problems()) == 2
    assert slaves.refusal("127.0.0.1", 0) is None
    assert len(slaves.problems()) == 1 and "10.0.0.9" in slaves.problems()[0]
    clock.now_ms += RECENT_MS + 1
    assert slaves.problems() == []


def test_of_two_brokers_at_one_host_the_one_whose_log_ends_there_is_asked(
    node: HaNode, broker: Broker
) -> None:
    log, other = node.bytes(), Broker()
    foreign = log + b"\xff" * 90
    try:
        has(broker, foreign[90:])  # as long as `log`, and nothing of it
        has(other, log[:-1])
        for first, second in ((broker, other), (other, broker)):
            slaves = slaves_of(node)
            slaves.note(first.address)
            slaves.note(second.address)
            assert "is another one" in str(slaves.refusal("127.0.0.1", len(log)))
            assert slaves.refusal("127.0.0.1", len(log) - 1) is None
            assert "nobody knows whether" in str(slaves.refusal("127.0.0.1", len(log) - 2))
    finally:
        other.close()


def test_what_registers_is_bounded_and_the_newest_counts(node: HaNode, broker: Broker) -> None:
    has(broker, node.bytes())
    slaves = slaves_of(node)
    for text in ("", "h", "h:", "h:abc", "h:99999", "h:0", "127.0.0.1:x"):
        slaves.note(text)
    assert not slaves._known
    for number in range(2 * SLAVES_MAX):
        slaves.note(f"10.0.{number}.1:10911")
        slaves.note(f"127.0.0.1:{number + 1}")
    assert len(slaves._known) == SLAVES_MAX
    assert len(slaves._known["127.0.0.1"]) == BROKERS_MAX
    slaves.note(broker.address)
    assert slaves.refusal("127.0.0.1", node.store.max_offset) is None
