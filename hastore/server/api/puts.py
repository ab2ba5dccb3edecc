"""Puts: admitted, gathered, appended together, and answered once confirmed as the client asked.

admit_put, append_admitted    the API's thread, with the API's lock
done (of _wait_or_answer)     the thread that learns of the confirmation, which then calls
                              ApiServer.puts_done
answer_ended                  one of the two, with the API's lock
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hastore.bounded_log import BoundedLines, SlowLines
from hastore.clock import Clock
from hastore.config.model import ApiConfig
from hastore.counters import BOUNDS_MS, ApiCounts, Histogram
from hastore.errors import NotStoredError, StoreError
from hastore.ha.master.group_transfer import Need, Outcome
from hastore.protocol.api import Put, PutDone, Status
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.api.replies import Failures, master_of
from hastore.store.append.results import Guard, Payload, PutResult, UniformResults

if TYPE_CHECKING:
    from hastore.record.codec import Record

log = logging.getLogger(__name__)

TOLD_MS = 10_000.0  # between two lines about refused puts of one status
MASTER_MEM = "MASTER_MEM"
ALL = -1
_NO_TIMES = Histogram()  # until the level of a put is known
_OK, _CONFIRMED = Status.PUT_OK, Outcome.CONFIRMED  # looked up once, not for each put
# How a put that is not confirmed is answered. A put of mode dledger is neither stored for certain
# nor refused: the client sends it again with the same sequence numbers.
_UNCONFIRMED = {
    Outcome.FLUSH_DISK_TIMEOUT: (Status.FLUSH_DISK_TIMEOUT, ""),
    Outcome.FLUSH_SLAVE_TIMEOUT: (Status.FLUSH_SLAVE_TIMEOUT, ""),
    Outcome.WAIT_QUORUM_ACK_TIMEOUT: (
        Status.TIMEOUT,
        "WAIT_QUORUM_ACK_TIMEOUT: no majority has confirmed it in time",
    ),
    Outcome.TERM_CHANGED: (
        Status.TIMEOUT,
        "TERM_CHANGED: this node stopped leading before a majority had confirmed it",
    ),
}
_DISK_FAILED = frozenset({Status.TIMEOUT, Status.SERVICE_NOT_AVAILABLE})


class PendingPut(msgspec.Struct):
    """A put between its arrival and its answer.

    A client's put is answered on its connection. Any other put has no connection: `respond` is
    called with its outcome. Its records are the node's own, or made by it from a request of
    RocketMQ's protocol.
    """

    connection: Connection | None
    request: Put
    payload: Payload
    respond: Callable[[PutDone], None] | None
    acks: int
    deadline_ms: float
    guard: Guard | None = None
    epoch: int = 0
    results: Sequence[PutResult] = ()
    count: int = 0  # the number of its records, set by the append
    size_bytes: int = 0


class Refusal(NamedTuple):
    """Why a put is refused; `final`: with this configuration of the group, retries fail too."""

    status: Status
    reason: str
    final: bool = False


class PutHandler:
    """Take puts, bound the puts that wait, and answer each exactly once.

    After some failures it is unknown whether a put is stored. The put's connection is then ended,
    because a reply would have to say whether it is. The client sends the put again with the same
    sequence numbers.
    """

    def __init__(
        self,
        backend: ApiBackend,
        config: ApiConfig,
        clock: Clock,
        answer: Callable[[Connection, PutDone], None],
        end: Callable[[Connection, str], None],
        failures: Failures,
        *,
        always_all: bool = False,
        on_forbidden: Callable[[Connection, str], None] | None = None,
        counts: ApiCounts | None = None,
        slow_ms: float | None = None,
    ) -> None:
        """Prepare; with `always_all` a put with `acks` 1 waits as one with `acks` all does.

        `on_forbidden` is given with identities: it is called with a put's connection and the reason
        when a record is forbidden. Puts that take longer than `slow_ms` are logged.
        """
        self._slow = SlowLines(log, slow_ms, clock=clock)
        self._told = BoundedLines(log, level=logging.INFO, clock=clock, burst=3, every_ms=TOLD_MS)
        self.counts = counts or ApiCounts()
        self._always_all = always_all
        self._on_forbidden = on_forbidden
        self._backend = backend
        self._config = config
        self._clock = clock
        self._answer = answer
        self._end = end
        self._failures = failures
        self._gathered: list[PendingPut] = []
        self._guarded = False  # a gathered put has a guard
        self._done: deque[tuple[PendingPut, Outcome, str]] = deque()
        self.gathered_bytes = 0
        self.pending_puts = 0
        self.pending_bytes = 0
        self.refused = 0
        self._logged: str | None = None  # the last append failure that was logged
        # `_admitted`: until the next append, puts with this (acks, sync_flush) are accepted.
        self._admitted: tuple[int, bool] | None = None
        self._host = backend.store.store_host.packed
        self._appended_ms = 0.0  # when the last append ended

    @property
    def gathered(self) -> int:
        """The number of puts that wait for `append_admitted`."""
        return len(self._gathered)

    @property
    def has_done(self) -> bool:
        """Whether `answer_ended` has something to answer."""
        return bool(self._done)

    def admit_put(self, connection: Connection, request: Put, payload: bytes, now: float) -> None:
        """Admit a client's put to the next append, or refuse it."""
        acks = self._acks_of(request)
        run = request.run
        follows = not run or (
            request.at == connection.next_at if run == connection.run
            else run > connection.run and not request.at
        )  # fmt: skip
        if follows:
            refusal = self._refusal_of(acks, request.sync_flush)
        else:
            refusal = Refusal(Status.BUSY, "an earlier put of this run was refused or is missing")
        if refusal is not None:
            if run:
                connection.next_at = None
            self._refuse(connection, request, *refusal)
            return
        if run:
            connection.run = run
            connection.next_at = request.at + 1
        due, guard = now + request.timeout_ms, connection.guard
        self._gather(PendingPut(connection, request, payload, None, acks, due, guard))

    def refuse_for_now(self, connection: Connection, request: Put, reason: str) -> None:
        """Refuse a client's put for now, and with it the later ones of its run."""
        if request.run:
            connection.next_at = None
        self._refuse(connection, request, Status.BUSY, reason)

    def admit_own_record(
        self,
        request: Put,
        payload: Payload,
        respond: Callable[[PutDone], None],
        guard: Guard | None = None,
        since_ms: float | None = None,
    ) -> None:
        """Admit records that this node makes for a client; `respond` gets the outcome.

        It is called exactly once, perhaps before this method ends, with the API's lock. The put's
        time for confirmations began at `since_ms`; None: now.
        """
        acks = self._acks_of(request)
        refusal = self._refusal_of(acks, request.sync_flush)
        if refusal is None:
            begun_ms = self._clock.monotonic_ms() if since_ms is None else since_ms
            due = begun_ms + request.timeout_ms
            self._gather(PendingPut(None, request, payload, respond, acks, due, guard))
        else:
            self.counts.refusals.add(refusal.status)
            respond(PutDone(request.rid, refusal.status, 0, reason=refusal.reason))

    def confirm_log(
        self, request: Put, respond: Callable[[PutDone], None], since_ms: float
    ) -> None:
        """Call `respond` once all that is in the log now is confirmed as a put would be.

        It is called exactly once, perhaps before this method ends, with the API's lock.
        """
        acks = self._acks_of(request)
        refusal = self._refusal_of(acks, request.sync_flush)
        if refusal is not None:
            self.counts.refusals.add(refusal.status)
            respond(PutDone(request.rid, refusal.status, 0, reason=refusal.reason))
            return
        due = since_ms + request.timeout_ms
        put = PendingPut(None, request, b"", respond, acks, due, epoch=self._backend.epoch())
        put.results = UniformResults([], self._backend.store.max_offset, [], [], 0)
        try:
            self._wait_or_answer(put, self._clock.monotonic_ms())
        except Exception as failure:
            self._give_up(put, failure)

    def append_admitted(self, now: float) -> None:
        """Append all gathered puts together; answer those that need no confirmation."""
        puts = self._gathered
        self._admitted = None
        if not puts:
            return
        self._gathered = []
        self.gathered_bytes = 0
        guarded, self._guarded = self._guarded, False
        epoch, begun_ms = self._backend.epoch(), self._clock.monotonic_ms()
        try:
            payloads = [put.payload for put in puts]
            if guarded:
                results = self._backend.put_encoded(payloads, [put.guard for put in puts])
            else:
                results = self._backend.put_encoded(payloads)
        except NotStoredError as refusal:
            self._refuse_all(puts, refusal.status, str(refusal))
            return
        except StoreError as failure:
            if str(failure) != self._logged:  # logged once, not for each client's retry
                log.error("api: nothing was appended: %s", failure)
            self._logged = str(failure)
            self._refuse_all(puts, Status.SERVICE_NOT_AVAILABLE, str(failure))
            return
        except Exception as failure:  # records may be stored
            _, reason = self._failures.note("an append", failure)
            for put in puts:
                self._leave_open(put, f"whether its put is stored is unknown: {reason}")
            return
        self._logged = None
        self._appended_ms = self._clock.monotonic_ms()
        self.counts.puts += len(puts)
        self.counts.append_times.observe(self._appended_ms - begun_ms)
        for put, of_put in zip(puts, results, strict=True):
            put.results = of_put
            put.epoch = epoch
            put.payload = b""
            try:
                self._wait_or_answer(put, now)
            except Exception as failure:  # this put's failure; the others go on
                self._give_up(put, failure)

    def answer_ended(self) -> None:
        """Answer the puts whose outcome is known."""
        done, slow_ms = self._done, self._slow.slow_ms
        now_ms, known, times = self._clock.monotonic_ms(), "", _NO_TIMES
        while done:
            put, outcome, level = done.popleft()
            self.pending_puts -= put.count
            self.pending_bytes -= put.size_bytes
            try:
                if outcome is _CONFIRMED:
                    if put.count:  # written out, as is `observe`: many puts end together
                        took_ms = now_ms - put.deadline_ms + put.request.timeout_ms
                        if level is not known:
                            known, times = level, self.counts.times_of(level)
                        times.counts[bisect_left(BOUNDS_MS, took_ms)] += 1
                        times.sum_ms += took_ms
                        if took_ms > slow_ms:
                            self._note_slow(put, level, took_ms)
                    self._respond(put, _OK, level)
                else:
                    self._note_unconfirmed(put, outcome.value)
                    status, reason = _UNCONFIRMED[outcome]
                    self._respond(put, status, level, reason)
            except Exception as failure:  # this put's failure; the others go on
                self._give_up(put, failure)

    def _note_slow(self, put: PendingPut, level: str, took_ms: float) -> None:
        whom = "this node" if put.connection is None else put.connection.peer
        self._slow.write(
            "api: slow put of %s: %.0f ms until %s, %d messages, %d bytes",
            whom, took_ms, level, put.count, put.size_bytes,
        )  # fmt: skip

    def _note_unconfirmed(self, put: PendingPut, outcome: str) -> None:
        self.counts.unconfirmed.add(outcome)
        whom = "this node" if put.connection is None else put.connection.peer
        self._told.write(f"api: a put of %s is stored, but not confirmed: {outcome}", whom)

    def _give_up(self, put: PendingPut, failure: Exception) -> None:
        """Handle a put that is stored but could not be answered."""
        _, reason = self._failures.note("the answer to a put", failure)
        self._leave_open(put, f"its put cannot be answered: {reason}")

    def _leave_open(self, put: PendingPut, reason: str) -> None:
        """End a put whose outcome is unknown; the client is not told whether it is stored."""
        if put.respond is not None:  # its caller waits for this call
            put.respond(PutDone(put.request.rid, Status.TIMEOUT, 0, reason=reason))
        elif put.connection is not None:
            self._end(put.connection, reason)

    def _refusal_of(self, acks: int, sync_flush: bool) -> Refusal | None:
        """Return why a put is refused, or None. Ask the node only if `_admitted` differs."""
        if self._admitted != (acks, sync_flush):
            backend = self._backend
            try:
                reason = backend.writable_reason()
                if reason is not None:
                    return Refusal(Status.SERVICE_NOT_AVAILABLE, reason)
                if acks == ALL:
                    reason = backend.can_confirm(sync_flush)
                    if reason is not None:
                        never = backend.never_flushed() if sync_flush else None
                        final = never is not None
                        return Refusal(Status.SLAVE_NOT_AVAILABLE, never or reason, final)
            except Exception as failure:  # nothing was appended
                reason = self._failures.note("a put", failure)[1]
                return Refusal(Status.SERVICE_NOT_AVAILABLE, reason)
            self._admitted = acks, sync_flush
        if (
            self.pending_puts >= self._config.max_pending_puts
            or self.pending_bytes + self.gathered_bytes >= self._config.max_pending_bytes
        ):
            waiting = f"{self.pending_puts} puts wait, with {self.pending_bytes} bytes"
            return Refusal(Status.BUSY, f"{waiting} (api.max_pending_puts, api.max_pending_bytes)")
        return None

    def _acks_of(self, request: Put) -> int:
        acks = request.acks
        if acks is None:
            return ALL if self._backend.default_acks_all() else 1
        return ALL if acks == 1 and self._always_all else acks

    def _gather(self, put: PendingPut) -> None:
        put.size_bytes = len(put.payload)
        if put.guard is not None:
            self._guarded = True
        self._gathered.append(put)
        self.gathered_bytes += put.size_bytes

    def _wait_or_answer(self, put: PendingPut, now: float) -> None:
        """Answer an appended put that needs no confirmation or stored nothing; else let it wait."""
        need = self._need(put)
        results = put.results
        if isinstance(results, UniformResults):
            end_offset, put.count = results.end_offset, len(results.offsets)
        else:
            end_offset, put.count = _end_of(results), len(results)
            missing = [result for result in results if result.offset is None]
            for result in missing:
                self.counts.refused_messages.add(result.status)
            failed = _failed(missing) if missing else None
            if self._on_forbidden is not None and missing:
                self._note_forbidden(put, missing)
            if failed is not None:
                if not end_offset:
                    self._refuse_all([put], failed.status, failed.reason or "")
                    return
                _break_run(put)  # later puts of the run must not overtake the missing record
        if len(results) and not end_offset:  # nothing is stored: the first record's refusal
            put.epoch = 0
            self._respond(put, results[0].status, "")
            return
        if need is None or not end_offset:
            if put.count:  # else nothing was appended: see `confirm_log`
                took_ms = self._appended_ms - put.deadline_ms + put.request.timeout_ms
                self.counts.times_of(MASTER_MEM).observe(took_ms)
                if took_ms > self._slow.slow_ms:
                    self._note_slow(put, MASTER_MEM, took_ms)
            self._respond(put, _OK, MASTER_MEM)
            return
        self.pending_puts += put.count
        self.pending_bytes += put.size_bytes

        def done(outcome: Outcome, level: str) -> None:
            self._done.append((put, outcome, level))

        try:
            deadline_ms = min(put.deadline_ms, now + self._backend.wait_limit_ms(need))
            self._backend.transfer.add(end_offset, deadline_ms, need, done, epoch=put.epoch)
        except BaseException:
            self.pending_puts -= put.count
            self.pending_bytes -= put.size_bytes
            put.count = put.size_bytes = 0  # in case `done` is called after all
            raise

    def _note_forbidden(self, put: PendingPut, missing: Sequence[PutResult]) -> None:
        forbidden = next((one for one in missing if one.status is Status.FORBIDDEN), None)
        if forbidden is None or put.connection is None or self._on_forbidden is None:
            return
        self._on_forbidden(put.connection, forbidden.reason or "")

    def _need(self, put: PendingPut) -> Need | None:
        if put.acks == ALL:
            return Need.SLAVE_DISKS if put.request.sync_flush else Need.SLAVES
        if put.acks == 1 and (put.request.sync_flush or self._backend.flush_each_put()):
            return Need.MASTER_DISK
        return None

    def _respond(self, put: PendingPut, status: Status, level: str, why: str = "") -> None:
        if put.acks == 0 and put.respond is None:
            return
        if status is Status.TIMEOUT:
            reply = _claims_nothing(put, why)
        else:
            reply = self._reply(put, status, level)
        if put.respond is not None:
            put.respond(reply)
        elif put.connection is not None:
            self._answer(put.connection, reply)

    def _reply(self, put: PendingPut, status: Status, level: str) -> PutDone:
        results = put.results
        if isinstance(results, UniformResults):
            return PutDone(
                put.request.rid,
                status,
                put.epoch,
                level,
                results.offsets,
                results.queue_ids,
                results.queue_offsets,
                None,
                self._host,
            )
        statuses: list[Status] | None = None
        hosts: dict[int, bytes] = {}
        reason = ""
        if any(r.offset is None or r.duplicate for r in results):
            statuses, hosts, reason = self._particulars(results, status)
        return PutDone(
            put.request.rid,
            status,
            put.epoch,
            level,
            [r.offset or 0 for r in results],
            [r.queue_id or 0 for r in results],
            [_queue_offset(r) for r in results],
            statuses,
            self._host,
            hosts,
            reason,
        )

    def _particulars(
        self, results: Sequence[PutResult], status: Status
    ) -> tuple[list[Status] | None, dict[int, bytes], str]:
        statuses: list[Status] = []
        hosts: dict[int, bytes] = {}
        reason = ""
        own = self._backend.store.store_host
        for place, result in enumerate(results):
            if result.offset is None:
                statuses.append(result.status)
                reason = reason or result.reason or ""
                continue
            statuses.append(status)
            if result.duplicate:
                original = self._original(result.offset)
                if original is not None and original.store_host != own:
                    hosts[place] = original.store_host.packed
        # A refusal without statuses would be one of the whole request, which clients may repeat.
        differs = any(each is not status or not each.is_stored for each in statuses)
        return (statuses if differs else None), hosts, reason

    def _original(self, offset: int) -> Record | None:
        """Return the original record of a duplicate; None if it is gone or unreadable."""
        try:
            return self._backend.store.reader.record_at(offset)
        except (OSError, StoreError) as failure:
            self._failures.note("a read of a duplicate's original", failure)
            return None

    def _refuse_all(self, puts: list[PendingPut], status: Status, reason: str) -> None:
        for put in puts:
            _break_run(put)
            if put.respond is not None:
                self.counts.refusals.add(status)
                put.respond(PutDone(put.request.rid, status, 0, reason=reason))
            elif put.connection is not None:
                self._refuse(put.connection, put.request, status, reason)

    def _refuse(
        self,
        connection: Connection,
        request: Put,
        status: Status,
        reason: str,
        final: bool = False,
    ) -> None:
        self.refused += 1
        self.counts.refusals.add(status)
        self._told.write(f"api: a put of %s was refused: {status}: %s", connection.peer, reason)
        if request.acks == 0:
            return
        master = None
        if status is Status.SERVICE_NOT_AVAILABLE:
            master = master_of(self._backend, self._failures)
        statuses = [status] if final else None  # tells the client not to retry
        done = PutDone(request.rid, status, 0, statuses=statuses, reason=reason, master=master)
        self._answer(connection, done)


def _break_run(put: PendingPut) -> None:
    """Let the later puts of a run be refused, since this one is."""
    if put.request.run and put.connection is not None:
        put.connection.next_at = None


def _queue_offset(result: PutResult) -> int:
    """Return what the reply says: -1 where the place of a stored record is not known."""
    if result.queue_offset is not None:
        return result.queue_offset
    return 0 if result.offset is None else -1


def _claims_nothing(put: PendingPut, why: str) -> PutDone:
    """Answer TIMEOUT: where the records are, if they stay, is not known. Refused ones say so."""
    rid, results = put.request.rid, put.results
    refused = [] if isinstance(results, UniformResults) else [
        result for result in results if result.offset is None
    ]  # fmt: skip
    if not refused:
        return PutDone(rid, Status.TIMEOUT, put.epoch, reason=why)
    statuses = [Status.TIMEOUT if one.offset is not None else one.status for one in results]
    zeros = [0] * len(statuses)
    reason = refused[0].reason or why
    return PutDone(rid, Status.TIMEOUT, put.epoch, "", zeros, zeros, zeros, statuses, reason=reason)


def _failed(results: Sequence[PutResult]) -> PutResult | None:
    """Return a result that failed because of the disk, preferably one that may be stored."""
    failed = [result for result in results if result.status in _DISK_FAILED]
    return min(failed, key=lambda result: result.status is not Status.TIMEOUT, default=None)


def _end_of(results: Sequence[PutResult]) -> int:
    """Return where the last record of a put ends; 0 if none is stored."""
    return max([result.end_offset or 0 for result in results], default=0)
