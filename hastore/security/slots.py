"""Slots: which connection of a port that anyone reaches makes room for a new one. Pure but for DNS.

Whoever has not said yet who he is holds one of few slots. If the oldest one had to go, a flood of
new connections would end each of them after the same short time, and an honest caller over a slow
network would never finish. So, when the slots are taken:

- the source with the most of them gives one up: a flood from one host costs another one nothing;
- among its own it is drawn at random: no number of connections ends one of them for certain.

Hosts that belong to the group, or have proved who they are, have slots of their own (KnownHosts).
"""

import collections
import functools
import ipaddress
import logging
import random
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hastore.addresses import is_numeric, parse_address, plain_host
from hastore.clock import Clock
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)

T = TypeVar("T")

PROVED_MAX = 64  # hosts that are remembered because somebody there has proved who he is
LOOKUP_MS = 60_000.0  # names of hosts are looked up again after so long
_random = random.SystemRandom()  # who floods must not know who is drawn


def source_of(host: str) -> str:
    """Return what counts as one source: the host, of an IPv6 host its network of 64 bits."""
    try:
        ip = ipaddress.ip_address(plain_host(host.partition("%")[0].strip("[]")))
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address) and not ip.is_loopback:
        return str(ipaddress.IPv6Network((ip, 64), strict=False))
    return str(ip)


def crowded_out(
    held: Sequence[T], source: Callable[[T], str], draw: Callable[[Sequence[T]], T] = _random.choice
) -> T:
    """Return who gives up its slot: one, drawn at random, of the source that has most of `held`."""
    sources = [source(one) for one in held]
    counts = collections.Counter(sources)
    most = max(counts.values())
    return draw([one for one, its in zip(held, sources, strict=True) if counts[its] == most])


class KnownHosts:
    """The hosts that have slots of their own. Thread-safe.

    `addresses()` returns those of the group, "HOST:PORT". A host that is a name counts once it was
    looked up, by a thread for each, as DNS may be slow.
    """

    def __init__(
        self, addresses: Callable[[], Iterable[str]], clock: Clock, *, on_failure: OnFailure
    ) -> None:
        self._addresses = addresses
        self._clock = clock
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._proved: dict[str, None] = {}  # the latest last
        self._of_names: dict[str, frozenset[str]] = {}
        self._lookups: dict[str, tuple[float, _Lookup]] = {}  # by name: the last, when it began

    def __contains__(self, source: str) -> bool:
        """Whether a source, as `source_of` returns it, is known."""
        names, found = [], source in self._proved
        for address in self._addresses():
            host, is_name = _host(address)
            if is_name:
                names.append(host)
                found = found or source in self._of_names.get(host, ())
            else:
                found = found or source == host
        if names:
            self._look_up(names)
        return found

    def learn(self, source: str) -> None:
        """Remember a source, because somebody there has proved who he is."""
        with self._lock:
            proved = {one: None for one in self._proved if one != source}
            while len(proved) >= PROVED_MAX:
                del proved[next(iter(proved))]
            self._proved = {**proved, source: None}

    def _look_up(self, names: list[str]) -> None:
        """Begin to look up each name, unless that was done a short time ago."""
        with self._lock:
            now = self._clock.monotonic_ms()
            for name in names:
                began_ms, last = self._lookups.get(name, (now - LOOKUP_MS, None))
                if now - began_ms < LOOKUP_MS or (last is not None and last.alive):
                    continue
                lookup = _Lookup(name, self._found, on_failure=self._on_failure)
                try:
                    lookup.start()
                except RuntimeError as error:  # no more threads: the next connection tries it again
                    log.debug("no thread to look up the group's hosts: %s", error)
                    return
                self._lookups[name] = now, lookup

    def _found(self, name: str, sources: frozenset[str]) -> None:
        with self._lock:
            known = self._of_names.get(name, frozenset())
            self._of_names = {**self._of_names, name: sources or known}


class _Lookup(Service):
    """Look up a host's name once; DNS cannot be interrupted, so nobody waits for the end."""

    def __init__(
        self,
        name: str,
        found: Callable[[str, frozenset[str]], None],
        *,
        on_failure: OnFailure,
    ) -> None:
        super().__init__("HostLookup", on_failure=on_failure)
        self._host = name
        self._found = found

    def run(self) -> None:
        """Look up the name; one that is not found keeps what was found before."""
        try:
            infos = socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.info("the host %s of the group is not found: %s", self._host, error)
            infos = []
        self._found(self._host, frozenset(source_of(str(one[4][0])) for one in infos))


@functools.lru_cache(maxsize=256)
def _host(address: str) -> tuple[str, bool]:
    """Return the source or, with True, the name to look up of an address of the group."""
    host = (parse_address(address) or (address, 0))[0]
    return (source_of(host), False) if is_numeric(host) else (host, True)
