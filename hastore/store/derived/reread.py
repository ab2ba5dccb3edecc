"""Read a part of the log again, record by record, for what is derived from it.

A part that keeps its state at several ends of the log goes back to one of them when the log is cut,
and takes the records from there on again.
"""

from collections.abc import Iterator, Sequence

from hastore.errors import StoreError
from hastore.record.log_format import LogFormat
from hastore.store.derived.contract import Dispatched, ReplayableLog
from hastore.store.derived.scalar_walk import ScalarWalker, Stop

_VIEW_BYTES = 1 << 20


def reread(
    log: ReplayableLog, form: LogFormat, start: int, log_end: int
) -> Iterator[Sequence[Dispatched]]:
    """Yield the records from `start` on up to `log_end`, in batches.

    Raises StoreError, OSError if the log cannot be read.
    """
    walker = ScalarWalker(form)
    at, wanted = max(start, log.min_offset), _VIEW_BYTES
    while at < log_end:
        left = log.file_size - at % log.file_size
        with log.view(at, min(wanted, left, log_end - at)) as view:
            seen = len(view)
            walk = walker.walk(view, at, left)
        if walk.batch:
            yield walk.batch
        at += walk.consumed
        if walk.stop is Stop.BLANK:
            at += left - walk.consumed
        elif walk.stop is Stop.BAD and not walk.batch:
            raise StoreError(f"offset {at} holds no record; see `hastore log verify`")
        elif not walk.consumed:
            if walk.wanted <= seen or at + walk.wanted > log_end:
                return  # the end of the last whole record
            wanted = walk.wanted
            continue
        wanted = _VIEW_BYTES
