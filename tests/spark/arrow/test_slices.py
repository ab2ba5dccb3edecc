"""Slices of a buffer as an Arrow array, by either way, compared with Python's slices."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import CorruptRecordError
from hastore.spark.arrow.record_fields import list_values, slice_values

PIECES = st.tuples(st.integers(0, 5), st.integers(0, 9))  # a gap, and a size behind it
SAME = st.integers(0, 9).flatmap(
    lambda size: st.lists(st.tuples(st.integers(0, 5), st.just(size)), max_size=8)
)


@given(
    SAME | st.lists(PIECES, max_size=8), st.integers(0, 3), st.sampled_from([b"ab", b"\xff\x80"])
)
def test_slices_are_those_of_python_whether_or_not_their_sizes_are_equal(pieces, behind, letters):
    starts, ends, at = [], [], 0
    for gap, size in pieces:
        starts.append(at + gap)
        at += gap + size
        ends.append(at)
    data = (letters * (at + behind))[: at + behind]
    expected = [data[start:end] for start, end in zip(starts, ends, strict=True)]
    given_bounds = np.array(starts, np.int64), np.array(ends, np.int64)
    found = slice_values(pa.py_buffer(data), *given_bounds, pa.binary())
    found.validate(full=True)
    assert found.to_pylist() == expected
    assert list_values(found) == expected
    texts = slice_values(pa.py_buffer(data), *given_bounds, pa.string())
    texts.validate(full=True)
    assert texts.to_pylist() == [value.decode("utf-8", "replace") for value in expected]


def test_bytes_objects_keep_zeros_at_their_end():
    data = pa.py_buffer(b"\0\0a\0\0\0")
    found = slice_values(data, np.array([0, 3]), np.array([3, 6]), pa.binary())
    assert list_values(found) == [b"\0\0a", b"\0\0\0"]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_slices_that_overlap_are_refused(sizes):
    starts = np.array([0, 1])
    with pytest.raises(CorruptRecordError, match="order"):
        slice_values(pa.py_buffer(b"abcd"), starts, starts + sizes, pa.binary())
