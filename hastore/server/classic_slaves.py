"""Is a RocketMQ slave's log this one's? The HA link does not say: it has a length alone.

A broker that was killed may have a tail that this group never got, where the group has written
other messages since. As its slave it would keep that tail, and once master again lose all behind
it. So before its stream begins, the broker is asked for the records at the starts of this group's
epochs (33 VIEW_MESSAGE_BY_ID), where the logs part, where it has registered that it answers (103).
"""

import logging

from hastore.clock import Clock
from hastore.errors import HastoreError
from hastore.ha.node.member import Member
from hastore.protocol.remoting import Code
from hastore.server.broker_client import BrokerClient
from hastore.server.broker_tables import read_log_range
from hastore.store.message_store import MessageStore

log = logging.getLogger(__name__)

STARTS_MAX = 16  # so many of the newest epochs are looked at
SLAVES_MAX = 64  # whose addresses are kept
GRACE_MS = 45_000.0


class ClassicSlaves:
    """The RocketMQ slaves that have registered; any thread calls it."""

    def __init__(self, member: Member, store: MessageStore, clock: Clock) -> None:
        self._member, self._store, self._clock = member, store, clock
        self._known: dict[str, str] = {}  # host -> where its broker answers
        self._since_ms: dict[str, float] = {}  # host -> since when it cannot be compared
        self.problem: str | None = None  # of the last slave that came

    def note(self, address: str) -> None:
        """Keep the address of a slave that registers."""
        if len(self._known) < SLAVES_MAX:
            self._known[address.rpartition(":")[0]] = address

    def refusal(self, host: str, report: int) -> str | None:
        """Return why a slave at this host may not go on at its report; None if it may."""
        starts = [one.start for one in self._member.state.history[-STARTS_MAX:]]
        places = sorted({self._store.after_blank(at) for at in starts if at >= self._first()})
        places = [at for at in places if at < report]
        self.problem = None
        if not places:
            return None
        address = self._known.get(host)
        if address is None:
            return self._unknown(host, "it has not registered at this node")
        try:
            self.problem = self._difference(address, places, report)
        except (HastoreError, OSError) as failure:
            return self._unknown(host, f"its broker {address} cannot be asked: {failure}")
        self._since_ms.pop(host, None)
        return self.problem

    def _unknown(self, host: str, why: str) -> str | None:
        """Refuse the slave for a while: a slave registers each 30 s. Then serve it all the same."""
        now_ms = self._clock.monotonic_ms()
        self.problem = (
            f"nobody knows whether the log of the RocketMQ slave at {host} is this one: {why}; let "
            "its namesrvAddr name the api addresses of all nodes, and let them ask it"
        )
        if now_ms - self._since_ms.setdefault(host, now_ms) < GRACE_MS:
            return f"{self.problem}. It is served in a moment"
        log.warning("%s", self.problem)
        return None

    def _first(self) -> int:
        return max(1, self._store.min_offset)  # 0: no log of before can differ there

    def _difference(self, address: str, places: list[int], report: int) -> str | None:
        """Say where the slave's log is another one; raises HastoreError, OSError."""
        with BrokerClient(address, None, self._clock) as client:
            first = read_log_range(client.ask(Code.GET_BROKER_RUNTIME_INFO)).first
            for at in places:
                size = self._store.record_size(at)
                if at < first or size is None:
                    continue
                its = client.view(at)
                if at + size > report:  # it has a part of this record, if it is the same log
                    same = its is None
                else:
                    with self._store.view(at, size) as own:
                        same = its == bytes(own)
                if not same:
                    return _problem_of_other(address, at)
        return None


def _problem_of_other(address: str, at: int) -> str:
    return (
        f"the log of the RocketMQ slave {address} is another one from {at} on: it has messages "
        "that this group never got, and would lose this group's as a master; it is not served. "
        "Stop it, move its store away (its own messages are there alone), and let it start with "
        "an empty one"
    )
