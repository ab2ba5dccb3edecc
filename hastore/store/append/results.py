"""What an append is given and what it tells: payloads, guards, results, how far a producer came.

A payload is records as bytes, or read already as columns. Each record has one result.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, overload

import msgspec

from hastore.errors import Status
from hastore.record.layout import FLAG_INNER_BATCH, FLAG_NEED_UNWRAP

FLAGS_REFUSED = FLAG_INNER_BATCH | FLAG_NEED_UNWRAP  # no client may set these


class UniformBatch(msgspec.Struct, frozen=True, gc=False):
    """The records of a valid payload, as columns; `starts` are their offsets in the payload."""

    payload: bytes
    topic: bytes
    starts: list[int]
    queue_ids: list[int]
    producer: bytes | None
    sequences: list[int]  # empty without a producer


class BuiltBatch(UniformBatch, frozen=True, gc=False):
    """A uniform batch without a producer that this node itself has made of a client's request.

    Who makes it, has made the checks of `read_uniform_batch`, but for those that need the store's
    settings: the topic, and the greatest sizes. These are the sizes of its longest body and record.
    """

    longest_body: int
    longest_record: int

    def __len__(self) -> int:
        """Return the bytes of its records."""
        return len(self.payload)

    def is_allowed(self, topics: Set[bytes], max_body: int, max_record: int) -> bool:
        """Whether it passes the checks that were left; if not, PutValidator says why."""
        return (
            self.topic in topics
            and self.longest_body <= max_body
            and self.longest_record <= max_record
        )


Payload = bytes | BuiltBatch  # the records of a put

# Returns why records of a topic, with this HS_PID or None, are forbidden, or None.
Guard = Callable[[bytes, bytes | None], str | None]
Guards = Sequence[Guard | None]  # one for each payload of a put


def own_records(topic: bytes, producer: bytes | None) -> None:
    """Allow every record, also of the topics that no client may put to: the guard of own puts."""
    del topic, producer


def in_epoch(current: Callable[[], int], epoch: int) -> Callable[[], str | None]:
    """Return the `refusal` of a guard that holds while `current()` is this epoch."""
    return lambda: None if current() == epoch else "another epoch has begun"


class OwnIf:
    """The guard of the node's own records, while something is so, such as the node's epoch."""

    __slots__ = ("_refusal",)

    def __init__(self, refusal: Callable[[], str | None]) -> None:
        """Prepare; `refusal()` returns why nothing may be put any more. The log is locked then."""
        self._refusal = refusal

    def __call__(self, topic: bytes, producer: bytes | None) -> str | None:
        """Return why a record is forbidden, or None."""
        del topic, producer
        return self._refusal()


class DeliveriesIf(OwnIf):
    """The guard of delivered messages.

    They were accepted when they were put. So neither their topic's permission nor a setting that
    was changed since keeps them out.
    """

    __slots__ = ()


def is_own(guard: Guard | None) -> bool:
    """Whether a guard is that of the node's own puts."""
    return guard is own_records or isinstance(guard, OwnIf)


class ProducerProgress(NamedTuple):
    """How far a producer came; both numbers are None if it is not known.

    `last` is its greatest number in the log that the window holds. Numbers up to `forgotten` are
    not held any more. If only `last` is None, it is not known which of the numbers up to
    `forgotten` are stored.
    """

    last: int | None
    forgotten: int | None


@dataclass(slots=True)
class PutResult:
    """The result of one record; `offset` is None unless it is known to be in the log.

    A duplicate has the offsets of its original, and is confirmed when its original is. Its
    `queue_offset` and `store_timestamp_ms` are None if the original was removed or cannot be read.

    `status` is one of
        PUT_OK                       in the log
        MESSAGE_ILLEGAL,             invalid: not stored, and any master refuses it. A record whose
        PROPERTIES_SIZE_EXCEEDED     sequence number is older than the deduplication window is
                                     refused too, but may be in the log already
        FORBIDDEN                    the put's guard forbids its topic or its HS_PID: not stored
        SERVICE_NOT_AVAILABLE        not stored: the disk was full or failed. Other records of the
                                     same put are, or may be, stored (if nothing was appended, the
                                     put raises instead)
        TIMEOUT                      unknown: the write failed, and the bytes that it left in the
                                     file could not be cleared
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
    """The results of a uniform batch, as columns: every record is stored, none is a duplicate.

    As a sequence it makes a PutResult for each index.
    """

    __slots__ = (
        *("end_offset", "lead", "offsets", "queue_ids", "queue_offsets", "store_timestamp_ms"),
    )

    def __init__(
        self,
        offsets: list[int],
        end_offset: int,
        queue_ids: list[int],
        queue_offsets: list[int],
        store_timestamp_ms: int,
        lead: int = 0,
    ) -> None:
        """Keep the columns; `lead` bytes lie before each record."""
        self.lead = lead
        self.offsets = offsets
        self.end_offset = end_offset
        self.queue_ids = queue_ids
        self.queue_offsets = queue_offsets
        self.store_timestamp_ms = store_timestamp_ms

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, index: int) -> PutResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[PutResult]: ...

    def __getitem__(self, index: int | slice) -> PutResult | list[PutResult]:
        if isinstance(index, slice):
            return list(self)[index]
        index = range(len(self.offsets))[index]
        last = index + 1 == len(self.offsets)
        return PutResult(
            Status.PUT_OK,
            self.offsets[index],
            self.end_offset if last else self.offsets[index + 1] - self.lead,
            self.queue_ids[index],
            self.queue_offsets[index],
            self.store_timestamp_ms,
        )

    def __iter__(self) -> Iterator[PutResult]:
        return (self[index] for index in range(len(self.offsets)))


PutResults = Sequence[Sequence[PutResult]]  # of each payload, in the order of its records
