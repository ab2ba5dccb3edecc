"""HAClient: finds the group's master, sends it HELLO, and obeys the answer.

    survey -> the open master of the greatest epoch -> promise its epoch -> HELLO (FOLLOW)
      StreamFrom -> stream until the link breaks       RewindTo -> archive, cut, HELLO again
      Resync -> set the store aside, HELLO again       Refused -> wait, survey again

Receiving and appending are in slave_stream.py and ha/replica/receiver.py. One thread owns the link;
other threads may call `drop_link()` and `stop()`. That is so for each Follower: HAClient, and
ClassicHAClient in classic_client.py.
"""

import logging
import threading
from typing import Any

import msgspec

from hastore.bounded_log import StartPhase
from hastore.errors import HastoreError, ProtocolError, StoreFullError
from hastore.ha.hello.peer import Call, ask_all, call, check_peer, telling_of_tampering
from hastore.ha.node.member import Member
from hastore.ha.replica.digests import digest_fields
from hastore.ha.replica.receiver import require_open
from hastore.ha.replica.rewind import confirmed_for, cut_back, entries_at, finish_cut
from hastore.ha.rules.epochs import (
    History,
    WrittenOver,
    common_point,
    named_common,
    without_resumptions,
)
from hastore.ha.slave.crc_check import DamagedRecordError
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.protocol.hello import Hello, Purpose, Refused, Resync, RewindTo, StreamFrom
from hastore.service import Service

log = logging.getLogger(__name__)

SURVEY_PAUSE_S = 0.1
AGAIN_PAUSE_S = 0.02  # so that a link that breaks at once does not make the thread spin
SURVEY_PAUSE_MAX_S = 5.0
DAMAGED_MAX = 10_000  # how many damaged records are remembered


class Follower(Service):
    """The thread HAClient, which owns the link to a master."""

    def __init__(self, member: Member, problem: str) -> None:
        super().__init__("HAClient", on_failure=member.on_failure)
        self._member = member
        self._lock = threading.Lock()
        self._stream: SlaveStream | None = None
        self._retry_now = threading.Event()
        self._start_phase = StartPhase(member.clock)
        self._logged: tuple[str, int] | None = None  # the last problem, and its level
        self.accept_loss = False
        # What is given up is so before no master of a later epoch; None: before any.
        self.accepted_epoch: int | None = None
        # The epoch of the last master that was found, open or not now; None: none was yet.
        self.met_epoch: int | None = None
        # A problem that the operator should look at, whether a stream flows or not.
        self.notice: str | None = None
        self.problem: str | None = problem  # why no stream flows; None while one does
        self.no_room: str | None = None  # the same, if the disk is full: an operator must act
        # The followed master's node number; a RocketMQ master has none.
        self.master: int | None = None
        # The newest master that the last survey found: (its epoch, its node number).
        self.known_master: tuple[int, int] | None = None

    @property
    def linked(self) -> bool:
        """Whether a stream flows."""
        return self._stream is not None

    @property
    def full(self) -> str | None:
        """Why nothing of the stream is appended, such as a full disk; None while it is."""
        stream = self._stream
        return None if stream is None else stream.full

    def drop_link(self) -> None:
        """Close the link, if there is one, and look for a master at once.

        Called, for example, when the node has made a promise.
        """
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        self._retry_now.set()

    def accept(self, epoch: int) -> None:
        """Let the next HELLO give up what differs, unless it is to a master of a later epoch."""
        self.accepted_epoch, self.accept_loss = epoch, True

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        self.drop_link()

    def _finish_cut(self) -> None:
        """Finish a cut whose last write failed: its intent must not outlive what follows the cut.

        The next start would cut the log there once more, with all that came since.
        """
        member = self._member
        with member.gate.lock:
            finish_cut(member.store, member.state)

    def _run_stream(self, stream: SlaveStream, master: int | None, text: str) -> None:
        """Stream until the link ends, with or without an error."""
        with self._lock:
            self._stream = stream
        try:
            self._retry_now.clear()
            if self.stopping.is_set():  # stop() may have come before the stream was set
                return
            self.master, self.problem, self._logged = master, None, None
            self._start_phase.end()
            peer = "classic master" if master is None else str(master)
            self._member.counts.links.add(peer)
            log.info("%s", text)
            stream.run()
        finally:
            with self._lock:
                self._stream = None
            self.master = None

    def _note_problem(self, problem: str, level: int = logging.WARNING) -> None:
        if self._logged != (problem, level) and not self.stopping.is_set():
            log.log(level, "%s", problem)
            self._logged = problem, level
        self.problem = problem


class HAClient(Follower):
    """Follow the group's master. A node makes a new HAClient each time it becomes a follower."""

    def __init__(self, member: Member) -> None:
        super().__init__(member, "no master found yet")
        self.archived_bytes = 0
        # After a rewind: this log's history, and how many of its entries the master knows.
        self._told_shared: tuple[History, int] = ((), 0)
        self._came_damaged: dict[int, int] = {}  # offset -> CRC of the last damaged record there
        self._damaged: set[tuple[int, int]] = set()  # (offset, CRC) that came twice

    def run(self) -> None:
        """Survey and follow until stopped."""
        pause = SURVEY_PAUSE_S
        while not self.stopping.is_set():
            try:
                again = self._follow_once()
                self.no_room = None
            except (HastoreError, OSError) as error:
                self._note_problem(str(error) or type(error).__name__)
                self.no_room = self.problem if isinstance(error, StoreFullError) else None
                again = False
            if again:
                pause = SURVEY_PAUSE_S
                self.stopping.wait(AGAIN_PAUSE_S)
                continue
            if self._retry_now.wait(pause):
                self._retry_now.clear()
                pause = SURVEY_PAUSE_S
            else:
                pause = min(pause * 1.5, SURVEY_PAUSE_MAX_S)

    def _follow_once(self) -> bool:
        """Survey, say HELLO and obey the answer; True when this should be called again at once."""
        self._finish_cut()
        replies = ask_all(self._member, Purpose.SURVEY)
        masters = [reply for reply in replies if reply.hello is not None and reply.hello.open_epoch]
        if not masters:
            self.known_master = None
            silent = ", ".join(
                f"{reply.node} at {reply.address} ({reply.problem})"
                for reply in replies
                if reply.hello is None
            )
            self._note_problem(
                "no master is open" + (f"; no answer from node {silent}" if silent else ""),
                self._start_phase.level(),
            )
            return False
        best = max(
            masters, key=lambda reply: reply.hello.open_epoch if reply.hello is not None else 0
        )
        assert best.hello is not None
        self.known_master = (best.hello.open_epoch, best.node)
        self.met_epoch = best.hello.open_epoch
        self._raise_promise(best.hello)
        member = self._member
        require_open(member.store)
        theirs = best.hello
        digest = digest_fields(member, theirs.history, theirs.min_offset, theirs.max_offset)
        with telling_of_tampering(member.on_refused, best.address):
            opened = call(
                best.address,
                self._hello(theirs, **digest),
                member.secret,
                member.clock,
                member.config.ha.hello_timeout_ms,
                member.tls,
                may_be_old=member.may_be_old(best.node),
            )
        try:
            check_peer(member, opened, best.node, best.address)
            member.state.learn_store(opened.hello.node, opened.hello.store_id)
            with telling_of_tampering(member.on_refused, best.address):
                return self._act_on(opened)
        finally:
            opened.close()

    def _hello(self, master: Hello, **digest: Any) -> Hello:
        """Return the HELLO to follow a master.

        Entries at this log's end are left out if the last rewind's answer said that the master does
        not know them, and this master does not know them either. They stay on the disk until the
        entries or bytes that replace them arrive. Another master may know them: without them it
        could find another common point than this node, and refuse it for ever. An empty log has no
        bytes of the time before a resumption.
        The confirmed offset may be lowered to the common point (`confirmed_for` says when).
        """
        accepts = self._accepts(master)
        hello = self._member.hello(Purpose.FOLLOW, accept_loss=accepts, **digest)
        history, shared = self._told_shared
        mine = hello.history
        _, known = common_point(mine, hello.max_offset, master.history, master.max_offset)
        at_end = all(entry.start >= hello.max_offset for entry in mine[shared:])
        if history == mine and known <= shared and at_end:
            hello = msgspec.structs.replace(hello, history=mine[:shared])
        if hello.min_offset == hello.max_offset:  # as a resync leaves it that a crash has ended
            hello = msgspec.structs.replace(hello, history=without_resumptions(hello.history))
        confirmed = confirmed_for(self._member.store, hello, master)
        return msgspec.structs.replace(hello, confirmed_offset=confirmed)

    def _accepts(self, master: Hello) -> bool:
        """Whether the operator gives up what this master's log lacks or has otherwise.

        Who saw one master refuse this node, and accepted that loss, did not mean the next one, to
        which more may be lost.
        """
        epoch, node = self.accepted_epoch, master.node
        if self.accept_loss and epoch is not None and master.open_epoch > epoch:
            self.accept_loss = False
            log.warning(
                "the accepted loss is not used: --accept-loss was given before node %d was known"
                " as the master of epoch %d; to give up for that one, too, what it lacks"
                " or has otherwise, give it again",
                *(node, master.open_epoch),
            )
        return self.accept_loss

    def _raise_promise(self, master: Hello) -> None:
        """Promise the master's epoch, durably, before following it."""
        entry = master.history[-1] if master.history else None
        member = self._member
        with member.gate.lock:
            if master.open_epoch > member.state.data.promised_epoch and entry is not None:
                member.gate.close()
                member.state.promise(master.open_epoch, entry.acks, entry.nodes)

    def _act_on(self, opened: Call) -> bool:
        answer, member = opened.answer, self._member
        over = member.written_over
        if over is not None and isinstance(answer, StreamFrom | RewindTo):
            # The histories do not show where both logs diverge: what a master had refused must go.
            shared = answer.entries if isinstance(answer, RewindTo) else len(member.state.history)
            answer = RewindTo(min(answer.offset, over.offset), shared)
        if isinstance(answer, StreamFrom):
            self.accept_loss = False  # it was for this master, and is not needed
            self._stream_from(opened, answer.offset)
            return True
        if isinstance(answer, RewindTo):
            self._rewind(opened.hello, answer)
            return True
        if isinstance(answer, Resync):
            self._resync(opened.hello, answer)
            return True
        if isinstance(answer, Refused) and answer.written_over is not None:
            epoch, node = opened.hello.open_epoch, opened.hello.node
            member.state.note_written_over(WrittenOver(epoch, answer.written_over, node))
        reason = answer.reason if isinstance(answer, Refused) else f"answered {answer!r}"
        self._note_problem(f"node {opened.hello.node} refuses this node as its slave: {reason}")
        return False

    def _stream_from(self, opened: Call, offset: int) -> None:
        hello, end = opened.hello, self._member.store.max_offset
        if offset != end:
            raise ProtocolError(f"the stream starts at {offset}, but this log ends at {end}")
        stream = SlaveStream(
            self._member,
            opened.sock,
            epoch=hello.open_epoch,
            history=hello.history,
            master_end=hello.max_offset,
            accepted=self._damaged,
            says_readers=hello.readers,
            counts_written=hello.counts_written,
        )
        node = hello.node
        text = f"following node {node} in epoch {hello.open_epoch} from {offset}"
        try:
            self._run_stream(stream, node, text)
        except DamagedRecordError as damaged:
            self._cut_damaged(hello, damaged)
            raise

    def _cut_damaged(self, master: Hello, damaged: DamagedRecordError) -> None:
        """Cut the log before a damaged record, so that the record is fetched again.

        If the same bytes come a second time, the master's log has them. From then on they are
        accepted, with a notice. The log is cut even after a promise, and while this node stops: a
        record that stays in the log counts as good. Nothing is archived, because the master has the
        bytes, and archives of a link that damages records repeatedly would fill the disk.
        """
        member = self._member
        with member.gate.lock:
            if member.gate.epoch is not None:
                raise ProtocolError(f"another epoch opened the gate before the cut: {damaged}")
            entries = entries_at(member.state.history, damaged.offset, 0)
            cut_back(
                member.store, member.state, damaged.offset, entries, accept_loss=False,
                why="a received record is damaged", archive=False,
            )  # fmt: skip
        if self._came_damaged.get(damaged.offset) == damaged.crc:
            if len(self._damaged) >= DAMAGED_MAX:
                self._damaged.clear()
            self._damaged.add((damaged.offset, damaged.crc))
            self.notice = (
                f"the record at {damaged.offset} is damaged in the master's log: node "
                f"{master.node} sent the same bytes twice; the record was copied as it is. "
                "`hastore log verify` on both nodes' stores tells more"
            )
            log.warning("%s", self.notice)
        if len(self._came_damaged) >= DAMAGED_MAX:
            self._came_damaged.clear()
        self._came_damaged[damaged.offset] = damaged.crc

    def _check_promise(self, master: Hello) -> None:
        """Raise ProtocolError if the master was superseded, or if this node stops.

        The caller holds the gate's lock.
        """
        promised = self._member.state.data.promised_epoch
        if self.stopping.is_set() or promised != master.open_epoch:
            raise ProtocolError(f"epoch {master.open_epoch} is not the promised {promised}")

    def _rewind(self, master: Hello, answer: RewindTo) -> None:
        member = self._member
        with member.gate.lock:
            self._check_promise(master)
            if answer.offset != member.store.max_offset:
                self.archived_bytes += cut_back(
                    member.store,
                    member.state,
                    answer.offset,
                    entries_at(member.state.history, answer.offset, answer.entries),
                    accept_loss=self._accepts(master),
                    why="the master's log differs",
                )
            self._told_shared = (member.state.history, answer.entries)
        self.accept_loss = False

    def _shared_with(self, master: Hello) -> int:
        """Return up to which confirmed offset the master's history has this log too."""
        store, mine = self._member.store, self._member.state.history
        end = named_common(mine, store.max_offset, master.history, master.max_offset)
        over = self._member.written_over
        if over is not None:
            end = min(end, over.offset)
        return min(end, store.confirmed_offset)

    def _resync(self, master: Hello, answer: Resync) -> None:
        """Set the store aside and start empty at the master's first offset.

        After a crash in the middle, the answer to the next HELLO says what is still to be done.
        """
        member = self._member
        store, state = member.store, member.state
        begun = store.min_offset == store.max_offset == answer.offset
        if begun and state.data.unclean and state.history == answer.entries:
            raise ProtocolError(
                f"node {master.node} lets this node begin anew at {answer.offset} again: no epoch "
                "of its history names the bytes with which its log begins; run `hastore promote` "
                f"on node {master.node}: its new epoch does"
            )
        # All of it is known before the first change, also what `set_aside` needs.
        needed = max(master.max_offset - answer.offset, 2 * store.file_size)
        with member.gate.lock:
            self._check_promise(master)
            free, root = store.free_bytes(), member.config.store.root
            if free < needed:
                raise StoreFullError(
                    f"a resync needs {needed} bytes beside the old store, but the disk of {root} "
                    f"has only {free} free; make room, for example in {root}/rescued",
                    needed_bytes=needed,
                )
            # What --accept-loss gives up may be confirmed, and yet be on no other node.
            shared = self._shared_with(master) if self._accepts(master) else None
            state.save(unclean=True, aside=state.data.aside + 1)
            name = f"{state.last_epoch}-{store.min_offset}-{state.data.aside}"
            kept = store.set_aside(name, shared)
            store.begin_at(answer.offset)
            state.replace_history(answer.entries)
            # The master's retention may have removed bytes that were never confirmed. So of the
            # bytes below `answer.offset` only those confirmed by the master count as confirmed.
            confirmed = min(answer.offset, master.confirmed_offset)
            store.set_limits(confirmed=confirmed, readable=confirmed)
            self.accept_loss = False
        log.warning("resync from %d: the old store is in %s", answer.offset, kept)
