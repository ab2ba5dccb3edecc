"""Backups of a node, taken and restored: one that was told as taken is whole, whatever comes."""

import contextlib
import random
from dataclasses import dataclass, replace

from hastore.backup.backups import find_backup, read_manifests, verify_backup
from hastore.backup.restore import RESTORING, restore_store
from hastore.backup.source import Source
from hastore.backup.take import take_backup
from hastore.backup.target import LocalTarget
from hastore.config.model import Config, NodeAddress, Role
from hastore.errors import StoreBrokenError, UsageError
from hastore.ha.node.node_state import NodeState
from hastore.store.message_store import MessageStore
from tests.crash.node import FILE_SIZE, SIZES, Ticks, fail
from tests.crash.recording import RecordingFileSystem
from tests.crash.violation import Violation
from tests.store.kit import HOST, config, message, put

PLACE, OLD, NEW = "/backup", "/old", "/new"
KEEP = 2


@dataclass(frozen=True)
class BackupNote:
    """Which backups must be there, and of which the node has been restored."""

    taken: tuple[int, ...] = ()
    restored: int | None = None


def config_of(root: str, number: int) -> Config:
    address = NodeAddress(api="tcp://127.0.0.1:1", ha="127.0.0.1:2", http="127.0.0.1:3")
    role = Role.SYNC_MASTER if number == 1 else Role.SLAVE
    nodes = dict.fromkeys((1, 2) if number == 1 else (1, 2, number), address)
    return Config(
        cluster="cluster", group="group", node=number, role=role, nodes=nodes,
        store=config(root, **SIZES),
    )  # fmt: skip


class BackupRun:
    """Take backups of a log that grows, then restore the last one."""

    def __init__(self, fs: RecordingFileSystem, seed: int) -> None:
        self.fs = fs
        self.chance = random.Random(seed)
        self.clock = Ticks()
        self.number = 0
        self.note = BackupNote()
        self.fs.promise(self.note)

    def grow(self) -> None:
        store = MessageStore(
            config(OLD, **SIZES), fs=self.fs, clock=self.clock, store_host=HOST, on_failure=fail
        )
        store.open(known=self.number > 0)
        state = NodeState(self.fs, OLD)
        state.load(1, "cluster", "group")
        for _ in range(self.chance.randrange(5, 40)):
            self.number += 1
            put(store, message(self.number, size=self.chance.choice((10, 300, 1500))))
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        state.begin_boot("written", alone=False, log_end=store.max_offset)
        state.promise(1 << 16 | 2, 1, (1, 2))
        store.close()

    def go(self, count: int) -> None:
        """Take `count` backups, and restore the last."""
        target = LocalTarget(PLACE, self.fs)
        for _ in range(count):
            self.grow()
            with Source(config_of(OLD, 1), self.fs) as source:
                kept = self.note.taken[-KEEP + 1 :]
                self.fs.promise(replace(self.note, taken=kept))  # the older ones are removed
                taken = take_backup(
                    config_of(OLD, 1), target, source, keep=KEEP, clock=self.clock
                )
            self.note = BackupNote((*kept, taken.manifest.number))
            self.fs.promise(self.note)
        manifest = find_backup(target)
        restore_store(config_of(NEW, 3), target, manifest, clock=self.clock, fs=self.fs)
        self.note = replace(self.note, restored=manifest.number)
        self.fs.promise(self.note)


def check(fs: RecordingFileSystem, note: BackupNote, chance: random.Random) -> BackupNote:
    """Check the backups that are there; finish a restore that was broken off."""
    del chance
    fs.promise(note)
    target = LocalTarget(PLACE, fs)
    there = [one.number for one in read_manifests(target, target.objects())[0]]
    for number in {*note.taken, *there}:
        if number not in there:
            raise Violation(f"backup {number} is gone, there are {there}")
        problems = verify_backup(target, number).problems
        if problems:
            raise Violation(f"backup {number} is damaged: {problems}")
    if not there:
        return note
    manifest = find_backup(target)
    if fs.is_dir(NEW):
        _check_new(fs, note)
    if note.restored is None and not (fs.is_dir(NEW) and fs.list_dir(f"{NEW}/commitlog")):
        with contextlib.suppress(StoreBrokenError):
            restore_store(config_of(NEW, 3), target, manifest, clock=Ticks(), fs=fs)
        note = replace(note, restored=manifest.number)
        fs.promise(note)
        _check_new(fs, note)
    return note


def _check_new(fs: RecordingFileSystem, note: BackupNote) -> None:
    """A node starts with all of the backup, or not at all."""
    if not fs.list_dir(f"{NEW}/commitlog"):
        if note.restored is not None:
            raise Violation("a restored store is gone")
        if fs.exists(f"{NEW}/hastore/node.json") and not fs.exists(f"{NEW}/{RESTORING}"):
            raise Violation("a part of a store is there, and nothing says that it is none")
        return
    manifest = find_backup(LocalTarget(PLACE, fs))
    files = fs.list_dir(f"{NEW}/commitlog")
    data = b"".join(fs.read_bytes(f"{NEW}/commitlog/{name}") for name in files)
    whole = verify_backup(LocalTarget(PLACE, fs)).manifest
    size = manifest.end_offset - manifest.start_offset
    if len(data) < size or len(data) % FILE_SIZE or whole.number != manifest.number:
        raise Violation(f"the restored log has {len(data)} bytes of {size}")
    state = NodeState(fs, NEW)
    with contextlib.suppress(UsageError):
        state.load(3, "cluster", "group")
    if not state.data.restored:
        raise Violation("the restored node does not know that it was restored")
    target = LocalTarget(PLACE, fs)
    at = manifest.start_offset
    for piece in manifest.log:
        if data[at - int(files[0]) :][: piece.end - piece.start] != target.read(
            piece.name, piece.end - piece.start
        ):
            raise Violation(f"the restored log differs in [{piece.start}, {piece.end})")
        at = piece.end
