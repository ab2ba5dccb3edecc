"""Joining: whether a store is new, known, or replaces one that was lost, before the core starts.

links/peer_links.py says why that matters, and how many others must answer. DLedgerDriver's thread
calls `join`.
"""

import logging
import secrets
import threading
from collections.abc import Callable

from hastore.bounded_log import StartPhase
from hastore.dledger.core.events import MemberList, listed
from hastore.dledger.links.identity import REPLACED_MAX
from hastore.dledger.links.peer_links import PeerLinks, PeerMember
from hastore.dledger.store.mmap_file_store import EntryStore
from hastore.errors import StoreBrokenError
from hastore.protocol.dledger import MemberSet

log = logging.getLogger(__name__)

ASK_PAUSE_S = 0.2


def first_members(member: PeerMember) -> tuple[int, ...]:
    """Return the members before the log's first member list, and save them durably.

    A node that took them anew from its file, after `nodes` has changed there, could elect and
    commit with a majority that has no node in common with one of the group.
    """
    state = member.state
    if not state.data.first_members:
        state.save(first_members=tuple(sorted(member.addresses)))
    return state.data.first_members


def refuse_lost_identity(member: PeerMember, store: EntryStore) -> None:
    """Raise StoreBrokenError if node.json is gone from a store that has voted and has entries.

    Without it the node would have another store id, and would count with the `nodes` of its file
    instead of the group's members.
    """
    if member.state.is_new and store.notes_votes and store.end_index >= store.begin_index:
        raise StoreBrokenError(
            "hastore/node.json is missing in a store that has had it: it says which members the"
            " group has; do not put back an older one: while the other nodes run, move the store"
            " away and start the node again: it copies the log from its leader"
        )


def saved_lists(member: PeerMember) -> tuple[MemberList, ...]:
    """Return the member lists of node.json, which keeps learners beside the members."""
    data = member.state.data
    more = {(index, term): both for index, term, *both in data.learner_lists}
    return tuple(
        MemberList(index, term, members, *more.get((index, term), ()))
        for index, term, members in data.member_lists
    )


def begun_group(member: PeerMember, store: EntryStore) -> MemberSet:
    """Return the member list of a group that has begun by the log, without a core; else none."""
    if store.end_index < 0:
        return MemberSet(())
    group = MemberSet(member.state.data.first_members)
    for one in saved_lists(member):
        here = store.begin_index <= one.index <= store.end_index
        if one.index < store.begin_index or here and store.term_of(one.index) == one.term:
            group = one.group
    return group


def join(
    links: PeerLinks, store: EntryStore, stopping: threading.Event, note: Callable[[str], None]
) -> bool:
    """Find out what this store is, and save it durably; False if the node stops before.

    Asks the others until enough have answered; `note` gets what the node waits for.
    """
    member = links.member
    state = member.state
    if state.data.joined:
        if store.remembers and not store.notes_votes:
            log.error("hastore/votes.json is missing: this node does not remember its votes")
            store.save_hard_state(store.hard_state, remembers=False)
        if not store.remembers:
            log.warning("this store has forgotten the node's votes: it counts as lost")
        elif state.data.lost_disk:  # a crash came before it was noted
            in_line(member)
        return True
    state.save()  # the store's id, before anything else that tells of a start
    if store.remembers:  # a crash came before `joined` was saved, or RocketMQ wrote the store
        store.save_hard_state(store.hard_state, remembers=True)
        state.save(joined=True)
        return True
    answered: set[int] = set()
    knowing: set[int] = set()
    phase, told = StartPhase(links.clock), ("", 0)
    while not knowing and len(answered) < member.answers_needed:
        if stopping.is_set():
            return False
        got, others = links.ask_others()
        answered |= got
        knowing |= others
        missing = member.answers_needed - len(answered)
        if knowing or missing <= 0:
            break
        silent = sorted(set(member.addresses) - answered - {member.node})
        of = "" if missing == len(silent) else f"{missing} of "
        text = (
            f"this store is new, so its first start waits for {of}node {listed(silent)} to say "
            f"that the disk of node {member.node} was not lost; start all nodes of the group"
        )
        if told != (text, level := phase.level()):
            log.log(level, "%s", text)
            note(text)
            told = text, level
        stopping.wait(ASK_PAUSE_S)
    lost = bool(knowing) or store.end_index >= store.begin_index
    if lost:
        log.warning(
            "this node has lost its disk (%s): its votes and acknowledgements do not count until a "
            "leader has brought its log in line",
            f"known with another store by node {listed(knowing)}"
            if knowing
            else "it has entries, but no votes",
        )
    store.save_hard_state(store.hard_state, remembers=not lost)
    # A node that is new in a group that has begun is no member of it until the group's log says so.
    first = links.told_members
    if first in ((), (member.node,)):  # whose disk was lost is not alone: others know it
        first = tuple(sorted(member.addresses))
    gone = dict(state.data.replaced_stores)
    had = (*gone.get(member.node, ()), *links.told_replaced)
    gone[member.node] = tuple(dict.fromkeys(had))[-REPLACED_MAX:]
    state.save(joined=True, lost_disk=lost, first_members=first, replaced_stores=gone)
    return True


def in_line(member: PeerMember) -> None:
    """Note, durably, that a leader has brought this node's log in line: its disk is not lost now.

    From then on the stores that this one has replaced tell the others that it may come. A node that
    knows none of them, because members of an earlier version did not name them, says that its disk
    was lost as long as it runs with this store.
    """
    data = member.state.data
    if data.lost_disk and data.replaced_stores.get(member.node):
        member.state.save(lost_disk=False)


class GroupId:
    """The id of the group that this node's log belongs to; the driver's lock guards it.

    It is saved once an entry with it is committed here: one that is not may be cut, and the group
    may have another. A group of an earlier version has none until a leader of this one begins a
    term.
    """

    def __init__(self, member: PeerMember, store: EntryStore) -> None:
        self._member = member
        self._store = store
        self._looked = -1  # entries up to this one were looked at

    def for_entry(self) -> str:
        """Return the id for an entry of this leader's own: a new one if nobody has one.

        A log that begins late may lack the entry with the id that the other members have kept.
        """
        store, member = self._store, self._member
        known = member.state.data.group_id
        if not known:  # else the log is not read: a bad sector must not keep a node from leading
            in_log = store.group_id(store.begin_index, store.end_index)
            known = in_log or member.told_group_id
        return known or secrets.token_hex(8)

    def committed(self, index: int) -> None:
        """Save the id if an entry up to `index` has one. Raises OSError."""
        if self._member.state.data.group_id:
            return
        found = self._store.group_id(self._looked + 1, index)
        if found:
            self._member.state.save(group_id=found)
        self._looked = index  # last: if the disk is full, it is looked for and saved later
