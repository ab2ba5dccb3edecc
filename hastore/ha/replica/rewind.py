"""Cut a log back to a common point, in steps that a crash may interrupt anywhere
(docs/failover.md, "Following and rejoin").

    1 archive the tail, synced -> 2 write the intent -> 3 clear the bytes, synced
      -> 4 cut the history and drop the intent, in one durable write

After a crash between 2 and 4, `finish_cut` repeats the rest before any HELLO. A crash before 2
leaves an unneeded archive, and nothing is cut.
"""

import logging

from hastore.errors import GroupDisagrees, ReplicationError
from hastore.ha.node.node_state import CutIntent, NodeState
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import History, common_point
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
    """Archive and cut the log beyond `offset`, keep the first `entries` history entries; return the
    number of bytes archived.

    `archive` is False for a tail that the master has just sent and will send again. The caller
    holds the write gate. Raises GroupDisagrees when a whole confirmed record would be cut, unless
    `accept_loss`; ReplicationError when `offset` or `entries` are outside this log.
    """
    end = store.max_offset
    if not store.min_offset <= offset <= end or not 0 <= entries <= len(state.history):
        raise ReplicationError(
            f"{why}: no cut at {offset} with {entries} entries; this log is "
            f"[{store.min_offset}, {end}) with {len(state.history)}"
        )
    if loses_confirmed(store, offset):
        if not accept_loss:
            raise GroupDisagrees(
                f"{why}: cutting at {offset} would lose confirmed records up to "
                f"{store.confirmed_offset}; the group disagrees. Compare `hastore status` of all "
                "nodes; to give them up here (they are archived under rescued/), run "
                "`hastore demote --accept-loss` for this node"
            )
        log.error(
            "%s: --accept-loss gives up confirmed records, bytes %d to %d",
            *(why, offset, store.confirmed_offset),
        )
    archived = 0
    if archive and offset < end:
        # Needless for a tail that is only a part of a record, but harmless.
        archived = store.archive(offset, f"{state.last_epoch}-{offset}")
    state.save(intent=CutIntent(offset, entries))
    finish_cut(store, state)
    log.warning("%s: cut the log from %d to %d, %d bytes archived", why, end, offset, archived)
    return archived


def loses_confirmed(store: ReplicaLog, cut: int) -> bool:
    """Whether a cut at `cut` would lose a whole confirmed record of this log."""
    if cut >= store.confirmed_offset:
        return False
    first = store.after_blank(cut)
    size = store.record_size(first)
    return cut_loses_confirmed(first, store.confirmed_offset, size, store.whole_offset)


def confirmed_for(store: ReplicaLog, hello: Hello, master: Hello) -> int:
    """Return the confirmed offset to send in `hello` to a master: at most the last common point, or
    this log's first offset where that is greater, unless a whole record beyond it is confirmed.

    Slaves report parts of records, so this node's confirmed offset may lie inside one. Such an
    offset confirms no record beyond the common point, and only this node knows where its records
    end.
    """
    common, _ = common_point(hello.history, hello.max_offset, master.history, master.max_offset)
    point = max(common, hello.min_offset)
    if point < hello.confirmed_offset and not loses_confirmed(store, point):
        return point
    return hello.confirmed_offset


def entries_at(history: History, offset: int, shared: int) -> int:
    """Return how many entries a cut at `offset` leaves: the `shared` ones, and all that start at or
    below `offset`. Entries that the master does not know are dropped later, in the step that takes
    over what follows them (`epochs.agreed`).
    """
    return max(shared, sum(1 for entry in history if entry.start <= offset))


def finish_cut(store: ReplicaLog, state: NodeState) -> None:
    """Carry out the cut of the intent, or repeat it after a crash. Does nothing without one."""
    intent = state.data.intent
    if intent is None:
        return
    if store.max_offset > intent.offset:
        store.truncate(intent.offset)
    if store.confirmed_offset > store.max_offset:
        store.set_limits(confirmed=store.max_offset)
    if store.readable_offset > store.max_offset:
        store.set_limits(readable=store.max_offset)
    state.save(history=state.data.history[: intent.entries], intent=None)
