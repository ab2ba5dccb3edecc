"""Read the files of a commit log, or of DLedger's log, from another process, without a lock.

Nothing is written. Files may appear and disappear at any time; a file that retention removes stays
readable while its map is open. An item start is an offset at which a record or a blank begins, or
at which the log ends; in a log of entries, where an entry begins: its record lies `form.lead` bytes
behind.

The functions before LogFiles find DLedger's directory in a store, read its index, and tell how far
its entries are known to be committed.
"""

import mmap
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hastore.errors import StoreError
from hastore.fs.filesystem import (
    REAL,
    File,
    FileSystem,
    is_file_name,
    read_or_empty,
    read_range,
    size_of,
)
from hastore.record.layout import BLANK_SIZE, MIN_RECORD_SIZE, V1_MAGIC, V2_MAGIC, header_struct
from hastore.record.log_format import (
    ANY_ENTRIES,
    INDEX_UNIT_BYTES,
    PLAIN,
    LogFormat,
    read_header,
    unpack_unit,
)
from hastore.store.state.limits import read_limits
from hastore.store.state.marker_files import DLEDGER_LOG

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
        if name.startswith(DLEDGER_LOG) and fs.is_dir(f"{root}/{name}/data")
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
        raw = read_or_empty(fs, path, _MAX_BYTES)
    except FileNotFoundError:  # DLedger removes it before it writes it anew
        return -1
    for line in raw.decode("ascii", "replace").splitlines():
        key, _, value = line.partition("=")
        if key == "committedIndex" and value.strip().isdigit():
            return int(value)
    return -1


def unit_of(fs: FileSystem, ledger: str, index: int) -> tuple[int, int] | None:
    """Return (position, size) of an entry by the index; None if the index does not have it."""
    found = unpack_unit(read_index(fs, ledger, index * INDEX_UNIT_BYTES, INDEX_UNIT_BYTES), index)
    return None if found is None else found[:2]


def read_index(fs: FileSystem, ledger: str, byte: int, size: int) -> bytes:
    """Return bytes of the index from `byte` on: fewer than `size` where its file ends."""
    folder = f"{ledger}/index"
    names = [name for name in fs.list_dir(folder) if is_file_name(name) and int(name) <= byte]
    if not names:
        return b""
    try:
        return read_range(fs, f"{folder}/{names[-1]}", size, byte - int(names[-1]))
    except FileNotFoundError:  # retention removed it
        return b""


_OPEN_MAX = 64
_FRONT = header_struct("size", "magic", "physical_offset")
_CUT_NAME = re.compile(r"[0-9]+-([0-9]+)(?:\.[0-9]+)?")  # rescued/<epoch>-<offset>[.n]
_MAGIC_STARTS = (V1_MAGIC.to_bytes(4), V2_MAGIC.to_bytes(4))


@dataclass(frozen=True, slots=True)
class LogFile:
    """A commit log file: [start, end) of the log."""

    start: int
    path: str
    size: int

    @property
    def end(self) -> int:
        """Return the offset after the file."""
        return self.start + self.size


class LogFiles:
    """Find, map and scan the files under `commitlog/`, or DLedger's under `data/`; thread-safe."""

    def __init__(self, root: str, fs: FileSystem = REAL, *, bare_too: bool = False) -> None:
        """Open a store; raises StoreError if it has neither `commitlog` nor a DLedger directory.

        The folder may be DLedger's directory itself. With `bare_too`, it may hold the log files
        directly, like a folder in `rescued/`.
        """
        self.directory = f"{root}/commitlog"
        self.is_bare = False
        self.form: LogFormat = PLAIN
        self.ledger: str | None = None  # DLedger's directory, with data/, index/ and checkpoint
        self._root = root
        self._fs = fs
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, tuple[File, mmap.mmap, memoryview]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self.ledger = find_ledger(fs, root)
        if self.ledger is not None:
            self.directory, self.form = f"{self.ledger}/data", ANY_ENTRIES
        elif not fs.is_dir(self.directory):
            self.is_bare = bare_too and any(is_file_name(name) for name in fs.list_dir(root))
            if not self.is_bare:
                raise StoreError(f"{root} is no store: it has no commitlog/ or dledger-*/")
            self.directory = root
            self.form = self._form_of_files()

    @property
    def is_alone(self) -> bool:
        """Whether the folder is DLedger's own: queues and limits are beside it, not in it."""
        return self.ledger == self._root

    def _form_of_files(self) -> LogFormat:
        """Return the form of files without a store, by what lies where their log begins."""
        for file in self.list():
            data = self.view(file)
            for offset in self._begins_of(file):
                at = offset - file.start
                for form in (PLAIN, ANY_ENTRIES):
                    if form.check_item(data, at, file.size, offset):
                        return form
        return PLAIN

    def _begins_of(self, first: LogFile) -> list[int]:
        """Return where the log of these files may begin."""
        cut = _CUT_NAME.fullmatch(self._root.rstrip("/").rpartition("/")[2])
        found = [first.start] if cut is None else [int(cut[1]), first.start]
        return [offset for offset in found if 0 <= offset - first.start < first.size]

    def list(self) -> list[LogFile]:
        """Return the files that exist now, the oldest first, without empty ones."""
        names = [name for name in self._fs.list_dir(self.directory) if is_file_name(name)]
        found = []
        for name in names:
            path = f"{self.directory}/{name}"
            size = self._sizes.get(name) or self._size(path)
            if size:
                self._sizes[name] = size
                found.append(LogFile(int(name), path, size))
        return found

    def view(self, file: LogFile) -> memoryview:
        """Map a file read-only; raises FileNotFoundError when retention removed it."""
        return self._open(file)[2]

    def _open(self, file: LogFile) -> tuple[File, mmap.mmap, memoryview]:
        with self._lock:
            opened = self._maps.get(file.start)
            if opened is None:
                handle = self._fs.open(file.path, writable=False)
                mapped = handle.map()
                opened = handle, mapped, memoryview(mapped)
                self._maps[file.start] = opened
                if len(self._maps) > _OPEN_MAX:
                    # The map is dropped, not closed: a lent view keeps it alive.
                    self._maps.popitem(last=False)[1][0].close()
            else:
                self._maps.move_to_end(file.start)
            return opened

    def close(self) -> None:
        """Drop all maps; a map is unmapped once no lent view uses it."""
        with self._lock:
            while self._maps:
                self._maps.popitem()[1][0].close()

    def whole_end(self, start: int | None = None) -> int:
        """Return the end of the last whole record, walking from the item start `start`.

        Without `start`, the walk begins at the last file that begins with a record or a blank, and
        assumes that all earlier files are whole.
        """
        files = self.list()
        if not files:
            return 0
        if start is not None and not files[0].start <= start <= files[-1].end:
            start = None
        if start is None:
            number = len(files) - 1
            while number > 0 and not self._begins(files[number]):
                number -= 1
            start = files[number].start
        for file in files:
            if file.start <= start < file.end:
                try:
                    start = self.scan(file, start)
                except FileNotFoundError:
                    return self.whole_end()
                if start < file.end:
                    break
        return start

    def scan(self, file: LogFile, offset: int) -> int:
        """Walk records and a blank from `offset`; return where they end."""
        data = self.view(file)
        at, end = offset - file.start, file.size
        check, check_blank = self.form.chain(), self.form.check_blank
        while at < end:
            size = check(data, at, end, file.start + at) or check_blank(data, at, end)
            if not size:
                break
            at += size
        return file.start + at

    def record_start_at(self, file: LogFile, offset: int, known: int | None = None) -> int:
        """Return the first item start at or beyond `offset`.

        The walk begins at the item start `known`, if a valid item is there, else at the file's
        start. A blank counts only at `offset` itself. It goes by record sizes, without reading
        bodies. After damage it searches with `find_record`.
        """
        data = self.view(file)
        at, end, wanted = 0, file.size, offset - file.start
        if known is not None and file.start <= known <= offset:
            blank = known == offset and self.form.check_blank(data, wanted, end)
            if blank or self._is_record(file, known):
                at = known - file.start
        if self.form.lead:
            at = self._walk_entries(data, at, wanted, end, file.start)
        while at < wanted and end - at >= MIN_RECORD_SIZE:
            size, magic, place = _FRONT.unpack_from(data, at)
            if magic not in (V1_MAGIC, V2_MAGIC) or place != file.start + at:
                break
            if not MIN_RECORD_SIZE <= size <= end - at - BLANK_SIZE:
                break
            at += size
        if at >= wanted:
            return file.start + at
        if self.form.check_blank(data, at, end):
            return file.end
        found = self.find_record(file, max(offset, file.start + at))
        return file.end if found is None else found

    @staticmethod
    def _walk_entries(data: memoryview, at: int, wanted: int, end: int, start: int) -> int:
        """Walk entries by their headers from byte `at` of a file to at least `wanted`."""
        while at < wanted:
            header = read_header(data, at, end, start + at)
            if header is None:
                break
            at += header.size
        return at

    def first_record_start(self, files: Sequence[LogFile]) -> int:
        """Return where the log of `files` begins: usually at the start of the first file.

        After a resync it begins inside the first file, after zeros: the limits page says where. A
        tail in `rescued/` begins at the offset in its folder's name, or at the first record after
        it.
        """
        first, form = files[0], self.form
        known = self._known_begin(files)
        if known is not None:
            return known
        data = self.view(first)
        for offset in self._begins_of(first):
            at = offset - first.start
            if form.check_item(data, at, first.size, offset) or form.check_blank(
                data, at, first.size
            ):
                return offset
        if any(data[:MIN_RECORD_SIZE]):
            return first.start
        for file in files if self.is_bare else files[:1]:
            found = self.find_record(file, file.start)
            if found is not None:
                return found
        return first.start

    def stated_begin(self) -> int | None:
        """Return where the log must begin, by the limits page or by the folder's name, or because
        something is there.

        None: nothing says it, as of a log of entries outside of its store.
        """
        files = self.list()
        known = self._known_begin(files) if files else None
        if known is not None or not files or self.form.lead:
            return known
        begins = self._begins_of(files[0])
        if self.is_bare and len(begins) > 1:
            return begins[0]
        return files[0].start if any(self.view(files[0])[:MIN_RECORD_SIZE]) else None

    def _known_begin(self, files: Sequence[LogFile]) -> int | None:
        """Return where the log of a store must begin, whatever lies there; None if nothing says it.

        hastore's limits page does; the log of a RocketMQ store begins with its first file. A log
        that was set aside as a whole may begin anywhere in it.
        """
        if self.is_bare:
            return None
        root = os.path.abspath(self._root)
        if self.is_alone:
            root = os.path.dirname(root)
        try:
            limits = read_limits(self._fs, root)  # after the list: a resync writes it before files
        except (StoreError, OSError):  # `hastore log verify` says it
            return None
        if limits is not None:
            return min(max(files[0].start, limits.first_offset), files[-1].end)
        of_hastore = self._fs.exists(f"{root}/hastore")
        if of_hastore or self.is_alone or os.path.basename(os.path.dirname(root)) == "rescued":
            return None
        return files[0].start

    def find_record(self, file: LogFile, offset: int) -> int | None:
        """Find the first valid item of a file at or beyond `offset`; None if there is none.

        In a log of entries only those with a record are found.
        """
        _, mapped, data = self._open(file)
        ahead = self.form.lead + 4  # the magic lies there
        begin = offset - file.start + ahead
        found: list[int] = []
        for magic in _MAGIC_STARTS:
            at = mapped.find(magic, begin)
            while at >= 0:
                place = file.start + at - ahead
                if self.form.check_item(data, at - ahead, file.size, place):
                    found.append(place)
                    break
                at = mapped.find(magic, at + 1)
        return min(found, default=None)

    def is_record(self, offset: int) -> bool:
        """Whether a whole, valid item begins at `offset`."""
        for file in self.list():
            if file.start <= offset < file.end:
                try:
                    return self._is_record(file, offset)
                except FileNotFoundError:
                    return False
        return False

    def _is_record(self, file: LogFile, offset: int) -> bool:
        return self.form.check_item(self.view(file), offset - file.start, file.size, offset) > 0

    def _begins(self, file: LogFile) -> bool:
        try:
            data = self.view(file)
        except FileNotFoundError:
            return False
        form, size = self.form, file.size
        return bool(form.check_item(data, 0, size, file.start) or form.check_blank(data, 0, size))

    def _size(self, path: str) -> int:
        try:
            return size_of(self._fs, path)
        except FileNotFoundError:
            return 0
