"""The attackers, each kind in a process of its own: python -m tests.attack.strangers KIND JSON.

A kind prints one line of JSON when it is ready, attacks until its stdin ends, and prints what it
counted. It is bounded: in connections by MOST_OPEN, in time by its parent, whose end closes stdin.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import secrets
import select
import socket
import string
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from hastore.client.connections.bulk_link import BulkLink
from hastore.errors import HastoreError, UnreachableError
from hastore.protocol import api
from hastore.protocol.hello import CALL_MAGIC
from hastore.record.codec import Host, build_record
from hastore.record.layout import CRC_MASK
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import TlsEngine
from tests.process.api_attacks import message

MOST_OPEN = 3_000  # connections of one kind at a time
HELD_S = 2.0  # how long a caller leaves its connection open
END_S = 20.0  # after stdin's end: a kind that has not ended by then is ended
WAIT_S = 60.0
RECORD_HEADER_BYTES = 88
HOST = Host.parse("127.0.0.1:1")


class Stranger:
    """What an attacker has: its arguments, its choices, its counts, and when it must end."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.chance = random.Random(arguments["seed"])
        self.count: Counter[str] = Counter()
        self.worst_ms = 0.0
        self.ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return self.arguments[name]

    def _watch(self) -> None:
        while sys.stdin.buffer.read(1):
            pass
        self.ended.set()
        time.sleep(END_S)
        os._exit(1)

    def going(self) -> bool:
        return not self.ended.is_set()

    def ready(self, **said: Any) -> None:
        print(json.dumps(said), flush=True)

    def paced(self, rate: float) -> Iterator[float]:
        """Yield the time at which each of `rate` things a second is due; lost time is not made up
        beyond 50 ms.
        """
        due = time.monotonic()
        while self.going():
            now = time.monotonic()
            if now < due:
                time.sleep(due - now)
            yield now
            due = max(due + 1.0 / rate, now - 0.05)

    def ask(self, link: BulkLink, request: api.Request, payload: bytes | None = None) -> api.Reply:
        begin = time.monotonic()
        link._sock.sendall(message(request, payload))
        reply, _ = link.receive()
        self.worst_ms = max(self.worst_ms, (time.monotonic() - begin) * 1000.0)
        self.count[type(reply).__name__] += 1
        return reply


def target(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


# -- clients


def queries(one: Stranger) -> None:
    """One client asks for the oldest messages of a key, and for times, all the time."""
    link = BulkLink(one.address, WAIT_S)
    one.ready()
    rid = 0
    while one.going():
        rid += 2
        try:
            one.ask(link, api.FindKey(rid, one.topic, one.key, 32, 0, one.end_ms))
            one.ask(link, api.FindTime(rid + 1, one.topic, 0, int(time.time() * 1000) - 50))
        except UnreachableError:
            one.count["ended"] += 1
            link.close()
            link = BulkLink(one.address, WAIT_S)


def cold_readers(one: Stranger) -> None:
    """Many clients read from random places of a topic, each without a pause."""

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while one.going():
            try:
                link = BulkLink(one.address, WAIT_S)
            except HastoreError:
                one.count["not let in"] += 1
                time.sleep(0.2)
                continue
            with contextlib.suppress(HastoreError):
                while one.going():
                    at = api.Position(chance.randrange(one.messages))
                    pull = api.Pull(1, one.topic, chance.randrange(one.queues), at, 16, 65_536)
                    one.ask(link, pull)
            link.close()

    threads = [
        threading.Thread(target=read, args=(one.chance.getrandbits(32),), daemon=True)
        for _ in range(one.readers)
    ]
    for thread in threads:
        thread.start()
    patience = time.monotonic() + 3.0  # until all have got something
    while one.going() and one.count["Pulled"] < one.readers and time.monotonic() < patience:
        time.sleep(0.01)
    one.ready()
    one.ended.wait()


def parked_pulls(one: Stranger) -> None:
    """Consumers wait at the ends of quiet queues."""
    links = []
    for _ in range(one.connections):
        link = BulkLink(one.address, WAIT_S)
        links.append(link)
        words = [
            message(
                api.Pull(rid, one.topic, rid % one.queues, api.Position(one.end), wait_ms=60_000)
            )
            for rid in range(one.each)
        ]
        link._sock.sendall(b"".join(words) + message(api.AskMap(one.each)))
        while (reply := link.receive()[0]).rid != one.each or not isinstance(reply, api.Map):
            one.count["not parked"] += 1
        one.count["parked"] += one.each
    one.ready(**one.count)
    one.ended.wait()
    for link in links:
        link.close()


def idle_connections(one: Stranger) -> None:
    """A client that leaks its connections: each asks once, and then says nothing."""
    links = []
    for _ in range(min(one.connections, MOST_OPEN)):
        try:
            links.append(BulkLink(one.address, 2.0))
            one.ask(links[-1], api.AskMap(1))
        except HastoreError:
            one.count["not let in"] += 1
    one.ended.wait(one.idle_s)
    one.ready(open=len(links))
    one.ended.wait()
    for link in links:
        link.close()


def many_keys(one: Stranger) -> None:
    """One client puts records with thousands of keys, `rate` a second."""
    link = BulkLink(one.address, WAIT_S)
    records = []
    for _ in range(40):
        keys = ("".join(one.chance.choices(string.ascii_lowercase, k=3)) for _ in range(one.keys))
        records.append(build_record(
            one.topic, b"x", queue_id=0, properties=[("KEYS", " ".join(keys))],
            born_timestamp_ms=1, born_host=HOST,
        ))  # fmt: skip
    one.ready()
    for rid, _ in enumerate(one.paced(one.rate)):
        reply = one.ask(link, api.Put(rid, 1), one.chance.choice(records))
        one.count["tried"] += 1
        if isinstance(reply, api.PutDone):
            one.count["stored"] += (reply.statuses or [reply.status])[0] == "PUT_OK"


# -- strangers at the ports


def _callers(one: Stranger, say: Callable[[int], bytes], held_s: float = HELD_S) -> None:
    """Call `rate` times a second, say something, and hold the connection for a while."""
    where = target(one.address)
    open_ones: deque[tuple[float, socket.socket]] = deque()
    begun = False
    for number, now in enumerate(one.paced(one.rate)):
        caller = socket.socket()
        caller.setblocking(False)
        with contextlib.suppress(OSError):
            caller.bind((one.source, 0))
        try:
            with contextlib.suppress(BlockingIOError):
                caller.connect(where)
            words = say(number)
            caller.settimeout(1.0)
            caller.sendall(words)
            one.count["called"] += 1
        except OSError:
            one.count["failed"] += 1
        open_ones.append((now, caller))
        while open_ones and (open_ones[0][0] < now - held_s or len(open_ones) > MOST_OPEN):
            open_ones.popleft()[1].close()
        if not begun and number > one.rate * 0.2:
            begun = True
            one.ready()
    if not begun:
        one.ready()
    for _, caller in open_ones:
        caller.close()


def tls_handshakes(one: Stranger) -> None:
    """Callers begin TLS handshakes, which cost the node much and them nothing."""
    contexts = TlsContexts(TlsFiles(one.ca))
    hellos = [
        TlsEngine(contexts.client(), server_side=False, host="127.0.0.1").take_outgoing()
        for _ in range(50)
    ]
    _callers(one, lambda number: hellos[number % len(hellos)], 0.5)


def hellos(one: Stranger) -> None:
    """Callers of the ha port that never end their HELLO."""
    _callers(one, lambda _number: CALL_MAGIC + b"\0\0")


def wrong_tokens(one: Stranger) -> None:
    """Callers of the http port: wrong tokens, and three times as many requests without an end."""
    begin = b"GET /status HTTP/1.1\r\nHost: h\r\nAuthorization: "

    def say(number: int) -> bytes:
        token = b"Bearer " + one.identity.encode() + b":" + secrets.token_hex(32).encode()
        if number % 8 == 0:
            token = b"Basic " + base64.b64encode(token.removeprefix(b"Bearer "))
        return begin if number % 4 else begin + token + b"\r\n\r\n"

    _callers(one, say)


# -- on the way between two nodes


def relay(one: Stranger) -> None:
    """Forward connections to a node, late, and change what is named in `change` on the way.

    A changed body gets a right CRC, as somebody who knows the format gives it.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    old, new = (text.encode() for text in one.arguments.get("change") or ("", ""))

    def changed(data: bytes) -> bytes:
        at = data.find(old) if old else -1
        while at >= RECORD_HEADER_BYTES:
            record = at - RECORD_HEADER_BYTES
            size = int.from_bytes(data[at - 4 : at])
            body = data[at : at + size].replace(old, new)
            crc = (zlib.crc32(body) & CRC_MASK).to_bytes(4)
            data = data[: record + 8] + crc + data[record + 12 : at] + body + data[at + size :]
            one.count["changed"] += 1
            at = data.find(old)
        return data

    def forward(source: socket.socket, sink: socket.socket) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        ended = False
        with contextlib.suppress(OSError):
            while waiting or not ended:
                left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
                if ended:
                    time.sleep(left_s)
                elif select.select([source], [], [], left_s)[0]:
                    data = source.recv(262_144)
                    ended = not data
                    waiting.append((time.monotonic() + one.delay_ms / 1000.0, changed(data)))
                while waiting and waiting[0][0] <= time.monotonic():
                    sink.sendall(waiting.popleft()[1])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
            if not ended:  # the sink has gone
                source.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            caller, _ = listener.accept()
            try:
                node = socket.create_connection(target(one.address), timeout=WAIT_S)
            except OSError:
                caller.close()
                continue
            one.count["connections"] += 1
            for pair in ((caller, node), (node, caller)):
                threading.Thread(target=forward, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    one.ready(address=f"127.0.0.1:{listener.getsockname()[1]}")
    one.ended.wait()


KINDS: dict[str, Callable[[Stranger], None]] = {
    kind.__name__: kind
    for kind in (
        queries, cold_readers, parked_pulls, idle_connections, many_keys,
        tls_handshakes, hellos, wrong_tokens, relay,
    )
}  # fmt: skip


if __name__ == "__main__":
    stranger = Stranger(json.loads(sys.argv[2]))
    KINDS[sys.argv[1]](stranger)
    print(json.dumps({**stranger.count, "worst_ms": stranger.worst_ms}), flush=True)
    os._exit(0)
