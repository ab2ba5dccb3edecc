"""The decisions of a promotion (docs/failover.md, "Promotion").

These functions decide whether a node may promise an epoch, whether the answers suffice, whose log
is the most advanced, whether a candidate could take puts, and whether another node was faster. They
are pure: a node and the simulation run the same code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hastore.ha.rules.epochs import (
    CLASSIC_EPOCH,
    EpochEntry,
    History,
    WrittenOver,
    epoch_node,
    last_epoch,
)


def may_promise(promised_epoch: int, candidate: int, epoch: int) -> str | None:
    """Return why a node cannot promise `epoch` to `candidate`, None when it can.

    A node promises an epoch above its last promise, or the same epoch again to the same candidate.
    """
    if epoch_node(epoch) != candidate:
        return f"epoch {epoch} does not belong to node {candidate}"
    if epoch < promised_epoch:
        return f"epoch {promised_epoch} is promised already, above {epoch}"
    return None


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One node's state: from its answer to a promotion's survey, or from its promise."""

    node: int
    last_epoch: int
    log_end: int
    unclean: bool

    @property
    def log_order(self) -> tuple[int, int]:
        """The order of logs in a promotion: by last epoch, then by the log's end."""
        return self.last_epoch, self.log_end


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a promotion's answers must satisfy: the group, and every `acks` and node list that may
    still be in force.
    """

    node: int
    nodes: tuple[int, ...]  # of the configuration, this node included
    acks: int  # of the configuration; the new epoch will have it
    acks_min: int
    acks_max: int
    # The node lists that may still be in force and differ from `nodes`.
    old_nodes: tuple[tuple[int, ...], ...] = ()
    fresh: bool = False  # its history is empty, or old, so it does not know what is in force


@dataclass(frozen=True, slots=True)
class PromotionVerdict:
    """Whether the answers suffice; `missing` are the nodes that have not answered."""

    enough: bool
    needed: int
    clean: int
    missing: tuple[int, ...]
    unclean: tuple[int, ...]

    @property
    def reason(self) -> str:
        """Return what the promotion lacks, as a text for people."""
        text = f"promotion needs {self.needed} clean nodes and has {self.clean}"
        if self.missing:
            text += "; waiting for node " + ", ".join(map(str, self.missing))
        if self.unclean:
            text += "; unclean: node " + ", ".join(map(str, self.unclean))
        return text


def judge(required: Requirements, answers: list[PeerAnswer]) -> PromotionVerdict:
    """Decide whether the answers include a node of every set that may have confirmed a put.

    Of a list of N nodes, R = N - (smallest acks) clean nodes are needed. If `acks` or the node list
    differ from those of the last entry or of a later promise, every node of the new list must
    answer, and R clean nodes of each old list are needed too. A fresh node does not know the
    smallest `acks`. It assumes that it is at most 1.
    """
    by_node = {answer.node: answer for answer in answers}
    clean = {node for node, answer in by_node.items() if not answer.unclean}
    lists = [required.nodes, *(old for old in required.old_nodes if old != required.nodes)]
    changed = (
        required.acks_min != required.acks_max
        or len(lists) > 1
        or required.acks != required.acks_min
    )
    enough, needed, have = True, 0, 0
    for members in lists:
        smallest = min(required.acks_min, 1) if required.fresh else required.acks_min
        quorum = max(1, len(members) - smallest)
        inside = len(clean.intersection(members))
        enough = enough and inside >= quorum
        if quorum - inside >= needed - have:
            needed, have = quorum, inside
    if changed:
        enough = enough and all(node in by_node for node in required.nodes)
        needed = max(needed, len(required.nodes))
        have = len(clean.intersection(required.nodes))
    everyone = dict.fromkeys(node for members in lists for node in members)
    missing = tuple(node for node in everyone if node not in by_node)
    unclean = tuple(node for node, answer in by_node.items() if answer.unclean)
    return PromotionVerdict(enough, needed, have, missing, unclean)


def most_advanced(answers: list[PeerAnswer], own: int) -> PeerAnswer:
    """Return the answer with the most advanced log, unclean nodes included.

    That is this node's own answer if no other log is more advanced than this node's log.
    """
    best = next(answer for answer in answers if answer.node == own)
    for answer in answers:
        if answer.log_order > best.log_order:
            best = answer
    return best


def may_resume(history: History, promised_epoch: int, node: int, epoch_over: bool) -> int | None:
    """Return the epoch in which a restarted master continues, None when that epoch is over.

    It continues only after it has asked the others: none has a higher epoch, and none has more of
    its own epoch than itself (`has_more`).
    """
    epoch = last_epoch(history)
    if epoch and epoch_node(epoch) == node and promised_epoch == epoch and not epoch_over:
        return epoch
    return None


def has_more(
    epoch: int, log_end: int, answers: Iterable[PeerAnswer], unmet: Mapping[int, int]
) -> PeerAnswer | None:
    """Return the node that has most of `epoch`, whose own master ends at `log_end`; None if no
    other node has more than the master.

    A master has all of its epoch before it sends anything of it. So a node that has more shows that
    the master's disk has lost the log's end, whatever the cause: new puts would get offsets at
    which other nodes have other messages of the same epoch. For a node in `unmet` that has happened
    already if the master's log ends beyond the offset there: it refuses that one (following.py).
    """
    more = [
        one
        for one in answers
        if one.last_epoch == epoch and one.log_end > log_end <= unmet.get(one.node, log_end)
    ]
    return max(more, key=lambda one: one.log_end, default=None)


def replay_refusal(blocked: str | None, dispatched: int, end: int, gap: int) -> str | None:
    """Return why a candidate asks for no promises: as master it could take no puts. None: it asks.

    `blocked` says why replay has stopped, None if it has not. It may be up to `gap` bytes behind
    the log's `end`.
    """
    if blocked is not None:
        return (
            f"{blocked}; before that is mended this node could take no puts as master, so it asks "
            "for no promises. Make room, or repair the folder or the disk: replay tries again each "
            "second, and then the promotion goes on. If files of queues or index are beyond "
            "repair, stop the node, remove them and hastore/replay in its store, and start it: "
            "they are built anew. Or promote another node"
        )
    if end - dispatched > gap:
        return (
            f"replay is {end - dispatched:,} bytes behind the log's end, and this node could take "
            f"no puts as master before it is there; the promotion goes on once {gap:,} are left"
        )
    return None


def overtaking(known: int, opened: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the greatest (epoch, node) of `opened` above `known`; None if there is none.

    `known` is the greatest epoch that this node knew when it was told to become master, or that it
    has asked for since. An order to become master does not apply to a later master.
    """
    return max((each for each in opened if each[0] > known), default=None)


def new_entry(epoch: int, start: int, acks: int, nodes: tuple[int, ...]) -> EpochEntry:
    """Return the entry that a promotion appends."""
    return EpochEntry(epoch, start, acks, tuple(sorted(nodes)), ())


def kept_apart(history: History, over: WrittenOver, entry: EpochEntry) -> History:
    """Return the history of a log that goes on with `entry`, a promotion's, and keeps what a master
    has replaced (`over`).

    These bytes become those of an epoch of their own, the one before the promotion's, which nobody
    has used. So all others, which may have other bytes of the master's epoch there, diverge from
    this log where that begins.
    """
    before = entry.epoch - (1 << 16)
    return (*history, EpochEntry(before, over.offset, entry.acks, entry.nodes))


def opened_history(history: History, min_offset: int, entry: EpochEntry) -> History:
    """Return the history of a log that begins at `min_offset` once a promotion appends `entry`.

    Bytes before the first entry are of a store that no node has written, a RocketMQ broker's. They
    become those of epoch 0: a slave that has a part of them could share no entry with this log, and
    would be told for ever to begin anew.
    """
    history = (*history, entry)
    if history[0].start <= min_offset or history[0].epoch == CLASSIC_EPOCH:
        return history
    return (EpochEntry(CLASSIC_EPOCH, min_offset, entry.acks, entry.nodes), *history)
