"""What an append is given: records as bytes, or read already as columns."""

from collections.abc import Set

import msgspec

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
