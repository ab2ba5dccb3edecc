"""Record what producers saw, for a test that waits for it; judge it by hastore's own checker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import hastore.history
from hastore.history.rules import events as e
from hastore.history.rules.checker import Checker
from tests.process.stores import Found

ACKED, UNKNOWN, REFUSED = "acked", "unknown", "refused"
_OUTCOMES = {e.Ok: ACKED, e.Info: UNKNOWN, e.Fail: REFUSED}
_LEFT_OPEN = ("OutcomeUnknown", "DurabilityError", "FlushDiskTimeout", "FlushSlaveTimeout")


@dataclass(slots=True)
class Put:
    """One send; times in ns of the monotonic clock; `outcome` is None until there is an answer."""

    began_ns: int
    ended_ns: int | None = None
    outcome: str | None = None
    level: str = ""

    @property
    def durable(self) -> bool:
        """Whether the reply states more than one copy, so that no single failure may lose it."""
        return self.outcome == ACKED and self.level.startswith(("SYNC", "QUORUM"))


class Recorder(hastore.history.Recorder):
    """A history in memory, of which a test asks how far it is. Thread-safe."""

    def __init__(self) -> None:
        self.events: list[e.Event] = []
        self.puts: list[Put] = []
        self.read = 0  # messages
        self._open: dict[tuple[str, int], Put] = {}
        self._producers: dict[Any, hastore.history.RecordedProducer] = {}
        super().__init__(sink=self._note)

    def send(self, producer: Any, topic: str, body: bytes, key: str | None = None) -> Future[Any]:
        """Send and record a message; exceptions of `send` are recorded and raised."""
        recorded = self._producers.get(producer)
        if recorded is None:
            recorded = self._producers[producer] = self.producer(producer)
        return recorded.send(topic, body, key=key)

    def _note(self, event: e.Event) -> None:
        """Keep an event; the recorder's lock is held."""
        self.events.append(event)
        if isinstance(event, e.Send):
            put = self._open[event.client, event.op] = Put(event.t)
            self.puts.append(put)
        elif isinstance(event, e.Read):
            self.read += len(event.messages)
        elif isinstance(event, e.Ok | e.Info | e.Fail):
            put = self._open.pop((event.client, event.op))
            put.level = event.level if isinstance(event, e.Ok) else ""
            put.outcome, put.ended_ns = _OUTCOMES[type(event)], event.t

    def count(self, outcome: str) -> int:
        """Return the number of puts with this outcome."""
        with self._lock:
            return sum(put.outcome == outcome for put in self.puts)

    def acked_since(self, began_ns: int) -> bool:
        """Return whether a put that began at `began_ns` or later is acknowledged durably."""
        return self.first_ack_ns(began_ns) is not None

    def first_ack_ns(self, began_ns: int) -> int | None:
        """Return the time of the first durable acknowledgement of a put begun since `began_ns`."""
        first: int | None = None
        with self._lock:
            for put in reversed(self.puts):
                if put.began_ns < began_ns:
                    break
                if put.durable and put.ended_ns is not None:
                    first = put.ended_ns if first is None else min(first, put.ended_ns)
        return first


def check(
    events: Iterable[e.Event],
    records: Sequence[Found],
    *,
    rescued: Iterable[Found] = (),
    epochs: Sequence[tuple[int, int, int]] = (),
) -> list[str]:
    """Return the violations; an empty list if the log's records explain the history.

    `rescued`: records that were cut off and archived, which a master may have acknowledged alone.
    `epochs`: (epoch, start offset, api port of its node), ascending. Each send must have ended, and
    reads were of a synchronous master.
    """
    events = [one for one in events if not isinstance(one, e.Header)]
    records = [found for found in records if not found.topic.startswith("HASTORE_")]
    topics = {one.topic for one in events if isinstance(one, e.Send)}
    checker = Checker()
    checker.begin(e.Header(topics=sorted(topics | {found.topic for found in records})))
    events += [e.Epoch(epoch, start, host=str(port)) for epoch, start, port in epochs]
    end = max((found.offset + found.size for found in records), default=0)
    events.append(e.Log(0, end, archives=True))
    events += map(_record, records)
    events += [e.Rescued(found.offset, _digest(found)) for found in rescued]
    last = max((one.t for one in events if isinstance(one, e.Ok | e.Info | e.Fail)), default=0)
    clients = {one.client for one in events if isinstance(one, e.Send)}
    events += [e.Closed(client, last) for client in sorted(clients)]
    for line, event in enumerate(events, 1):
        checker.feed(event, line)  # type: ignore[arg-type]
    wrong = list(map(str, checker.finish().findings))
    for one in events:
        if isinstance(one, e.Info) and not one.error.startswith(_LEFT_OPEN):
            wrong.append(f"a send ended by {one.error}")
    return wrong


def _record(found: Found) -> e.Record:
    number = found.properties.get("HS_SEQ")
    return e.Record(
        found.offset, found.size, found.topic, found.queue_id, found.queue_offset, _digest(found),
        found.properties.get("HS_PID"), None if number is None else int(number),
        str(found.store_port),
    )  # fmt: skip


def _digest(found: Found) -> str:
    return e.digest_of(found.topic, found.properties.get("KEYS"), found.body)
