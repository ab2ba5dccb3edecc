"""Read a range of one queue in bulk, as raw records, from whichever replica has it.

Pulls of about PULL_BYTES follow each other on one connection. The next one is sent before the
last one is read: its first queue offset is known, because each pull states how many messages it
wants. A replica is left for another if it is gone, says nothing for some seconds, lags, has lost
the position, or holds damaged records. The reader then goes on behind the last record that it has
handed out, so no record is left out or repeated.

Each pull names the last record that was received when it was sent, as (epoch, offset). So a node
refuses it if a failover has cut that record away. Two replies with records of different epochs are
compared once more, because the first may have been cut away while the second was under way.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hastore.client.connections.bulk_link import BulkLink
from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.cluster_groups import GroupNodes
from hastore.client.connections.proving import make_prover
from hastore.client.connections.requester import Requester
from hastore.client.messages import Position
from hastore.client.security import Security, SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import (
    CorruptRecordError,
    ForbiddenError,
    NotAuthenticatedError,
    PositionLostError,
    UnreachableError,
)
from hastore.protocol import api

log = logging.getLogger(__name__)

PULL_BYTES = 2 * 1024 * 1024
IN_FLIGHT = 2  # pulls; the node refuses a client that leaves 8 MiB unread
ANSWER_S = 3.0  # a replica that sends nothing for so long is left; doubled when all were left
ANSWER_S_MAX = 24.0
GIVE_UP_S = 60.0  # without a record from any replica, unless the caller says otherwise
WARN_S = 30.0  # then the log says that the reader waits
SURVEY_S = 2.0
SURVEY_AGAIN_S = 1.0  # so long the ranges that follow need no survey of their own
PAUSE_S = 0.05  # when no replica has the next record; doubled up to PAUSE_S_MAX
PAUSE_S_MAX = 1.0


class Chunk(NamedTuple):
    """The records of one reply, one after the other, as they are in the log.

    `payload` is overwritten when the next chunk is asked for. `sizes` has 4 bytes big-endian for
    each record; it is empty if the node is too old to send them. `epochs` are the (epoch, start)
    entries of the node's history from the first record on.
    """

    payload: memoryview
    sizes: bytes
    epochs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    rid: int
    start: int  # queue offsets
    stop: int
    behind: Position  # the position that was known when it was sent


class Surveys:
    """The last survey of a group's nodes, for one thread that reads many ranges, one by one.

    Reading a range goes on for minutes after its own survey, so one of a moment ago serves the
    next range, too: what has changed since is noticed in the same way.
    """

    def __init__(self) -> None:
        """Begin without one."""
        self._last: ClusterView | None = None
        self._until_ms = float("-inf")

    def put(self, found: ClusterView, now_ms: float) -> None:
        """Keep what a survey has found."""
        self._last, self._until_ms = found, now_ms + SURVEY_AGAIN_S * 1000.0

    def take(self, now_ms: float) -> ClusterView | None:
        """Return the last survey; None if there is none of a moment ago."""
        return self._last if now_ms < self._until_ms else None


def unheard_text(absent: Mapping[str, str], waited_s: float) -> str:
    """Return what to add to a text about removed messages; "" if no node is absent.

    `absent` is as `ClusterView.absent` returns it.
    """
    if not absent:
        return ""
    return f"; {', '.join(_said_of(absent))} within {waited_s:g} s, and may have them"


def _said_of(absent: Mapping[str, str]) -> list[str]:
    return [f"{address} {what}" for address, what in absent.items()]


class _Leave(Exception):
    """Go to another replica."""


class RangeReader:
    """The messages [start, end) of a queue; used by one thread, for one pass."""

    def __init__(
        self,
        bootstrap: tuple[str, ...],
        topic: str,
        queue_id: int,
        start: int,
        end: int,
        *,
        before: tuple[int | None, int] | None = None,
        skip_lost: bool = False,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
        wanted: api.Filter | None = None,
        give_up_s: float | None = None,
        nodes: GroupNodes | None = None,
        surveys: Surveys | None = None,
    ) -> None:
        """Prepare; opens no connection. Raises UsageError or ConfigError for `security`.

        `before` is the (epoch, offset) of the record before `start`: if a failover has cut that
        record away, the position is lost. With `skip_lost`, messages that no replica has any more
        are left out. With `wanted` chunks have only the records that match. `give_up_s` is how long
        to wait for the next record of any replica; GIVE_UP_S without it. `nodes` are those
        of a group of a cluster: no others are used, and they are followed to other addresses.
        With `surveys` the first replica may be chosen by the survey of the range before.
        """
        self._surveys = surveys
        self._is_first = True
        self._give_up_s = GIVE_UP_S if give_up_s is None else give_up_s
        self._warn_ms = float("inf")
        self._wanted = wanted
        self._bootstrap = bootstrap
        self._nodes = nodes
        self._prover = make_prover(security)
        self._topic = topic
        self._queue_id = queue_id
        self._next = Position(start, *(before or ()))
        self._end = end
        self._skip_lost = skip_lost
        self._clock = clock
        self._rid = 0
        self._many = min(end - start, api.MAX_PULL_MESSAGES)  # messages of one pull
        self._in_flight = 1  # until the size of the records is known
        self._refused: CorruptRecordError | None = None
        # Since the last record that was handed out:
        self._left: dict[str, str] = {}  # why a replica was left, by address
        self._verdicts: dict[str, PositionLostError | CorruptRecordError] = {}
        self._resume: dict[str, int] = {}  # the first queue offset that a replica still has
        self._certain: PositionLostError | None = None  # no other replica needs to be asked
        self._masters: list[str] = []
        self._absent: dict[str, str] = {}  # nodes that cannot be asked, and what they did not do
        self._given_up: set[str] = set()  # those of them that were waited for in vain
        self._answer_s = ANSWER_S
        self._pause_s = PAUSE_S
        self._deadline_ms = 0.0
        self.source: str | None = None  # the replica that is being read

    def chunks(self) -> Generator[Chunk]:
        """Yield the records of the range in order; the first and last may lie outside of it.

        If the caller finds damage in a chunk, it calls `refuse` before it asks for the next one.

        Raises PositionLostError or CorruptRecordError if that is what every replica says of the
        next record, UnreachableError if no replica sends it within `give_up_s`. A record that is
        damaged or removed elsewhere may come from a node that is down now, or that does not follow
        the latest master yet. So such a node has `give_up_s`, too, but only once in a range. What
        is left out then is a warning in the log.
        """
        self._begin_to_wait()
        while self._next.queue_offset < self._end:
            address = self._choose()
            if address is None:
                return
            try:
                with contextlib.closing(BulkLink(address, self._answer_s, self._prover)) as link:
                    self.source = address
                    yield from self._read(link)
            except (_Leave, UnreachableError, NotAuthenticatedError) as why:
                self._left[address] = str(why)

    def refuse(self, damage: CorruptRecordError) -> None:
        """Say that the last chunk is damaged; it is read again from another replica."""
        self._refused = damage

    # -- which replica

    def _choose(self) -> str | None:
        """Return a replica to read from; None if the rest of the range is lost and may be.

        Slaves come first. Readers of different ranges begin with different slaves. Of nodes with
        different epochs only those of the latest are asked: another one may have records that a
        failover has cut away elsewhere.
        """
        while True:
            if self._certain is not None:
                if self._skip_lost:
                    self._warn_of_loss(self._end, str(self._certain))
                    return None
                raise self._certain
            heard, why = self._survey()
            fresh = [address for address in heard if address not in self._left]
            if fresh:
                return fresh[0]
            is_over = self._clock.monotonic_ms() >= self._deadline_ms
            is_told = bool(heard) and all(address in self._verdicts for address in heard)
            if is_told and (is_over or not self._may_others_have_it()):
                if not self._may_skip(heard):
                    return None
                continue
            if is_over:
                raise UnreachableError(self._no_answer(why))
            self._pause()
            self._warn(why)
            if self._left:
                self._answer_s = min(2.0 * self._answer_s, ANSWER_S_MAX)
            self._left.clear()
            self._verdicts.clear()

    def _survey(self) -> tuple[list[str], str]:
        """Return the nodes that can be asked, and why there are none."""
        of_group = None
        if self._nodes is not None:
            of_group, self._bootstrap = self._nodes.names, self._nodes.addresses()
        prover = self._prover or Security()
        cluster = self._survey_before()
        if cluster is None:
            requester = Requester(self._bootstrap, self._clock, prover, of_group=of_group)
            try:
                requester.run_steps(requester.survey(SURVEY_S))
            except UnreachableError as failure:
                return [], str(failure)
            finally:
                requester.close()
            cluster = requester.cluster
            if self._surveys is not None:
                self._surveys.put(cluster, self._clock.monotonic_ms())
        maps = cluster.maps
        epoch = max(info.epoch for info in maps.values())
        current = [address for address in sorted(maps) if maps[address].epoch == epoch]
        slaves = [address for address in current if not maps[address].writable]
        mark = zlib.crc32(f"{self._topic} {self._queue_id} {self._next.queue_offset}".encode())
        turn = mark % max(1, len(slaves))
        masters = [address for address in current if maps[address].writable]
        self._masters = masters
        self._absent = cluster.absent()
        self._given_up &= self._absent.keys()
        return slaves[turn:] + slaves[:turn] + masters, ""

    def _survey_before(self) -> ClusterView | None:
        """Return the survey of the range before, once: what comes of it may call for another."""
        is_first, self._is_first = self._is_first, False
        if self._surveys is None or not is_first:
            return None
        return self._surveys.take(self._clock.monotonic_ms())

    def _may_others_have_it(self) -> bool:
        """Whether a node that could not be asked may have the next record."""
        return not self._given_up.issuperset(self._absent)

    def _may_skip(self, heard: list[str]) -> bool:
        """Go on behind lost messages, if that is allowed; False if nothing of the range is left.

        Raises what the replicas say of the next record.
        """
        self._given_up = set(self._absent)
        unheard = unheard_text(self._absent, self._give_up_s)
        for address in heard:
            verdict = self._verdicts[address]
            if isinstance(verdict, CorruptRecordError):
                raise verdict
            if not self._skip_lost and address == heard[-1]:
                raise PositionLostError(
                    f"{verdict}{unheard}", verdict.queue_id, verdict.common, verdict.topic
                )
        resume = min(self._resume.get(address, self._end) for address in heard)
        kept = ", ".join(f"{one} begins at {self._resume.get(one, self._end)}" for one in heard)
        self._warn_of_loss(min(resume, self._end), kept + unheard)
        if not self._next.queue_offset < resume < self._end:
            return False
        self._progress(Position(resume))
        return True

    def _warn_of_loss(self, end: int, why: str) -> None:
        log.warning(
            "messages [%d, %d) of queue %d of %r are left out: %s",
            self._next.queue_offset, end, self._queue_id, self._topic, why,
        )  # fmt: skip

    def _pause(self) -> None:
        threading.Event().wait(self._pause_s)
        self._pause_s = min(2.0 * self._pause_s, PAUSE_S_MAX)

    def _begin_to_wait(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._deadline_ms = now_ms + self._give_up_s * 1000.0
        self._warn_ms = now_ms + WARN_S * 1000.0

    def _warn(self, why: str) -> None:
        """Say once that the reader waits: the wait may be long."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._warn_ms:
            return
        self._warn_ms = float("inf")
        log.warning(
            "no node sent queue %d of %r from offset %d for %g s; waiting %.0f s more: %s",
            self._queue_id, self._topic, self._next.queue_offset, WARN_S,
            max(0.0, self._deadline_ms - now_ms) / 1000.0, self._reasons(why),
        )  # fmt: skip

    def _reasons(self, why: str) -> str:
        """Return why no node sends the next record, and which ones do not say."""
        return "; ".join([*self._left.values(), *_said_of(self._absent)]) or why

    def _no_answer(self, why: str) -> str:
        return (
            f"no node of {', '.join(self._bootstrap)} sent queue {self._queue_id} of "
            f"{self._topic!r} from offset {self._next.queue_offset} within {self._give_up_s:g} s: "
            + self._reasons(why)
        )

    # -- one replica

    def _read(self, link: BulkLink) -> Iterator[Chunk]:
        flight: deque[_Asked] = deque()
        at = self._next.queue_offset
        while self._next.queue_offset < self._end:
            while at < self._end and len(flight) < self._in_flight:
                flight.append(self._ask(link, at))
                at = flight[-1].stop
            asked = flight.popleft()
            reply, payload = link.receive()
            if reply.rid != asked.rid:
                raise _Leave(f"{link.address} answered another request")
            if not isinstance(reply, api.Pulled):
                self._failed(link, reply)  # returns if the node is busy
            elif reply.status is api.PullStatus.NO_MATCH:
                self._pass_by(link, reply)
            elif reply.status is not api.PullStatus.FOUND:
                self._found_nothing(link, reply)
            elif self._follows(reply, asked):
                yield from self._hand_out(link, reply, payload)
                if self._next.queue_offset == asked.stop:
                    continue
                if self._next.queue_offset > asked.stop:
                    self._in_flight = 1  # messages per record, or gaps: no place can be foreseen
            for _ in range(len(flight)):  # they begin at a wrong place
                link.receive()
            flight.clear()
            at = self._next.queue_offset

    def _ask(self, link: BulkLink, at: int) -> _Asked:
        self._rid += 1
        stop = min(at + self._many, self._end)
        behind = self._next
        known = self._in_flight > 1
        place = api.Position(at, behind.epoch, behind.offset)
        link.send(
            api.Pull(
                self._rid,
                self._topic,
                self._queue_id,
                place,
                stop - at,
                api.MAX_FRAME_BYTES if known else PULL_BYTES,
                bulk=True,
                filter=self._wanted,
            )  # fmt: skip
        )
        return _Asked(self._rid, at, stop, behind)

    def _follows(self, reply: api.Pulled, asked: _Asked) -> bool:
        """Whether the reply's records certainly follow the last ones; if not, ask once more."""
        return (
            asked.behind == self._next
            or bool(reply.epochs)
            and reply.epochs[0][0] == self._next.epoch
        )

    def _hand_out(self, link: BulkLink, reply: api.Pulled, payload: memoryview) -> Iterator[Chunk]:
        following = reply.next_queue_offset
        if not payload or not reply.count or following <= self._next.queue_offset:
            raise _Leave(f"{link.address} sent a reply without records")
        after = reply.after
        yield Chunk(payload, reply.sizes, tuple(reply.epochs))
        if self._refused is not None:
            damage, self._refused = self._refused, None
            self._verdicts[link.address] = damage
            raise _Leave(f"{link.address} sent damaged records")
        self._many = max(1, min(PULL_BYTES * reply.count // len(payload), api.MAX_PULL_MESSAGES))
        if (
            self._in_flight == 1
            and self._wanted is None  # else no place can be foreseen
            and following == self._next.queue_offset + reply.count
        ):
            self._in_flight = IN_FLIGHT
        self._progress(after)

    def _pass_by(self, link: BulkLink, reply: api.Pulled) -> None:
        """Go on behind records that do not match."""
        if reply.next_queue_offset <= self._next.queue_offset:
            raise _Leave(f"{link.address} sent a reply without records")
        self._progress(reply.after)

    def _progress(self, after: Position) -> None:
        self._next = after
        self._left.clear()
        self._verdicts.clear()
        self._resume.clear()
        self._answer_s, self._pause_s = ANSWER_S, PAUSE_S
        self._begin_to_wait()

    def _failed(self, link: BulkLink, reply: api.Reply) -> None:
        if not isinstance(reply, api.Failed):
            raise _Leave(f"{link.address} answered {type(reply).__name__}, not Pulled")
        if reply.status == "BUSY" and self._clock.monotonic_ms() < self._deadline_ms:
            self._pause()
            return
        if reply.status == api.Status.FORBIDDEN:
            raise ForbiddenError(f"{link.address}: {reply.reason}")
        if reply.status == CorruptRecordError.__name__:
            self._verdicts[link.address] = CorruptRecordError(f"{link.address}: {reply.reason}")
        raise _Leave(f"{link.address}: {reply.status}: {reply.reason}")

    def _found_nothing(self, link: BulkLink, reply: api.Pulled) -> None:
        """Leave the replica, and note if the position is lost."""
        at, status = self._next.queue_offset, reply.status
        is_master = link.address in self._masters
        certain = True
        if status is api.PullStatus.OFFSET_TOO_SMALL:
            lost = f"before the first one kept, {reply.min_queue_offset}"
            certain = False  # each replica removes its oldest files by itself
            self._resume[link.address] = reply.min_queue_offset
        elif status is api.PullStatus.HISTORY_DIFFERS:
            lost = "after a record that a failover cut away"
        elif status is api.PullStatus.OFFSET_TOO_LARGE and is_master:
            lost = f"beyond the end, {reply.max_queue_offset}"
        elif status is api.PullStatus.NO_SUCH_QUEUE and is_master:
            lost = "in a queue that does not exist"
        else:  # the replica lags
            raise _Leave(f"{link.address} has no readable message at offset {at} yet")
        text = f"queue {self._queue_id} of {self._topic}: {at} is {lost}"
        verdict = PositionLostError(text, self._queue_id, reply.common, self._topic)
        self._verdicts[link.address] = verdict
        self._certain = verdict if certain else None
        raise _Leave(text)
