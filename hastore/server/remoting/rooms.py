"""Which requests of RocketMQ's clients a node answers: every handler is joined here."""

from __future__ import annotations

from collections.abc import Callable

from hastore.config.checks import remoting_refusal
from hastore.config.model import Config
from hastore.record.delays import parse_levels
from hastore.server.api.server import ApiParts
from hastore.server.remoting.acl import AclCounts, Gate
from hastore.server.remoting.admin import Admin
from hastore.server.remoting.announced import Announced
from hastore.server.remoting.check_backs import CheckBacks
from hastore.server.remoting.door import Door
from hastore.server.remoting.elsewhere import Elsewhere
from hastore.server.remoting.forwarding import Forwarding, Network
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import GroupRequests
from hastore.server.remoting.lock_requests import LockRequests
from hastore.server.remoting.own_members import OwnMembers
from hastore.server.remoting.position_requests import PositionRequests
from hastore.server.remoting.reads import Hooks, Reads
from hastore.server.remoting.retries import Retries
from hastore.server.remoting.routes import Brokers, Readers, Routes, TopicView
from hastore.server.remoting.sends import Sends
from hastore.server.remoting.slaves import DelayOffsets, SlaveRegistration, SlaveTables
from hastore.server.remoting.subscriptions import Subscriptions
from hastore.server.remoting.topics import Topics
from hastore.server.remoting.transactions import Decisions, Transactions


def make_door(
    config: Config,
    network: Network,
    parts: ApiParts,
    acl_counts: AclCounts | None = None,
    delay_offsets: DelayOffsets = lambda _end: {},
    announce: Callable[[Announced], None] = lambda _announced: None,
    elsewhere: Elsewhere | None = None,
) -> Door:
    """Return the door of a node, with all its handlers; with identities they have a gate.

    `announce` gets what name servers and other groups are told of the node; `elsewhere` has what
    these groups tell.
    """
    door = Door(parts, remoting_refusal(config))
    backend = parts.backend
    topics = TopicView(backend, auto_create=config.remoting.auto_create_topics)
    readers = Readers(door, config.group)
    brokers = Brokers(backend, config, readers.nodes)
    hold_ms = config.remoting.hold_timeout_ms
    routes = Routes(door, topics, brokers, lambda call: asked.with_groups(call), readers, elsewhere,
                    hold_ms)  # fmt: skip
    door.join(routes.handlers())
    settings = Subscriptions(door, topics)
    levels = len(parse_levels(config.store.message_delay_level))
    sends = Sends(
        door, topics, config.cluster,
        drop_retries=config.remoting.drop_retries,
        retries_of=lambda group: settings.find(group).retry_max_times,
        is_ordered=lambda group: locks.locks.is_in_order(group, parts.clock.monotonic_ms()),
        levels=levels, hold_ms=hold_ms,
    )  # fmt: skip
    door.join(sends.handlers())
    retries = Retries(door, topics, settings, levels, hold_ms)
    for each in (settings, retries, Topics(door, config.group, topics)):
        door.join(each.handlers())
    groups = GroupRequests(door, config.group)
    door.join(groups.handlers())
    decisions = Decisions(backend)
    ends = Transactions(door, decisions, hold_ms)
    door.join(ends.handlers())
    checks = CheckBacks(door, decisions, groups.members, config.remoting, config.group)
    door.ends_own, door.polls_own = ends.end_own, checks.polls.ask
    positions = GroupPositions(door)
    door.join(positions.handlers())
    settings.known_groups = lambda: {*positions.groups(), *groups.members.consumer_groups()}
    door.join(SlaveTables(door, positions, delay_offsets).handlers())
    door.join(SlaveRegistration(door, config).handlers())
    locks = LockRequests(door, positions, lambda one: 0 <= one[1] < topics.count_for_locks(one[0]))
    door.join(locks.handlers())
    OwnMembers(door, groups, locks, positions, topics, retries, settings.refusal)
    asked = PositionRequests(door, positions, groups.members, topics, config.group)
    door.join(asked.handlers())
    announce(Announced(door, config, topics, asked.with_groups, brokers))
    reads = Reads(door, topics, Hooks(
        subscription=groups.members.subscription,
        commit=positions.commit_later,
        refusal=settings.refusal,
        read_slaves=config.remoting.read_slaves,
        twins=config.remoting.twins,
    ))  # fmt: skip
    door.join(reads.handlers())
    door.join(Admin(door, config, reads).handlers())
    Forwarding(door, config, network)
    if parts.access is not None and door.is_open:
        door.gate = Gate(
            door, parts.access, parts.welcome, config.node,
            auto_create=config.remoting.auto_create_topics, counts=acl_counts or AclCounts(),
        )  # fmt: skip
    return door
