"""What each record of a put gets back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from hastore.errors import Status

# One enum all the way to the user. Of a record: PUT_OK, MESSAGE_ILLEGAL,
# PROPERTIES_SIZE_EXCEEDED, SERVICE_NOT_AVAILABLE when the disk filled up or failed within a put,
# or TIMEOUT when it may be stored: the write failed, and so did its clearing.


@dataclass(slots=True)
class PutResult:
    """One record's result; offsets are None when it is not in the log.

    A duplicate has the place of its original, and is as good as that: confirmed when that is. Its
    `queue_offset` and `store_timestamp_ms` are None when retention has taken the original.
    """

    status: Status
    offset: int | None = None
    end_offset: int | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    store_timestamp_ms: int | None = None
    duplicate: bool = False
    reason: str | None = None


class UniformResults(Sequence[PutResult]):
    """The results of a run, all of it stored, none a duplicate; as columns, or one by one."""

    __slots__ = ("end_offset", "offsets", "queue_ids", "queue_offsets", "store_timestamp_ms")

    def __init__(
        self,
        offsets: list[int],
        end_offset: int,
        queue_ids: list[int],
        queue_offsets: list[int],
        store_timestamp_ms: int,
    ) -> None:
        self.offsets = offsets
        self.end_offset = end_offset
        self.queue_ids = queue_ids
        self.queue_offsets = queue_offsets
        self.store_timestamp_ms = store_timestamp_ms

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, place: int) -> PutResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[PutResult]: ...

    def __getitem__(self, place: int | slice) -> PutResult | list[PutResult]:
        if isinstance(place, slice):
            return list(self)[place]
        place = range(len(self.offsets))[place]
        last = place + 1 == len(self.offsets)
        return PutResult(
            Status.PUT_OK,
            self.offsets[place],
            self.end_offset if last else self.offsets[place + 1],
            self.queue_ids[place],
            self.queue_offsets[place],
            self.store_timestamp_ms,
        )

    def __iter__(self) -> Iterator[PutResult]:
        return (self[place] for place in range(len(self.offsets)))
