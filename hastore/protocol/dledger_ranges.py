"""Which numbers a message between the nodes of a DLedger group can have. Pure.

A link checks each message that it receives, and closes on an error (dledger_link.py). The core
ignores a message whose numbers are wrong. Both call `check_message`. Where the bytes of an append
lie is checked by the link alone.
"""

from hastore.errors import ProtocolError
from hastore.protocol.dledger import (
    NO_INDEX,
    NO_TERM,
    AppendRequest,
    CommitRequest,
    CompareRequest,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallRequest,
    Message,
    PushResponse,
    TruncateRequest,
    VoteRequest,
    VoteResponse,
)

TERM_MAX = (1 << 62) - 1  # a term has 8 bytes on the disk, signed
INDEX_MAX = (1 << 58) - 1  # an entry's index unit lies at 32 times its index
INT64_MAX = (1 << 63) - 1
MEMBERS_MAX = 1024


def check_message(message: Message) -> None:
    """Raise ProtocolError if a number is outside its range, or contradicts another."""
    check_range("term", message.term, 0, TERM_MAX)
    if isinstance(message, AppendRequest):
        _check_append(message)
    elif isinstance(message, PushResponse):
        _check_answer(message)
    elif isinstance(message, VoteRequest):
        check_range("term", message.term, 1, TERM_MAX)
        _check_index("ledger_end_index", message.ledger_end_index)
        check_range("ledger_end_term", message.ledger_end_term, NO_TERM, message.term)
    elif isinstance(message, VoteResponse):
        check_range("request_term", message.request_term, 0, TERM_MAX)
    elif isinstance(message, HeartBeatRequest):
        check_range("round", message.round, 1, INT64_MAX)
        _check_index("committed_index", message.committed_index)
    elif isinstance(message, HeartBeatResponse):
        check_range("round", message.round, 1, INT64_MAX)
    elif isinstance(message, CommitRequest):
        _check_index("committed_index", message.committed_index)
        _check_index("recall_index", message.recall_index)
    elif isinstance(message, CompareRequest):
        _check_index("index", message.index)
        check_range("index_term", message.index_term, NO_TERM, message.term)
    elif isinstance(message, TruncateRequest):
        check_range("index", message.index, 0, INDEX_MAX)
        check_range("prev_term", message.prev_term, NO_TERM, message.term)
        check_range("index_term", message.index_term, NO_TERM, message.term)
    elif isinstance(message, InstallRequest):
        check_range("index", message.index, 0, INDEX_MAX)
        check_range("pos", message.pos, 0, INT64_MAX)
        check_range("prev_term", message.prev_term, NO_TERM, message.term)
        _check_members(message.members)


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ProtocolError, which names the number, if it is outside `least`..`most`."""
    if not least <= value <= most:
        raise ProtocolError(f"{name} {value} is outside {least}..{most}")


def _check_index(name: str, index: int) -> None:
    check_range(name, index, NO_INDEX, INDEX_MAX)


def _check_append(request: AppendRequest) -> None:
    _check_index("prev_index", request.prev_index)
    _check_index("committed_index", request.committed_index)
    if not request.runs:
        raise ProtocolError("an append without entries")
    check_range("prev_term", request.prev_term, NO_TERM, request.term)
    last, entries = request.prev_term, 0
    for term, count in request.runs:
        check_range("count", count, 1, INDEX_MAX)
        rises = term > last if entries else term >= max(last, 0)
        if not rises or term > request.term:
            raise ProtocolError(
                f"an append of term {request.term} with entries of term {term} after {last}"
            )
        last, entries = term, entries + count
    check_range("index of the last entry", request.prev_index + entries, 0, INDEX_MAX)
    for index, members in request.members:
        check_range("index of a member list", index - request.prev_index, 1, entries)
        _check_members(members)


def _check_answer(response: PushResponse) -> None:
    _check_index("index", response.index)
    check_range("end_index", response.end_index, NO_INDEX, INDEX_MAX - 1)
    check_range("begin_index", response.begin_index, 0, response.end_index + 1)
    check_range("hint_term", response.hint_term, NO_TERM, TERM_MAX)
    _check_index("hint_index", response.hint_index)


def _check_members(members: tuple[int, ...]) -> None:
    check_range("number of members", len(members), 1, MEMBERS_MAX)
    for member in members:
        check_range("member", member, 1, 65_535)
    if len(set(members)) != len(members):
        raise ProtocolError("a member list names a node twice")
