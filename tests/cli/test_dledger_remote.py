"""`hastore dledger --remote`: the leader is found and asked; what was lost is given again."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from hastore.cli import remote_nodes
from hastore.cli.remote_nodes import Missed
from hastore.config.model import Mode
from tests.cli.kit import hastore
from tests.cli.remote_kit import NEW, Machines, machines
from tests.ha.nodes import wait_for


def leader_of(group: Machines) -> int:
    """Wait for a leader that all who run know, and that can take puts; return its number."""

    def known() -> int | None:
        statuses = {number: group.status(number) for number in group.running}
        leaders = {one["leader"] for one in statuses.values()}
        leader = leaders.pop() if len(leaders) == 1 else None
        return leader if leader is not None and statuses[leader]["writable"] else None

    found: int = wait_for(known, "a leader")
    return found


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three members."""
    with machines(tmp_path_factory.mktemp("trio"), 3, Mode.DLEDGER) as made:
        made.start(1, 2, 3)
        leader_of(made)
        yield made


def run(group: Machines, command: str, *arguments: object, **named: Any) -> tuple[int, Any, str]:
    return group.run("dledger", command, "-c", group.copy, "--patience", 60, *arguments, **named)


def test_the_leadership_is_handed_over_with_any_nodes_file(trio: Machines) -> None:
    leader = leader_of(trio)
    to = next(number for number in (1, 2, 3) if number != leader)
    wait_for(lambda: all(one["in_sync"] for one in trio.status(leader)["slaves"]), "in sync")
    code, told, problems = run(trio, "transfer", "--to", to)
    assert code == 0, problems
    assert set(told) == {"node", "term", "leader", "members", "learners", "seconds"}
    assert leader_of(trio) == to
    lines = trio.audit(leader, "administer members")
    assert [(one["outcome"], one["identity"]) for one in lines][-1] == ("asked", "ops")
    assert wait_for(lambda: trio.audit(leader, "dledger transfer"), "the outcome's line")
    code, _, problems = run(trio, "transfer", "--to", to)
    assert code == 0 and f"nothing to do: node {to} leads already" in problems


def test_a_member_is_removed_and_comes_back(trio: Machines) -> None:
    leader = leader_of(trio)
    other = next(number for number in (1, 2, 3) if number != leader)
    code, told, problems = run(trio, "remove", "--node", other)
    assert code == 0, problems
    assert other not in told["members"] and len(told["members"]) == 2
    code, told, problems = run(trio, "remove", "--node", other)
    assert code == 0 and f"nothing to do: node {other} is no member" in problems
    code, told, problems = run(trio, "add", "--node", other, "--wait", 60)
    assert code == 0, problems
    assert sorted(told["members"]) == [1, 2, 3]
    code, told, problems = run(trio, "add", "--node", other)
    assert code == 0 and f"node {other} is a member already" in problems
    leader_of(trio)


def test_another_term_or_other_members_are_refused(
    trio: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, real = leader_of(trio), remote_nodes.ask_statuses
    other = next(number for number in (1, 2, 3) if number != leader)
    for changes, text in (
        ({"term": 1 << 40}, "it was written in term 1099511627776, now it is term"),
        ({"members": [1, 2, 3, 9]}, "it was written when the members were 1, 2, 3, 9"),
    ):

        def seen(config: Any, changes: dict[str, Any] = changes) -> Any:
            statuses, silent = real(config)
            statuses[leader] |= changes
            return statuses, silent

        monkeypatch.setattr(remote_nodes, "ask_statuses", seen)
        code, _, problems = run(trio, "remove", "--node", other)
        assert code == 1 and text in problems, problems
    assert sorted(trio.status(leader)["members"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("who", "text"),
    [("shop", "identity shop is no admin"), (None, "this node asks its clients who they are")],
)
def test_who_is_no_admin_changes_nothing(trio: Machines, who: str | None, text: str) -> None:
    code, _, problems = run(trio, "remove", "--node", 3, who=who)
    assert code == 1 and text in problems
    assert sorted(trio.status(leader_of(trio))["members"]) == [1, 2, 3]


def test_wrong_usage_changes_nothing(trio: Machines) -> None:
    code, _, problems = run(trio, "remove", "--node", 9)
    assert code == 2 and "neither under `nodes`" in problems
    security = ("--security", str(trio.folder / "ops.yaml"))
    done = hastore("dledger", "remove", "-c", str(trio.copy), "--node", "3", *security)
    assert done.returncode == 2 and "runs with" in done.stderr, "without --remote"


def test_a_request_whose_answer_is_lost_may_be_given_again(
    trio: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, real = leader_of(trio), remote_nodes.order
    other = next(number for number in (1, 2, 3) if number != leader)

    def order(*given: Any) -> Any:
        real(*given)
        return Missed("the connection has ended", perhaps_done=True)

    monkeypatch.setattr(remote_nodes, "order", order)
    code, _, problems = run(trio, "remove", "--node", other)
    assert code == 1 and "whether it has got the request is not known" in problems
    monkeypatch.setattr(remote_nodes, "order", real)
    wait_for(lambda: other not in trio.status(leader)["members"], "the removal")
    assert run(trio, "remove", "--node", other)[0] == 0
    assert run(trio, "add", "--node", other, "--wait", 60)[0] == 0
    leader_of(trio)


def test_no_store_is_recovered_beside_members_that_run(trio: Machines) -> None:
    """There would be two groups that acknowledge puts."""
    leader_of(trio)
    done = hastore("dledger", "recover", "-c", str(trio.files[1]), "--unsafe")
    assert done.returncode == 1, "the command proves nobody's identity, so the nodes tell nothing"
    assert "address of node 2, 3 does not accept this command, and nothing" in done.stderr


def test_without_a_leader_it_says_whom_it_could_not_ask(tmp_path: pathlib.Path) -> None:
    with machines(tmp_path, 3, Mode.DLEDGER) as group:
        group.start(1)
        code, _, problems = run(group, "transfer", "--to", 2)
        assert code == 1 and "no node that answers leads (node 2: no answer: " in problems
        assert "node 3: no answer: " in problems and "nothing was changed" in problems


def test_a_file_of_mode_classic_is_refused(tmp_path: pathlib.Path) -> None:
    with machines(tmp_path, 2) as group:
        code, _, problems = run(group, "transfer", "--to", 2)
        assert code == 2 and "use `hastore promote -c FILE`" in problems


def test_a_new_node_gets_into_all_files_and_out_again(trio: Machines) -> None:
    """The addresses first, then the member; a member's addresses stay."""
    leader_of(trio)
    before, copy = trio.bytes(), trio.copy.read_bytes()
    code, told, problems = trio.run("node", "add", trio.copy, "--node", 4, *NEW)
    assert code == 0 and trio.lists() == [[1, 2, 3, 4]] * 3, problems
    assert told["steps"][-1].startswith(
        f"make it a member: `hastore dledger add -c {trio.copy} --node 4 --remote`"
    )
    code, _, problems = run(trio, "add", "--node", 4)
    assert code == 1 and "node 4 is not linked with this node; start it" in problems
    code, _, problems = trio.run("node", "remove", trio.copy, "--node", 3)
    assert code == 2 and "node 3 is a member, or becomes one; nothing was changed" in problems
    code, _, problems = trio.run("node", "replace", trio.copy, "--node", 3, "--by", 4, *NEW)
    assert code == 2 and "in three steps; nothing was changed" in problems
    code, told, _ = trio.run("node", "remove", trio.copy, "--node", 4)
    assert code == 0 and trio.bytes() == before and trio.copy.read_bytes() == copy


def test_the_files_let_go_of_a_removed_node_that_runs_still(trio: Machines) -> None:
    """Its own log still has it as a member, in the term of all others."""
    if leader_of(trio) == 1:
        wait_for(lambda: all(one["in_sync"] for one in trio.status(1)["slaves"]), "in sync")
        assert run(trio, "transfer", "--to", 2)[0] == 0
    leader_of(trio)
    code, _, problems = run(trio, "remove", "--node", 1)
    assert code == 0, problems
    status = trio.wait(1, lambda one: "was removed from the group" in str(one["problems"]))
    assert 1 in status["members"] and status["term"] == trio.status(2)["term"]
    file = trio.folder / "copy2.yaml"
    file.write_bytes(trio.files[2].read_bytes())
    code, _, problems = trio.run("node", "remove", file, "--node", 1)
    assert code == 0 and trio.lists()[1:] == [[2, 3]] * 2, problems
