"""Ask all other nodes of the group in parallel, for their state (a survey) or for promises."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hastore.errors import HastoreError, ProtocolError
from hastore.ha.hello.peer import call
from hastore.ha.node.member import Member
from hastore.protocol.hello import Answer, Hello, Purpose

CALL_TIMEOUT_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class SurveyReply:
    """One node's reply: its HELLO and answer, or why there is none."""

    node: int
    address: str
    hello: Hello | None = None
    answer: Answer | None = None
    problem: str | None = None


def ask_all(
    member: Member,
    purpose: Purpose,
    *,
    skip: frozenset[int] = frozenset(),
    timeout_ms: float = CALL_TIMEOUT_MS,
    **extra: Any,
) -> list[SurveyReply]:
    """Call every other node except those in `skip`, in parallel; return their replies.

    This takes at most about `timeout_ms`. `extra` are further fields of the HELLO.
    """
    peers = [(node, address) for node, address in member.peers if node not in skip]
    if not peers:
        return []

    def ask(peer: tuple[int, str]) -> SurveyReply:
        return ask_one(member, peer[0], peer[1], purpose, timeout_ms=timeout_ms, **extra)

    with ThreadPoolExecutor(len(peers), thread_name_prefix=f"Survey-{purpose.value}") as pool:
        return list(pool.map(ask, peers))


def ask_one(
    member: Member, node: int, address: str, purpose: Purpose, *, timeout_ms: float, **extra: Any
) -> SurveyReply:
    """Call one node and close the connection. A failure is returned as the reply's `problem`."""
    try:
        opened = call(
            address,
            member.hello(purpose, **extra),
            member.secret,
            member.clock,
            timeout_ms,
            member.tls,
        )
        opened.close()
        check_peer(member, opened.hello, node, address)
    except (HastoreError, OSError) as error:
        return SurveyReply(node, address, problem=str(error) or type(error).__name__)
    return SurveyReply(node, address, opened.hello, opened.answer)


def check_peer(member: Member, hello: Hello, node: int, address: str) -> None:
    """Raise ProtocolError when another node answers at this address, or the peer is no member.

    A peer with a known number and another store is no member: its promises were lost with its disk.
    """
    if hello.node != node:
        raise ProtocolError(
            f"node {hello.node} answers at {address}, which `nodes` gives to node {node}; "
            "correct `nodes`"
        )
    problem = member.identity_problem(hello)
    if problem is not None:
        raise ProtocolError(f"{address}: {problem}")
