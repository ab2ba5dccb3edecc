"""RocketMQ's name servers are told of this node, so that clients find the group by them.

`remoting.name_servers` names them. Each has a thread of its own, so one that is down or slow
hinders neither the others nor the node. A registration (103) is sent when the node starts, 30 s
after the last one, and within about a second of a change of role, addresses or topics; when the
node stops, 104 takes it back. What a name server says of the group's name is read before and after
that, so it is noticed if another broker has the name, or if the registration does not last.

A broker whose name another address holds is not registered: whoever came first keeps the name, and
no client is led from one group to another. It is registered once the name is free.

What comes from a name server is not trusted: its size is checked before it is kept, and whatever
cannot be an answer ends the connection (`Line`).
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

from hastore.addresses import parse_address
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config
from hastore.errors import HastoreError, ProtocolError
from hastore.ha.hello.peer import connect
from hastore.protocol.group_note import encode_note
from hastore.protocol.registration import (
    MASTER_ID,
    BrokerName,
    Queues,
    Route,
    Version,
    decode_route,
    decode_topic_list,
    encode_topics,
    end_of_registration,
    question_of_route,
    registration,
    shown,
)
from hastore.protocol.remoting import Answer, Code, Frame, decode_frame, encode_frame
from hastore.server.remoting.announced import Announced, Standing, to_write
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

REGISTER_MS = 30_000.0  # as RocketMQ's brokers; a name server forgets one after 120 s of silence
CHECK_MS = 10_000.0  # so often it is looked for whether the registration is still there
SOON_MS = 2_000.0  # and once so long after a registration that has changed
AGAIN_MS = 5_000.0  # after a failure
TICK_S = 0.5  # so often it is looked for whether something has changed
STOP_S = 2.0  # for all name servers together
END_S = 1.0  # for one 104
QUIET_MS = 600_000.0  # so long a failure that comes and goes is not logged again
REBUILD = 20.0  # the list of topics is made anew after that many times the time that it took
TABLE_MS = 30_000.0  # and when nothing seems to have changed
BODIES_MAX = 8
GONE_MAX = 1_000  # deleted topics that a name server is asked about at a time
CONNECT_S = 3.0
ANSWER_S = 6.0  # for a request in all, however slowly its answer comes
SLICE_S = 0.25  # so often it is looked for whether the node stops
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # as RocketMQ's own limit; the names of very many topics
_PIECE_BYTES = 256 * 1024
_SIZE = struct.Struct(">I")


class _Refused(HastoreError):
    """A name server does not do what it is asked, or says what cannot be; `kind` for the log."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class _Body(NamedTuple):
    data: bytes
    is_compressed: bool
    topics: frozenset[str]  # of the group that are in it


class Topics:
    """The bodies of registrations, each with a version of its own; shared by all name servers."""

    def __init__(self, announced: Announced, clock: Clock) -> None:
        self._announced = announced
        self._clock = clock
        self._guard = threading.Lock()
        self._table: list[Queues] = []
        self._names: frozenset[str] = frozenset()
        self._groups: frozenset[str] = frozenset()
        self._note: bytes | None = None
        self._noted: object = None  # of what `_note` was made
        self._seen: tuple[int, int, bool] | None = None
        self._next_ms = self._stale_ms = float("-inf")
        self._serial = 0
        self._counter = 0
        self._bodies: OrderedDict[object, _Body] = OrderedDict()

    def refresh(self, standing: Standing) -> int:
        """Look at the topics, if they may have changed; return a number that rises if they have."""
        groups = self._announced.groups()
        with self._guard:
            now = self._clock.monotonic_ms()
            changed = standing.seen != self._seen or groups != self._groups
            if now < self._next_ms or not (changed or now >= self._stale_ms):
                return self._serial
            table = self._announced.table(groups)
            ended = self._clock.monotonic_ms()
            self._next_ms = ended + REBUILD * (ended - now)
            self._stale_ms = ended + TABLE_MS
            self._seen, self._groups = standing.seen, groups
            if table != self._table:
                self._table, self._names = table, frozenset(one.topic for one in table)
                self._serial += 1
            return self._serial

    def note(self) -> bytes | None:
        """Return what the master tells other groups, the same object while it is the same.

        None from any other node.
        """
        standing = self._announced.now()
        if not standing.is_master:
            self._note = None
            return None
        brokers = self._announced.group_brokers()
        serial = self.refresh(standing)
        key = (serial, standing.epoch, brokers)
        if self._note is None or key != self._noted:
            with self._guard:
                table = self._table
            self._note = encode_note(self._announced.note(table, standing.epoch, brokers))
            self._noted = key
        return self._note

    def has(self, topic: str) -> bool:
        """Whether the group has a topic."""
        return topic in self._names

    def body(self, broker: BrokerName, standing: Standing, hidden: frozenset[str]) -> _Body:
        """Return the body for a broker; `hidden` topics are given without permissions."""
        with self._guard:
            kind = "twin" if broker is standing.twin else broker.broker_id == MASTER_ID
            key = (kind, self._serial if kind else 0, standing.epoch, hidden if kind else None)
            found = self._bodies.get(key)
            if found is None:
                table = self._table if kind else []
                table = to_write(table) if kind == "twin" else table
                table = [*table, *(Queues(name, 0, 0, 0) for name in sorted(hidden) if kind)]
                self._counter += 1
                version = Version(self._clock.wall_ms(), self._counter, standing.epoch)
                names = self._names if kind else frozenset()
                found = self._bodies[key] = _Body(*encode_topics(table, version), names)
                while len(self._bodies) > BODIES_MAX:
                    self._bodies.popitem(last=False)
            else:
                self._bodies.move_to_end(key)
            return found


class NameServerLink(Service):
    """Keeps this node's registration at one name server."""

    def __init__(
        self,
        address: str,
        ha: str,
        announced: Announced,
        topics: Topics,
        clock: Clock,
        *,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `ha` is the address at which the node's own slaves follow."""
        super().__init__(f"NameServer-{address}", on_failure=on_failure)
        self.address = address
        self.problem: str | None = None
        self.registrations = 0
        self._ha = ha
        self._announced = announced
        self._topics = topics
        self._clock = clock
        self._wakeup = threading.Event()
        self._lines: dict[str, Line] = {}  # by the broker's name: at a kill all of them go at once
        self._given: dict[str, BrokerName] = {}  # what was registered by these lines
        self._state: object = None  # what was registered
        self._register_ms = self._check_ms = float("-inf")
        self._logged: tuple[str, float] | None = None  # the last failure's kind, and when
        self._looked: set[str] = set()  # deleted topics that the name server was asked about
        self._hidden: frozenset[str] = frozenset()  # of these, what other brokers have too

    @property
    def registered(self) -> tuple[BrokerName, ...]:
        """What this node is at the name server; nothing while something is wrong."""
        return () if self.problem is not None else tuple(self._given.values())

    def wake(self) -> None:
        """End the thread's wait."""
        self._wakeup.set()

    def run(self) -> None:
        """Keep the registration until stopped; then take it back."""
        while not self.stopping.is_set():
            self._wakeup.wait(max(0.0, self._step()) / 1_000)
            self._wakeup.clear()
        self._end()

    def _step(self) -> float:
        """Do what is due; return the time until the next step in milliseconds."""
        try:
            standing = self._announced.now()
            serial = self._topics.refresh(standing)
            self._keep(standing, serial)
        except StoppedError:
            return 0.0
        except (OSError, ProtocolError, _Refused) as failure:
            self._fail(failure)
            return AGAIN_MS
        if self.problem is not None:
            log.warning("name server %s: the failure is over", self.address)
            self.problem = None
        return TICK_S * 1_000

    def _keep(self, standing: Standing, serial: int) -> None:
        now = self._clock.monotonic_ms()
        state = (standing.brokers, standing.epoch, serial, self._hidden)
        has_changed = state != self._state or not all(
            broker.name in self._lines for broker in standing.brokers
        )
        if has_changed or now >= self._register_ms:
            self._register(standing)
            self._state = state  # if a topic is to be hidden now, it differs the next time
            now = self._clock.monotonic_ms()
            self._register_ms = now + REGISTER_MS
            self._check_ms = now + (SOON_MS if has_changed else CHECK_MS)
        elif now >= self._check_ms:
            self._check_ms = now + CHECK_MS
            if not self._is_registered(standing):
                self._state = None

    def _register(self, standing: Standing) -> None:
        wanted = {broker.name: broker for broker in standing.brokers}
        for broker in standing.brokers:
            line = self._lines.get(broker.name)
            if line is None:
                line = Line(self.address, self.stopping, self._clock)
                line.open()
                self._lines[broker.name] = line
                if broker is standing.own:
                    self._looked, self._hidden = set(), frozenset()
            self._check_name(line, broker, standing)
            body = self._topics.body(broker, standing, self._hidden)
            request = registration(broker, self._ha, body.data, compressed=body.is_compressed)
            answer = line.ask(request)
            if answer.code != Answer.SUCCESS:
                text = f"it refuses to register {broker.name}: code {answer.code}"
                raise _Refused("refused", f"{text}, {shown(answer.remark or '')}")
            # A topic that is deleted, made again, and deleted again must go each time.
            self._looked = {name for name in self._looked if name not in body.topics}
            self.registrations += 1
            self._given[broker.name] = broker
        for broker in list(self._given.values()):
            if broker.name not in wanted:
                self._take_back(broker)
        if not self._is_registered(standing):
            text = "it takes the registration, but does not have it afterwards"
            raise _Refused("lost", text)
        if standing.is_master:
            self._remove_deleted(standing)

    def _check_name(self, line: Line, broker: BrokerName, standing: Standing) -> None:
        """Raise _Refused if another broker has the name, or the group's name another master."""
        route = self._route(line, self._announced.own_topics[1])
        for one in route.brokerDatas:
            if one.brokerName != broker.name:
                continue
            for number in sorted({MASTER_ID, broker.broker_id}):
                holder = one.brokerAddrs.get(str(number))
                if holder is not None and holder not in standing.addresses:
                    where = f"{shown(holder)} in cluster {shown(one.cluster)}"
                    raise _Refused(
                        "name",
                        f"broker {broker.name} (id {number}) is {where} there, which is no node of "
                        "this group; this node is not registered. Give one of the two another "
                        "name, or end it",
                    )
            if one.cluster != broker.cluster:
                text = f"it knows broker {broker.name} as one of cluster {shown(one.cluster)}"
                raise _Refused("cluster", f"{text}, not of {broker.cluster}")

    def _route(self, line: Line, topic: str) -> Route:
        answer = line.ask(question_of_route(topic))
        if answer.code == Answer.TOPIC_NOT_EXIST:
            return Route()
        if answer.code != Answer.SUCCESS:
            text = f"it does not say who is broker {topic}: code {answer.code}"
            raise _Refused("refused", f"{text}, {shown(answer.remark or '')}")
        return decode_route(answer.body)

    def _is_registered(self, standing: Standing) -> bool:
        """Whether the name server has the registration.

        Of the slaves it says nothing before there was a master: its topic is not known then.
        """
        if standing.own is None:
            return True
        line = self._lines[standing.own.name]
        route = self._route(line, self._announced.own_topics[1])
        known = {one.brokerName: one for one in route.brokerDatas}
        for broker in standing.brokers:
            found = known.get(broker.name)
            if found is None and broker.broker_id != MASTER_ID:
                continue
            if found is None or found.brokerAddrs.get(str(broker.broker_id)) != broker.address:
                return False
        return True

    # -- deleted topics

    def _remove_deleted(self, standing: Standing) -> None:
        """Let the name server forget topics that were deleted, which it does not by itself.

        It can only forget a topic of all brokers. So one that others have, too, is kept without
        permissions for this group's.
        """
        self._hidden = frozenset(one for one in self._hidden if not self._topics.has(one))
        assert standing.own is not None
        gone = [name for name in self._announced.deleted() if name not in self._looked]
        if not gone:
            return
        line = self._lines[standing.own.name]
        fields = {"cluster": standing.own.cluster}
        answer = line.ask(Frame(Code.GET_TOPICS_BY_CLUSTER, 0, fields=fields))
        if answer.code != Answer.SUCCESS:
            return  # the next registration asks again
        known = set(decode_topic_list(answer.body))
        for name in gone:
            if name not in known:
                self._looked.add(name)
        for name in [one for one in gone if one in known][:GONE_MAX]:
            if self._topics.has(name):  # the table is older than the deletion: the next time
                continue
            brokers = {one.brokerName for one in self._route(line, name).queueDatas}
            mine = {one for one in brokers if self._is_mine(one, standing.own.name)}
            if mine and mine == brokers:
                fields = {"topic": name, "clusterName": standing.own.cluster}
                answer = line.ask(Frame(Code.DELETE_TOPIC_IN_NAMESRV, 0, fields=fields))
                if answer.code != Answer.SUCCESS:
                    continue  # so does the next registration
            elif mine:
                self._hidden |= {name}
            self._looked.add(name)

    @staticmethod
    def _is_mine(broker: str, group: str) -> bool:
        return broker == group or broker.startswith(f"{group}@")

    # -- ends

    def _take_back(self, broker: BrokerName) -> None:
        """Take a registration back, if it is still this node's; the failure of that is none."""
        self._given.pop(broker.name, None)
        line = self._lines.pop(broker.name, None)
        if line is None or not line.is_open:
            return
        try:
            route = line.ask(question_of_route(self._announced.own_topics[1]), END_S, ends=True)
            holders = decode_route(route.body).brokerDatas if route.code == Answer.SUCCESS else []
            for one in holders:
                if one.brokerName == broker.name:
                    # RocketMQ 4 would remove whoever has the number by now.
                    if one.brokerAddrs.get(str(broker.broker_id)) != broker.address:
                        return
            line.ask(end_of_registration(broker), END_S, ends=True)
        except (OSError, ProtocolError) as failure:
            log.debug("name server %s: %s is not taken back: %s", self.address, broker, failure)
        finally:
            line.close()

    def _end(self) -> None:
        for broker in list(self._given.values()):
            self._take_back(broker)
        self._close()

    def _close(self) -> None:
        lines, self._lines, self._given = self._lines, {}, {}
        for line in lines.values():
            line.close()

    def _fail(self, failure: Exception) -> None:
        self._state = None
        if isinstance(failure, _Refused):
            kind, text = failure.kind, str(failure)
            if kind in ("name", "cluster"):
                self._close()  # who is registered by these connections goes with them
        elif isinstance(failure, ProtocolError):
            kind, text = "protocol", f"its answer cannot be read: {failure}"
            self._close()
        else:
            reason = failure.strerror if isinstance(failure, OSError) else None
            kind, text = "silent", f"it does not answer: {reason or failure}"
            self._close()
        self.problem = f"name server {self.address}: {text}"
        now = self._clock.monotonic_ms()
        if self._logged is None or self._logged[0] != kind or now - self._logged[1] > QUIET_MS:
            log.warning("%s; tried again every %d s", self.problem, AGAIN_MS / 1_000)
            self._logged = (kind, now)


class NameServers:
    """The links of a node to all name servers of its configuration."""

    def __init__(self, config: Config, clock: Clock, *, on_failure: OnFailure) -> None:
        """Prepare; `attach` must come before `start`."""
        self._config = config
        self._clock = clock
        self._on_failure = on_failure
        self._links: list[NameServerLink] = []
        self.topics: Topics | None = None

    def note(self) -> bytes | None:
        """Return what the master tells the other groups of its cluster; see Topics."""
        return None if self.topics is None else self.topics.note()

    def attach(self, announced: Announced) -> None:
        """Tell the name servers what this object says."""
        topics = self.topics = Topics(announced, self._clock)
        ha = self._config.nodes[self._config.node].ha
        make = partial(NameServerLink, ha=ha, announced=announced, topics=topics)
        self._links = [
            make(address, clock=self._clock, on_failure=self._on_failure)
            for address in self._config.remoting.name_servers
        ]

    def start(self) -> None:
        """Begin to register the node."""
        for link in self._links:
            link.start()

    def stop(self) -> None:
        """Take the registrations back; waits STOP_S at most."""
        for link in self._links:
            link.stopping.set()
            link.wake()
        until_ms = self._clock.monotonic_ms() + STOP_S * 1_000
        for link in self._links:
            link.stop(max(0.0, until_ms - self._clock.monotonic_ms()) / 1_000)

    def problems(self) -> list[str]:
        """Return what is wrong, one line for each name server."""
        return [link.problem for link in self._links if link.problem is not None]

    def status(self) -> list[dict[str, Any]]:
        """Return which name servers there are, and what is registered there."""
        return [
            {
                "address": link.address,
                "brokers": [f"{one.name}:{one.broker_id}" for one in link.registered],
                "registrations": link.registrations,
                "problem": link.problem,
            }
            for link in self._links
        ]


class StoppedError(OSError):
    """The node stops, so nothing is waited for any more."""


class Line:
    """A connection; used by one thread. `stopping` ends every wait."""

    def __init__(
        self, address: str, stopping: threading.Event, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Prepare; nothing is connected yet."""
        endpoint = parse_address(address)
        assert endpoint is not None, "the configuration was checked"
        self._endpoint = endpoint
        self._stopping = stopping
        self._clock = clock
        self._socket: socket.socket | None = None
        self._opaque = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._socket is not None

    def open(self) -> None:
        """Connect; raises OSError."""
        self.close()
        made = connect(self._endpoint, CONNECT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = made

    def close(self) -> None:
        """End the connection."""
        made, self._socket = self._socket, None
        if made is not None:
            made.close()

    def ask(self, request: Frame, limit_s: float | None = None, *, ends: bool = False) -> Frame:
        """Send a request, and return its answer; raises OSError or ProtocolError, and closes then.

        It waits `limit_s` at most, or ANSWER_S; with `ends` even though the node stops.
        """
        assert self._socket is not None, "the line is open"
        self._opaque = self._opaque % 0x7FFFFFFF + 1
        request.opaque = self._opaque
        until_s = self._clock.monotonic_ms() / 1_000 + (ANSWER_S if limit_s is None else limit_s)
        try:
            self._send(self._socket, encode_frame(request), until_s, ends)
            while True:
                answer = self._receive(self._socket, until_s, ends)
                if answer.is_answer:
                    break  # a name server of RocketMQ 5 may tell a broker something in between
            if answer.opaque != request.opaque:
                raise ProtocolError(f"an answer to request {answer.opaque}, which nobody asked")
        except (OSError, ProtocolError):
            self.close()
            raise
        return answer

    def _send(self, made: socket.socket, data: bytes, until_s: float, ends: bool) -> None:
        left = memoryview(data)
        while left:
            self._limit(made, until_s, ends)
            try:
                left = left[made.send(left[:_PIECE_BYTES]) :]
            except TimeoutError:
                continue

    def _receive(self, made: socket.socket, until_s: float, ends: bool) -> Frame:
        size = _SIZE.unpack(self._read(made, _SIZE.size, until_s, ends))[0]
        if not 4 <= size <= MAX_ANSWER_BYTES:
            raise ProtocolError(f"an answer of {size} bytes; at most {MAX_ANSWER_BYTES}")
        return decode_frame(self._read(made, size, until_s, ends))

    def _read(self, made: socket.socket, size: int, until_s: float, ends: bool) -> bytes:
        pieces: list[bytes] = []
        while size:
            self._limit(made, until_s, ends)
            try:
                piece = made.recv(min(size, _PIECE_BYTES))
            except TimeoutError:
                continue
            if not piece:
                raise ConnectionError("it has ended the connection")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _limit(self, made: socket.socket, until_s: float, ends: bool) -> None:
        if self._stopping.is_set() and not ends:
            raise StoppedError("the node stops")
        left_s = until_s - self._clock.monotonic_ms() / 1_000
        if left_s <= 0:
            raise TimeoutError("it takes too long to answer")
        made.settimeout(min(SLICE_S, left_s))
