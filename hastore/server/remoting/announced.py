"""What a node tells name servers, and other groups, of itself: as which brokers, which topics.

    the master           the group's name, id 0, with all topics
    another node         the group's name, its own number as id, no topics: name servers take
                         those of id 0 only
                         GROUP@NODE, id 0 (`remoting.twins`), with all topics, to write only

The threads of `server/name_servers.py` ask; each method says what it waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from hastore.clock import Clock
from hastore.config.model import Config
from hastore.protocol.group_note import GroupRoutes, OtherBroker, OtherTopic
from hastore.protocol.registration import INHERIT, MASTER_ID, BrokerName, Queues, second_address
from hastore.server.api.backend import ApiBackend
from hastore.server.remoting.door import Door
from hastore.server.remoting.routes import (
    OWN,
    RETRY,
    TBW102,
    TWIN,
    WRITE,
    Brokers,
    TopicView,
    WithGroups,
    address_of,
)

GROUPS_MS = 2_000.0  # so often the groups of consumers are looked for
SELF_TEST = "SELF_TEST_TOPIC"  # each broker of RocketMQ has it
ASK_S = 1.0  # the API's thread says them in that time, or the next time


class Standing(NamedTuple):
    """What a node is now, as brokers. `seen`: changes when its topics may have changed."""

    own: BrokerName | None  # None: it is out of its group
    twin: BrokerName | None
    epoch: int
    addresses: frozenset[str]  # of all nodes of the group, and of their twins
    seen: tuple[int, int, bool]

    @property
    def is_master(self) -> bool:
        """Whether the node is the group's master, as far as it knows."""
        return self.own is not None and self.own.broker_id == MASTER_ID

    @property
    def brokers(self) -> tuple[BrokerName, ...]:
        """The brokers that the node is; the one that a name server must have first comes first."""
        return tuple(one for one in (self.own, self.twin) if one is not None)


class Announced:
    """What one node is as brokers; any thread may ask."""

    def __init__(
        self,
        door: Door,
        config: Config,
        topics: TopicView,
        with_groups: WithGroups,
        brokers: Brokers,
    ) -> None:
        """Prepare; `with_groups` makes a call, in the API's thread, with all known groups."""
        self._door = door
        self._config = config
        self._topics = topics
        self._with_groups = with_groups
        self._brokers = brokers
        self._backend: ApiBackend = door.parts.backend
        self._clock: Clock = door.parts.clock
        self._guard = threading.Lock()
        self._groups: frozenset[str] = frozenset()
        self._asked_ms = float("-inf")

    def now(self) -> Standing:
        """Return what the node is now; nothing is waited for."""
        config, backend = self._config, self._backend
        known = backend.master_map()
        at = {number: address_of(api) for number, api in known.nodes.items()}
        address, is_master = at.get(known.node), known.master_node == known.node
        own = twin = None
        if address is not None and backend.outdated() is None:
            number = MASTER_ID if is_master else known.node
            own = BrokerName(config.cluster, config.group, number, address)
            has_twin = config.remoting.twins and not backend.copies_broker()
            if has_twin and not is_master and len(at) > 1:
                name = f"{config.group}{TWIN}{known.node}"
                twin = BrokerName(config.cluster, name, MASTER_ID, second_address(address))
        store = backend.store
        waits = backend.routes_wait()
        seen = (store.topic_table.version, store.queues.topic_count, waits)
        addresses = frozenset({*at.values(), *map(second_address, at.values())})
        return Standing(own, twin, known.epoch, addresses, seen)

    def groups(self) -> frozenset[str]:
        """Return the names of the known groups of consumers; waits ASK_S at most."""
        with self._guard:
            now = self._clock.monotonic_ms()
            if now - self._asked_ms < GROUPS_MS:
                return self._groups
            self._asked_ms = now
        found: list[frozenset[str]] = []
        heard = threading.Event()

        def take(groups: Iterable[str]) -> None:
            found.append(frozenset(groups))
            heard.set()

        self._door.later(lambda: self._with_groups(take))
        heard.wait(ASK_S)
        with self._guard:
            if found:
                self._groups = found[0]
            return self._groups

    def table(self, groups: Iterable[str]) -> list[Queues]:
        """Return the topics of the group, as the master has them; it may be many.

        Those whose queues may still become a broker's come later.
        """
        found = {name: Queues(name, 1, 1, INHERIT) for name in self.own_topics}
        if self._topics.auto_create and not self._topics.route_waits(TBW102):
            pattern = self._topics.to_be(TBW102)
            if pattern is not None:
                found[TBW102] = Queues(TBW102, *pattern)
        for group in groups:
            if not group.startswith(OWN):
                found[RETRY + group] = Queues(RETRY + group, 1, 1, 6)
        for name in self._topics.names():
            shape = self._topics.find(name)
            if shape is not None and not self._topics.route_waits(name):
                found[name] = Queues(name, *shape)
        return list(found.values())

    def group_brokers(self) -> tuple[OtherBroker, ...]:
        """Return the brokers of the whole group, as this node knows them."""
        return tuple(OtherBroker(*broker) for broker in self._brokers.all())

    def note(
        self, table: Iterable[Queues], epoch: int, brokers: tuple[OtherBroker, ...]
    ) -> GroupRoutes:
        """Return what the group's master states to other groups."""
        own = frozenset(self.own_topics)
        topics = [OtherTopic(*one) for one in table if one.topic not in own or one.perm != INHERIT]
        return GroupRoutes(self._config.group, epoch, list(brokers), topics)

    def deleted(self) -> list[str]:
        """Return the names of topics that were deleted, and are not forgotten."""
        return self._backend.store.topic_table.deleted()

    @property
    def own_topics(self) -> tuple[str, ...]:
        """Topics named as the cluster and the broker, as each broker of RocketMQ has them.

        So a name server's route of the latter says who is known by the group's name. Where both
        names are one there is another topic, since name servers of RocketMQ 5 refuse a broker that
        is new and has only one.
        """
        cluster, group = self._config.cluster, self._config.group
        return (cluster, group) if cluster != group else (cluster, group, SELF_TEST)


def to_write(table: Iterable[Queues]) -> list[Queues]:
    """Return topics as a write twin has them: producers send to it, consumers do not read there."""
    return [one._replace(perm=one.perm & WRITE) for one in table]
