"""Requests to nodes and their answers, in steps that never block: the clients' one engine.

An operation is a generator, called its steps. It never waits itself: it yields how many seconds to
wait at most, and receives the arrivals. `Requester.run_steps` runs steps for blocking callers;
`hastore.aio` runs them on an event loop. Each of them waits in one place only, where a call can be
cancelled or ended by `close`.

    OPEN --close()--> CLOSING --the call under way ends, if any--> CLOSED

`UnderWay` matches answers to requests and sends a request again over a new connection, for
`Requester.ask` and for whoever has several requests under way. Only a reader in bulk has a link of
its own (`bulk_link.py` says why), and a producer's core (`send_core.py`) its own order of frames.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Generator, Iterable
from typing import TypeVar

import msgspec

from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.proving import Prover
from hastore.client.connections.transport import Arrival, NoAnswer, Quiet, Transport
from hastore.client.connections.transport_factory import make_transport
from hastore.client.messages import doubt_of
from hastore.client.security import SecurityLike
from hastore.clock import Clock
from hastore.errors import (
    ClientError,
    ForbiddenError,
    NotAuthenticatedError,
    NotStoredError,
    OutcomeUnknown,
    PositionBehindError,
    ProtocolError,
    Status,
    UnreachableError,
    UsageError,
)
from hastore.protocol import api

log = logging.getLogger(__name__)

CONNECT_MS = 200.0
CLOSED_MAX = 3
# A node that is connected and silent for so long hangs, or is too busy: others are asked.
PATIENCE_S = 2.5
LATE_S = 1.0  # a master; whether there is another one is asked from then on, each ASK_S
ASK_S = 0.2
_PAUSE_S = 0.05
Wanted = TypeVar("Wanted")
Result = TypeVar("Result")
Steps = Generator[float, list[Arrival], Result]  # yields the seconds to wait at most
Answer = tuple[api.Reply, bytes]
_CHANGES = api.Commit | api.SendBack | api.SetTopic | api.DropTopic  # what `ask_master` may change
FOR_NOW = ("BUSY", "SERVICE_NOT_AVAILABLE")  # a later try may succeed
# After a failover the new master may lack what these say.
_UNCONFIRMED = (Status.TIMEOUT, Status.FLUSH_DISK_TIMEOUT, Status.FLUSH_SLAVE_TIMEOUT)


_BEHIND = (
    "Has another consumer committed under this group? Consumers of one group do not share its "
    "messages, each reads them all: give each a group of its own. To move the group back on "
    "purpose, seek before the commit"
)


class ClosedMeanwhile(ClientError):
    """The client was closed while a call was under way."""


class RequestNotKnown(ClientError):
    """A node ended the connection each time that it got the request, as one that is too old."""


class _EndedAfter(UnreachableError):
    """The master's connection has ended after it had got the request."""


class UnderWay:
    """Requests to one node that wait for their answers; each new connection gets them again."""

    def __init__(self, transport: Transport, address: str) -> None:
        self.address = address
        self.answers: dict[int, Answer] = {}  # by request number; the caller may remove them
        self.sent = False  # whether the connection that is up has got all requests
        self.ends = 0  # of connections
        self.ends_after_send = 0
        self._requests: dict[int, api.Request] = {}
        self._transport = transport
        transport.open([address])

    def send(self, request: api.Request) -> None:
        """Send a request, or keep it until there is a connection."""
        self._requests[request.rid] = request
        self.sent = self._transport.send(self.address, request)

    def note(self, arrivals: Iterable[Arrival]) -> None:
        """Keep the answers that have arrived, and send again what a new connection lacks.

        Raises NotAuthenticatedError if one end does not accept the other.
        """
        for arrival in arrivals:
            if arrival.address != self.address:
                continue
            if arrival.reply is not None:
                if self._requests.pop(arrival.reply.rid, None) is not None:
                    self.answers[arrival.reply.rid] = arrival.reply, arrival.payload
                continue
            if arrival.refused is not None:
                raise NotAuthenticatedError(f"{self.address}: {arrival.refused}")
            if arrival.up:
                self.sent = True
                for request in self._requests.values():
                    self.sent &= self._transport.send(self.address, request)
            else:
                self.ends += 1
                self.ends_after_send += self.sent
                self.sent = False


class Requester:
    """Send requests, match answers by request number; used by one thread at a time."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        clock: Clock,
        security: SecurityLike | Prover = None,
        *,
        any_group: bool = False,
        of_group: tuple[str, str] | None = None,
    ) -> None:
        """Start to connect; raises UsageError or ConfigError for wrong arguments or files.

        With `any_group` the nodes may be of several groups; `of_group` names the only one whose
        nodes are used, with its cluster.
        """
        self._clock = clock
        self._rids = itertools.count(1)
        addresses, self.transport = make_transport(addresses, clock, security)
        self._receiver: Callable[[Arrival], None] | None = None  # see `deliver_to`
        self.closing = False
        self.replies = 0  # that have come from any node
        self.cluster = ClusterView(
            addresses, self.transport.source, any_group=any_group, of_group=of_group,
            why_silent=self.transport.silence,
        )  # fmt: skip
        self.transport.open(addresses)

    def close(self) -> None:
        """Close the connections; does not wait."""
        self.closing = True
        self.transport.close(linger_s=0.0)

    def drop(self) -> None:
        """Close the connections of a dropped client."""
        self.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self.transport.abandon()

    def deliver_to(self, receiver: Callable[[Arrival], None]) -> None:
        """Call `receiver` with each arrival: it has requests under way over several calls.

        Not an argument of the constructor: `Positions` reads its queues one after the other over
        these connections, each by a Fetcher of its own.
        """
        self._receiver = receiver

    def next_rid(self) -> int:
        """Return the next request number."""
        return next(self._rids)

    def deadline(self, timeout_s: float) -> float:
        """Return the time at which `timeout_s` is over, in monotonic ms."""
        return self._clock.monotonic_ms() + timeout_s * 1000.0

    def left_s(self, deadline_ms: float) -> float:
        """Return the seconds until a deadline, 0 if it is over."""
        return max(0.0, deadline_ms - self._clock.monotonic_ms()) / 1000.0

    def run_steps(self, steps: Steps[Result]) -> Result:
        """Run steps to their end, waiting for arrivals between them.

        If the client is closed, ClosedMeanwhile is raised in the steps, which may handle it.
        """
        transport = self.transport
        try:
            wait_s = next(steps)
            while not self.closing:
                wait_s = steps.send(self.note(transport.wait(wait_s)))
            steps.throw(ClosedMeanwhile("the client was closed"))
        except StopIteration as end:
            result: Result = end.value
            return result
        raise RuntimeError("the steps yielded after the client was closed")

    def collect(self) -> list[Arrival]:
        """Return what has arrived; does not wait."""
        return self.note(self.transport.collect())

    def note(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Apply maps and lost connections to the cluster view; returns the arrivals."""
        for arrival in arrivals:
            self.replies += arrival.reply is not None
            if arrival.reply is None and arrival.up:
                self.cluster.add(arrival.address)  # the transport may have learned it elsewhere
            elif isinstance(arrival.reply, api.Map):
                self.cluster.learn(arrival.address, arrival.reply.map)
                self.transport.open(self.cluster.addresses)
            elif arrival.reply is None:
                self.cluster.lose_connection(arrival)
            if self._receiver is not None:
                self._receiver(arrival)
        return arrivals

    def ask(
        self,
        address: str,
        make: Callable[[int], api.Request],
        timeout_s: float,
        *,
        may_be_unknown: bool = False,
        of_master: bool = False,
    ) -> Steps[Answer]:
        """Ask one node; raises UnreachableError if it does not answer in time.

        A request whose connection ends is sent again over the next one. With `of_master` the node
        is asked as the master: then UnreachableError is raised instead, and also as soon as another
        node is the master, which is asked for while the answer is late. Raises
        NotAuthenticatedError if the node does not accept this client.

        With `may_be_unknown`, raises RequestNotKnown if the connection ends CLOSED_MAX times after
        the request: a node does so with a request that it does not know. One that is started anew
        does it once.
        """
        deadline = self.deadline(timeout_s)
        ask_ms = self.deadline(LATE_S)
        request = make(self.next_rid())
        _check_request(request)
        under_way = UnderWay(self.transport, address)
        under_way.send(request)
        while True:
            left = self.left_s(deadline)
            under_way.note((yield min(left, self.left_s(ask_ms)) if of_master else left))
            if request.rid in under_way.answers:
                return under_way.answers[request.rid]
            if of_master and under_way.ends:
                kind = _EndedAfter if under_way.ends_after_send else UnreachableError
                raise kind(f"the connection to {address} has ended")
            if of_master and self.cluster.master not in (address, None):
                raise UnreachableError(f"{address} did not answer, and is not the master any more")
            if of_master and not self.left_s(ask_ms):
                self._ask_for_master()
                ask_ms = self.deadline(ASK_S)
            if may_be_unknown and under_way.ends_after_send >= CLOSED_MAX:
                raise _not_known(address)
            if left <= 0.0:
                state = "did not answer" if under_way.sent else "is not reachable"
                raise UnreachableError(f"{address} {state} within {timeout_s:.3g} s")

    def _ask_for_master(self) -> None:
        for address in self.cluster.addresses:
            self.transport.send(address, api.AskMap(self.next_rid()))

    def ask_all(
        self,
        make: Callable[[int], api.Request],
        timeout_s: float,
        patience_s: float | None = None,
        *,
        wait_for_starts: bool = True,
    ) -> Steps[dict[str, api.Reply]]:
        """Ask every known address; return the replies by address.

        Raises NotAuthenticatedError as soon as no node accepts this client. Ends early once every
        connected node has answered. For addresses without a connection the
        call waits CONNECT_MS; if no node has replied by then, it waits on, at most `timeout_s`. If
        one has, the silent ones are waited for at most `patience_s` (None: `timeout_s`). Without
        `wait_for_starts` the call ends once no address can be expected to answer.
        """
        deadline = self.deadline(timeout_s)
        first = deadline if patience_s is None else self.deadline(min(timeout_s, patience_s))
        asked: dict[str, int] = {}
        replies: dict[str, api.Reply] = {}
        grace = self.deadline(min(timeout_s, CONNECT_MS / 1000.0))
        while True:
            for address in self.cluster.addresses:
                if address not in asked and self.transport.is_up(address):
                    rid = self.next_rid()
                    if self.transport.send(address, make(rid)):
                        asked[address] = rid
            if not replies and (refused := self.cluster.take_refused()) is not None:
                raise NotAuthenticatedError(refused)
            if not wait_for_starts and not replies and self._all_silent():
                return replies
            left = self.left_s(first if replies else deadline)
            waiting = [address for address in asked if address not in replies]
            missing = len(asked) < len(self.cluster.addresses)
            if left <= 0.0 or (not waiting and not (missing and self.left_s(grace))):
                if replies or left <= 0.0:
                    return replies
            pause = self.left_s(grace) if replies and not waiting else left
            for arrival in (yield min(left, pause) if pause else left):
                reply = arrival.reply
                if reply is not None and asked.get(arrival.address) == reply.rid:
                    replies[arrival.address] = reply
                elif reply is None and not arrival.up:
                    asked.pop(arrival.address, None)

    def ask_each(
        self, make: Callable[[int], api.Request], timeout_s: float
    ) -> Steps[dict[str, api.Reply | NoAnswer]]:
        """Ask every known address; return by address its reply, or why there is none.

        Waits for each until it has answered, is known not to, or `timeout_s` is over: a slow node
        is not a silent one.
        """
        deadline = self.deadline(timeout_s)
        asked: dict[str, int] = {}
        replies: dict[str, api.Reply] = {}
        while True:
            silent: dict[str, NoAnswer] = {}
            for address in self.cluster.addresses:
                silence = self.transport.silence(address)
                if silence is not None:
                    asked.pop(address, None)
                    silent[address] = silence
                elif address not in asked and address not in replies:
                    rid = self.next_rid()
                    if self.transport.send(address, make(rid)):
                        asked[address] = rid
            left = self.left_s(deadline)
            open_ends = [
                address
                for address in self.cluster.addresses
                if address not in replies
                and (address not in silent or not silent[address].kind.is_final)
            ]
            if not open_ends or not left:
                late = NoAnswer(Quiet.TIMED_OUT, "it is connected and does not answer")
                found = {one: silent.get(one, late) for one in self.cluster.addresses}
                return {**found, **replies}
            for arrival in (yield left):
                reply = arrival.reply
                if reply is not None and asked.get(arrival.address) == reply.rid:
                    replies[arrival.address] = reply

    def _look_anew(self) -> None:
        """Try each address again that was silent for good: an earlier call has found that."""
        for address in self.cluster.addresses:
            silence = self.transport.silence(address)
            if silence is not None and silence.kind.is_final:
                self.transport.reopen(address)

    def _all_silent(self) -> bool:
        """Whether addresses are known, and each is silent for a reason that is likely to stay."""
        whys = [self.transport.silence(address) for address in self.cluster.addresses]
        return bool(whys) and all(why is not None and why.kind.is_final for why in whys)

    def survey_in_order(self, deadline: float) -> Steps[list[str]]:
        """Return the nodes to ask: the master, then those with the greatest readable offsets.

        Raises UnreachableError if no node answers.
        """
        answered = yield from self.survey(self.left_s(deadline))
        maps = self.cluster.maps  # also of nodes that have answered before, and hang now

        def rank(address: str) -> tuple[bool, bool, int]:
            is_master = address == self.cluster.master
            return address in answered, is_master, maps[address].readable_offset

        return sorted(maps, key=rank, reverse=True)

    def survey(
        self, timeout_s: float, *, wait_for_starts: bool = True, patience_s: float = PATIENCE_S
    ) -> Steps[Collection[str]]:
        """Get the maps of all nodes that answer, and return these nodes' addresses.

        Raises UnreachableError if none answers. A node that is connected and silent takes at most
        `patience_s`, and half of the time, if another one answers: the caller needs the rest for
        its question. Without `wait_for_starts` it is raised at once where nobody listens; otherwise
        nodes that are about to start have until `timeout_s`.
        """
        deadline = self.deadline(timeout_s)
        if not wait_for_starts:
            self._look_anew()
        while True:
            left = self.left_s(deadline)
            replies = yield from self.ask_all(
                api.AskMap, left, min(left / 2.0, patience_s), wait_for_starts=wait_for_starts
            )
            if replies and self.cluster.maps:
                return replies.keys()
            refused = self.cluster.refused  # by all, though they answer: nodes of another group
            if refused is not None:
                raise NotAuthenticatedError(refused)
            gone = not wait_for_starts and self._all_silent()
            if gone or not self.left_s(deadline):
                if self.cluster.refusals.keys() - self.cluster.strangers:
                    raise NotAuthenticatedError(self.cluster.refusal_text)
                within = "" if gone else f"within {timeout_s:.3g} s"
                raise UnreachableError(self.cluster.silence(within))
            yield from self.pause(min(self.left_s(deadline), _PAUSE_S))

    def ask_master(self, make: Callable[[int], api.Request], timeout_s: float) -> Steps[Answer]:
        """Ask the master; look for it and repeat the request until `timeout_s` is over.

        When the time is over, returns the refusal if the last attempt was refused; otherwise raises
        UnreachableError. An attempt that may have been done without a reply, or whose reply was
        TIMEOUT or that it is stored but not confirmed, is never reported as refused: if a later one
        fails for good, OutcomeUnknown is raised. What a master has stored but not confirmed is
        TIMEOUT once another one has replaced it. Use it only for requests that may be repeated.
        A SendBack that is stored is not repeated: consumers would get another copy. Raises
        RequestNotKnown as `ask` does, for a node that does not know SendBack.
        """
        deadline = self.deadline(timeout_s)
        asked = make(0)
        is_change, is_copy = isinstance(asked, _CHANGES), isinstance(asked, api.SendBack)
        unconfirmed = () if is_copy else _UNCONFIRMED
        refusal: Answer | None = None  # of the last attempt
        timeout: tuple[api.PutDone, bytes] | None = None  # of one that may have been done
        lost = False  # the connection ended during an attempt, which may have been done
        ends = dict[str, int]()  # how often that of a master did
        while True:
            left = self.left_s(deadline)
            master = self.cluster.master
            try:
                if left <= 0.0 and (master is None or refusal is not None):
                    raise UnreachableError(f"no writable master: {self.cluster.reason()}")
                if master is not None:
                    refusal = None
                    reply, payload = yield from self.ask(master, make, left, of_master=True)
                    if isinstance(reply, api.PutDone) and reply.status in unconfirmed:
                        timeout = reply, payload
                    elif isinstance(reply, api.PutDone) and reply.status.is_refusal:
                        refusal = reply, payload
                    elif not isinstance(reply, api.Failed) or not is_change:
                        return reply, payload
                    elif not lost and timeout is None:  # nothing was done
                        return reply, payload
                    elif reply.status in FOR_NOW:
                        refusal = reply, payload
                    else:
                        raise OutcomeUnknown(
                            "an attempt has no known outcome, it may be stored; "
                            f"last: {reply.status}: {reply.reason}"
                        )
                    self.cluster.lose()
                    yield from self.pause(min(left, _PAUSE_S))
                else:
                    yield from self.survey(left, patience_s=LATE_S)
                    if self.cluster.master is None:
                        yield from self.pause(min(left, _PAUSE_S))
            except UnreachableError as failure:
                if master is not None and is_copy and isinstance(failure, _EndedAfter):
                    ends[master] = ends.get(master, 0) + 1
                    if ends[master] >= CLOSED_MAX:
                        raise _not_known(master) from failure
                if master is not None and self.left_s(deadline):
                    lost = True
                    if self.cluster.master == master:
                        self.cluster.lose()
                    continue
                if timeout is not None:
                    return _unless_replaced(timeout[0], self.cluster.epoch), timeout[1]
                if refusal is not None and not lost:
                    return refusal
                if master is None and self.cluster.maps:  # a later survey timed out
                    why = self.cluster.reason()
                    raise UnreachableError(f"no writable master: {why}") from failure
                raise

    def ask_any(
        self, addresses: Iterable[str], make: Callable[[int], api.Request], timeout_s: float
    ) -> Steps[Answer]:
        """Ask one node after another until one answers with a reply other than Failed.

        What one has refused to look for, another cannot say that there is not: it may lag. All
        together have `timeout_s`; a node that is not the last gets half of what is left.
        """
        deadline = self.deadline(timeout_s)
        failure: ClientError | None = None
        refusal: ClientError | None = None
        for address, share_s in self.shares(addresses, deadline):
            try:
                reply, payload = yield from self.ask(address, make, share_s)
            except (UnreachableError, NotAuthenticatedError) as unreachable:
                failure = unreachable
                continue
            if isinstance(reply, api.Failed):
                refusal = error_of(reply)
            elif refusal is None or not isinstance(reply, api.Found) or reply.count:
                return reply, payload
        raise refusal or failure or UnreachableError(self.cluster.silence())

    def ask_in_turn(
        self, addresses: Iterable[str], make: Callable[[int], api.Request], deadline_ms: float
    ) -> Steps[Answer]:
        """Ask one node after another until one answers, Failed or not.

        A node that is not the last gets half of the time that is left until the deadline.
        """
        failure: UnreachableError | None = None
        for address, share_s in self.shares(addresses, deadline_ms):
            try:
                return (yield from self.ask(address, make, share_s))
            except UnreachableError as unreachable:
                failure = unreachable
        raise failure or UnreachableError(self.cluster.silence())

    def shares(
        self, addresses: Iterable[str], deadline_ms: float
    ) -> Generator[tuple[str, float], None, None]:
        """Yield each address with the seconds that it may take, as of now.

        One that is not the last gets half of what is left until the deadline.
        """
        order = list(addresses)
        for address in order:
            left_s = self.left_s(deadline_ms)
            yield address, left_s if address == order[-1] else left_s / 2.0

    def pause(self, timeout_s: float) -> Steps[None]:
        """Wait for the whole time, even if something arrives."""
        deadline = self.deadline(timeout_s)
        while left := self.left_s(deadline):
            yield left


def _not_known(address: str) -> RequestNotKnown:
    return RequestNotKnown(
        f"{address} closed the connection {CLOSED_MAX} times at this "
        "question: its hastore is too old to know it; upgrade the nodes of the group"
    )


SILENT_MS = 1_000.0
SILENT_ROUNDS = 4


class Silence:
    """Warn once when no node answers any more, and say once when one does again.

    It is for a client that goes on asking and raises nothing meanwhile. What counts is how often it
    looked in vain, at most once in SILENT_MS: time in which nobody asks is no silence.
    """

    def __init__(self, requester: Requester, what: str) -> None:
        """`what` names the client in the log."""
        self._requester = requester
        self._what = what
        self._replies = 0
        self._rounds = 0
        self._next_ms = 0.0
        self._told_ms: float | None = None  # when the warning was logged

    def look(self) -> None:
        """Look whether an answer has come since the last time."""
        now = self._requester.deadline(0.0)
        if self._requester.replies != self._replies:
            self._replies = self._requester.replies
            self._rounds = 0
            self._next_ms = now + SILENT_MS
            if self._told_ms is not None:
                silent_s = (now - self._told_ms) / 1000.0
                self._told_ms = None
                log.warning("%s: nodes answer again, %.0f s later", self._what, silent_s)
        elif now >= self._next_ms:
            self._next_ms = now + SILENT_MS
            self._rounds += 1
            if self._rounds >= SILENT_ROUNDS and self._told_ms is None:
                self._told_ms = now
                why = self._requester.cluster.silence()
                log.warning("%s: %s; it goes on asking, and says when one answers", self._what, why)


def _check_request(request: api.Request) -> None:
    """Raise UsageError for a malformed request, for which a node would close the connection."""
    try:
        api.decode_request(api.encode(request))
    except (ProtocolError, UnicodeEncodeError) as failure:
        raise UsageError(f"the arguments give a malformed request: {failure}") from failure


def _unless_replaced(done: api.PutDone, epoch: int) -> api.PutDone:
    """Return an answer; TIMEOUT if it is that of a master which that of `epoch` has replaced."""
    if not done.status.is_stored or done.epoch >= epoch:
        return done
    return msgspec.structs.replace(done, status=Status.TIMEOUT, reason=doubt_of(done.epoch))


def error_of(reply: api.Failed) -> ClientError:
    """Return the exception for a refused request."""
    text = f"{reply.status}: {reply.reason}"
    if reply.status in FOR_NOW:
        return NotStoredError(text, reply.status)
    if reply.status == api.Status.FORBIDDEN:
        return ForbiddenError(text)
    if reply.status == api.Status.UNAUTHENTICATED:
        return NotAuthenticatedError(text)
    if reply.status == api.POSITION_BEHIND:
        return PositionBehindError(f"{reply.reason}; nothing was kept. {_BEHIND}")
    return ClientError(text)


def expect(kind: type[Wanted], reply: api.Reply) -> Wanted:
    """Return a reply that is of the expected type; raises ClientError for any other."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, api.Failed):
        raise error_of(reply)
    raise ClientError(f"the node answered {type(reply).__name__}, not {kind.__name__}")
