"""The vector walk: read a large view of the log with numpy instead of a loop over its records.

The sizes are read one after the other, except that one array comparison finds a run of equal sizes.
One indexing operation gathers all headers. Tails (topic and properties) of equal length are
gathered together. Tails with their fields in the same places have the same layout (`Layout`);
array operations read all tails of a layout together. When only a few tails are left, or several new
layouts have been tried, the remaining records are read one by one.

The scalar walk (scalar_walk.py) is the reference. Small views, and views with any invalid record,
are left to it, so both walks stop at the same byte for the same reason. In a log of entries the
headers before the records are read one by one, and compared with the records as columns.
"""

import numpy as np
import numpy.typing as npt

from hastore.record.layout import (
    BLANK_MAGIC,
    FLAG_BORN_IPV6,
    FLAG_IPV6,
    FLAG_STORE_IPV6,
    HEADER_SIZE,
    IPV6_EXTRA,
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    STORE_AT,
    TAIL_MIN,
    V1_MAGIC,
    V2_MAGIC,
    header_dtype,
)
from hastore.record.log_format import ENTRY_BLANK, ENTRY_HEADER_BYTES, ENTRY_MAGIC
from hastore.store.derived.column_batch import Bytes, ColumnBatch, Layout, Rows, changes, padded
from hastore.store.derived.scalar_walk import ScalarWalker, Walk

_HEADER = np.dtype(
    header_dtype(
        *("size", "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag"),
        *("store_timestamp_ms", "body_length"),
    )
)
_ENTRY = np.dtype(
    {
        "names": ["magic", "size", "pos", "body_size"],
        "formats": [">u4", ">u4", ">i8", ">u4"],
        "offsets": [0, 4, 24, 44],
        "itemsize": ENTRY_HEADER_BYTES,
    }
)
_BATCH_MIN = 48  # records; with fewer, the scalar walk is faster
_RUN_MIN = 16  # records of equal size; an array comparison of fewer costs more than it saves
_RUN_PAUSE = 64  # after a shorter run, read this many sizes before looking for a run again
_ALIKE_MIN = 8  # with fewer tails of equal width, do not look for a common layout
_LAYOUTS_TRIED = 8  # new layouts for each width and batch; the other records are read one by one
_LAYOUTS_KEPT = 4  # layouts kept for each width, for later batches
_WIDTHS_KEPT = 1024


class VectorWalker:
    """Walk whole records. The walker caches recent layouts, so each thread needs its own walker."""

    def __init__(self, scalar: ScalarWalker, *, batch_min: int | None = None) -> None:
        """Prepare to walk; views of fewer than `batch_min` records are left to `scalar`."""
        self._scalar = scalar
        self._lead = scalar.form.lead
        self._batch_min = _BATCH_MIN if batch_min is None else batch_min
        self._layouts: dict[tuple[int, bool], list[Layout]] = {}

    def walk(self, view: memoryview, base: int, left: int) -> Walk:
        """Walk the records of `view`; return what ScalarWalker.walk would return."""
        starts = _entry_records(view) if self._lead else _record_starts(view)
        if len(starts) >= self._batch_min:
            batch = self._read_batch(view, base, np.array(starts, dtype=np.int64))
            if batch is not None:
                return self._scalar.ended(view, base, batch.end_offset - base, left, batch)
        return self._scalar.walk(view, base, left)

    def _read_batch(self, view: memoryview, base: int, starts: Rows) -> ColumnBatch | None:
        """Return the records at `starts` as a batch; None when one of them is invalid."""
        if self._lead and not _entries_fit(view, base, starts):
            return None
        headers = _gather(view, HEADER_SIZE, starts).view(_HEADER)
        sizes, bodies = _longs(headers["size"]), _longs(headers["body_length"])
        flags, stored = _longs(headers["sys_flag"]), _longs(headers["store_timestamp_ms"])
        magic = headers["magic"]
        wide = magic == V2_MAGIC
        offsets = starts + base
        fronts = np.full(len(starts), HEADER_SIZE)
        if (flags & FLAG_IPV6).any():
            rows = np.flatnonzero(flags & FLAG_IPV6)
            born = np.where(flags[rows] & FLAG_BORN_IPV6, IPV6_EXTRA, 0)
            fronts[rows] += born + np.where(flags[rows] & FLAG_STORE_IPV6, IPV6_EXTRA, 0)
            if (sizes < fronts).any():
                return None
            at = starts[rows]
            bodies[rows] = _longs(_gather(view, 4, at + fronts[rows] - 4).view(">i4"))
            stored[rows] = _longs(_gather(view, 8, at + STORE_AT + born).view(">i8"))
        widths = sizes - fronts - bodies
        if (
            not (wide | (magic == V1_MAGIC)).all()
            or (_longs(headers["physical_offset"]) != offsets).any()
            or bodies.min() < 0
            or (widths < TAIL_MIN + wide).any()
        ):
            return None
        batch = ColumnBatch(
            self._scalar, offsets, sizes, _longs(headers["queue_id"]),
            _longs(headers["queue_offset"]), flags, stored,
        )  # fmt: skip
        return batch if self._add_tails(batch, view, starts + sizes, widths, wide) else None

    def _add_tails(
        self,
        batch: ColumnBatch,
        view: memoryview,
        ends: Rows,
        widths: Rows,
        wide: npt.NDArray[np.bool_],
    ) -> bool:
        kinds = 2 * widths + wide
        if (kinds == kinds[0]).all():
            groups = [np.arange(len(kinds))]
        else:
            order = np.argsort(kinds, kind="stable")
            groups = np.split(order, changes(kinds[order]))
        for rows in groups:
            width = int(widths[rows[0]])
            bytes_each = padded(width)
            tails = _gather(view, bytes_each, ends[rows] - bytes_each).view(np.uint8)
            tails = tails.reshape(len(rows), bytes_each)
            if not self._add_group(batch, rows, tails, width, bool(wide[rows[0]])):
                return False
        return True

    def _add_group(
        self, batch: ColumnBatch, rows: Rows, tails: Bytes, width: int, wide: bool
    ) -> bool:
        """Add to the batch records whose tails have equal width; False when one is invalid."""
        known = self._layouts.get((width, wide), [])
        used: list[Layout] = []
        fresh = 0
        while len(rows) >= _ALIKE_MIN:
            if known:
                layout = known.pop(0)
            elif fresh < _LAYOUTS_TRIED:
                fresh += 1
                try:
                    layout = Layout(tails[0].tobytes(), width, wide=wide)
                except ValueError:
                    return False
            else:
                break
            if layout.odd:
                batch.add_one(int(rows[0]), tails[0].tobytes()[-width:], wide=wide)
                rows, tails = rows[1:], tails[1:]
                continue
            fits = layout.matching(tails)
            if fits is None:
                batch.add_alike(rows, tails, layout)
                used.append(layout)
                rows = rows[:0]
            elif fits.any():
                batch.add_alike(rows[fits], tails[fits], layout)
                used.append(layout)
                rows, tails = rows[~fits], tails[~fits]
        if used:
            if len(self._layouts) >= _WIDTHS_KEPT:
                self._layouts.clear()
            self._layouts[width, wide] = [*used, *known][:_LAYOUTS_KEPT]
        return all(
            batch.add_one(row, tail.tobytes()[-width:], wide=wide)
            for row, tail in zip(rows.tolist(), tails, strict=False)
        )


def _record_starts(view: memoryview) -> list[int]:
    """Return where the whole records of a view begin; only sizes and blanks are checked."""
    starts: list[int] = []
    add, unpack = starts.append, SIZE_AND_MAGIC.unpack_from
    end = len(view)
    last, at, previous, pause_to = end - MIN_RECORD_SIZE, 0, 0, 0
    while at <= last:
        size, magic = unpack(view, at)
        after = at + size
        if size < MIN_RECORD_SIZE or after > end or magic == BLANK_MAGIC:
            break
        if size != previous or len(starts) < pause_to:
            add(at)
            previous = size
            at = after
            continue
        sizes = np.ndarray(((end - at) // size,), ">i4", view, at, (size,))
        alike = sizes == size
        run = len(alike) if alike.all() else int(alike.argmin())
        starts += range(at, at + run * size, size)
        at += run * size
        if run < _RUN_MIN:
            pause_to = len(starts) + _RUN_PAUSE
    return starts


def _entry_records(view: memoryview) -> list[int]:
    """Return where the records of whole entries begin, up to the first entry without one."""
    starts: list[int] = []
    add, unpack, lead = starts.append, ENTRY_BLANK.unpack_from, ENTRY_HEADER_BYTES
    end = len(view)
    last, at, least = end - lead - MIN_RECORD_SIZE, 0, lead + MIN_RECORD_SIZE
    while at <= last:
        magic, size = unpack(view, at)
        after = at + size
        if size < least or after > end or magic != ENTRY_MAGIC:
            break
        add(at + lead)
        at = after
    return starts


def _entries_fit(view: memoryview, base: int, starts: Rows) -> bool:
    """Whether the header before each record fits the record."""
    heads = _gather(view, ENTRY_HEADER_BYTES, starts - ENTRY_HEADER_BYTES).view(_ENTRY)
    sizes = _longs(_gather(view, 4, starts).view(">i4"))
    return bool(
        (heads["magic"] == ENTRY_MAGIC).all()
        and (_longs(heads["body_size"]) == sizes).all()
        and (_longs(heads["size"]) == sizes + ENTRY_HEADER_BYTES).all()
        and (_longs(heads["pos"]) == starts + (base - ENTRY_HEADER_BYTES)).all()
    )


def _gather(view: memoryview, size: int, starts: Rows) -> npt.NDArray[np.void]:
    """Copy `size` bytes from each start."""
    every = np.ndarray((len(view) - size + 1,), f"V{size}", view, 0, (1,))
    return every[starts]


def _longs(values: npt.NDArray[np.void] | npt.NDArray[np.integer]) -> Rows:
    return values.astype(np.int64)
