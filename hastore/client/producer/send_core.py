"""The producer's core: finds the master, sends messages in order and settles their Futures.

    unsent --transmit--> frames in flight --reply--> settled
       ^                       |
       +------ roll back ------+   refused, late, connection lost, another master

The core has no thread and never waits. Its driver (`io_driver.py` with a thread, `hastore.aio` on
an event loop) calls `run_once` when a reply has arrived, an entry was admitted or a deadline is
due. Afterwards the driver notifies the Outcomes in `ended`.

One run of frames goes to one master over one connection (protocol/api.py, "Runs"). Any break in the
sequence rolls the unsettled entries back and begins a new run, so the log keeps the order of the
sequence numbers. A refusal means that this attempt stored nothing. Once a frame gets no answer, its
entries are marked unknown: they may end as OutcomeUnknown, but never as NotStoredError.

An exception from a signal handler may interrupt `run_once` or `send_now` anywhere. Then the next
call restarts from the window's entries. Only the window is certain to list all unsettled entries.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from hastore.client.arguments import SendOptions, queue_of_key
from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.requester import FOR_NOW
from hastore.client.connections.transport import Arrival, Transport
from hastore.client.lifecycle import CarefulLog
from hastore.client.messages import SendResult, Status, doubt_of, failure_of
from hastore.client.producer.futures import Outcome, result_of
from hastore.client.producer.master_calls import MasterCalls
from hastore.client.producer.window import Entry, Frame, Window, in_order
from hastore.errors import HastoreError, NotStoredError
from hastore.protocol import api
from hastore.record.layout import header_struct, offset_of

log = CarefulLog(logging.getLogger(__name__))

MAX_FRAMES = 8
SMALL_FRAMES = 2  # if so many are in flight, only full frames are sent, so messages gather
MAX_FRAME_RECORDS, SMALL_WINDOW = 256, 16
LATE_MS = 300.0  # a frame unanswered for so long is late: the client asks which node is master
ASK_MS = 100.0
ATTEMPT_MS = 3_000  # how long a node may wait for a confirmation
ATTEMPT_SLACK_MS = 1_000.0
QUEUES_MS = 1_000.0  # a question for a topic's queues without an answer is sent again
LAST_TRY_MS = 50.0  # a refused entry is not sent again so shortly before its deadline
PAUSES_MS = (10.0, 20.0, 50.0, 100.0, 200.0)
_PUT_OK = Status.PUT_OK  # an Enum's look-up is slow
_ILLEGAL = Status.MESSAGE_ILLEGAL
_NEVER = float("inf")
_QUEUE_AT = offset_of("queue_id")
_QUEUE = header_struct("queue_id", start=_QUEUE_AT)
_SIZE = header_struct("size")
Ended = deque[Outcome]  # of settled entries whose waiters are still to be notified


class SendCore:
    """Send the window's entries to the master until they are settled.

    `ended`: settled Outcomes that are still to be notified. `master_found`: a master was found at
    least once. `flush_to`: entries below this sequence number do not linger. `wants_master`: any
    thread sets it, so that the nodes are asked once for their master though nothing is to be sent.
    """

    def __init__(
        self,
        options: SendOptions,
        window: Window,
        transport: Transport,
        cluster: ClusterView,
        rids: Iterator[int] | None = None,
    ) -> None:
        """`rids` gives the request numbers, if others send requests by this transport too."""
        self._options = options
        self._window = window
        self._transport = transport
        self.cluster = cluster
        self.master_found = False
        self.wants_master = False
        self.flush_to: float = 0
        self.ended: Ended = deque()
        self.interrupted = False  # a call is under way, or was interrupted
        self._unsent: deque[Entry] = deque()
        self._frames: dict[int, Frame] = {}
        self._rids = itertools.count(1) if rids is None else rids
        self.calls = MasterCalls(transport, self._rids, self.ended)
        # One half of the window is in flight while callers fill the other half; a small window is
        # faster in one frame.
        share = window.limit // 2 if window.limit > SMALL_WINDOW else window.limit
        self._frame_records = min(MAX_FRAME_RECORDS, share)
        self._attempt_ms = int(max(1.0, min(ATTEMPT_MS, options.delivery_timeout_ms)))
        self._run = 1
        self._at = 0
        # Topics that have fewer queues than was said before, or whose queues were guessed.
        self._shrunk: set[str] = set()
        self._drains = False  # what is in flight may be for queues that these do not have
        # Refused, perhaps for the queue that was chosen: nothing else is sent before it is known.
        self._misplaced: list[Entry] = []
        self._map_after: int | None = None  # the master's next map of a greater request says it
        # Topics whose queues the master is asked for, and when that is due; threads add to it.
        self._wanted: dict[str, float] = {}
        self._asked: dict[int, str] = {}  # these questions under way, by request number
        self._guesses = False  # the first unsent entry waits for such an answer
        self._paused_until_ms = 0.0
        self._pauses = 0
        self._next_ask_ms = 0.0
        self._acked_bytes = 0  # of the connection to the master, when last looked at

    def run_once(self, now: float) -> None:
        """Handle arrivals, admitted entries and deadlines. `now`: monotonic ms."""
        if self.interrupted:
            self._restart()
        self.interrupted = True
        for arrival in self._transport.collect():
            self._on_arrival(arrival, now)
        if self._window.incoming:
            self._unsent += self._window.take_admitted()
        if self.cluster.refusals and self.refused is not None:
            self._end_refused(self.refused)
        if (
            self._frames or not self._window.is_settled or self.cluster.master is None
            or len(self.calls) or self._wanted
        ):  # fmt: skip
            self._expire(now)
            self.calls.step(now, self.cluster.master)
            self._ask_queues(now)
            if self._options.leave_ms is not None and self._unsent:
                self._leave(now, self._options.leave_ms)
            self._check_answers(now)
            self._transmit(now)
        self.interrupted = False

    def send_now(self, now: float) -> None:
        """Send admitted entries as far as the connection takes them.

        The caller calls `run_once` afterwards.
        """
        if self.interrupted:
            self.run_once(now)
            return
        self.interrupted = True
        self._unsent += self._window.take_admitted()
        self._transmit(now)
        self.interrupted = False

    def want_queues(self, topic: str) -> None:
        """Let the master be asked how many queues a topic has; any thread may call this.

        The caller then wakes the driver. `cluster.knows_queues` says when the answer is there.
        """
        self._wanted.setdefault(topic, 0.0)

    @property
    def refused(self) -> str | None:
        """Why no node accepts this client; None while one may, or is the master."""
        return None if self.cluster.master is not None else self.cluster.refused

    def sleep_s(self, now: float) -> float:
        """Return the seconds until `run_once` is due even if nothing arrives; -1: never."""
        if self._window.incoming:
            return 0.0
        until = _NEVER
        expires_ms = self._window.expires_ms()
        master = self.cluster.master
        if expires_ms is not None:
            until = expires_ms
            if master is None:
                until = min(until, self._next_ask_ms)
        elif not self.master_found:
            until = self._next_ask_ms
        if self.wants_master and master is None:
            until = min(until, self._next_ask_ms)
        if len(self.calls):
            until = min(until, self.calls.due_ms(now, master))
            if master is None:
                until = min(until, self._next_ask_ms)
        if wanted := list(self._wanted.values()):
            until = min(until, self._next_ask_ms if master is None else min(wanted))
        first_ms = self._first_sent_ms()
        if first_ms is not None:
            until = min(until, max(first_ms + LATE_MS, self._next_ask_ms))
        elif self._misplaced:
            until = min(until, self._next_ask_ms)
        is_due = self._unsent and not self._guesses
        if is_due and master is not None and len(self._frames) < SMALL_FRAMES:
            ready = self._ready_ms(self._unsent[0])
            until = min(until, max(self._paused_until_ms, ready, now + 1.0))
        return -1.0 if until == _NEVER else max(0.0, until - now) / 1000.0

    def under_way(self) -> int:
        """Return the number of entries to send, frames in flight and Outcomes to notify, summed."""
        waiting = len(self._window.incoming) + len(self._unsent) + self.calls.ends
        waiting += len(self._misplaced) + len(self._wanted)
        return waiting + len(self._frames) + len(self.ended)

    def is_idle(self) -> bool:
        """Whether every entry is settled and its Outcome notified; a late answer may still come."""
        settled = not self._window.incoming and self._window.is_settled and not self.calls.ends
        return settled and not self.ended

    def fail(self, failure: BaseException) -> None:
        """End after the driver has failed; unsettled and later sends get an error that says so."""
        reason = f"the producer has failed: {failure!r}"
        self._window.close(f"{reason}; make a new one")
        if self.interrupted:  # any entry may have been sent
            for entry in self._window.entries():
                entry.unknown = True
        self.end(reason)

    def end(self, reason: str) -> None:
        """Admit nothing any more and give up the unsettled entries."""
        self.calls.end(reason)
        self._window.close()
        self._window.take_admitted()
        for frame in self._frames.values():
            for entry in frame.entries:
                entry.unknown = True
        for entry in self._window.entries():
            _give_up(entry, reason, self.ended)
        self._frames.clear()
        self._unsent.clear()
        self._window.release()

    def abandon(self) -> None:
        """End the unsettled entries in a forked child; its parent sends them. Takes no lock."""
        self._window.closed = True
        self.calls.abandon("the process was forked; the parent goes on with it")
        for entry in self._window.entries():
            entry.unknown = True
            _give_up(entry, "the process was forked; the parent keeps the message", self.ended)

    def unacknowledged(self) -> str:
        """Return a text with the number of unsettled messages, "" if there are none.

        Takes no lock.
        """
        topics: dict[str, int] = {}
        for entry in self._window.entries():
            if not entry.settled:
                topics[entry.topic] = topics.get(entry.topic, 0) + entry.count
        if not topics:
            return ""
        named = ", ".join(f"{count} to {topic!r}" for topic, count in topics.items())
        return f"messages not acknowledged: {named}"

    def _restart(self) -> None:
        """Roll all entries back, because it is not known how far the interrupted call came."""
        for frame in self._frames.values():
            for entry in frame.entries:
                self._mark_unknown(entry)
        self._frames.clear()
        self._misplaced.clear()
        self._want_queues_again()
        self.calls.roll_back()
        self._run += 1
        self._at = self._acked_bytes = 0
        self._window.take_admitted()
        for entry in self._window.entries():
            if entry.settled:
                self.ended.append(entry.future)  # it may not have been notified yet
        self._doubt_results()
        self._unsent = in_order(self._window.entries())
        self._window.release()
        if self.cluster.master is not None:
            self._transport.reopen(self.cluster.master)

    def _first_sent_ms(self) -> float | None:
        """Return when the first request in flight was sent that is answered soon; None: none is."""
        sent_ms = self.calls.sent_ms() if len(self.calls) else None
        if self._frames:
            first_ms = next(iter(self._frames.values())).sent_ms
            sent_ms = first_ms if sent_ms is None else min(sent_ms, first_ms)
        return sent_ms

    def _ready_ms(self, entry: Entry) -> float:
        """Return when an entry's linger time is over, in monotonic ms."""
        if entry.first_seq < self.flush_to:
            return 0.0
        return entry.queued_ms + self._options.linger_ms

    # -- arrivals

    def _on_arrival(self, arrival: Arrival, now: float) -> None:
        reply = arrival.reply
        if isinstance(reply, api.PutDone):
            frame = self._frames.get(reply.rid)
            if frame is not None and arrival.address == frame.address:
                self._on_answer(frame, reply, now)
            elif len(self.calls):
                self._on_call_answer(arrival, now)
        elif reply is None:
            self._on_connection_change(arrival, now)
        elif isinstance(reply, api.Map):
            followed, queues = self.cluster.master, self.cluster.queues
            is_new = self.cluster.learn(arrival.address, reply.map)
            if self.cluster.queues != queues:
                self._note_queues(queues)
            if is_new:
                self._follow_master(followed)
            elif followed is not None and self.cluster.master is None:
                self._roll_back(list(self._frames.values()), unknown=True)
                self.calls.roll_back()
            self._transport.open(self.cluster.addresses)
            is_awaited = self._map_after is not None and reply.rid > self._map_after
            if is_awaited and arrival.address == self.cluster.master:
                self._map_after = None
        elif reply.rid in self._asked:
            self._on_queues(reply)
        elif len(self.calls):
            self._on_call_answer(arrival, now)

    def _on_call_answer(self, arrival: Arrival, now: float) -> None:
        if self.calls.on_reply(arrival, now):
            self.cluster.lose()
            self._ask_for_master(now)

    def _on_connection_change(self, arrival: Arrival, now: float) -> None:
        if arrival.up:
            self.cluster.add(arrival.address)  # the transport may have learned it elsewhere
            self._transport.send(arrival.address, api.AskMap(next(self._rids)))
            return
        if self.cluster.lose_connection(arrival):
            self._roll_back(list(self._frames.values()), unknown=True)
            self.calls.roll_back()
            self._want_queues_again()
            self._ask_for_master(now)

    def _follow_master(self, before: str | None) -> None:
        log.info("producer: the master is %s, epoch %d", self.cluster.master, self.cluster.epoch)
        if before is not None and before != self.cluster.master:
            self._transport.reopen(before)  # drops late answers of the old master
        self._roll_back(list(self._frames.values()), unknown=True)
        self.calls.roll_back()
        self._doubt_results()
        self._want_queues_again()
        self._paused_until_ms = 0.0
        self.master_found = True

    def _doubt_results(self) -> None:
        """Forget where a master of an earlier epoch has stored what it did not confirm.

        The present master may lack it, so only an answer of this one says that it is stored.
        """
        for entry in self._window.entries():
            if entry.result is not None and entry.result.epoch < self.cluster.epoch:
                entry.unknown, entry.doubted_epoch = True, entry.result.epoch
                entry.status, entry.reason, entry.result = Status.TIMEOUT, "", None

    def _on_answer(self, frame: Frame, reply: api.PutDone, now: float) -> None:
        if reply.status is not _PUT_OK and reply.status.is_refusal and reply.statuses is None:
            self._on_refusal(frame, reply, now)
            return
        if reply.status is Status.TIMEOUT and reply.statuses is None:
            for entry in frame.entries:
                entry.status, entry.reason = reply.status, reply.reason
                self._mark_unknown(entry)
            self._on_refusal(frame, reply, now)  # sends this frame again, before the later ones
            return
        again = _settle_reply(
            frame, reply, self.ended, self._misplaced, retry_stored=self._options.idempotent
        )
        del self._frames[frame.rid]
        self._window.release()
        if _ILLEGAL in (reply.status, *(reply.statuses or ())):  # a topic may have fewer queues now
            self._map_after = next(self._rids)
            self._ask_for_master(now)
            for entry in self._misplaced:
                if entry.topic in self.cluster.more_queues:
                    self._wanted[entry.topic] = 0.0
        if again:
            self._unsent = in_order([*again, *self._unsent])
            self._pause(now)
        else:
            self._pauses = 0

    def _note_queues(self, before: Mapping[str, int]) -> None:
        """Note which topics have fewer queues, and ask for those that are no longer in the map."""
        cluster = self.cluster
        for topic in cluster.more_queues.keys() & before.keys():
            self._wanted[topic] = 0.0
        for topic in {*before, *cluster.queues} - self._shrunk:
            if cluster.queues_of(topic) < before.get(topic, cluster.default_queues):
                self._shrunk.add(topic)
                self._drains = True

    def _ask_queues(self, now: float) -> None:
        """Ask for the queues of topics that the map may have no room for."""
        master = self.cluster.master
        if master is None:
            return
        for topic, due_ms in list(self._wanted.items()):
            if now < due_ms:
                continue
            if due_ms and now >= self._next_ask_ms:  # no answer: there may be another master
                self._ask_for_master(now)
            rid = next(self._rids)
            self._asked[rid] = topic
            if self._transport.send(master, api.AskConfigs(rid, topic)):
                self._wanted[topic] = now + QUEUES_MS
            else:
                del self._asked[rid]
                self._wanted[topic] = now + PAUSES_MS[0]

    def _on_queues(self, reply: api.Reply) -> None:
        """Note how many queues a topic has."""
        topic = self._asked.pop(reply.rid)
        if isinstance(reply, api.Failed) and reply.status in FOR_NOW:
            return  # it is asked again
        before = self.cluster.queues_of(topic)
        self.cluster.note_queues(topic, reply)
        if self.cluster.queues_of(topic) < before:
            self._shrunk.add(topic)
            self._drains = True
        self._wanted.pop(topic, None)

    def _want_queues_again(self) -> None:
        """Ask another master, or over another connection, also for what has been answered."""
        self._asked.clear()
        for topic in [*self.cluster.more_queues, *self._wanted]:
            self._wanted[topic] = 0.0

    def _place(self, entry: Entry) -> bool:
        """Choose an entry's queue again if it is not the one; return whether it did."""
        if not entry.chosen and not entry.guesses:
            return False
        queues = self.cluster.queues_of(entry.topic)
        if entry.half is not None:
            before, encode = entry.half
            queue = _queue_among(queues, before, entry.key)
            if queue != before:
                entry.payload, entry.half = encode(queue), entry.half._replace(queue=queue)
            return queue != before
        payload, at, moved = entry.payload, 0, bytearray()
        for chosen, key in entry.guesses or ((True, entry.key),):
            (before,) = _QUEUE.unpack_from(payload, at + _QUEUE_AT)
            queue = _queue_among(queues, before, key)
            if chosen and queue != before:
                moved = moved or bytearray(payload)
                _QUEUE.pack_into(moved, at + _QUEUE_AT, queue)
            at += _SIZE.unpack_from(payload, at)[0]
        if moved:
            entry.payload = bytes(moved)
        return bool(moved)

    def _place_again(self) -> None:
        """Send refused messages to queues that the topic has; end those that were in such a one."""
        misplaced, self._misplaced = self._misplaced, []
        again = []
        for entry in misplaced:
            if self._place(entry):
                entry.chosen = False  # once
                again.append(entry)
            else:
                _settle_failure(entry, self.ended)
        self._unsent = in_order([*again, *self._unsent])
        self._window.release()

    def _on_refusal(self, frame: Frame, reply: api.PutDone, now: float) -> None:
        """Send this frame and all later frames again: the node refuses the rest of their run."""
        for entry in frame.entries:
            entry.status, entry.reason = reply.status, reply.reason
        later = [each for each in self._frames.values() if each.rid >= frame.rid]
        # With an epoch the node had appended this frame: it may have the rest of the run too.
        unknown = reply.status is Status.TIMEOUT and reply.epoch > 0
        self._roll_back(later, unknown=unknown)
        self._pause(now)
        if reply.master is not None:
            self.cluster.add(reply.master)
            self._transport.open(self.cluster.addresses)
        if reply.status is Status.SERVICE_NOT_AVAILABLE:
            self.cluster.lose()
        if reply.status is not Status.BUSY:
            self._ask_for_master(now)

    def _pause(self, now: float) -> None:
        self._paused_until_ms = now + PAUSES_MS[min(self._pauses, len(PAUSES_MS) - 1)]
        self._pauses += 1

    def _roll_back(self, frames: list[Frame], *, unknown: bool) -> None:
        """Take frames back and begin a new run with the unsettled entries."""
        self._run += 1
        self._at = self._acked_bytes = 0
        back = [entry for frame in frames for entry in frame.entries]
        if unknown:
            for entry in back:
                self._mark_unknown(entry)
        for frame in frames:
            del self._frames[frame.rid]
        back += self._misplaced  # certainly not stored; it is refused again, if it still has to be
        self._misplaced.clear()
        if back:
            self._unsent = in_order([*back, *self._unsent])
            self._window.release()

    def _mark_unknown(self, entry: Entry) -> None:
        """Mark an entry as unknown: an attempt may have stored it.

        An entry without HS_SEQ is ended, because a second attempt could store it twice.
        """
        entry.unknown = True
        if not self._options.idempotent:
            _settle_failure(entry, self.ended)

    # -- deadlines

    def _expire(self, now: float) -> None:
        expired = self._window.expired(now)
        if not expired:
            return
        in_flight = {id(entry) for frame in self._frames.values() for entry in frame.entries}
        for entry in expired:
            entry.unknown |= id(entry) in in_flight
            _give_up(entry, self._late_reason(), self.ended)
        self._unsent = in_order(self._unsent)
        self._window.release()

    def _leave(self, now: float, leave_ms: float) -> None:
        """End entries that no master takes and that are certainly not stored, if who sent them
        sends them to another group then.
        """
        gone = [
            entry
            for entry in self._unsent
            if entry.may_move
            and not entry.settled
            and not entry.unknown
            and now - entry.queued_ms >= leave_ms
            and (self.cluster.master is None or entry.status.is_refusal)
        ]
        for entry in gone:
            _give_up(entry, self._late_reason(), self.ended)
        if gone:
            self._unsent = in_order(self._unsent)
            self._window.release()

    def _end_refused(self, why: str) -> None:
        """End all entries: no node accepts this client, and more attempts would be in vain."""
        for frame in self._frames.values():  # the master was lost before its connection ended
            for entry in frame.entries:
                entry.unknown = True
        for entry in self._window.entries():
            if not entry.settled:
                entry.status, entry.reason = Status.UNAUTHENTICATED, why
                _settle_failure(entry, self.ended)
        self.calls.refuse(why)
        self._frames.clear()
        self._unsent.clear()
        self._window.release()

    def _late_reason(self) -> str:
        if self.cluster.master is None:
            return f"no writable master: {self.cluster.reason()}"
        return f"{self.cluster.master} did not answer in time"

    def _check_answers(self, now: float) -> None:
        """Ask for the master if none is known or a frame is late; replace a dead connection."""
        first_ms, master = self._first_sent_ms(), self.cluster.master
        if first_ms is not None and now - first_ms > LATE_MS and master is not None:
            self._note_leaving(master, now)
            first_ms = self._first_sent_ms()
        if first_ms is not None:
            age = now - first_ms
            if age > ATTEMPT_MS + ATTEMPT_SLACK_MS:
                self.cluster.lose()
                self._roll_back(list(self._frames.values()), unknown=True)
                self.calls.roll_back()
                if master is not None:
                    self._transport.reopen(master)
            wanted = age > LATE_MS or self.cluster.master is None
        else:
            waits = self._unsent or not self.master_found or len(self.calls) or self._wanted
            waits = waits or self.wants_master
            wanted = bool(self._misplaced) or (self.cluster.master is None and bool(waits))
        if wanted and now >= self._next_ask_ms:
            self._ask_for_master(now)

    def _note_leaving(self, master: str, now: float) -> None:
        """Note which requests still leave, if the node has taken bytes since the last look.

        Over a slow link a large frame, and what is behind it, may take longer to leave than a node
        may take to answer. Bytes of later requests say nothing about those that have left.
        """
        before, self._acked_bytes = self._acked_bytes, self._transport.acked_bytes(master)
        if self._acked_bytes > before:
            for frame in self._frames.values():
                if frame.end_bytes > self._acked_bytes:
                    frame.sent_ms = now
            self.calls.note_leaving(self._acked_bytes, now)

    def _ask_for_master(self, now: float) -> None:
        self._next_ask_ms = now + ASK_MS
        self.wants_master = False
        for address in self.cluster.addresses:
            self._transport.send(address, api.AskMap(next(self._rids)))

    # -- sending

    def _transmit(self, now: float) -> None:
        self._guesses = False
        if self._drains or self._misplaced:
            # In order: what is in flight may be refused too, and is before later ones of its keys.
            waits = self._map_after is not None or any(
                entry.topic in self._wanted for entry in self._misplaced
            )
            if self._frames or (self._misplaced and waits):
                return
            self._drains = False
            self._place_again()
        master = self.cluster.master
        if master is None or now < self._paused_until_ms:
            return
        while self._unsent and len(self._frames) < MAX_FRAMES:
            entries, count, full = self._next_entries()
            if not entries:
                return
            if not full and (len(self._frames) >= SMALL_FRAMES or now < self._ready_ms(entries[0])):
                return
            first = entries[0]
            if first.expires_ms - now < LAST_TRY_MS and first.status.is_refusal:
                self._paused_until_ms = first.expires_ms  # it then fails with its last refusal
                return
            if not self._send(master, entries, count, now):
                self._paused_until_ms = now + PAUSES_MS[0]
                return
            for _ in entries:
                self._unsent.popleft()

    def _next_entries(self) -> tuple[list[Entry], int, bool]:
        """Return the entries of the next frame, their number of records, and whether it is full.

        The entries stay in `_unsent`. Those behind an entry whose queue is a guess wait with it: a
        Future's callback does not wait for the number of queues, and a key has to keep its queue.
        """
        while self._unsent and self._unsent[0].settled:
            self._unsent.popleft()
        entries: list[Entry] = []
        count = size = 0
        most_records, most_bytes = self._frame_records, self._options.batch_bytes
        cluster = self.cluster
        may_guess = not cluster.lists_all
        for entry in self._unsent:
            chosen = entry.chosen or entry.guesses
            if may_guess and chosen and not cluster.knows_queues(entry.topic):
                self.want_queues(entry.topic)
                self._shrunk.add(entry.topic)
                self._guesses = not entries
                return entries, count, True
            size += len(entry.payload)
            beyond = count + entry.count > most_records or size > most_bytes
            if entries and (beyond or entry.future.done()):
                return entries, count, True
            count += entry.count
            entries.append(entry)
        return entries, count, count >= most_records or size >= most_bytes

    def _send(self, master: str, entries: list[Entry], count: int, now: float) -> bool:
        options = self._options
        rid = next(self._rids)
        run, at = (0, 0) if options.acks == 0 else (self._run, self._at)
        put = api.Put(rid, options.acks, options.sync_flush, self._attempt_ms, run, at)
        if self._shrunk:
            for entry in entries:
                if entry.topic in self._shrunk:
                    self._place(entry)
        payload = entries[0].payload
        if len(entries) > 1:
            payload = b"".join([entry.payload for entry in entries])
        # The frame is listed before it is sent: an interrupted `send` may have sent it.
        self._frames[rid] = Frame(rid, master, entries, count, now)
        if not self._transport.send(master, put, payload):
            del self._frames[rid]
            return False
        if options.acks == 0:
            _settle_unasked(entries, self.ended)
            del self._frames[rid]
            self._window.release()
            return True
        self._frames[rid].end_bytes = self._transport.sent_bytes(master)
        self._at += 1
        return True


def _queue_among(queues: int, before: int, key: str | None) -> int:
    """Return which of so many queues a message goes to that was for the queue `before`."""
    return before % queues if key is None else queue_of_key(key, queues)


# -- from a node's answer to the callers' Futures


def _settle_reply(
    frame: Frame, reply: api.PutDone, ended: Ended, misplaced: list[Entry], *, retry_stored: bool
) -> list[Entry]:
    """Settle a frame's entries; return those to send again.

    With `retry_stored` these may be stored already: an attempt has not confirmed them. Adds to
    `misplaced` those that are perhaps refused for the queue that this client has chosen.
    """
    again: list[Entry] = []
    place = 0
    if frame.count != len(reply.offsets):
        _settle_whole(frame, reply, ended, misplaced)
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
        bad = min((r for r in results if r.status is not _PUT_OK), key=_certainty, default=None)
        may_be_stored = any(r.status.is_stored or r.status is Status.TIMEOUT for r in results)
        if bad is None:
            _succeed(entry, results, ended)
        elif all(_may_succeed(r.status) for r in results) and (retry_stored or not may_be_stored):
            entry.unknown |= may_be_stored
            entry.status, entry.reason = bad.status, reply.reason
            entry.result = bad if bad.status.is_stored else None
            again.append(entry)
        else:
            refused = sum(1 for r in results if not r.status.is_stored)
            entry.reason = reply.reason
            if 0 < refused < len(results) and bad.status is not Status.TIMEOUT:
                entry.reason += f" ({refused} of {len(results)} refused, the others are stored)"
            entry.status = bad.status
            entry.result = bad if bad.status.is_stored else None
            _settle_refused(entry, ended, misplaced)
    return again


def _certainty(result: SendResult) -> int:
    """Return how much the status of one record says of a whole batch: that of the least counts.

    One of unknown outcome says nothing of the others, and where one is refused not all are stored.
    """
    if result.status is Status.TIMEOUT:
        return 0
    return 2 if result.status.is_stored else 1


def _may_succeed(status: Status) -> bool:
    """Whether a later attempt may end as PUT_OK."""
    return status.is_stored or status.is_refusal or status is Status.TIMEOUT


def _settle_whole(frame: Frame, reply: api.PutDone, ended: Ended, misplaced: list[Entry]) -> None:
    """Settle the entries of a frame whose answer does not list its records.

    The node has refused the frame, or the answer does not fit it.
    """
    statuses = set(reply.statuses or [reply.status])
    refused = len(statuses) == 1 and not next(iter(statuses)).is_stored
    for entry in frame.entries:
        entry.status = statuses.pop() if refused else Status.TIMEOUT
        statuses.add(entry.status)
        entry.final = refused and entry.status.is_refusal
        entry.reason = reply.reason if refused else "the node's answer does not fit the request"
        _settle_refused(entry, ended, misplaced)


def _settle_refused(entry: Entry, ended: Ended, misplaced: list[Entry]) -> None:
    """End an entry with its last status, unless another queue may take it."""
    if entry.status is _ILLEGAL and entry.chosen and not entry.settled:
        misplaced.append(entry)
    else:
        _settle_failure(entry, ended)


def _settle_unasked(entries: list[Entry], ended: Ended) -> None:
    """Settle entries with `acks` 0, which no node answers; PUT_OK then means only "sent"."""
    for entry in entries:
        results = [SendResult(Status.PUT_OK, entry.topic, 0) for _ in range(entry.count)]
        _succeed(entry, results, ended)


def _give_up(entry: Entry, reason: str, ended: Ended) -> None:
    """End an entry as failed; an entry that was never sent is certainly not stored."""
    if entry.status is Status.TIMEOUT and not entry.unknown:
        entry.status = Status.SERVICE_NOT_AVAILABLE
    entry.reason = entry.reason or reason
    _settle_failure(entry, ended)


def _settle_failure(entry: Entry, ended: Ended) -> None:
    """End an entry with its last status."""
    if not entry.settled and entry.future.fail(_failure(entry)):
        ended.append(entry.future)


def _failure(entry: Entry) -> HastoreError:
    if entry.result is not None:  # stored by an attempt, but not confirmed
        reason = entry.reason or "not confirmed within the delivery timeout"
        return failure_of(entry.result.status, reason, entry.result, unknown=True)
    reason = entry.reason
    if entry.doubted_epoch is not None:
        reason += f"; {doubt_of(entry.doubted_epoch)}"
    failure = failure_of(entry.status, reason, None, unknown=entry.unknown)
    if isinstance(failure, NotStoredError):
        failure.final = entry.final
    return failure


def _succeed(entry: Entry, results: list[SendResult], ended: Ended) -> None:
    value: Any = results if entry.is_batch else results[0]
    if not entry.settled and entry.future.succeed(value):
        ended.append(entry.future)
