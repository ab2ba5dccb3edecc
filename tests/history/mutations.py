"""Kinds of corrupted histories: each changes a healthy one in one way, and breaks a promise.

A mutation takes a `Copy` and a random generator. It raises `Unfit` if the history has nothing that
it could change.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from hastore.history.rules import events as e
from tests.history.healthy import SIZE, TOPIC

_Kind = TypeVar("_Kind", bound=e.Event)
_Item = TypeVar("_Item")
Mutation = Callable[["Copy", random.Random], None]
MUTATIONS: dict[str, tuple[str, Mutation]] = {}  # by name: the promise, and the change


class Unfit(Exception):  # noqa: N818 - it is no error
    """The history has nothing for this mutation."""


def breaks(promise: str) -> Callable[[Mutation], Mutation]:
    def note(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__] = promise, mutation
        return mutation

    return note


class Copy:
    """A history that may be changed."""

    def __init__(self, lines: Sequence[e.Event]) -> None:
        self.lines = copy.deepcopy(list(lines))

    def all(self, kind: type[_Kind]) -> list[_Kind]:
        return [one for one in self.lines if isinstance(one, kind)]

    @property
    def log(self) -> e.Log:
        return self.all(e.Log)[0]

    def drop(self, *events: e.Event) -> None:
        self.lines = [one for one in self.lines if not any(one is other for other in events)]

    def after(self, event: e.Event, *more: e.Event) -> None:
        at = next(n for n, one in enumerate(self.lines) if one is event) + 1
        self.lines[at:at] = more

    def acked(self) -> list[tuple[e.Send, e.Ok, e.Record]]:
        """The sends that two nodes acknowledged and that the log still has."""
        sends = {(one.client, one.op): one for one in self.all(e.Send)}
        records = {one.offset: one for one in self.all(e.Record)}
        return [
            (sends[ok.client, ok.op], ok, records[ok.offset])
            for ok in self.all(e.Ok)
            if ok.level.startswith("SYNC") and ok.offset in records
        ]

    def acked_digests(self) -> list[str]:
        """The messages that two nodes acknowledged, whether or not there is a log."""
        sends = {(one.client, one.op): one for one in self.all(e.Send)}
        return [
            sends[ok.client, ok.op].digest for ok in self.all(e.Ok) if ok.level.startswith("SYNC")
        ]

    def of_unknown(self) -> list[tuple[e.Send, e.Record]]:
        """The sends of unknown outcome that the log has."""
        ended = {(one.client, one.op) for one in self.all(e.Info)}
        records = {one.digest: one for one in self.all(e.Record)}
        return [
            (one, records[one.digest])
            for one in self.all(e.Send)
            if (one.client, one.op) in ended and one.digest in records
        ]

    def refused(self) -> list[e.Send]:
        ended = {(one.client, one.op) for one in self.all(e.Fail)}
        return [one for one in self.all(e.Send) if (one.client, one.op) in ended]

    def append(self, digest: str) -> None:
        """Append a record to the log, in the next place of a queue."""
        last = self.all(e.Record)[-1]
        places = [one.queue_offset for one in self.all(e.Record) if one.queue == 0]
        place = max(places, default=-1) + 1
        host = last.host
        record = e.Record(self.log.end, SIZE, TOPIC, 0, place, digest, host=host)
        self.log.end += SIZE
        self.after(last, record)

    def without_log(self) -> None:
        self.drop(*self.all(e.Log), *self.all(e.Record), *self.all(e.Rescued), *self.all(e.Range))

    def reads(self, client: str = "reader", least: int = 1) -> list[e.Read]:
        return [
            one for one in self.all(e.Read)
            if one.client == client and len(one.messages) >= least
        ]  # fmt: skip


def one_of(items: Sequence[_Item], rng: random.Random) -> _Item:
    if not items:
        raise Unfit
    return rng.choice(items)
