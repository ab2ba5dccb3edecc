"""From a node's answer to the caller's Future: each entry is settled exactly once.

Settling ends Futures and tells nobody: `Ended` gathers those somebody waits for.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hastore.client.producer.futures import Outcome, result_of
from hastore.client.producer.window import Entry, Frame
from hastore.client.results import SendResult, Status, failure_of
from hastore.errors import HastoreError
from hastore.protocol.api import PutDone

Ended = deque[Outcome]  # and somebody is to be told of it
_PUT_OK = Status.PUT_OK  # an Enum's look-up is slow
_UNCONFIRMED = (Status.FLUSH_SLAVE_TIMEOUT, Status.FLUSH_DISK_TIMEOUT)


def settle_reply(
    frame: Frame, reply: PutDone, ended: Ended, *, retry_stored: bool
) -> list[Entry]:
    """Settle a frame's entries; return those that were stored, not confirmed, and go again."""
    again: list[Entry] = []
    place = 0
    if frame.count != len(reply.offsets):
        _settle_whole(frame, reply, ended)
        return again
    all_good = reply.statuses is None and reply.status is _PUT_OK
    for entry in frame.entries:
        begin, place = place, place + entry.count
        future = entry.future
        if future.done():
            continue
        if all_good:
            if future.settle(entry.topic, reply, begin, place if entry.is_batch else None):
                ended.append(future)
            continue
        results = [result_of(entry.topic, reply, each) for each in range(begin, place)]
        bad = next((r for r in results if r.status is not Status.PUT_OK), None)
        if bad is None:
            _succeed(entry, results, ended)
        elif bad.status in _UNCONFIRMED and retry_stored:
            entry.unknown = True
            entry.status, entry.reason, entry.result = bad.status, reply.reason, bad
            again.append(entry)
        else:
            refused = sum(1 for r in results if not r.status.is_stored)
            entry.reason = reply.reason
            if 0 < refused < len(results):
                entry.reason += f" ({refused} of {len(results)} refused, the others are stored)"
            entry.status = bad.status
            entry.result = bad if bad.status.is_stored else None
            settle_failure(entry, ended)
    return again


def _settle_whole(frame: Frame, reply: PutDone, ended: Ended) -> None:
    """Settle a frame whose answer does not list its records: all of them were refused."""
    statuses = set(reply.statuses or [reply.status])
    refused = len(statuses) == 1 and not next(iter(statuses)).is_stored
    for entry in frame.entries:
        entry.status = statuses.pop() if refused else Status.TIMEOUT
        statuses.add(entry.status)
        entry.reason = reply.reason if refused else "the node's answer does not fit the request"
        settle_failure(entry, ended)


def settle_unasked(entries: list[Entry], ended: Ended) -> None:
    """Settle what nobody will answer (`acks` 0): it was handed over, no more is known."""
    for entry in entries:
        results = [SendResult(Status.PUT_OK, entry.topic, 0) for _ in range(entry.count)]
        _succeed(entry, results, ended)


def give_up(entry: Entry, reason: str, ended: Ended) -> None:
    """End an entry; what never left this process is certainly not stored."""
    if entry.status is Status.TIMEOUT and not entry.unknown:
        entry.status = Status.SERVICE_NOT_AVAILABLE
    entry.reason = entry.reason or reason
    settle_failure(entry, ended)


def settle_failure(entry: Entry, ended: Ended) -> None:
    """End an entry with what was heard last."""
    if not entry.settled and entry.future.fail(_failure(entry)):
        ended.append(entry.future)


def _failure(entry: Entry) -> HastoreError:
    if entry.result is not None:  # stored for all that is known, only not confirmed
        reason = entry.reason or "not confirmed within the delivery timeout"
        return failure_of(entry.result.status, reason, entry.result, unknown=True)
    return failure_of(entry.status, entry.reason, None, unknown=entry.unknown)


def _succeed(entry: Entry, results: list[SendResult], ended: Ended) -> None:
    value: Any = results if entry.is_batch else results[0]
    if not entry.settled and entry.future.succeed(value):
        ended.append(entry.future)
