"""What a node of mode dledger shows of itself: status, followers, refusals, problems."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import structs

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.events import MemberList, Role, listed
from hastore.dledger.driver.requests import RequestOutcome
from hastore.dledger.links.peer_links import PeerStatus
from hastore.dledger.store.mmap_file_store import EntryStore
from hastore.errors import Status
from hastore.protocol.dledger import Code, MemberSet

NO_ANSWER = -1


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    """What a leader knows of a follower; `index` is the last entry that it has durably, or -1."""

    node: int
    state: str  # of its EntryDispatcher: COMPARE, TRUNCATE, INSTALL, APPEND, COMMIT
    index: int
    lag_entries: int
    able: bool  # whether it could lead: its disk has room and answers, its replay goes on
    full: bool = False  # its disk has no room: it takes no entries
    is_learner: bool = False
    waits_for: str | None = None  # why a learner is not made a member now
    silent: bool = False  # it does not answer, or gets no further with what it lacks

    @property
    def counts(self) -> bool:
        """Whether puts count it: not before its first report, nor until a lost disk is in line."""
        return self.index != NO_ANSWER or self.lag_entries <= 0


def followers_of(core: DLedgerCore | None) -> list[FollowerStatus]:
    """Return what this leader knows of the other members, and learners; empty on a follower."""
    if core is None or core.role is not Role.LEADER:
        return []
    marks: Mapping[int, int] = core.water_marks
    end, learners = core.ledger_end_index, core.group.learners
    able, full, silent = core.able_followers, core.full_nodes, core.silent_followers
    return [
        FollowerStatus(
            peer,
            state.value,
            marks.get(peer, NO_ANSWER),
            end - marks.get(peer, NO_ANSWER),
            peer in able,
            peer in full,
            peer in learners,
            core.learner_waits(peer) if peer in learners else None,
            peer in silent,
        )
        for peer, state in sorted(core.dispatcher_states.items())
    ]


def role_and_log(core: DLedgerCore) -> str:
    """Return role, term, leader and log as text, for the node's own log."""
    leader = "no leader is known" if core.leader is None else f"node {core.leader} leads"
    first, last = core.ledger_begin_index, core.ledger_end_index
    entries = f"entries {first} to {last}" if first <= last else "no entries"
    committed = f", committed up to {core.committed_index}" if core.committed_index >= 0 else ""
    return f"{core.role.value} in term {core.term}, {leader}; {entries}{committed}"


def group_text(group: MemberSet) -> str:
    """Return who is in the group, for the node's own log."""
    text = f"the members are {listed(group.members)}"
    for name, nodes in (("the learners", group.learners), ("those that leave", group.leaving)):
        text += f"; {name}: {listed(nodes)}" if nodes else ""
    return text


def removed_text(node: int, removed: MemberList) -> str:
    """Say that this node was removed, by which list, and what to do."""
    return (
        f"node {node} was removed from the group, whose members are {listed(removed.members)}: "
        "what it has is not current, and it serves no reads; stop it and remove it from `nodes` in "
        "all files, or take it back with `hastore dledger add`"
    )


def refusal_of(core: DLedgerCore, full_because: str | None) -> tuple[str, Status] | None:
    """Return why the core takes no put now, and the status of the refusal; None if it takes it.

    `full_because` is what found no room, if the disk is full.
    """
    code = core.refusal()
    if code is None:
        return None
    if code == Code.NOT_LEADER.name:
        if core.removed is not None:
            return removed_text(core.node, core.removed), Status.SERVICE_NOT_AVAILABLE
        if core.leader is None and core.node not in core.members:
            kind = "a learner" if core.node in core.group.learners else "no member"
            text = f"node {core.node} is {kind}; the members are {listed(core.members)}"
            return text, Status.SERVICE_NOT_AVAILABLE
        if core.leader is None:
            return f"no leader is known in term {core.term}", Status.SERVICE_NOT_AVAILABLE
        text = f"node {core.leader} is the leader of term {core.term}"
        return text, Status.SERVICE_NOT_AVAILABLE
    if code == Code.LEADER_PENDING_FULL.name:
        return f"{code}: {core.waiting_entries} entries wait for a majority", Status.BUSY
    if code == Code.DISK_FULL.name:
        what = f"{code}: {full_because or 'the disk is full'}"
        return f"{what}; {_who_takes_over(core)}", Status.SERVICE_NOT_AVAILABLE
    return f"{code}: the leadership is being handed over", Status.SERVICE_NOT_AVAILABLE


def replay_refusal(core: DLedgerCore, blocked_reason: str | None) -> str:
    """Return why a leader takes no puts whose replay has not reached the log's end."""
    if blocked_reason is None:
        return "replay has not reached the log's end yet"
    return f"{blocked_reason}; {_who_takes_over(core)}"


def _who_takes_over(core: DLedgerCore) -> str:
    refusals = core.refusals_to_lead
    if len(refusals) < len(core.dispatcher_states):
        return "another node becomes the leader"
    reasons = [reason for _, reason in sorted(refusals.items())]
    return "; ".join(["no other member can take over", *reasons])


def status_fields(
    core: DLedgerCore | None,
    store: EntryStore,
    *,
    takes_part: bool,
    links: list[PeerStatus],
    request: RequestOutcome | None,
    ended: Sequence[RequestOutcome] = (),
) -> dict[str, Any]:
    """Return the fields of `hastore status` that this mode adds."""
    fields: dict[str, Any] = {
        "mode": "dledger",
        "role": Role.FOLLOWER.value,
        "term": store.hard_state.term,
        "leader": None,
        "ledger_begin_index": store.begin_index,
        "ledger_end_index": store.end_index,
        "committed_index": store.committed_index,
        "voted_for": store.hard_state.voted_for,
        "members": [],
        "learners": [],
        "leaving": [],
        "remembers": store.remembers,
    }
    if core is not None:
        fields.update(
            term=core.term,
            ledger_begin_index=core.ledger_begin_index,
            ledger_end_index=core.ledger_end_index,
            committed_index=core.committed_index,
            voted_for=core.voted_for,
            members=list(core.members),
            learners=[{"node": one} for one in core.group.learners],
            leaving=list(core.group.leaving),
            remembers=core.remembers,
        )
        if takes_part:
            fields.update(role=core.role.value, leader=core.leader)
    fields["followers"] = [asdict(one) for one in followers_of(core)] if takes_part else []
    fields["links"] = [asdict(one) for one in links]
    fields["request"] = None if request is None else structs.asdict(request)
    fields["requests"] = [structs.asdict(one) for one in ended]
    return fields


def ack_points_problem(without_syncs: Collection[int], core: DLedgerCore | None) -> str | None:
    """Return what an operator must look at if only some of the members sync what they confirm."""
    if core is None or not without_syncs or set(core.members).issubset(without_syncs):
        return None
    return (
        f"members that confirm what is on no disk yet: node {listed(without_syncs)}; the others"
        " sync it first: puts are acknowledged as QUORUM_MEM, and those with sync_flush refused;"
        " set the same `store.flush` and `store.kind` in the files of all nodes"
    )


def sync_flush_refusal(without_syncs: Collection[int]) -> str:
    """Return why a put that asks for disks is refused while some members do not sync."""
    return (
        "sync_flush: there are members that confirm what is on no disk yet: node"
        f" {listed(without_syncs)}; set `store.flush: sync` and `store.kind: file` in all files"
    )


def problems_of(core: DLedgerCore | None, links: list[PeerStatus]) -> list[str]:
    """Return what an operator must look at: a lost disk, missing links."""
    found = []
    if core is not None and not core.remembers:
        found.append(
            "this node has lost its disk: its votes and acknowledgements do not count until a "
            "leader has brought its log in line"
        )
    if core is not None and core.removed is not None:
        found.append(removed_text(core.node, core.removed))
    if core is not None and core.preferences:
        said = ", ".join(f"node {node} prefers node {one}" for node, one in core.preferences)
        found.append(
            f"the nodes contradict each other about their leader: {said}; set the same "
            "`dledger.preferred_leader` in the files of all nodes, and start these nodes again"
        )
    if core is not None and core.blocked:
        if core.role is Role.LEADER:
            found.append(f"the replay of this leader has stopped: {_who_takes_over(core)}")
        else:
            found.append("replay has stopped: this node leads only if no other member can")
    if core is not None and core.role is Role.LEADER:
        full = core.full_nodes.intersection(core.members)
        if full != {core.node} and 2 * len(full) >= len(core.members):
            found.append(
                "no majority of the members has room, so puts are not confirmed: make room on the "
                f"disk of node {listed(full)}"
            )
    silent: set[int] = set() if core is None else core.silent_followers - core.full_nodes
    found += [
        f"node {one.node} is linked, but does not answer, or takes nothing of what it lacks: it is"
        " not in sync; look at its disk, and at its `problems`"
        for one in links
        if one.linked and one.node in silent
    ]
    found += [
        f"no link to node {one.node}: {one.problem}"
        for one in links
        if one.problem is not None and not one.linked
    ]
    return found
