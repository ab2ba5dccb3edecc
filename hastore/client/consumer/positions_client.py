"""`Positions`: an administrator's client for the committed positions of all groups.

It converts them from and to RocketMQ's file, too. A broker keeps its positions in
`config/consumerOffset.json`, as TOPIC@GROUP -> queue -> offset. A queue offset means the same
message to a broker and to hastore, so a consumer goes on at the same message after the conversion.
The records in which a log keeps the positions are protocol/committed_positions.py.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence

import msgspec

from hastore.client.arguments import (
    MAX_INT32,
    MAX_INT64,
    check_clock,
    flag,
    integer,
    refusal,
    seconds,
    text,
)
from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.connections.calls import Blocking, ClientCall, Core
from hastore.client.connections.requester import Requester, Steps, expect
from hastore.client.consumer.consumer_core import (
    MAX_GROUP,
    ConsumerCore,
    Reading,
    ReadOptions,
    commit_parts,
    commit_positions,
)
from hastore.client.lifecycle import describe
from hastore.client.messages import Position
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ClientError, CorruptRecordError, UsageError
from hastore.protocol import api
from hastore.protocol.committed_positions import TAKEN_OVER, PositionMap, decode_commit
from hastore.record.topic_records import MAX_QUEUES

log = logging.getLogger(__name__)

Offsets = dict[int, int]  # queue -> the next queue offset
_TABLE = "offsetTable"
# RocketMQ writes numbers as keys, which is not JSON. The pattern matches whole strings too, so that
# nothing inside a string is changed.
# A string that does not end is matched to the end, or each quote in it would be tried in turn.
_NUMBER_KEY = re.compile(r'("(?:[^"\\]|\\.)*+"?)|([{,]\s*+)(\d++)(\s*+:)')
_names: msgspec.json.Decoder[tuple[api.Group, api.Name]] = msgspec.json.Decoder(
    tuple[api.Group, api.Name]
)


def parse_offsets(text: str) -> dict[tuple[str, str], Offsets]:
    """Return (group, topic) -> queue -> offset of RocketMQ's file; raises UsageError.

    Queues without a position (an offset below 0) are left out.
    """
    plain = _NUMBER_KEY.sub(lambda m: m[1] or f'{m[2]}"{m[3]}"{m[4]}', text)
    try:
        table = json.loads(plain)[_TABLE]
        entries = [(str(key), dict(queues)) for key, queues in table.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"this is not a consumerOffset.json of RocketMQ: {error!r}") from error
    found: dict[tuple[str, str], Offsets] = {}
    for key, queues in entries:
        topic, _, group = key.partition("@")
        try:
            _names.decode(json.dumps((group, topic)).encode())
            offsets = {int(queue): int(offset) for queue, offset in queues.items()}
        except (ValueError, TypeError, OverflowError, msgspec.ValidationError) as error:
            raise UsageError(f"consumerOffset.json, {key!r}: {error}") from error
        offsets = {queue: offset for queue, offset in sorted(offsets.items()) if offset >= 0}
        if offsets:
            found[group, topic] = offsets
    return found


def format_offsets(positions: Mapping[tuple[str, str], Offsets]) -> str:
    """Return the text of RocketMQ's file."""
    table = {f"{topic}@{group}": queues for (group, topic), queues in sorted(positions.items())}
    return json.dumps({_TABLE: table}, indent="\t")


def fit(offsets: Offsets, ranges: Mapping[int, tuple[int, int]]) -> Offsets:
    """Return the offsets, moved into each queue's range, as a broker would do.

    Queues that the log does not have are left out.
    """
    return {
        queue: min(max(offset, ranges[queue][0]), ranges[queue][1])
        for queue, offset in offsets.items()
        if queue in ranges
    }


class Positions(Blocking):
    """The positions of any group; used by one thread at a time."""

    _kind = "Positions"

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        timeout_s: float = 10.0,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect; raises UsageError for wrong arguments."""
        addresses = parse_bootstrap(bootstrap)
        check_clock("clock", clock)
        self._clock = clock
        self._timeout_s = seconds("timeout_s", timeout_s)
        core = Core(Requester(addresses, clock, security))
        super().__init__(core, describe(self._kind, addresses))

    @ClientCall
    def committed(self, group: str, topic: str) -> Steps[dict[int, Position]]:
        """Return a group's positions in a topic, from the master."""
        group, topic = text("group", group, MAX_GROUP), text("topic", topic)
        reply, _ = yield from self._requester.ask_master(
            lambda rid: api.Fetch(rid, group, topic), self._timeout_s
        )
        return expect(api.Positions, reply).positions

    @ClientCall
    def commit(
        self, group: str, topic: str, offsets: Offsets, *, allow_back: bool = False
    ) -> Steps[None]:
        """Commit positions, as durable as any message; raises what Producer.send_sync would.

        Without `allow_back`, a commit that would move a position back commits nothing and raises
        PositionBehindError. More than 1,000 queues are committed in parts: if one fails, those
        before it are committed.
        """
        back = flag("allow_back", allow_back)
        group, topic = text("group", group, MAX_GROUP), text("topic", topic)
        if not isinstance(offsets, Mapping) or not 1 <= len(offsets) <= MAX_QUEUES:
            raise refusal("offsets", offsets, f"a mapping of 1 to {MAX_QUEUES:,} queues")
        places = {
            integer("offsets", queue, 0, MAX_INT32): Position(
                integer(f"offsets[{queue!r}]", offset, 0, MAX_INT64)
            )
            for queue, offset in offsets.items()
        }
        deadline = self._requester.deadline(self._timeout_s)
        for part in commit_parts(places):
            left_s = self._requester.left_s(deadline)
            yield from commit_positions(
                self._requester, group, topic, part, left_s, part if back else ()
            )

    @ClientCall
    def all(self) -> Steps[dict[tuple[str, str], Offsets]]:
        """Return every group's positions in every topic, read from the topic of commits.

        Raises ClientError if that topic cannot be read. A record that a client has put there, and
        that is no commit, is logged and passed over, as nodes do.
        """
        reply, _ = yield from self._requester.ask_master(_ask_topics, self._timeout_s)
        queues = expect(api.Topics, reply).topics.get(api.POSITIONS_TOPIC, {})
        found = PositionMap(bounded=False)
        options = ReadOptions(
            start="earliest",
            on_lost="earliest",
            read_from="master",
            max_bytes=1024 * 1024,
            prefetch_bytes=2 * 1024 * 1024,
            timeout_s=self._timeout_s,
        )
        for queue, (_, end) in queues.items():
            reading = Reading(api.POSITIONS_TOPIC, None, (queue,), options)
            reader = ConsumerCore(self._requester, self._clock, reading)
            while (yield from reader.position(queue)).queue_offset < end:
                messages = yield from reader.poll(500, self._timeout_s)
                if not messages:
                    raise ClientError(f"{api.POSITIONS_TOPIC} cannot be read up to {end}")
                for message in messages:
                    _note(found, message.body, message.offset)
        return {
            pair: {queue: place.queue_offset for queue, place in sorted(places.items())}
            for pair, places in found.entries.items()
            if pair[0] != TAKEN_OVER
        }


def _note(found: PositionMap, body: bytes, offset: int) -> None:
    try:
        commit = decode_commit(body)
    except CorruptRecordError as failure:
        log.warning("no commit at offset %d: %s", offset, failure)
        return
    found.apply_commit(commit, offset)


def _ask_topics(rid: int) -> api.Request:
    return api.AskTopics(rid, api.POSITIONS_TOPIC)
