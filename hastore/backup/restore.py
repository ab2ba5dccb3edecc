"""Restore a backup into an empty store: as a new node of its group, or as the only one left.

A restored node has promised nothing and acknowledged nothing, and must not count as one that has:

mode classic, a new member   It has a number and a store id that the group never had, so nobody
                  takes it for the node of the backup. Its log and its epochs are those of a slave
                  that is behind. It is unclean, so no promotion counts it before it has reached a
                  master's end. It does not know what `acks` and nodes were in force after the
                  backup; so until then its own promotion asks the others for them, like that of a
                  node without a history.
mode classic, as the only one   It begins a new life of the group. Its promise is above every epoch
                  that the old life can have had, so it takes nothing from a master of that life,
                  and its own epochs are never among theirs. A survivor that meets it may keep what
                  was confirmed: it refuses to cut it (docs/failover.md).
mode dledger      It starts as after a lost disk, under its number: it does not remember its votes,
                  and counts once its leader has brought it in line. As the only one it is then
                  recovered (server/recover_group.py), which gives the group another id; its term is
                  above those of the old life.

Everything is made in `restoring.tmp` in the store's folder. At the end the folder `hastore` is
moved to its place, then the log. A crash leaves nothing that a node would start with: it refuses a
store with this folder until the log is in place (store/state/marker_files.py).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from hastore.backup.backups import LogOfBackup, read_manifests, read_state_file
from hastore.backup.manifest import Manifest
from hastore.backup.source import ENTRIES_FILE, STATE_FILES
from hastore.backup.target import Target
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, Mode, StoreKind
from hastore.dledger.core.events import HardState
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.errors import ConfigError, StoreBrokenError, StoreError, StoreFullError, UsageError
from hastore.fs.filesystem import GROUP_READABLE, REAL, File, FileSystem, file_name
from hastore.ha.node.node_state import Durable, NodeState
from hastore.ha.rules.epochs import EpochEntry, keep_until, last_epoch, later_life
from hastore.record.log_format import EntryChain
from hastore.store.state.entry_state import EntryFacts, EntryState
from hastore.store.state.limits import Limits, LimitsPage
from hastore.store.state.marker_files import RESTORING, LockFile, ledger_name
from hastore.store.state.replay_progress import read_boot_id

_REPLACED_MAX = 8
_IGNORED = ("lock", "lost+found", RESTORING)
OnProgress = Callable[[int, int], None]  # bytes of the log done, bytes due


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored."""

    manifest: Manifest
    node: int
    as_only: bool


def check_restore(
    config: Config, manifest: Manifest, *, as_only: bool, used: frozenset[int] = frozenset()
) -> None:
    """Raise UsageError or ConfigError if a backup must not become the node of `config`.

    `used` are the node numbers that the group had, as far as any backup of the target knows.
    """
    data = manifest.node
    mine = (config.cluster, config.group, config.mode.value, config.store.commitlog_file_size)
    theirs = (data.cluster, data.group, manifest.mode, manifest.file_size)
    names = ("cluster", "group", "mode", "store.commitlog_file_size")
    for name, own, other in zip(names, mine, theirs, strict=True):
        if own != other:
            raise ConfigError(f"{name} is {own} in the file: set it to {other}, as in the backup")
    if config.store.kind is StoreKind.MEMORY:
        raise ConfigError("store.kind is memory: set it to file to restore a backup")
    if config.mode is Mode.CLASSIC:
        _check_numbers(config, used | manifest.used_numbers, as_only=as_only)
    elif as_only and config.node not in (members := last_members(manifest)):
        raise UsageError(
            f"in mode dledger the only one left must be a member: {_listed(members)}; give its"
            " number to the node of the file"
        )


def _check_numbers(config: Config, used: frozenset[int], *, as_only: bool) -> None:
    if config.node in used:
        raise UsageError(
            f"node number {config.node} was used in the group: what that node has promised and"
            f" acknowledged is not in a backup, so a restored node needs a new number; used are"
            f" {_listed(sorted(used))}, as far as the backups here know"
        )
    others = sorted(set(config.nodes) - {config.node})
    if as_only and used.intersection(others):
        raise UsageError(
            f"`nodes` has node {_listed(sorted(used.intersection(others)))} of the old group: as"
            " the only one left a node begins anew, with new numbers alone; if one of those nodes"
            " is left, do not restore, but promote it"
        )
    if not as_only and not others:
        raise UsageError(
            "the file lists no other node: restore into a group that lives, or with --as-only as"
            " the only one left"
        )
    if not as_only and config.assigned_role.is_master:
        raise UsageError(
            f"the file says role: {config.assigned_role.value}; a restored node begins as a"
            " slave: set role: SLAVE"
        )


def used_in(manifests: Iterable[Manifest]) -> frozenset[int]:
    """Return the node numbers that the group had, as far as these backups know.

    An older backup does not know the nodes that came after it.
    """
    return frozenset(number for one in manifests for number in one.used_numbers)


def last_members(manifest: Manifest) -> tuple[int, ...]:
    """Return the members of a group of mode dledger when the backup was taken, and learners."""
    data = manifest.node
    members = data.member_lists[-1][2] if data.member_lists else data.first_members
    learners = data.learner_lists[-1][2] if data.learner_lists else ()
    return tuple(sorted({*members, *learners}))


def restore_store(
    config: Config,
    target: Target,
    manifest: Manifest,
    *,
    as_only: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    fs: FileSystem | None = None,
    progress: OnProgress = lambda _done, _due: None,
) -> Restored:
    """Make the store of the node of `config` from a backup; `store.root` must be empty.

    Every record and digest is checked. Raises UsageError or ConfigError for what must not be
    restored there, StoreBrokenError for a damaged backup, StoreFullError without room, StoreError;
    nothing is left then. In mode dledger the caller recovers the group afterwards, if `as_only`.
    """
    every, _ = read_manifests(target, target.objects())
    check_restore(config, manifest, as_only=as_only, used=used_in(every))
    if fs is None:
        fs = GROUP_READABLE if config.store.group_read else REAL
    lock = LockFile(fs, config.store.root)
    try:
        lock.acquire()
        try:
            _Restore(config, target, manifest, as_only, clock, fs).run(progress)
        finally:
            lock.release()
    except OSError as failure:
        raise StoreError(f"{config.store.root} was not restored: {failure}") from failure
    return Restored(manifest, config.node, as_only)


class _Restore:
    def __init__(
        self, config: Config, target: Target, manifest: Manifest, as_only: bool, clock: Clock,
        fs: FileSystem,
    ) -> None:  # fmt: skip
        self._config = config
        self._target = target
        self._manifest = manifest
        self._as_only = as_only
        self._clock = clock
        self._fs = fs
        self._root = config.store.root
        self._staging = f"{self._root}/{RESTORING}"
        self._dledger = config.mode is Mode.DLEDGER
        self._log = ledger_name(config.node) if self._dledger else "commitlog"
        self._log_files = f"{self._staging}/{self._log}" + ("/data" if self._dledger else "")

    def run(self, progress: OnProgress) -> None:
        fs = self._fs
        self._clear()
        self._require_room()
        try:
            fs.make_dirs(f"{self._staging}/hastore")
            fs.make_dirs(self._log_files)
            whole = self._write_log(progress)
            files = self._read_files()
            self._write_limits(whole)
            for path, data in files.items():
                fs.make_dirs(f"{self._staging}/{path.rpartition('/')[0]}")
                fs.replace_bytes(f"{self._staging}/{path}", data)
            if self._dledger:
                self._write_votes(whole.walk.chain)
            self._write_node(whole.walk.chain)
        except BaseException:
            with contextlib.suppress(OSError):  # the first failure says more
                fs.remove_tree(self._staging)
            raise
        self._put_in_place()

    def _clear(self) -> None:
        """Remove what a broken-off restore has left. Raises UsageError for other things.

        Beside other things it may not be a restore that has left them: then all of it stays.
        """
        fs, root = self._fs, self._root
        there = [name for name in fs.list_dir(root) if name not in _IGNORED]
        if self._log in there and self._is_of_a_refused_start():
            fs.remove_tree(f"{root}/{self._log}")
            there.remove(self._log)
        if fs.exists(self._staging) and {"hastore", "config"}.issuperset(there):
            for name in (*there, RESTORING):
                fs.remove_tree(f"{root}/{name}")
            there = []
        if there:
            raise UsageError(
                f"{root} is not empty, it has {there[0]}: a backup is restored into an empty"
                " store.root; move away what is there"
            )

    def _is_of_a_refused_start(self) -> bool:
        """Whether the log is an empty one of a node that found `hastore` in its place, but no log.

        Earlier versions made the folder before they refused the start.
        """
        fs, left = self._fs, self._fs.list_dir(self._staging)
        moved = self._log in left and "hastore" not in left
        return moved and not self._dledger and not fs.list_dir(f"{self._root}/{self._log}")

    def _require_room(self) -> None:
        size = self._config.store.commitlog_file_size
        first, end = self._manifest.start_offset // size, -(-self._manifest.end_offset // size)
        needed, free = (end - first) * size, self._fs.free_bytes(self._root)
        if needed > free:
            raise StoreFullError(
                f"{self._root} has {free:,} bytes free of the {needed:,} that the log needs",
                needed_bytes=needed,
            )

    def _write_log(self, progress: OnProgress) -> LogOfBackup:
        manifest = self._manifest
        whole = LogOfBackup(self._target, manifest)
        at, due = manifest.start_offset, manifest.end_offset - manifest.start_offset
        with _LogWriter(self._fs, self._log_files, manifest.file_size) as writer:
            for piece in manifest.log:
                if piece.start != at:
                    raise StoreBrokenError(f"bytes {at} to {piece.start} are in no piece")
                for offset, data in whole.chunks(piece):
                    writer.write(offset, data)
                    progress(offset + len(data) - manifest.start_offset, due)
                at = piece.end
        return whole

    def _read_files(self) -> dict[str, bytes]:
        for file in self._manifest.files:
            if file.path not in STATE_FILES:
                raise StoreBrokenError(f"the backup has a file {file.path!r}, which no store has")
        return {
            file.path: read_state_file(self._target, self._manifest, file)
            for file in self._manifest.files
            if file.path != ENTRIES_FILE
        }

    def _write_limits(self, whole: LogOfBackup) -> None:
        manifest, walk = self._manifest, whole.walk
        end = manifest.end_offset
        confirmed = end if self._dledger else min(manifest.confirmed_offset, end)
        page = LimitsPage(self._fs, self._staging)
        page.open(
            Limits(
                sequence=1,
                boot_id=read_boot_id(self._fs),
                file_size=manifest.file_size,
                first_offset=manifest.start_offset,
                flushed_offset=end,
                record_end=end,
                recovery_start=walk.recovery_start,
                next_recovery_start=walk.next_recovery_start,
                confirmed_offset=confirmed,
                readable_offset=confirmed,
            )
        )
        page.close()

    def _write_node(self, chain: EntryChain | None) -> None:
        """Write who the node is, in a store with an id of its own."""
        config, data = self._config, self._manifest.node
        state = NodeState(self._fs, self._staging)
        state.load(config.node, config.cluster, config.group)
        if chain is not None:
            state.save(**_as_member(config.node, data, (chain.next_index or 0) - 1))
            return
        end = self._manifest.end_offset
        if self._as_only:
            state.save(**only_node_state(config.node, data, end, self._clock.wall_ms()))
        else:
            state.save(**new_member_state(data, end))

    def _write_votes(self, chain: EntryChain | None) -> None:
        """Write what a log of entries needs, and that this node does not remember its votes."""
        assert chain is not None
        fs, staging = self._fs, self._staging
        raw = next((f for f in self._manifest.files if f.path == ENTRIES_FILE), None)
        facts = EntryFacts()
        if raw is not None:
            data = read_state_file(self._target, self._manifest, raw)
            facts = msgspec.json.decode(data, type=EntryFacts)
        EntryState(fs, staging).save(begin=facts.begin, begin_sure=facts.begin_sure)
        last = (chain.next_index or 0) - 1
        files = HardStateFiles(fs, staging, f"{staging}/{self._log}")
        if self._as_only:
            term = later_life(chain.term, self._clock.wall_ms())
            files.save(HardState(term, None), remembers=False)
        files.save_checkpoint(last, last)  # all that is readable was committed

    def _put_in_place(self) -> None:
        fs, root, staging = self._fs, self._root, self._staging
        for folder in (f"{staging}/hastore", self._log_files, f"{staging}/{self._log}", staging):
            fs.sync_dir(folder)
        others = [name for name in fs.list_dir(staging) if name not in ("hastore", self._log)]
        for name in ("hastore", *others, self._log):  # the log last: see above
            fs.rename(f"{staging}/{name}", f"{root}/{name}")
            fs.sync_dir(root)
        fs.remove_tree(staging)
        fs.sync_dir(root)


def new_member_state(data: Durable, end: int) -> dict[str, object]:
    """Return the state of a new node of mode classic whose log ends at `end`.

    `data` is the state of the node of the backup.
    """
    history = keep_until(data.history, end)
    return {
        "history": history,
        "aside": data.aside,
        # It has made no promise; but no master of an epoch below that of its log is right.
        "promised_epoch": last_epoch(history),
        "acks_min": data.acks_min,
        "acks_max": data.acks_max,
        "node_lists": data.node_lists,
        "written_over": data.written_over,
        "unclean": True,
        "restored": True,
        "known_stores": {**data.known_stores, data.node: data.store_id},
    }


def only_node_state(node: int, data: Durable, end: int, now_ms: int) -> dict[str, object]:
    """Return the same of a node that begins a new life of its group.

    What a master had written over becomes that of an epoch of its own, as by a promotion that keeps
    it: no other log has it, and that of a node which was not restored diverges there.
    """
    seen = max(data.promised_epoch, last_epoch(data.history)) >> 16
    epoch = later_life(seen, now_ms) << 16 | node
    history, over = keep_until(data.history, end), data.written_over
    if over is not None and over.offset < end:
        history = (*history, EpochEntry(epoch, over.offset, 1, (node,)))
    return {"history": history, "aside": data.aside, "promised_epoch": epoch}


def _as_member(node: int, data: Durable, last_index: int) -> dict[str, object]:
    """Return the state of a node of mode dledger: that of its group, up to its last entry."""
    stores = {**data.known_stores, data.node: data.store_id}
    replaced = dict(data.replaced_stores)
    own = stores.pop(node, None)
    if own is not None:
        replaced[node] = (*replaced.get(node, ()), own)[-_REPLACED_MAX:]
    return {
        "group_id": data.group_id,
        "first_members": data.first_members,
        "member_lists": tuple(one for one in data.member_lists if one[0] <= last_index),
        "learner_lists": tuple(one for one in data.learner_lists if one[0] <= last_index),
        "addresses": data.addresses,
        "known_stores": stores,
        "replaced_stores": replaced,
    }


class _LogWriter:
    """Writes the files of a log from bytes that come in order; each is reserved and synced."""

    def __init__(self, fs: FileSystem, folder: str, file_size: int) -> None:
        self._fs = fs
        self._folder = folder
        self._file_size = file_size
        self._start = -1
        self._file: File | None = None

    def __enter__(self) -> "_LogWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_file()

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes that lie in one file. Raises StoreFullError, OSError."""
        start = offset - offset % self._file_size
        if start != self._start or self._file is None:
            self._end_file()
            self._start = start
            self._file = self._fs.create_new(f"{self._folder}/{file_name(start)}")
            self._file.allocate(self._file_size)
        self._file.pwrite(data, offset - start)

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.closing(file):
                file.sync()


def _listed(numbers: Iterator[int] | tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
