"""A RocketMQ slave whose log is another one is not served: its broker is asked for some records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hastore.config.model import Role
from hastore.protocol.remoting import Answer, Code
from hastore.server.classic_slaves import GRACE_MS, ClassicSlaves
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


def refusal(node: HaNode, broker: Broker, report: int) -> str:
    slaves = ClassicSlaves(node.member, node.store, node.member.clock)
    slaves.note(broker.address)
    why = slaves.refusal("127.0.0.1", report)
    assert slaves.problem == why
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


@pytest.mark.parametrize("registers", [False, True])
def test_a_slave_that_cannot_be_asked_is_served_later_and_told(
    node: HaNode, broker: Broker, registers: bool
) -> None:
    class Clock:
        def __init__(self) -> None:
            self.now_ms = 0.0

        def monotonic_ms(self) -> float:
            return self.now_ms

    clock: Any = Clock()
    slaves = ClassicSlaves(node.member, node.store, clock)
    broker.replies[Code.GET_BROKER_RUNTIME_INFO] = code(Answer.NO_PERMISSION)
    if registers:
        slaves.note(broker.address)
    assert "nobody knows whether" in str(slaves.refusal("127.0.0.1", node.store.max_offset))
    clock.now_ms = GRACE_MS
    assert slaves.refusal("127.0.0.1", node.store.max_offset) is None
    assert "nobody knows whether" in str(slaves.problem)
