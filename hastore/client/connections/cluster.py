"""Decides which node is the master: the writable node of the greatest epoch. It does no I/O."""

import logging
from collections.abc import Callable, Container, Iterable, Mapping

from hastore.client.connections.bootstrap import is_connectable
from hastore.client.connections.transport import AddressSource, Arrival, NoAnswer
from hastore.client.lifecycle import CarefulLog
from hastore.protocol.api import MAP_TOPICS, Configs, MapInfo, Reply

log = CarefulLog(logging.getLogger(__name__))

MAX_ADDRESSES = 64


class ClusterView:
    """What a client knows of a group, from the nodes' maps. A map is one node's view of the group.

    `epoch` is the greatest epoch that a writable node has stated. `master` is the address of the
    latest such node, None while the client looks for one. A node of a lower epoch is never taken as
    the master, even if it is writable. A node may have several addresses, such as one that a user
    gave and the one that it states: the first by which it is known as the master stays, as long as
    its connection and the epoch do.

    The group is the one that ZooKeeper was asked for or that is given as `of_group`, the names of
    its cluster and of itself; else that of the first map. A node that says that it belongs to
    another one is not used: its address was given to another group. With `any_group` the nodes may
    be of several groups, as for an administrator's look at all of them.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        source: AddressSource | None = None,
        *,
        any_group: bool = False,
        of_group: tuple[str, str] | None = None,
        why_silent: Callable[[str], NoAnswer | None] = lambda _address: None,
    ) -> None:
        """Know the addresses alone; `why_silent` is called for the text of an error, in its thread.

        That is `Transport.silence`.
        """
        self.addresses: list[str] = list(dict.fromkeys(addresses))
        self._why_silent = why_silent
        self._source = source
        self._group = of_group if source is None else source.group_names
        self._any_group = any_group and source is None
        self.maps: dict[str, MapInfo] = {}
        self.refusals: dict[str, str] = {}  # by address, why the node is not used
        self.strangers: set[str] = set()  # those of them that are of another group
        self.epoch = 0
        self.master: str | None = None
        self.default_queues = 4
        self.queues: Mapping[str, int] = {}  # of topics that have another number
        # Of topics for which the map has no room: the master's answer, or an earlier map's number.
        self.more_queues: dict[str, int] = {}

    def learn(self, address: str, info: MapInfo) -> bool:
        """Apply a node's map; returns whether it shows a new master or a new epoch."""
        stranger = None if self._any_group else self._of_another_group(info)
        if stranger is not None:
            if self.refusals.get(address) != stranger:  # the client goes on with the other nodes
                log.warning("client: %s is not used: %s", address, stranger)
            self._drop(address, stranger)
            self.strangers.add(address)
            return False
        self.maps[address] = info
        self._accept(address)
        for named in (*info.nodes.values(), info.master_api):
            if named is not None:
                self.add(named)
        if info.writable and info.epoch >= self.epoch:
            if self._is_master(info):
                address = self.master or address
            moved = address != self.master or info.epoch > self.epoch
            self.epoch = info.epoch
            self.master = address
            self.default_queues = max(1, info.default_queues)
            if len(info.queues) >= MAP_TOPICS:  # topics may have lost their place to others
                before = self.queues
                gone = before.keys() - info.queues.keys()
                self.more_queues |= {topic: before[topic] for topic in gone}
            self.queues = info.queues  # last: other threads ask meanwhile
            return moved
        if address == self.master and not info.writable:
            self.master = None
        return False

    def queues_of(self, topic: str) -> int:
        """Return how many queues a message without a queue may go to."""
        queues = self.queues.get(topic)
        if queues is None:
            queues = self.more_queues.get(topic, self.default_queues)
        return max(1, queues)

    def knows_queues(self, topic: str) -> bool:
        """Whether `queues_of` is certain: a map lists the first MAP_TOPICS topics only."""
        return self.lists_all or topic in self.queues or topic in self.more_queues

    @property
    def lists_all(self) -> bool:
        """Whether the map has had room for all topics with another number of queues."""
        return len(self.queues) < MAP_TOPICS

    def note_queues(self, topic: str, reply: Reply) -> None:
        """Take the master's answer to AskConfigs: a topic that it does not have is a new one.

        One that nobody has configured is in no map either, whatever queues its messages have.
        """
        found = self.default_queues
        for one in reply.topics if isinstance(reply, Configs) else ():
            if one.name == topic and one.recorded:
                found = one.write_queues
        self.more_queues[topic] = found

    def _is_master(self, info: MapInfo) -> bool:
        """Whether a map is of the node that is followed, perhaps by another of its addresses."""
        followed = self.maps.get(self.master or "")
        return followed is not None and info.epoch == self.epoch and (
            (followed.cluster, followed.group, followed.node)
            == (info.cluster, info.group, info.node)
        )  # fmt: skip

    def _of_another_group(self, info: MapInfo) -> str | None:
        """Return why a node's map is not of this client's group; None if it is."""
        if info.cluster is None or info.group is None:  # of an older version
            return None
        theirs = (info.cluster, info.group)
        if self._group is None:
            self._group = theirs
        if self._group == theirs:
            return None
        return (
            f"it is node {info.node} of cluster {info.cluster}, group {info.group}, and this "
            f"client uses cluster {self._group[0]}, group {self._group[1]}: correct the addresses, "
            "or start the client again if the group has got another name"
        )

    def lose_connection(self, ended: Arrival) -> bool:
        """Apply the end of a connection; returns whether it was the master's."""
        was_master = self._drop(ended.address, ended.refused)
        if ended.gone:
            if ended.address in self.addresses:
                self.addresses.remove(ended.address)
            self._accept(ended.address)
        return was_master

    def _accept(self, address: str) -> None:
        self.refusals.pop(address, None)
        self.strangers.discard(address)

    def _drop(self, address: str, refused: str | None) -> bool:
        """Forget a node's map, and the master if it is that node; returns whether it was."""
        self.maps.pop(address, None)
        if refused is not None:
            self.refusals[address] = refused
            self.strangers.discard(address)
        if address != self.master:
            return False
        self.lose()
        return True

    @property
    def refused(self) -> str | None:
        """Why no node at all accepts this client; None while one may."""
        if not self.refusals:
            return None
        named = self._source.addresses if self._source is not None else ()
        if any(each not in self.refusals for each in (*self.addresses, *named)):
            return None
        return self.refusal_text

    def take_refused(self) -> str | None:
        """Return `refused`, and forget what the nodes have said: the next call asks them anew.

        By then a certificate may be renewed, or an identity be there. A refusal ends with a node's
        next answer, and while it counts no node is asked: kept, it would last for ever.
        """
        refused = self.refused
        if refused is not None:
            for address in self.refusals.keys() - self.strangers:
                del self.refusals[address]
        return refused

    @property
    def refusal_text(self) -> str:
        """What the nodes have said that do not accept this client; "" if there are none."""
        alike: dict[str, list[str]] = {}
        for address, why in list(self.refusals.items()):  # other threads ask, too
            alike.setdefault(why, []).append(address)
        return "; ".join(f"{', '.join(addresses)}: {why}" for why, addresses in alike.items())

    def add(self, address: str) -> None:
        """Remember an address that a node has stated."""
        if (
            address not in self.addresses
            and len(self.addresses) < MAX_ADDRESSES
            and is_connectable(address)
        ):
            self.addresses.append(address)

    def lose(self) -> None:
        """Forget the master, because it has refused a request or is gone."""
        self.master = None

    def replicas(self) -> list[str]:
        """Return the addresses to read from: slaves, then the master, then nodes without a map."""
        slaves = [a for a, info in self.maps.items() if not info.writable]
        masters = [a for a, info in self.maps.items() if info.writable]
        rest = [a for a in self.addresses if a not in self.maps]
        return [*slaves, *masters, *rest]

    def reason(self) -> str:
        """Return what the nodes answered, for an error text."""
        said = [
            f"{address}: {info.role} of epoch {info.epoch}, {info.reason or 'not writable'}"
            for address, info in list(self.maps.items())  # other threads ask, too
            if not info.writable
        ]
        said += self._superseded()
        if said or self.refusals.keys() - self.strangers:
            said += [self.refusal_text] if self.refusals else []
        return "; ".join(said) or self.silence()

    def _superseded(self) -> list[str]:
        """Return the nodes that take puts in an epoch before the last that this client has seen."""
        return [
            f"{address}: {info.role} of epoch {info.epoch}, and this client has seen epoch"
            f" {self.epoch}: if the group was begun anew, start the client again"
            for address, info in list(self.maps.items())
            if info.writable and info.epoch < self.epoch
        ]

    def absent(self, answered: Container[str] | None = None) -> dict[str, str]:
        """Return the nodes that cannot be asked for their messages, and what they did not do.

        `answered` are those that have answered, by default all with a map. Left out are other
        addresses of these, and nodes that do not accept this client.
        """
        maps = list(self.maps.items())  # other threads ask, too
        heard = {one: i for one, i in maps if answered is None or one in answered}
        newest = max((info.epoch for info in heard.values()), default=0)
        numbers = {info.node for info in heard.values()}
        named = {at: number for info in heard.values() for number, at in info.nodes.items()}
        found = {
            one: "did not answer"
            for one in self.addresses
            if one not in heard and one not in self.refusals and named.get(one) not in numbers
        }
        behind = [one for one, info in heard.items() if info.epoch < newest]
        return found | dict.fromkeys(behind, "did not follow the latest master")

    def silence(self, within: str = "") -> str:
        """Say that no node answers, and why, for an error text; `within` is like "within 5 s"."""
        if self._source is not None and not self.addresses:
            return self._source.problem()
        silent = [one for one in self.addresses if one not in self.strangers]
        if not silent and self.strangers:
            return self.refusal_text
        asked = ((one, self._why_silent(one)) for one in silent)
        whys = "; ".join(f"{one}: {why.text}" for one, why in asked if why is not None)
        told = f"no answer from {', '.join(silent)} {within}".rstrip()
        told += f" ({whys})" if whys else ""
        return f"{told}; {self.refusal_text}" if self.strangers else told
