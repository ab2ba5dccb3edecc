"""Mistakes to plant into the product, one at a time; the simulation must catch each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hastore.ha import promoter
from hastore.ha.hello import answering
from hastore.ha.master import ha_service
from hastore.ha.master.group_transfer import GroupTransferService
from hastore.ha.node import node_state
from hastore.ha.node.gate import WriteGate
from hastore.ha.node.member import Member
from hastore.ha.node.node_state import NodeState
from hastore.ha.replica import receiver
from hastore.ha.rules import acks, epochs, following
from hastore.ha.rules import promotion as rules
from hastore.ha.rules.acks import AckTable, Reporter
from hastore.ha.rules.epochs import last_epoch
from hastore.ha.rules.promotion import PromotionVerdict
from hastore.ha.slave import slave_stream
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.protocol.ha_link import data_header
from hastore.store.append import stated_ends
from hastore.store.append.stated_ends import StatedEnds
from tests.ha import simulation

Patch = tuple[Any, str, Any]


def count_short() -> list[Patch]:
    """R is one less than N - acks."""
    judge = rules.judge

    def short(required: Any, answers: Any) -> PromotionVerdict:
        return judge(replace(required, acks_min=required.acks_min + 1, acks=required.acks + 1,
                             acks_max=required.acks_max + 1, fresh=False), answers)  # fmt: skip

    return [(promoter, "judge", short)]


def unclean_counted() -> list[Patch]:
    """A node that may have lost what it acknowledged counts in a promotion."""
    judge = rules.judge
    return [
        (
            promoter,
            "judge",
            lambda required, answers: judge(required, [replace(a, unclean=False) for a in answers]),
        )
    ]


def acks_at_once() -> list[Patch]:
    """A change of `acks` opens with the usual number of answers."""
    judge = rules.judge

    def careless(required: Any, answers: Any) -> PromotionVerdict:
        return judge(
            replace(required, acks_min=required.acks, acks_max=required.acks, fresh=False), answers
        )

    return [(promoter, "judge", careless)]


def below_start() -> list[Patch]:
    """An older epoch's tail is confirmed before the new epoch's start is."""
    confirm = AckTable.confirm

    def early(self: AckTable, own_offset: int) -> int:
        start, self.epoch_start = self.epoch_start, 0
        try:
            return confirm(self, own_offset)
        finally:
            self.epoch_start = start

    return [(AckTable, "confirm", early)]


def hello_counts() -> list[Patch]:
    """The log's end in HELLO counts as a report."""
    register = ha_service.HAService._register

    def eager(self: Any, connection: Any, hello: Any, offset: int) -> None:
        register(self, connection, hello, offset)
        self._table.report(hello.node, connection.connection_id, offset)
        self.advance()

    return [(ha_service.HAService, "_register", eager)]


def counted_twice() -> list[Patch]:
    """One slave on two connections counts twice."""

    def join(self: AckTable, node: int, connection_id: int, flushed: bool) -> None:
        self.reporters[connection_id] = Reporter(connection_id, flushed)

    def report(self: AckTable, node: int, connection_id: int, offset: int) -> bool:
        del node
        reporter = self.reporters.get(connection_id)
        if reporter is not None:
            reporter.offset = offset
        return reporter is not None

    def leave(self: AckTable, node: int, connection_id: int) -> None:
        del self, node, connection_id

    return [(AckTable, "join", join), (AckTable, "report", report), (AckTable, "leave", leave)]


def offset_only() -> list[Patch]:
    """Logs are compared by their ends alone, without epochs."""

    def longest(answers: Any, own: int) -> Any:
        mine = next(a for a in answers if a.node == own)
        return max([mine, *answers], key=lambda a: a.log_end)

    return [(promoter, "most_advanced", longest)]


def own_is_best() -> list[Patch]:
    """A promotion never catches up."""
    return [
        (promoter, "most_advanced", lambda answers, own: next(a for a in answers if a.node == own))
    ]


def length_only() -> list[Patch]:
    """The last common point is the smaller end, epochs ignored."""

    def shorter(mine: Any, my_end: int, theirs: Any, their_end: int) -> tuple[int, int]:
        del theirs
        return min(my_end, their_end), len(mine)

    return [(following, "common_point", shorter), (promoter, "common_point", shorter)]


def promise_in_memory() -> list[Patch]:
    """A promise is not written to the disk."""
    promise = NodeState.promise

    def forgetful(self: NodeState, *args: Any, **more: Any) -> None:
        files = self._fs
        self._fs = _Nowhere(files)  # type: ignore[assignment]
        try:
            promise(self, *args, **more)
        finally:
            self._fs = files

    return [(NodeState, "promise", forgetful)]


class _Nowhere:
    def __init__(self, files: Any) -> None:
        self._files = files

    def make_dirs(self, path: str) -> None:
        del path

    def replace_bytes(self, path: str, data: bytes) -> None:
        del path, data


def writes_after_promise() -> list[Patch]:
    """The gate stays open when a higher epoch is promised."""
    promise, close = Member.promise, WriteGate.close

    def lax(self: Member, hello: Any) -> Any:
        WriteGate.close = lambda _gate: None  # type: ignore[method-assign]
        try:
            return promise(self, hello)
        finally:
            WriteGate.close = close  # type: ignore[method-assign]

    return [(Member, "promise", lax)]


def equal_epoch() -> list[Patch]:
    """Epochs carry no node number, and an equal one is promised to anybody."""

    def above(seen: int, node: int) -> int:
        del node
        return seen + (1 << 16)

    def may(promised: int, candidate: int, epoch: int) -> str | None:
        del candidate
        return None if epoch >= promised else "lower"

    from hastore.ha.node import member

    return [(promoter, "next_epoch", above), (member, "may_promise", may)]


def lower_promised() -> list[Patch]:
    """A lower epoch than the promised one is promised too."""
    from hastore.ha.node import member

    return [(member, "may_promise", lambda promised, candidate, epoch: None)]


def entry_after_bytes() -> list[Patch]:
    """A slave takes an entry over only once bytes beyond its start are there."""

    def late(mine: Any, my_end: int, theirs: Any) -> Any:
        known = {entry.epoch for entry in mine}
        return tuple(e for e in theirs if e.epoch not in known and e.start < my_end)

    return [(receiver, "due_entries", late), (receiver, "next_start", lambda mine, theirs: None)]


def entries_at_once() -> list[Patch]:
    """A slave takes over the whole history at once, entries beyond its log too."""

    def all_of_it(mine: Any, my_end: int, theirs: Any) -> Any:
        del my_end
        known = {entry.epoch for entry in mine}
        return tuple(entry for entry in theirs if entry.epoch not in known)

    return [(receiver, "due_entries", all_of_it)]


def history_kept() -> list[Patch]:
    """Entries beyond the log's end survive a power loss."""
    return [(node_state, "keep_until", lambda history, end: history)]


def cut_without_intent() -> list[Patch]:
    """The log is cut before the intent is written."""
    from hastore.ha.replica import rewind

    finish = rewind.finish_cut

    def cut_back(store: Any, state: Any, offset: int, entries: int, **more: Any) -> int:
        del more
        store.truncate(offset)
        state.save(intent=node_state.CutIntent(offset, entries))
        finish(store, state)
        return 0

    from hastore.ha.slave import ha_client

    return [(ha_client, "cut_back", cut_back), (promoter, "cut_back", cut_back)]


def history_not_cut() -> list[Patch]:
    """A rewind cuts bytes and leaves the history."""
    from hastore.ha.replica import rewind
    from hastore.ha.slave import ha_client

    real = rewind.cut_back

    def cut_back(store: Any, state: Any, offset: int, entries: int, **more: Any) -> int:
        del entries
        return real(store, state, offset, len(state.history), **more)

    return [
        *((ha_client, "cut_back", cut_back), (promoter, "cut_back", cut_back)),
        (rewind, "keep_until", lambda history, end: history),
    ]


def resume_promised() -> list[Patch]:
    """A restarted master continues although it has promised a higher epoch."""

    def resume(self: Any) -> bool:
        epoch = last_epoch(self.state.data.history)
        if not epoch or epoch & 0xFFFF != self.number:
            return False
        self.ha.open_epoch(self.state.history[-1], sync=True)
        self.member.open_epoch = epoch
        self.member.gate.open(epoch)
        return True

    return [(simulation.SimNode, "resume", resume)]


def epoch_not_over() -> list[Patch]:
    """A master continues in its epoch after a power loss."""
    begin_boot = NodeState.begin_boot

    def begin(self: NodeState, *args: Any, **more: Any) -> None:
        begin_boot(self, *args, **more)
        self.save(epoch_over=False)

    return [(NodeState, "begin_boot", begin)]


def resume_short() -> list[Patch]:
    """A restarted master continues in its epoch though a slave has more of it."""
    return [(simulation, "has_more", lambda _epoch, _end, _answers, _unmet: None)]


def own_unflushed() -> list[Patch]:
    """Ack point flushed, but the master counts its own unflushed copy."""
    return [(Member, "counts_flushed", False)]


def unclean_forgotten() -> list[Patch]:
    """A second restart in the same boot makes an unclean node look clean."""
    begin_boot = NodeState.begin_boot

    def begin(self: NodeState, *args: Any, **more: Any) -> None:
        self.data.unclean = False
        begin_boot(self, *args, **more)

    return [(NodeState, "begin_boot", begin)]


def clean_at_hello() -> list[Patch]:
    """An unclean node is clean as soon as it has a master."""
    run = simulation.SimStream.run

    def start(self: Any) -> None:
        run(self)
        self._member.state.save(unclean=False)

    return [(simulation.SimStream, "run", start)]


def source_moved() -> list[Patch]:
    """A catch-up continues although its source is no longer as it answered."""

    def copy(connection: Any, hello: Any) -> None:
        store, offset = connection.member.store, hello.copy_from
        while offset < hello.copy_to:
            with store.view(offset, min(2, hello.copy_to - offset)) as view:
                piece = bytes(view)
            if not piece:
                return
            connection.sock.sendall(data_header(offset, len(piece)) + piece)
            offset += len(piece)

    return [(answering, "_copy", copy)]


def flip_acks() -> list[Patch]:
    """Waiting puts are told success when their epoch ends."""
    from hastore.ha.master import group_transfer

    return [
        (group_transfer, "_timeout", lambda need: group_transfer.Outcome.CONFIRMED),
    ]


def stale_progress() -> list[Patch]:
    """Progress of an ended epoch still confirms."""

    def abandon(self: GroupTransferService, serial: int) -> int:
        del self, serial
        return 0

    return [(GroupTransferService, "abandon", abandon)]


def told_beyond() -> list[Patch]:
    """A slave takes CONFIRMED beyond its own log."""

    def follow(self: SlaveStream) -> None:
        if self._told is not None:
            self._member.store.set_limits(
                confirmed=self._told.confirmed_offset, readable=self._told.readable_offset
            )

    return [(SlaveStream, "_follow_limits", follow)]


def own_for_many() -> list[Patch]:
    """A slave takes what it has reported for confirmed, however many slaves must confirm it."""

    def confirm(epoch: Any, node: int, *, written: bool) -> int | None:
        del node
        return epoch.start if written else None

    return [(slave_stream, "own_reports_confirm", confirm)]


def own_below_start() -> list[Patch]:
    """A slave's report confirms an older epoch's tail, before it has the start of the new one."""

    def confirm(epoch: Any, node: int, *, written: bool) -> int | None:
        return 0 if written and epoch.acks == 1 and node in epoch.nodes else None

    return [(slave_stream, "own_reports_confirm", confirm)]


def own_unwritten() -> list[Patch]:
    """A slave's report confirms what its master has not synced, though the master counts that."""
    real = slave_stream.own_reports_confirm

    def confirm(epoch: Any, node: int, *, written: bool) -> int | None:
        del written
        return real(epoch, node, written=True)

    return [(slave_stream, "own_reports_confirm", confirm)]


def open_below() -> list[Patch]:
    """A promotion opens before its catch-up has reached the answered end."""
    return [(promoter.Promoter, "_catch_up", lambda self, *args, **more: None)]


def survey_counts() -> list[Patch]:
    """The greatest log is chosen from the survey before the promises."""
    ask = simulation.World.ask_all

    def ask_all(self: Any, member: Any, purpose: Any, **more: Any) -> Any:
        from hastore.protocol.hello import Promised, Purpose

        replies = ask(self, member, purpose, **more)
        source = member.sim_node
        if purpose is Purpose.SURVEY:
            source.surveyed = {
                reply.node: reply.hello for reply in replies if reply.hello is not None
            }
        if purpose is not Purpose.PROMISE:
            return replies
        old = source.surveyed
        return [
            replace(
                reply,
                answer=Promised(
                    old[reply.node].history, old[reply.node].max_offset, old[reply.node].unclean
                ),
            )
            if isinstance(reply.answer, Promised) and reply.node in old
            else reply
            for reply in replies
        ]

    return [(simulation.World, "ask_all", ask_all)]


def dropped_at_once() -> list[Patch]:
    """A rewind drops entries that its master does not know before their replacement arrives."""
    from hastore.ha.replica import rewind
    from hastore.ha.slave import ha_client

    def _rewind(self: Any, master: Any, answer: Any) -> None:
        member = self._member
        with member.gate.lock:
            self._check_promise(master)
            rewind.cut_back(
                member.store, member.state, answer.offset, answer.entries,
                accept_loss=False, why="the master's log differs",
            )  # fmt: skip

    return [
        (ha_client.HAClient, "_rewind", _rewind),
        (promoter, "entries_at", lambda history, offset, shared: shared),
    ]


def hidden_for_ever() -> list[Patch]:
    """An entry that one master did not know is hidden from every later master too."""
    from hastore.ha.slave import ha_client

    return [(ha_client, "common_point", lambda *_histories: (0, 0))]


def written_left_out() -> list[Patch]:
    """A history that is too long drops its oldest entries, also those that wrote bytes."""
    return [(node_state, "prune", lambda history: history[-epochs.ENTRIES_MAX :])]


def floor_shared() -> list[Patch]:
    """A forgotten range counts as an epoch that both logs have."""

    def common_point(mine: Any, my_end: int, theirs: Any, their_end: int) -> tuple[int, int]:
        index, other = epochs._newest_shared(mine, theirs)
        if index is None:
            return 0, 0
        ends = epochs._end_of(mine, index, my_end), epochs._end_of(theirs, other, their_end)
        return min(ends), index + 1

    places: tuple[Any, ...] = (following, promoter, epochs)
    return [(place, "common_point", common_point) for place in places]


def ends_unstated() -> list[Patch]:
    """Retention does not ask whether the log states the ends of quiet queues."""
    return [(StatedEnds, "since", lambda self, limit: 1 << 62)]


def ends_unconfirmed() -> list[Patch]:
    """A statement of the ends of quiet queues counts before it is confirmed."""
    since = StatedEnds.since
    return [(StatedEnds, "since", lambda self, limit: since(self, 1 << 62))]


def ends_in_part() -> list[Patch]:
    """A statement of the ends of quiet queues counts as soon as its first part is there."""
    read = stated_ends.queue_ends_of

    def first_only(batch: Any) -> Any:
        return [(record, part._replace(part=0, parts=1)) for record, part in read(batch)]

    return [(stated_ends, "queue_ends_of", first_only)]


def fence_blocked() -> list[Patch]:
    """A candidate asks for promises although its replay is blocked."""
    return [(promoter, "replay_refusal", lambda *_state: None)]


def waits_blocked() -> list[Patch]:
    """A candidate that has the promises waits for replay, whatever has stopped it."""

    def wait_replayed(self: Any, epoch: int) -> None:
        store = self._member.store
        while not store.wait_dispatched(store.max_offset, 0.5):
            self._go_on(epoch, "replaying the log")

    return [(promoter.Promoter, "wait_replayed", wait_replayed)]


def waits_superseded() -> list[Patch]:
    """A candidate waits for replay, although it has promised a newer epoch meanwhile."""
    return [(promoter.Promoter, "_go_on", lambda self, epoch, progress: self._say(progress))]


def resume_unmarked() -> list[Patch]:
    """The history does not say where a master has resumed its epoch."""
    return [(node_state, "resumed_entry", lambda entry, *_resumption: entry)]


def resume_unasked() -> list[Patch]:
    """A promotion does not ask whether one log has what a master has written over in another."""
    return [(promoter, "with_written_over", list)]


def resume_untaken() -> list[Patch]:
    """A slave that follows does not take over where its master has resumed its epoch."""
    return [(receiver, "same_resumptions", lambda mine, _theirs: mine)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    bug.__name__: bug
    for bug in (
        count_short, unclean_counted, acks_at_once, below_start, hello_counts, counted_twice,
        offset_only, own_is_best, length_only, promise_in_memory, writes_after_promise,
        equal_epoch, lower_promised, entry_after_bytes, entries_at_once, history_kept,
        cut_without_intent, history_not_cut, resume_promised, epoch_not_over, own_unflushed,
        resume_short, unclean_forgotten, clean_at_hello, source_moved, flip_acks, stale_progress,
        told_beyond, open_below, survey_counts, dropped_at_once, hidden_for_ever, written_left_out,
        floor_shared, ends_unstated, ends_unconfirmed, ends_in_part, fence_blocked, waits_blocked,
        waits_superseded, own_for_many, own_below_start, own_unwritten,
        resume_unmarked, resume_unasked, resume_untaken,
    )
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant one mistake."""
    patches = BUGS[name]()
    before = [(place, attribute, place.__dict__[attribute]) for place, attribute, _ in patches]
    for place, attribute, value in patches:
        setattr(place, attribute, value)
    try:
        yield
    finally:
        for place, attribute, value in before:
            setattr(place, attribute, value)


__all__ = ["BUGS", "acks", "planted"]
