"""The inputs of a node of mode classic: what each lets the product's objects do."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hastore.errors import GroupDisagrees, HastoreError, PromotionRefused, ProtocolError
from hastore.ha.hello import answering
from hastore.ha.master.group_transfer import Need, Outcome
from hastore.ha.promoter import Flags
from hastore.protocol.hello import CopyFrom, Refused, StreamFrom
from tests.ha.simulation import Crash, SimConnection, SimNode, size_of

if TYPE_CHECKING:
    from tests.explore.classic_node import Bench

Input = tuple[Any, ...]


def take(bench: Bench, node: SimNode, event: Input) -> None:
    """Let a node take one input; errors that its threads would log end it."""
    try:
        globals()[f"_do_{event[0].replace(' ', '_')}"](bench, node, *event[1:])
    except GroupDisagrees as error:
        bench.notes.append(("disagrees", node.number, str(error)))
    except PromotionRefused as refused:
        if isinstance(refused.__cause__, GroupDisagrees):
            bench.notes.append(("disagrees", node.number, str(refused)))
    except (HastoreError, OSError):
        return


def _do_start(bench: Bench, node: SimNode) -> None:
    bench.crash_rate = 0.0  # no crash before it is up
    node.start()
    bench.crash_rate = 0.5


def _do_resume(bench: Bench, node: SimNode) -> None:
    node.resume()


def _do_hello(bench: Bench, node: SimNode, request: int, link: int) -> None:
    """Answer another node's HELLO."""
    hello = bench.steps.requests[request][1]
    said = node.member.hello(hello.purpose)
    connection = SimConnection(node, hello, link)
    answer = answering._decide(connection, hello)  # type: ignore[arg-type]
    if isinstance(answer, StreamFrom):
        bench.links[link] = connection
    if isinstance(answer, Refused) and "the group disagrees" in answer.reason:
        bench.notes.append(("disagrees", hello.node, answer.reason))
    pieces: list[bytes] = []
    if isinstance(answer, CopyFrom) and hello.copy_to > hello.copy_from:
        connection.sendall = pieces.append  # type: ignore[attr-defined]
        with contextlib.suppress(ProtocolError):  # it closes the link
            answering._copy(connection, hello)  # type: ignore[arg-type]
    bench.reply = bench.steps.reply_of(said, answer, tuple(pieces))


def _do_put(bench: Bench, node: SimNode, value: int) -> None:
    member, store, ha = node.member, node.store, node.ha
    assert ha is not None
    refused = ha.can_confirm(flushed=False)
    start = store.max_offset
    with member.gate.lock:
        epoch = member.open_epoch
        if not epoch or member.gate.epoch != epoch:
            return
        bench.notes.append(("put", value, epoch, start))
        store.append_replica(start, bytes([value]) * size_of(value))
        end = store.max_offset
        ha.on_append(start, end)

    def done(outcome: Outcome, level: str) -> None:
        if outcome is Outcome.CONFIRMED:
            bench.notes.append(("acked", value))

    if refused is None:  # else an asynchronous put
        node.transfer.add(end, float("inf"), Need.SLAVES, done)


def _do_flush(bench: Bench, node: SimNode) -> None:
    node.flush()


def _do_follow(bench: Bench, node: SimNode) -> None:
    node.end_stream()
    node.client._follow_once()


def _do_end(bench: Bench, node: SimNode) -> None:
    node.end_stream()


def _do_send(bench: Bench, node: SimNode, link: int, size: int, limits: bool) -> None:
    bench.out.append(("to slave", link, bench.links[link].next_frame(size, limits=limits)))


def _do_receive(bench: Bench, node: SimNode, frame: bytes) -> None:
    assert node.stream is not None
    try:
        node.stream._receive_bytes(memoryview(frame))
    except ProtocolError:
        node.end_stream()


def _do_report(bench: Bench, node: SimNode, link: int, data: bytes) -> None:
    bench.links[link].take_report(data)


def _do_break(bench: Bench, node: SimNode, link: int) -> None:
    bench.links[link].close("the network breaks")


def _do_promote(bench: Bench, node: SimNode, force: bool) -> None:
    node.promoting, node.replay_waits = True, []
    if force:
        bench.notes.append(("forced",))
    try:
        node.promoter.begin()
        flags = Flags(force_unclean=force)
        node.promoter.attempt(node.config, flags, before_promise=node.ask_for_promises)
    finally:
        node.promoting = False


def _do_demote(bench: Bench, node: SimNode) -> None:
    node.leave_office()


def _do_retain(bench: Bench, node: SimNode, begin: int) -> None:
    node.store.min_offset = begin


def _do_dies(bench: Bench, node: SimNode) -> None:
    raise Crash(node.number)


def _do_power(bench: Bench, node: SimNode, kept: int, confirmed: bool) -> None:
    """Lose power, and what was not synced from `kept` on, perhaps the confirmed offset too."""
    node.store._cut(kept)
    if not confirmed:
        node.store.confirmed_offset = 0
    node.files.boot += 1
    raise Crash(node.number)
