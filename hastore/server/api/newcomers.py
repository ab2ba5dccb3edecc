"""Newcomers: whose turn it is of the connections that have sent no request yet, and how much of the
API's time they get. Pure.

A stranger's packet costs it much less than it costs the node. So known clients are read and
answered first, and then newcomers get a slice: a few are accepted, and then one at a time is read,
until SLICE_MS are over. Between two slices known clients have their turn again, and all slices
together get at most SHARE of the time. So a put waits for a slice at most, and on average for much
less, however many strangers come. The rest of them waits, in the kernel or here. What TLS must
compute for a newcomer is computed in another thread (`handshakes.py`).

Sources take turns, so that a flood from one address holds up nobody else's first connection. Of one
source, who has begun goes before who has not: an honest client that was let in gets through, and a
stranger that sends nothing but beginnings does not delay it. That holds for BEGUN_TURNS.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

SLICE_MS = 0.25
SHARE = 0.5  # of the time; a client that connects again after a failover is a newcomer too
ROUNDING_MS = 0.001  # so that the end of `wait_ms` is the time of the next slice
CREDIT_MS = 2.0  # what is kept of unused time
OF_SOURCE_MAX = 256  # that wait for a turn; a further connection is closed as it is accepted
BEGUN_TURNS = 8  # TLS's handshake, that of ZMTP and the proof need about five


class Newcomer(Protocol):
    """A connection without a request."""

    source: str
    turns: int  # how often it was read


N = TypeVar("N", bound=Newcomer)


class Newcomers(Generic[N]):
    """The newcomers that have something to read, in the order of their turns."""

    def __init__(self, now_ms: float) -> None:
        self.knocking = False  # a connection waits to be accepted
        self._waiting: OrderedDict[str, OrderedDict[N, int]] = OrderedDict()  # by source
        self._credit_ms = CREDIT_MS
        self._counted_ms = now_ms

    def __bool__(self) -> bool:
        """Return whether anything waits for a turn."""
        return self.knocking or bool(self._waiting)

    def is_full(self, source: str) -> bool:
        """Whether so many of a source wait that a further one would wait in vain."""
        of_source = self._waiting.get(source)
        return of_source is not None and len(of_source) >= OF_SOURCE_MAX

    def add(self, newcomer: N, mask: int) -> None:
        """Note what the epoll has reported of a newcomer."""
        of_source = self._waiting.setdefault(newcomer.source, OrderedDict())
        of_source[newcomer] = of_source.get(newcomer, 0) | mask
        if 0 < newcomer.turns < BEGUN_TURNS:
            of_source.move_to_end(newcomer, last=False)

    def discard(self, newcomer: N) -> None:
        """Forget a newcomer that has ended."""
        of_source = self._waiting.get(newcomer.source)
        if of_source is not None and of_source.pop(newcomer, None) is not None and not of_source:
            del self._waiting[newcomer.source]

    def pop(self) -> tuple[N, int] | None:
        """Return whose turn it is, and what was reported of it; None: nobody waits."""
        if not self._waiting:
            return None
        source, of_source = next(iter(self._waiting.items()))
        newcomer, mask = of_source.popitem(last=False)
        if of_source:
            self._waiting.move_to_end(source)
        else:
            del self._waiting[source]
        newcomer.turns += 1
        return newcomer, mask

    def may_begin(self, now_ms: float) -> bool:
        """Whether anything waits, and a slice may begin now."""
        earned_ms = SHARE * (now_ms - self._counted_ms)
        self._counted_ms = now_ms
        self._credit_ms = min(CREDIT_MS, self._credit_ms + earned_ms)
        return bool(self) and self._credit_ms > -ROUNDING_MS

    def spend(self, slice_ms: float) -> None:
        """Note how long a slice took."""
        self._credit_ms -= slice_ms

    def wait_ms(self, now_ms: float, *, only_knocking: bool) -> float:
        """Return the time until the next slice may begin; infinity if nothing waits.

        With `only_knocking` nobody can be read, for want of room in the thread of TLS.
        """
        if not self.knocking and (only_knocking or not self._waiting):
            return float("inf")
        return max(0.0, -self._credit_ms / SHARE - (now_ms - self._counted_ms))
