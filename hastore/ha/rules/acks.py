"""Count the slaves' reports (docs/failover.md, "Acknowledging"). No I/O, no lock.

A master has one table per epoch that it opens; HAService calls it under its own lock.

Invariants: a report is at least 0 and at most the end of the bytes sent on its connection (the
caller checks this). A node counts once, on its latest connection. `confirmed_offset` of a table
never falls, and `confirm` never moves it above the end of the master's own copy.
"""

from dataclasses import dataclass, field

from hastore.ha.rules.epochs import EpochEntry


@dataclass(slots=True)
class Reporter:
    """One slave's latest report in this epoch. With `flushed` it reports only synced bytes."""

    connection_id: int
    flushed: bool
    offset: int | None = None  # None: no report in this epoch yet
    stalled: bool = False  # see Intake


@dataclass(slots=True)
class ClassicReporter:
    """A RocketMQ slave's latest report, and where its stream began.

    The report counts only for puts that end beyond `began`.
    """

    began: int | None = None
    offset: int = 0
    stalled: bool = False


@dataclass(slots=True)
class Intake:
    """Whether a slave takes what it is sent, as its reports on one link tell.

    A slave reports each time its log has grown, and else as a heartbeat, or each half second while
    its disk is full. So the same offset twice, with more on the way before the first of the two, is
    a slave that takes nothing: its disk is full or hangs. It counts again once its report moves.
    A RocketMQ slave with an empty log reports 0, wherever its stream has `began`.
    """

    began: int = 0
    stalled: bool = False
    _offset: int | None = None
    _sent: int = 0

    def report(self, offset: int, sent: int) -> bool:
        """Note a report, with the end of the bytes sent before it; True if `stalled` changed."""
        was, offset = self.stalled, max(offset, self.began)
        self.stalled = offset == self._offset and (was or self._sent > offset)
        self._offset, self._sent = offset, sent
        return self.stalled is not was


def own_reports_confirm(epoch: EpochEntry, node: int, *, written: bool) -> int | None:
    """Return from where on a slave's own reports confirm the log in an epoch; None: nowhere.

    Where one slave is to confirm, its copy and the master's are the two copies. The master had all
    bytes before it sent them; with `written` it counts them from then on. So the slave knows what
    its report confirms before the master does. It reports only in the epoch that it has promised,
    and its copy counts, as in `AckTable`: by the epoch's nodes, and from the epoch's start on.
    """
    counts = epoch.acks == 0 or (epoch.acks == 1 and node in epoch.nodes)
    return epoch.start if written and counts else None


@dataclass(slots=True)
class AckTable:
    """The reports of one epoch, and the offsets that they confirm."""

    acks: int
    epoch_start: int
    nodes: frozenset[int]  # the epoch's node list; a promotion asks only these nodes
    count_classic: bool = False
    classics_alone: int = 0  # in a group of one: how many RocketMQ slaves a put waits for
    confirmed_offset: int = 0
    epoch: int = 0
    reporters: dict[int, Reporter] = field(default_factory=dict)  # by node number
    classics: dict[int, ClassicReporter] = field(default_factory=dict)  # by connection id

    def join(self, node: int, connection_id: int, flushed: bool) -> None:
        """Register a node's new connection; reports on earlier ones no longer count.

        A node that is not in the epoch's list never counts: a promotion would not ask it.
        """
        if node in self.nodes:
            self.reporters[node] = Reporter(connection_id, flushed)

    def leave(self, node: int, connection_id: int) -> None:
        """Forget a node whose connection has ended, unless a later connection has replaced it."""
        reporter = self.reporters.get(node)
        if reporter is not None and reporter.connection_id == connection_id:
            del self.reporters[node]

    def report(self, node: int, connection_id: int, offset: int) -> bool:
        """Record a report. Returns False if it came on a connection that no longer counts."""
        reporter = self.reporters.get(node)
        if reporter is None or reporter.connection_id != connection_id:
            return False
        reporter.offset = offset
        return True

    def note_stalled(self, node: int | None, connection_id: int, stalled: bool) -> None:
        """Record whether a slave, `node` None: a RocketMQ slave, takes what it is sent."""
        reporter = self.classics.get(connection_id) if node is None else self.reporters.get(node)
        if isinstance(reporter, Reporter) and reporter.connection_id != connection_id:
            return
        if reporter is not None:
            reporter.stalled = stalled

    def confirm(self, own_offset: int) -> int:
        """Advance and return the confirmed offset.

        It is the `acks`-th greatest report, but at most `own_offset`: the end of the master's copy
        at its own ack point. With `acks` 0 it is `own_offset`. It does not move until it can reach
        the epoch's start: an older epoch's tail is confirmed only together with the start of the
        new epoch (Raft's rule).
        """
        reached = self._greatest(flushed_only=False)
        reached = own_offset if reached is None and self.acks == 0 else reached
        if reached is not None:
            reached = min(reached, own_offset)
            if reached >= self.epoch_start and reached > self.confirmed_offset:
                self.confirmed_offset = reached
        return self.confirmed_offset

    def confirmed_flushed(self, own_flushed: int) -> int:
        """Return how far the log is on the disks of the master and of `acks` slaves."""
        alone = self.acks == 0 and not self.needed
        reached = own_flushed if alone else self._greatest(flushed_only=True)
        return min(reached, own_flushed, self.confirmed_offset) if reached is not None else 0

    @property
    def needed(self) -> int:
        """How many slaves a synchronous put waits for.

        That is `acks`. In a group of one it is `classics_alone` if RocketMQ slaves count, else 0.
        """
        return self.acks or (self.classics_alone if self.count_classic else 0)

    def confirmed_for_puts(self) -> int:
        """Return the offset up to which puts are confirmed without counting RocketMQ slaves.

        It is 0 if puts wait for RocketMQ slaves only.
        """
        return self.confirmed_offset if self.acks or not self.needed else 0

    def confirmed_with_classics(self, end_offset: int) -> bool:
        """Whether enough slaves, RocketMQ slaves included, hold a put that ends at this offset."""
        if not self.count_classic or self.needed == 0:
            return False
        holders = self.holders(end_offset)
        for classic in self.classics.values():
            began = classic.began
            holders += began is not None and began < end_offset <= classic.offset
        return holders >= self.needed

    def holders(self, end_offset: int, *, flushed_only: bool = False) -> int:
        """Return how many slaves have reported `end_offset` or more."""
        count = 0
        for reporter in self.reporters.values():
            offset = reporter.offset
            if offset is not None and offset >= end_offset:
                count += reporter.flushed or not flushed_only
        return count

    def level(self, end_offset: int, *, flushed: bool) -> str:
        """Return the level that a put that ends at `end_offset` has for certain."""
        name = "SYNC_DISK" if flushed else "SYNC_MEM"
        holders = self.holders(end_offset, flushed_only=flushed)
        if holders >= max(self.acks, 1):
            return f"{name}({holders})"
        if not flushed and self.confirmed_with_classics(end_offset):
            return "CLASSIC"
        # A slave has left since its report: the offset is confirmed, so `acks` slaves had it.
        if self.acks and end_offset <= self.confirmed_offset:
            return f"{name}({self.acks})"
        return "MASTER_MEM"

    def in_sync(self, own_offset: int, gap_max: int, *, flushed_only: bool = False) -> list[int]:
        """Return the nodes that have reported in this epoch and lag at most `gap_max` bytes.

        One that takes nothing of what it is sent is not among them, however little it lacks.
        """
        return [
            node
            for node, reporter in self.reporters.items()
            if reporter.offset is not None
            and not reporter.stalled
            and own_offset - reporter.offset <= gap_max
            and (reporter.flushed or not flushed_only)
        ]

    def missing(self, own_offset: int, gap_max: int, *, flushed: bool) -> str | None:
        """Return why a synchronous put could not be confirmed now.

        Returns None when enough slaves are in sync.
        """
        if self.acks == 1 and not flushed:  # the hot path: no list
            for reporter in self.reporters.values():
                offset = reporter.offset
                if offset is not None and own_offset - offset <= gap_max and not reporter.stalled:
                    return None
        if self.needed == 0:
            return None
        written = len(self.in_sync(own_offset, gap_max))
        count = len(self.in_sync(own_offset, gap_max, flushed_only=True)) if flushed else written
        if self.count_classic and not flushed:
            for classic in self.classics.values():
                began = None if classic.stalled else classic.began
                count += began is not None and own_offset - max(began, classic.offset) <= gap_max
        if count >= self.needed:
            return None
        if flushed and (written >= self.needed or not self.acks):
            return (
                f"a put with sync_flush needs {_slaves(self.needed)} with ha.ack_point: flushed, "
                f"{count} are in sync; set ha.ack_point: flushed on the slaves"
            )
        return f"{count} of {self.needed} slaves in sync; start the slaves, or see `hastore status`"

    def never_flushed(self, own: int) -> str | None:
        """Return why no put with sync_flush can be confirmed, whichever slaves connect later.

        Returns None when enough slaves could confirm one. Connected slaves whose ack point is not
        `flushed` do not count. `own` is the master's node number.
        """
        linked = sum(reporter.flushed for reporter in self.reporters.values())
        to_come = len(self.nodes - {own} - self.reporters.keys())
        if linked + to_come >= self.needed:
            return None
        return (
            f"a put with sync_flush needs {_slaves(self.needed)} with ha.ack_point: flushed, "
            f"{linked} of the connected slaves have it; set ha.ack_point: flushed on the slaves"
        )

    def _greatest(self, *, flushed_only: bool) -> int | None:
        """Return the `acks`-th greatest report; None if there are fewer, or if `acks` is 0."""
        if self.acks == 1:  # the hot path: no sorting
            best = None
            for reporter in self.reporters.values():
                offset = reporter.offset
                if offset is not None and (best is None or offset > best):
                    if reporter.flushed or not flushed_only:
                        best = offset
            return best
        offsets = sorted(
            (
                reporter.offset
                for reporter in self.reporters.values()
                if reporter.offset is not None and (reporter.flushed or not flushed_only)
            ),
            reverse=True,
        )
        return offsets[self.acks - 1] if 0 < self.acks <= len(offsets) else None


def _slaves(count: int) -> str:
    return "1 slave" if count == 1 else f"{count} slaves"
