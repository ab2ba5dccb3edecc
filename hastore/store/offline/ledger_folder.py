"""Find DLedger's directory in a store, and how far its entries are known to be committed."""

from hastore.errors import StoreError
from hastore.fs.filesystem import FileSystem, is_file_name
from hastore.record.entry import ENTRY_MAGIC, INDEX_UNIT, INDEX_UNIT_BYTES

_PREFIX = "dledger-"
_MAX_BYTES = 4096


def find_ledger(fs: FileSystem, root: str) -> str | None:
    """Return the directory with `data/` and `index/`: `root` itself, or the one in it.

    Returns None if there is none, or if it is empty beside a `commitlog`. Raises StoreError if
    there are several.
    """
    data = f"{root}/data"
    if fs.is_dir(data) and (fs.is_dir(f"{root}/index") or _has_files(fs, data)):
        return root
    found = [
        f"{root}/{name}"
        for name in fs.list_dir(root)
        if name.startswith(_PREFIX) and fs.is_dir(f"{root}/{name}/data")
    ]
    if len(found) > 1:
        raise StoreError(
            f"{root} has several DLedger directories: {', '.join(found)}; name one of them"
        )
    if found and fs.is_dir(f"{root}/commitlog"):
        found = [path for path in found if _has_files(fs, f"{path}/data")]
    return found[0] if found else None


def _has_files(fs: FileSystem, folder: str) -> bool:
    return any(is_file_name(name) for name in fs.list_dir(folder))


def committed_index(fs: FileSystem, ledger: str) -> int:
    """Return the last entry that the checkpoint knows to be committed; -1 for none."""
    path = f"{ledger}/checkpoint"
    try:
        raw = fs.read_bytes(path, _MAX_BYTES) if fs.exists(path) else b""
    except FileNotFoundError:  # DLedger removes it before it writes it anew
        return -1
    for line in raw.decode("ascii", "replace").splitlines():
        key, _, value = line.partition("=")
        if key == "committedIndex" and value.strip().isdigit():
            return int(value)
    return -1


def unit_of(fs: FileSystem, ledger: str, index: int) -> tuple[int, int] | None:
    """Return (position, size) of an entry by the index; None if the index does not have it."""
    raw = read_index(fs, ledger, index * INDEX_UNIT_BYTES, INDEX_UNIT_BYTES)
    if len(raw) < INDEX_UNIT_BYTES:
        return None
    magic, pos, size, its_index, _ = INDEX_UNIT.unpack(raw)
    return (pos, size) if (magic, its_index) == (ENTRY_MAGIC, index) else None


def read_index(fs: FileSystem, ledger: str, byte: int, size: int) -> bytes:
    """Return bytes of the index from `byte` on: fewer than `size` where its file ends."""
    folder = f"{ledger}/index"
    names = [name for name in fs.list_dir(folder) if is_file_name(name) and int(name) <= byte]
    if not names:
        return b""
    try:
        file = fs.open(f"{folder}/{names[-1]}", writable=False)
    except FileNotFoundError:  # retention removed it
        return b""
    try:
        return file.pread(size, byte - int(names[-1]))
    finally:
        file.close()
