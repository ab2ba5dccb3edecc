"""Routes: where a topic's queues are, as a name server tells it. Every node does, for its group.

With `registry` it also does for all other groups of its cluster (elsewhere.py): then a topic has
the queues of each group that has it, and the topics that each group would give a route have one of
all groups.

    brokers      the group, by its name: id 0 is the master, another id is the number of a node
                 that serves reads, as far as the one knows that is asked: a slave knows itself
                 GROUP@NODE for each other node (`remoting.twins`): id 0 is that node, which
                 forwards to the master; producers send there, consumers do not read there;
                 not before a group that copies a RocketMQ broker has had a master of its own
    queues       numbers and permission of the topic, for each of these brokers

A topic that does not exist has a route all the same, if its first send would create it:

    TBW102                  the pattern of new topics, for producers
    %RETRY%g, %DLQ%g        always, since a group's first retry must not wait for the next route
    another one             when the same client asks again, without a look at TBW102 in between:
                            so asks a consumer that starts first, while a producer asks for TBW102

A client keeps a route for 30 s, and a send to a queue that its topic does not have is refused. So
right after a promotion from a RocketMQ broker a route waits, on each node, until the node knows the
broker's topics, or this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import msgspec

from hastore.config.model import Config, RemotingConfig
from hastore.errors import UNREADABLE, MessageIllegalError
from hastore.protocol.api import Put
from hastore.protocol.group_note import OtherBroker
from hastore.protocol.remoting import Answer, Code, Frame, encode_body
from hastore.record.properties import check_topic
from hastore.record.topic_records import TopicConfig
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.elsewhere import Elsewhere
from hastore.server.remoting.group_requests import read_aside

TBW102 = "TBW102"
RETRY, DLQ = "%RETRY%", "%DLQ%"
OWN = "HASTORE_"  # topics of the group itself begin so
READ, WRITE, INHERIT = 4, 2, 1
TWIN = "@"  # between the names of a group and of its node
ASKED_MAX = 64  # topics that do not exist and that one client has asked for
MASTER_ID = 0  # of the master among a broker's nodes
ASK_MS = 1_000.0  # so often a slave asks the master who serves reads
KNOWN_MS = 10_000.0  # so long its answer counts
WANTED_MS = 90_000.0  # nobody asks for so long after the last route
FIRST_MS = 300.0  # the first route waits for the master's answer so long
WAITING_MAX = 10_000  # routes that wait for it, and others that wait for a broker's topics
LOOK_MS = 50.0  # so often it is looked for these
PROMISED_MAX = 10_000  # topics that do not exist and have been given a route
WithGroups = Callable[[Callable[[Iterable[str]], None]], None]
_SCHEME = "tcp://"
_APPLY = "topic[%s] not exist, apply first please!"
_NOT_TAKEN = "topic %s: the RocketMQ broker's topics are not taken over yet"


class Shape(NamedTuple):
    """A topic, as clients see it: its numbers of queues, and its permission."""

    read: int
    write: int
    perm: int = READ | WRITE
    order: bool = False
    sys_flag: int = 0


class TopicView:
    """The topics of a node's group as its remoting clients see them."""

    def __init__(self, backend: ApiBackend, *, auto_create: bool) -> None:
        """Prepare; with `auto_create` a send to a topic that does not exist creates it."""
        self._backend = backend
        self.auto_create = auto_create
        self._promised: OrderedDict[str, None] = OrderedDict()
        self._shapes: dict[str, tuple[TopicConfig, Shape]] = {}  # a cache
        # Creates a topic by a record, for a producer that wants fewer queues than others have. It
        # waits for the nodes that this put, the producer's, waits for.
        self.make: Callable[[TopicConfig, Put], None] = lambda _config, _put: None
        self.making: dict[str, TopicConfig] = {}  # whose records have no outcome yet

    @property
    def default_queues(self) -> int:
        """The number of queues of a new topic."""
        return self._backend.master_map().default_queues

    def find(self, topic: str) -> Shape | None:
        """Return a topic that exists."""
        config = self._backend.store.topic_table.find(topic)
        if config is None or topic.startswith(OWN):
            return None
        if (
            topic.startswith((RETRY, DLQ))
            and self._backend.store.topic_table.recorded(topic) is None
        ):
            count = max(self._backend.store.queues.queues_of(topic), default=0) + 1
            return Shape(count, count)  # a new one has one queue, whatever other topics have
        known = self._shapes.get(topic)
        if known is not None and known[0] is config:
            return known[1]
        shape = Shape(
            config.read_queues, config.write_queues, config.perm, config.order, config.sys_flag
        )
        if len(self._shapes) >= PROMISED_MAX:
            self._shapes.clear()
        self._shapes[topic] = config, shape
        return shape

    def names(self) -> list[str]:
        """Return the names of all topics that clients may see."""
        return [config.name for config in self._backend.store.topic_table.all()]

    def to_be(self, topic: str) -> Shape | None:
        """Return what a topic that does not exist will be; None if no send creates it."""
        if topic.startswith((RETRY, DLQ)):
            return Shape(1, 1)
        if not self.auto_create:
            return None
        count = self.default_queues
        if topic == TBW102:
            return Shape(count, count, READ | WRITE | INHERIT)
        return Shape(count, count)

    def count_for_locks(self, topic: str) -> int:
        """Return how many queues consumers may lock: those that they are told of, also before."""
        shape = self.find(topic) or self.to_be(topic)
        return self.default_queues if shape is None else shape.read

    def promise(self, topic: str) -> None:
        """Note that a topic that does not exist gets the usual number of queues.

        Clients know its route, or a message may be in any of them, which is not known yet.
        """
        self._promised[topic] = None
        if len(self._promised) > PROMISED_MAX:
            self._promised.popitem(last=False)

    def is_promised(self, topic: str) -> bool:
        """Whether a topic that does not exist gets the usual number of queues."""
        return topic in self._promised

    def waits(self, topic: str) -> bool:
        """Whether a topic's queues and permission may become others: a broker's, which had it."""
        return self._backend.topics_wait() and self._may_be_brokers(topic)

    def route_waits(self, topic: str) -> bool:
        """Whether they may become others, as far as this node knows, master or not."""
        return self._backend.routes_wait() and self._may_be_brokers(topic)

    def _may_be_brokers(self, topic: str) -> bool:
        if topic.startswith((RETRY, DLQ)):
            return False
        return self._backend.store.topic_table.recorded(topic) is None

    def queues_to_write(
        self, topic: str, asked: int, create: Callable[[TopicConfig], None] = lambda _new: None
    ) -> int:
        """Return how many queues a send may use; raises RemotingRefusal if it may use none.

        `asked`: how many queues the producer wants for a new topic. It gets fewer than usual if
        nobody was told another number; `create` is then called with it. Of producers that begin a
        topic at the same time, the first decides: the others' messages would lie in queues that
        consumers do not see.
        """
        shape = self.find(topic)
        if self.waits(topic):
            raise RemotingRefusal(Answer.SERVICE_NOT_AVAILABLE, _NOT_TAKEN % topic)
        if shape is None:
            making = self.making.get(topic)
            if making is not None:
                return making.write_queues
            check_name(topic)
            shape = self.to_be(topic)
            if shape is None:
                raise RemotingRefusal(Answer.TOPIC_NOT_EXIST, _APPLY % topic)
            if 0 < asked < shape.write and topic not in self._promised:
                create(TopicConfig(topic, asked, asked))
                return asked
            if not topic.startswith((RETRY, DLQ)):  # these have the queues that messages are in
                self.promise(topic)
        if not shape.perm & WRITE:
            raise RemotingRefusal(Answer.NO_PERMISSION, f"topic {topic} takes no messages")
        if not shape.write:
            text = f"topic {topic} takes no messages: it has no queue for producers"
            raise RemotingRefusal(Answer.NO_PERMISSION, text)
        return shape.write


def check_name(topic: str) -> None:
    """Refuse a name that no client may give a topic."""
    try:
        check_topic(topic)
    except MessageIllegalError as failure:
        raise RemotingRefusal(Answer.INVALID_PARAMETER, str(failure)) from failure
    if topic.startswith(OWN):
        text = f"topic {topic}: names that begin so are the group's own"
        raise RemotingRefusal(Answer.NO_PERMISSION, text)


class Readers:
    """The nodes that serve reads, as the master says. A slave knows it of itself only.

    While clients ask for routes, a slave asks the master each second. What it said counts until
    KNOWN_MS later: clients look for a new route only every 30 s, also those that look while the
    master is gone. The first route after a while waits for the master's answer.
    """

    def __init__(self, door: Door, group: str) -> None:
        """Prepare for the nodes of a group."""
        self._door = door
        self._clock = door.parts.clock
        self._group = group
        self._nodes: frozenset[int] = frozenset()
        self._heard_ms = self._wanted_ms = float("-inf")
        self._asked_ms: float | None = None  # since when a question has no answer
        self._waiting: list[Callable[[], None]] = []  # routes, for the first answer
        self._ticking = False

    def nodes(self) -> frozenset[int]:
        """Return them; none if the master has not said it lately.

        They count on a new master, too: its slaves are not linked yet.
        """
        known = self._clock.monotonic_ms() - self._heard_ms < KNOWN_MS
        return self._nodes if known else frozenset()

    def want(self, then: Callable[[], None]) -> None:
        """Call `then` once they are known, or FIRST_MS later."""
        now = self._clock.monotonic_ms()
        self._wanted_ms = now
        known = self._is_master() or now - self._heard_ms < KNOWN_MS
        if known or len(self._waiting) >= WAITING_MAX:
            then()
        else:
            if not self._waiting:
                self._door.at(now + FIRST_MS, self._go_on)
            self._waiting.append(then)
        if not self._ticking and not self._is_master():
            self._tick()

    def _is_master(self) -> bool:
        return self._door.forwarding is None or self._door.forwarding.is_master

    def _tick(self) -> None:
        now = self._clock.monotonic_ms()
        self._ticking = now - self._wanted_ms < WANTED_MS and not self._is_master()
        if not self._ticking:
            return
        if self._asked_ms is None or now - self._asked_ms > KNOWN_MS:
            self._ask(now)
        wait_ms = FIRST_MS / 10 if self._waiting else ASK_MS
        self._door.at(now + wait_ms, self._tick)

    def _ask(self, now_ms: float) -> None:
        if self._door.forwarding is None:
            return
        fields = {"acceptStandardJsonOnly": "true"}
        question = Frame(Code.GET_BROKER_CLUSTER_INFO, 0, fields=fields)
        if self._door.forwarding.ask(question, self._hear):
            self._asked_ms = now_ms

    def _hear(self, answer: Frame | None) -> None:
        self._asked_ms = None
        if answer is None or answer.code != Answer.SUCCESS:
            return
        try:
            table = msgspec.json.decode(answer.body, type=_ClusterInfo).brokerAddrTable
            nodes = frozenset(map(int, table[self._group].brokerAddrs))
        except (KeyError, ValueError, *UNREADABLE):
            return  # the routes name what this node knows
        if MASTER_ID in nodes:  # else that node is not the master any more
            self._nodes, self._heard_ms = nodes - {MASTER_ID}, self._clock.monotonic_ms()
            self._go_on()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            self._door.later(then)


class _Addresses(msgspec.Struct):
    brokerAddrs: dict[str, str] = {}


class _ClusterInfo(msgspec.Struct):
    brokerAddrTable: dict[str, _Addresses] = {}


class Broker(NamedTuple):
    """A broker as clients see it: its nodes' addresses by id."""

    name: str
    addresses: dict[int, str]
    is_twin: bool


class Brokers:
    """The nodes of a group as brokers."""

    def __init__(
        self,
        backend: ApiBackend,
        config: Config,
        readers: Callable[[], Iterable[int]] = frozenset,
    ) -> None:
        """Prepare; `readers` names the nodes that serve reads, as the master says."""
        self._backend = backend
        self._readers = readers
        self.cluster = config.cluster
        self.group = config.group
        self._twins = config.remoting.twins

    def all(self) -> list[Broker]:
        """Return the brokers: the group itself, then the twins."""
        known = self._backend.master_map()
        nodes = {number: address_of(api) for number, api in sorted(known.nodes.items())}
        master = known.master_node
        # A client goes on asking a node that has ended, while it is in the route.
        alive = {known.node, *self._backend.reading_nodes(), *self._readers()}
        own = {number: at for number, at in nodes.items() if number in alive and number != master}
        if master is not None and known.master_api:
            own[0] = address_of(known.master_api)
        found = [Broker(self.group, dict(sorted(own.items())), False)]
        if self._twins and not self._backend.copies_broker():
            old = self._backend.without_remoting()
            for number, at in nodes.items():
                if number != master and number not in old:
                    found.append(Broker(f"{self.group}{TWIN}{number}", {0: at}, True))
        return found

    def as_json(self, broker: Broker) -> dict[str, Any]:
        """Return RocketMQ's BrokerData."""
        return {
            "brokerAddrs": broker.addresses,
            "brokerName": broker.name,
            "cluster": self.cluster,
            "enableActingMaster": False,
        }


def address_of(api: str) -> str:
    """Return HOST:PORT of a node's `api`."""
    return api.removeprefix(_SCHEME)


class Routes:
    """The handlers of a name server's requests; the API's lock is held in every call."""

    def __init__(
        self,
        door: Door,
        topics: TopicView,
        brokers: Brokers,
        with_groups: WithGroups = lambda call: call(()),
        readers: Readers | None = None,
        elsewhere: Elsewhere | None = None,
        hold_ms: int = RemotingConfig().hold_timeout_ms,
    ) -> None:
        """Prepare; `with_groups` makes a call with the names of all known consumer groups.

        A route waits for `hold_ms` for a broker's topics.
        """
        self._hold_ms = hold_ms
        self._waiting: list[RemotingRequest] = []  # for a broker's topics
        self._elsewhere = elsewhere or Elsewhere()
        self._readers = readers
        self._door = door
        self._with_groups = with_groups
        self._topics = topics
        self._brokers = brokers
        # The topics without a route that a client asked for, since it asked for TBW102's.
        self._asked: dict[Connection, set[str]] = {}
        door.on_ended(self._forget)

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each request's code."""
        return {
            Code.GET_ROUTEINFO_BY_TOPIC: self.route,
            Code.GET_BROKER_CLUSTER_INFO: self.cluster,
            Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self.topic_list,
            Code.GET_TOPICS_BY_CLUSTER: self.topics_of_cluster,
        }

    def route(self, request: RemotingRequest) -> None:
        """Answer where a topic's queues are; 17 if there is no such topic."""
        topic = request.frame.fields.get("topic", "")
        waits = self._topics.route_waits(topic)
        if waits and self._wait(request):
            return
        shape, others = self._topics.find(topic), self._shapes_elsewhere(topic)
        if waits:  # for too long: the client gets what other groups have, or asks again
            if not others:
                raise RemotingRefusal(Answer.SERVICE_NOT_AVAILABLE, _NOT_TAKEN % topic)
            self._answer_route(request, others)
            return
        if shape is None and (not others or topic == TBW102 or topic.startswith((RETRY, DLQ))):
            shape = self._shape_to_be(request.connection, topic)
        if shape is None and not others:
            text = f"No topic route info in name server for the topic: {topic}"
            raise RemotingRefusal(Answer.TOPIC_NOT_EXIST, text)
        self._with_readers(request, lambda: self._go_on(request, topic, shape, others))

    def _go_on(
        self,
        request: RemotingRequest,
        topic: str,
        shape: Shape | None,
        others: list[tuple[Broker, Shape]],
    ) -> None:
        """Answer a route; a master may have become known meanwhile, whose topics are not yet."""
        brokers = self._brokers.all()  # first: who is in it is looked at below
        if self._topics.route_waits(topic):
            self._door.handle_here(request)
            return
        own = self._topics.find(topic) or shape
        shapes = [] if own is None else [(broker, own) for broker in brokers]
        self._answer_route(request, shapes + others)

    def _wait(self, request: RemotingRequest) -> bool:
        """Let a route wait for a broker's topics; False if it has waited for long enough."""
        now = self._door.parts.clock.monotonic_ms()
        if now >= request.came_ms + self._hold_ms or len(self._waiting) >= WAITING_MAX:
            return False
        if not self._waiting:
            self._door.at(now + LOOK_MS, self._look_again)
        self._waiting.append(request)
        return True

    def _look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.connection is None or not request.connection.ended:
                self._door.later(partial(self._door.handle_here, request))

    def _shapes_elsewhere(self, topic: str) -> list[tuple[Broker, Shape]]:
        """Return the queues of a topic in other groups, by broker."""
        found: list[tuple[Broker, Shape]] = []
        for group in self._elsewhere.groups:
            known = group.topics.get(topic)
            if known is not None:
                shape = Shape(known.read, known.write, known.perm, known.order, known.sys_flag)
            elif topic.startswith((RETRY, DLQ)):
                shape = Shape(1, 1)  # as the group's own nodes say
            else:
                continue
            found += [(_broker(one), shape) for one in group.brokers]
        return found

    def _with_readers(self, request: RemotingRequest, then: Callable[[], None]) -> None:
        """Make a call once the nodes are known that serve reads; another node does not wait."""
        if self._readers is None or request.is_forwarded:
            then()
        else:
            self._readers.want(then)

    def _answer_route(self, request: RemotingRequest, shapes: list[tuple[Broker, Shape]]) -> None:
        route: dict[str, Any] = {
            "brokerDatas": [self._brokers.as_json(broker) for broker, _ in shapes],
            "filterServerTable": {},
            "queueDatas": [_queues(broker, shape) for broker, shape in shapes],
        }
        # The order is that of a group's own queues: no twin has more of them.
        ordered = [(broker.name, shape) for broker, shape in shapes if not broker.is_twin]
        if any(shape.order for _, shape in ordered):
            places = [f"{name}:{shape.write}" for name, shape in ordered if shape.order]
            route["orderTopicConf"] = ";".join(places)
        standard = request.frame.fields.get("acceptStandardJsonOnly") == "true"
        request.answer(Answer.SUCCESS, body=encode_body(route, standard=standard))

    def cluster(self, request: RemotingRequest) -> None:
        """Answer which brokers there are. Slaves ask it of the master, too: see Readers."""
        self._with_readers(request, lambda: self._answer_cluster(request))

    def _answer_cluster(self, request: RemotingRequest) -> None:
        brokers = self._brokers.all()
        brokers += [_broker(one) for group in self._elsewhere.groups for one in group.brokers]
        table = {broker.name: self._brokers.as_json(broker) for broker in brokers}
        names = {self._brokers.cluster: [broker.name for broker in brokers]}
        found = {"brokerAddrTable": table, "clusterAddrTable": names}
        standard = request.frame.fields.get("acceptStandardJsonOnly") == "true"
        request.answer(Answer.SUCCESS, body=encode_body(found, standard=standard))

    def topic_list(self, request: RemotingRequest) -> None:
        """Answer the names of all topics.

        Each known group has its %RETRY% topic there, as RocketMQ makes it with the group's first
        heartbeat: mqadmin's list of groups is made of these names.
        """

        def read(groups: list[str]) -> bytes:
            names = {*self._topics.names(), *(RETRY + group for group in groups)}
            for other in self._elsewhere.groups:
                names.update(name for name in other.topics if name != TBW102)
            return encode_body({"topicList": sorted(names)})

        def then(groups: Iterable[str]) -> None:  # there may be many topics: not in this thread
            answer = partial(request.answer, Answer.SUCCESS, None)
            try:
                read_aside(self._door, request, partial(read, list(groups)), answer)
            except RemotingRefusal as refusal:
                request.answer(refusal.code, remark=refusal.remark)

        self._with_groups(then)

    def topics_of_cluster(self, request: RemotingRequest) -> None:
        """Answer the names of the topics of a cluster."""
        asked = request.frame.fields.get("cluster", "")
        if asked != self._brokers.cluster:
            text = f"the cluster here is {self._brokers.cluster}, not {asked}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        self.topic_list(request)

    def _shape_to_be(self, connection: Connection | None, topic: str) -> Shape | None:
        """Return the route of a topic that does not exist, if the client should get one."""
        check_name(topic)
        shape = self._topics.to_be(topic)
        if shape is None or connection is None or topic.startswith((RETRY, DLQ)):
            return shape
        if topic == TBW102:
            self._asked.pop(connection, None)  # of a producer, which sends next
            return shape
        asked = self._asked.setdefault(connection, set())
        if topic in asked:
            self._topics.promise(topic)
        elif not self._topics.is_promised(topic):
            if len(asked) < ASKED_MAX:
                asked.add(topic)
            return None
        return shape

    def _forget(self, connection: Connection) -> None:
        self._asked.pop(connection, None)


def _broker(other: OtherBroker) -> Broker:
    return Broker(other.name, other.addresses, other.is_twin)


def _queues(broker: Broker, shape: Shape) -> dict[str, Any]:
    """Return RocketMQ's QueueData of a topic on a broker."""
    return {
        "brokerName": broker.name,
        "perm": shape.perm & WRITE if broker.is_twin else shape.perm,
        "readQueueNums": shape.read,
        "topicSysFlag": shape.sys_flag,
        "writeQueueNums": shape.write,
    }
