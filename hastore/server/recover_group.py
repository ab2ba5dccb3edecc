"""Recover a group that has lost its majority for good: offline, on one surviving store.

The store becomes a group of one, with a new group id, in a term above all that the lost nodes can
have had: clients have seen those, and the store need not know them. What the others had committed
and this store lacks is lost; what it has and nobody may have committed is kept, and is committed
now. So this is for the operator alone, and `hastore dledger recover` says before what may be lost.

Steps, each durable before the next; after a crash between them the command is given again:

    term and vote    the new term, with a vote for this node
    node.json        the new group id; the stores of all other members count as replaced
    the log          the first entry of that term: the member list with this node alone

The old members are refused from then on, by the group's id and by their stores. Their numbers can
come again with empty stores.
"""

import secrets
from dataclasses import dataclass

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, Mode, StoreKind
from hastore.dledger.core.events import HardState, OwnEntry
from hastore.dledger.driver.joining import begun_group
from hastore.dledger.links.identity import REPLACED_MAX
from hastore.dledger.links.peer_links import PeerMember
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import ConfigError, StoreError, UsageError, unopened_store
from hastore.fs.filesystem import GROUP_READABLE, REAL
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.epochs import later_life
from hastore.protocol.dledger import MemberSet
from hastore.server.base_node import store_host
from hastore.store.state.marker_files import restore_problem


@dataclass(frozen=True, slots=True)
class GroupRecovery:
    """What the recovery of a group means, or has done; indexes are of entries, -1: none."""

    node: int
    members: tuple[int, ...]  # of the group until now, as this store knows them
    left_behind: tuple[int, ...]  # the members that are refused afterwards
    term: int  # the last one that this store knows; after the recovery the new one
    committed_index: int  # what this store knows to be committed; the others may have more
    end_index: int  # the last entry here, before the recovery
    end_term: int  # its term: the greatest one tells which store has most of what was committed
    remembers: bool  # False: this store had lost its disk, and may lack what was committed before
    group_id: str  # the present one; after the recovery the new one
    done: bool

    @property
    def kept_beyond(self) -> int:
        """How many entries are kept of which this store does not know that they were committed."""
        return self.end_index - self.committed_index


def recover_group(config: Config, *, unsafe: bool, clock: Clock = SYSTEM_CLOCK) -> GroupRecovery:
    """Return what a recovery would mean; with `unsafe` do it. The node must not run.

    Without `unsafe` the store is opened as at a start of the node, and no more. Raises ConfigError
    or UsageError for a node without such a store, StoreInUseError if the node runs,
    StoreBrokenError or StoreError if the store cannot be opened.
    """
    root = config.store.root
    fs = GROUP_READABLE if config.store.group_read else REAL
    if config.mode is not Mode.DLEDGER or config.store.kind is not StoreKind.FILE:
        raise ConfigError(
            "only a group of mode dledger with its logs in files can be recovered; in mode classic"
            " use `hastore promote`"
        )
    if not fs.exists(f"{root}/hastore/node.json"):
        raise UsageError(
            f"{root} is no store of a node that has run; give the file of the surviving node, on"
            " its machine, in the directory where it was started"
        )
    store = DLedgerMmapFileStore(
        config.store, node=config.node, fs=fs, store_host=store_host(config)
    )
    state = NodeState(fs, root)
    try:
        store.messages.lock()  # before node.json is read: a running node may write it
        try:
            problem = restore_problem(fs, root)
            if problem is not None:
                raise StoreError(problem)
            state.load(config.node, config.cluster, config.group)
            store.open()
        except BaseException:
            store.messages.unlock()
            raise
    except OSError as failure:
        raise unopened_store(root, failure) from failure
    try:
        member = PeerMember(config, state, None, lambda: (0, store.messages.max_offset))
        found = _found(member, store)
        return _recover(member, store, found, clock.wall_ms()) if unsafe else found
    finally:
        store.close()


def _found(member: PeerMember, store: DLedgerMmapFileStore) -> GroupRecovery:
    data, node = member.state.data, member.node
    group = begun_group(member, store)
    members = group.members or data.first_members or tuple(sorted(member.addresses))
    if node not in (*members, *group.learners):
        raise UsageError(
            f"node {node} is no member of its group: the members are {', '.join(map(str, members))}"
            "; recover the store of a member or of a learner"
        )
    left = tuple(one for one in members if one != node)
    return GroupRecovery(
        node, members, left, store.hard_state.term, store.committed_index, store.end_index,
        store.end_term, store.remembers, data.group_id, done=False,
    )  # fmt: skip


def _recover(
    member: PeerMember, store: DLedgerMmapFileStore, found: GroupRecovery, now_ms: int
) -> GroupRecovery:
    node, state = member.node, member.state
    term = later_life(max(found.term, store.end_term), now_ms)
    index = store.end_index + 1
    group_id = secrets.token_hex(8)
    store.save_hard_state(HardState(term, node), remembers=True)
    data = state.data
    replaced = dict(data.replaced_stores)
    for other, store_id in data.known_stores.items():
        replaced[other] = (*replaced.get(other, ()), store_id)[-REPLACED_MAX:]
    state.save(
        joined=True,
        lost_disk=False,
        group_id=group_id,
        known_stores={},
        replaced_stores=replaced,
        removed=None,
        # A list counts only once its entry is in the log.
        member_lists=(*data.member_lists, (index, term, (node,))),
    )
    store.append_own(OwnEntry(index, term, MemberSet((node,))), group_id)
    store.flush()
    store.commit(index)
    return GroupRecovery(
        node, found.members, found.left_behind, term, found.committed_index, found.end_index,
        found.end_term, found.remembers, group_id, done=True,
    )  # fmt: skip
