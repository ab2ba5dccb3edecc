"""The crowd of a soak: bare connections of every protocol that come, do something, and go.

Each is an actor: `open`, then `step` until it has had enough. A worker drives hundreds of them in
turn, and whoever leaves is followed by another one. The kinds, with their part of the connections:

    members     RocketMQ's consumers of GROUPS groups: heartbeats, pulls from the end and from the
                beginning, pulls that wait, commits, locks; some also send, delayed or as half
                messages that nobody ends; half of them say that they go
    idle        clients of hastore that log in, ask once, and say nothing more, or wait for messages
    strangers   half a greeting, nothing at all, wrong keys and signatures, HTTP right and wrong
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import json
import os
import random
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from hastore import Security
from hastore.client.connections.bulk_link import BulkLink
from hastore.client.connections.proving import Prover
from hastore.errors import HastoreError
from hastore.protocol import api
from hastore.protocol.remoting import Code, Frame
from tests.attack.strangers import Stranger, target
from tests.process.api_attacks import SHAKEN
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.signing import signed
from tests.server.remoting.test_groups import java, subscribed

WORKERS = 4
WAIT_S = 10.0
AGAIN_S = 1.0  # after a failure
OF_MEMBERS, OF_IDLE = 0.55, 0.35  # the rest are strangers
WAITS = "6"  # sysFlag of a pull: it has a subscription, and may wait
NOW = "4"
HALF = "4"  # sysFlag of a send
BACK = 0.1  # of pulls, from the beginning: old messages
QUIET, QUIET_END = "soak-quiet", 1  # a topic with one message in each queue: pulls wait behind it
UNTOLD = struct.pack("ii", 1, 0)  # SO_LINGER: the connection ends with a reset


class Actor(Protocol):
    """Who has one connection."""

    def open(self) -> None:
        """Connect."""

    def step(self) -> bool:
        """Do something; return whether to stay."""

    def close(self) -> None:
        """End the connection."""


class Base:
    """What all actors have: where the nodes are, chance, and when to leave."""

    def __init__(self, one: Stranger, number: int, chance: random.Random) -> None:
        self.one = one
        self.number = number
        self.chance = chance
        self.node = chance.choice(one.nodes)
        self.leaves = time.monotonic() + chance.expovariate(1.0 / one.life_s)
        self.sock: Any = None

    @property
    def stays(self) -> bool:
        """Whether it has not had enough."""
        return time.monotonic() < self.leaves

    def close(self) -> None:
        if self.sock is not None:
            if self.chance.random() < 0.1 and isinstance(self.sock, socket.socket):
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, UNTOLD)
            self.sock.close()


class Member(Base):
    """A consumer of a group, as RocketMQ's clients are."""

    def __init__(self, one: Stranger, number: int, chance: random.Random) -> None:
        super().__init__(one, number, chance)
        self.group = f"soak-g{number % one.groups}"
        self.topic = f"soak-{number % one.topics}"
        self.name = f"m{number}-{secrets.token_hex(4)}"
        self.offsets: dict[int, int] = {}

    def open(self) -> None:
        self.client = RemotingClient(self.node["api"])
        self.sock = self.client.sock
        self.sock.settimeout(WAIT_S)
        self.beat = java(self.name, (self.group,), subscribed(self.topic))
        self.ask(Code.HEART_BEAT, {}, self.beat)
        self.one.count["members"] += 1

    def send(self, code: Code, fields: dict[str, str], body: bytes = b"") -> int:
        name, key = self.one.identity, self.one.key
        return self.client.send(code, signed(name, key, fields, body), body)

    def ask(self, code: Code, fields: dict[str, str], body: bytes = b"") -> Frame:
        opaque = self.send(code, fields, body)
        while True:
            frame = self.client.next()
            if frame.is_answer and frame.opaque == opaque:
                return frame
            self.one.count["told"] += not frame.is_answer

    def step(self) -> bool:
        self.ask(Code.HEART_BEAT, {}, self.beat)
        found = self.ask(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": self.group})
        if found.code == 0:
            self.one.count["lists"] += 1
        queue = self.chance.randrange(4)
        self.pull(queue)
        if self.chance.random() < 0.3:
            waiting = {**self.pull_fields(queue, QUIET_END, WAITS), "topic": QUIET}
            self.send(Code.LITE_PULL_MESSAGE, waiting)
            self.one.count["waiting pulls"] += 1
        if self.number % 10 == 0:
            self.lock(queue)
        if self.number % 5 == 0:
            self.put()
        if self.stays:
            return True
        if self.chance.random() < 0.5:
            fields = {"clientID": self.name, "consumerGroup": self.group}
            self.ask(Code.UNREGISTER_CLIENT, fields)
        return False

    def pull_fields(self, queue: int, at: int, flag: str) -> dict[str, str]:
        return {
            "consumerGroup": self.group, "topic": self.topic, "queueId": str(queue),
            "queueOffset": str(at), "maxMsgNums": "16", "sysFlag": flag, "commitOffset": "0",
            "suspendTimeoutMillis": "15000", "subscription": "*", "subVersion": "1",
            "expressionType": "TAG",
        }  # fmt: skip

    def pull(self, queue: int) -> None:
        names = {"consumerGroup": self.group, "topic": self.topic, "queueId": str(queue)}
        if self.chance.random() < BACK:
            at = 0
        elif queue in self.offsets:
            at = self.offsets[queue]
        else:
            at = int(self.ask(Code.QUERY_CONSUMER_OFFSET, names).fields.get("offset", "0"))
        answer = self.ask(Code.PULL_MESSAGE, self.pull_fields(queue, max(0, at), NOW))
        after = answer.fields.get("nextBeginOffset")
        if after is None:
            return
        self.one.count["pulls with messages"] += answer.code == 0
        self.offsets[queue] = int(after)
        told = self.ask(Code.UPDATE_CONSUMER_OFFSET, {**names, "commitOffset": after})
        self.one.count["commits"] += told.code == 0

    def lock(self, queue: int) -> None:
        wanted = [{"topic": self.topic, "brokerName": "g0", "queueId": queue}]
        body = {"consumerGroup": self.group, "clientId": self.name, "mqSet": wanted}
        raw = json.dumps(body).encode()
        self.one.count["locks"] += self.ask(Code.LOCK_BATCH_MQ, {}, raw).code == 0
        if self.chance.random() < 0.7:
            self.ask(Code.UNLOCK_BATCH_MQ, {}, raw)

    def put(self) -> None:
        """Send: at once, with a delay of 1 s to a minute, or as a half message without an end."""
        way = self.chance.random()
        properties = f"UNIQ_KEY\x01{secrets.token_hex(16).upper()}\x02KEYS\x01k{self.number}\x02"
        if way < 0.2:
            level = self.chance.choice((1, 2, 3, 5))
            properties += f"DELAY\x01{level}\x02"
        elif way < 0.4:
            properties += f"TRAN_MSG\x01true\x02PGROUP\x01{self.group}\x02"
        fields = {
            "a": self.group, "b": self.topic, "c": "TBW102", "d": "4",
            "e": str(self.chance.randrange(4)), "f": HALF if 0.2 <= way < 0.4 else "0",
            "g": str(int(time.time() * 1000)), "h": "0", "i": properties, "j": "0",
        }  # fmt: skip
        answer = self.ask(Code.SEND_MESSAGE_V2, fields, self.chance.randbytes(300))
        self.one.count["sends"] += answer.code == 0


class Idle(Base):
    """A client of hastore's own protocol that logs in and leaks its connection for a while."""

    def open(self) -> None:
        self.sock = BulkLink(self.node["api"], WAIT_S, self.one.prover)
        self.sock.send(api.AskMap(1))
        self.sock.receive()
        self.one.count["idle"] += 1

    def step(self) -> bool:
        if self.chance.random() < 0.3:
            at = api.Position(QUIET_END)
            self.sock.send(api.Pull(2, QUIET, self.chance.randrange(4), at, wait_ms=30_000))
            self.one.count["pulls"] += 1
        return self.stays


class HalfOpen(Base):
    """Connects, and says nothing, half a greeting, or what is no greeting."""

    def open(self) -> None:
        port = self.chance.choice(("api", "api", "http", "ha"))
        self.sock = socket.create_connection(target(self.node[port]), WAIT_S)
        said = (b"", SHAKEN[: self.chance.randrange(1, len(SHAKEN))], self.chance.randbytes(99))
        self.sock.sendall(self.chance.choice(said))
        self.one.count["half open"] += 1

    def step(self) -> bool:
        return False


class Liar(Base):
    """Logs in with a wrong key, a wrong signature or a wrong token: nobody may let it in."""

    def open(self) -> None:
        way = self.chance.randrange(3)
        if way == 0:
            with contextlib.suppress(HastoreError):
                BulkLink(self.node["api"], WAIT_S, self.one.liar).close()
                self.one.count["LET IN"] += 1
        elif way == 1:
            client = RemotingClient(self.node["api"])
            self.sock = client.sock
            self.sock.settimeout(WAIT_S)
            given = signed(self.one.identity, "0" * 64, {"topic": "soak-0"})
            answer = client.ask(Code.GET_ROUTEINFO_BY_TOPIC, given)
            self.one.count["LET IN"] += answer.code == 0
        else:
            self.sock = socket.create_connection(target(self.node["http"]), WAIT_S)
            self.sock.sendall(http_request("/status", "soak:" + secrets.token_hex(32)))
            answered = self.sock.recv(4_096)
            self.one.count["LET IN"] += b" 200 " in answered[:20]
        self.one.count["refused"] += 1

    def step(self) -> bool:
        return False


class Browser(Base):
    """Looks at the pages of a node over one connection."""

    def open(self) -> None:
        self.sock = socket.create_connection(target(self.node["http"]), WAIT_S)
        page = self.chance.choice(("/status", "/metrics", "/", "/nothing"))
        self.sock.sendall(http_request(page, f"{self.one.identity}:{self.one.key}"))
        answered = self.sock.recv(65_536)
        self.one.count["pages"] += b" 200 " in answered[:20]

    def step(self) -> bool:
        return False  # the rest of the page was never read: the node must cope


def http_request(page: str, token: str) -> bytes:
    """Return a request with an identity's token."""
    given = base64.b64encode(token.encode()).decode()
    return f"GET {page} HTTP/1.1\r\nHost: h\r\nAuthorization: Basic {given}\r\n\r\n".encode()


def _work(one: Stranger, makers: Sequence[Callable[[], Actor]], chance: random.Random) -> None:
    """Drive actors in turn until the end; each that leaves is followed by another."""
    now = time.monotonic()
    due: list[tuple[float, int]] = [
        (now + chance.random() * one.ramp_s, number) for number in range(len(makers))
    ]
    heapq.heapify(due)
    actors: dict[int, Actor] = {}
    while one.going():
        at, number = due[0]
        if one.ended.wait(max(0.0, at - time.monotonic())):
            break
        actor = actors.pop(number, None)
        pause = chance.uniform(0.5, 1.5) * one.step_s
        try:
            if actor is None:
                actor = makers[number]()
                actor.open()
                stays = True
            else:
                stays = actor.step()
        except (OSError, HastoreError, AssertionError, ValueError) as failure:
            one.count[f"({type(failure).__name__})"] += 1
            stays = False
            pause = AGAIN_S + chance.random()
        if stays:
            assert actor is not None
            actors[number] = actor
        else:
            if actor is not None:
                actor.close()
            pause = min(pause, 2.0)
        heapq.heapreplace(due, (time.monotonic() + pause, number))
    for actor in actors.values():
        actor.close()


def in_threads(one: Stranger, works: Iterable[Callable[[], None]]) -> None:
    """Do each work in a thread of its own, say that the kind is ready, and wait for all of them.

    An error that a work does not handle ends the process: the soak must not go on without it.
    """

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    one.ready()
    for thread in threads:
        thread.join()


def crowd(one: Stranger) -> None:
    """Be the crowd, of `connections` actors in WORKERS threads."""
    files = {"identity": one.identity, "key_file": one.key_file}
    one.prover = Prover(Security(**files))
    one.liar = Prover(Security(**{**files, "key_file": one.wrong_key_file}))
    strangers = (HalfOpen, HalfOpen, Liar, Browser)
    kinds: list[type[Any]] = []
    for number in range(one.connections):
        share = number / one.connections
        if share < OF_MEMBERS:
            kinds.append(Member)
        elif share < OF_MEMBERS + OF_IDLE:
            kinds.append(Idle)
        else:
            kinds.append(strangers[number % len(strangers)])
    works = []
    for worker in range(WORKERS):
        chance = random.Random(one.chance.getrandbits(32))
        makers = [
            lambda kind=kind, number=number, chance=chance: kind(one, number, chance)
            for number, kind in enumerate(kinds)
            if number % WORKERS == worker
        ]
        works.append(partial(_work, one, makers, chance))
    in_threads(one, works)
