"""Attacks of strangers on a node that asks who its clients are, over TLS; one process each.

    python -m tests.process.identity_attacks KIND HOST PORT SECONDS CA

The last line of the output is JSON: how many connections were made, and how many of them the node
ended within the seconds.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import time

from hastore.protocol import api
from hastore.protocol.zmtp import encode_front
from hastore.security.scram import MECHANISM, ScramClient
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import TlsEngine
from tests.process.api_attacks import SHAKEN

MANY = 200


class Stranger:
    """One connection, as far as a stage: "tcp", "hello", "tls", "zmtp", "challenge"."""

    def __init__(self, target: tuple[str, int], contexts: TlsContexts, stage: str) -> None:
        self.sock = socket.create_connection(target, timeout=20)
        self.engine = TlsEngine(contexts.client(), server_side=False, host=target[0])
        self.hello = self.engine.take_outgoing()
        if stage == "hello":
            self.sock.sendall(self.hello[:-7])
        if stage in ("tls", "zmtp", "challenge"):
            self.sock.sendall(self.hello)
            while not self.engine.open:
                data = self.sock.recv(65536)
                if not data:
                    raise ConnectionError("ended during the handshake")
                self.engine.receive(data)
                self.sock.sendall(self.engine.take_outgoing())
        if stage in ("zmtp", "challenge"):
            self.say(SHAKEN)
        if stage == "challenge":
            self.ask(api.Auth(1, MECHANISM, f"n,,n=orders,r={secrets.token_urlsafe(18)}"))

    def say(self, data: bytes) -> None:
        """Send plaintext."""
        self.sock.sendall(self.engine.encrypt(data))

    def ask(self, request: api.Request) -> None:
        """Send a request."""
        self.say(encode_front(api.encode(request)))

    def ended(self) -> bool:
        """Whether the node has closed the connection."""
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                while self.sock.recv(65536):
                    pass
                return True
            except ConnectionError:
                return True
        return False


def crowd(target: tuple[str, int], contexts: TlsContexts, seconds: float) -> tuple[int, int]:
    """Make 200 connections that never finish, at every stage, and wait for their end."""
    stages = ("tcp", "hello", "tls", "zmtp", "challenge")
    made = [Stranger(target, contexts, stages[n % len(stages)]) for n in range(MANY)]
    return MANY, wait_ends(made, seconds)


def drops(target: tuple[str, int], contexts: TlsContexts, seconds: float) -> tuple[int, int]:
    """Send one byte a second on each of 200 connections."""
    made = [Stranger(target, contexts, "tcp") for _ in range(MANY)]
    gone = 0
    end = time.monotonic() + seconds
    for place in range(200):
        for one in list(made):
            try:
                one.sock.sendall(one.hello[place : place + 1])
            except OSError:
                made.remove(one)
                gone += 1
        gone += len(done := [one for one in made if one.ended()])
        made = [one for one in made if one not in done]
        if not made or time.monotonic() > end:
            break
        for one in made:
            one.sock.setblocking(True)
        time.sleep(1.0)
    return MANY, gone


def garbage(target: tuple[str, int], contexts: TlsContexts, seconds: float) -> tuple[int, int]:
    """Fail the handshake in every way, as fast as possible."""
    end, count, gone = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        one = Stranger(target, contexts, "tcp")
        kind = count % 4
        with contextlib.suppress(OSError):
            if kind == 0:
                one.sock.sendall(SHAKEN)
            elif kind == 1:
                one.sock.sendall(one.hello[:5] + secrets.token_bytes(len(one.hello) - 5))
            elif kind == 2:
                one.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            else:
                one.sock.sendall(one.hello)
                one.sock.recv(4096)
                one.sock.sendall(secrets.token_bytes(200))
        count += 1
        gone += wait_ends([one], 20.0)
    return count, gone


def keys(target: tuple[str, int], contexts: TlsContexts, seconds: float) -> tuple[int, int]:
    """Try wrong keys, as fast as possible."""
    end, count, gone = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        name = ("orders", f"nobody{count}")[count % 2]
        scram = ScramClient(name, secrets.token_hex(32), secrets.token_urlsafe(18))
        with contextlib.suppress(OSError):
            one = Stranger(target, contexts, "zmtp")
            one.ask(api.Auth(1, MECHANISM, scram.first()))
            said = b""
            while b"challenge" not in said:
                data = one.sock.recv(65536)
                if not data:
                    break
                said += one.engine.receive(data)
            text = said[said.index(b"r=") :].decode("ascii", "replace")
            one.ask(api.Prove(2, scram.final(text)))
            gone += wait_ends([one], 20.0)
        count += 1
    return count, gone


def wait_ends(made: list[Stranger], seconds: float) -> int:
    """Wait until the node has ended the connections; return how many."""
    end, waiting, count = time.monotonic() + seconds, made, len(made)
    while waiting and time.monotonic() < end:
        still = [one for one in waiting if not one.ended()]
        for one in waiting:
            if one not in still:
                one.sock.close()
        waiting = still
        time.sleep(0.001 if count == 1 else 0.02)
    for one in waiting:
        one.sock.close()
    return count - len(waiting)


KINDS = {"crowd": crowd, "drops": drops, "garbage": garbage, "keys": keys}

if __name__ == "__main__":
    kind, host, port, seconds_text, ca = sys.argv[1:]
    done, over = KINDS[kind]((host, int(port)), TlsContexts(TlsFiles(ca)), float(seconds_text))
    print(json.dumps({"connections": done, "ended": over}))
