"""A group of mode classic that follows its files, without a process: for tests of commands."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from hastore.config.model import Config

Status = dict[str, Any]


@dataclass
class FakeNode:
    """What a node does at each question: it reads its file, and tries what that says."""

    number: int
    path: pathlib.Path
    store: pathlib.Path
    read: str  # the role that it has read last
    state: str = "following"
    end: int = 1_000
    reason: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    alive: bool = True
    unclean: bool = False
    refusal: str | None = None  # why its promotion does not go on
    final: bool = False  # and whether it gives up for that
    cuts: list[Status] = field(default_factory=list)
    more: Status = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The role in its file."""
        return next(line for line in self.path.read_text().splitlines() if "role:" in line)[6:]


class FakeGroup:
    """Nodes 1 to `count`, with node 1 as the master; `status` stands for `ask_own_status`."""

    def __init__(self, folder: pathlib.Path, count: int = 2, role: str = "SYNC_MASTER") -> None:
        self.epoch = 1 << 16 | 1
        self.on_ask: Callable[[int], None] = lambda number: None
        self.asked = 0
        self._turns = threading.Lock()
        self.lag: dict[int, int] = {}
        self.hidden: set[int] = set()  # nodes whose files are on other machines
        self.apart: set[frozenset[int]] = set()  # pairs of nodes that do not reach each other
        addresses = {
            number: {
                "api": f"tcp://127.0.0.1:{7000 + number}",
                "ha": f"127.0.0.1:{7100 + number}",
                "http": f"127.0.0.1:{7200 + number}",
            }
            for number in range(1, count + 1)
        }
        self.nodes: dict[int, FakeNode] = {}
        for number in addresses:
            path, store = folder / f"node{number}.yaml", folder / f"store{number}"
            (store / "hastore").mkdir(parents=True)
            own = role if number == 1 else "SLAVE"
            settings = {
                "cluster": "c", "group": "g", "node": number, "role": own, "acks": 1,
                "nodes": addresses, "store": {"root": str(store)},
            }  # fmt: skip
            path.write_text("# mine\n" + yaml.safe_dump(settings, sort_keys=False))
            self.nodes[number] = FakeNode(number, path, store, own)
        self.nodes[1].state = "master"

    def __getitem__(self, number: int) -> FakeNode:
        return self.nodes[number]

    @property
    def master(self) -> int | None:
        """The node whose epoch is open."""
        return next((n for n, one in self.nodes.items() if one.state == "master"), None)

    def status(self, config: Config, number: int, timeout_s: float) -> Status | None:
        """Let a node read its file and act, then answer."""
        with self._turns:  # a command asks several nodes at once
            self.asked += 1
            self.on_ask(number)
            for each in self.nodes.values():
                if each.alive:
                    self._turn(each)
            node = self.nodes[number]
            return self._status(node) if node.alive else None

    def _turn(self, node: FakeNode) -> None:
        role, was = node.role, node.read
        node.read = role
        once = node.store / "hastore" / "once.json"
        if role == "SLAVE":
            if was != "SLAVE":
                node.state, node.reason = "following", None
            return
        if once.exists():
            node.flags = json.loads(once.read_text())
            once.unlink()
            node.state = "promoting"
        elif was == "SLAVE":
            node.flags, node.state = {}, "promoting"
        if node.state == "promoting":
            self._promote(node)

    def _promote(self, node: FakeNode) -> None:
        needed = node.flags.get("needed_node")
        if needed is not None and not self._answers(node.number, needed):
            node.reason = f"waiting for node {needed}"
            return
        if node.refusal is not None:
            node.reason = node.refusal
            if node.final:
                node.state = "following"
            return
        for other in self.nodes.values():
            if other is not node and self._answers(node.number, other.number):
                node.end = max(node.end, other.end)
                other.state = "following"
                other.end = node.end
        self.epoch = ((self.epoch >> 16) + 1) << 16 | node.number
        node.state, node.reason = "master", None

    def promote(self, number: int) -> None:
        """Let another operator make a node the master."""
        path = self[number].path
        path.write_text(path.read_text().replace("role: SLAVE", "role: SYNC_MASTER"))
        self._turn(self[number])

    def _answers(self, asks: int, number: int) -> bool:
        return self.nodes[number].alive and frozenset({asks, number}) not in self.apart

    def _slaves(self, number: int) -> list[Status]:
        return [
            {
                "node": other, "in_sync": self.lag.get(other, 0) < 1 << 28,
                "lag_bytes": self.lag.get(other, 0), "ack_offset": 0, "classic": False,
                "address": "", "state": "STREAM",
            }
            for other, one in self.nodes.items()
            if other != number and self._answers(number, other) and one.state == "following"
        ]  # fmt: skip

    def _status(self, node: FakeNode) -> Status:
        master = node.state == "master"
        role = "SLAVE" if node.state == "following" else node.role
        reason = None if master else node.reason or "this node is a slave"
        problems = []
        if node.state == "following" and node.role != "SLAVE":
            reason = f"superseded by node {self.master}"
        if not master and node.role != "SLAVE":
            problems = [reason]
        slaves = self._slaves(node.number) if master else []
        hidden = node.number in self.hidden
        return {
            "node": node.number, "cluster": "c", "group": "g", "mode": "classic", "role": role,
            "master": self.master, "epoch": self.epoch, "role_state": node.state,
            "writable": master, "takes_default": master and bool(slaves), "default_refused": None,
            "slaves": slaves,
            "reason": reason, "problems": problems, "unclean": node.unclean, "cuts": node.cuts,
            "classic_master": None, "max_offset": node.end, "dispatched_offset": node.end,
            "config": f"/elsewhere/node{node.number}.yaml" if hidden else str(node.path),
            "store": str(node.store),
        } | node.more  # fmt: skip


def scripted(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType
) -> Callable[..., str]:
    """Return a function `ask(number, *changes)` that lets a node of three answer what it is told.

    It returns the path of the node's file. Of the changes, to what the master of a sound group
    says, each answer takes the next one, and the last one counts for ever. `modules` ask nodes and
    wait: their clock is `ask.clock`, and with each answer the log grows by puts.
    """
    fakes = FakeGroup(folder, 3)
    clock = SimpleNamespace(now=0.0, asked=0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def ask(number: int, *changes: Status) -> str:
        due = list(changes)
        own = fakes[number]

        def answer(_config: Config) -> Status:
            clock.asked += 1
            end = 1_000 * clock.asked
            change = due.pop(0) if len(due) > 1 else due[0]
            return {
                "node": number, "cluster": "c", "group": "g", "epoch": 65537, "master": 1,
                "max_offset": end, "dispatched_offset": end, "config": str(own.path),
                "role": "SYNC_MASTER", "reason": None, "problems": [], "writable": number == 1,
                "unclean": False, "acks": 1, "slaves": [], "unlinked": [], "config_pending": [],
            } | change  # fmt: skip

        for module in modules:
            monkeypatch.setattr(module, "ask_node", answer)
        return str(own.path)

    for module in modules:
        monkeypatch.setattr(
            module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep)
        )
    ask.clock = clock  # type: ignore[attr-defined]
    return ask
