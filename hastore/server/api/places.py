"""Places: who may keep a connection when all of `api.max_connections` are in use. Pure.

    accepted --> silent --first message, or proof--> used --> ended
                   |                                  |
                   +--- oldest first                  +--- longest unused first, if it waits for
                                                           nothing

A source is an IPv4 address, or the first 64 bits of an IPv6 address: one host has all of these. A
source or identity over its bound keeps its connections as long as there is room. When there is
none:

    the new connection is of a source over    that source's oldest silent connection goes, then its
    its bound                                 longest idle one, then the new one
    else                                      the oldest silent one goes, of the source that has
                                              most of them; then the longest idle one, of those over
                                              their bounds first; then the longest unused one of
                                              those over their bounds, though it waits; then the new
                                              one

Idle is who has had no request under way for `idle_ms`. The client of an idle connection loses
nothing with it, and connects again when it likes. PINGs do not count as use: the connection of a
client that was forgotten pings too.
"""

from __future__ import annotations

import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from hastore.addresses import plain_host


class Holder(Protocol):
    """What has a place: a connection."""

    source: str
    identity: str | None  # counted since `use`
    took_place: bool  # another one had to go for it

    @property
    def waits(self) -> bool:
        """Whether anything of it is under way: a request, a reply, an unfinished message."""
        ...


H = TypeVar("H", bound=Holder)


class Places(Generic[H]):
    """The holders of places, in the order in which they would have to go."""

    def __init__(
        self, limit: int, idle_ms: float, of_source: int | None, of_identity: int | None
    ) -> None:
        """Prepare for `limit` places; bounds that are None are half of them."""
        half = max(1, limit // 2)
        self.limit = limit
        self.idle_ms = idle_ms
        self._of_source = half if of_source is None else of_source
        self._of_identity = half if of_identity is None else of_identity
        self.silent: OrderedDict[H, None] = OrderedDict()  # oldest first
        self._used: OrderedDict[H, float] = OrderedDict()  # by the time of the last use
        self._by_source: Counter[str] = Counter()
        self._silent_of: Counter[str] = Counter()  # by source
        self._by_identity: Counter[str] = Counter()
        self._in_vain_ms: float | None = None  # when the last search found nobody

    def __len__(self) -> int:
        """Return the number of places in use."""
        return len(self.silent) + len(self._used)

    def add(self, holder: H) -> None:
        """Give a place to a new connection."""
        self.silent[holder] = None
        self._by_source[holder.source] += 1
        self._silent_of[holder.source] += 1

    def begin(self, holder: H) -> None:
        """Note that a silent connection has begun its handshake: it goes after those that did not.

        Otherwise a flood would end it while its client's next packet is on its way.
        """
        self.silent.move_to_end(holder)

    def use(self, holder: H, now_ms: float) -> None:
        """Note that a connection is used; from the first time on it is not silent."""
        if holder in self._used:
            self._used[holder] = now_ms
            self._used.move_to_end(holder)
        elif holder in self.silent:
            del self.silent[holder]
            _subtract(self._silent_of, holder.source)
            self._used[holder] = now_ms
            if holder.identity is not None:
                self._by_identity[holder.identity] += 1

    def remove(self, holder: H) -> None:
        """Take the place of a connection back."""
        if self._used.pop(holder, None) is None:
            del self.silent[holder]
            _subtract(self._silent_of, holder.source)
        elif holder.identity is not None:
            _subtract(self._by_identity, holder.identity)
        _subtract(self._by_source, holder.source)

    def most(self) -> tuple[str, int]:
        """Return the source with the most connections, and how many, for a line of the log."""
        return max(self._by_source.items(), key=lambda each: each[1])

    def unused_ms(self, holder: H, now_ms: float) -> float | None:
        """Return for how long a connection was not used; None for a silent one."""
        used_ms = self._used.get(holder)
        return None if used_ms is None else now_ms - used_ms

    def to_end(self, latest: H, now_ms: float, is_quiet: Callable[[H], bool]) -> H:
        """Return which connection goes for `latest`, perhaps itself.

        `is_quiet` says whether the kernel has no unread bytes of a connection; asked last.
        """
        if self._by_source[latest.source] > self._of_source:
            source = latest.source
            for one in self.silent:
                if one.source == source and one is not latest:
                    return one
            own = self._idle(now_ms, is_quiet, lambda one: one.source == source)
            return latest if own is None else own
        silent = self.oldest_silent()
        if silent is not None and silent is not latest:
            return silent
        if self._in_vain_ms == now_ms:  # a flood must not pay a search for each of its connections
            return latest
        victim = self._idle(now_ms, is_quiet, self._is_over) or self.idle(now_ms, is_quiet)
        if victim is None:
            victim = next((one for one in self._used if self._is_over(one)), None)
        if victim is None:
            self._in_vain_ms = now_ms
        return latest if victim is None else victim

    def oldest_silent(self) -> H | None:
        """Return the oldest silent connection of the source that has most of them."""
        source, many = max(self._silent_of.items(), key=lambda each: each[1], default=("", 0))
        if many <= 1:
            return next(iter(self.silent), None)
        return next(one for one in self.silent if one.source == source)

    def to_end_of_identity(
        self, latest: H, now_ms: float, is_quiet: Callable[[H], bool]
    ) -> H | None:
        """Return which connection of an identity over its bound goes for another one of its own.

        None: there is room, or was when it came.
        """
        name = latest.identity
        if not latest.took_place or len(self) < self.limit:
            return None
        if self._by_identity[name or ""] <= self._of_identity:
            return None
        own = self._idle(now_ms, is_quiet, lambda one: one.identity == name)
        return latest if own is None else own

    def idle(self, now_ms: float, is_quiet: Callable[[H], bool]) -> H | None:
        """Return the connection that has been idle for longest."""
        return self._idle(now_ms, is_quiet, lambda _: True)

    def _idle(
        self, now_ms: float, is_quiet: Callable[[H], bool], counts: Callable[[H], bool]
    ) -> H | None:
        for holder in self._unused(now_ms):
            if not holder.waits and counts(holder) and is_quiet(holder):
                return holder
        return None

    def _unused(self, now_ms: float) -> Iterator[H]:
        """Yield the connections that have not been used for `idle_ms`, longest first."""
        for holder, used_ms in self._used.items():
            if now_ms - used_ms < self.idle_ms:
                return
            yield holder

    def _is_over(self, holder: H) -> bool:
        if self._by_source[holder.source] > self._of_source:
            return True
        identity = holder.identity
        return identity is not None and self._by_identity[identity] > self._of_identity


def source_of(host: str) -> str:
    """Return what counts as the source of a connection from this numeric address."""
    host = plain_host(host)
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed == bytes(15) + b"\1":
        return host
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def _subtract(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
