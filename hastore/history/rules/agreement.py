"""Whoever looks at a message sees the same one: replies, readers and the log at the end.

Each of the three names a message's offset, its place in a queue and its digest. With the log, all
others are compared with it; without it, with each other. A message that is gone must have been
beyond the fault budget of its level.
"""

from __future__ import annotations

import numpy as np

from hastore.history.rules.budget import Budget
from hastore.history.rules.columns import (
    NONE,
    Flags,
    Numbers,
    Table,
    begins,
    firsts,
    joined,
    looked_up,
    places_of,
    rows_of,
    sums_by,
)
from hastore.history.rules.facts import ACKED, PENDING, REFUSED, UNKNOWN, Facts

_ALL = ("offset", "digest", "queue", "queue_offset")
_SAYS = ("the log", "a reply", "a reader")


class Agreement:
    """Compares all that was said of messages; afterwards it knows which of them stay."""

    def __init__(self, facts: Facts, budget: Budget) -> None:
        """Take tables that are complete."""
        self._facts = facts
        self._budget = budget
        self._report = facts.report
        records = facts.records
        self._order = np.argsort(records["offset"], kind="stable")
        self._at = records["offset"][self._order]
        self.claimed = np.zeros(len(records), np.bool_)  # records that a reply has named
        self.acked = facts.rows_with(ACKED)  # rows of sends
        self.acks_stay = np.ones(len(self.acked), np.bool_)  # of these, which are not gone
        self.reads_stay = np.ones(len(facts.reads), np.bool_)
        self.lost: list[int] = []  # rows of sends that the faults excuse
        self.found = 0  # acknowledged messages that somebody has seen, or the log has

    def judge(self) -> None:
        """Find what does not agree."""
        self._acks()
        self._reads()
        self._twice_acknowledged()
        self._unclaimed()
        self._unsent_reads()
        self._among_each_other()
        self._count_found()

    # -- each reply and each reader beside the log

    def _acks(self) -> None:
        facts, sends = self._facts, self._facts.sends
        archives = facts.log is not None and facts.log.archives
        gone, unseen = self._beside_log(sends, self.acked)
        for place in rows_of(gone | unseen):
            row = int(self.acked[place])
            level, ended = facts.level_of(row), sends.get(row, "ended")
            excuse = self._budget.excuse(level, sends.get(row, "epoch"), ended)
            self.acks_stay[place] = excuse is None and not gone[place]
            if not gone[place]:
                continue
            digest = sends.get(row, "digest")
            lines = sends.get(row, "line"), sends.get(row, "end_line")
            what = f"acknowledged at {sends.get(row, 'offset')} ({level}), {self._now(digest)}"
            self._report.find_loss("durable", what, excuse, *lines)
            if excuse is None:
                continue
            self.lost.append(row)
            if archives and excuse.is_archived and digest not in facts.rescued:
                self._report.find("reported", f"{what}, and in no archive", *lines)

    def _reads(self) -> None:
        reads = self._facts.reads
        gone, unseen = self._beside_log(reads, np.arange(len(reads)))
        level = self._budget.of_readers
        for row in rows_of(gone | unseen):
            epoch = max(0, reads.get(row, "epoch"))
            excuse = self._budget.excuse(level, epoch, reads.get(row, "t"))
            self.reads_stay[row] = excuse is None and not gone[row]
            if not gone[row]:
                continue
            what = f"a consumer read the message at {reads.get(row, 'offset')}, "
            what += self._now(reads.get(row, "digest"))
            self._report.find_loss("durable", what, excuse, reads.get(row, "line"))

    def _beside_log(self, table: Table, rows: Numbers) -> tuple[Flags, Flags]:
        """Return which rows the log does not have, and which it cannot tell.

        Those are the rows that retention has removed; without a log all.
        """
        log, records = self._facts.log, self._facts.records
        offsets, nothing = table["offset"][rows], np.zeros(len(rows), np.bool_)
        if log is None:
            return nothing, ~nothing
        place = places_of(self._at, offsets)
        record = np.where(place == NONE, NONE, self._order[place] if len(self._order) else NONE)
        there = record != NONE
        same = np.zeros(len(rows), np.bool_)
        same[there] = records["digest"][record[there]] == table["digest"][rows][there]
        moved = np.zeros(len(rows), np.bool_)
        for name in ("queue", "queue_offset"):
            said = table[name][rows][same]
            moved[same] |= (said != NONE) & (records[name][record[same]] != said)
        for row in rows_of(moved):
            self._moved(table, int(rows[row]), int(record[row]))
        if table is self._facts.sends:
            self.claimed[record[same]] = True
        removed: Flags = ~there & (offsets < log.begin)
        return ~same & ~removed, removed

    def _moved(self, table: Table, row: int, record: int) -> None:
        facts = self._facts
        said = f"{facts.name_of(table.get(row, 'queue'))} {table.get(row, 'queue_offset')}"
        queue = facts.name_of(facts.records.get(record, "queue"))
        is_at = f"{queue} {facts.records.get(record, 'queue_offset')}"
        who = "acknowledged" if table is facts.sends else "read"
        text = f"the message at {table.get(row, 'offset')} was {who} as {said}, it is {is_at}"
        self._report.find("place", text, table.get(row, "line"), facts.records.get(record, "line"))

    def _now(self, digest: int) -> str:
        """Say where a message is that is not where it should be."""
        row = self._facts.records.row_with("digest", digest)
        if row == NONE:
            return "not in the log"
        return f"not there in the log, but at {self._facts.records.get(row, 'offset')}"

    def _twice_acknowledged(self) -> None:
        """Find two sends that were told the same offset."""
        sends, stay = self._facts.sends, self.acked[self.acks_stay]
        order = stay[np.argsort(sends["offset"][stay], kind="stable")]
        again = ~begins(sends["offset"][order])
        for place in rows_of(again):
            one, other = int(order[place - 1]), int(order[place])
            lines = (sends.get(one, "end_line"), sends.get(other, "end_line"))
            offset = sends.get(other, "offset")
            self._report.find("linear", f"two sends were acknowledged at {offset}", *lines)

    # -- what nobody, or somebody once, has sent

    def _unclaimed(self) -> None:
        """Find copies beyond what the sends explain that no reply has named.

        They are records, and what was read where no record answers for it.
        """
        facts, sends, whole = self._facts, self._facts.sends, self._facts.whole_queues()
        rows = np.flatnonzero(~self.claimed & whole[facts.records["queue"]])
        seen = self._unclaimed_reads()
        seen = seen[whole[facts.reads["queue"][seen]]]
        parts = ((facts.records, rows), (facts.reads, seen))
        column = {
            name: joined(*(table[name][some] for table, some in parts))
            for name in ("offset", "digest", "queue", "line")
        }
        is_read = np.repeat([False, True], [len(rows), len(seen)])
        digests, allowed = self._copies_allowed()
        # The latest copies are those too many.
        order = np.lexsort((column["offset"], column["digest"]))
        digest = column["digest"][order]
        copies = np.arange(len(order)) - firsts(begins(digest))
        known = looked_up(digests, allowed, digest, NONE)
        alive = np.unique(sends["digest"][facts.rows_with(ACKED, PENDING, UNKNOWN)])
        is_alive = places_of(alive, digest) != NONE
        # What was read and nobody has sent, or only sends that failed: see _unsent_reads.
        for place in rows_of((copies >= known) & (is_alive | ~is_read[order])):
            row = int(order[place])
            where = f"{facts.name_of(int(column['queue'][row]))}, at {column['offset'][row]}"
            line = int(column["line"][row])
            if known[place] == NONE:
                self._report.find("phantom", f"nobody has sent the record of {where}", line)
                continue
            sent = self._a_send_of(int(digest[place]))
            if not is_alive[place]:
                self._report.find("refused", f"a send that failed is in {where}", sent, line)
            else:
                self._report.find("once", f"a message is once more in {where}", sent, line)

    def _copies_allowed(self) -> tuple[Numbers, Numbers]:
        """Return digests, and how many copies their sends explain beside those of the replies."""
        facts, sends = self._facts, self._facts.sends
        outcome = sends["outcome"]
        extra = np.where(outcome == ACKED, sends["attempts"] - 1, sends["attempts"])
        extra = np.where(outcome == REFUSED, 0, extra)
        if any(one.fault == "resend" for one in facts.faults):
            # Without a log nobody knows which messages were cut off before.
            extra[self.lost if facts.log is not None else self.acked] += 1
        return sums_by(sends["digest"], extra)

    def _unclaimed_reads(self) -> Numbers:
        """Return rows of reads, one a copy, that neither a record nor a reply answers for."""
        facts, reads, sends = self._facts, self._facts.reads, self._facts.sends
        rows = np.flatnonzero(self.reads_stay)  # what a failover lost may be elsewhere since
        if facts.log is not None:
            rows = rows[reads["offset"][rows] < facts.log.begin]
        # Several replies may name an offset: a failover may have taken it from all but the last.
        parts = ((sends, self.acked), (reads, rows))
        offset, digest = (
            joined(*(table[name][some] for table, some in parts)) for name in ("offset", "digest")
        )
        row = joined(np.full(len(self.acked), NONE), rows)
        order = np.lexsort((row, offset, digest))  # replies come first
        first = row[order[begins(digest[order], offset[order])]]
        unclaimed: Numbers = first[first != NONE]
        return unclaimed

    def _unsent_reads(self) -> None:
        """Find messages that were read and not sent, or not yet."""
        facts, sends, reads = self._facts, self._facts.sends, self._facts.reads
        if not len(reads):
            return
        alive = facts.rows_with(ACKED, PENDING, UNKNOWN)
        alive = alive[np.lexsort((sends["began"][alive], sends["digest"][alive]))]
        first = alive[begins(sends["digest"][alive])] if len(alive) else alive
        began = looked_up(sends["digest"][first], sends["began"][first], reads["digest"], NONE)
        unsent = (began == NONE) & facts.whole_queues()[reads["queue"]]
        refused = np.unique(sends["digest"][facts.rows_with(REFUSED)])
        for row in rows_of(unsent):
            where = f"{facts.name_of(reads.get(row, 'queue'))} {reads.get(row, 'queue_offset')}"
            line, digest = reads.get(row, "line"), reads.get(row, "digest")
            if places_of(refused, reads["digest"][row : row + 1])[0] != NONE:
                sent = self._a_send_of(digest)
                self._report.find("refused", f"a send that failed was read in {where}", sent, line)
            else:
                self._report.find("phantom", f"nobody has sent what was read in {where}", line)
        for row in rows_of((began != NONE) & (reads["t"] < began)):
            text = f"the message at {reads.get(row, 'offset')} was read before it was sent"
            sent = self._a_send_of(reads.get(row, "digest"))
            self._report.find("phantom", text, sent, reads.get(row, "line"))

    def _a_send_of(self, digest: int) -> int:
        """Return the line of a send of a message, 0 if there is none."""
        row = self._facts.sends.row_with("digest", digest)
        return 0 if row == NONE else self._facts.sends.get(row, "line")

    # -- all of them beside each other

    def _among_each_other(self) -> None:
        """Compare what no record of the log answers for: with each other, and with the log."""
        facts = self._facts
        acks, reads = self.acked[self.acks_stay], np.flatnonzero(self.reads_stay)
        if facts.log is not None:  # what the log has is compared already
            acks = acks[facts.sends["offset"][acks] < facts.log.begin]
            reads = reads[facts.reads["offset"][reads] < facts.log.begin]
            if not len(acks) and not len(reads):
                return
        parts: list[tuple[Table, Numbers]] = [
            (facts.records, np.arange(len(facts.records))),
            (facts.sends, acks[facts.sends["queue_offset"][acks] != NONE]),
            (facts.reads, reads),
        ]
        column = {name: joined(*(table[name][rows] for table, rows in parts)) for name in _ALL}
        column["line"] = joined(*(table["line"][rows] for table, rows in parts))
        column["says"] = np.repeat(np.arange(3), [len(rows) for _, rows in parts])
        wrong = self._differ(column, ("offset",), ("digest", "queue", "queue_offset"))
        for name in column:
            column[name] = column[name][~wrong]
        wrong = self._differ(column, ("queue", "queue_offset"), ("offset", "digest"))
        for name in column:
            column[name] = column[name][~wrong]
        order = np.lexsort((column["queue_offset"], column["queue"]))
        named = ("queue", "queue_offset", "offset", "line")
        find_falls(facts, *(column[name][order] for name in named))

    def _differ(
        self, column: dict[str, Numbers], same: tuple[str, ...], agree: tuple[str, ...]
    ) -> Flags:
        """Find rows with the `same` place that do not `agree`; return which rows were wrong."""
        order = np.lexsort((column["says"], *(column[name] for name in reversed(same))))
        first = order[firsts(begins(*(column[name][order] for name in same)))]
        differs = np.zeros(len(order), np.bool_)
        for name in agree:
            differs |= column[name][order] != column[name][first]
        wrong = np.zeros(len(order), np.bool_)
        for at in rows_of(differs):
            one, other = int(first[at]), int(order[at])
            wrong[other] = True
            said = f"{_SAYS[column['says'][one]]} and {_SAYS[column['says'][other]]}"
            queue = self._facts.name_of(int(column["queue"][other]))
            where = f"{queue} {column['queue_offset'][other]}, at {column['offset'][other]}"
            lines = int(column["line"][one]), int(column["line"][other])
            self._report.find("place", f"{said} have different messages in {where}", *lines)
        return wrong

    def _count_found(self) -> None:
        """Count the acknowledged messages that the log has, or that were read where they should."""
        sends = self._facts.sends
        rows = self.acked[self.acks_stay]
        seen = joined(self._at, self._facts.reads["offset"][self.reads_stay])
        self.found = int((places_of(np.unique(seen), sends["offset"][rows]) != NONE).sum())


def find_falls(
    facts: Facts, queue: Numbers, place: Numbers, offset: Numbers, line: Numbers
) -> None:
    """Find places of a queue that are in the log before an earlier place.

    Takes columns of messages, ordered by queue and place.
    """
    falls = ~begins(queue)
    falls[1:] &= (place[1:] > place[:-1]) & (offset[1:] < offset[:-1])
    for row in rows_of(falls):
        text = f"{facts.name_of(int(queue[row]))} {place[row]} is at {offset[row]} in the log,"
        text += f" before {place[row - 1]}, at {offset[row - 1]}"
        facts.report.find("queues", text, int(line[row - 1]), int(line[row]))
