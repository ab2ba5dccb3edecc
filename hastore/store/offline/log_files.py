"""Read the commit log's files from another process, without a lock and without writing.

Files may appear and disappear at any time; a file that retention removes stays readable while its
map is open. A record start is an offset at which a record or a blank begins, or at which the log
ends.
"""

import mmap
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from hastore.errors import StoreError
from hastore.record.codec import check_blank, check_record
from hastore.record.layout import BLANK_SIZE, MIN_RECORD_SIZE, V1_MAGIC, V2_MAGIC, header_struct
from hastore.store.fs.file_names import is_file_name
from hastore.store.fs.filesystem import REAL, File, FileSystem

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
    """Find, map and scan the files under `commitlog/`; thread-safe."""

    def __init__(self, root: str, fs: FileSystem = REAL, *, bare_too: bool = False) -> None:
        """Open a store; raises StoreError if it has no `commitlog` directory.

        With `bare_too`, the folder may hold the log files directly, like a folder in `rescued/`.
        """
        self.directory = f"{root}/commitlog"
        self.is_bare = False
        self._root = root
        self._fs = fs
        self._lock = threading.Lock()
        self._maps: OrderedDict[int, tuple[File, mmap.mmap, memoryview]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        if not fs.is_dir(self.directory):
            self.is_bare = bare_too and any(is_file_name(name) for name in fs.list_dir(root))
            if self.is_bare:
                self.directory = root
                return
            raise StoreError(f"{root} is no store: it has no directory commitlog")

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
        """Return the end of the last whole record, walking from the record start `start`.

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
        while at < end:
            size = check_record(data, at, end, file.start + at) or check_blank(data, at, end)
            if not size:
                break
            at += size
        return file.start + at

    def record_start_at(self, file: LogFile, offset: int, known: int | None = None) -> int:
        """Return the first record start at or beyond `offset`.

        The walk begins at the record start `known`, if a valid record is there, else at the file's
        start. It goes by record sizes, without reading bodies. After damage it searches with
        `find_record`.
        """
        data = self.view(file)
        at, end, wanted = 0, file.size, offset - file.start
        if known is not None and file.start <= known <= offset and self._is_record(file, known):
            at = known - file.start
        while at < wanted and end - at >= MIN_RECORD_SIZE:
            size, magic, place = _FRONT.unpack_from(data, at)
            if magic not in (V1_MAGIC, V2_MAGIC) or place != file.start + at:
                break
            if not MIN_RECORD_SIZE <= size <= end - at - BLANK_SIZE:
                break
            at += size
        if at >= wanted:
            return file.start + at
        if check_blank(data, at, end):
            return file.end
        found = self.find_record(file, max(offset, file.start + at))
        return file.end if found is None else found

    def first_record_start(self, files: Sequence[LogFile]) -> int:
        """Return where the log of `files` begins: usually at the start of the first file.

        After a resync it begins inside the first file, after zeros. A tail in `rescued/` begins at
        the offset in its folder's name, or at the first record after it.
        """
        first = files[0]
        cut = _CUT_NAME.fullmatch(self._root.rstrip("/").rpartition("/")[2])
        candidates = [first.start] if cut is None else [int(cut[1]), first.start]
        data = self.view(first)
        for offset in candidates:
            at = offset - first.start
            if 0 <= at < first.size and (
                check_record(data, at, first.size, offset) or check_blank(data, at, first.size)
            ):
                return offset
        if any(data[:MIN_RECORD_SIZE]):
            return first.start
        for file in files if self.is_bare else files[:1]:
            found = self.find_record(file, file.start)
            if found is not None:
                return found
        return first.start

    def find_record(self, file: LogFile, offset: int) -> int | None:
        """Find the first valid record of a file at or beyond `offset`; None if there is none."""
        _, mapped, data = self._open(file)
        begin = offset - file.start + 4
        found: list[int] = []
        for magic in _MAGIC_STARTS:
            at = mapped.find(magic, begin)
            while at >= 0:
                if check_record(data, at - 4, file.size, file.start + at - 4):
                    found.append(file.start + at - 4)
                    break
                at = mapped.find(magic, at + 1)
        return min(found, default=None)

    def is_record(self, offset: int) -> bool:
        """Whether a whole, valid record begins at `offset`."""
        for file in self.list():
            if file.start <= offset < file.end:
                try:
                    return self._is_record(file, offset)
                except FileNotFoundError:
                    return False
        return False

    def _is_record(self, file: LogFile, offset: int) -> bool:
        return check_record(self.view(file), offset - file.start, file.size, offset) > 0

    def _begins(self, file: LogFile) -> bool:
        try:
            data = self.view(file)
        except FileNotFoundError:
            return False
        return bool(check_record(data, 0, file.size, file.start) or check_blank(data, 0, file.size))

    def _size(self, path: str) -> int:
        try:
            handle = self._fs.open(path, writable=False)
        except FileNotFoundError:
            return 0
        try:
            return handle.size
        finally:
            handle.close()
