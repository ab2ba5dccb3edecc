"""A thread that fails ends its node, its link or its client, and the reason is reported."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hastore import Producer, aio
from hastore.client.connections import bootstrap
from hastore.client.producer.send_core import SendCore
from hastore.config.model import AckPoint
from hastore.errors import ClientError, NodeFailedError, OutcomeUnknown
from hastore.ha.hello.peer import split_address
from hastore.ha.master.group_transfer import GroupTransferService
from hastore.ha.master.ha_service import HAService, ReadSocketService
from hastore.ha.master.write_socket_service import WriteSocketService
from hastore.ha.slave.classic_client import ClassicHAClient
from hastore.ha.slave.ha_client import HAClient
from hastore.server import run as run_module
from hastore.server.api.cold_reads import ColdReader
from hastore.server.api.position_reader import PositionReader
from hastore.server.api.queries import QueryService
from hastore.server.api.ranges import RangeService
from hastore.server.api.server import ApiServer
from hastore.server.http_server import HttpServer
from hastore.server.node import Node
from hastore.server.retention_service import RetentionService
from hastore.server.role_service import RoleService
from hastore.server.schedule_service import ScheduleMessageService
from hastore.service import Service
from tests.client.conftest import Node as FakeNode
from tests.ha.nodes import Group, peer, wait_for
from tests.process.harness import ROOT
from tests.server.kit import config_of

WAIT_S = 60.0


def break_with(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Make a method raise an exception that no caller expects, as a defect would."""

    def fail(*_given: Any, **_named: Any) -> Any:
        raise LookupError(f"a planted defect in {name}")

    monkeypatch.setattr(owner, name, fail)


def subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_every_service_requires_on_failure() -> None:
    with pytest.raises(TypeError, match="on_failure"):
        Service("x")  # type: ignore[call-arg]
    parameter = inspect.signature(Service.__init__).parameters["on_failure"]
    assert parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
    for kind in subclasses(Service):
        own = inspect.signature(kind.__init__).parameters.get("on_failure")  # type: ignore[misc]
        assert own is None or own.default is own.empty, kind


@pytest.mark.parametrize(
    ("service", "method"),
    [
        (HttpServer, "_drop_late"),
        (HAService, "accept"),
        (GroupTransferService, "_end"),
        (RoleService, "_tick"),
        (RetentionService, "run"),
        (ScheduleMessageService, "run"),
        (ApiServer, "_run_once"),
        (RangeService, "run"),
        (QueryService, "run"),
        (ColdReader, "run"),
        (PositionReader, "run"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_failing_thread_ends_the_node_with_its_reason(
    service: type, method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_with(monkeypatch, service, method)
    node = Node(config_of(tmp_path / "s"), lambda: None)
    node.start()
    try:
        node.api.wake()
        if service is HAService:
            socket.create_connection(split_address(node.ha_address)).close()
        assert node.failed.wait(WAIT_S)
        status = node.backend.status()
    finally:
        with pytest.raises(NodeFailedError, match="planted defect") as failed:
            run_module._end(node)
    assert "LookupError" in str(failed.value) and "node 1 has ended" in str(failed.value)
    assert "planted defect" in status["reason"] and not status["writable"]
    assert "planted defect" in status["problems"][0]


class BrokenHandler(logging.Handler):
    """A log that fails on every line about a failure, as the node's own must never do."""

    def handle(self, record: logging.LogRecord) -> bool:
        """Raise, as a handler without rights to its file would."""
        if record.levelno >= logging.ERROR:
            raise PermissionError(13, "Permission denied", "node.log")
        return True


@pytest.fixture
def broken_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)  # it says so on stderr
    handler = BrokenHandler()
    logging.getLogger("hastore").addHandler(handler)
    yield
    logging.getLogger("hastore").removeHandler(handler)


@pytest.mark.usefixtures("broken_log")
def test_a_failure_is_reported_although_its_log_fails() -> None:
    heard: list[str] = []

    class Failing(Service):
        def run(self) -> None:
            raise LookupError("a planted defect")

    service = Failing("Failing", on_failure=lambda name, failure: heard.append(f"{name} {failure}"))
    service.start()
    service.stop(WAIT_S)
    assert heard == ["Failing a planted defect"]


@pytest.mark.usefixtures("broken_log")
def test_a_node_ends_although_its_log_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_with(monkeypatch, ApiServer, "_run_once")
    node = Node(config_of(tmp_path / "s"), lambda: None)
    node.start()
    assert node.failed.wait(WAIT_S)
    with pytest.raises(NodeFailedError, match=r"ApiServer failed.*planted defect"):
        run_module._end(node)


def test_a_failing_client_of_the_master_ends_the_node(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_with(monkeypatch, HAClient, "_follow_once")
    break_with(monkeypatch, ClassicHAClient, "_master_sends_same")
    heard: list[tuple[str, BaseException]] = []
    group = Group(tmp_path)
    node = group.start(1)
    node.member.on_failure = lambda name, failure: heard.append((name, failure))
    try:
        for client in (HAClient(node.member), ClassicHAClient(node.member, "127.0.0.1:9")):
            client.start()
            wait_for(lambda: heard, "the failure")
            name, failure = heard.pop()
            assert name == "HAClient" and isinstance(failure, LookupError)
            assert client.stop(60)
    finally:
        group.stop()


def test_a_failing_flush_reporter_ends_the_node(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, BaseException]] = []
    group = Group(tmp_path, 2, ha={"ack_point": AckPoint.FLUSHED})
    master, slave = group.start(1), group.start(2)
    slave.member.on_failure = lambda name, failure: heard.append((name, failure))
    try:
        master.promote()
        slave.follow()
        wait_for(lambda: slave.linked and master.ha.linked_nodes(), "a link")
        assert master.put_confirmed(b"x")[0] == "PUT_OK"  # the reporter is under way
        with monkeypatch.context() as broken:
            broken.setattr(slave.store, "wait_beyond", lambda *_given: 1 / 0)
            wait_for(lambda: heard, "the failure")
        name, failure = heard[0]
        assert name == "FlushReporter" and isinstance(failure, ZeroDivisionError)
    finally:
        group.stop()


@pytest.mark.parametrize(
    ("service", "method"),
    [(ReadSocketService, "_count_reports"), (WriteSocketService, "_send_all")],
)
def test_a_link_whose_thread_fails_is_reported_and_reconnected(
    service: type, method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path, 2)
    master, slave = group.start(1), group.start(2)
    real = getattr(service, method)
    failures: list[int] = []

    def fail_once(self: Any, *given: Any) -> Any:
        if not failures:
            failures.append(1)
            raise LookupError("a planted defect")
        return real(self, *given)

    monkeypatch.setattr(service, method, fail_once)
    try:
        master.promote()
        slave.follow()
        wait_for(lambda: master.ha.failure, "the failure")
        assert "planted defect" in str(master.ha.failure)
        assert service.__name__ in str(master.ha.failure)
        end = master.put(b"x")
        wait_for(lambda: slave.store.max_offset == end, "the link")
        assert master.put_confirmed(b"y")[0] == "PUT_OK"
    finally:
        group.stop()


def test_a_connection_for_which_no_thread_starts_is_forgotten(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(tmp_path)
    node = group.start(1)
    failures: list[int] = []

    def start(_self: Any) -> None:
        failures.append(1)
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as broken:
            broken.setattr(ReadSocketService, "start", start)
            with peer(node) as connection:
                assert connection.closed
        wait_for(lambda: failures and not node.ha.accepted.all(), "the end of the connection")
        assert node.ha.acceptor.alive
    finally:
        group.stop()


@pytest.fixture
def node() -> Iterator[FakeNode]:
    from tests.api_fakes import FakeBackend

    made = FakeNode(FakeBackend(1, writable=True, epoch=65537))
    yield made
    made.stop()


def test_a_failing_sender_thread_ends_all_sends_and_refuses_new_ones(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], delivery_timeout_s=600, max_in_flight=2) as producer:
        futures = [producer.send("t", b"%d" % number, queue=0) for number in range(2)]
        wait_for(lambda: node.backend.transfer.waiting, "the puts")
        waiting: list[BaseException] = []

        def wait_room() -> None:
            try:
                producer.send("t", b"no room", queue=0)
            except ClientError as failure:
                waiting.append(failure)

        late = threading.Thread(target=wait_room)
        late.start()
        break_with(monkeypatch, SendCore, "sleep_s")
        producer._driver.wake()
        for future in futures:
            failure = future.exception(WAIT_S)
            assert isinstance(failure, OutcomeUnknown) and "planted defect" in str(failure)
        late.join(WAIT_S)
        assert not late.is_alive() and "planted defect" in str(waiting[0])
        for send in (producer.send, producer.send_sync):
            with pytest.raises(ClientError, match="planted defect.*make a new one"):
                send("t", b"x", queue=0)
        with pytest.raises(ClientError, match="planted defect.*make a new one"):
            producer.send_batch("t", [b"x"])
        assert producer.flush(WAIT_S)


def test_a_sender_thread_that_fails_before_it_finds_a_master_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_with(monkeypatch, SendCore, "run_once")
    with (
        Producer(["tcp://127.0.0.1:9"], delivery_timeout_s=600) as producer,
        pytest.raises(ClientError, match="planted defect"),
    ):
        producer.send("t", b"x")


def test_a_failure_on_the_event_loop_ends_all_sends_and_refuses_new_ones(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.backend.transfer.hold = True

    async def use() -> None:
        async with aio.Producer([node.address], delivery_timeout_s=600) as producer:
            sent = asyncio.ensure_future(producer.send("t", b"x", queue=0))
            while not node.backend.transfer.waiting:
                await asyncio.sleep(0.005)
            break_with(monkeypatch, SendCore, "run_once")
            producer._driver._transport.wake()
            done, _ = await asyncio.wait([sent], timeout=WAIT_S)
            assert done and "planted defect" in str(sent.exception())
            with pytest.raises(ClientError, match="planted defect.*make a new one"):
                await producer.send("t", b"y", queue=0)

    asyncio.run(use())


def test_the_resolver_answers_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any, **_named: Any) -> Any:
        raise LookupError("a planted defect")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    answered = threading.Event()
    found: list[Any] = []

    def take(targets: Any) -> None:
        found.append(targets)
        answered.set()

    bootstrap.look_up("somewhere", 1, take)
    assert answered.wait(WAIT_S) and found == [[]]


FAILING_NODE = """
import sys
from hastore.cli.common import run
from hastore.cli.nodes import serve_command
from hastore.server.http_server import HttpServer

def fail(_self):
    raise LookupError("a planted defect")

HttpServer._drop_late = fail
run(serve_command, "hastore serve")
"""


def test_the_process_exits_with_1_and_prints_the_reason_last(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "node.yaml"
    address = "127.0.0.1:0"
    file.write_text(
        f"cluster: c\ngroup: g\nnode: 1\nrole: ASYNC_MASTER\nacks: 0\n"
        f"nodes: {{1: {{api: 'tcp://{address}', ha: '{address}', http: '{address}'}}}}\n"
        f"store: {{root: {tmp_path / 's'}, commitlog_file_size: 65536}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", FAILING_NODE, "-c", str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert last.startswith("error: node 1 has ended itself: HttpServer failed: LookupError"), last
    assert "a planted defect" in last
    again = Node(config_of(tmp_path / "s"), lambda: None)
    again.state.load(1, "c", "g")
    assert again.state.data.clean_stop, "the node stopped cleanly"
