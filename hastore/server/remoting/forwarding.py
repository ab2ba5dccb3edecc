"""Requests that only the master can carry out, on any other node: forwarded, or held until there is
a master; and on the master, those that other nodes forward.

    client -> node:    takes -> hold -> send -> answer, as the master gave it
                                ^         |
                                +- refused: certainly nothing was done, so it is sent again
    node   -> master:  receive -> Door.handle -> reply, undone or unknown -> node

What a client is told is what happened. A request that was sent, and then neither answered nor
refused, has an unknown outcome: its connection is ended, which is all that a client of RocketMQ
understands; most of them then send again. The connection's other requests that wait get their
outcomes first: clients try only a few times, and each connection that ends costs them a try. A
request is sent again from here only after a refusal, or if its bytes never left this process. One
that no master has taken in time is refused, with a code that never means "stored". A request is
forwarded once: the node that receives it carries it out, or refuses it.

Everything here runs with the API's lock, mostly in the API's thread; what the links' threads tell
comes by `Door.soon` and `Door.later`. The number and the bytes of requests that wait here are
bounded as those of puts are.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import socket
from bisect import insort, insort_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

from hastore.bounded_log import BoundedLines
from hastore.clock import Clock
from hastore.config.model import Config
from hastore.errors import ProtocolError
from hastore.ha.hello.forward_link import (
    NOT_TAKEN,
    STOPS,
    ForwardedRequest,
    ForwardLink,
    ForwardPort,
)
from hastore.ha.hello.peer import Call
from hastore.protocol.forward_link import ClientRequest, Kind, LinkFrame, reason_of
from hastore.protocol.hello import Forwarding as Limits
from hastore.protocol.remoting import (
    MAX_HEADER_BYTES,
    Answer,
    Code,
    Frame,
    decode_frame,
    encode_frame,
    encode_front,
)
from hastore.server.api.connections import Connection
from hastore.server.remoting.door import Door, RemotingRequest
from hastore.service import OnFailure

log = logging.getLogger(__name__)

FORWARDED = frozenset(
    {
        # messages
        *(Code.SEND_MESSAGE, Code.SEND_MESSAGE_V2, Code.SEND_BATCH_MESSAGE),
        *(Code.CONSUMER_SEND_MSG_BACK, Code.END_TRANSACTION),
        # positions, and what one node must decide
        *(Code.QUERY_CONSUMER_OFFSET, Code.UPDATE_CONSUMER_OFFSET),
        *(Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ),
        *(Code.INVOKE_BROKER_TO_RESET_OFFSET, Code.GET_CONSUME_STATS),
        # tables in the log
        *(Code.UPDATE_AND_CREATE_TOPIC, Code.UPDATE_AND_CREATE_TOPIC_LIST),
        *(Code.DELETE_TOPIC_IN_BROKER, Code.DELETE_SUBSCRIPTIONGROUP),
        *(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST),
    }
)
# The master knows the latest; while there is none, a node answers with what it knows.
SERVED_ALONE = frozenset({Code.QUERY_CONSUMER_OFFSET})
# Asked by nodes, for themselves; these change nothing.
ASKED = frozenset({Code.GET_BROKER_CLUSTER_INFO, Code.GET_CONSUMER_LIST_BY_GROUP})
TICK_MS = 10.0  # how often a master is looked for while requests wait here or there
SILENT_MS = 750.0  # a master that has said nothing for so long may hang: nothing more is sent to it
TRIES_MAX = 20  # of a request that the master refuses for now
FRESH_MS = 5_000.0  # a lack of slaves that nobody has met for so long is over
_BEFORE_HEADER = 8  # bytes of a frame: its size, kind and length of its header
_NOBODY = "127.0.0.1", 0  # the address of a client that is this node
# So long, once there is a master, a connection that ends waits for a moment in which its client
# waits for nothing else: the other nodes' connections end at the same time, and a client tries
# again at one after the other.
QUIET_MS = 500.0
# What a master says of a request that it will never take: it is answered at once, not sent again.
# These are words, not a kind of the link's frames, since nodes of earlier versions say them, too.
UNREADABLE = "it cannot be read: "
NOT_FORWARDED = " is not one that is forwarded"
LEFT_MS = 500.0  # so long a former master may still answer what was sent to it


@dataclass(slots=True)
class ForwardCounts:
    """What became of requests that only a master carries out, since the node's start."""

    forwarded: int = 0  # sent to a master; one that refuses for now gets a request again
    received: int = 0  # from other nodes
    held: int = 0  # requests that had to wait for a master, or at one for its slaves
    refused: int = 0  # nothing was done: nobody has taken them in time, or too many waited
    unknown: int = 0  # forwarded ones whose outcome is not known
    waiting: Callable[[], int] = lambda: 0  # how many of clients have no outcome now

    def status(self) -> dict[str, int]:
        """Return the object in the node's status. Any thread may ask."""
        return {
            "waiting": self.waiting(),
            "forwarded": self.forwarded,
            "received": self.received,
            "held": self.held,
            "refused": self.refused,
            "unknown": self.unknown,
        }


class Network(NamedTuple):
    """How a node reaches the others: its port for forwarded requests, and how to call a node."""

    port: ForwardPort
    dial: Callable[[int, float], Call]
    on_refused: Callable[[str, str], None]
    on_failure: OnFailure
    counts: ForwardCounts


@dataclass(slots=True, eq=False)
class Waiting:
    """A client's request that waits for a master, or for the master's outcome."""

    request: RemotingRequest
    data: bytes  # its frame
    until_ms: float  # when it is refused, unless it was sent
    was_held: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any more."""
        connection = self.request.connection
        return self.request.is_answered or connection is None or connection.ended


@dataclass(slots=True, eq=False)
class Asked(Waiting):
    """A question of this node itself; nobody minds if it has no answer."""

    then: Callable[[Frame | None], None] = lambda _answer: None


@dataclass(slots=True, eq=False)
class Line:
    """The link to one node, and what was sent on it."""

    link: ForwardLink
    limits: Limits | None = None  # None while it is not open
    sent: dict[int, Waiting] = field(default_factory=dict)  # without an outcome, by number
    sent_bytes: int = 0
    probe_ms: float = 0.0  # after a refusal: when one request may be sent, to see
    probing: bool = False
    problem: str | None = None  # why it is not open
    lasting: bool = False  # an operator must do something about it
    carries: bool = False  # requests of clients: it ends once its node is not the master any more

    def has_room(self, size: int, now_ms: float) -> bool:
        """Whether a request may be sent now."""
        limits = self.limits
        if limits is None or self.link.silent_ms > SILENT_MS or self.probe_ms > now_ms:
            return False
        if self.probing and self.sent:
            return False
        count = len(self.sent)
        return count < limits.requests and (not count or self.sent_bytes + size <= limits.size)

    def pop(self, number: int) -> Waiting | None:
        """Forget a request that has its outcome; None if it has one already."""
        waiting = self.sent.pop(number, None)
        if waiting is not None:
            self.sent_bytes -= len(waiting.data)
        return waiting


@dataclass(slots=True)
class Parting:
    """A connection that ends: of one of its requests it is not known what was done."""

    reason: str
    since_ms: float  # there has been a master
    until_ms: float  # it ends then at the latest
    others: list[RemotingRequest] | None = None  # get their outcomes first; None: not looked for


class Forwarding:
    """Both ends, of one node; see the module's text."""

    def __init__(self, door: Door, config: Config, network: Network) -> None:
        """Prepare; requests that other nodes forward are taken from now on."""
        self._door = door
        self._backend = door.parts.backend
        self._clock: Clock = door.parts.clock
        self._own = config.node
        self._hold_ms = config.remoting.hold_timeout_ms
        self._held_max = config.api.max_pending_puts
        self._held_bytes_max = config.api.max_pending_bytes
        self._network = network
        self._counts = network.counts
        network.counts.waiting = lambda: self.waiting
        self._held: deque[Waiting] = deque()  # who must be refused first, comes first
        self._held_bytes = 0
        self._lacking: deque[RemotingRequest] = deque()  # for want of slaves; who came first
        self._places = itertools.count()
        self._lacking_bytes = 0  # of their bodies
        self._lacks_ms: float | None = None  # since when slaves are missing
        self._lacked_ms = 0.0  # when that was last met
        self._lines: dict[int, Line] = {}  # by node
        self._parting: dict[Connection, Parting] = {}
        self._last = 0  # number of the last request that was sent
        self._ticking = False
        self._stopped = False
        self._warn = BoundedLines(log).write
        door.forwarding = self
        door.on_stop(self.end)
        network.port.refusal = NOT_TAKEN
        if door.is_open:
            network.port.handler = self._on_forwarded

    @property
    def waiting(self) -> int:
        """How many requests of clients have no outcome yet. Any thread may ask."""
        sent = sum(len(line.sent) for line in list(self._lines.values()))
        return len(self._held) + len(self._lacking) + sent

    @property
    def is_master(self) -> bool:
        """Whether this node takes puts, as far as it knows."""
        return self._backend.master_node() == self._own

    # -- requests of clients

    def takes(self, request: RemotingRequest) -> bool:
        """Take a request that another node must carry out; False if this one does."""
        if request.frame.code not in FORWARDED or not self._door.is_open:
            return False
        master = self._backend.master_node()
        if master == self._own and not self._held:
            return False
        if master is None and request.frame.code in SERVED_ALONE:
            return False
        if request.is_forwarded:
            if master == self._own:
                return False
            who = "no master is known" if master is None else f"node {master} is"
            return self._refuse_undone(request, f"node {self._own} is not the master: {who}")
        self._hold(request, master)
        return True

    def again(self, request: RemotingRequest, _reason: str) -> bool:
        """See to a request of which nothing was done for now; False if it must be refused.

        Another node may have become the master. Or this master lacks slaves that confirm, as right
        after a promotion: then the request waits for them a moment.
        """
        if request.frame.code not in FORWARDED or not self._door.is_open:
            return False
        if self._stopped:
            return request.is_forwarded and self._refuse_undone(request, STOPS)
        if not self.is_master:
            return self.takes(request)
        if self._backend.ends and request.is_forwarded:
            return self._refuse_undone(request, STOPS)
        if self._backend.writable_reason() is not None:
            return False
        return self._wait_for_slaves(request, self._clock.monotonic_ms())

    def _wait_for_slaves(self, request: RemotingRequest, now: float) -> bool:
        """Let this master handle a request again soon; False if it has waited for long enough."""
        size = len(request.frame.body)
        if (
            self.waiting >= self._held_max
            or self._held_bytes + self._lacking_bytes + size > self._held_bytes_max
        ):
            self._counts.refused += 1
            return False
        if self._backend.can_confirm(False) is None:
            self._lacks_ms = None
        elif self._lacks_ms is None or now - self._lacked_ms > FRESH_MS:
            self._lacks_ms = now
        self._lacked_ms = now
        request.tries += 1
        late = request.came_ms + self._hold_ms <= now or request.tries > TRIES_MAX
        if late or (self._lacks_ms is not None and now - self._lacks_ms > self._hold_ms):
            self._counts.refused += 1
            return False
        if request.tries == 1:
            self._counts.held += 1
            request.place = next(self._places)
        insort(self._lacking, request, key=_place)
        self._lacking_bytes += size
        self._tick_soon(now)
        return True

    def _try_again(self, now_ms: float) -> None:
        """Handle again what waits, once there are enough slaves and a broker's topics are known.

        Or once its time is over.
        """
        lacking = self._lacking
        if lacking:
            self._find_others()
        until_ms = now_ms - self._hold_ms
        lacks = self._backend.can_confirm(False) is not None or self._backend.topics_wait()
        if self.is_master and lacks:
            while lacking and lacking[0].came_ms <= until_ms:
                self._handle_again(lacking.popleft())
        else:
            while lacking:
                self._handle_again(lacking.popleft())
        if lacking:
            self._tick_soon(now_ms)

    def _handle_again(self, request: RemotingRequest) -> None:
        """Handle a request that waited for slaves, unless its client has gone meanwhile."""
        self._lacking_bytes -= len(request.frame.body)

        def handle() -> None:
            if request.connection is None or not request.connection.ended:
                self._door.handle(request)

        self._door.later(handle)

    def _hold(self, request: RemotingRequest, master: int | None) -> None:
        """Send a request to the master, or let it wait until that may be done."""
        now = self._clock.monotonic_ms()
        try:
            data = _encoded(request.frame)
        except ProtocolError as failure:
            self._counts.refused += 1
            request.refuse(Answer.MESSAGE_ILLEGAL, f"it cannot be forwarded: {failure}")
            return
        count = len(self._held) + len(self._lacking)
        size = self._held_bytes + self._lacking_bytes + len(data)
        for line in self._lines.values():
            count += len(line.sent)
            size += line.sent_bytes
        if count >= self._held_max or size > self._held_bytes_max:
            self._counts.refused += 1
            text = f"{count} requests wait for the master"
            request.refuse(
                Answer.SYSTEM_BUSY, f"{text} (api.max_pending_puts, api.max_pending_bytes)"
            )
            return
        waiting = Waiting(request, data, request.came_ms + self._hold_ms, was_held=bool(self._held))
        if not self._held and master is not None and master != self._own:
            line = self._carrier(master, now)
            if not waiting.is_over and line.has_room(len(data), now):
                if self._send(line, waiting, now):
                    return
        insort(self._held, waiting, key=_until_ms)
        self._held_bytes += len(data)
        self._counts.held += waiting.was_held
        self._flush(now)
        if self._held and self._held[0] is waiting:
            self._note_held(waiting)

    def _carrier(self, master: int, now_ms: float) -> Line:
        """Return the link to the master, for requests of clients."""
        line = self._line_to(master, now_ms)
        line.carries = True
        line.link.want()
        return line

    def _flush(self, now_ms: float) -> None:
        """Send what is held, as far as there is a master, and it takes requests."""
        held = self._held
        if held:
            master = self._backend.master_node()
            if master == self._own:
                self._carry_out_here()
            elif master is not None:
                self._send_to(self._carrier(master, now_ms), now_ms)
        if held:
            self._tick_soon(now_ms)

    def _carry_out_here(self) -> None:
        """Handle what is held: this node has become the master."""
        self._find_others()
        held, self._held = self._held, deque()
        self._held_bytes = 0
        for waiting in held:
            if not waiting.is_over:
                self._door.later(partial(self._door.handle_here, waiting.request))

    def _send_to(self, line: Line, now_ms: float) -> None:
        held = self._held
        while held and (held[0].is_over or line.has_room(len(held[0].data), now_ms)):
            waiting = held.popleft()
            self._held_bytes -= len(waiting.data)
            if not waiting.is_over and not self._send(line, waiting, now_ms):
                self._hold_again([waiting])
                return

    def _send(self, line: Line, waiting: Waiting, now_ms: float) -> bool:
        """Send a request that is held no more; False if the link takes none now."""
        self._last = number = self._last + 1
        line.sent[number] = waiting
        line.sent_bytes += len(waiting.data)
        request = waiting.request
        host, port = request.address
        age_ms = int(now_ms - request.came_ms)
        if not line.link.send(number, ClientRequest(_packed(host), port, waiting.data, age_ms)):
            line.pop(number)
            line.limits = None
            return False
        self._counts.forwarded += 1
        self._tick_soon(now_ms)
        return True

    def _hold_again(self, undone: Iterable[Waiting]) -> None:
        """Hold requests again, before others of their age: certainly nothing of them was done."""
        held = self._held
        for waiting in reversed(list(undone)):
            if waiting.is_over:
                continue
            self._held_bytes += len(waiting.data)
            self._note_held(waiting)
            if held and held[0].until_ms < waiting.until_ms:
                insort_left(held, waiting, key=_until_ms)
            else:
                held.appendleft(waiting)

    def _note_held(self, waiting: Waiting) -> None:
        if not waiting.was_held:
            waiting.was_held = True
            self._counts.held += 1

    def _tick_soon(self, now_ms: float) -> None:
        if not self._ticking and not self._stopped:
            self._ticking = True
            self._door.at(now_ms + TICK_MS, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        now = self._clock.monotonic_ms()
        held, in_vain = self._held, self._in_vain()
        while held and (held[0].is_over or held[0].until_ms <= now or in_vain):
            waiting = held.popleft()
            self._held_bytes -= len(waiting.data)
            if not waiting.is_over:
                self._counts.refused += 1
                waiting.request.refuse(Answer.SERVICE_NOT_AVAILABLE, self._why())
        self._flush(now)
        self._try_again(now)
        self._watch(now)
        self._part()

    def _watch(self, now_ms: float) -> None:
        """Leave the links to former masters, on which requests have no outcome yet."""
        master = self._backend.master_node()
        for node, line in self._lines.items():
            if line.sent:
                self._tick_soon(now_ms)
                if master not in (None, node):
                    self._leave(line, now_ms)

    def _in_vain(self) -> bool:
        """Whether waiting helps nobody: the master takes no forwarded requests."""
        line = self._lines.get(self._backend.master_node() or 0)
        return line is not None and line.lasting

    def _why(self) -> str:
        """Return why requests were not carried out; nothing of them was done."""
        master = self._backend.master_node()
        line = self._lines.get(master or 0)
        why = "no master is known" if master is None else f"node {master} is the master"
        if line is not None and line.problem is not None:
            why = line.problem
        elif line is not None and line.limits is not None:
            why += ", and takes no more requests now"
        return f"nothing was done, the request waited for a master: {why}"

    def ask(
        self, frame: Frame, then: Callable[[Frame | None], None], node: int | None = None
    ) -> bool:
        """Send the master, or another node, a question of this one; False if it cannot be sent now.

        `then` gets the answer, or None if there will be none.
        """
        asked, now = node or self._backend.master_node(), self._clock.monotonic_ms()
        if self._stopped or asked is None or asked == self._own:
            return False
        line, data = self._line_to(asked, now), encode_frame(frame)
        line.link.want()
        if line.probing or not line.has_room(len(data), now):
            return False
        request = RemotingRequest(frame, now, None, _NOBODY, lambda _request, _answer: None)
        self._last += 1
        line.sent[self._last] = Asked(request, data, now + self._hold_ms, then=then)
        line.sent_bytes += len(data)
        if line.link.send(self._last, ClientRequest(_packed(_NOBODY[0]), _NOBODY[1], data, 0)):
            return True
        line.pop(self._last)
        line.limits = None
        return False

    # -- connections with an unknown outcome

    def end_soon(self, request: RemotingRequest, reason: str) -> None:
        """End the connection of a request that is left open, once its others have outcomes."""
        connection = request.connection
        if connection is None or connection in self._parting:
            return
        if not self._parting:
            self._door.later(self._part)  # of all whose link has broken, with one look
        now = self._clock.monotonic_ms()
        self._parting[connection] = Parting(reason, now, request.came_ms + self._hold_ms)

    def _find_others(self) -> None:
        """Note what waits beside unknown outcomes, before it is handled here or ends."""
        parting = self._parting
        if all(one.others is not None for one in parting.values()):
            return
        others: dict[Connection, list[RemotingRequest]] = {}
        for request in self._unanswered():
            if request.connection in parting:
                others.setdefault(request.connection, []).append(request)
        for connection, one in parting.items():
            if one.others is None:
                one.others = others.get(connection, [])

    def _part(self) -> None:
        """End the connections that are due."""
        parting = self._parting
        if not parting:
            return
        self._find_others()
        now, has_master = self._clock.monotonic_ms(), self._has_master()
        asking = {request.connection for request in self._unanswered()}
        for connection, one in list(parting.items()):
            if not has_master:
                one.since_ms = now
            if connection.ended:
                del parting[connection]
            elif one.until_ms <= now or (
                has_master  # else its client would try again in vain, at one node after the other
                and all(request.is_answered for request in one.others or ())
                and (
                    one.since_ms + QUIET_MS <= now
                    or not (connection in asking or _has_input(connection))
                )
            ):
                del parting[connection]
                self._door.parts.replies.flush_one(connection)  # the others' answers
                self._door.parts.end(connection, one.reason)
        if parting:
            self._tick_soon(now)

    def _has_master(self) -> bool:
        """Whether requests are carried out now, here or at the other end of a link."""
        master = self._backend.master_node()
        if master is None or master == self._own:
            return master is not None
        line = self._line_to(master, self._clock.monotonic_ms())
        line.link.want()
        return line.limits is not None or line.lasting

    def _unanswered(self) -> Iterator[RemotingRequest]:
        """Return the requests that wait here for a master or its outcome, or for slaves."""
        for waiting in self._held:
            yield waiting.request
        yield from self._lacking
        for line in self._lines.values():
            for waiting in line.sent.values():
                yield waiting.request

    # -- links

    def _line_to(self, node: int, now_ms: float) -> Line:
        master = self._backend.master_node()
        for other, former in self._lines.items():  # a question to another node leaves the master's
            if master is not None and other not in (node, master):
                self._leave(former, now_ms)
        line = self._lines.get(node)
        if line is not None and not line.link.stopping.is_set():
            return line
        if line is not None:
            self._settle(line, "the link has ended", frozenset())
        network = self._network
        link = ForwardLink(
            node, network.dial, self, self._clock,
            on_refused=network.on_refused, on_failure=network.on_failure,
        )  # fmt: skip
        self._lines[node] = line = Line(link)
        link.start()
        return line

    def _leave(self, line: Line, now_ms: float) -> None:
        """End the link to a former master soon: it may still answer."""
        if not line.carries or (line.probing and line.probe_ms == float("inf")):
            return
        line.probing, line.probe_ms = True, float("inf")  # nothing more is sent on it
        wait_ms = LEFT_MS if line.sent else 0.0
        node = line.link.node
        close = partial(line.link.close, f"node {node} is not the master any more")
        self._door.at(now_ms + wait_ms, close)

    def on_open(self, link: ForwardLink, limits: Limits) -> None:
        """Note that requests may be sent; a link's thread calls it."""
        self._door.later(partial(self._opened, link, limits))

    def on_outcomes(self, link: ForwardLink, frames: list[LinkFrame]) -> None:
        """Take outcomes; a link's thread calls it."""
        self._door.soon(partial(self._outcomes, link, frames))

    def on_close(self, link: ForwardLink, reason: str, unsent: list[int]) -> None:
        """Note the end of an open link; any thread calls it."""
        self._door.later(partial(self._closed, link, reason, frozenset(unsent)))

    def on_problem(self, link: ForwardLink, reason: str, *, lasting: bool) -> None:
        """Note why a call was in vain; a link's thread calls it."""
        self._door.later(partial(self._failed, link, reason, lasting))

    def _line_of(self, link: ForwardLink) -> Line | None:
        line = self._lines.get(link.node)
        return line if line is not None and line.link is link else None

    def _opened(self, link: ForwardLink, limits: Limits) -> None:
        line = self._line_of(link)
        if line is not None:
            line.limits, line.problem, line.lasting = limits, None, False
            self._flush(self._clock.monotonic_ms())

    def _failed(self, link: ForwardLink, reason: str, lasting: bool) -> None:
        line = self._line_of(link)
        if line is None:
            return
        line.problem, line.lasting = reason, lasting
        if self._held:
            self._warn("requests of RocketMQ's clients cannot be forwarded: %s", reason)

    def _closed(self, link: ForwardLink, reason: str, unsent: frozenset[int]) -> None:
        line = self._line_of(link)
        if line is None:
            return
        line.limits, line.problem = None, f"the link to node {link.node} has ended: {reason}"
        self._settle(line, reason, unsent)
        if link.stopping.is_set():
            del self._lines[link.node]
        self._flush(self._clock.monotonic_ms())

    def _settle(self, line: Line, reason: str, unsent: frozenset[int]) -> None:
        """Hold what was not sent again; leave open what may have been done."""
        sent, line.sent, line.sent_bytes = line.sent, {}, 0
        for number in [number for number, one in sent.items() if isinstance(one, Asked)]:
            _tell(sent.pop(number), None)
        self._hold_again(waiting for number, waiting in sent.items() if number in unsent)
        why = f"whether node {line.link.node} has carried it out is not known: {reason}"
        for number, waiting in sent.items():
            if number not in unsent:
                self._leave_open(waiting, why)

    def _leave_open(self, waiting: Waiting, reason: str, *, is_late: bool = False) -> None:
        """Tell the client, if it is still there, that nobody knows what was done."""
        self._counts.unknown += 1
        if not waiting.is_over:
            waiting.request.leave_open(reason, is_late=is_late)

    def _outcomes(self, link: ForwardLink, frames: list[LinkFrame]) -> None:
        line = self._line_of(link)
        if line is None:
            return
        now = self._clock.monotonic_ms()
        undone = []
        for frame in frames:
            waiting = line.pop(frame.id)
            if waiting is None:
                continue
            if isinstance(waiting, Asked):
                _tell(waiting, frame)
                continue
            code = _refused_for_good(frame)
            if frame.kind is Kind.REFUSED and code is None:
                undone.append(waiting)
                line.problem = reason_of(frame)
                continue
            if line.probe_ms <= now:
                line.probing = False
            if code is not None:
                self._counts.refused += 1
                if not waiting.is_over:
                    who = f"node {link.node} refuses it"
                    waiting.request.refuse(code, f"{who}: {reason_of(frame)}")
            elif frame.kind in (Kind.UNKNOWN, Kind.LATE):
                self._leave_open(waiting, reason_of(frame), is_late=frame.kind is Kind.LATE)
            elif not waiting.is_over:
                self._pass_back(waiting.request, frame.payload)
        if undone:
            self._hold_again(undone)
            if not line.probing:
                line.probing, line.probe_ms = True, now + TICK_MS
            elif line.probe_ms != float("inf"):
                line.probe_ms = now + TICK_MS
        self._flush(now)

    def _pass_back(self, request: RemotingRequest, frame: bytes) -> None:
        """Send the client what the master has answered."""
        request.is_answered = True
        if frame:
            self._door.pass_back(request, frame)

    # -- requests that other nodes forward

    def _on_forwarded(self, requests: list[ForwardedRequest]) -> None:
        """Take them; the threads of the accepted links call it."""
        self._door.soon(partial(self._receive, requests))

    def _receive(self, requests: list[ForwardedRequest]) -> None:
        now = self._clock.monotonic_ms()
        self._counts.received += len(requests)
        for one in requests:
            if self._stopped:
                one.refuse(STOPS)
                continue
            try:
                frame = decode_frame(one.client.frame, 4)
                address = _unpacked(one.client.host), one.client.port
            except (ProtocolError, ValueError) as failure:
                one.refuse(f"{UNREADABLE}{failure}")
                continue
            if frame.code not in FORWARDED and frame.code not in ASKED:
                one.refuse(f"request code {frame.code}{NOT_FORWARDED}")
                continue
            outlet, came_ms = _Outlet(one), now - one.client.age_ms
            request = RemotingRequest(
                frame, came_ms, None, address,
                outlet.reply, outlet.unknown, outlet.undone, self.again,
            )  # fmt: skip
            gate = self._door.gate
            try:
                if gate is None or frame.code in ASKED or gate.admits(request):
                    self._door.handle(request)
            except Exception as failure:  # it is unknown what was done; the others go on
                what = f"a forwarded RocketMQ request ({frame.code})"
                one.leave_open(self._door.parts.failures.note(what, failure)[1])

    def _refuse_undone(self, request: RemotingRequest, reason: str) -> bool:
        """Let the node that has forwarded a request send it to the next master; return True."""
        request.is_answered = True
        if request.undone is not None:
            request.undone(request, reason)
        return True

    # -- end

    def end(self) -> None:
        """Refuse what waits, and end the links: the node stops."""
        self._stopped = True
        port = self._network.port
        port.handler, port.refusal = None, STOPS
        held, self._held = self._held, deque()
        for waiting in held:
            if not waiting.is_over:
                self._counts.refused += 1
                waiting.request.refuse(Answer.SERVICE_NOT_AVAILABLE, f"nothing was done: {STOPS}")
        lacking, self._lacking = self._lacking, deque()
        self._lacking_bytes = 0
        for request in lacking:  # `again` knows what to do with those of other nodes
            if not request.is_answered:
                request.answer(Answer.SERVICE_NOT_AVAILABLE, remark=f"nothing was done: {STOPS}")
        for line in self._lines.values():
            line.link.close("the node stops")


class _Outlet:
    """Where the outcome of a forwarded request goes."""

    __slots__ = ("_to",)

    def __init__(self, to: ForwardedRequest) -> None:
        self._to = to

    def reply(self, _request: RemotingRequest, answer: Frame | bytes | None) -> None:
        """Send the answer, a frame or its bytes; None: the request has none."""
        if answer is None:
            answer = b""
        self._to.answer(answer if isinstance(answer, bytes) else encode_frame(answer))

    def unknown(self, _request: RemotingRequest, reason: str, is_late: bool) -> None:
        """Say that what was done is not known; `is_late`: its client waits no more."""
        self._to.leave_open(reason, is_late=is_late)

    def undone(self, _request: RemotingRequest, reason: str) -> None:
        """Say that nothing was done."""
        self._to.refuse(reason)


def _encoded(frame: Frame) -> bytes:
    """Return a request's bytes for the master. ProtocolError if it would not read them.

    They may be longer than those that came: the numbers in a client's JSON become texts.
    """
    front = encode_front(frame, len(frame.body))
    length = len(front) - _BEFORE_HEADER
    if length > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES}")
    return front + frame.body


def _refused_for_good(frame: LinkFrame) -> Answer | None:
    """Return the answer to a request that the master will never take; None to every other one."""
    if frame.kind is not Kind.REFUSED:
        return None
    reason = reason_of(frame)
    if reason.startswith(UNREADABLE):
        return Answer.MESSAGE_ILLEGAL
    return Answer.SERVICE_NOT_AVAILABLE if reason.endswith(NOT_FORWARDED) else None


def _tell(waiting: Waiting, outcome: LinkFrame | None) -> None:
    """Give a question of this node its answer, if it has one."""
    answer = None
    if outcome is not None and outcome.kind is Kind.ANSWER:
        answer = decode_frame(outcome.payload[4:])
    if isinstance(waiting, Asked):
        waiting.then(answer)


def _has_input(connection: Connection) -> bool:
    """Whether a client has sent what the node has not read, or not as a whole."""
    if connection.inbox or connection.held_bytes:
        return True
    try:
        return bool(connection.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:  # nothing, or a broken connection
        return False


def _until_ms(waiting: Waiting) -> float:
    return waiting.until_ms


def _place(request: RemotingRequest) -> int:
    """Return what keeps the order of a client; times do not: links between nodes have delays."""
    return request.place


@lru_cache(4_096)
def _unpacked(host: bytes) -> str:
    """Return a client's address as text; raises ValueError."""
    return str(ipaddress.ip_address(host))


@lru_cache(4_096)
def _packed(host: str) -> bytes:
    """Return the bytes of a client's address; four zeros if it has none."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).packed
    except ValueError:
        return bytes(4)
