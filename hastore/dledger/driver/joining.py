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
_OF_A_NEW_GROUP = (
    ", and that no group has begun; start all nodes of the group; if the group is new, take one "
    "which was never started, out of `nodes` in every file until it is there"
)


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
    has_entries = store.end_index >= store.begin_index
    first = state.data.first_members
    if store.remembers and not state.data.lost_disk and (first or has_entries):
        # A crash came before `joined` was saved, or RocketMQ wrote the store.
        state.save()  # the store's id, before anything else that tells of a start
        store.save_hard_state(store.hard_state, remembers=True)
        state.save(joined=True)
        return True
    # What it was told before a crash is asked again: it, or `nodes` in the file, may be another.
    state.save(first_members=first if has_entries else ())
    found = _ask(links, stopping, note, has_entries=has_entries)
    if found is None:
        return False
    knowing, nodes = found
    # Once said, it stays: `currterm` alone would say that the votes are known.
    lost = bool(knowing) or has_entries or state.data.lost_disk
    if lost:
        log.warning(
            "this node has lost its disk (%s): its votes and acknowledgements do not count until a "
            "leader has brought its log in line",
            f"known with another store by node {listed(knowing)}"
            if knowing
            else "it has entries, but no votes",
        )
    gone = dict(state.data.replaced_stores)
    had = (*gone.get(member.node, ()), *links.told_replaced)
    gone[member.node] = tuple(dict.fromkeys(had))[-REPLACED_MAX:]
    # Who has a vote, and no list of members, counts with `nodes` of its file: so the list is first.
    state.save(lost_disk=lost, first_members=_begun(links) or nodes, replaced_stores=gone)
    store.save_hard_state(store.hard_state, remembers=not lost)
    state.save(joined=True)
    return True


def _begun(links: PeerLinks) -> tuple[int, ...]:
    """Return the members that another node has named, if a group has begun; else nothing.

    A node that is new in such a group is no member of it until the group's log says so. One whose
    disk was lost is not alone: others know it.
    """
    told = links.told_members
    return () if told == (links.member.node,) else told


def _ask(
    links: PeerLinks,
    stopping: threading.Event,
    note: Callable[[str], None],
    *,
    has_entries: bool,
) -> tuple[set[int], tuple[int, ...]] | None:
    """Ask until enough have answered; return who knows another store, and the nodes of the file.

    None if the node stops before. To begin a group takes every node of the file: the one that is
    silent may be the only member of a group that has begun, which nobody else knows. A store with
    entries and no votes begins none.
    """
    member = links.member
    answered: set[int] = set()
    asked: tuple[int, ...] = ()
    phase, said = StartPhase(links.clock), ("", 0)
    while not stopping.is_set():
        nodes = tuple(sorted(member.addresses))
        if nodes != asked:  # the answers agreed to the list that was in the file before
            asked, answered = nodes, set()
        got, knowing = links.ask_others()
        if tuple(sorted(member.addresses)) != asked:
            continue
        answered |= got
        silent = sorted(set(asked) - answered - {member.node})
        begins = not has_entries and not _begun(links)
        missing = len(silent) if begins else member.answers_needed - len(answered)
        if knowing or missing <= 0:
            return knowing, asked
        of = "" if missing == len(silent) else f"{missing} of "
        text = (
            f"this store is new, so its first start waits for {of}node {listed(silent)} to say "
            f"that the disk of node {member.node} was not lost"
        )
        text += _OF_A_NEW_GROUP if begins else "; start all nodes of the group"
        if said != (text, level := phase.level()):
            log.log(level, "%s", text)
            note(text)
            said = text, level
        stopping.wait(ASK_PAUSE_S)
    return None


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
