"""What each record of a put gets back."""

from dataclasses import dataclass

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
