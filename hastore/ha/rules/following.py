"""The decisions of HELLO and of a rejoin (docs/failover.md, "Following and rejoin").

These functions decide whether a caller is a member of the group, where its stream starts, which
bytes have to be compared first, and whether a cut loses confirmed records. They are pure: a node
and the simulation run the same code.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hastore.ha.rules.epochs import (
    FLOOR_EPOCH,
    History,
    WrittenOver,
    classic_range,
    common_point,
    epoch_node,
    forgotten_end,
    keep_until,
    last_epoch,
    last_resumption,
    nothing_to_compare,
    parted,
)
from hastore.protocol.hello import Hello, Refused, Resync, RewindTo, StreamFrom

RECORD_BYTES_MAX = 5 * 1024 * 1024  # a body of 4 MiB, topic and properties; rounded up

FollowAnswer = StreamFrom | RewindTo | Resync | Refused


@dataclass(frozen=True, slots=True)
class MasterView:
    """An open master's state when a slave says HELLO."""

    epoch: int
    promised_epoch: int
    history: History
    min_offset: int
    max_offset: int
    file_size: int
    digest: bytes = b""  # of the master's own bytes in the range that the slave named
    opened_at: int | None = None  # the log's end when the master opened, or resumed, its epoch
    # The log's end when the master resumed its epoch, if this slave has not followed it since.
    unmet: int | None = None

    @property
    def begin(self) -> int:
        """Where bytes begin that the master may have written since it lost the log's end."""
        return next(at for at in (self.unmet, self.opened_at, self.max_offset) if at is not None)


def check_identity(
    hello: Hello,
    cluster: str,
    group: str,
    node: int,
    nodes: tuple[int, ...],
    known: dict[int, str],
    mode: str = "classic",
) -> str | None:
    """Return why the caller is not a member of the group, None when it is.

    `mode` is this node's replication mode.
    """
    if hello.cluster != cluster or hello.group != group:
        return (
            f"wrong cluster: the caller belongs to {hello.cluster}/{hello.group}, this node to "
            f"{cluster}/{group}; check `cluster` and `group`"
        )
    if hello.node == node:
        return f"node number {node} is this node's own; give each node its own `node`"
    if hello.node not in nodes:
        return (
            f"node {hello.node} is not in this node's list; add it to `nodes`, or stop it if it "
            "has left the group"
        )
    if hello.mode != mode:
        return (
            f"node {hello.node} runs in mode {hello.mode}, node {node} in mode {mode}; set the "
            "same `mode` in the files of all nodes of the group"
        )
    if known.get(hello.node, hello.store_id) != hello.store_id:
        return (
            f"node number {hello.node} is known with another store; a node whose disk was lost or "
            "restored from a copy must come back under a new number"
        )
    return None


def lacks_own_end(master: MasterView, hello: Hello) -> bool:
    """Whether a slave has more of the master's own epoch than the master: it had all of it first,
    so its disk has lost the end of the log (`promotion.has_more`).

    A slave that comes for the first time since the master resumed the epoch can have none of what
    was written since. An unclean one may have it from a backup of another node.
    """
    limit = master.max_offset
    if master.unmet is not None and not hello.unclean:
        limit = min(limit, master.unmet)
    return last_epoch(hello.history) == master.epoch and hello.max_offset > limit


def diverged(hellos: Sequence[Hello], keeps: int | None = None) -> str | None:
    """Say which master has written over the lost end of its log, while another of these nodes has
    that end: they have other messages of one epoch at equal offsets. A promotion would mix them.

    A node that has promised a later epoch is left out: it may have copied what it has since then.
    So is `keeps`, the candidate, if it knows that and keeps its own log (`kept_apart`).
    """
    for master, other in itertools.permutations(hellos, 2):
        if other.node == keeps:
            continue
        epoch, begin = last_epoch(master.history), master.unmet.get(other.node)
        same = epoch == last_epoch(other.history) == other.promised_epoch and not other.unclean
        if begin is not None and same and min(master.max_offset, other.max_offset) > begin:
            return (
                f"nodes {master.node} and {other.node} have other messages of epoch {epoch} from "
                f"{begin} on, because node {master.node} had lost the end of its log and has "
                f"written since: `hastore demote --accept-loss` for node {other.node}, while node "
                f"{master.node} is the master, gives up its bytes from there on (they are archived "
                "under rescued/). To keep these instead stop node "
                f"{master.node} for good and promote another one"
            )
    return None


def with_written_over(hellos: Sequence[Hello]) -> list[Hello]:
    """Return these HELLOs, and let each say what the others show: they have bytes that the master
    of the node's last epoch has written since a resumption, where the node has those that the
    master's disk had lost. The node does not know it if it has not met that master since.
    """
    return [
        hello
        if hello.written_over is not None
        else msgspec.structs.replace(hello, written_over=_written_over(hello, hellos))
        for hello in hellos
    ]


def _written_over(hello: Hello, hellos: Sequence[Hello]) -> WrittenOver | None:
    epoch, places = last_epoch(hello.history), []
    for other in hellos:
        if epoch and last_epoch(other.history) == epoch:
            mine, theirs = hello.history[-1], other.history[-1]
            at = parted(mine, theirs) if last_resumption(mine) < last_resumption(theirs) else None
            if at is not None and at < min(hello.max_offset, other.max_offset):
                places.append(at)
    return WrittenOver(epoch, min(places), epoch_node(epoch)) if places else None


def kept_log(own: Hello, hellos: Sequence[Hello]) -> WrittenOver | None:
    """Return what a candidate keeps that its master has replaced, if its operator gives up what
    others have there. None if there is no such thing, or another node has a later epoch: the
    candidate then cuts that off and follows the later epoch, like any other node.
    """
    newest = max(last_epoch(hello.history) for hello in hellos)
    return own.written_over if last_epoch(own.history) == newest else None


def refused_log(hellos: Sequence[Hello], own: int) -> str | None:
    """Say which of these logs, among the most advanced ones, a master has refused: from some offset
    on it has other messages of the same epoch there. If `own`, the candidate's, is that log, or if
    no other reaches beyond that offset, a promotion would open or copy it, and mix two logs once
    the others are back. None if it would not.
    """
    newest = max(last_epoch(hello.history) for hello in hellos)
    logs = [hello for hello in hellos if last_epoch(hello.history) == newest]
    end = max((hello.max_offset for hello in logs if hello.written_over is None), default=-1)
    for hello in logs:
        over = hello.written_over
        if over is not None and (hello.node == own or end <= over.offset):
            return written_over_text(hello.node, over)
    return None


def written_over_text(node: int, over: WrittenOver) -> str:
    """Say what a master has replaced of what `node` has, and what an operator can do."""
    return (
        f"node {over.node}, the master of epoch {over.epoch}, refuses node {node} as its "
        f"slave: from {over.offset} on it has written other messages than node {node} has, which "
        f"may be acknowledged. Start node {over.node}, if it is down: while it is the master, "
        f"`hastore demote --accept-loss` for node {node} gives up what this one has from there on. "
        f"If node {over.node} is gone for good, promote another node, which has these; if none "
        f"that answers has, that is refused unless node {node} is stopped. Or `hastore promote "
        f"--accept-loss` for node {node} keeps what this one has, and gives up what others have "
        "from there on"
    )


def _lost_end(master: MasterView, hello: Hello) -> str:
    """Say what a master lacks of its own epoch, and what loses the least."""
    node, begin = hello.node, master.begin
    text = (
        f"this master's disk has lost the end of its log: node {node} has bytes of its epoch "
        f"{master.epoch} up to {hello.max_offset}, and the master had only those up to "
        f"{begin} at its start. Nothing is cut; "
    )
    give_up = (
        f"`hastore demote --accept-loss` for node {node} gives up its bytes from there on (they "
        "are archived under rescued/)"
    )
    if begin == master.max_offset:
        return text + (
            f"the master begins a new epoch with them once every node answers; `hastore promote` "
            f"on node {node} keeps them too; {give_up}"
        )
    return text + (
        f"since its restart the master has written other messages from {begin} on, so do not "
        f"promote node {node}: {give_up}"
    )


def answer_follow(master: MasterView, hello: Hello) -> FollowAnswer:
    """Decide what an open master answers to a slave; changes nothing.

    A slave that has promised a higher epoch is refused with that epoch: the master must then turn
    read-only. A slave that has promised only a lower epoch is refused until it promises this one.
    Until then the candidate that has the lower promise may rely on the slave's log as it is. One
    that has more of the master's own epoch is refused, unless it gives that up: a cut would take
    what only this slave has, and may have been acknowledged.
    """
    if hello.promised_epoch > master.promised_epoch:
        return Refused(
            f"node {hello.node} has promised epoch {hello.promised_epoch}, above {master.epoch}",
            hello.promised_epoch,
        )
    if hello.promised_epoch != master.epoch:
        return Refused("promise this master's epoch before following it", master.epoch)
    if hello.file_size != master.file_size:
        return Refused(
            f"the slave's log files have {hello.file_size} bytes, the master's {master.file_size}; "
            "set store.commitlog_file_size to the same on every node (with an empty store)"
        )
    if hello.max_offset == 0 and master.min_offset == 0:
        # The slave has no bytes to set aside, but it may have entries that the master lacks.
        _, kept = common_point(hello.history, 0, master.history, master.max_offset)
        return RewindTo(0, kept) if kept < len(hello.history) else StreamFrom(0)
    due = digest_due(hello, master.history, master.min_offset, master.max_offset)
    problem = digest_problem(hello, due, master.digest)
    said = bool(hello.digest) and (hello.digest_from, hello.digest_to) == due
    if problem is not None and (hello.accept_loss or (said and _only_forgotten(hello))):
        return _resync(master)
    if problem is not None:
        return Refused(problem)
    common, kept = common_point(hello.history, hello.max_offset, master.history, master.max_offset)
    if lacks_own_end(master, hello):
        if not hello.accept_loss:
            over = master.begin if master.begin < master.max_offset else None
            return Refused(_lost_end(master, hello), written_over=over)
        common = min(common, master.begin)
    noted = hello.written_over
    if noted is not None:
        if noted.epoch == master.epoch and not hello.accept_loss:
            return Refused(written_over_text(hello.node, noted), written_over=noted.offset)
        common = min(common, noted.offset)  # the histories do not show it
    blind = nothing_to_compare(
        hello.history, hello.min_offset, hello.max_offset,
        master.history, master.min_offset, master.max_offset,
    )  # fmt: skip
    if kept == 0 or blind or common < max(master.min_offset, hello.min_offset):
        # A slave whose retention has removed the common point cannot cut its log back to it.
        known = common if kept else _known_shared(master, hello)
        if hello.confirmed_offset > max(known, hello.min_offset) and not hello.accept_loss:
            return Refused(
                f"node {hello.node} holds confirmed data up to {hello.confirmed_offset}, beyond "
                f"the last common point {known}, and this master's log starts at "
                f"{master.min_offset}; the group disagrees: compare `hastore status` of both, then "
                "decide: `hastore demote -c FILE --accept-loss` on its node sets its store aside "
                "in rescued/ and copies the master's"
            )
        return _resync(master)
    if common < hello.max_offset or kept < len(hello.history):
        return RewindTo(common, kept)
    return StreamFrom(hello.max_offset)


def _known_shared(master: MasterView, hello: Hello) -> int:
    """Return the offset up to which the master is assumed to have the slave's confirmed data.

    Neither history says where the two logs parted. The offset is the end of the forgotten range
    plus the longest record, or 0 when nothing is forgotten. The longest record is added because the
    slave's confirmed offset may lie inside a record that a promotion has cut off. If the confirmed
    offset is greater, the slave has a whole confirmed record that the master may lack.
    """
    end = forgotten_end(hello.history, hello.max_offset, master.history, master.max_offset)
    return end + RECORD_BYTES_MAX if end else 0


def _resync(master: MasterView) -> Resync:
    return Resync(master.min_offset, keep_until(master.history, master.min_offset))


def _only_forgotten(hello: Hello) -> bool:
    """Whether the caller's log has only bytes of FLOOR_EPOCH, as an interrupted copy has."""
    return last_epoch(hello.history) == FLOOR_EPOCH


def digest_due(
    hello: Hello, history: History, min_offset: int, max_offset: int
) -> tuple[int, int] | None:
    """Return the range whose digest the caller must send; None when it must send none.

    The answerer's log is [`min_offset`, `max_offset`) with `history`.
    """
    return classic_range(
        hello.history, hello.min_offset, hello.max_offset, history, min_offset, max_offset
    )


def digest_problem(hello: Hello, due: tuple[int, int] | None, own: bytes) -> str | None:
    """Return why the caller may not go on; None if the bytes match or need not be compared.

    `due` is the range to compare as this node sees it now, `own` the digest of this node's bytes in
    the range that the caller named. Retention may remove bytes of either log after the caller chose
    its range. Bytes that cannot be compared any more do not count as equal.
    """
    if due is None and not hello.digest_to:
        return None
    named = (hello.digest_from, hello.digest_to)
    if due is None or (named == due and not own):
        return (
            f"retention has removed bytes of a RocketMQ master in [{named[0]}, {named[1]}), which "
            f"node {hello.node} wanted to compare; it will try again"
        )
    start, end = due
    if not hello.digest or named != due:
        return (
            f"both logs hold bytes [{start}, {end}) of a RocketMQ master, and node {hello.node} "
            "did not send their digest; it will try again"
        )
    if hello.digest != own and _only_forgotten(hello):
        return (
            f"the bytes [{start}, {end}) differ, and the two logs diverged more epochs ago than a "
            "history holds; promote the node that is ahead"
        )
    if hello.digest != own:
        return (
            f"node {hello.node} and the node that it asked followed different RocketMQ masters: "
            f"their bytes [{start}, {end}) differ; decide which log is right, then run "
            "`hastore demote -c FILE --accept-loss` on the node with the wrong log: it sets its "
            "store aside in rescued/ and copies the right log"
        )
    return None


def cut_loses_confirmed(
    cut: int, confirmed_offset: int, first_record_bytes: int | None, whole_offset: int
) -> bool:
    """Whether a cut would lose a whole confirmed record.

    `cut` is the offset of the cut, or the end of a blank that starts there. `first_record_bytes` is
    the size of the record at `cut` (None: no whole record starts there). `whole_offset` is the end
    of the log's last whole record.

    A record is confirmed only when its end is at or below `confirmed_offset`. So a confirmed offset
    inside the first record confirms no record after the cut. If the cut is below `confirmed_offset`
    and inside a record or a blank, it counts as a loss when a whole record ends after it.
    """
    if cut >= confirmed_offset:
        return False
    if first_record_bytes is None:
        return cut < whole_offset
    return cut + first_record_bytes <= confirmed_offset
