"""`hastore node --remote`: the nodes change their own files; what cannot be asked is named."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from hastore.cli import node, remote_nodes
from hastore.cli.remote_nodes import RemoteNodes
from hastore.errors import ConfigError, NotAuthenticatedError, ProtocolError
from hastore.protocol import api
from hastore.server.api.server import ApiServer
from tests.cli.remote_kit import NEW, Machines, machines
from tests.ha.nodes import wait_for
from tests.process.wire import greeting


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Three nodes; node 1 is the master."""
    with machines(tmp_path_factory.mktemp("trio"), 3) as made:
        made.start(1, 2, 3)
        made.wait(1, lambda status: status["writable"])
        yield made


@pytest.fixture
def group(trio: Machines) -> Iterator[Machines]:
    """The trio, whose files are as before after the test."""
    before, copy = trio.bytes(), trio.copy.read_bytes()
    yield trio
    trio.copy.write_bytes(copy)
    for path, content in zip(trio.files.values(), before, strict=True):
        path.write_bytes(content)


def shortly(silent_one: int) -> Callable[..., Any]:
    """Return `order` that waits only a moment for one node."""
    real = remote_nodes.order

    def order(config: Any, number: int, *given: Any) -> Any:
        return real(config, number, *given[:-1], 0.05 if number == silent_one else given[-1])

    return order


def outcomes(told: dict[str, Any]) -> dict[int, str]:
    return {one["node"]: one["outcome"] for one in told["nodes"]}


def test_all_files_are_changed_from_one_place_and_back(group: Machines) -> None:
    before = group.bytes()
    code, told, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 0, problems
    assert group.lists() == [[1, 2, 3, 4]] * 3
    assert outcomes(told) == dict.fromkeys((1, 2, 3), "changed")
    assert [one["file"] for one in told["nodes"]] == [str(each) for each in group.files.values()]
    assert told["changed"] == [str(group.copy)]
    assert [step.split()[0] for step in told["steps"]] == ["start", "put"]
    for number in group.files:  # the nodes follow at once
        pending = group.wait(number, lambda status: status["config_pending"])["config_pending"]
        assert pending[0]["in_file"] == [1, 2, 3, 4]
    code, told, _ = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert (code, set(outcomes(told).values()), told["changed"]) == (0, {"unchanged"}, [])
    code, told, _ = group.run("node", "remove", group.copy, "--node", 4)
    assert code == 0 and group.bytes() == before
    lines = wait_for(lambda: (found := group.audit(2, "administer nodes")) and len(found) >= 5
                     and found)  # fmt: skip
    assert [(one["outcome"], one["identity"]) for one in lines[-5:]] == [
        ("checked", "ops"), ("done", "ops"), ("unchanged", "ops"), ("checked", "ops"),
        ("done", "ops"),
    ]  # fmt: skip


def test_a_node_that_leaves_is_not_asked(group: Machines) -> None:
    code, told, problems = group.run("node", "replace", group.copy, "--node", 3, "--by", 4, *NEW)
    assert code == 0, problems
    assert group.lists() == [[1, 2, 4], [1, 2, 4], [1, 2, 3]] and set(outcomes(told)) == {1, 2}


def test_the_own_file_of_a_node_here_is_changed_here(group: Machines) -> None:
    code, told, _ = group.run("node", "add", group.files[2], "--node", 4, *NEW)
    assert code == 0 and told["changed"] == [str(group.files[2])]
    assert set(outcomes(told)) == {1, 3} and group.lists() == [[1, 2, 3, 4]] * 3


def test_nodes_that_only_others_list_are_asked_too(group: Machines) -> None:
    settings = yaml.safe_load(group.copy.read_text())
    del settings["nodes"][3]
    group.copy.write_text(yaml.safe_dump(settings))
    code, told, _ = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 0 and set(outcomes(told)) == {1, 2, 3}
    assert "1, 2, 3, 4 in force" in told["steps"][-1]


@pytest.mark.parametrize(
    ("who", "text"),
    [("shop", "identity shop is no admin"), (None, "this node asks its clients who they are")],
)
def test_who_is_no_admin_changes_nothing(group: Machines, who: str | None, text: str) -> None:
    before, copy = group.bytes(), group.copy.read_bytes()
    code, told, problems = group.run("node", "add", group.copy, "--node", 4, *NEW, who=who)
    assert code == 1 and told is None
    (problems,) = [line for line in problems.splitlines() if line.startswith("error: ")]
    assert text in problems and "no node could be asked; nothing was changed" in problems
    assert group.bytes() == before and group.copy.read_bytes() == copy


def test_the_master_cannot_leave(group: Machines) -> None:
    before = group.bytes()
    code, _, problems = group.run("node", "remove", group.copy, "--node", 1)
    assert code == 2 and "node 1 is a master" in problems and group.bytes() == before


def test_what_one_node_refuses_is_done_by_none(group: Machines) -> None:
    path = group.files[3]
    path.write_text(path.read_text().replace("acks: 1", "acks: 2"))
    before = group.bytes()
    code, _, problems = group.run("node", "remove", group.copy, "--node", 2)
    assert code == 2 and "node 3: the changed file would not be valid" in problems
    assert group.bytes() == before


def test_a_list_with_a_node_that_left_its_address_to_another_is_named(group: Machines) -> None:
    """Node 5 was replaced by node 3 at the same address while node 2 was down."""
    path = group.files[2]
    settings = yaml.safe_load(path.read_text())
    settings["nodes"][5] = settings["nodes"].pop(3)
    path.write_text(yaml.safe_dump(settings))
    before = group.bytes()
    code, _, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 2 and "node 5: this is node 3 of c/g" in problems
    assert f"node 2 lists it at {group.addresses[3]['api']}" in problems
    assert "complete that: `hastore node remove FILE --node 5 --remote`" in problems
    assert group.bytes() == before
    code, _, problems = group.run("node", "remove", group.copy, "--node", 5)
    assert code == 0, problems
    code, _, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 0 and group.lists() == [[1, 2, 3, 4], [1, 2, 4], [1, 2, 3, 4]], problems


def test_interrupted_between_two_nodes_then_completed_or_undone(
    group: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = group.bytes(), RemoteNodes.change

    def change(nodes: RemoteNodes, number: int) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return real(nodes, number)

    arguments = ("node", "add", group.copy, "--node", 4, *NEW)
    for goes_on in (True, False):
        monkeypatch.setattr(RemoteNodes, "change", change)
        code, _, problems = group.run(*arguments)
        assert code == 130 and "node 1" in problems and "give the command again" in problems
        assert group.lists() == [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3]]
        monkeypatch.setattr(RemoteNodes, "change", real)
        if goes_on:
            code, told, _ = group.run(*arguments)
            assert code == 0 and outcomes(told) == {1: "unchanged", 2: "changed", 3: "changed"}
        code, told, _ = group.run("node", "remove", group.copy, "--node", 4)
        assert code == 0 and group.bytes() == before


def test_of_two_administrators_one_loses_and_says_so(
    group: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = RemoteNodes.look, group.files[2]

    def look(*given: Any) -> None:
        real(*given)
        path.write_text(path.read_text() + "# another one was here\n")

    monkeypatch.setattr(RemoteNodes, "look", look)
    code, _, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 1 and "node 2: " in problems and "was changed since" in problems
    assert f"changed so far: {group.copy}, node 1;" in problems
    assert group.lists() == [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3]], "no node after it is changed"
    monkeypatch.setattr(RemoteNodes, "look", real)
    code, told, _ = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 0 and group.lists() == [[1, 2, 3, 4]] * 3
    assert "another one was here" in path.read_text()


def test_a_file_here_that_cannot_be_written_leaves_it_said_what_is_changed(
    group: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, _data: bytes, _mode: int) -> None:
        raise ConfigError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(node, "replace_file", full)
    code, _, problems = group.run("node", "add", group.files[2], "--node", 4, *NEW)
    assert code == 2 and "No space left" in problems
    assert "changed so far: node 1; " in problems and "give the command again" in problems
    assert group.lists() == [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3]]
    monkeypatch.undo()
    code, told, _ = group.run("node", "add", group.files[2], "--node", 4, *NEW)
    assert code == 0 and group.lists() == [[1, 2, 3, 4]] * 3


# -- nodes that cannot be asked


def test_a_node_of_a_version_before_is_named(
    group: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ApiServer._dispatch

    def dispatch(server: ApiServer, connection: Any, request: Any) -> None:
        if isinstance(request, api.Administer) and server._config is server_of_3._config:
            raise ProtocolError(api.NO_REQUEST)
        real(server, connection, request)

    server_of_3 = group._running[3].api
    monkeypatch.setattr(ApiServer, "_dispatch", dispatch)
    code, told, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 1 and "node 3: its hastore is too old" in problems
    assert told["steps"][0].startswith("in the file of node 3, under `nodes`: add the line 4: ")
    assert group.lists() == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3]]


def silent(_connection: socket.socket) -> None:
    """Say nothing."""


def junk(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 50)


def half(connection: socket.socket) -> None:
    connection.sendall(greeting()[:40])


@contextlib.contextmanager
def stranger(address: str, says: Callable[[socket.socket], None]) -> Iterator[None]:
    """Listen at an address as something that is no node."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    taken: list[socket.socket] = []
    with socket.create_server((host, int(port))) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    taken.append(connection)
                    says(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for each in taken:
                each.close()


@pytest.mark.parametrize("says", [None, silent, junk, half])
def test_a_node_that_is_down_or_answers_garbage_is_done_later(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    says: Callable[[socket.socket], None] | None,
) -> None:
    real = remote_nodes.order
    monkeypatch.setattr(remote_nodes, "order", shortly(2))
    monkeypatch.setattr(remote_nodes, "STATUS_S", 0.1)
    with machines(tmp_path, 2) as pair:
        pair.start(1)
        arguments = ("node", "add", pair.copy, "--node", 4, *NEW)
        with contextlib.ExitStack() as ends:
            if says is not None:
                ends.enter_context(stranger(pair.addresses[2]["api"], says))
            code, told, problems = pair.run(*arguments)
        assert code == 1 and "is changed: node 2: no answer: " in problems
        assert pair.lists() == [[1, 2, 4], [1, 2]]
        assert outcomes(told) == {1: "changed", 2: "missed"}
        assert told["nodes"][1]["reason"].startswith("no answer: ")
        assert "in the file of node 2, under `nodes`: add the line 4: " in told["steps"][0]
        if says is None:
            pair.start(2)
            monkeypatch.setattr(remote_nodes, "order", real)
            code, told, problems = pair.run(*arguments)
            assert code == 0, problems
            assert outcomes(told) == {1: "unchanged", 2: "changed"}


def test_an_answer_that_is_lost_leaves_it_open_and_the_repeat_finds_it(
    group: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node makes the change, but its answer does not come."""
    real = remote_nodes.order

    def order(*given: Any) -> Any:
        found = real(*given)
        if given[1] == 2 and given[3] is not None:
            return remote_nodes.Missed("it did not answer", perhaps_done=True)
        return found

    monkeypatch.setattr(remote_nodes, "order", order)
    code, told, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 1 and "is changed: node 2: it did not answer" in problems
    assert outcomes(told) == {1: "changed", 2: "unknown", 3: "changed"}
    assert "perhaps that is done: give the command again" in told["steps"][0]
    monkeypatch.setattr(remote_nodes, "order", real)
    code, told, _ = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 0 and set(outcomes(told).values()) == {"unchanged"}


def test_a_connection_that_ends_with_each_answer_leaves_it_open(
    group: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of a version before does so too, but it does not answer the look."""
    real, server_of_2 = ApiServer._answer_read, group._running[2].api

    def answer_read(server: ApiServer, ready: list[Any]) -> None:
        for done in ready:
            asked = done.request
            if server is server_of_2 and isinstance(asked, api.Administer) and asked.version:
                server._end(done.connection, "the test")
        real(server, [done for done in ready if not done.connection.ended])

    monkeypatch.setattr(ApiServer, "_answer_read", answer_read)
    code, told, problems = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 1 and "node 2: it ended the connection after the change" in problems
    assert outcomes(told) == {1: "changed", 2: "unknown", 3: "changed"}
    assert group.lists() == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("revoked", [True, False], ids=["the identity", "the right"])
def test_an_administrator_who_is_revoked_before_the_answer_is_told_that_it_is_open(
    group: Machines, monkeypatch: pytest.MonkeyPatch, revoked: bool
) -> None:
    """The node made the change, ended the connection, and refuses the next one."""
    real = remote_nodes.Requester.ask

    def ask(requester: Any, address: str, make: Any, *given: Any, **more: Any) -> Any:
        answer = yield from real(requester, address, make, *given, **more)
        if make(1).version is not None and make(1).node == 2:
            if revoked:
                raise NotAuthenticatedError("identity ops is unknown here")
            return api.Failed(1, "FORBIDDEN", "identity ops is no admin"), address
        return answer

    monkeypatch.setattr(remote_nodes.Requester, "ask", ask)
    code, told, _ = group.run("node", "add", group.copy, "--node", 4, *NEW)
    assert code == 1 and outcomes(told) == {1: "changed", 2: "unknown", 3: "changed"}
    assert "perhaps that is done" in told["steps"][0]


def test_no_further_node_is_asked_after_the_deadline(group: Machines) -> None:
    before = group.bytes()
    code, _, problems = group.run(
        "node", "add", group.copy, "--node", 4, *NEW, "--timeout", "0.000001"
    )
    assert code == 1 and "the command's time was over" in problems and group.bytes() == before


def test_a_node_without_identities_says_what_to_do(tmp_path: pathlib.Path, impatient: None) -> None:
    with machines(tmp_path, 2) as pair:
        pair.write(1, security={})
        pair.start(1)
        code, _, problems = pair.run("node", "add", pair.copy, "--node", 4, *NEW, who=None)
        assert code == 1 and "node 1: this node does not ask its clients who they are" in problems
        assert "set security.identities in its file" in problems
        assert pair.lists() == [[1, 2]] * 2


def test_an_old_role_in_a_copy_does_not_count(tmp_path: pathlib.Path) -> None:
    """Node 1, once the master, is dead; the copy of its file is older than the flip."""
    with machines(tmp_path, 3) as group:
        text = group.files[2].read_text()
        group.files[2].write_text(text.replace("role: SLAVE", "role: SYNC_MASTER"))
        group.start(2, 3)
        code, told, problems = group.run(
            "node", "replace", group.copy, "--node", 1, "--by", 4, *NEW
        )
        assert code == 0, problems
        assert group.lists() == [[1, 2, 3], [2, 3, 4], [2, 3, 4]]
        assert "--node 2 --remote" in told["steps"][1]
