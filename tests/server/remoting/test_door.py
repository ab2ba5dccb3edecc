"""The door: who speaks which protocol on one port, and that each request is answered once."""

from __future__ import annotations

import contextlib
import ssl
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.protocol import api
from hastore.protocol.api import MAX_MESSAGE_BYTES
from hastore.protocol.remoting import JSON, ROCKETMQ, Answer, Code, Frame
from hastore.server.api.replies import ENDED_AT_BYTES
from hastore.server.api.server import ApiServer
from hastore.server.remoting.door import MAX_REMARK, Door, RemotingRefusal, RemotingRequest
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, until
from tests.server.api.secured import Secured
from tests.server.remoting.kit import RemotingClient, served

LARGE_BYTES = 300_000


class Echo:
    """A handler that answers with what it was asked, at once or later."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.ended: list[object] = []
        self.waiting: list[RemotingRequest] = []
        self.told: list[Frame | None] = []
        door.join({1_001: self.now, 1_002: self.soon, 1_003: self.refuse, 1_004: self.fail})
        door.join({1_005: self.park, 1_006: self.ask_back, 1_007: self.be_large})
        door.on_ended(self.ended.append)
        door.on_stop(self.stop)

    def now(self, request: RemotingRequest) -> None:
        request.answer(0, request.frame.fields, request.frame.body)

    def soon(self, request: RemotingRequest) -> None:
        wait_ms = float(request.frame.fields["ms"])
        if wait_ms:
            self.door.at(request.came_ms + wait_ms, lambda: self.now(request))
        else:
            self.door.later(lambda: self.now(request))

    def refuse(self, request: RemotingRequest) -> None:
        raise RemotingRefusal(Answer.SYSTEM_BUSY, request.frame.fields.get("why", "not now"))

    def fail(self, request: RemotingRequest) -> None:
        raise LookupError("a bug")

    def be_large(self, request: RemotingRequest) -> None:
        request.answer(0, body=bytes(LARGE_BYTES))

    def park(self, request: RemotingRequest) -> None:
        self.waiting.append(request)

    def stop(self) -> None:
        for request in self.waiting:
            request.answer(Answer.PULL_RETRY_IMMEDIATELY)

    def ask_back(self, request: RemotingRequest) -> None:
        assert request.connection is not None
        timeout_ms = float(request.frame.fields["ms"])
        self.door.ask(request.connection, 307, {"a": "b"}, b"q", timeout_ms, self.told.append)
        self.now(request)


@pytest.fixture
def echo() -> list[Echo]:
    return []


@pytest.fixture
def server(echo: list[Echo]) -> Iterator[ApiServer]:
    with served(FakeBackend(), lambda door: echo.append(Echo(door))) as running:
        yield running


@pytest.fixture
def connect(server: ApiServer) -> Iterator[Callable[[], RemotingClient]]:
    made: list[RemotingClient] = []

    def make() -> RemotingClient:
        made.append(RemotingClient(server.endpoint))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.mark.parametrize("kind", [JSON, ROCKETMQ])
def test_both_protocols_share_a_port(
    server: ApiServer, connect: Callable[[], RemotingClient], kind: int
) -> None:
    zmtp, client = Client(server.endpoint), connect()
    for _ in range(2):
        answer = client.ask(1_001, {"x": "1"}, b"body", kind=kind)
        assert (answer.code, answer.fields, answer.body) == (0, {"x": "1"}, b"body")
        assert (answer.kind, answer.is_answer) == (kind, True)
        assert isinstance(zmtp.ask(api.AskMap(1)), api.Map)
    zmtp.close()
    unknown = client.ask(9_999, kind=kind)
    assert unknown.code == Answer.REQUEST_CODE_NOT_SUPPORTED
    assert "9999" in str(unknown.remark)


def test_each_request_is_answered_once(connect: Callable[[], RemotingClient]) -> None:
    client = connect()
    assert client.ask(1_002, {"ms": "0"}).code == 0
    assert client.ask(1_002, {"ms": "5"}).code == 0
    assert (client.ask(1_003).code, client.ask(1_003).remark) == (Answer.SYSTEM_BUSY, "not now")
    failed = client.ask(1_004)
    assert failed.code == Answer.SYSTEM_ERROR and "LookupError: a bug" in str(failed.remark)
    client.send(1_001, one_way=True)
    client.send(1_003, one_way=True)
    client.send(9_999, one_way=True)
    assert client.ask(1_001, {"last": "1"}).fields == {"last": "1"}, "no answer came before"


def test_a_large_frame_and_many_small_ones(connect: Callable[[], RemotingClient]) -> None:
    client, body = connect(), bytes(range(256)) * 8_192
    asked = [client.send(1_001, {}, body if number == 5 else b"x") for number in range(300)]
    for number, opaque in enumerate(asked):
        assert client.answer_of(opaque).body == (body if number == 5 else b"x")


def test_a_client_answers_the_node(echo: list[Echo], connect: Callable[[], RemotingClient]) -> None:
    client, (handler,) = connect(), echo
    client.ask(1_006, {"ms": "60000"})
    client.ask(1_001)
    client.ask(1_006, {"ms": "1"})
    until(lambda: handler.told == [None])
    client.ask(1_001)
    client.close()
    until(lambda: handler.told == [None, None])
    assert len(handler.ended) == 1


def test_an_answer_goes_to_who_asked(
    echo: list[Echo], connect: Callable[[], RemotingClient]
) -> None:
    client, (handler,) = connect(), echo
    client.ask(1_006, {"ms": "60000"})
    client.ask(1_001)
    (asked,) = client.pushed or [client.next()]
    assert (asked.code, asked.fields, asked.body) == (307, {"a": "b"}, b"q")
    head = b'{"code":0,"flag":1,"opaque":%d,"version":1}'
    for opaque in (asked.opaque + 1, asked.opaque, asked.opaque):  # the others: nobody asked
        header = head % opaque
        client.sock.sendall(struct.pack(">II", 4 + len(header) + 2, len(header)) + header + b"me")
    client.ask(1_001)
    (told,) = handler.told
    assert told is not None and told.body == b"me"


def test_a_time_that_another_thread_asks_for_wakes_the_api(
    server: ApiServer, echo: list[Echo]
) -> None:
    door, done = echo[0].door, threading.Event()
    with server._io_lock:  # as a thread that answers puts has it, while the API's thread sleeps
        door.at(SYSTEM_CLOCK.monotonic_ms() + 60_000, lambda: None)
    with server._io_lock:
        door.at(SYSTEM_CLOCK.monotonic_ms() + 5, done.set)
    assert done.wait(60)


def test_a_call_is_made_at_once_unless_the_api_is_at_work(
    server: ApiServer, echo: list[Echo], connect: Callable[[], RemotingClient]
) -> None:
    door, client, made = echo[0].door, connect(), []
    opaque = client.send(1_005)
    until(lambda: echo[0].waiting)

    def call() -> None:
        made.append(threading.get_ident())
        echo[0].now(echo[0].waiting[0])

    until(lambda: server.lend(lambda: None))  # the API's thread sleeps
    door.soon(call)
    assert client.answer_of(opaque).code == 0
    with server._io_lock:
        door.soon(lambda: made.append(threading.get_ident()))
        assert len(made) == 1
    until(lambda: len(made) == 2)
    assert made[1] != threading.get_ident()


def test_what_waits_is_answered_when_the_node_stops() -> None:
    with served(FakeBackend(), lambda door: Echo(door) and None) as running:
        client = RemotingClient(running.endpoint)
        opaque = client.send(1_005)
        client.ask(1_001)
        stopping = threading.Thread(target=running.stop, args=(60,))
        stopping.start()
        assert client.answer_of(opaque).code == Answer.PULL_RETRY_IMMEDIATELY
        assert not client.was_reset(), "answers on their way would be lost"
        stopping.join()
        client.close()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">II", 2, 0), "a frame of 2 bytes"),
        (struct.pack(">II", 0x00FFFFFF, 0), "a frame of 16777215 bytes"),
        (struct.pack(">II", 12, 13) + bytes(8), "a header of 13 bytes in a frame of 12"),
        (struct.pack(">II", 6, 2) + b"[]", "a header that is no JSON object"),
    ],
)
def test_malformed_frames_end_the_connection_with_a_reason(
    server: ApiServer,
    connect: Callable[[], RemotingClient],
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    why: str,
) -> None:
    other, client = connect(), connect()
    client.sock.sendall(data)
    assert client.ended()
    until(lambda: server.malformed == 1)
    assert why in caplog.text
    assert other.ask(1_001).code == 0


def test_a_remark_that_repeats_the_client_is_bounded(connect: Callable[[], RemotingClient]) -> None:
    answer = connect().ask(1_003, {"why": "x" * 100_000})
    assert (answer.code, answer.remark) == (Answer.SYSTEM_BUSY, "x" * MAX_REMARK)


def test_who_never_reads_its_answers_is_ended_and_harms_nobody(
    server: ApiServer, connect: Callable[[], RemotingClient], caplog: pytest.LogCaptureFixture
) -> None:
    silent, other = connect(), connect()
    with pytest.raises(OSError):  # noqa: PT011  # a reset or a broken pipe, once it is ended
        while True:
            silent.send(1_007)
            assert other.ask(1_001).code == 0
            assert server._connections.unsent_bytes <= ENDED_AT_BYTES + 2 * LARGE_BYTES
    until(lambda: "does not read its replies" in caplog.text)
    assert other.ask(1_001).code == 0
    until(lambda: server._connections.unsent_bytes == 0)


def test_who_never_reads_what_the_node_tells_is_ended_too(
    server: ApiServer,
    echo: list[Echo],
    connect: Callable[[], RemotingClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent, other = connect(), connect()
    silent.send(1_005)
    until(lambda: len(echo[0].waiting) == 1)
    connection = echo[0].waiting.pop().connection
    assert connection is not None
    more = {"consumerGroup": "G" * 30_000}
    while not connection.ended:
        echo[0].door.later(lambda: echo[0].door.tell(connection, 40, more))
        assert other.ask(1_001).code == 0
    assert "does not read its replies" in caplog.text
    assert silent.ended()


def test_a_node_that_does_not_serve_them_says_so() -> None:
    backend = FakeBackend()
    with served(backend, lambda door: None, refusal="set remoting.enabled: true") as running:
        client = RemotingClient(running.endpoint)
        answer = client.ask(Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        assert (answer.code, answer.remark) == (16, "set remoting.enabled: true")
        client.close()


def test_with_identities_they_are_refused_and_bounded(secured: Secured) -> None:
    with secured.server(make_door=lambda parts: Door(parts, "no identities here")) as running:
        client = RemotingClient(running.endpoint)
        assert client.ask(Code.SEND_MESSAGE).remark == "no identities here"
        # A signed request may be large, but nobody sends more than one before it is proved.
        with contextlib.suppress(ConnectionError):  # the node may end it while it still sends
            for _ in range(2):
                client.send(Code.SEND_MESSAGE, {}, bytes(MAX_MESSAGE_BYTES))
        assert client.ended()
        client.close()


def test_tls_serves_both(secured: Secured) -> None:
    with secured.server(identities=False, tls=True, make_door=_make_echo) as running:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # RocketMQ's clients check no name
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        client = RemotingClient(running.endpoint, context)
        assert client.ask(1_001, {}, b"x" * 100_000).body == b"x" * 100_000
        client.close()


def _make_echo(parts: object) -> Door:
    door = Door(parts, None)  # type: ignore[arg-type]
    Echo(door)
    return door
