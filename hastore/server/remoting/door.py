"""The door for RocketMQ's clients: each frame goes to the handler of its code, which answers once.

    frame of a client --> handler of its code --> RemotingRequest.answer, then or later
    frame of the node --> client (`ask`, `tell`) --> its answer, or None after a time

Everything runs in the API's thread, with the API's lock: a handler neither waits nor takes long.
What must wait is called later: `Door.later` from any thread, `Door.at` at a time. Which handlers
there are is said in `rooms.py`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from hastore.errors import HastoreError, Status
from hastore.protocol import api
from hastore.protocol.remoting import (
    ONE_WAY,
    Answer,
    Code,
    Frame,
    answer_to,
    decode_frame,
    encode_frame,
    encode_front,
)
from hastore.security.rocketmq_acl import ACCESS_KEY
from hastore.server.api.connections import Connection
from hastore.server.api.replies import master_of
from hastore.server.api.server import ApiParts

log = logging.getLogger(__name__)

# Requests that may wait for long, and have no body: one that comes with one must not keep it.
WITHOUT_BODY = frozenset({
    Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.QUERY_MESSAGE, Code.VIEW_MESSAGE_BY_ID,
    Code.QUERY_CONSUMER_OFFSET, Code.UPDATE_CONSUMER_OFFSET, Code.CONSUMER_SEND_MSG_BACK,
    Code.SEARCH_OFFSET_BY_TIMESTAMP, Code.INVOKE_BROKER_TO_RESET_OFFSET,
    Code.GET_CONSUMER_RUNNING_INFO, Code.CONSUME_MESSAGE_DIRECTLY,
})  # fmt: skip
RUN_MAX = 256  # calls that one iteration of the API makes
MAX_REMARK = 4_096  # characters: a remark may repeat what a client has said
ASKED_MAX = 10_000  # questions of this node that wait for clients' answers
_NEVER = float("inf")
_SIZE_BYTES = 4  # before a frame
_JOINED_BYTES = 32 * 1024  # a longer body is not copied
# A 5.x consumer with setClientRebalance(false) asks for its queues, and has none without an answer.
_NO_ASSIGNMENT = "; consumers share out the queues by themselves: setClientRebalance(true)"
# The Go client does not look at the code of an answer to a message that it sends back, and takes
# that as stored: it would never consume it again. Without an answer it does, after 3 s.
_GO = "GO"
_SYSTEM_BUSY_REMARK = "the node asks too many clients at the same time; try again"


class RemotingRefusal(HastoreError):
    """A request is refused with a code of RocketMQ's, one that never means "stored"."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


_OWN_STATUS: dict[int, Status] = {
    Answer.SUCCESS: Status.PUT_OK,
    Answer.SERVICE_NOT_AVAILABLE: Status.SERVICE_NOT_AVAILABLE,
    Answer.SYSTEM_BUSY: Status.BUSY,
    Answer.NO_PERMISSION: Status.FORBIDDEN,
}


class RemotingRequest:
    """A request of a client. Exactly one call of `answer` ends it, unless it is one way.

    `connection` is the client's; None for a request that another node has forwarded. `address` is
    the client's own address. `reply` sends the answer, a frame or its bytes; `unknown` is called
    instead if there is none, with the reason. Of a forwarded request, `reply` gets None if the
    request is one way, and `undone` says that nothing was done, and why. `again` gets a request
    that a handler refuses for now, with the reason, and returns whether it will see to it.
    """

    __slots__ = (
        *("address", "again", "came_ms", "connection", "frame", "is_answered", "place", "reply"),
        *("tries", "undone", "unknown"),
    )

    def __init__(
        self,
        frame: Frame,
        came_ms: float,
        connection: Connection | None,
        address: tuple[str, int],
        reply: Callable[[RemotingRequest, Frame | bytes | None], None],
        unknown: Callable[[RemotingRequest, str, bool], None] | None = None,
        undone: Callable[[RemotingRequest, str], None] | None = None,
        again: Callable[[RemotingRequest, str], bool] | None = None,
    ) -> None:
        self.frame = frame
        self.came_ms = came_ms
        self.connection = connection
        self.address = address
        self.reply = reply
        self.unknown = unknown
        self.undone = undone
        self.again = again
        self.tries = 0  # how often it has been refused for now
        self.place = 0  # among those that were, in the order in which they came
        self.is_answered = False

    @property
    def is_forwarded(self) -> bool:
        """Whether another node has forwarded it: it is never forwarded again."""
        return self.connection is None

    def answer(
        self,
        code: int,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        remark: str | None = None,
    ) -> None:
        """Send the answer, unless the request is one way. The API's lock is held.

        SERVICE_NOT_AVAILABLE means that nothing was done, for now: the request may be forwarded to
        the master, or handled again soon, instead of answered.
        """
        assert not self.is_answered, f"request {self.frame.code} is answered twice"
        if code == Answer.SERVICE_NOT_AVAILABLE and self.again is not None:
            if self.again(self, remark or ""):
                return
        remark = remark and remark[:MAX_REMARK]
        self.end(answer_to(self.frame, code, dict(fields or {}), body, remark))

    def end(self, answer: Frame | bytes) -> None:
        """Send an answer that is made already, a frame or its wire bytes; as `answer` does."""
        assert not self.is_answered, f"request {self.frame.code} is answered twice"
        self.is_answered = True
        try:
            if not self.frame.flag & ONE_WAY:
                self.reply(self, answer)
            elif self.is_forwarded:
                self.reply(self, None)
        except Exception:  # such as an answer that no frame can carry: the caller finds another
            self.is_answered = False
            raise

    def refuse(self, code: int, reason: str) -> None:
        """Send the last answer, which says that nothing was done."""
        self.again = None
        self.answer(code, remark=reason)

    def leave_open(self, reason: str, *, is_late: bool = False) -> None:
        """End the request without an answer: whether it was carried out is not known.

        The connection is ended, so that the client learns at once that it will not know; but not if
        the answer `is_late`: the client knows that by its own clock. Nor if the request is one way:
        nobody waits for an answer.
        """
        assert not self.is_answered, f"request {self.frame.code} is answered twice"
        self.is_answered = True
        if self.unknown is not None:
            self.unknown(self, reason, is_late)


class OwnRequest:
    """A request of hastore's own client, with what a handler asks of a RemotingRequest.

    It is answered by a PutDone.
    """

    def __init__(
        self,
        parts: ApiParts,
        connection: Connection,
        asked: api.EndTransaction | api.SendBack,
        came_ms: float,
    ) -> None:
        self.connection: Connection | None = connection
        self.came_ms = came_ms
        self.asked = asked
        self._parts = parts
        self._to = connection

    def answer(
        self,
        code: int,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        remark: str | None = None,
    ) -> None:
        """Answer as the answer with this code to a RocketMQ client would."""
        del fields, body
        status = _OWN_STATUS.get(code, Status.MESSAGE_ILLEGAL)
        self.done(api.PutDone(0, status, 0, reason=remark or ""))

    def forbidden(self, why: str) -> RemotingRefusal:
        """Note that the request is forbidden; return what to answer."""
        access = self._parts.access
        assert access is not None, "else everything is allowed"
        access.forbidden(type(self.asked).__name__, self._to, why)
        return RemotingRefusal(Answer.NO_PERMISSION, why)

    def leave_open(self, reason: str, *, is_late: bool = False) -> None:
        """Answer that it is not known whether it was done."""
        del is_late
        self.done(api.PutDone(0, Status.TIMEOUT, 0, reason=reason))

    def done(self, done: api.PutDone) -> None:
        """Answer with the outcome of the node's own record."""
        status = done.status if done.statuses is None else done.statuses[0]
        if status is Status.FORBIDDEN and done.statuses is not None:
            status = Status.SERVICE_NOT_AVAILABLE  # another epoch has begun
        master = None
        if status is Status.SERVICE_NOT_AVAILABLE:
            master = master_of(self._parts.backend, self._parts.failures)
        answer = msgspec.structs.replace(
            done, rid=self.asked.rid, status=status, statuses=None, hosts={}, master=master
        )
        self._parts.replies.send(self._to, answer)


def is_withheld(request: Frame, code: int) -> bool:
    """Whether a client does better without an answer of this code; see `_GO`."""
    return (
        request.code == Code.CONSUMER_SEND_MSG_BACK
        and code != Answer.SUCCESS
        and request.language == _GO
    )


def without_place(done: api.PutDone) -> api.PutDone:
    """Return the outcome of a record whose place concerns nobody."""
    return msgspec.structs.replace(done, offsets=[], queue_ids=[], queue_offsets=[], host=b"")


Handler = Callable[[RemotingRequest], None]


class Forwards(Protocol):
    """Takes requests that only the master can carry out: forwarding.py."""

    @property
    def is_master(self) -> bool:
        """Whether this node takes puts, as far as it knows."""
        ...

    def takes(self, request: RemotingRequest) -> bool:
        """Take a request that another node must carry out; False if this one does."""
        ...

    def again(self, request: RemotingRequest, reason: str) -> bool:
        """See to a request of which nothing was done for now; False if it must be refused."""
        ...

    def end_soon(self, request: RemotingRequest, reason: str) -> None:
        """End the connection of a request that is left open, once its others have outcomes."""
        ...

    def ask(
        self, frame: Frame, then: Callable[[Frame | None], None], node: int | None = None
    ) -> bool:
        """Send the master, or another node, a question of this one; False if it cannot be sent now.

        `then` gets the answer, or None if there will be none.
        """
        ...


class Guards(Protocol):
    """Asks who sends requests, and whether they may: acl.py."""

    def admits(self, request: RemotingRequest) -> bool:
        """Whether a request may be handled; if not, it is answered, now or later."""
        ...

    def may_read(self, request: RemotingRequest, topic: str, *, or_admin: bool = False) -> bool:
        """Whether who has signed a request that was let through may read a topic."""
        ...

    def may_send(self, request: RemotingRequest, topic: str) -> bool:
        """Whether who has signed a request that was let through may send to a topic."""
        ...

    def forbidden(self, request: RemotingRequest, why: str) -> RemotingRefusal:
        """Note that a request that was let through is forbidden; return what to answer."""
        ...

    def may_be_asked(self, connection: Connection, topic: str) -> bool:
        """Whether a client may get a message of a topic that it is asked about, as its producer."""
        ...


class Members(Protocol):
    """Serves hastore's own consumers that share queues: own_members.py."""

    def take(
        self,
        connection: Connection,
        request: api.Sharing | api.Commit,
        now_ms: float,
        commit: Callable[[api.Commit], None],
    ) -> None:
        """Take a request of a member; see `FrameDoor.receive_member`."""
        ...

    def tell(self, connection: Connection, code: int, fields: dict[str, str], body: bytes) -> None:
        """Tell a member what one of RocketMQ's would be told by this request."""
        ...


Then = Callable[[Frame | None], None]


class Question(NamedTuple):
    """A question of this node that waits for a client's answer."""

    then: Then
    timer: int


class Door:
    """Takes the frames of RocketMQ's clients; see the module's text."""

    def __init__(self, parts: ApiParts, refusal: str | None) -> None:
        """Prepare; with a `refusal` every request is answered with it."""
        self.parts = parts
        self.forwarding: Forwards | None = None  # of a node in a group
        self.gate: Guards | None = None  # of a node with identities
        self.problems_of: list[Callable[[], list[str]]] = []  # for `problems`
        self.members: Members | None = None  # hastore's own
        # What producers of hastore's ask for: own_ends.py, check_polls.py.
        self.ends_own: Callable[[Connection, api.EndTransaction, float], None] | None = None
        self.polls_own: Callable[[Connection, api.AskChecks], None] | None = None
        self._refusal = refusal
        self._handlers: dict[int, Handler] = {}
        self._on_ended: list[Callable[[Connection], None]] = []
        self._on_stop: list[Callable[[], None]] = []
        self._later: deque[Callable[[], None]] = deque()
        self._times: list[tuple[float, int]] = []  # a heap: when, ticket
        self._thread = 0  # the API's, once it has run
        self._timers: dict[int, Callable[[], None]] = {}  # by ticket
        self._tickets = itertools.count(1)
        self._opaque = 0  # of the last request to a client
        self._asked: dict[Connection, dict[int, Question]] = {}  # by opaque
        self._asked_count = 0

    def join(self, handlers: Mapping[int, Handler]) -> None:
        """Let these handlers answer requests of their codes."""
        twice = self._handlers.keys() & handlers.keys()
        assert not twice, f"two handlers for the codes {sorted(twice)}"
        self._handlers.update(handlers)

    def on_ended(self, call: Callable[[Connection], None]) -> None:
        """Call this with each connection of a RocketMQ client that has ended."""
        self._on_ended.append(call)

    def on_stop(self, call: Callable[[], None]) -> None:
        """Call this when the node stops, before the connections end."""
        self._on_stop.append(call)

    @property
    def is_master(self) -> bool:
        """Whether this node takes puts, as far as it knows."""
        return self.forwarding is None or self.forwarding.is_master

    @property
    def codes(self) -> frozenset[int]:
        """The codes of the requests that have a handler."""
        return frozenset(self._handlers)

    @property
    def is_open(self) -> bool:
        """Whether RocketMQ's clients are served."""
        return self._refusal is None

    # -- requests of clients

    def receive(self, connection: Connection, frame: Frame, now_ms: float) -> None:
        """Take a frame of a client: a request, or its answer to a request of this node."""
        if frame.is_answer:
            self._take_answer(connection, frame)
            return
        gate = self.gate
        if gate is None and frame.body and frame.code in WITHOUT_BODY:  # else the gate refuses it
            frame.body = b""
        address, answer, leave = connection.address, self._send_answer, self._leave_open
        again = None if self.forwarding is None else self.forwarding.again
        request = RemotingRequest(frame, now_ms, connection, address, answer, leave, again=again)
        if gate is None or gate.admits(request):
            self.handle(request)

    def take_own(self, connection: Connection, request: api.Transactional) -> None:
        """Take a request of a producer of hastore's, about transactions."""
        if isinstance(request, api.EndTransaction):
            assert self.ends_own is not None, "rooms.py sets it"
            self.ends_own(connection, request, self.parts.clock.monotonic_ms())
        else:
            assert self.polls_own is not None, "rooms.py sets it"
            self.polls_own(connection, request)

    def handle(self, request: RemotingRequest) -> None:
        """Let the master carry out what only it can do; every other request is handled here."""
        if self.forwarding is None or not self.forwarding.takes(request):
            self.handle_here(request)

    def handle_here(self, request: RemotingRequest) -> None:
        """Let the handler of its code answer a request."""
        if self._refusal is not None:
            request.answer(Answer.NO_PERMISSION, remark=self._refusal)
            return
        self.handle_inside(request)

    def problems(self) -> list[str]:
        """Return what an operator should know of the rooms; any thread may ask."""
        return [text for ask in self.problems_of for text in ask()]

    def handle_inside(self, request: RemotingRequest) -> None:
        """Let the handler of its code answer a request, also where none of clients is served."""
        handler = self._handlers.get(request.frame.code)
        if handler is None:
            text = f"hastore does not support request code {request.frame.code}"
            text += _NO_ASSIGNMENT if request.frame.code == Code.QUERY_ASSIGNMENT else ""
            request.answer(Answer.REQUEST_CODE_NOT_SUPPORTED, remark=text)
            return
        try:
            handler(request)
        except RemotingRefusal as refusal:
            self.parts.puts.counts.refusals.add(_name_of(refusal.code))
            request.answer(refusal.code, remark=refusal.remark)
        except Exception as failure:
            if request.is_answered:
                raise
            what = f"a RocketMQ request ({request.frame.code})"
            _, reason = self.parts.failures.note(what, failure)
            request.answer(Answer.SYSTEM_ERROR, remark=reason)

    def _send_answer(self, request: RemotingRequest, answer: Frame | bytes | None) -> None:
        assert request.connection is not None and answer is not None
        if isinstance(answer, bytes):
            self.parts.replies.send_frame(request.connection, answer, answers=True)
            return
        if is_withheld(request.frame, answer.code):
            self._withhold(request, answer)
            return
        body = answer.body
        front = encode_front(answer, len(body))
        if len(body) <= _JOINED_BYTES:
            self.parts.replies.send_frame(request.connection, front + body, answers=True)
        else:
            self.parts.replies.send_frame(request.connection, front, body, answers=True)

    def pass_back(self, request: RemotingRequest, raw: bytes) -> None:
        """Send a client the wire bytes of what another node has answered."""
        connection = request.connection
        if connection is None:
            return
        if request.frame.code == Code.CONSUMER_SEND_MSG_BACK:
            answer = decode_frame(raw, _SIZE_BYTES)
            if is_withheld(request.frame, answer.code):
                self._withhold(request, answer)
                return
        self.parts.replies.send_frame(connection, raw, answers=True)

    def _withhold(self, request: RemotingRequest, answer: Frame) -> None:
        connection = request.connection
        assert connection is not None
        why = f"{answer.code} {answer.remark}"
        log.debug("remoting: %s is not answered: %s", connection.peer, why)
        self.parts.replies.send_frame(connection, b"", answers=True)

    def _leave_open(self, request: RemotingRequest, reason: str, is_late: bool) -> None:
        connection = request.connection
        assert connection is not None
        if request.frame.is_one_way:
            log.debug("remoting: a one-way request of %s: %s", connection.peer, reason)
        elif is_late:
            self.parts.replies.send_frame(connection, b"", answers=True)
        elif self.forwarding is not None:
            self.forwarding.end_soon(request, reason)
        else:
            self.parts.end(connection, reason)

    def receive_member(
        self,
        connection: Connection,
        request: api.Sharing | api.Commit,
        now_ms: float,
        commit: Callable[[api.Commit], None],
    ) -> None:
        """Take a request of hastore's own member of a group; see `FrameDoor.receive_member`."""
        assert self.members is not None, "every node's door has them"
        self.members.take(connection, request, now_ms, commit)

    # -- requests of this node to clients

    def tell(
        self, connection: Connection, code: int, fields: dict[str, str], body: bytes = b""
    ) -> None:
        """Send a client a request that it does not answer; hastore's own members get a Notice."""
        if not connection.remoting:
            if self.members is not None:
                self.members.tell(connection, code, fields, body)
            return
        frame = Frame(code=code, opaque=self._next_opaque(), flag=2, fields=fields, body=body)
        self.parts.replies.send_frame(connection, encode_frame(frame), answers=False)

    def ask(
        self,
        connection: Connection,
        code: int,
        fields: dict[str, str],
        body: bytes,
        timeout_ms: float,
        then: Then,
    ) -> None:
        """Send a client a request; `then` gets its answer, or None if none comes in time.

        hastore's own members answer none. Raises RemotingRefusal if too many questions wait.
        """
        if not connection.remoting:
            self.later(partial(then, None))
            return
        if self._asked_count >= ASKED_MAX:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, _SYSTEM_BUSY_REMARK)
        opaque = self._next_opaque()

        def over() -> None:
            self._pop_asked(connection, opaque)
            then(None)

        timer = self.at(self.parts.clock.monotonic_ms() + timeout_ms, over)
        self._asked.setdefault(connection, {})[opaque] = Question(then, timer)
        self._asked_count += 1
        frame = Frame(code=code, opaque=opaque, fields=fields, body=body)
        self.parts.replies.send_frame(connection, encode_frame(frame), answers=False)

    def _next_opaque(self) -> int:
        """Return the number of a request: an int32, or no client can read it."""
        self._opaque = self._opaque % 0x7FFFFFFF + 1
        return self._opaque

    def _take_answer(self, connection: Connection, frame: Frame) -> None:
        asked = self._pop_asked(connection, frame.opaque)
        if asked is None:
            log.debug("remoting: %s answered what nobody asked", connection.peer)
            return
        self.cancel(asked.timer)
        asked.then(frame)

    def _pop_asked(self, connection: Connection, opaque: int) -> Question | None:
        of_one = self._asked.get(connection)
        asked = None if of_one is None else of_one.pop(opaque, None)
        if asked is not None:
            self._asked_count -= 1
            if not of_one:
                del self._asked[connection]
        return asked

    # -- what is called later

    def later(self, call: Callable[[], None]) -> None:
        """Call this soon in the API's thread; any thread may ask for it."""
        self._later.append(call)
        self.parts.wake()

    def soon(self, call: Callable[[], None]) -> None:
        """Call this at once if the API's lock is free, else later; any thread may ask for it.

        It is for what comes in a thread that waits for nothing else: one thread less must wake.
        """
        if not self.parts.lend(partial(self._call, call)):
            self.later(call)

    def at(self, when_ms: float, call: Callable[[], None]) -> int:
        """Call this at a monotonic time; return a ticket for `cancel`. The API's lock is held."""
        ticket = next(self._tickets)
        self._timers[ticket] = call
        heapq.heappush(self._times, (when_ms, ticket))
        if self._times[0][1] == ticket and threading.get_ident() != self._thread:
            self.parts.wake()  # the API's thread sleeps until a later time
        return ticket

    def cancel(self, ticket: int) -> None:
        """Do not make a call that `at` was asked for; nothing happens if it was made."""
        self._timers.pop(ticket, None)
        if len(self._times) > 2 * len(self._timers) + 64:
            self._times = [each for each in self._times if each[1] in self._timers]
            heapq.heapify(self._times)

    @property
    def has_due(self) -> bool:
        """Whether `run_due` has something to do now, timers apart."""
        return bool(self._later)

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until the next timer, perhaps a cancelled one; infinity without any.

        It changes nothing: the API's lock is not held.
        """
        first = self._times[:1]
        return max(0.0, first[0][0] - now_ms) if first else _NEVER

    def run_due(self, now_ms: float) -> None:
        """Make the calls that are due, RUN_MAX at most."""
        self._thread = threading.get_ident()
        for _ in range(min(len(self._later), RUN_MAX)):
            self._call(self._later.popleft())
        times = self._times
        for _ in range(RUN_MAX):
            if not times or times[0][0] > now_ms:
                break
            call = self._timers.pop(heapq.heappop(times)[1], None)
            if call is not None:
                self._call(call)
            times = self._times
        while times and times[0][1] not in self._timers:
            heapq.heappop(times)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as failure:  # that of one request; the others go on
            self.parts.failures.note("a RocketMQ request that waited", failure)

    # -- ends

    def forget_ended(self, ended: list[Connection]) -> None:
        """Forget connections that have ended; nobody waits for their answers any more."""
        for connection in ended:
            for asked in self._asked.pop(connection, {}).values():
                self._asked_count -= 1
                self.cancel(asked.timer)
                self._call(partial(asked.then, None))
            for call in self._on_ended:
                call(connection)

    def end(self) -> None:
        """Answer what waits: the node stops."""
        for call in self._on_stop:
            self._call(call)


def _name_of(code: int) -> str:
    """Return a response code's name, for the counts of refusals."""
    try:
        return Answer(code).name
    except ValueError:
        return str(code)


def signer_of(request: RemotingRequest) -> str:
    """Return the name of who has signed a request, which is known to be signed right.

    Only what may be forwarded has its AccessKey still; a connection is of one identity.
    """
    connection = request.connection
    if connection is not None and connection.proof is not None:
        return connection.proof.identity.name
    return request.frame.fields.get(ACCESS_KEY, "")
