"""Copy many slices of one buffer into an Arrow array by one call in C++.

First an Arrow array is laid over the buffer, without a copy. Its elements are the slices and the
gaps between them, in turn. Arrow's `take` then copies every second element, which is a slice: 6 to
18 million per second. The copy is needed, because Spark does not accept views.
"""

from functools import lru_cache

import numpy as np
import pyarrow as pa

from hastore.errors import CorruptRecordError
from hastore.spark.arrow.record_fields import Ints

_INT32_MAX = 2**31 - 1


def slice_values(
    data: pa.Buffer, starts: Ints, ends: Ints, kind: pa.DataType, rows: Ints | None = None
) -> pa.Array:
    """Return `data[start:end]` for each pair as an array of `kind` (binary or string).

    With `rows`, element i is pair `rows[i]`, or null if `rows[i]` is negative. In strings, bytes
    that are not UTF-8 become U+FFFD. Raises CorruptRecordError if the pairs are not in order or
    overlap, and ValueError if they span 2 GiB or more.
    """
    count = len(starts)
    if count == 0:
        return pa.nulls(0 if rows is None else len(rows), kind)
    bounds = np.empty(2 * count, np.int64)
    bounds[0::2] = starts
    bounds[1::2] = ends
    if (bounds[1:] < bounds[:-1]).any():
        raise CorruptRecordError("the records of a range are not in the order of the log")
    base = int(bounds[0])
    span = int(bounds[-1]) - base
    if span > _INT32_MAX:
        raise ValueError(f"slices span {span} bytes; an Arrow array holds less than 2 GiB")
    bounds -= base
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), data.slice(base, span)]
    laid = pa.Array.from_buffers(kind, 2 * count - 1, buffers)
    if rows is None:
        indices = _every_second(count)
    else:
        indices = pa.array(np.maximum(rows, 0) * 2, mask=rows < 0)
    taken = laid.take(indices)
    return _as_utf8(taken) if pa.types.is_string(kind) else taken


@lru_cache(maxsize=4)
def _every_second(count: int) -> pa.Array:
    """Return 0, 2, 4, ...; cached, because nearly all batches have the same number of rows."""
    return pa.array(np.arange(0, 2 * count, 2, dtype=np.int64))


def _as_utf8(array: pa.Array) -> pa.Array:
    """Replace bytes that are not UTF-8 by U+FFFD; Spark would use them unchecked."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raw = array.view(pa.binary()).to_pylist()
        texts = [None if value is None else value.decode("utf-8", "replace") for value in raw]
        return pa.array(texts, pa.string())
    return array
