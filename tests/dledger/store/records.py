"""Records for entries that tests put together by hand."""

import zlib

from hastore.record.codec import Record, encode_record
from tests.store.kit import BORN, HOST


def record(offset: int, number: int, body: bytes = b"body " * 30) -> bytes:
    return encode_record(
        Record(
            body, "TopicA",
            queue_offset=number, properties=b"KEYS\x01key%d\x02" % number,
            physical_offset=offset, body_crc=zlib.crc32(body) & 0x7FFFFFFF,
            born_timestamp_ms=1_700_000_000_000, born_host=BORN,
            store_timestamp_ms=1_700_000_000_000 + number, store_host=HOST,
        )
    )  # fmt: skip
