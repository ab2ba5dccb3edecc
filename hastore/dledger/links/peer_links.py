"""PeerLinks: one link to every other node of the group, made again whenever it ends.

Of two nodes the one with the greater number calls (PeerCaller), so each pair has one link. A call
goes through HELLO with purpose DLEDGER, then both ends send frames (channel.py). A second link of
the same node replaces the first, which the other end has given up. `PeerHandler`, the driver, gets
what arrives, in the thread of the link.

PeerMember is this node as its HELLOs show it, and knows whom it takes for a member. A vote or an
acknowledgement that a node has forgotten may cost acknowledged entries, so a node must know whether
its store is new or replaces one that was lost:

- Each node keeps, durably, which store belongs to which number (`known_stores` in node.json).
- A node whose store has never been started (`joined` is False) first asks the others. If one of
  them knows its number with another store, the disk was lost: the node says so in every HELLO, and
  its core starts with `remembers=False`, that is without a vote that counts.
- It asks until so many have answered that every majority with its number has one of them
  (`answers_needed`): in a group of three both others, in a group of five three. If none of them
  names the members of a group that has begun, it asks until all have answered (identity.py). So the
  first start of a group needs all its nodes.
- A node that comes with another store and does not say that it lost its disk is refused, and so
  is a store that was replaced once (identity.py). The node stops saying it when the leader has
  brought its log in line; it goes on naming the stores that its own has replaced.
- Who learns that a store was replaced tells the others (_Teller): a vote of the old store must not
  count anywhere.
"""

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from hastore.bounded_log import StartPhase
from hastore.clock import Clock
from hastore.config.model import Config, Flush, StoreKind
from hastore.dledger.links.channel import DEFAULT_TIMES, LinkTimes, PeerChannel
from hastore.dledger.links.identity import (
    OTHER_FIRST_MEMBERS,
    OTHER_GROUP,
    Group,
    Stores,
    answers_needed,
    replaced_problem,
)
from hastore.errors import HastoreError, ProtocolError
from hastore.ha.hello.accepting import (
    AcceptedConnection,
    AcceptedConnections,
    AcceptSocketService,
    ConnectionReader,
    admit,
    is_call,
    receive_first,
)
from hastore.ha.hello.answering import answer_hello
from hastore.ha.hello.forward_link import ForwardPort
from hastore.ha.hello.peer import (
    Call,
    Deadline,
    break_link,
    call,
    check_number,
    telling_of_tampering,
)
from hastore.ha.hello.ranges import RangedLog, answer_range
from hastore.ha.master.link_writer import LogBytes
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.following import check_identity
from hastore.protocol.dledger import Message
from hastore.protocol.dledger_link import DATA_BYTES_MAX, Received
from hastore.protocol.hello import (
    NONCE_BYTES,
    Answer,
    Forwarding,
    Hello,
    Linked,
    Purpose,
    Refused,
    StoreKnown,
)
from hastore.security.slots import KnownHosts
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_socket import LinkSocket
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)
_NOT_STARTED = "has not started yet"  # part of an answer to a node that calls too soon

MODE = "dledger"
ASK_MS = 1_000.0  # for the answer to a call that makes no link


class LinkLog(LogBytes, RangedLog, Protocol):
    """What the links read of the log: entries for followers, and damaged ranges of other nodes."""


class PeerMember:
    """This node's identity and addresses; any thread may call the methods.

    `log_range()` returns the log's first offset and end, which a HELLO shows. `on_refused(address,
    why)` is called by a connection's thread for a caller that is no member of the group.
    """

    def __init__(
        self,
        config: Config,
        state: NodeState,
        secret: bytes | None,
        log_range: Callable[[], tuple[int, int]],
        tls: TlsContexts | None = None,
        *,
        on_refused: Callable[[str, str], None] = lambda _address, _why: None,
    ) -> None:
        self.config = config
        self.state = state
        self.secret = secret
        self.on_refused = on_refused
        self.tls = tls
        self._log_range = log_range
        self.members: tuple[int, ...] = ()  # of the group that has begun, and its learners
        self.listed: Mapping[int, str] = {node: one.ha for node, one in config.nodes.items()}
        self._addresses = dict(self.listed)
        self._without_learners: set[int] = set()
        self._without_remoting: set[int] = set()
        self._without_syncs: set[int] = set()
        self.told_group_id = ""  # of the last node that was linked and knows it
        self._learning = threading.Lock()

    @property
    def node(self) -> int:
        """This node's number."""
        return self.config.node

    @property
    def syncs(self) -> bool:
        """Whether this node confirms what is on its disk, and not what is written only."""
        store = self.config.store
        return store.flush is Flush.SYNC and store.kind is not StoreKind.MEMORY

    @property
    def addresses(self) -> Mapping[int, str]:
        """The HA addresses of the configured nodes, this one's too, and of all members."""
        return self._addresses

    def set_addresses(self, addresses: Mapping[int, str], members: Collection[int]) -> None:
        """Take the addresses of a changed configuration, and the members of a group that has begun.

        A member that is not in the configuration keeps the address that it had last, over restarts
        too. Raises OSError if the members' addresses cannot be saved; they count all the same.
        """
        known = {**self.state.data.addresses, **self._addresses}
        kept = {n: known[n] for n in members if n in known and n not in addresses}
        self.listed, self.members = dict(addresses), tuple(members)
        self._addresses = {**kept, **addresses}
        of_members = {n: self._addresses[n] for n in members if n in self._addresses}
        if of_members and of_members != self.state.data.addresses:
            self.state.save(addresses=of_members)

    @property
    def answers_needed(self) -> int:
        """How many other nodes of a group that has begun must say whether they know another store
        of this node's number."""
        return answers_needed(len(self._addresses))

    def may_be_old(self, node: int | None = None) -> bool:
        """Whether a node (None: some node of the group) may be of the version before."""
        peers = {*self._addresses, *self.members} - {self.node}
        return self.state.may_be_old(peers, node)

    @property
    def group(self) -> Group:
        """What this node knows of its group, as its HELLO says it."""
        data = self.state.data
        begun = self._log_range()[1] > 0
        first = data.first_members or tuple(sorted(self.listed))
        return Group(data.group_id, () if begun else first)

    def hello(self, purpose: Purpose = Purpose.DLEDGER, *, new_store: bool = False) -> Hello:
        """Describe this node. The fields of the classic mode's epochs say nothing here."""
        config, data = self.config, self.state.data
        low, high = self._log_range()
        return Hello(
            purpose=purpose,
            cluster=config.cluster,
            group=config.group,
            node=config.node,
            store_id=data.store_id,
            role="DLEDGER",
            open_epoch=0,
            promised_epoch=0,
            history=(),
            min_offset=min(low, high),
            max_offset=high,
            confirmed_offset=0,
            ack_point="flushed" if self.syncs else "written",
            unclean=False,
            largest_frame=DATA_BYTES_MAX,
            file_size=config.store.commitlog_file_size,
            nonce=secrets.token_bytes(NONCE_BYTES),
            mode=MODE,
            new_store=new_store,
            lost_disk=data.lost_disk,
            learners=True,
            remoting=True,
            stores=data.known_stores,
            replaced_stores=data.replaced_stores,
            group_id=self.group.id,
            first_members=self.group.first_members,
        )

    def identity_problem(self, hello: Hello) -> str | None:
        """Return why the other end is no member of this group; None when it is."""
        config, own = self.config, self.config.node
        nodes = (*self._addresses, *self.members)
        problem = check_identity(hello, config.cluster, config.group, own, nodes, {}, MODE)
        if problem is None:
            theirs = Group(hello.group_id, hello.first_members)
            problem = self.group.problem(hello.node, theirs, own)
        if problem is None:
            problem = self.stores.problem(
                hello.node,
                hello.store_id,
                lost=hello.lost_disk or hello.new_store,  # it knows it, or asks
                replaces=hello.replaced_stores.get(hello.node, ()),
            )
        if problem is None and self.state.data.store_id in hello.replaced_stores.get(own, ()):
            problem = replaced_problem(own)
        if problem is None and hello.file_size != config.store.commitlog_file_size:
            problem = (
                f"node {hello.node} has log files of {hello.file_size} bytes, node {config.node} "
                f"of {config.store.commitlog_file_size}; set store.commitlog_file_size to the same "
                "on every node (with an empty store)"
            )
        return problem

    @property
    def without_learners(self) -> set[int]:
        """The nodes that came with a version that knows no learners."""
        return set(self._without_learners)

    @property
    def without_remoting(self) -> set[int]:
        """The nodes that came with a version that knows no clients of RocketMQ."""
        return set(self._without_remoting)

    @property
    def without_syncs(self) -> set[int]:
        """The nodes that were last linked as ones that confirm what is written only.

        Those without a link too: what they have confirmed may not be committed yet. Nodes of an
        earlier version do not say it, and are not among them.
        """
        return set(self._without_syncs)

    def knows_other_store(self, hello: Hello) -> bool:
        """Whether the other node's number has had another store."""
        stores = self.stores
        known = stores.known.get(hello.node)
        if known is None:  # after a recovery of the group: the old members do not count any more
            return bool(stores.replaced.get(hello.node))
        return known != hello.store_id

    @property
    def stores(self) -> Stores:
        """What this node knows of the group's stores."""
        data = self.state.data
        return Stores(data.known_stores, data.replaced_stores)

    def learn(self, hello: Hello) -> set[int]:
        """Record, durably, which store the other node has, and what it knows of others.

        Returns the nodes of which another store counts now than before.
        """
        with self._learning:
            before, now = self.stores, self._told(self.stores, hello)
            replaces = hello.replaced_stores.get(hello.node, ())
            changed = self._keep(before, now.with_store(hello.node, hello.store_id, replaces))
            if hello.group_id and not self.group.id and self._log_range()[1] == 0:
                self.state.save(group_id=hello.group_id)
        self.told_group_id = hello.group_id or self.told_group_id
        for known, without in (
            (hello.learners, self._without_learners), (hello.remoting, self._without_remoting),
            (hello.ack_point == "flushed", self._without_syncs),
        ):  # fmt: skip
            if known:
                without.discard(hello.node)
            else:
                without.add(hello.node)
        return changed

    def hear(self, hello: Hello) -> set[int]:
        """Record, durably, what a member knows of the others' stores; returns as `learn` does."""
        with self._learning:
            return self._keep(self.stores, self._told(self.stores, hello))

    def _told(self, stores: Stores, hello: Hello) -> Stores:
        members = self._addresses
        told = {n: gone for n, gone in hello.replaced_stores.items() if n in members}
        told.pop(hello.node, None)  # what it says of itself counts once it is taken
        return stores.told(Stores(hello.stores, told), self.node)

    def _keep(self, before: Stores, now: Stores) -> set[int]:
        if now != before:
            self.state.save(known_stores=dict(now.known), replaced_stores=dict(now.replaced))
        return {n for n, one in before.known.items() if now.known.get(n) != one}


class PeerHandler(Protocol):
    """Who takes what the links receive; called in their threads."""

    def on_messages(self, peer: int, messages: list[Received]) -> None:
        """Take messages that arrived together; their views are valid until this returns."""
        ...

    def on_link(self, peer: int, up: bool) -> None:
        """Note that a link was opened or has ended."""
        ...

    def removal_of(self, node: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Return (index, term, members) of the committed list without a node; None: it has it."""
        ...

    def on_removed(self, removed: tuple[int, int, tuple[int, ...]]) -> None:
        """Note that another node has refused a link, because this list leaves out this node."""
        ...

    def group_nodes(self) -> tuple[int, ...]:
        """Return the members and learners of a group that has begun: they keep their links."""
        ...

    def begun_members(self) -> tuple[int, ...]:
        """Return the members of a group that has begun, for a node that is new; else nothing."""
        ...


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A link as the status shows it."""

    node: int
    address: str
    linked: bool
    problem: str | None


class PeerLinks:
    """The links of one node; `send` may be called by any thread."""

    def __init__(
        self,
        member: PeerMember,
        source: LinkLog,
        handler: PeerHandler,
        clock: Clock,
        *,
        times: LinkTimes = DEFAULT_TIMES,
        on_failure: OnFailure,
    ) -> None:
        self.member = member
        self.clock = clock
        self.times = times
        self.on_failure = on_failure
        self.problems: dict[int, str] = {}  # why there is no link to a node
        self._levels: dict[int, int] = {}  # at which level the last problem was logged
        self._start_phase = StartPhase(clock)
        self.told_members: tuple[int, ...] = ()  # what `ask_others` was told of them
        self.told_replaced: tuple[str, ...] = ()  # the stores that this node's number has had
        self._source = source
        self._handler = handler
        self._ready = False  # whether links may be opened; questions are answered before
        self._stopping = False
        self._closed_because: str | None = None
        # Held while a link is added or removed and the handler is told of it, so that it is told in
        # order. The handler's lock comes after it; `send` does not take it.
        self._order = threading.RLock()
        self._channels: dict[int, PeerChannel] = {}  # replaced, never changed
        self._callers: dict[int, _PeerCaller] = {}
        self._ended: list[_PeerCaller] = []  # of nodes that have gone; perhaps they call still
        self.forward_port = ForwardPort(clock)
        self._teller = _Teller(self)
        hosts = KnownHosts(lambda: member.addresses.values(), clock, on_failure=on_failure)
        self.accepted = AcceptedConnections(
            member.config.ha.max_connections, partial(_AcceptedLink, self), hosts
        )
        self.acceptor = AcceptSocketService(self.accepted.accept, on_failure=on_failure)

    # -- start and stop ----------------------------------------------------------------------------

    def bind(self, address: str) -> str:
        """Bind the HA port, return the bound address, and answer questions of new nodes.

        Raises OSError when the address is taken.
        """
        bound = self.acceptor.bind(address)
        self.acceptor.start()
        return bound

    def start(self) -> None:
        """Open links from now on."""
        self._ready = True
        with self._order:
            if not self._stopping:
                self._teller.start()
        self._follow(None)

    def set_addresses(self, addresses: Mapping[int, str]) -> None:
        """Take the HA addresses of a changed configuration: call new nodes, leave removed ones.

        A member of the group keeps its link, whatever the configuration says; `differences` names
        it. A link at an address that has changed stays until it ends.
        """
        self._follow(addresses)

    def follow_members(self) -> None:
        """Keep links to the members of the group; call it when they may have changed."""
        if self._handler.group_nodes() != self.member.members:
            self._follow(None)

    def _follow(self, addresses: Mapping[int, str] | None) -> None:
        """Follow these addresses (None: the same as before) and the group's members."""
        with self._order:
            member = self.member
            listed = member.listed if addresses is None else addresses
            try:
                member.set_addresses(listed, self._handler.group_nodes())
            except OSError as error:
                log.error("the addresses of the members are not saved: %s", error)
            if self._stopping or not self._ready:
                return
            wanted = {n: a for n, a in member.addresses.items() if n < member.node}
            for caller in self._callers.values():
                if caller.peer in wanted and caller.peer in self._channels:
                    caller.address = wanted[caller.peer]
            ended = [c for n, c in self._callers.items() if wanted.get(n) != c.address]
            self._ended = [*(c for c in self._ended if c.alive), *ended]
            self._callers = {n: c for n, c in self._callers.items() if c not in ended}
            fresh = [_PeerCaller(self, n, a) for n, a in wanted.items() if n not in self._callers]
            self._callers.update({caller.peer: caller for caller in fresh})
            stay = {*member.addresses, *member.members}
            gone = [c for n, c in self._channels.items() if n not in stay]
        # They are not waited for: a call may take seconds, and this may be the driver's thread,
        # which sends the leader's heart beats.
        for caller in ended:
            caller.stopping.set()
            caller.wake()
        for channel in gone:
            channel.close("the node is no longer in `nodes`")
        for caller in fresh:
            caller.start()

    def differences(self) -> list[str]:
        """Return how the configuration differs from the group, or from the links that are open."""
        member, found = self.member, []
        for node in sorted({*member.members} - {*member.listed} - {member.node}):
            link = "it keeps its link" if node in member.addresses else "its address is not known"
            found.append(
                f"node {node} belongs to the group, but is not in this node's `nodes`: {link}; "
                "add it there again, or remove it from the group with `hastore dledger remove`"
            )
        with self._order:
            callers = list(self._callers.values())
        for caller in callers:
            at = caller.linked_at
            if at is not None and at != caller.address:
                found.append(
                    f"node {caller.peer} is linked at {at}, but `nodes` has {caller.address}: "
                    "that counts once this link has ended"
                )
        return found

    def stop(self) -> None:
        """Close the port and all links, and wait for their threads."""
        with self._order:
            self._stopping = True
            callers = [*self._callers.values(), *self._ended]
            channels = list(self._channels.values())
        self.acceptor.stop()
        for channel in channels:
            channel.close("the node stops")
        for caller in callers:  # all of them, before the wait for the first
            caller.stopping.set()
        for caller in callers:
            caller.stop()
        self._teller.stop()
        self.accepted.stop()

    def ask_others(self) -> tuple[set[int], set[int]]:
        """Ask the other nodes whether they know this node's number with another store.

        Returns the nodes that answered, and those that know another store. Blocks up to `hello_ms`
        for each node; `problems` says why a node did not answer.
        """
        answered, others = set(), set()
        for node, address in sorted(self.member.addresses.items()):
            if node == self.member.node or self._stopping:
                continue
            try:
                hello = self.member.hello(new_store=True)
                made = self._call(node, address, hello)
                made.close()
                answer = self._checked(made, node, address)
                if not isinstance(answer, StoreKnown):
                    raise ProtocolError(f"{address} gave another answer: {answer}")
            except (HastoreError, OSError) as error:
                self.note_problem(node, _why(error, address), at_start=_of_a_start(error))
                continue
            self.problems.pop(node, None)
            answered.add(node)
            self.told_members = answer.members or self.told_members
            self.told_replaced = (*self.told_replaced, *answer.replaced)
            if answer.other:
                others.add(node)
        return answered, others

    def ask_callers(self) -> None:
        """Call the nodes that would call this one: they do not, if this node was removed.

        Their refusal says so. For a node without a leader; blocks up to ASK_MS for each node.
        """
        member = self.member
        for node, address in sorted(member.addresses.items()):
            if node <= member.node or node in self._channels or self._stopping:
                continue
            try:
                made = self._call(node, address, member.hello(), ASK_MS)
                made.close()
                check_number(made.hello, node, address)
            except (HastoreError, OSError) as error:
                log.debug("node %d does not say whether it calls: %s", node, error)
                continue
            if isinstance(made.answer, Refused) and made.answer.removed is not None:
                self.note_problem(node, f"node {node} refuses: {made.answer.reason}")
                self._handler.on_removed(made.answer.removed)

    # -- use ---------------------------------------------------------------------------------------

    def send(self, peer: int, message: Message) -> None:
        """Send a message on the link to a node; without a link it is lost."""
        channel = self._channels.get(peer)
        if channel is not None:
            channel.send(message)

    def cut(self, pos: int) -> None:
        """Stop sending bytes of the log beyond `pos`; the caller cuts the log there next."""
        for channel in self._channels.values():
            channel.cut(pos)

    def close(self, peer: int, reason: str) -> None:
        """Close the link to one node; it is opened again."""
        channel = self._channels.get(peer)
        if channel is not None:
            channel.close(reason)

    def hang_up(self, reason: str) -> None:
        """Close all links, and open none any more; the port still answers with the reason."""
        self._closed_because = reason
        for channel in self._channels.values():
            channel.close(reason)

    @property
    def closed(self) -> bool:
        """Whether links are no longer opened."""
        return self._closed_because is not None

    @property
    def linked(self) -> set[int]:
        """The nodes with an open link."""
        return set(self._channels)

    @property
    def without_learners(self) -> set[int]:
        """The nodes with an open link whose version knows no learners."""
        return self.linked & self.member.without_learners

    @property
    def without_remoting(self) -> set[int]:
        """The nodes with an open link whose version knows no clients of RocketMQ."""
        return self.linked & self.member.without_remoting

    def status(self) -> list[PeerStatus]:
        """Return the state of the link to each configured node."""
        channels = self._channels
        return [
            PeerStatus(node, address, node in channels, self.problems.get(node))
            for node, address in sorted(self.member.addresses.items())
            if node != self.member.node
        ]

    @property
    def failure(self) -> str | None:
        """The last defect of this node that ended a link; None: there was none."""
        return self.accepted.failure

    def note_problem(self, peer: int, problem: str, *, at_start: bool = False) -> None:
        """Keep and log why there is no link; the same problem is logged once.

        What is expected `at_start` is a warning once it lasts.
        """
        level = self._start_phase.level() if at_start else logging.WARNING
        told, self.problems[peer] = self.problems.get(peer), problem
        if told != problem or self._levels.get(peer) != level:
            self._levels[peer] = level
            log.log(level, "no link to node %d: %s", peer, problem)

    def _checked(self, made: Call, peer: int, address: str) -> Answer:
        """Return the answer of node `peer`; ProtocolError when it is not what it should be."""
        hello, answer = made.hello, made.answer
        check_number(hello, peer, address)
        if isinstance(answer, Refused):
            if answer.removed is not None:
                self._handler.on_removed(answer.removed)
            raise ProtocolError(f"node {peer} refuses: {answer.reason}")
        problem = self.member.identity_problem(hello)
        if problem is not None:
            raise ProtocolError(f"{address}: {problem}")
        if made.proved:
            self.member.state.learn_proved(peer)
        return answer

    def _call(self, peer: int, address: str, hello: Hello, timeout_ms: float | None = None) -> Call:
        member = self.member
        with telling_of_tampering(member.on_refused, address):
            return call(
                address, hello, member.secret, self.clock, timeout_ms or self.times.hello_ms,
                member.tls, may_be_old=member.may_be_old(peer),
            )  # fmt: skip

    def dial(self, peer: int, address: str) -> LinkSocket:
        """Call a node and return the open connection; raises HastoreError or OSError."""
        member = self.member
        made = self._call(peer, address, member.hello())
        try:
            answer = self._checked(made, peer, address)
            if not isinstance(answer, Linked):
                raise ProtocolError(f"{address} gave another answer: {answer}")
            self._learned(member.learn(made.hello), but=peer)
        except BaseException:
            made.close()
            raise
        return made.sock

    def dial_forward(self, node: int, timeout_ms: float) -> Call:
        """Call a node to forward requests to it; raises HastoreError or OSError."""
        return self._dial_for(node, self.member.hello(Purpose.FORWARD), timeout_ms)

    def dial_repair(self, node: int, start: int, end: int, timeout_ms: float) -> Call:
        """Ask a node for bytes of the log; raises HastoreError or OSError."""
        hello = self.member.hello(Purpose.REPAIR)
        hello = msgspec.structs.replace(hello, copy_from=start, copy_to=end)
        return self._dial_for(node, hello, timeout_ms)

    def _dial_for(self, node: int, hello: Hello, timeout_ms: float) -> Call:
        address = self.member.addresses.get(node)
        if address is None:
            raise ProtocolError(f"the address of node {node} is not known; add it to `nodes`")
        made = self._call(node, address, hello, timeout_ms)
        try:
            if not isinstance(made.answer, Refused):
                self._checked(made, node, address)
        except BaseException:
            made.close()
            raise
        return made

    def _removal_of(self, hello: Hello) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the committed list that leaves out a caller of this group that has no link."""
        config = self.member.config
        if (hello.cluster, hello.group, hello.mode) != (config.cluster, config.group, MODE):
            return None
        if self.member.group.id and hello.group_id not in ("", self.member.group.id):
            return None  # a list of another group says nothing about its own
        is_known = hello.node in self.member.addresses or hello.node in self.member.members
        return None if is_known else self._handler.removal_of(hello.node)

    def decide(self, hello: Hello, address: str, *, proved: bool = False) -> Answer:
        """Answer a caller; an answer Linked is durable knowledge of the caller's store.

        `proved`: it has shown the secret before its HELLO.
        """
        member = self.member
        problem = member.identity_problem(hello)
        if problem is not None:
            member.on_refused(address, problem)
            if OTHER_GROUP in problem and hello.node not in self._channels:
                self.note_problem(hello.node, problem)  # two groups of one name: both ends say so
            return Refused(problem, removed=self._removal_of(hello))
        if proved:
            member.state.learn_proved(hello.node)
        if hello.purpose is Purpose.FORWARD:
            may = member.secret is not None or member.tls is not None
            return self.forward_port.decide(address, proved=may)
        if hello.purpose is Purpose.REPAIR:
            return answer_range(self._source, tuple, hello)  # the entries have their terms
        if hello.purpose is not Purpose.DLEDGER:
            return Refused(f"a node of mode {MODE} answers {Purpose.DLEDGER.value} only")
        other = member.knows_other_store(hello)
        live = self._channels.get(hello.node)
        if other and live is not None:
            return Refused(
                f"two nodes have the number {hello.node}: another store is linked from "
                f"{live.address}; give each node its own `node`"
            )
        if hello.new_store:
            self._learned(member.hear(hello), but=hello.node)
            stores = member.stores
            known = [stores.known[hello.node]] if other and hello.node in stores.known else []
            had = (*stores.replaced.get(hello.node, ()), *known)
            return StoreKnown(other, self._handler.begun_members(), had)
        if hello.node < member.node:
            return Refused(f"node {member.node} calls node {hello.node}, not the reverse")
        if self._closed_because is not None:
            return Refused(self._closed_because)
        if not self._ready or self._stopping:
            return Refused(f"node {member.node} {_NOT_STARTED}; call again")
        self._learned(member.learn(hello), but=hello.node)
        return Linked()

    def _learned(self, changed: set[int], *, but: int) -> None:
        """Tell the others of stores that were replaced, and leave the old ones."""
        if not changed:
            return
        self._teller.notify()
        for node in changed - {but}:
            self.close(node, f"this store of node {node} was replaced by another one")

    def tell_others(self) -> None:
        """Say to each other node what this one knows of the group's stores; best effort.

        Who does not hear it now learns it with the next link.
        """
        for node, address in sorted(self.member.addresses.items()):
            if node == self.member.node or self._stopping:
                continue
            try:
                self._call(node, address, self.member.hello(new_store=True)).close()
            except (HastoreError, OSError) as error:
                log.info("node %d was not told of a replaced store: %s", node, error)

    def serve(self, sock: LinkSocket, peer: int, address: str, name: str) -> str:
        """Run an open link to its end, and return why it ended."""
        channel = PeerChannel(
            sock, peer, address, self._source, self.clock, self.times,
            name=name, on_failure=self.accepted.note_defect,
        )  # fmt: skip
        try:
            self._attach(channel)
            try:
                with telling_of_tampering(self.member.on_refused, address):
                    channel.receive(self._handler.on_messages)
            except (HastoreError, OSError) as error:
                channel.close(str(error) or type(error).__name__)
            except Exception as defect:  # it ends this link, not the node; the status shows it
                log.exception("the link to node %d failed", peer)
                self.accepted.note_defect(f"the link to node {peer}", defect)
                channel.close(repr(defect))
        finally:
            self._detach(channel)
            channel.release()
        return channel.reason or "closed"

    def _attach(self, channel: PeerChannel) -> None:
        with self._order:
            earlier = self._channels.get(channel.peer)
            self._channels = {**self._channels, channel.peer: channel}
            if self._stopping or self._closed_because is not None:
                channel.close(self._closed_because or "the node stops")
            self.problems.pop(channel.peer, None)
            log.info("linked with node %d at %s", channel.peer, channel.address)
            self._handler.on_link(channel.peer, True)
        if earlier is not None:
            earlier.close("the same node has connected again")

    def _detach(self, channel: PeerChannel) -> None:
        with self._order:
            if self._channels.get(channel.peer) is not channel:
                return
            self._channels = {n: c for n, c in self._channels.items() if c is not channel}
            if not self._stopping:
                self.note_problem(channel.peer, f"the link has ended: {channel.reason}")
            self._handler.on_link(channel.peer, False)


def _of_a_start(error: HastoreError | OSError) -> bool:
    """Whether a call fails so while nodes start: before the other one has bound, or is ready.

    Two new nodes of a group that has begun may differ in their first members until it tells them.
    """
    starting = (_NOT_STARTED, OTHER_FIRST_MEMBERS)
    return isinstance(error, ConnectionRefusedError) or any(one in str(error) for one in starting)


def _why(error: HastoreError | OSError, address: str) -> str:
    """Return why a call failed. A HastoreError names the address where it matters."""
    text = str(error) or type(error).__name__
    return f"{address}: {error.strerror or text}" if isinstance(error, OSError) else text


class _PeerCaller(Service):
    """Call one node, serve the link, and call again, with growing pauses."""

    def __init__(self, links: PeerLinks, peer: int, address: str) -> None:
        super().__init__(f"PeerCaller-{peer}", on_failure=links.on_failure)
        self.peer = peer
        self.address = address
        self.linked_at: str | None = None  # the address of the open link
        self._links = links
        self._sock: LinkSocket | None = None

    def run(self) -> None:
        """Keep a link until stopped."""
        links, times = self._links, self._links.times
        pause_ms = times.retry_least_ms
        while not self.stopping.is_set() and not links.closed:
            address = self.address
            try:
                self._sock = links.dial(self.peer, address)
            except (HastoreError, OSError) as error:
                why = _why(error, address)
                links.note_problem(self.peer, why, at_start=_of_a_start(error))
                self.stopping.wait(pause_ms / 1000)
                pause_ms = min(2 * pause_ms, times.retry_most_ms)
                continue
            begun_ms = links.clock.monotonic_ms()
            if not self.stopping.is_set():
                self.linked_at = address
                links.serve(self._sock, self.peer, address, f"{self.peer}")
                self.linked_at = None
            self._sock.close()
            # A link that ends at once, as over damaged entries, would end many times a second.
            if links.clock.monotonic_ms() - begun_ms >= times.retry_most_ms:
                pause_ms = times.retry_least_ms
            self.stopping.wait(pause_ms / 1000)
            pause_ms = min(2 * pause_ms, times.retry_most_ms)

    def wake(self) -> None:
        """Break the connection, if there is one."""
        sock = self._sock
        if sock is not None:
            break_link(sock, f"node {self.peer}")


class _Teller(Service):
    """Tell the others, when this node has learned that a store was replaced."""

    def __init__(self, links: PeerLinks) -> None:
        super().__init__("StoreTeller", on_failure=links.on_failure)
        self._links = links
        self._due = threading.Event()

    def run(self) -> None:
        """Wait and tell, until stopped."""
        while not self.stopping.is_set():
            self._due.wait()
            self._due.clear()
            if not self.stopping.is_set():
                self._links.tell_others()

    def notify(self) -> None:
        """Ask for it, from any thread."""
        self._due.set()

    def wake(self) -> None:
        """End the wait."""
        self._due.set()


class _AcceptedLink(AcceptedConnection):
    """One accepted connection of the HA port; its thread is PeerReader."""

    def __init__(self, links: PeerLinks, sock: socket.socket, address: str, number: int) -> None:
        self.links = links
        self.peer = 0
        self.secret = links.member.secret
        super().__init__(links.accepted, sock, address, number, links.member.on_refused)
        self.reader = _PeerReader(self)

    def hello(self, purpose: Purpose) -> Hello:
        """Describe this node to the caller."""
        return self.links.member.hello(purpose)

    def identify(self, hello: Hello) -> None:
        """Record who the caller is."""
        self.peer = hello.node
        member = self.links.member
        self.identified(proved=member.secret is not None or member.tls is not None)

    def decide(self, hello: Hello) -> Answer:
        """Answer the caller."""
        return self.links.decide(hello, self.address, proved=self.proved)

    def may_be_old(self, node: int) -> bool:
        """Whether a node may be of the version before."""
        return self.links.member.may_be_old(node)


class _PeerReader(ConnectionReader[_AcceptedLink]):
    """Answer a caller's HELLO, then serve its link."""

    def __init__(self, connection: _AcceptedLink) -> None:
        super().__init__(f"PeerReader-{connection.connection_id}", connection)

    def serve(self) -> str:
        """Answer the caller, and serve its link; return why the connection ends."""
        connection = self._connection
        links = connection.links
        deadline = Deadline(links.clock, links.member.config.ha.hello_timeout_ms)
        first = receive_first(connection.plain, deadline)
        if not is_call(first):
            raise ProtocolError(
                "the caller sent no HELLO of this version; a node of mode dledger serves no "
                "RocketMQ slaves"
            )
        member = links.member
        connection.sock, connection.proved = admit(
            connection.plain, first, deadline, member.tls, member.secret,
            may_be_old=member.may_be_old(),
        )  # fmt: skip
        _, answer = answer_hello(connection.sock, deadline, connection, proved=connection.proved)
        number = f"{connection.connection_id}"
        if isinstance(answer, Forwarding):
            note = links.accepted.note_defect
            return links.forward_port.serve(connection.sock, connection.peer, number, note)
        if not isinstance(answer, Linked):
            return "answered"
        return links.serve(connection.sock, connection.peer, connection.address, number)
