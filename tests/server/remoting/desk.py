"""A door without sockets or threads, in virtual time: what handlers do, frame by frame."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hastore.clock import SystemClock
from hastore.config.model import ApiConfig
from hastore.errors import NotCachedError
from hastore.protocol.remoting import ANSWER, JSON, ONE_WAY, Frame, RemotingWire
from hastore.server.api.backend import ApiBackend
from hastore.server.api.commits import CommitHandler, PositionTable
from hastore.server.api.puts import PutHandler
from hastore.server.api.quotas import Meter
from hastore.server.api.replies import Failures
from hastore.server.api.server import ApiParts
from hastore.server.remoting.door import Door
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend


class StoreBackend(FakeBackend):
    """A node whose state the test sets, with a real store."""

    def __init__(self, store: MessageStore) -> None:
        super().__init__()
        store.default_queues = 4  # type: ignore[attr-defined]
        self.store = store


class VirtualClock(SystemClock):
    """A clock that stands still until `Desk.run` moves it."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


class VirtualClient:
    """A client's connection, as handlers see it, and the client's end of it."""

    def __init__(self, desk: Desk, number: int) -> None:
        self._desk = desk
        self.ended = False
        self.remoting = True
        self.fast = False
        self.version = 479  # of RocketMQ
        self.proof: Any = None
        self.meter: Meter | None = None
        self.peer = f"127.0.0.1:{number}"
        self.address = ("127.0.0.1", number)
        self.answers: dict[int, Frame] = {}  # by opaque
        self.asked: list[Frame] = []  # requests of the node
        self._opaques = itertools.count(number)

    def send(
        self, code: int, fields: dict[str, str] | None = None, body: bytes = b"",
        *, one_way: bool = False, language: str = "JAVA",
    ) -> int:  # fmt: skip
        """Send a request; return its opaque. Nothing else happens before `run`."""
        opaque = next(self._opaques)
        flag = ONE_WAY if one_way else 0
        frame = Frame(code, opaque, flag, fields or {}, body, None, language, self.version, JSON)
        self._desk.door.receive(self._as_connection, frame, self._desk.clock.now_ms)
        return opaque

    def ask(
        self, code: int, fields: dict[str, str] | None = None, body: bytes = b"", **more: Any
    ) -> Frame:
        """Send a request and return its answer, which must come without time passing."""
        opaque = self.send(code, fields, body, **more)
        self._desk.run()
        return self.answers.pop(opaque)

    def answer(self, asked: Frame, code: int = 0, body: bytes = b"") -> None:
        """Answer a request of the node."""
        frame = Frame(code, asked.opaque, ANSWER, {}, body)
        self._desk.door.receive(self._as_connection, frame, self._desk.clock.now_ms)

    def told(self, code: int) -> list[Frame]:
        """Return, once, the node's requests of a code."""
        found = [frame for frame in self.asked if frame.code == code]
        self.asked = [frame for frame in self.asked if frame.code != code]
        return found

    def close(self) -> None:
        """End the connection."""
        self.ended = True
        self._desk.door.forget_ended([self._as_connection])

    @property
    def _as_connection(self) -> Any:
        return self


class _Replies:
    """Gives each frame to its client at once."""

    def send_frame(self, connection: Any, data: bytes, *, answers: bool) -> None:
        if connection.ended:
            return
        wire = RemotingWire()
        for frame in wire.receive(data):
            assert frame.is_answer == answers
            if answers:
                assert frame.opaque not in connection.answers, "answered twice"
                connection.answers[frame.opaque] = frame
            else:
                connection.asked.append(frame)
        assert wire.failure is None, wire.failure

    def has_room(self, _: Any) -> bool:
        return True


class _Cold:
    """Reads at once, as if in another thread: the result is taken in the next step."""

    def __init__(self) -> None:
        self.done: list[tuple[Callable[[Any], None], Any]] = []

    def accept(self, _: Any, read: Callable[[], Any], then: Callable[[Any], None]) -> bool:
        try:
            self.done.append((then, read()))
        except Exception as failure:
            self.done.append((then, failure))
        return True

    def finish(self) -> None:
        done, self.done = self.done, []
        for then, result in done:
            then(result)


class Desk:
    """A node's door, and its clients."""

    def __init__(self, backend: ApiBackend) -> None:
        self.backend = backend
        self.clock = VirtualClock()
        self.failures = Failures(self.clock)
        self.cold: Any = _Cold()
        self.replies: Any = _Replies()
        self._numbers = itertools.count(50_001)
        self.door = Door(self._parts(), None)

    def _parts(self) -> ApiParts:
        nothing: Any = None
        self.puts = PutHandler(
            self.backend, ApiConfig(), self.clock, nothing, nothing, self.failures
        )
        self.positions = PositionTable(self.backend, self.clock)
        self.commits = CommitHandler(
            self.backend, self.positions, self.puts, nothing, nothing, lambda: None, self.clock,
            nothing,
        )
        return ApiParts(
            self.backend, self.clock, self.puts, nothing, self.commits, self.positions, self.cold,
            nothing, self.replies, self.failures, lambda: None, lambda _, __: None,
        )  # fmt: skip

    def client(self) -> VirtualClient:
        """Connect a client."""
        return VirtualClient(self, next(self._numbers))

    def run(self, ms: float = 0.0) -> None:
        """Let time pass, and do what is due; a bug in a handler fails the test."""
        until_ms = self.clock.now_ms + ms
        while True:
            self._settle()
            wait_ms = self.door.wait_ms(self.clock.now_ms)
            if self.clock.now_ms + wait_ms > until_ms:
                break
            self.clock.now_ms += wait_ms
        self.clock.now_ms = until_ms
        assert not self.failures.count, "a handler failed; the log has more"

    def _settle(self) -> None:
        """Do what needs no time, as an iteration of the API does it."""
        while True:
            self.door.run_due(self.clock.now_ms)
            if self.commits.has_calls and self.has_read():
                self.commits.make_calls()
            self.puts.append_admitted(self.clock.now_ms)
            self.puts.answer_ended()
            self.cold.finish()
            waits = self.commits.has_calls and self.has_read()
            if not (waits or self.puts.gathered or self.cold.done or self.door.has_due):
                break

    def has_read(self) -> bool:
        """Whether the positions are read; False while a record of theirs is not confirmed."""
        store = self.backend.store
        if store.dispatched_offset <= self.commits.last_offset < store.max_offset:
            return False
        try:
            while not self.positions.catch_up():
                pass
        except NotCachedError:
            return False
        return True
