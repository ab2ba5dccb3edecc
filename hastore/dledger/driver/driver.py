"""DLedgerDriver: runs the DLedger core of one node over its store, its links and its clock.

    links' threads      on_messages, on_link --+
    the API's thread    put_encoded -----------+--> [lock] core.step -> Update -> carried out
    the flush thread    on_persisted ----------+                                  in its order
    DLedgerDriver       ticks, requests -------+

All events go through `step` of the core under one lock. An Update is carried out under the same
lock, in the order of its fields: what must be durable is on the disk before a message is sent. Only
then are messages handed to the links, which never block. A flush is asked for under the lock and
done outside it; the bytes that arrive meanwhile are taken and share the next flush. The node counts
itself, and answers a leader, only up to what its store reports as persisted.

What goes wrong:

- **A peer's bytes are no entries, or the disk is full**, after the core has taken them: nothing of
  the update was sent. The core is begun anew from what the store has, as after a restart.
- **A failed sync, a broken store, or one that contradicts the core**: the node leaves the quorum.
  It neither votes nor acknowledges, closes its links and refuses puts; `left` says why.
- **Any other exception** is a defect; the node leaves the quorum too, and ends (`on_failure`).

Locks: `PeerLinks` tells of links under its own lock, which comes before the driver's; then come
those of the store and of the links' channels.
"""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hastore.clock import Clock
from hastore.config.model import Flush
from hastore.counters import ReplicationCounts
from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.events import (
    ChangeMembers,
    DiskFull,
    Event,
    LinkChanged,
    MemberList,
    OnSettled,
    OwnEntry,
    Persisted,
    Propose,
    Receive,
    ReplayBlocked,
    Retained,
    Role,
    Settings,
    Settled,
    Start,
    SyncHangs,
    Tick,
    ToldRemoved,
    Transfer,
    Update,
)
from hastore.dledger.driver.carry_out import (
    Asked,
    DiskRoom,
    OrderedCalls,
    Outbox,
    Pace,
    Syncs,
    TermWaits,
    contradiction,
    log_bytes,
    lost_commit,
)
from hastore.dledger.driver.joining import (
    GroupId,
    begun_group,
    first_members,
    in_line,
    join,
    saved_lists,
)
from hastore.dledger.driver.requests import (
    DONE,
    REFUSED,
    UNKNOWN,
    AdminRequest,
    RequestFile,
    RequestOutcome,
)
from hastore.dledger.driver.status import (
    NO_ANSWER,
    FollowerStatus,
    ack_points_problem,
    followers_of,
    group_text,
    problems_of,
    refusal_of,
    removed_text,
    replay_refusal,
    role_and_log,
    status_fields,
    sync_flush_refusal,
)
from hastore.dledger.links.channel import DEFAULT_TIMES, LinkTimes
from hastore.dledger.links.peer_links import PeerLinks, PeerMember
from hastore.dledger.store.mmap_file_store import EntryStore
from hastore.errors import (
    HastoreError,
    NotStoredError,
    ProtocolError,
    Status,
    StoreBrokenError,
    StoreFullError,
    UsageError,
)
from hastore.ha.master.group_transfer import GroupTransferService
from hastore.protocol.dledger import (
    AppendRequest,
    CompareRequest,
    InstallRequest,
    MemberSet,
    Message,
    TruncateRequest,
    VoteResponse,
)
from hastore.protocol.dledger_link import Received
from hastore.service import OnFailure, Service
from hastore.store.append.results import Guards, Payload, PutResults

log = logging.getLogger(__name__)

LOOK_MS = 200.0  # how often the thread looks for requests, a broken store, and room on the disk
SLOW_SYNC_MS = 500.0  # while a sync takes longer, no request is taken
ENDED_KEPT = 8  # of the requests of administrators
TIMED_EVERY = 8  # of so many puts one is timed until each peer has it
TRANSFER_WAIT_S = 1.5  # how long a leader that stops waits for its successor
HAND_OVER_AGAIN_S = 0.02  # it asks again after this, if nobody could take over at once

_NOT_WRITABLE = Status.SERVICE_NOT_AVAILABLE
_PUT = object()  # the token of every put


class DLedgerDriver(Service):
    """One node's part in its group. Any thread may call the public methods.

    `on_role()` is called after the role, the term or the leader has changed, without the driver's
    lock. The store calls `on_persisted`: whoever makes both connects them (server/callbacks.py).
    """

    def __init__(
        self,
        member: PeerMember,
        store: EntryStore,
        settings: Settings,
        clock: Clock,
        transfer: GroupTransferService,
        requests: RequestFile,
        *,
        times: LinkTimes = DEFAULT_TIMES,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; the caller opens `store`, binds `links`, starts, stops, closes the store."""
        super().__init__("DLedgerDriver", on_failure=on_failure)
        self.member = member
        self.store = store
        self.on_role: Callable[[], None] = lambda: None
        self.left: str | None = None  # why this node has left the quorum
        self.waits: str | None = "the node starts"  # why it takes no part yet
        self.counts = ReplicationCounts()  # changed with the lock
        self._puts = 0
        self._counted: tuple[Role, int] | None = None  # the role and term that were counted last
        self._settings = settings
        self._clock = clock
        sync = member.config.store.flush is Flush.SYNC
        self._syncs = Syncs(store, clock, enabled=sync)
        self._calls = OrderedCalls()
        self._waits = TermWaits(transfer, self._calls, lambda: not self.without_syncs())
        self._lock = threading.RLock()
        self._pace = Pace(clock)
        self._room = DiskRoom(store)
        self.core: DLedgerCore | None = None  # for its status; None before the node takes part
        self._stepping = False
        self._beginning = False
        self._persisted_due = False
        self._opens_at = 0
        self._led = False  # whether a leader was known since the start
        self._contradictions: dict[int, str] = {}  # by the peer that showed it
        self._group = GroupId(member, store)
        self._begun_anew = ""  # the last reason; the same one is logged once
        self._stuck: str | None = None  # why the core began anew, until its log or group goes on
        self._stopping_puts = False
        self.links = PeerLinks(
            member, store.messages, self, clock, times=times, on_failure=on_failure
        )
        self.set_addresses = self.links.set_addresses  # of a changed configuration
        self._outbox = Outbox(self.links, store)
        self._requests = RequestRunner(requests, self, self.links)

    # -- status ------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, as far as it knows."""
        core = self.core
        return core is not None and self.left is None and core.role is Role.LEADER

    @property
    def takes_puts(self) -> bool:
        """Whether this leader's term is open for puts, as far as that is known without a lock."""
        core = self.core
        return (
            core is not None
            and not self._stopping_puts
            and self._waits.open_term == core.term
            and self.store.messages.dispatched_offset >= self._opens_at
        )

    @property
    def term(self) -> int:
        """The current term; 0 before the node takes part."""
        core = self.core
        return 0 if core is None else core.term

    @property
    def open_term(self) -> int:
        """The term in which this node takes puts; 0: it takes none."""
        return self._waits.open_term

    def followers(self) -> list[FollowerStatus]:
        """Return what this leader knows of the other members, and learners; else nothing."""
        with self._lock:
            return followers_of(self.core) if self.is_leader else []

    def without_syncs(self) -> set[int]:
        """Return the members that confirm what is written only, as far as this one knows.

        While there is one, a majority that has confirmed an entry may not have it on its disks.
        """
        core, member = self.core, self.member
        found = member.without_syncs | (set() if member.syncs else {member.node})
        return found if core is None else found.intersection(core.members)

    def sync_flush_refusal(self) -> str | None:
        """Return why a put that asks for disks cannot be confirmed now; None if it can."""
        nodes = self.without_syncs()
        return sync_flush_refusal(nodes) if nodes else None

    def full(self) -> str | None:
        """Return why no entry is stored, such as a full disk; None while there is room."""
        failure = self._room.failure
        return None if failure is None else f"no entry is stored: {failure}"

    def outdated(self) -> str | None:
        """Return why what this node serves is not current; None while it is in the group."""
        core = self.core
        removed = None if core is None else core.removed
        return None if core is None or removed is None else removed_text(core.node, removed)

    def status(self) -> dict[str, Any]:
        """Return the fields of `hastore status` that this mode adds."""
        links = self.links.status()
        with self._lock:
            return status_fields(
                self.core,
                self.store,
                takes_part=self.left is None,
                links=links,
                request=self._requests.outcome,
                ended=self._requests.ended,
            )

    def problems(self) -> list[str]:
        """Return what an operator must look at."""
        own = (
            None if self.left is None else f"this node has left the quorum: {self.left}",
            self.waits,
            self._room.problem,
            None
            if self._stuck is None
            else f"this node cannot carry out what its group has decided: {self._stuck}; it tries"
            " again: look at its disk, and at the rights of the files in its store",
            self.links.failure,
            *(
                f"node {peer} contradicts this one: {what}: a node has forgotten its votes, as with"
                " a store that was put back, and acknowledged messages may be lost; compare the"
                " nodes with `hastore pipeline audit`, keep those that agree, and start the other"
                " with an empty store; a restart of this node ends this message"
                for peer, what in sorted(dict(self._contradictions).items())
            ),
        )
        found = [one for one in own if one is not None]
        links, differences = self.links.status(), self.links.differences()
        with self._lock:
            found += differences + problems_of(self.core, links)
        mixed = ack_points_problem(self.without_syncs(), self.core)
        return found if mixed is None else [*found, mixed]

    # -- puts --------------------------------------------------------------------------------------

    def refusal(self) -> str | None:
        """Return why puts are refused now; None while this node takes them."""
        with self._lock:
            return self._refusal()[0]

    def _refusal(self) -> tuple[str | None, Status]:
        core = self.core
        if self.left is not None:
            return f"this node has left the quorum: {self.left}", _NOT_WRITABLE
        if self._stopping_puts:
            return "the node is shutting down", _NOT_WRITABLE
        if core is None:
            return self.waits or "the node starts", _NOT_WRITABLE
        refused = refusal_of(core, self._room.failure)
        if refused is not None:
            return refused
        if self._waits.open_term != core.term:
            return f"term {core.term} opens", _NOT_WRITABLE
        if self.store.messages.dispatched_offset < self._opens_at:
            return replay_refusal(core, self.store.messages.replay.blocked_reason), _NOT_WRITABLE
        return None, _NOT_WRITABLE

    def put_encoded(self, payloads: Sequence[Payload], guards: Guards | None = None) -> PutResults:
        """Append all valid records of all payloads as entries of this term, and push them.

        Whether they are committed is told to the GroupTransferService, by offset. Raises
        NotStoredError if this node does not take puts, StoreError if the store refuses; in both
        cases nothing was appended.
        """
        try:
            with self._lock:
                reason, status = self._refusal()
                if reason is not None:
                    raise NotStoredError(reason, status)
                return self._put(payloads, guards)
        finally:
            self._calls.run()

    def _put(self, payloads: Sequence[Payload], guards: Guards | None) -> PutResults:
        core = self.core
        assert core is not None
        now = self._clock.monotonic_ms()
        self._pace.last_put_ms = now
        try:
            put = self.store.put(core.term, payloads, guards)
            if put.count:
                # The token only counts the entries that wait: GroupTransferService ends the waits.
                self._step(Propose(now, put.count, _PUT))
                self._puts += 1
                if self._puts % TIMED_EVERY == 1:
                    trips, end = self.counts.round_trips, core.ledger_end_index
                    for peer in core.members:
                        if peer != core.node:
                            trips.sent(peer, end, now)
        except StoreFullError as failure:
            if self._room.note(failure):
                self._step(DiskFull(now, True))
            raise
        except StoreBrokenError as failure:
            self._leave(str(failure))
            raise
        finally:
            self._finish()
        return put.results

    def hand_over(self, to: int, done: OnSettled) -> None:
        """Let another node lead; `done` gets the outcome, from any thread."""
        asked = Asked(done)
        self._ask(asked, Transfer(self._clock.monotonic_ms(), to, asked))

    def change_members(self, wanted: MemberSet, done: OnSettled) -> None:
        """Add a learner, or remove one or a member; `done` gets the outcome, from any thread."""
        asked = Asked(done)
        members, learners, leaving = wanted
        now = self._clock.monotonic_ms()
        self._ask(asked, ChangeMembers(now, members, asked, learners, leaving))

    def _ask(self, asked: Asked, event: Event) -> None:
        with self._lock:
            if self.core is None or self.left is not None:
                reason = self.left or self.waits or "the node starts"
                self._calls.add(partial(asked.done, Settled(asked, "REFUSED", reason=reason)))
            else:
                self._waits.ask(asked)
                self._step(event)
                self._finish()
        self._calls.run()

    def retained(self, begin_index: int) -> None:
        """Let the core know that retention is about to remove the entries below an index."""
        self._do(Retained(self._clock.monotonic_ms(), begin_index))

    # -- events from the links and the flush thread ------------------------------------------------

    def on_messages(self, peer: int, messages: list[Received]) -> None:
        """Take messages of a peer, together; one flush serves all entries among them."""
        with self._lock:
            now = self._clock.monotonic_ms()
            for message, data in messages:
                assert message is not None
                if self._would_wait(message):
                    continue  # the peer sends it again
                if isinstance(message, CompareRequest):
                    found = contradiction(message, self.store)
                    if found is not None:
                        self._note_contradiction(peer, found)
                        self.links.close(peer, found)
                        continue
                elif isinstance(message, TruncateRequest):  # the core refuses it
                    found = self._lost_commit(message)
                    if found is not None:
                        self._note_contradiction(peer, found)
                elif isinstance(message, InstallRequest) and self._is_misplaced(peer, message):
                    continue
                self._step(Receive(now, peer, message), data)
            if peer in self.counts.round_trips.waiting and self.core is not None:
                mark = self.core.water_marks.get(peer, NO_ANSWER)
                self.counts.round_trips.reported(peer, mark, now)
            # Not what a leader has just appended: if its disk hung, the others' answers on this
            # link, which may be all that a commit lacks, would not be read.
            size = sum([len(data) for _, data in messages if data])
            syncs = not self.is_leader and self._syncs.claim(now, size)
            self._finish()
        self._calls.run()
        if syncs:
            try:
                self._syncs.sync_here(now)
            except StoreBrokenError as failure:
                self._break(failure)

    def _would_wait(self, message: Message) -> bool:
        """Whether the disk may hang, and a message lets this node save something first.

        It would wait with the lock held: nothing could be asked, and no other message be read. Who
        asked for a vote has asked anew, or given up, once that takes an election timeout.
        """
        core = self.core
        if core is None or not self._syncs.enabled:
            return False
        running_ms = self.store.messages.flush_service.running_ms
        if running_ms <= self._settings.election_timeout_ms:
            return False
        return isinstance(message, VoteResponse) or core.saves_first(message)

    def _is_misplaced(self, peer: int, request: InstallRequest) -> bool:
        """Whether a leader lets the log begin where none can; such a message ends its link."""
        if request.pos % self.store.messages.file_size == 0:
            return False
        self.links.close(peer, f"node {peer} lets a log begin at {request.pos}, inside a file")
        return True

    def on_link(self, peer: int, up: bool) -> None:
        """Tell the core that a link was opened or has ended."""
        with self._lock:
            self.counts.round_trips.forget(peer)
            if up:
                self.counts.links.add(str(peer))
        self._do(LinkChanged(self._clock.monotonic_ms(), peer, up))

    def removal_of(self, node: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Return the committed list that leaves out a node; see PeerHandler."""
        with self._lock:
            return None if self.core is None else self.core.removal_of(node)

    def on_removed(self, removed: tuple[int, int, tuple[int, ...]]) -> None:
        """Tell the core that this node was removed; see PeerHandler."""
        self._do(ToldRemoved(self._clock.monotonic_ms(), removed))

    def group_nodes(self) -> tuple[int, ...]:
        """Return the members and learners of a group that has begun; see PeerHandler."""
        core = self.core
        if core is None or core.ledger_end_index < 0:
            return ()
        group = core.group
        return (*group.members, *group.learners)

    def begun_members(self) -> tuple[int, ...]:
        """Return the members of a group that has begun; see PeerHandler."""
        core = self.core
        if core is None:  # a new node may ask before the core is there, and takes nothing for new
            return begun_group(self.member, self.store).members
        return core.members if core.ledger_end_index >= 0 else ()

    def on_persisted(self, _index: int) -> None:
        """Tell the core what is durable; the thread that synced calls it."""
        with self._lock:
            if self._stepping:  # the store synced while an update is carried out
                self._persisted_due = True
                return
            self._step_persisted()
            self._finish()
        self._calls.run()

    def _step_persisted(self) -> None:
        # The store's own value counts: a cut after the sync has lowered it.
        index = self.store.persisted_index if self._syncs.enabled else self.store.end_index
        core = self.core
        if core is not None and index > core.persisted_index:
            self._step(Persisted(self._clock.monotonic_ms(), index))

    def _do(self, event: Event) -> None:
        with self._lock:
            self._step(event)
            self._finish()
        self._calls.run()

    # -- the step ----------------------------------------------------------------------------------

    def _step(
        self, event: Event, data: memoryview | None = None, *, fresh: DLedgerCore | None = None
    ) -> None:
        """Step the core and carry its update out; the caller holds the lock.

        `fresh` replaces the core once it has taken the event: other threads read `self.core`.
        """
        core = fresh or self.core
        if core is None or self.left is not None:
            return
        self._stepping = True
        try:
            update = core.step(event)
            self.core = core
            self._carry_out(update, event, data)
            if update.append or update.committed_index is not None:
                self._stuck = None
        except (StoreBrokenError, UsageError) as failure:  # closed; or it contradicts the core
            self._leave(str(failure))
        except (HastoreError, OSError) as failure:
            if isinstance(event, Receive) and isinstance(failure, ProtocolError):
                self.links.close(event.peer, str(failure))
            self._begin_anew(failure)
        except Exception as defect:
            self._leave(f"a defect: {defect!r}")
            log.exception("an update could not be carried out")
            self._calls.add(partial(self._on_failure, self.name, defect))
        finally:
            self._stepping = False
        written = self._syncs.due and not self._syncs.enabled
        if self._persisted_due or written:
            self._persisted_due = False
            self._syncs.due = self._syncs.due and not written
            self._step_persisted()

    def _carry_out(self, update: Update, event: Event, data: memoryview | None) -> None:
        store = self.store
        if update.hard_state is not None:
            state = update.hard_state
            store.save_hard_state(state, remembers=state.remembers)
            if state.remembers and self.member.state.data.lost_disk:
                in_line(self.member)
        if update.truncate_from is not None:
            index = update.truncate_from
            self._stop_sending(store.position(index))
            size = store.truncate(index)
            log.warning("entries from %d on were cut; %d bytes are in rescued/", index, size)
        # At the next start a list whose entry is not in the log does not count; one that is in the
        # log and not saved would be missing. So lists are saved after a cut, before an append.
        lists = update.member_lists
        if lists is not None:  # those of a log that is given up count until it is gone
            self._save_members(lists, keep=update.install is not None)
        if update.removed:
            self._save_removed()
        if update.install is not None:
            index, pos, prev_term = update.install
            if isinstance(event, Receive) and isinstance(event.message, InstallRequest):
                pos = event.message.pos
            self._stop_sending(0)
            kept = store.install(index, pos, prev_term)
            rest = "nothing else was in it" if kept is None else f"the rest is in {kept}"
            log.warning("the log begins anew at entry %d: what was committed in the old one has"
                        " expired; %s", index, rest)  # fmt: skip
            if lists is not None:
                self._save_members(lists)
        for entry in update.append:
            if isinstance(entry, OwnEntry):
                store.append_own(entry, self._group.for_entry())
                continue
            assert isinstance(event, Receive) and isinstance(event.message, AppendRequest)
            assert data is not None
            store.append_taken(event.message, data, entry)
        self._syncs.due = self._syncs.due or update.flush
        if update.messages:
            self._outbox.post(update.messages)
        if update.committed_index is not None:
            self._commit(update.committed_index)
        if update.role_changed:
            self._role_changed()
        if update.contradiction is not None and isinstance(event, Receive):
            self._note_contradiction(event.peer, update.contradiction)
            self.links.close(event.peer, update.contradiction)
        for settled in update.settled:
            self._waits.settle(settled)
        if update.deadline_ms is not None:
            self._pace.deadline_ms = update.deadline_ms

    def _lost_commit(self, request: TruncateRequest) -> str | None:
        """Return which committed entry the leader has lost, by its request; None if none."""
        if self.core is None or request.term < self.core.term:
            return None  # of an earlier leader
        return lost_commit(request, self.store)

    def _note_contradiction(self, peer: int, found: str) -> None:
        """Keep what shows that a node has forgotten votes, for the status."""
        if self._contradictions.get(peer) != found:
            self._contradictions[peer] = found
            log.critical("node %d contradicts this one: %s", peer, found)

    def _stop_sending(self, pos: int) -> None:
        """Leave out what would be read from the log beyond `pos`, which is cut next."""
        self._outbox.drop_appends()
        self.links.cut(pos)

    def _finish(self) -> None:
        """Send what was posted, and ask for a flush; `_calls.run()` comes after the lock."""
        try:
            self._outbox.send()
        except StoreBrokenError as failure:
            self._leave(str(failure))
        self._syncs.request()
        self._pace.wake_if_sooner()

    def _commit(self, index: int) -> None:
        self.store.commit(index)
        self._group.committed(index)
        self._waits.commit(self.store.end_position(index))
        self._calls.add(self.store.messages.tell_readers)

    def _role_changed(self) -> None:
        core = self.core
        assert core is not None
        # A first leader is what a start waits for; a later change means that one was lost.
        log.log(logging.WARNING if self._led else logging.INFO, "%s", role_and_log(core))
        self._led = self._led or core.leader is not None
        if self._counted != (core.role, core.term):
            self._counted = core.role, core.term
            self.counts.elections += core.role is Role.CANDIDATE
            self.counts.promotions += core.role is Role.LEADER
        if core.role is Role.LEADER:
            # A put waits for replay, with the lock held: so none is taken before replay is there.
            self._opens_at = self.store.messages.max_offset
            self._waits.lead(core.term, self.store.end_position(core.committed_index))
        else:
            self._waits.end()
            self.counts.round_trips.waiting.clear()
        self._calls.add(self.on_role)

    def _save_members(self, lists: tuple[MemberList, ...], *, keep: bool = False) -> None:
        state = self.member.state
        plain = tuple((one.index, one.term, one.members) for one in lists)
        more = tuple(
            (one.index, one.term, one.learners, one.leaving)
            for one in lists
            if one.learners or one.leaving
        )
        if keep:  # each once: `lists` has those of the old log that come before the new one
            plain = tuple(dict.fromkeys((*state.data.member_lists, *plain)))
            more = tuple(dict.fromkeys((*state.data.learner_lists, *more)))
        state.save(member_lists=plain, learner_lists=more)
        assert self.core is not None
        log.info("%s", group_text(self.core.group))

    def _save_removed(self) -> None:
        assert self.core is not None
        removed = self.core.removed
        if removed is None:
            log.warning("this node is in the group again")
            self.member.state.save(removed=None)
        else:
            log.warning("%s", removed_text(self.core.node, removed))
            self.member.state.save(removed=(removed.index, removed.term, removed.members))

    # -- failures ----------------------------------------------------------------------------------

    def _begin_anew(self, failure: Exception) -> None:
        """Begin the core anew from the store: it may believe in entries that the store refused."""
        full_now = self._room.note(failure)
        level = logging.DEBUG if str(failure) == self._begun_anew else logging.ERROR
        self._begun_anew = str(failure)
        log.log(level, "the core begins anew from the store: %s", failure)
        if not self._room.full and not isinstance(failure, ProtocolError):  # these are told already
            self._stuck = str(failure)
        self._outbox.clear()
        self._syncs.due = False
        self._waits.end_all(str(failure))
        # A group of one votes as it begins: without room it begins once more, and waits for room.
        if self._beginning and not full_now:
            self._leave(str(failure))
            return
        try:
            self._begin_core()
        except (HastoreError, OSError) as second:
            self._leave(f"{failure}; then {second}")
        self._calls.add(self.on_role)

    def _break(self, reason: object) -> None:
        """Leave the quorum because the store is closed."""
        with self._lock:
            self._leave(str(reason))
        self._calls.run()

    def _leave(self, reason: str) -> None:
        """Leave the quorum for good: send nothing more, take nothing more."""
        if self.left is not None:
            return
        self.left = reason
        log.critical("this node leaves the quorum: %s", reason)
        self._outbox.clear()
        self._waits.end_all(reason)
        self._calls.add(self.on_role)
        self._pace.deadline_ms = float("inf")
        self.links.hang_up(f"node {self.member.node} has left the quorum: {reason}")

    # -- start and stop ----------------------------------------------------------------------------

    def run(self) -> None:
        """Join the group, then tick, and look for requests, until stopped."""
        if not join(self.links, self.store, self.stopping, self._note_wait):
            return
        with self._lock:
            self._begin_core()
            self.waits = None
            self._finish()
        self._calls.run()
        self.links.start()
        next_look_ms = 0.0
        while not self.stopping.is_set():
            now = self._clock.monotonic_ms()
            if now >= self._pace.deadline_ms and self.left is None:
                self._do(Tick(now))
            if now >= next_look_ms:
                next_look_ms = now + LOOK_MS
                self._look_around()
            self._pace.sleep(next_look_ms, self.stopping)

    def wake(self) -> None:
        """Wake the thread."""
        self._pace.wake()

    def _note_wait(self, text: str) -> None:
        self.waits = text

    def _begin_core(self) -> None:
        """Make a core and start it with what the store has; the caller holds the lock."""
        self._beginning = True
        try:
            self._start_core()
        finally:
            self._beginning = False

    def _start_core(self) -> None:
        store, data = self.store, self.member.state.data
        if self._syncs.enabled:
            self._stepping = True  # on_persisted comes in this thread
            store.flush()
            self._stepping = self._persisted_due = False
        core = DLedgerCore(
            self.member.node, self._settings, random.Random(), partial(log_bytes, store)
        )
        now = self._clock.monotonic_ms()
        start = Start(
            now,
            store.hard_state,
            store.log_state(),
            store.committed_index,
            first_members(self.member),
            store.remembers,
            saved_lists(self.member),
            None if data.removed is None else MemberList(*data.removed),
            alone=not data.known_stores,
            disk_full=self._room.full,
        )
        self._step(start, fresh=core)
        for peer in self.member.addresses:
            if peer != core.node and peer not in self.links.linked:
                self._step(LinkChanged(now, peer, False))
        if store.messages.replay.blocked_reason is not None:
            self._step(ReplayBlocked(now, True))

    def begin_stop(self) -> None:
        """Refuse puts from now on; a leader hands over, if a follower can take over soon."""
        with self._lock:
            if self._stopping_puts:
                return
            self._stopping_puts = True
        end_ms = self._clock.monotonic_ms() + 1000 * TRANSFER_WAIT_S
        while self.is_leader and (left_ms := end_ms - self._clock.monotonic_ms()) > 0:
            near, best = self._successors()
            if not near:
                return
            over = threading.Event()
            if best is not None:
                self.hand_over(best.node, partial(_note_end, over))
                over.wait(left_ms / 1000)
            if self.is_leader:
                threading.Event().wait(HAND_OVER_AGAIN_S)

    def _successors(self) -> tuple[list[FollowerStatus], FollowerStatus | None]:
        """Return who may take over, and of those that can at once the one that has most."""
        linked = self.links.linked
        with self._lock:
            near = [
                one
                for one in self.followers()
                if one.node in linked and one.able and not one.is_learner
            ]
            refused = self.core.refusals_to_lead if self.core is not None else {}
        ready = [one for one in near if one.node not in refused]
        return near, max(ready, key=lambda one: (one.index, -one.node), default=None)

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Hand over, end the thread and the links. The store stays open.

        Return False if a thread still runs after `timeout_s`.
        """
        self.begin_stop()
        self.stopping.set()
        self.links.stop()
        ended = super().stop(timeout_s)
        with self._lock:
            if self.left is None:
                self.left = "the node stops"
            self._waits.end_all("the node stops")
        self._calls.run()
        return ended

    # -- what the thread looks at ------------------------------------------------------------------

    def _look_around(self) -> None:
        broken = self.store.messages.broken_reason
        if broken is not None:
            self._break(broken)
        with self._lock:
            has_room = self._room.recovered()
        if has_room:
            self._do(DiskFull(self._clock.monotonic_ms(), False))
        core, blocked = self.core, self.store.messages.replay.blocked_reason is not None
        if core is not None and core.blocked != blocked:
            self._do(ReplayBlocked(self._clock.monotonic_ms(), blocked))
        hangs = self._syncs.enabled and self.store.messages.flush_service.sync_problem is not None
        if core is not None and core.hangs != hangs:
            self._do(SyncHangs(self._clock.monotonic_ms(), hangs))
        if self.core is not None:
            self.links.follow_members()
            # To take a request is to wait for the disk. With one that may hang this thread would
            # not see it, and would neither beat nor hand over: the request waits instead.
            if self.store.messages.flush_service.running_ms < SLOW_SYNC_MS:
                self._requests.run_next()


def _note_end(over: threading.Event, _settled: Settled) -> None:
    over.set()


class RequestRunner:
    """Run what the file asks for, one request at a time; one thread calls `run_next`."""

    def __init__(self, file: RequestFile, control: DLedgerDriver, links: PeerLinks) -> None:
        self.outcome: RequestOutcome | None = None  # of the last request
        # Who has asked looks at the status now and then: by then others may have asked, too.
        self.ended: tuple[RequestOutcome, ...] = ()  # the last few, the newest last
        self._file = file
        self._control = control
        self._links = links

    def run_next(self) -> None:
        """Run the request that waits, if there is one and no other still runs."""
        if self.outcome is not None and self.outcome.outcome is None:
            return
        try:
            request = self._file.pop()
        except OSError as error:
            log.error("a request of an administrator cannot be taken: %s", error)
            return
        if request is not None:
            self._run(request)

    def _run(self, request: AdminRequest) -> None:
        control, core = self._control, self._control.core
        problem = self._problem(request)
        if problem is not None or core is None:
            self._set(request, REFUSED, problem or "the node starts")
            return
        self._set(request, None, "")
        log.info("an administrator asks: %s", request.text)
        done = partial(self._done, request)
        if request.command == "transfer":
            control.hand_over(request.node, done)
        else:
            control.change_members(request.wanted(core.group), done)

    def _problem(self, request: AdminRequest) -> str | None:
        core, left = self._control.core, self._control.left
        if core is None:
            return "the node starts"
        if left is not None:
            return f"this node has left the quorum: {left}"
        if core.role is not Role.LEADER:
            leader = core.leader
            where = "no leader is known now" if leader is None else f"node {leader} is the leader"
            return f"{where}: give the command with the leader's file"
        return self._file.refusal(
            request, node=core.node, term=core.term, group=core.group,
            addresses=self._links.member.addresses, linked=self._links.linked,
            old=self._links.without_learners,
        )  # fmt: skip

    def _done(self, request: AdminRequest, settled: Settled) -> None:
        outcome = {"COMMITTED": DONE, "REFUSED": REFUSED}.get(settled.outcome, UNKNOWN)
        self._set(request, outcome, settled.reason or ("" if outcome == DONE else settled.outcome))

    def _set(self, request: AdminRequest, outcome: str | None, reason: str) -> None:
        self.outcome = RequestOutcome(request.id, request.command, request.node, outcome, reason)
        if outcome is not None:
            self.ended = (*self.ended[1 - ENDED_KEPT :], self.outcome)
            level = logging.INFO if outcome == DONE else logging.WARNING
            why = f": {reason}" if reason else ""
            log.log(level, "the request to %s: %s%s", request.text, outcome, why)
            self._file.on_outcome(self.outcome)
