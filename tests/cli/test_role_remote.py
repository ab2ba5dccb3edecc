"""`--remote` of promote, demote and flip: each node changes its own role, asked from one place."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from hastore.cli import remote_nodes
from hastore.cli.remote_nodes import FileChanged, Missed
from hastore.config.file import load_names
from hastore.config.model import Mode
from tests.cli.kit import hastore
from tests.cli.remote_kit import NEW, Machines, machines
from tests.ha.nodes import wait_for


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A master and a slave."""
    with machines(tmp_path_factory.mktemp("two"), 2) as made:
        made.start(2, 1)
        yield made


@pytest.fixture
def pair(two: Machines) -> Machines:
    """The two, of which node 1 is the master, with the other in sync."""
    for path, role in ((two.files[2], "SLAVE"), (two.files[1], "SYNC_MASTER")):
        lines = path.read_text().splitlines()
        path.write_text(
            "\n".join(f"role: {role}" if one.startswith("role:") else one for one in lines) + "\n"
        )
    two.wait(1, lambda status: status["takes_default"])
    two.wait(2, lambda status: (status["reason"] or "").endswith("node 1 is the master"))
    return two


def run(group: Machines, *arguments: object, who: str | None = "ops") -> tuple[int, str, str]:
    security = [] if who is None else ["--security", str(group.folder / f"{who}.yaml")]
    done = hastore(*map(str, arguments), "-c", str(group.copy), "--remote", *security)
    return done.returncode, done.stdout, done.stderr


def roles(group: Machines) -> list[str]:
    return [load_names(str(path)).assigned_role.value for path in group.files.values()]


def test_a_flip_and_the_way_back_from_one_place(pair: Machines) -> None:
    code, text, problems = run(pair, "flip", "--to", 2)
    assert code == 0, problems
    assert "node 2 takes puts" in text and roles(pair) == ["SLAVE", "SYNC_MASTER"]
    [asked] = [one for one in pair.audit(2, "administer role") if one["outcome"] == "done"]
    assert asked["identity"] == "ops" and "(node 1 must answer)" in asked["reason"]
    code, text, problems = run(pair, "flip", "--to", 2)
    assert code == 0 and "already" in text
    code, text, problems = run(pair, "flip", "--to", 1)
    assert code == 0 and roles(pair) == ["SYNC_MASTER", "SLAVE"], problems


def test_only_a_check_changes_nothing(pair: Machines) -> None:
    before = pair.bytes()
    code, text, _ = run(pair, "flip", "--to", 2, "--dry-run")
    assert code == 0 and "would then make node 1 a slave in the file of node 1" in text
    assert pair.bytes() == before


def test_a_new_list_is_put_in_force_from_one_place(pair: Machines) -> None:
    before = pair.bytes()
    code, told, _ = pair.run("node", "add", pair.copy, "--node", 4, *NEW)
    assert code == 0
    step = told["steps"][-1].partition("`")[2].partition("`")[0]
    assert step == f"hastore promote -c {pair.copy} --node 1 --remote"
    pair.run("node", "remove", pair.copy, "--node", 4)
    assert pair.bytes() == before
    epoch = pair.status(1)["epoch"]
    security = ("--security", str(pair.folder / "ops.yaml"))
    done = hastore(*step.split()[1:], *security, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch"] > epoch and "begins a new epoch" in done.stderr


def test_a_master_is_demoted_and_promoted(pair: Machines) -> None:
    code, text, problems = run(pair, "demote")
    assert code == 0 and "node 1 is SLAVE" in text, problems
    code, text, problems = run(pair, "promote", "--node", 2, "--async")
    assert code == 0 and "node 2 is ASYNC_MASTER" in text, problems
    assert roles(pair) == ["SLAVE", "ASYNC_MASTER"]


@pytest.mark.parametrize(
    ("command", "change"),
    [(("promote", "--node", 2), "promotion"), (("demote",), ""), (("flip", "--to", 2), "")],
)
def test_who_is_no_admin_changes_nothing(
    pair: Machines, command: tuple[Any, ...], change: str
) -> None:
    before = pair.bytes()
    code, _, problems = run(pair, *command, who="shop")
    assert code == 1 and "identity shop is no admin" in problems
    assert "its role was not changed" in problems and pair.bytes() == before


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("promote", "--node", "9"), "has no such node"),
        (("flip", "--to", "9"), "has no such node"),
    ],
)
def test_wrong_usage(pair: Machines, given: tuple[str, ...], text: str) -> None:
    code, _, problems = run(pair, *given)
    assert code == 2 and text in problems
    done = hastore("promote", "-c", str(pair.copy), "--node", "2")
    assert done.returncode == 2 and "--node goes with --remote" in done.stderr


def test_a_change_without_an_answer_or_of_another_file_is_said(
    pair: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = pair.bytes(), remote_nodes.order
    outcomes: list[Any] = [Missed("no answer", perhaps_done=True), FileChanged("node 2: changed")]

    def order(*given: Any) -> Any:
        if given[3] is None:
            return real(*given)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(remote_nodes, "order", order)
    for text in ("perhaps it was changed: give the command again", "node 2: changed; give"):
        code, _, problems = run(pair, "promote", "--node", 2)
        assert code == 1 and text in problems
    assert pair.bytes() == before


def test_a_node_that_is_down_is_named(tmp_path: pathlib.Path) -> None:
    with machines(tmp_path, 2) as group:
        group.start(1)
        code, _, problems = run(group, "promote", "--node", 2)
        assert code == 1 and "node 2 (tcp://" in problems and "no answer: " in problems
        code, _, problems = run(group, "flip", "--to", 2)
        assert code == 1 and "does not answer; nothing was changed" in problems


def test_the_leader_is_changed_by_a_flip_from_one_place(tmp_path: pathlib.Path) -> None:
    with machines(tmp_path, 3, Mode.DLEDGER) as group:
        group.start(1, 2, 3)

        def leader() -> int | None:
            found = [n for n in group.running if group.status(n)["writable"]]
            return found[0] if found else None

        first = wait_for(leader, "a leader")
        to = next(number for number in group.files if number != first)
        code, text, problems = run(group, "flip", "--to", to)
        assert code == 0 and f"node {to} takes puts" in text, problems
        assert group.audit(first, "administer members")
