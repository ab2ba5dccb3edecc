"""The calls that are connected last: those to an object that was made after the one that calls it.

Every other callback is an argument of the constructor of whoever calls it. Here each of the two
objects needs the other. The later one got the earlier one in its constructor; the earlier one gets
its callback here, before the node's threads start. Nowhere else is a callback of another object
set (tests/test_style.py).

    called                       when                         in which thread, with which lock held
    HAService.on_append          after each put               the one that puts; the write gate
    HAService.on_flushed         after each sync              the one that synced; none
    RoleService.note_superseded  a higher epoch is seen       the one that learned of it; none
    RoleService.note_lost_end    a slave has more of the      the reader of its link; none
                                 epoch than its master
    RoleService.note_promise     after each promise           the same; none
    TakeOver.begin_queues        an epoch is to be opened     RoleService; none
    RoleService.wake             another role in ZooKeeper    NodeRegistry; none
    AuditLog.note                messages were cut, or that   the one that cuts; the log's lock. Or
                                 was dismissed                housekeeping; none
    DLedgerDriver.on_persisted   after each sync              the one that synced; none
    GroupService.note_leader     another role, term, leader   whoever stepped the core; none
    ScrubService.note_read       a reader met damage          the reader's; none of the store's
    ScrubService.note_blocked    damage before a cut          the one that would cut; the write gate
                                 damage stops replay          IndexBuildService; none
    ScheduleMessageService.wake  delayed messages were read   IndexBuildService; none
    ApiWaker.puts_done           after a batch of ended puts  the one that learned of their outcome;
                                                              none, with acks 0 the write gate
    ApiWaker.wake_readers        readable offset moved        any; perhaps the gate and HAService's
                                                              lock, or the driver's
    ApiWaker.answer_readers      readable or dispatched       any; none, with acks 0 the write gate
                                 offset moved
    ApiWaker.readers_wait        replay chooses its pace, or  IndexBuildService, replay's or none; a
                                 a node answers its master    link's, its own or the driver's

The hot ones are attributes that the caller calls directly, with nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hastore.ha.master.group_transfer import GroupTransferService
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.security.audit_log import AuditLog
from hastore.server.api.backend import ApiWaker
from hastore.server.role_service import RoleService
from hastore.server.schedule_service import ScheduleMessageService
from hastore.server.scrub_service import ScrubService
from hastore.store.log_store import LogStore
from hastore.store.message_store import MessageStore

if TYPE_CHECKING:  # not every node has them, and loads them
    from hastore.dledger.driver.driver import DLedgerDriver
    from hastore.dledger.store.mmap_file_store import EntryStore
    from hastore.registry.node_registry import NodeRegistry
    from hastore.server.take_over import TakeOver


def connect_replication(store: MessageStore, ha: HAService) -> None:
    """Let the store tell what it appended and synced to HAService, which reads the store."""
    store.hooks.on_append = ha.on_append
    store.hooks.on_flushed = ha.on_flushed


def connect_audit(store: LogStore, audit: AuditLog) -> None:
    """Let the store tell the audit log what was cut; BaseNode makes that before the store."""
    store.hooks.on_cut = lambda outcome, text: audit.note("cut", outcome=outcome, reason=text)


def connect_roles(
    member: Member, roles: RoleService, registry: NodeRegistry | None, tables: TakeOver
) -> None:
    """Let the member and ZooKeeper tell of changes to RoleService, which asks both.

    And let the member ask TakeOver where queues go on, before it takes puts.
    """
    member.on_opening = tables.begin_queues
    member.on_superseded = roles.note_superseded
    member.on_lost_end = roles.note_lost_end
    member.on_promise = roles.note_promise
    if registry is not None:
        registry.on_change = roles.wake


def connect_driver(
    store: EntryStore, driver: DLedgerDriver, on_role: Callable[[], None] | None = None
) -> None:
    """Let the store tell what is durable to the driver, which appends to it.

    `on_role` is GroupService.note_leader; GroupService asks the driver.
    """
    store.on_persisted = driver.on_persisted
    if on_role is not None:
        driver.on_role = on_role


def connect_scrub(store: LogStore, scrub: ScrubService) -> None:
    """Let readers of the store, cuts and replay tell of damage to the thread that repairs it."""
    store.hooks.on_damage = scrub.note_read
    store.hooks.on_wrong = scrub.note_wrong
    store.hooks.on_blocked_cut = store.hooks.on_blocked_replay = scrub.note_blocked


def connect_delays(store: LogStore, delays: ScheduleMessageService) -> None:
    """Let the store tell of delayed messages to the thread that delivers them from it."""
    store.hooks.on_delayed = delays.wake


def connect_api(store: LogStore, transfer: GroupTransferService, api: ApiWaker) -> None:
    """Let the store and the waiting puts wake the client API, which uses both."""
    transfer.after_done = api.puts_done
    store.hooks.on_readable = api.wake_readers
    store.hooks.answer_readers = api.answer_readers
    store.hooks.readers_wait = api.readers_wait
