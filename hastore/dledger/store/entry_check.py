"""Check the entries that a leader sent before any of them is appended."""

from hastore.errors import CorruptRecordError, ProtocolError
from hastore.protocol.dledger import AppendRequest
from hastore.record.log_format import (
    ENTRY_BLANK,
    ENTRY_HEADER,
    ENTRY_HEADER_BYTES,
    MAX_ENTRY_BYTES,
    Body,
    EntryHeader,
    Lists,
    body_of,
    follows,
    members_in,
    pack_unit,
    read_header,
)
from hastore.store.entry_message_store import NewEntries

_BULK_MIN = 16  # entries; fewer are faster checked one by one


def check_taken(
    request: AppendRequest, data: memoryview, skip: int, file_size: int
) -> tuple[int, NewEntries]:
    """Return where the entries after the first `skip` begin in `data`, and their index units.

    Every entry of the request is checked: magic, size, index, term (against `request.runs`), place,
    file; and those after the first `skip` with their CRCs, and their records' CRCs. Whether the
    first of these continues this log is left to the caller. Raises ProtocolError.
    """
    if len(data) != request.size:
        raise ProtocolError(f"{len(data)} bytes of entries, but {request.size} were announced")
    room = file_size - request.pos % file_size - ENTRY_BLANK.size
    if len(data) > room:
        raise ProtocolError(f"{len(data)} bytes of entries do not fit the file at {request.pos}")
    fast = _alike(request, data, skip)
    if fast is not None:
        return fast
    units: list[bytes] = []
    at, index, begin = 0, request.prev_index + 1, 0
    term, before = request.prev_term, None
    taken: list[tuple[int, int]] = []
    lists: list[tuple[int, Lists]] = []
    for run_term, count in request.runs:
        if run_term < term or count < 1 or run_term > request.term:
            raise ProtocolError(f"runs {request.runs} do not continue term {request.prev_term}")
        term = run_term
        for _ in range(count):
            new = index > request.prev_index + skip
            header = _checked(data, at, request.pos + at, index, term)
            if new:
                members = _check_body(data, at, header, before)
                before = header.body_crc
                if members is not None:
                    lists.append((index, members))
                units.append(pack_unit(index, term, header.pos, header.size))
            at += header.size
            index += 1
            if not new:
                begin = at
        fresh = min(count, index - 1 - request.prev_index - skip)
        if fresh > 0:
            taken.append((term, fresh))
    if at != len(data):
        raise ProtocolError(f"{len(data) - at} bytes follow the last entry of a request")
    announced = [one for one in request.member_sets() if one[0] > request.prev_index + skip]
    if lists != announced:
        raise ProtocolError(f"the entries have the member lists {lists}, not {announced}")
    return begin, NewEntries(b"".join(units), tuple(taken), before)


def _alike(request: AppendRequest, data: memoryview, skip: int) -> tuple[int, NewEntries] | None:
    """Check many entries that are alike at once; None if they are few, not alike, or invalid."""
    counts = [number for _, number in request.runs]
    terms = [request.prev_term, *(term for term, _ in request.runs), request.term]
    if (
        sum(counts) < _BULK_MIN
        or min(counts) < 1
        or terms != sorted(terms)
        or request.members
        or not 0 <= skip <= sum(counts)
    ):
        return None
    from hastore.dledger.store.entry_bulk_check import units_of  # loads numpy

    found = units_of(request, data, skip)
    if found is None:
        return None
    runs: list[tuple[int, int]] = []
    for term, count in request.runs:
        known = min(skip, count)
        skip -= known
        if count > known:
            runs.append((term, count - known))
    return found[0], NewEntries(found[1], tuple(runs), found[2] if runs else None)


def _checked(data: memoryview, at: int, pos: int, index: int, term: int) -> EntryHeader:
    header = read_header(data, at, len(data), pos)
    if header is None:
        raw = bytes(data[at : at + ENTRY_HEADER_BYTES])
        found = ENTRY_HEADER.unpack(raw) if len(raw) == ENTRY_HEADER_BYTES else raw
        raise ProtocolError(f"no whole entry for {pos}: {found!r}")
    if (header.index, header.term) != (index, term) or header.size > MAX_ENTRY_BYTES:
        raise ProtocolError(
            f"entry {header.index} of term {header.term} with {header.size} bytes at {pos}, where"
            f" entry {index} of term {term} belongs"
        )
    return header


def _check_body(data: memoryview, at: int, header: EntryHeader, before: int | None) -> Lists | None:
    """Check the CRCs and the record of a sound entry; return its member list, if it holds one."""
    if body_of(data, at, header.size, header.pos) is not Body.RECORD:
        raise ProtocolError(
            f"entry {header.index} at {header.pos} came damaged, or the record in it; it is not"
            " taken, and is fetched again. If that repeats, it is damaged in the leader's log: let"
            " another node lead (`hastore dledger transfer`), then replace the old leader's store"
        )
    check_chain(header, before)
    try:
        return members_in(data[at + ENTRY_HEADER_BYTES : at + header.size])
    except CorruptRecordError as failure:
        raise ProtocolError(f"entry {header.index} at {header.pos}: {failure}") from failure


def check_chain(header: EntryHeader, before: int | None) -> None:
    """Check that an entry follows one with bodyCrc `before`; None: not known. ProtocolError."""
    if not follows(header.chain_crc, before):
        raise ProtocolError(
            f"entry {header.index} at {header.pos} has the chainCrc {header.chain_crc}, but entry"
            f" {header.index - 1} has the bodyCrc {before}: that entry is damaged, here or in the"
            " leader's log; `hastore log verify` says which. Replace that node's store"
        )
