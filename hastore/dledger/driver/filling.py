"""What only the store knows of a push: where its entries lie, and how they fit into frames.

The core leaves `pos` and `size` 0. A data frame holds whole entries of one file, at most
`bytes_max` unless a single entry is larger, so a push may become several.
"""

from collections.abc import Iterator

import msgspec

from hastore.dledger.core.dispatcher import split_append
from hastore.dledger.store.entry_store import EntryStore
from hastore.protocol.dledger import AppendRequest, InstallRequest, Message
from hastore.protocol.dledger_link import DATA_BYTES_MAX


def log_bytes(store: EntryStore, first: int, last: int) -> int:
    """Return the bytes that the entries from `first` to `last` take, as far as they are here."""
    first = max(first, store.begin_index)
    last = min(last, store.end_index)
    return 0 if last < first else store.end_position(last) - store.position(first)


def filled(message: Message, store: EntryStore) -> Iterator[Message]:
    """Yield the message as it is sent; a push of entries perhaps in parts.

    Raises UsageError or StoreError if the store does not have the entries any more.
    """
    if isinstance(message, AppendRequest):
        yield from _filled_append(message, store)
    elif isinstance(message, InstallRequest):
        yield msgspec.structs.replace(message, pos=store.position(message.index))
    else:
        yield message


def _filled_append(request: AppendRequest, store: EntryStore) -> Iterator[AppendRequest]:
    file_size = store.messages.file_size
    rest: AppendRequest | None = request
    while rest is not None:
        first = rest.prev_index + 1
        count = sum([one[1] for one in rest.runs])
        pos = store.position(first)
        size = store.end_position(first + count - 1) - pos
        part, rest = rest, None
        if size > DATA_BYTES_MAX or pos // file_size != (pos + size - 1) // file_size:
            found = store.read(first, min(size, DATA_BYTES_MAX))
            size = found.size
            fits = found.last_index - first + 1
            if fits < count:
                part, rest = split_append(part, fits)
        yield AppendRequest(
            part.term, part.prev_index, part.prev_term, pos, size,
            part.runs, part.committed_index, part.members,
        )  # fmt: skip
