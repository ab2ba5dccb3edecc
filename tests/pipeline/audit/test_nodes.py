"""Running nodes compared: equal, damaged, slow, gone, cut meanwhile."""

from __future__ import annotations

import json
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hastore.config.model import ApiConfig
from hastore.errors import (
    NotAuthenticatedError,
    ProtocolError,
    StoreError,
    UnreachableError,
    UsageError,
)
from hastore.pipeline.audit import node_side, task
from hastore.pipeline.audit.task import Task
from hastore.protocol import api
from hastore.security.identities import Identities
from hastore.server.api.access import Access
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.pipeline.audit.kit import audit, flip
from tests.pipeline.audit.test_folders import items, small
from tests.server.api.secured import Secured
from tests.store import kit

OLD, NEW = 65537, 131074


class Running:
    """The client API of a node over a real store, with a fake role."""

    def __init__(
        self,
        root: pathlib.Path,
        messages: range,
        address: str = "127.0.0.1",
        access: Access | None = None,
    ) -> None:
        self.root = root
        self._opened = kit.opened(root)
        self.store: MessageStore = self._opened.__enter__()
        setattr(self.store, "default_queues", 4)  # noqa: B010 (for the fake node)
        self.backend = FakeBackend()
        self.backend.store = self.store
        self.backend.status = self._status  # type: ignore[method-assign]
        self.backend.entries = [(OLD, 0)]
        self.confirmed: int | None = None
        self.fill(messages)
        self.server = ApiServer(
            f"tcp://{address}:0", self.backend, ApiConfig(), on_failure=raise_failure, access=access
        )
        self.server.start()

    def fill(self, messages: range) -> None:
        for number in messages:
            kit.put(self.store, kit.message(number, size=700))
        self.store.flush()
        self.store.set_limits(confirmed=self.store.max_offset, readable=self.store.max_offset)

    def _status(self) -> dict[str, Any]:
        store = self.store
        confirmed = store.confirmed_offset if self.confirmed is None else self.confirmed
        return {
            "node": 1,
            "min_offset": store.min_offset,
            "max_offset": store.max_offset,
            "confirmed_offset": confirmed,
            "readable_offset": store.readable_offset,
            "history": [
                {"epoch": epoch, "start_offset": start} for epoch, start in self.backend.entries
            ],
        }

    @property
    def where(self) -> str:
        return self.server.endpoint

    def close(self) -> None:
        self.server.stop(60)
        self._opened.__exit__(None, None, None)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 8192)


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[tuple[Running, Running]]:
    """A node, and another with the same bytes, as if it had copied them."""
    one = Running(tmp_path / "one", range(200))
    other = Running(tmp_path / "other", range(0))
    copy(one, other)
    yield one, other
    one.close()
    other.close()


def copy(one: Running, other: Running) -> None:
    """Append what `other` lacks of the log of `one`, as a slave does."""
    at, end = other.store.max_offset, one.store.max_offset
    while at < end:
        with one.store.view(at, 65536) as view:
            other.store.append_replica(at, bytes(view))
        at = other.store.max_offset
    other.store.flush()
    other.store.set_limits(confirmed=end, readable=end)


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_nodes_and_folders_are_compared_in_any_mix(
    pair: tuple[Running, Running], algorithm: str
) -> None:
    one, other = pair
    end = one.store.max_offset
    digests = set()
    for a in (one.where, one.root):
        for b in (other.where, other.root):
            found = audit(a, b, algorithm=algorithm)
            assert found.equal and found.complete and found.bytes == end, found
            assert found.ranges == -(-end // 8192)
            digests.add(found.digest)
    assert len(digests) == 1
    assert found.a.kind == "hastore store"


def test_tasks_bring_the_security_file_of_the_driver(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor runs in a folder of its own, without the driver's environment."""
    secured = Secured(tmp_path)
    one = Running(tmp_path / "one", range(50))
    one.close()
    with kit.opened(tmp_path / "one") as store:
        setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
        secured.backend.store = store
        secured.backend.status = one._status  # type: ignore[method-assign]
        secured.backend.entries = [(OLD, 0)]
        one.store = store
        end = store.max_offset
        store.set_limits(confirmed=end, readable=end)
        secured.identity("ops", admin="true")
        client = {"tls_ca": secured.pki.ca, "identity": "ops", "key_file": "ops.key"}
        (tmp_path / "client.yaml").write_text(json.dumps(client))
        (tmp_path / "executor").mkdir()
        monkeypatch.chdir(tmp_path)

        def on_an_executor(_task: Task) -> None:
            monkeypatch.delenv("HASTORE_SECURITY", raising=False)
            monkeypatch.chdir(tmp_path / "executor")

        with secured.server(tls=True) as server:
            monkeypatch.setenv("HASTORE_SECURITY", "client.yaml")
            found = audit(tmp_path / "one", server.endpoint, before=on_an_executor)
            assert found.equal and found.complete and found.bytes == end
            with pytest.raises(NotAuthenticatedError, match="speaks TLS.*HASTORE_SECURITY"):
                audit(tmp_path / "one", server.endpoint)


def test_damage_at_a_node_is_named(pair: tuple[Running, Running]) -> None:
    one, other = pair
    placed = [each for each in items(one.root) if not each[2].get("blank")]
    begin, end, fields = placed[77]
    flip(other.root, begin + 200, 4)
    for a, b in ((one.where, other.where), (one.root, other.where), (one.where, other.root)):
        found = audit(a, b)
        first = found.first
        assert first is not None and not found.equal and found.differing_ranges == 1
        assert (first.offset, first.byte, first.part) == (begin, begin + 200, "body")
        assert first.a.where == str(a) and first.a.sha256 == fields["sha256"]
        assert first.b.problem is not None and "wrong CRC" in first.b.problem
        assert first.verdict.startswith(f"the record is damaged at {b}: its body has a wrong CRC")


def test_only_confirmed_bytes_of_nodes_are_compared(pair: tuple[Running, Running]) -> None:
    one, other = pair
    end = one.store.max_offset
    one.confirmed = end - 1000
    flip(other.root, end - 500, 1)
    found = audit(one.where, other.where)
    assert found.equal and found.end == end - 1000
    assert [each.why for each in found.not_compared] == [
        f"at {one.where}, beyond its confirmed offset",
        f"beyond the confirmed offset of {one.where}, {end - 1000}",
    ]
    # A RocketMQ master confirms nothing: its slave is compared as far as it is readable.
    one.backend.entries, one.confirmed = [(0, 0)], 0
    assert audit(one.where, other.where).first is not None


def test_a_cut_meanwhile_is_no_difference(pair: tuple[Running, Running]) -> None:
    """A failover cuts the other node's log, and its new master writes other bytes there."""
    one, other = pair
    offsets = [each[0] for each in items(one.root)]
    at = offsets[len(offsets) // 2]

    def flip_over(part: task.Task) -> None:
        if part.start and len(other.backend.entries) == 1:
            other.store.set_limits(confirmed=at, readable=at)
            other.store.truncate(at)
            other.backend.entries = [(OLD, 0), (NEW, at)]
            other.fill(range(1000, 1200))

    found = audit(one.where, other.where, before=flip_over)
    assert found.equal and not found.complete and found.first is None
    assert found.equal_until <= at
    reasons = {each.why for each in found.not_compared}
    assert reasons == {
        f"{other.where} was cut during the audit and has written these bytes again: epoch {OLD} "
        f"before, {NEW} now"
    }
    # Now that both are as they are, their histories differ, and the audit says so.
    first = audit(one.where, other.where).first
    assert first is not None and first.offset == at
    assert f"epoch {OLD} at {one.where}, epoch {NEW} at {other.where}" in first.verdict


def test_a_node_that_ends_in_the_middle_is_named(
    pair: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_side.NodeSide, "limits_s", (1.0, 300.0))
    one, other = pair

    def end(part: task.Task) -> None:
        if part.start:
            other.server.stop(60)

    with pytest.raises(
        UnreachableError,
        match=rf"^{other.where} is not reachable within 1 s; all is equal in \[0, 16384\); --from",
    ):
        audit(one.where, other.where, before=end)


def test_a_node_that_hangs_is_named(
    pair: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_side.NodeSide, "limits_s", (300.0, 1.0))
    monkeypatch.setattr(node_side, "ANSWER_S", 1.0)
    one, other = pair
    held = threading.Event()
    real = other.store.view

    def view(offset: int, most: int) -> Any:
        held.wait(60)
        return real(offset, most)

    monkeypatch.setattr(other.store, "view", view)
    try:
        with pytest.raises(UnreachableError, match=f"^{other.where} did not answer within 1 s; no"):
            audit(one.root, other.where)
    finally:
        held.set()


def test_a_node_that_comes_back_is_asked_again(pair: tuple[Running, Running]) -> None:
    one, other = pair
    address = other.where.removeprefix("tcp://")

    def restart(part: task.Task) -> None:
        if part.start == 16384:
            other.server.stop(60)
            other.server = ApiServer(
                f"tcp://{address}", other.backend, ApiConfig(), on_failure=raise_failure
            )
            threading.Timer(0.3, other.server.start).start()

    assert audit(one.where, other.where, before=restart).equal


def test_a_busy_node_is_asked_again(
    pair: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    refused = iter(["too many digests wait"] * 5)
    real = other.server._ranges.accept_range
    monkeypatch.setattr(
        other.server._ranges, "accept_range", lambda *given: next(refused, None) or real(*given)
    )
    assert audit(one.where, other.where).equal
    assert next(refused, None) is None


def test_a_node_that_cannot_read_its_log_is_named(
    pair: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair

    def view(*_: Any) -> Any:
        raise OSError(5, "Input/output error", "commitlog/0")

    monkeypatch.setattr(other.store, "view", view)
    with pytest.raises(StoreError, match=rf"^{other.where}: .*Input/output error.*commitlog/0"):
        audit(one.where, other.where)


def test_an_older_node_is_named(
    pair: tuple[Running, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    real = api.decode_request

    def decode(header: bytes) -> api.Request:
        request = real(header)
        if isinstance(request, api.RangeQuestion):
            raise ProtocolError("Invalid value 'digest'")
        return request

    monkeypatch.setattr(api, "decode_request", decode)
    monkeypatch.setattr("hastore.client.connections.requester._check_request", lambda request: None)
    with pytest.raises(UsageError, match=f"{one.where} closed the connection .* too old"):
        audit(one.where, other.where)


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(node_side, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"^{address} .* within 0.5 s"):
            audit(address, tmp_path)
    with pytest.raises(UsageError, match=r"expected tcp://HOST:PORT"):
        audit("tcp://nowhere", tmp_path)


def test_ipv6(tmp_path: pathlib.Path) -> None:
    one = Running(tmp_path / "one", range(20), "[::1]")
    try:
        found = audit(one.where, one.root)
        assert found.equal and found.a.where.startswith("tcp://[::1]:")
    finally:
        one.close()


def test_tasks_elsewhere_prove_who_they_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the client's file goes with each task: an executor has other variables."""
    secured = Secured(tmp_path)
    ops = secured.identity("ops", admin="true")
    (tmp_path / "ops.yaml").write_text(f"identity: ops\nkey_file: {ops.key_file}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def leave(_task: task.Task) -> None:
        monkeypatch.delenv("HASTORE_SECURITY")
        monkeypatch.chdir(elsewhere)

    access = Access(Identities(str(secured.path)), secured.note)
    running = Running(tmp_path / "store", range(20), access=access)
    try:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HASTORE_SECURITY", "ops.yaml")
        found = audit(running.server.endpoint, running.server.endpoint, before=leave)
        assert found.equal and found.bytes > 0
        with pytest.raises(NotAuthenticatedError, match="asks its clients who they are"):
            audit(running.server.endpoint, running.server.endpoint)
    finally:
        running.close()
