"""Which messages of a peer can be true at all. What is not is ignored: no answer, no change."""

from itertools import pairwise

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


def is_valid(message: Message) -> bool:
    """Whether the numbers of a message fit together."""
    if not 0 <= message.term <= TERM_MAX:
        return False
    if isinstance(message, AppendRequest):
        return _is_valid_append(message)
    if isinstance(message, PushResponse):
        return _is_valid_answer(message)
    if isinstance(message, VoteRequest):
        before = NO_TERM <= message.ledger_end_term <= message.term
        return before and _is_index(message.ledger_end_index) and message.term >= 1
    if isinstance(message, VoteResponse):
        return 0 <= message.request_term <= TERM_MAX
    if isinstance(message, HeartBeatRequest | HeartBeatResponse):
        return message.round >= 1
    if isinstance(message, CompareRequest):
        return _is_index(message.index) and NO_TERM <= message.index_term <= message.term
    if isinstance(message, TruncateRequest):
        terms = NO_TERM <= message.prev_term <= message.term
        return terms and 0 <= message.index <= INDEX_MAX and message.index_term <= message.term
    if isinstance(message, CommitRequest):
        return _is_index(message.committed_index) and _is_index(message.recall_index)
    if isinstance(message, InstallRequest):
        members = 0 < len(set(message.members)) == len(message.members)
        place = 0 <= message.index <= INDEX_MAX and message.pos >= 0
        return members and place and NO_TERM <= message.prev_term <= message.term
    return True


def _is_index(index: int) -> bool:
    return NO_INDEX <= index <= INDEX_MAX


def _is_valid_append(request: AppendRequest) -> bool:
    terms = [term for term, _ in request.runs]
    if not terms or not _is_index(request.prev_index) or not _is_index(request.committed_index):
        return False
    rising = all(one < other for one, other in pairwise(terms))
    between = NO_TERM <= request.prev_term <= terms[0] and terms[-1] <= request.term
    last = request.prev_index + sum(count for _, count in request.runs)
    inside = all(request.prev_index < index <= last for index, _ in request.members)
    lists = inside and all(members for _, members in request.members)
    counts = all(count >= 1 for _, count in request.runs)
    return rising and between and counts and lists and last <= INDEX_MAX


def _is_valid_answer(response: PushResponse) -> bool:
    log = 0 <= response.begin_index <= response.end_index + 1 <= INDEX_MAX
    hint = response.hint_term >= NO_TERM and response.hint_index >= NO_INDEX
    return log and hint and _is_index(response.index)
