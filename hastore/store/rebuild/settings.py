"""The sizes of queue and index files: as given, as the store's own files show, or the defaults."""

from hastore.config.model import StoreConfig
from hastore.errors import UsageError
from hastore.fs.filesystem import FileSystem, is_file_name
from hastore.store.derived.queues.consume_queue import UNIT_BYTES
from hastore.store.derived.queues.unit_files import queue_ids
from hastore.store.rebuild.layout import INDEX, QUEUES, Sizes
from hastore.store.state.replay_progress import read_sizes

_HEADER_BYTES, _SLOT_BYTES, _ENTRY_BYTES = 40, 4, 20
_DEFAULTS = StoreConfig(root="")


def find_sizes(
    fs: FileSystem,
    root: str,
    *,
    units: int | None = None,
    slots: int | None = None,
    entries: int | None = None,
) -> Sizes:
    """Return the sizes for a store; those that are given count before its own.

    Raises UsageError if the store's index files have a size that does not tell slots and entries.
    """
    known = read_sizes(fs, f"{root}/hastore/replay")
    if known is not None:
        own_units, own_slots, own_entries = known
    else:
        own_units = _units_of(fs, root) or _DEFAULTS.consume_queue_units
        own_slots, own_entries = _DEFAULTS.index_slots, _DEFAULTS.index_entries
    sizes = Sizes(units or own_units, slots or own_slots, entries or own_entries)
    wanted = _HEADER_BYTES + _SLOT_BYTES * sizes.slots + _ENTRY_BYTES * sizes.entries
    present = _index_size(fs, root)
    if present not in (None, 0, wanted) and slots is None and entries is None:
        raise UsageError(
            f"{root}/index: its files have {present} bytes, and not {wanted} as with"
            f" {sizes.slots} slots and {sizes.entries} entries; give --index-slots and"
            " --index-entries as the node or broker has them"
        )
    return sizes


def _units_of(fs: FileSystem, root: str) -> int | None:
    """Return how many units the first consume queue file that is found has."""
    for topic, queue_id in queue_ids(fs, root, QUEUES):
        folder = f"{root}/{QUEUES}/{topic}/{queue_id}"
        for name in filter(is_file_name, fs.list_dir(folder)):
            size = _size(fs, f"{folder}/{name}")
            if size and size % UNIT_BYTES == 0:
                return size // UNIT_BYTES
    return None


def _index_size(fs: FileSystem, root: str) -> int | None:
    names = [name for name in fs.list_dir(f"{root}/{INDEX}") if name.isdigit()]
    return _size(fs, f"{root}/{INDEX}/{names[0]}") if names else None


def _size(fs: FileSystem, path: str) -> int:
    file = fs.open(path, writable=False)
    try:
        return file.size
    finally:
        file.close()
