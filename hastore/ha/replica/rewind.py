"""Cut a log back to a common point, in steps that a crash may interrupt anywhere
(docs/failover.md, "Following and rejoin").

    1 archive the tail, synced -> 2 write the intent -> 3 clear the bytes, synced
      -> 4 cut the history and drop the intent

Steps 4 and 5 of the text are one durable write here. After a crash between 2 and 4, `finish_cut`
repeats the rest before any HELLO; a crash before 2 leaves an archive too many and nothing cut.
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
    """Archive and cut what is beyond `offset`, keep so many entries; return the bytes archived.

    `archive` False: for a tail that its master has just sent and sends again. The caller holds the
    write gate. GroupDisagrees when a whole confirmed record would go, unless `accept_loss`;
    ReplicationError for a place that this log does not have.
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
                f"{store.confirmed_offset}; "
                "the group disagrees. Compare `hastore status` of all nodes; to give them up "
                "here (they are "
                "archived under rescued/), run `hastore demote --accept-loss` for this node"
            )
        log.error(
            "%s: giving up confirmed records %d..%d as told", why, offset, store.confirmed_offset
        )
    archived = 0
    if archive and offset < end:
        # A partial record alone is no one's data, yet it is kept as well: an archive too many
        # harms nobody.
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
    """Return the confirmed offset that `hello` says to a master: no further than the last common
    point (than this log's first offset, where that is greater) unless a whole record beyond it is
    confirmed.

    A slave reports parts of a record, so the offset may lie inside one: that confirms no record,
    and only this node knows where its records end.
    """
    common, _ = common_point(hello.history, hello.max_offset, master.history, master.max_offset)
    point = max(common, hello.min_offset)
    if point < hello.confirmed_offset and not loses_confirmed(store, point):
        return point
    return hello.confirmed_offset


def entries_at(history: History, offset: int, shared: int) -> int:
    """Return how many entries a cut at `offset` leaves: the shared ones, and those that start
    right there. They go when the entries, or bytes, that follow are taken over (`epochs.agreed`).
    """
    return max(shared, sum(1 for entry in history if entry.start <= offset))


def finish_cut(store: ReplicaLog, state: NodeState) -> None:
    """Do, or repeat after a crash, all that an intent asks for. Does nothing without one."""
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
