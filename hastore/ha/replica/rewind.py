"""Cut a log back to a common point, in steps that a crash may interrupt anywhere.

docs/failover.md, "Following and rejoin", has the rules.

    1 archive the tail, synced -> 2 write the intent -> 3 clear the bytes, synced
      -> 4 cut the history and drop the intent, in one durable write

After a crash between 2 and 4, `finish_cut` repeats steps 3 and 4 before any HELLO. A crash before 2
leaves an unneeded archive, and nothing is cut. If the write of step 4 fails, as on a full disk, it
is repeated before the node follows a master or opens an epoch.
"""

import logging

from hastore.errors import GroupDisagrees, ReplicationError, UsageError
from hastore.ha.node.node_state import CutIntent, NodeState
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import History, common_point, keep_until
from hastore.ha.rules.following import cut_loses_confirmed
from hastore.protocol.hello import Hello

log = logging.getLogger(__name__)


def cut_back(
    store: ReplicaLog,
    state: NodeState,
    offset: int,
    entries: int,
    *,
    accept_loss: bool,
    why: str,
    archive: bool = True,
) -> int:
    """Archive the log beyond `offset` and cut it; return the number of archived bytes.

    The first `entries` history entries stay. With `archive` False nothing is archived: the master
    has just sent this tail and will send it again. The caller holds the gate's lock. Raises
    GroupDisagrees when a whole confirmed record would be cut and `accept_loss` is False
    (`refuse_loss`). Raises ReplicationError when `offset` or `entries` are outside this log, or if
    retention has just removed the bytes there.
    """
    end = store.max_offset
    if not store.min_offset <= offset <= end or not 0 <= entries <= len(state.history):
        raise ReplicationError(
            f"{why}: cannot cut at {offset} and keep {entries} history entries: this log covers "
            f"[{store.min_offset}, {end}) and has {len(state.history)} entries"
        )
    if not accept_loss:
        refuse_loss(store, offset, why, comes_again=not archive)
    elif loses_confirmed(store, offset):
        log.error(
            "%s: --accept-loss gives up confirmed records, bytes %d to %d",
            *(why, offset, store.confirmed_offset),
        )
    archived = 0
    if archive and offset < end:
        # A tail that is only a part of a record needs no archive, but one does no harm.
        archived = store.archive(offset, f"{state.last_epoch}-{offset}")
    # The record that came damaged must go: what stays in the log counts as good. But damage to an
    # older one must not lead this cut back: this node has acknowledged what lies between, and the
    # master may be lost now. If the place is inside a record, that one goes too.
    begin = offset if archive else store.cut_point(offset)
    exact = begin < offset and store.record_size(begin, check=True) is None
    state.save(intent=CutIntent(offset, entries))
    finish_cut(store, state, exact=exact)
    if store.min_offset > offset:
        raise ReplicationError(
            f"{why}: retention has removed the bytes at {offset}, where the cut was to begin; the"
            " next try finds out what to do instead"
        )
    log.warning("%s: cut the log from %d to %d, %d bytes archived", why, end, offset, archived)
    return archived


def loses_confirmed(store: ReplicaLog, cut: int) -> bool:
    """Whether a cut at `cut` would lose a whole confirmed record of this log."""
    if cut >= store.confirmed_offset:
        return False
    first = store.after_blank(cut)
    size = store.record_size(first)
    return cut_loses_confirmed(first, store.confirmed_offset, size, store.whole_offset)


def refuse_loss(store: ReplicaLog, cut: int, why: str, *, comes_again: bool = False) -> None:
    """Raise GroupDisagrees if a cut at `cut` would lose a whole confirmed record of this log.

    Damage may lead the cut further back, unless the tail `comes_again` (`cut_back`).
    """
    if loses_confirmed(store, cut):
        raise GroupDisagrees(
            f"{why}: cutting at {cut} would lose confirmed records up to "
            f"{store.confirmed_offset}; the group disagrees. Compare `hastore status` of all "
            "nodes; to give up these records here (they are archived under rescued/), run "
            "`hastore demote --accept-loss` for this node"
        )
    begin = cut if comes_again else store.cut_point(cut)
    if begin < cut and loses_confirmed(store, begin):
        raise GroupDisagrees(
            f"{why}: the log is damaged at {begin}, and a cut at {cut} would lose all from there "
            f"on, with confirmed records up to {store.confirmed_offset}: this node repairs it from "
            "another node, if one has the bytes, and goes on then; if not, stop the node and "
            "repair it (`hastore log repair -c FILE`); to give up these records here, run "
            "`hastore demote --accept-loss` for this node"
        )


def confirmed_for(store: ReplicaLog, hello: Hello, master: Hello) -> int:
    """Return the confirmed offset to send in `hello` to a master.

    It is lowered to the last common point, or to this log's first offset if that is greater. It is
    not lowered if this log has a whole confirmed record beyond that point.

    Slaves report parts of records, so this node's confirmed offset may lie inside a record. If it
    lies inside the first record after the common point, no record after that point is confirmed.
    The master cannot tell, because only this node knows where its records end.
    """
    common, _ = common_point(hello.history, hello.max_offset, master.history, master.max_offset)
    if hello.written_over is not None:
        common = min(common, hello.written_over.offset)
    point = max(common, hello.min_offset)
    if point < hello.confirmed_offset and not loses_confirmed(store, point):
        return point
    return hello.confirmed_offset


def entries_at(history: History, offset: int, shared: int) -> int:
    """Return how many entries a cut at `offset` leaves.

    These are the `shared` entries, and all that start at or below `offset`.

    Entries that the master does not know stay for now. They are dropped in the same durable write
    that takes over the master's next entry, or bytes that follow (`epochs.agreed`).
    """
    return max(shared, sum(1 for entry in history if entry.start <= offset))


def finish_cut(store: ReplicaLog, state: NodeState, *, exact: bool = False) -> None:
    """Carry out the cut that the intent describes, also after a crash.

    Does nothing if there is no intent, and drops one below the log's first offset. `exact`: a
    record ends there, whatever damage before it says.
    """
    intent = state.data.intent
    if intent is None:
        return
    if store.max_offset > intent.offset:
        try:
            store.truncate(intent.offset, exact=exact)
        except UsageError:
            if store.min_offset <= intent.offset:
                raise
            # Retention has removed the bytes at that place while the cut began, and nothing was
            # cut. The master's answer to the next HELLO is a resync.
            log.warning(
                "the cut at %d is given up: retention has removed the log below %d",
                *(intent.offset, store.min_offset),
            )
            state.save(intent=None)
            return
    if store.confirmed_offset > store.max_offset:
        store.set_limits(confirmed=store.max_offset)
    if store.readable_offset > store.max_offset:
        store.set_limits(readable=store.max_offset)
    # Damage may have led the cut further back: an entry beyond the end would win a promotion.
    history = keep_until(state.data.history[: intent.entries], store.max_offset)
    state.save(history=history, intent=None)
