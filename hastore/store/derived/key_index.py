"""The key index (RocketMQ's IndexService): finds records by the hash of topic and key.

Files follow one another in `index/`, named by the local time of their creation. A full file is
changed only by a cut or a rebuild. Replay's thread is the only writer. A batch is planned
completely, and its new files are created, before anything is written. So a full disk leaves the
index as it was before the batch.
"""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.fs.filesystem import FileSystem, sync_files
from hastore.record.hashes import KeyHasher
from hastore.record.layout import FLAG_ROLLBACK, MIN_RECORD_SIZE
from hastore.record.properties import keys_of
from hastore.store.derived.contract import (
    Dispatched,
    RecordColumns,
    ReplayableLog,
    TimeWindow,
)
from hastore.store.derived.index_file import (
    NAME_DIGITS,
    NAME_FORM,
    IndexFile,
    IndexHeader,
    Plan,
    index_name,
)
from hastore.store.derived.scalar_walk import ScalarWalker

_READ_BYTES = 4096  # how much of a record the first read asks for
_ARRAYS_FROM_SLOTS = 64  # numpy is faster from this many slots on


class KeyWalk:
    """A search by key under way: how far it has come. One thread uses it, by `KeyIndex.walk_on`."""

    def __init__(
        self, key_hash: int, window: TimeWindow, files: list[IndexFile], version: int
    ) -> None:
        self.key_hash = key_hash
        self.window = window
        self.files = list(files)  # those that are left, the newest last
        self.number: int | None = None  # of the next entry in the last of them; None: the newest
        self.version = version  # of the index
        self.stale = False  # the index was cut
        self.steps = 0  # entries that were looked at, and files without one
        # Of the last entry: it was stored no later.
        self.latest_ms = files[-1].header.end_timestamp_ms if files else 0
        self.ended = False


class KeyIndex:
    """All index files of a store: a Dispatcher. Any thread may search."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        commit_log: ReplayableLog,
        *,
        slots: int,
        entries: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; `load` opens the files. A cut or a rebuild of a file reads `commit_log`."""
        self._fs = fs
        self._directory = directory
        self._log = commit_log
        self._slots = slots
        self._entries = entries
        self._clock = clock
        self._hasher = KeyHasher()
        self._query_hasher = KeyHasher()
        self._lock = threading.Lock()
        self._files: list[IndexFile] = []  # the last one is open
        self._spares: list[IndexFile] = []  # created for a batch whose write failed
        self._unsynced: set[str] = set()
        self._names_changed = False
        self._next_offset = 0  # records below it are in the index
        self._version = 0  # counts the cuts; another one: searches begin anew

    @property
    def full_timestamp_ms(self) -> int:
        """Return endTimestamp of the last full file, 0 without one; the checkpoint stores it."""
        full = [file.header.end_timestamp_ms for file in self._files if file.is_full]
        return full[-1] if full else 0

    @property
    def end_offset(self) -> int:
        """The offset below which all records are in the index."""
        return self._next_offset

    @property
    def last_update(self) -> tuple[int, int]:
        """When the last record with a key was stored, and its offset; zeros without one."""
        with self._lock:
            header = self._files[-1].header if self._files else IndexHeader()
            return header.end_timestamp_ms, header.end_offset

    def walk(self, topic: str, key: str, window: TimeWindow) -> KeyWalk:
        """Begin a search for the records that may have a key and lie in a window of time."""
        raw = key.encode("utf-8", "surrogateescape")
        with self._lock:
            key_hash = self._query_hasher.key_hash(topic, raw)
            return KeyWalk(key_hash, window, self._files, self._version)

    def walk_on(self, walk: KeyWalk, most: int) -> list[tuple[int, int]]:
        """Look at `most` more entries at most, or files without one; newest first.

        Returns the physical offset of each record that may match, with the latest time at which it
        was stored. Hashes collide, times are rounded to seconds, and a record may occur twice, so
        the caller must check the records. Replay waits meanwhile, so `most` is small. After a cut
        the walk is `stale`, and a new one must begin.
        """
        with self._lock:
            if walk.version != self._version:
                walk.stale = walk.ended = True
            found: list[tuple[int, int]] = []
            left = most
            while left > 0 and not walk.ended:
                steps, matches = self._walk_file(walk, left)
                left -= steps
                walk.steps += steps
                found += matches
            return found

    def _walk_file(self, walk: KeyWalk, most: int) -> tuple[int, list[tuple[int, int]]]:
        """Look at more entries of the newest file that is left; return how many, and matches."""
        file = walk.files[-1] if walk.files else None
        if file is None or file not in self._files:  # retention removed it, and all before it
            walk.ended = True
            return 0, []
        header, window = file.header, walk.window
        steps, over = 1, False
        matches: list[tuple[int, int]] = []
        number = 0
        if header.count > 1:
            walk.latest_ms = header.end_timestamp_ms if walk.number is None else walk.latest_ms
            one_run = window.in_one_run(header.begin_offset, header.end_offset)
            over = window.is_over(header.end_offset, header.end_timestamp_ms)
            if not over and not (
                one_run and header.begin_timestamp_ms - window.slack_ms > window.end_ms
            ):
                try:
                    came = file.walk(walk.key_hash, walk.number, window, most)
                except FileNotFoundError:  # an operator removed it
                    came = None
                if came is not None:
                    matches, number, over = came.found, came.number, came.over
                    steps = max(1, came.steps)
                    walk.latest_ms = came.latest_ms or walk.latest_ms
        walk.ended = over
        walk.number = number or None
        if not number:
            walk.files.pop()
        return steps, matches

    # -- replay ------------------------------------------------------------------------------------

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Add a batch's keys; after OSError or StoreFullError none of them is in the index."""
        if isinstance(batch, RecordColumns) and batch.start_offset >= self._next_offset:
            self._dispatch_columns(batch)
            return
        plans: list[Plan] = []
        plan = self._files[-1].plan() if self._files else None
        room = self._entries
        key_hash, floor = self._hasher.key_hash, self._next_offset
        for offset, _, topic, _, _, flags, store_ms, _, properties in batch:
            if offset < floor:
                continue
            if plan is None or plan.header.count >= room:
                plan = self._next_plan(plan, plans)
            if b"KEY" not in properties or flags & FLAG_ROLLBACK == FLAG_ROLLBACK:
                continue
            for key in keys_of(properties):
                if plan.header.count >= room:
                    plan = self._next_plan(plan, plans)
                plan.put(key_hash(topic, key), offset, store_ms)
        if plan is not None:
            plans.append(plan)
            self._write(plans)
        if batch:
            self._next_offset = max(floor, batch[-1].end_offset)

    def _dispatch_columns(self, batch: RecordColumns) -> None:
        """Add a batch's keys with numpy."""
        plans: list[Plan] = []
        plan = self._files[-1].plan() if self._files else None
        if plan is None or plan.header.count >= self._entries:
            plan = self._next_plan(plan, plans)
        keys = batch.keyed()
        if keys is not None:
            from hastore.store.derived.index_arrays import put_all  # loads numpy

            first, count = 0, len(keys.hashes)
            while first < count:
                if plan.header.count >= self._entries:
                    plan = self._next_plan(plan, plans)
                end = min(count, first + self._entries - plan.header.count)
                put_all(plan, keys, first, end)
                first = end
            # As in RocketMQ, the first record after a full file opens the next one, even without a
            # key.
            if plan.header.count >= self._entries and keys.offsets[-1] < batch.last_offset:
                plan = self._next_plan(plan, plans)
        plans.append(plan)
        self._write(plans)
        self._next_offset = batch.end_offset

    def _next_plan(self, full: Plan | None, plans: list[Plan]) -> Plan:
        """Plan the file after a full one; as in RocketMQ, it begins where the full one ends."""
        header = IndexHeader()
        if full is not None:
            plans.append(full)
            last = full.header
            header.begin_timestamp_ms = header.end_timestamp_ms = last.end_timestamp_ms
            header.begin_offset = header.end_offset = last.end_offset
        taken = len(plans) - bool(self._files)  # number of spares that this batch uses already
        if taken == len(self._spares):
            self._spares.append(self._create())
        return Plan(self._spares[taken], header, 1)

    def _create(self) -> IndexFile:
        self._fs.make_dirs(self._directory)
        name = index_name(datetime.fromtimestamp(self._clock.wall_ms() / 1000))
        others = [*self._files, *self._spares]
        if others and name <= (last := others[-1].path[-NAME_DIGITS:]):
            last_created = datetime.strptime(last + "000", NAME_FORM)
            name = index_name(last_created + timedelta(milliseconds=1))
        file = IndexFile(self._fs, f"{self._directory}/{name}", self._slots, self._entries)
        file.create()
        self._names_changed = True
        return file

    def _write(self, plans: list[Plan]) -> None:
        for plan in plans:
            plan.file.write_entries(plan)
        with self._lock:
            for plan in plans:
                _apply(plan)
                self._unsynced.add(plan.file.path)
                if not self._files or plan.file is not self._files[-1]:
                    self._spares.remove(plan.file)
                    self._files.append(plan.file)
            for file in self._files[-1 - len(plans) : -1]:
                file.close()

    # -- life --------------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Open the files, cut them to `offset` and return it; 0 if the index must be rebuilt.

        It must be if a file is invalid, or if there is none: the first record creates one.
        """
        self.reset()
        self._files = [
            IndexFile(self._fs, f"{self._directory}/{name}", self._slots, self._entries)
            for name in self._fs.list_dir(self._directory)
            if len(name) == NAME_DIGITS and name.isdigit()
        ]
        invalid = [file for file in self._files if not file.read_header()]
        if not self._files or invalid:
            # The invalid ones go last: after a kill in between, the next start must find them.
            for file in [*(file for file in self._files if file not in invalid), *invalid]:
                self._discard(file)
            self._files = []
            return 0
        while self._files and self._files[-1].header.count == 0:
            self._remove_last()  # created, but never written
        if not synced:
            self._rebuild_unsynced(offset)
        self._cut(offset)
        return offset

    def truncate(self, log_end: int) -> None:
        """Forget records at or beyond `log_end`."""
        with self._lock:
            self._version += 1
            while self._spares:
                self._discard(self._spares.pop())
            self._cut(log_end)

    def delete_before(self, min_offset: int) -> None:
        """Remove files whose records all lie below `min_offset`; the last file stays."""
        with self._lock:
            while len(self._files) > 1 and self._files[0].header.end_offset < min_offset:
                self._discard(self._files.pop(0))

    def flush(self) -> None:
        """Sync what was written since the last flush; raises OSError, SyncFailedError."""
        with self._lock:
            paths, self._unsynced = self._unsynced, set()
            names_changed, self._names_changed = self._names_changed, False
        try:
            sync_files(self._fs, paths, {self._directory} if names_changed else ())
        except BaseException:
            with self._lock:
                self._unsynced |= paths
                self._names_changed |= names_changed
            raise

    def reset(self) -> None:
        """Close and forget all files."""
        self.close()
        self._unsynced.clear()
        self._next_offset = 0

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._version += 1
            for file in (*self._files, *self._spares):
                file.close()
            self._files = []
            self._spares = []

    def _rebuild_unsynced(self, limit: int) -> None:
        """Keep files that are certainly synced, and rebuild the others, after a power loss."""
        trusted = len(self._files)
        while trusted > 0:
            file = self._files[trusted - 1]
            if file.is_full and file.header.end_offset < limit:
                break
            trusted -= 1
        for number in range(trusted, len(self._files)):
            file = self._files[number]
            file.open()
            last = self._files[number - 1].header.end_offset if number else 0
            zeros = number == 0 and self._begins_with_zeros()
            file.rebuild(limit, last_offset=last, zeros=zeros)
            self._finish_header(number)
            file.close()
            if not file.is_full:  # later files have nothing below the limit
                while len(self._files) > number + 1:
                    self._remove_last()
                break

    def _begins_with_zeros(self) -> bool:
        """Whether the first entry of all is one of zeros: the record at 0 has a key of hash 0."""
        record = self._record_at(0)
        keys = () if record is None else keys_of(record.properties)
        return record is not None and any(
            self._hasher.key_hash(record.topic, key) == 0 for key in keys
        )

    def _cut(self, limit: int) -> None:
        """Remove entries from the last files; leave the last one open."""
        while self._files:
            file = self._files[-1]
            file.open()
            before = replace(file.header)
            last = file.cut(limit)
            if file.header.count > 1 or self._opened_below(limit):
                if file.header.count != before.count:
                    self._finish_header(len(self._files) - 1)
                file.clear(last)
                self._unsynced.add(file.path)
                break
            self._remove_last()
        self._next_offset = limit

    def _opened_below(self, limit: int) -> bool:
        """Whether a record below `limit` started the last file without adding a key to it."""
        if len(self._files) == 1:
            return limit > self._log.min_offset
        previous = self._files[-2].header
        if previous.end_offset >= limit:
            return False
        record = self._record_at(previous.end_offset)
        return record is None or record.end_offset < limit

    def _finish_header(self, number: int) -> None:
        """Set the begin and end fields of a file's header from its entries and the log."""
        file = self._files[number]
        header = file.header
        previous = self._files[number - 1].header if number else IndexHeader()
        if header.count <= 1:
            header.begin_offset = header.end_offset = previous.end_offset
            header.begin_timestamp_ms = header.end_timestamp_ms = previous.end_timestamp_ms
        else:
            header.begin_offset = file.entry_offset(1)
            header.end_offset = file.entry_offset(header.count - 1)
            header.begin_timestamp_ms = self._stored_ms(header.begin_offset, previous)
            header.end_timestamp_ms = self._stored_ms(header.end_offset, header)
        file.save_header()

    def _stored_ms(self, offset: int, otherwise: IndexHeader) -> int:
        """Return a record's storeTimestamp; for a removed record, the end time of `otherwise`."""
        record = self._record_at(offset)
        return otherwise.end_timestamp_ms if record is None else record.store_timestamp_ms

    def _record_at(self, offset: int) -> Dispatched | None:
        """Read one record of the log; None when `offset` holds none."""
        log = self._log
        if not log.min_offset <= offset < log.max_offset:
            return None
        left = log.file_size - offset % log.file_size
        wanted = min(left, _READ_BYTES)
        while True:
            with log.view(offset, wanted) as view:
                size = max(int.from_bytes(view[:4]), MIN_RECORD_SIZE)  # as the record states it
                walk = ScalarWalker().walk(view[:size], offset, left)
                seen = len(view)
            if walk.batch:
                return walk.batch[0]
            if not seen < walk.wanted <= left:
                return None
            wanted = walk.wanted

    def _remove_last(self) -> None:
        self._discard(self._files.pop())

    def _discard(self, file: IndexFile) -> None:
        file.close()
        self._unsynced.discard(file.path)
        self._names_changed = True
        with contextlib.suppress(FileNotFoundError):  # an operator removed it
            self._fs.remove(file.path)


def _apply(plan: Plan) -> None:
    """Put a plan's written entries into effect: store the slots first, then the header."""
    if len(plan.slots) >= _ARRAYS_FROM_SLOTS:
        from hastore.store.derived.index_arrays import store_slots  # loads numpy

        store_slots(plan.file, plan.slots)
    else:
        plan.file.store_slots(plan.slots)
    plan.file.header = plan.header
    plan.file.save_header()
