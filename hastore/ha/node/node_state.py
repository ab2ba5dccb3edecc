"""The durable state of a node (docs/failover.md, "What a node must not forget"):
`<store>/hastore/node.json`.

When a method that changes the state returns, the file and its directory are synced. Nothing that
depends on the change may be sent, acknowledged or opened earlier. `confirmed_offset` and
`flushed_offset` are not in this file: they need no sync, and are on the store's limits page.
"""

import logging
import secrets
import threading
from collections.abc import Iterable, Sequence

import msgspec

from hastore.config.model import Role
from hastore.errors import UNREADABLE, StoreBrokenError
from hastore.fs.filesystem import FileSystem
from hastore.ha.rules.epochs import (
    CLASSIC_EPOCH,
    EpochEntry,
    History,
    WrittenOver,
    classic_end,
    keep_until,
    last_epoch,
    prune,
    resumed_entry,
)

log = logging.getLogger(__name__)

_NO_END = 1 << 62  # beyond any offset of a log
_UNCLEAN = "; it counts as unclean until a master has brought it in line"

BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
FORMAT = 1


class CutIntent(msgspec.Struct, frozen=True):
    """A cut in progress: its offset, and how many history entries stay.

    The intent is written before the cut and removed after it.
    """

    offset: int
    entries: int


class Durable(msgspec.Struct, kw_only=True):
    """The file's content."""

    format: int = FORMAT
    node: int
    store_id: str
    cluster: str
    group: str
    role_followed: Role = Role.SLAVE
    # Of the order to become master that is not followed yet: whose answer a planned flip needs.
    needed_node: int | None = None
    # An operator's order to a node whose role was a master's before has asked for promises, and is
    # not followed yet: a restart goes on with it.
    promoting: bool = False
    promised_epoch: int = 0
    history: History = ()
    # What may be in force: the smallest and the greatest `acks`, and all node lists, of the last
    # history entry and of every promise made since then.
    acks_min: int | None = None
    acks_max: int | None = None
    node_lists: tuple[tuple[int, ...], ...] = ()
    boot_id: str = ""
    mount_id: str = ""  # of the store's file system, in that boot; "": not known
    ack_point: str = "written"
    clean_stop: bool = False
    unclean: bool = False
    epoch_over: bool = False
    # A master's: the nodes that have not followed it since it resumed its epoch, and the log's end
    # then. What one of them has of the epoch beyond that is not the same as here.
    unmet: dict[int, int] = {}
    # A slave's, of its last epoch: its master has refused it, because it has other bytes there. It
    # counts while the log ends beyond that offset.
    written_over: WrittenOver | None = None
    superseded_by: int = 0  # the epoch that turned this master read-only; 0: none
    intent: CutIntent | None = None
    known_stores: dict[int, str] = {}
    # Mode dledger: the stores that a number has had, which must not come back; under its own number
    # those that this store has replaced (dledger/links/identity.py).
    replaced_stores: dict[int, tuple[str, ...]] = {}
    # Mode dledger: this store was started once; it replaces one that was lost (dledger/links).
    joined: bool = False
    # The group's first members: they stay what they were, though `nodes` changes in the file.
    first_members: tuple[int, ...] = ()
    lost_disk: bool = False
    group_id: str = ""  # of the group that this log belongs to; "": not known yet
    member_lists: tuple[tuple[int, int, tuple[int, ...]], ...] = ()  # (index, term, members)
    # Of those that have any: (index, term, learners, leaving).
    learner_lists: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...] = ()
    removed: tuple[int, int, tuple[int, ...]] | None = None  # by this list; as a member list
    # Where the members were last, for one that is no longer in `nodes` of the file.
    addresses: dict[int, str] = {}
    # With ha.secret_file: whether every node must prove the secret before it is told anything. The
    # version before could not, and its stores lack `proved_only`: then only the nodes in
    # `proved_nodes` must, which were met with this version once.
    proved_only: bool = False
    proved_nodes: tuple[int, ...] = ()
    aside: int = 0  # how often the store was set aside; a part of the archive's name
    # The store was restored from a backup: as long as it is unclean too, it does not know what was
    # in force after that.
    restored: bool = False


class NodeState:
    """The durable state of one node. Thread-safe; each change is synced when its method returns."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._directory = f"{root}/hastore"
        self._path = f"{self._directory}/node.json"
        self._lock = threading.RLock()
        self._data: Durable | None = None
        self.is_new = False  # there was no file at `load`

    def load(self, node: int, cluster: str, group: str) -> None:
        """Read the file, or make the identity of a new node.

        Raises StoreBrokenError when the file is unreadable or belongs to another node.
        """
        if not self._fs.exists(self._path):
            self.is_new = True
            # The folder is made only here: if it vanishes while the node runs, no empty folder may
            # replace it.
            self._fs.make_dirs(self._directory)
            self._data = Durable(
                node=node,
                store_id=secrets.token_hex(16),
                cluster=cluster,
                group=group,
                proved_only=True,
            )
            return
        try:
            data = msgspec.json.decode(self._fs.read_bytes(self._path), type=Durable)
        except UNREADABLE as error:
            raise StoreBrokenError(
                f"{self._path}: not the state of a node ({error}); a node without its state must "
                "come back with an empty store and under a new `node` number"
            ) from error
        for name, mine, wanted in (
            ("node", data.node, node),
            ("cluster", data.cluster, cluster),
            ("group", data.group, group),
        ):
            if mine != wanted:
                raise StoreBrokenError(
                    f"{self._path}: this store belongs to {name} {mine!r}, the configuration says "
                    f"{wanted!r}; point store.root at this node's own directory"
                )
        self._data = data

    @property
    def data(self) -> Durable:
        """Return the present state. Do not change it: each change makes a new object."""
        assert self._data is not None, "load() comes first"
        return self._data

    @property
    def history(self) -> History:
        """Return the epoch history."""
        return self.data.history

    @property
    def last_epoch(self) -> int:
        """Return the last entry's epoch, 0 without entries."""
        return last_epoch(self.data.history)

    @property
    def rocketmq_end(self) -> int:
        """Return where a RocketMQ master's bytes end in this log; beyond all of it if all are.

        0 if nothing says so, as of a log whose history was lost.
        """
        if self.history and self.last_epoch == CLASSIC_EPOCH:
            return _NO_END
        return classic_end([(entry.epoch, entry.start) for entry in self.history]) or 0

    def save(self, **changes: object) -> None:
        """Change fields and write them durably; a new history is pruned to its bounds."""
        with self._lock:
            data = msgspec.structs.replace(self.data, **changes)
            if "history" in changes:
                data.history = prune(data.history)
                if last_epoch(data.history) != self.last_epoch:
                    data.unmet = {}
                    if "written_over" not in changes:  # a store that is restored takes over both
                        data.written_over = None
            text = msgspec.json.format(msgspec.json.encode(data), indent=1)
            self._fs.replace_bytes(self._path, text + b"\n")
            self._data = data

    def begin_boot(self, ack_point: str, *, alone: bool, log_end: int) -> None:
        """Record a start, and whether a power loss may have taken bytes; runs before any answer.

        A changed boot id without a clean stop means a power loss, which ends the epoch. If the ack
        point at that time was `written`, the node is also marked unclean, except in a group of one
        (`alone`). Entries that start beyond the log's end are removed. A new mount of the store's
        file system counts as a new boot: the kernel may have shut the old one down.
        """
        with self._lock:
            data = self.data
            boot_id = self._fs.read_bytes(BOOT_ID_PATH, 64).decode().strip()
            mount_id = self._fs.mount_id(self._directory)
            mounted = bool(data.mount_id) and data.mount_id != mount_id
            changed = bool(data.boot_id) and (data.boot_id != boot_id or mounted)
            power_lost = changed and not data.clean_stop
            unclean = power_lost and self._may_lack_acked(alone)
            if power_lost and data.boot_id == boot_id:
                log.error(
                    "the store's file system was mounted anew without a clean stop of this node"
                    " before: what was not synced may be gone, as after a power loss%s",
                    _UNCLEAN if unclean else "",
                )
            self.save(
                boot_id=boot_id,
                mount_id=mount_id,
                unclean=data.unclean or unclean,
                epoch_over=data.epoch_over or power_lost,
                ack_point=ack_point,
                clean_stop=False,
                history=keep_until(data.history, log_end),
            )

    def is_alone(self, nodes: Iterable[int]) -> bool:
        """Whether no other node can have what this one has acknowledged.

        `nodes`, those of the file, do not suffice for that: the lists that may be in force count.
        """
        known = (*self.data.node_lists, tuple(nodes))
        return all(node == self.data.node for one in known for node in one)

    @property
    def has_started(self) -> bool:
        """Whether a node has run with this store: then it has a limits page."""
        return bool(self.data.boot_id)

    def note_lost_limits(self, *, alone: bool) -> None:
        """Record, durably, that the limits page is gone, before the store makes a new one.

        Nobody knows what was synced: the log's end may lack acknowledged bytes. So the node is
        marked unclean, except in a group of one (`alone`), where nobody else has them.
        """
        log.error(
            "hastore/limits is missing in a store that has had it: this node may lack messages that"
            " it has acknowledged%s",
            "" if alone else _UNCLEAN,
        )
        if not alone:
            self.save(unclean=True)

    def note_failed_sync(self, *, alone: bool) -> None:
        """Record, durably, that the process before had a sync that failed: what was not synced may
        be gone, as after a power loss (`begin_boot`).
        """
        unclean = self._may_lack_acked(alone)
        log.error(
            "a sync has failed before this start: what was not synced may be gone, as after a"
            " power loss%s",
            _UNCLEAN if unclean else "",
        )
        self.save(unclean=self.data.unclean or unclean, epoch_over=True)

    def _may_lack_acked(self, alone: bool) -> bool:
        """Whether bytes that this node has acknowledged may be gone with what was not synced."""
        return self.data.ack_point == "written" and not alone

    def note_doubt(self, end: int, *, alone: bool) -> None:
        """Record, durably, that the log is about to be cut at `end`, and what lies behind may have
        been synced or confirmed.

        So the node is marked unclean, except in a group of one (`alone`), and its epoch is over:
        others may have other bytes of it from there on.
        """
        log.error(
            "the record at %d is damaged or was not written whole, and the log is cut there: this"
            " node may lack messages from there on that it has acknowledged%s",
            end,
            "" if alone else _UNCLEAN,
        )
        self.save(unclean=self.data.unclean or not alone, epoch_over=True)

    def note_lost_end(self, end: int, node: int, more: int) -> None:
        """Record, durably, that this master's log ends at `end`, but `node` has its epoch up to
        `more`: the epoch is over, and the node unclean.
        """
        log.error(
            "this node was the master of epoch %d, and its log ends at %d, but node %d has bytes of"
            " that epoch up to %d: this node's disk has lost the end of the log. Look at the disk;"
            " the epoch is over, and a new one begins with what node %d has",
            *(self.last_epoch, end, node, more, node),
        )
        self.save(unclean=True, epoch_over=True)

    def note_resumed(self, others: Iterable[int], end: int, now_ms: int) -> None:
        """Record, durably, that this master resumes its epoch with a log that ends at `end`.

        The history knows it too, for the time when the epoch has ended (`epochs.parted`).
        """
        # What was written since the first resumption is not the same: that one's end stays, unless
        # the log's end was lost again, below it.
        was = self.data.unmet
        unmet = was | {one: min(end, was.get(one, end)) for one in others}
        if unmet != self.data.unmet:
            *before, entry = self.data.history
            entry = resumed_entry(entry, set(unmet.values()), end, now_ms // 1000)
            self.save(unmet=unmet, history=(*before, entry))

    def note_met(self, node: int) -> None:
        """Record, durably, that a node follows: it has nothing that this master lacks."""
        with self._lock:
            if node in self.data.unmet:
                unmet = self.data.unmet
                self.save(unmet={one: end for one, end in unmet.items() if one != node})

    def note_written_over(self, over: WrittenOver | None) -> None:
        """Record, durably, what the master of this log's last epoch has replaced; None: nothing of
        what is in this log now.
        """
        with self._lock:
            if over != self.data.written_over and (over is None or over.epoch == self.last_epoch):
                self.save(written_over=over)

    def end_cleanly(self) -> None:
        """Record a clean stop: everything is synced and closed."""
        self.save(clean_stop=True)

    def promise(
        self,
        epoch: int,
        acks: int | None = None,
        nodes: Sequence[int] = (),
        *,
        superseded: bool = False,
    ) -> None:
        """Raise the promise, durably.

        `acks` and `nodes` are those of the promised epoch. `superseded`: this node is the master
        now, and the promised epoch makes it read-only.
        """
        with self._lock:
            data = self.data
            changes: dict[str, object] = {"promised_epoch": max(epoch, data.promised_epoch)}
            if superseded:
                changes["superseded_by"] = epoch
            if acks is not None:
                changes.update(self._widened(acks, nodes))
            if any(getattr(data, name) != value for name, value in changes.items()):
                self.save(**changes)

    def take_entries(self, entries: Sequence[EpochEntry], own: History | None = None) -> None:
        """Take over `entries`, a master's, behind `own` (None: the present history), in one write.

        The write is durable. The promised epoch's own entry resets `acks_min`, `acks_max` and
        `node_lists`.
        """
        with self._lock:
            history = (self.data.history if own is None else own) + tuple(entries)
            changes: dict[str, object] = {"history": history}
            for entry in entries:
                if entry.epoch >= self.data.promised_epoch:
                    changes.update(
                        acks_min=entry.acks, acks_max=entry.acks, node_lists=(entry.nodes,)
                    )
                else:
                    changes.update(self._widened(entry.acks, entry.nodes))
            self.save(**changes)

    def replace_history(self, entries: Sequence[EpochEntry]) -> None:
        """Replace the whole history, durably, for a resync.

        `acks_min`, `acks_max` and `node_lists` are widened by those of its last entry.
        """
        with self._lock:
            changes: dict[str, object] = {"history": tuple(entries), "written_over": None}
            if entries:
                changes.update(self._widened(entries[-1].acks, entries[-1].nodes))
            self.save(**changes)

    def open_epoch(self, history: History) -> None:
        """Take over a history that ends with a promotion's entry, and clear `unclean`, `epoch_over`
        and `superseded_by`; and `needed_node`, since the node that a flip needs has answered, and
        `promoting`.

        This is one durable write. The node may take writes after it.
        """
        entry = history[-1]
        with self._lock:
            self.save(
                history=history,
                acks_min=entry.acks,
                acks_max=entry.acks,
                node_lists=(entry.nodes,),
                unclean=False,
                epoch_over=False,
                superseded_by=0,
                needed_node=None,
                promoting=False,
            )

    def learn_store(self, node: int, store_id: str) -> None:
        """Record, durably, which store belongs to a node number."""
        with self._lock:
            if self.data.known_stores.get(node) != store_id:
                self.save(known_stores={**self.data.known_stores, node: store_id})

    def may_be_old(self, peers: Iterable[int], node: int | None = None) -> bool:
        """Whether a node (None: one of `peers`, the other nodes) may be of the version before.

        That is so until it was met with this version, once; and for none once all `peers` were.
        """
        data = self.data
        left = set(peers) - set(data.proved_nodes)
        return not data.proved_only and bool(left) and node not in data.proved_nodes

    def learn_proved(self, node: int) -> None:
        """Record, durably, that a node proves the secret first: it need not be met otherwise."""
        with self._lock:
            data = self.data
            if not data.proved_only and node not in data.proved_nodes:
                self.save(proved_nodes=(*data.proved_nodes, node))

    def forget_proved(self) -> None:
        """Forget, durably, who proves the secret first: the version before has run meanwhile.

        In mode classic that version does so itself: it writes this file at each start.
        """
        with self._lock:
            if self.data.proved_only or self.data.proved_nodes:
                self.save(proved_only=False, proved_nodes=())

    def _widened(self, acks: int, nodes: Sequence[int]) -> dict[str, object]:
        data = self.data
        known = tuple(sorted(nodes))
        lists = data.node_lists if known in data.node_lists else (*data.node_lists, known)
        return {
            "acks_min": acks if data.acks_min is None else min(acks, data.acks_min),
            "acks_max": acks if data.acks_max is None else max(acks, data.acks_max),
            "node_lists": lists,
        }
