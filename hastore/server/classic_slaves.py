"""Is a RocketMQ slave's log this one's? The HA link does not say: it has a length alone.

A broker that was killed may have a tail that this group never got, where the group has written
other messages since. As its slave it would keep that tail, and once master again lose all behind
it. So before its stream begins, the broker is asked for the records at the starts of this group's
epochs (33 VIEW_MESSAGE_BY_ID), where the logs part, where it has registered that it answers (103).
"""

import logging
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from hastore.addresses import parse_address
from hastore.clock import Clock
from hastore.errors import HastoreError
from hastore.ha.node.member import Member
from hastore.protocol.remoting import Code
from hastore.server.broker_client import BrokerClient
from hastore.server.broker_tables import LogRange, read_log_range
from hastore.store.message_store import MessageStore

log = logging.getLogger(__name__)

STARTS_MAX = 16  # so many of the newest epochs below a slave's end are looked at
SLAVES_MAX = 64  # hosts of which something is kept
BROKERS_MAX = 8  # of one host
GRACE_MS = 45_000.0
RECENT_MS = 60_000.0  # a slave that is refused comes again after some seconds
_T = TypeVar("_T")


class ClassicSlaves:
    """The RocketMQ slaves that have registered; any thread calls it.

    `linked` returns the hosts of the slaves that are served now.
    """

    def __init__(
        self,
        member: Member,
        store: MessageStore,
        clock: Clock,
        linked: Callable[[], Collection[str]],
    ) -> None:
        self._member, self._store, self._clock, self._linked = member, store, clock, linked
        self._guard = threading.Lock()
        self._known: dict[str, list[str]] = {}  # host -> where brokers there answer, newest last
        # host -> when it came first and last, while its log cannot be compared
        self._tries_ms: dict[str, tuple[float, float]] = {}
        self._problems: dict[str, tuple[float, str]] = {}  # host -> when it was told, and what

    def note(self, address: str) -> None:
        """Keep the address of a slave that registers; one that is none is left out."""
        endpoint = parse_address(address)
        if endpoint is None or not endpoint[1]:
            return
        with self._guard:
            known = [one for one in self._known.pop(endpoint[0], ()) if one != address]
            _keep(self._known, endpoint[0], [*known, address][-BROKERS_MAX:])

    def problems(self) -> list[str]:
        """Return what an operator must know of slaves that are here, or came just now."""
        now_ms, linked = self._clock.monotonic_ms(), self._linked()
        with self._guard:
            for host, (told_ms, _) in list(self._problems.items()):
                if host not in linked and now_ms - told_ms > RECENT_MS:
                    del self._problems[host]
            return [problem for _, problem in self._problems.values()]

    def refusal(self, host: str, report: int) -> str | None:
        """Return why a slave at this host may not go on at its report; None if it may."""
        first = max(1, self._store.min_offset)  # 0: no log of before can differ there
        starts = [one.start for one in self._member.state.history if first <= one.start < report]
        found = sorted({self._store.after_blank(at) for at in starts})
        places = [at for at in found if at < report][-STARTS_MAX:]
        with self._guard:
            self._problems.pop(host, None)
            known = list(self._known.get(host, ()))
        if not places:
            return None
        if not known:
            return self._unknown(host, "it has not registered at this node")
        try:
            other = self._compare(known, places, report)
        except (HastoreError, OSError) as failure:
            return self._unknown(host, f"its broker {known[-1]} cannot be asked: {failure}")
        with self._guard:
            self._tries_ms.pop(host, None)
        if other is not None:
            self._tell(host, other)
        return other

    def _compare(self, known: list[str], places: list[int], report: int) -> str | None:
        """Say where the log of the broker that reports this is another one.

        Raises HastoreError, OSError. Of several brokers at one host those count whose log ends at
        the report.
        """
        failure: HastoreError | OSError = HastoreError(f"none there has a log up to {report}")
        is_found = False
        for address in known:
            try:
                with BrokerClient(address, None, self._clock) as client:
                    has = read_log_range(client.ask(Code.GET_BROKER_RUNTIME_INFO))
                    if len(known) > 1 and has.end != report:
                        continue
                    if (at := self._difference(client, has, places, report)) is not None:
                        return _problem_of_other(address, at)
                    is_found = True
            except (HastoreError, OSError) as why:
                failure = why
        if not is_found:
            raise failure
        return None

    def _unknown(self, host: str, why: str) -> str | None:
        """Refuse the slave for a while: a slave registers each 30 s. Then serve it all the same."""
        now_ms = self._clock.monotonic_ms()
        problem = (
            f"nobody knows whether the log of the RocketMQ slave at {host} is this one: {why}; let "
            "its namesrvAddr name the api addresses of all nodes, and let them ask it"
        )
        self._tell(host, problem)
        with self._guard:
            begin_ms, last_ms = self._tries_ms.pop(host, (now_ms, now_ms))
            if now_ms - last_ms > RECENT_MS:
                begin_ms = now_ms
            if now_ms - begin_ms < GRACE_MS:
                _keep(self._tries_ms, host, (begin_ms, now_ms))
                return f"{problem}. It is served in a moment"
        log.warning("%s", problem)
        return None

    def _tell(self, host: str, problem: str) -> None:
        with self._guard:
            _keep(self._problems, host, (self._clock.monotonic_ms(), problem))

    def _difference(
        self, client: BrokerClient, has: LogRange, places: list[int], report: int
    ) -> int | None:
        """Return the first place where a broker's log is another one; raises HastoreError."""
        for at in places:
            size = self._store.record_size(at)
            if at < has.first or size is None:
                continue
            its = client.view(at)
            if at + size > report:  # it has a part of this record, if it is the same log
                same = its is None
            else:
                with self._store.view(at, size) as own:
                    same = its == bytes(own)
            if not same:
                return at
        return None


def _keep(table: dict[str, _T], host: str, value: _T) -> None:
    """Set a host's value; of too many hosts the one that came first goes."""
    table[host] = value
    while len(table) > SLAVES_MAX:
        del table[next(iter(table))]


def _problem_of_other(address: str, at: int) -> str:
    return (
        f"the log of the RocketMQ slave {address} is another one from {at} on: it has messages "
        "that this group never got, and would lose this group's as a master; it is not served. "
        "Stop it, move its store away (its own messages are there alone), and let it start with "
        "an empty one"
    )
