"""Random administrators of one group, who are interrupted, lose answers, and go on or go back.

The nodes' own code changes real files; only the network between a command and a node is a call that
fails at random. HASTORE_SEEDS and HASTORE_SEED choose the walks.
"""

from __future__ import annotations

import os
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from hastore.cli import node as node_command
from hastore.cli import remote_nodes
from hastore.cli.remote_nodes import FileChanged, Missed
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_config, load_names
from hastore.errors import UsageError
from hastore.fs.filesystem import REAL
from hastore.protocol import api
from hastore.server.administration import Administration
from tests.cli.remote_kit import NEW, Machines, machines

SEEDS = int(os.environ.get("HASTORE_SEEDS", "3"))
FIRST = int(os.environ.get("HASTORE_SEED", time.time_ns() % 2**32))
STEPS = 12


class Network:
    """What stands for `order`: it reaches the nodes, does not, or loses what they answer."""

    def __init__(self, group: Machines, chance: random.Random) -> None:
        self.works = False
        self._chance = chance
        self._nodes = {
            number: Administration(load_config(str(path)), str(path), fs=REAL, clock=SYSTEM_CLOCK)
            for number, path in group.files.items()
        }

    def order(
        self, config: Any, number: int, change: Any, version: str | None, timeout_s: float
    ) -> api.Administered | Missed:
        """Do what the real one does, over this network."""
        assert timeout_s > 0
        if number not in self._nodes or (not self.works and self._chance.random() < 0.1):
            return Missed("no answer: it is down")
        request = api.Administer(1, config.cluster, config.group, number, change, version)
        request = api.decode_request(api.encode(request))  # type: ignore[assignment]
        if not self.works and version is not None and self._chance.random() < 0.15:
            raise KeyboardInterrupt
        reply: Any = None
        for _ in range(1 if self.works else self._chance.choice((1, 1, 2))):  # it is sent again
            reply = self._carry_out(number, request)
        if not self.works and version is not None and self._chance.random() < 0.15:
            if self._chance.random() < 0.5:
                raise KeyboardInterrupt
            return Missed("it did not answer", perhaps_done=True)
        if isinstance(reply, api.Failed):
            assert reply.status == api.FILE_CHANGED
            raise FileChanged(f"node {number}: {reply.reason}")
        assert isinstance(reply, api.Administered)
        return reply

    def _carry_out(self, number: int, request: api.Administer) -> Any:
        try:
            return self._nodes[number].carry_out(request)
        except UsageError as refused:
            raise UsageError(f"node {number}: {refused}") from refused


@pytest.fixture
def no_statuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_command, "ask_statuses", lambda _config: ({}, {}))


def commands(group: Machines) -> list[tuple[tuple[object, ...], Callable[[set[int]], set[int]]]]:
    """Return commands, each with what it makes of a list."""
    copy = group.copy
    return [
        (("node", "add", copy, "--node", 4, *NEW), lambda one: one | {4}),
        (("node", "remove", copy, "--node", 4), lambda one: one - {4}),
        (("node", "replace", copy, "--node", 3, "--by", 4, *NEW), lambda one: (one | {4}) - {3}),
    ]


def named(numbers: set[int], lists: list[set[int]]) -> set[int]:
    """Return the nodes that a file, or a node that it leads to, names."""
    found = numbers.union(*(lists[number - 1] for number in numbers if number <= len(lists)))
    return found if found == numbers else named(found, lists)


@pytest.mark.parametrize("number", range(SEEDS))  # each worker must collect the same names
def test_whatever_happens_a_repeat_completes_it_and_the_opposite_undoes_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, no_statuses: None, number: int
) -> None:
    seed = FIRST + number
    print(f"HASTORE_SEED={seed} HASTORE_SEEDS=1")
    chance = random.Random(seed)
    with machines(tmp_path, 3) as group:
        network = Network(group, chance)
        monkeypatch.setattr(remote_nodes, "order", network.order)
        before, copy = group.bytes(), group.copy.read_bytes()
        for _ in range(STEPS):
            arguments, makes = chance.choice(commands(group))
            lists = [set(one) for one in group.lists()]
            known = named(set(load_names(str(group.copy)).nodes), lists)
            code, _, problems = group.run(*arguments)
            assert code in (0, 1, 130), problems
            leaves = 3 if "replace" in arguments else None
            for number, (was, now) in enumerate(zip(lists, group.lists(), strict=True), 1):
                wanted = was if number == leaves else makes(was)
                assert set(now) in (was, wanted), f"node {number}: {problems}"
                is_done = set(now) == wanted or number not in known
                assert code != 0 or is_done, f"node {number}: {problems}"
        network.works = True
        three = api.NodePlaces(**group.addresses[3])
        own = [item for key in ("api", "ha", "http") for item in (f"--{key}", getattr(three, key))]
        group.run("node", "add", group.copy, "--node", 3, *own)  # node 4 may be missed, it is down
        code, _, problems = group.run("node", "remove", group.copy, "--node", 4)
        assert code == 0 and group.lists() == [[1, 2, 3]] * 3, problems
        comments = [content.splitlines()[0] for content in group.bytes()]
        assert comments == [content.splitlines()[0] for content in before]
        assert group.copy.read_bytes().splitlines()[0] == copy.splitlines()[0]
