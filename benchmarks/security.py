"""What identities and TLS on the client API cost: three groups with a master and a slave.

    python -m benchmarks.security [--repeats 5] [--scale 1] [--dir FOLDER]

The groups run at the same time and take turns: a plain one; one whose clients prove a key; one
whose clients also speak TLS. The links between the nodes are plain in all three. Messages have
1 KiB, and the slave confirms them; no put waits for a disk.
"""

import base64
import contextlib
import functools
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.certificates import Certificates
from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Group,
    arguments,
    save,
    scratch,
    touch_memory,
)
from benchmarks.loads import batched, blocking, pipelined
from benchmarks.side_by_side import OURS, Row, run_rounds, times_and_rates, with_client
from hastore.client.consumer.admin import Admin
from hastore.client.producer.producer import Producer
from hastore.client.security import Security
from hastore.security.identity_file import format_verifier
from hastore.security.scram import DEFAULT_ITERATIONS, SALT_BYTES, Credentials, derive

PLAIN, KEYS, TLS = "plain", "keys", OURS
LABELS = {PLAIN: "plain", KEYS: "identities without TLS"}
ONE, MANY = "one blocking put with TLS and identities", "64 puts in flight with TLS and identities"
BATCH = "send_batch of 100, 8 in flight, with TLS and identities"
CONNECT = "a new connection with TLS and identities"
STORE: dict[str, Any] = {"warm_files": True}


class Secrets(Certificates):
    """The files of a group with identities, and of its client."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        key, salt = secrets.token_hex(32), secrets.token_bytes(SALT_BYTES)
        self.token = f"bench:{key}"
        self.key = self.write("client.key", key.encode())
        verifier = derive(key, salt, DEFAULT_ITERATIONS)
        credentials = Credentials(salt, DEFAULT_ITERATIONS, (verifier,))
        text = (
            f'challenge_secret: "{base64.b64encode(secrets.token_bytes(32)).decode()}"\n'
            'identities:\n  bench:\n    produce: ["blocking", "pipelined*", "batched"]\n'
            f'    keys:\n      - verifier: "{format_verifier(credentials, verifier)}"\n'
        )
        self.identities = self.write("identities.yaml", text.encode())

    def sections(self, name: str) -> Callable[[int], Mapping[str, Any]] | None:
        """Return what makes the section `security` of a group's nodes; None for the plain group."""
        if name == KEYS:
            return lambda _number: {"identities": self.identities}
        if name == TLS:
            return functools.partial(self.section, identities=self.identities, api="tls")
        return None

    def client(self, *, tls: bool) -> Security:
        """Return what a client needs."""
        return Security(self.ca if tls else None, identity="bench", key_file=self.key)


def connect(hosts: list[str], security: Security, count: int) -> list[float]:
    """Return the times, in ms, from a new client to its first answer."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        with Admin(hosts[:1], security=security) as admin:
            admin.maps()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def rows(groups: Mapping[str, tuple[Group, Security]]) -> list[Row]:
    """Return the loads on each group; the figures compare TLS with each of the others."""
    peers = {system: (label, None) for system, label in LABELS.items()}
    found = {
        name: (group.bootstrap, security) for name, (group, security) in groups.items()
    }
    return [
        Row(
            ONE, "ms",
            {n: (1_500, lambda c, h=h, s=s: blocking(h, c, s)) for n, (h, s) in found.items()},
            peers,
        ),
        Row(
            MANY, "msg/s",
            {
                n: (30_000, lambda c, h=h, s=s: pipelined(h, in_flight=64, count=c, security=s))
                for n, (h, s) in found.items()
            },
            peers,
        ),
        Row(
            BATCH, "msg/s",
            {
                n: (
                    80_000,
                    lambda c, h=h, s=s: batched(h, batch=100, in_flight=8, count=c, security=s),
                )
                for n, (h, s) in found.items()
            },
            peers,
        ),
        Row(
            CONNECT, "ms",
            {n: (200, lambda c, h=h, s=s: connect(h, s, c)) for n, (h, s) in found.items()},
            peers,
        ),
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, int(12 * 1024 * MIB * given.scale)))
        touch_memory(folder, int(3 * 1024 * MIB * given.scale))
        own = Secrets(folder / "secrets")
        groups: dict[str, tuple[Group, Security]] = {}
        for name in (PLAIN, KEYS, TLS):
            (folder / name).mkdir()
            group = Group(folder / name, store=STORE, security=own.sections(name))
            stack.enter_context(group)
            security = Security() if name == PLAIN else own.client(tls=name == TLS)
            groups[name] = group, security
            for number in (1, 2):
                group[number].token = None if name == PLAIN else own.token
            group.start()
            with Producer(group.bootstrap, security=security) as producer:
                producer.send_sync("blocking", bytes(BODY_BYTES))
        loads = rows(groups)
        systems = {name: with_client(group.costs) for name, (group, _) in groups.items()}
        run_rounds(loads, systems, given.repeats, given.scale)
    figures = times_and_rates(loads)
    save("security", figures, {"body_bytes": BODY_BYTES, "scale": given.scale})


if __name__ == "__main__":
    main()
