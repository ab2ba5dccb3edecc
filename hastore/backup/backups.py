"""The backups in a target: which there are, of which group, and whether they are whole."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from hastore.backup.items import ItemWalk
from hastore.backup.manifest import (
    MANIFEST_BYTES_MAX,
    PARTIAL,
    Manifest,
    Piece,
    StateFile,
    decode_manifest,
    digest,
    manifest_name,
    number_of,
)
from hastore.backup.target import Target
from hastore.config.model import Config, Mode
from hastore.errors import (
    CorruptRecordError,
    HastoreError,
    StoreBrokenError,
    StoreError,
    UsageError,
)
from hastore.ha.node.node_state import Durable
from hastore.record.log_format import ENTRIES, PLAIN, LogFormat

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
OnProgress = Callable[[int, int], None]  # bytes of the log done, bytes due


def read_manifests(
    target: Target, names: Mapping[str, int]
) -> tuple[list[Manifest], dict[str, str]]:
    """Return the backups in a target, the newest first, and why other manifests are none."""
    found: list[Manifest] = []
    bad: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in sorted(names, reverse=True):
        if number_of(name) is None:
            continue
        try:
            found.append(decode_manifest(target.read(name, MANIFEST_BYTES_MAX)))
        except CorruptRecordError as failure:
            bad[name] = str(failure)
        except FileNotFoundError as failure:
            missing[name] = str(failure)
    if missing:  # a run beside this one removes old backups; what is listed still is there
        now = target.objects()
        bad |= {name: why for name, why in missing.items() if name in now}
    for name, why in bad.items():
        log.warning("%s/%s counts as no backup: %s", target.name, name, why)
    return found, bad


def find_backup(target: Target, number: int | None = None) -> Manifest:
    """Return a backup in a target, or the newest one. Raises UsageError if it is not there.

    Raises StoreBrokenError if its manifest cannot be read: an older backup is not taken for it.
    """
    found, bad = read_manifests(target, target.objects())
    newest = max((name for name in bad), default="", key=lambda name: number_of(name) or 0)
    if number is None and newest and (not found or (number_of(newest) or 0) > found[0].number):
        raise StoreBrokenError(
            f"{target.name}/{newest}, the newest backup, cannot be read: {bad[newest]};"
            + (f" give --backup {found[0].number} to use the one before" if found else
               " take another one, into a new target")
        )  # fmt: skip
    for one in found:
        if number in (None, one.number):
            return one
    if number is None:
        raise UsageError(f"{target.name} has no backup")
    there = ", ".join(str(one.number) for one in reversed(found)) or "none"
    if manifest_name(number) in bad:
        raise StoreBrokenError(
            f"{target.name}: backup {number} cannot be read: {bad[manifest_name(number)]}; use"
            f" another one, there are {there}"
        )
    raise UsageError(f"{target.name} has no backup {number}; there are {there}")


def read_partial(target: Target, names: Mapping[str, int]) -> Manifest | None:
    """Return what a run that was broken off has left."""
    if PARTIAL not in names:
        return None
    try:
        return decode_manifest(target.read(PARTIAL, MANIFEST_BYTES_MAX))
    except (CorruptRecordError, FileNotFoundError):
        return None


def other_group(last: Manifest, config: Config, node: Durable) -> str | None:
    """Return whose backup one is; None if it is of the group of this node."""
    mine = (config.cluster, config.group, config.mode.value, config.store.commitlog_file_size)
    theirs = (last.node.cluster, last.node.group, last.mode, last.file_size)
    if mine != theirs:
        return f"another group: {_group_text(*theirs)}, and this node is of {_group_text(*mine)}"
    known = {node.store_id, *node.known_stores.values()}
    other_id = last.node.group_id and node.group_id and last.node.group_id != node.group_id
    if other_id or not known & last.stores:
        return (
            "another group of the same name, or of this one before it was restored or recovered:"
            " no store is known to both"
        )
    return None


def _group_text(cluster: str, group: str, mode: str, file_size: int) -> str:
    return f"{cluster}/{group}, mode {mode}, log files of {file_size} bytes"


def form_of(manifest: Manifest) -> LogFormat:
    """Return how records lie in the log of a backup."""
    return PLAIN if manifest.mode == Mode.CLASSIC.value else ENTRIES


class LogOfBackup:
    """The log of a backup, read in order from its target, with every check."""

    def __init__(self, target: Target, manifest: Manifest) -> None:
        self.walk = ItemWalk(form_of(manifest), manifest.start_offset, manifest.file_size)
        self._target = target
        self._manifest = manifest

    def chunks(self, piece: Piece) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes of the next piece, each with its offset, checked record by record.

        The digest is known at the end: use nothing before. Raises StoreBrokenError if the piece is
        not what was written, HastoreError if the backup was removed meanwhile.
        """
        whole, at = xxhash.xxh3_128(), piece.start
        try:
            while at < piece.end:
                size = min(_CHUNK_BYTES, piece.end - at)
                data = self._target.read(piece.name, size, at - piece.start)
                if len(data) != size:
                    raise StoreBrokenError(f"{piece.name} ends early, at offset {at + len(data)}")
                whole.update(data)
                self.walk.feed(data)
                yield at, data
                at += size
        except CorruptRecordError as failure:
            raise StoreBrokenError(f"{piece.name}: {failure}") from failure
        except FileNotFoundError as failure:
            raise _missing(self._target, self._manifest, piece.name) from failure
        if whole.hexdigest() != piece.xxh3_128:
            raise StoreBrokenError(f"{piece.name}: other bytes than were written, by their digest")
        if self.walk.offset != piece.end or not self.walk.is_whole:
            raise StoreBrokenError(f"{piece.name}: it does not end after a whole record")


def _missing(target: Target, manifest: Manifest, name: str) -> HastoreError:
    """Return the error for an object that is not there: the backup may have been removed."""
    if manifest_name(manifest.number) in target.objects():
        return StoreBrokenError(f"{name} is missing")
    return HastoreError(
        f"{target.name}: backup {manifest.number} was removed while it was read, as a run of"
        " `hastore backup take` does with what is beyond --keep: take a newer one, see `hastore"
        " backup list`"
    )


def read_state_file(target: Target, manifest: Manifest, file: StateFile) -> bytes:
    """Return the content of a small file. Raises StoreBrokenError if it is not as written,
    HastoreError if the backup was removed meanwhile.
    """
    try:
        data = target.read(file.name, file.size + 1)
    except FileNotFoundError as failure:
        raise _missing(target, manifest, file.name) from failure
    if len(data) != file.size or digest(data) != file.xxh3_128:
        raise StoreBrokenError(f"{file.name}: other bytes than were written, by their digest")
    return data


@dataclass(slots=True)
class Checked:
    """What a check of one backup has found."""

    manifest: Manifest
    problems: list[str] = field(default_factory=list)
    records: int = 0


def verify_backup(
    target: Target,
    number: int | None = None,
    progress: OnProgress = lambda _done, _due: None,
) -> Checked:
    """Read a backup, or the newest one, wholly, and check digests and all records.

    Raises UsageError if there is none, StoreError if the target cannot be read, HastoreError if it
    was removed meanwhile.
    """
    manifest = find_backup(target, number)
    found = Checked(manifest)
    at, due = manifest.start_offset, manifest.end_offset - manifest.start_offset
    whole = LogOfBackup(target, manifest)
    for piece in manifest.log:
        if piece.start != at:
            found.problems.append(f"bytes {at} to {piece.start} are in no piece")
        at = piece.end
        with _noting(found):
            for offset, _ in whole.chunks(piece):
                progress(offset - manifest.start_offset, due)
        if whole.walk.offset != piece.end or not whole.walk.is_whole:  # go on after damage
            found.records += whole.walk.records
            whole.walk = ItemWalk(form_of(manifest), piece.end, manifest.file_size)
    found.records += whole.walk.records
    progress(due, due)
    for file in manifest.files:
        with _noting(found):
            read_state_file(target, manifest, file)
    return found


@contextmanager
def _noting(found: Checked) -> Iterator[None]:
    try:
        yield
    except StoreBrokenError as failure:
        found.problems.append(str(failure))
    except StoreError as failure:
        raise StoreError(f"{failure}; the check is not complete") from failure
