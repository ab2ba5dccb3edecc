"""The log by itself, and beside real time: its queues, its epochs, who began later is later."""

from __future__ import annotations

import numpy as np

from hastore.history.rules.agreement import Agreement, find_falls
from hastore.history.rules.columns import (
    NONE,
    Numbers,
    begins,
    firsts,
    joined,
    looked_up,
    places_of,
    rows_of,
)
from hastore.history.rules.facts import PENDING, UNKNOWN, Facts


def judge_log(facts: Facts) -> None:
    """Find what is wrong with the records of the log, whatever was sent."""
    records, log, report = facts.records, facts.log, facts.report
    offset, size, line = records["offset"], records["size"], records["line"]
    if log is None:
        if len(records):
            report.find("place", "records, but no event of kind log", int(line[0]))
        return
    order = np.argsort(offset, kind="stable")
    offset, end, line = offset[order], offset[order] + size[order], line[order]
    for row in rows_of((offset < log.begin) | (end > log.end)):
        text = f"a record at {offset[row]} is not in the log, [{log.begin}, {log.end})"
        report.find("place", text, int(line[row]))
    for row in rows_of(offset[1:] < end[:-1]):
        text = f"the record at {offset[row + 1]} begins before {end[row]}"
        report.find("place", text, int(line[row]), int(line[row + 1]))
    _judge_queues(facts, log.begin)


def _judge_queues(facts: Facts, begin: int) -> None:
    """Find gaps in the queues; only retention may have removed their beginning."""
    records = facts.records
    order = np.lexsort((records["offset"], records["queue_offset"], records["queue"]))
    queue, place = records["queue"][order], records["queue_offset"][order]
    offset, line = records["offset"][order], records["line"][order]
    new = begins(queue)
    after = np.zeros(len(order), np.int64)
    after[1:] = place[:-1] + records["count"][order][:-1]
    after[new] = place[new] if begin else 0
    for row in rows_of(place != after):
        text = f"{facts.name_of(int(queue[row]))} has {place[row]}, at {offset[row]}, where"
        text += f" {after[row]} comes next"
        facts.report.find("queues", text, int(line[row]))
    find_falls(facts, queue, place, offset, line)


def judge_epochs(facts: Facts, agreement: Agreement) -> None:
    """Find epochs that go back, and records, replies and reads that are not of theirs."""
    table = [(one, line) for one, line in facts.epochs if one.start is not None]
    report = facts.report
    for (before, line), (after, next_line) in zip(table, table[1:], strict=False):
        assert before.start is not None and after.start is not None
        if after.epoch <= before.epoch or after.start < before.start:
            text = f"epoch {after.epoch} from {after.start} on comes after epoch {before.epoch}"
            report.find("epochs", f"{text} from {before.start} on", line, next_line)
    if not table:
        return
    starts = np.maximum.accumulate(np.array([one.start for one, _ in table], np.int64))
    epochs = np.array([one.epoch for one, _ in table], np.int64)
    hosts = np.array([_host(facts, one.host) for one, _ in table], np.int64)
    records, reads, sends = facts.records, facts.reads, facts.sends

    def of(offsets: Numbers) -> Numbers:
        return np.searchsorted(starts, offsets, "right") - 1

    place = of(records["offset"])
    host = np.where(place >= 0, hosts[place], NONE)
    known = (host != NONE) & (records["host"] != NONE)
    for row in rows_of(known & (host != records["host"])):
        text = f"the record at {records.get(row, 'offset')} is of {_named(facts, row)}, and"
        text += f" epoch {epochs[place[row]]} of {facts.hosts[int(host[row])]}"
        report.find("epochs", text, records.get(row, "line"))
    kept = agreement.acked[agreement.acks_stay]
    place = of(sends["offset"][kept])
    older = (place >= 0) & (sends["epoch"][kept] < epochs[place])
    for row in rows_of(older):
        text = f"epoch {sends['epoch'][kept[row]]} acknowledged what epoch {epochs[place[row]]}"
        report.find("epochs", f"{text} has written", sends.get(int(kept[row]), "end_line"))
    rows = np.flatnonzero(agreement.reads_stay & np.isin(reads["epoch"], epochs))
    place = of(reads["offset"][rows])
    other = (place >= 0) & (reads["epoch"][rows] != epochs[place])
    for row in rows_of(other):
        text = f"a reader was told epoch {reads['epoch'][rows[row]]} for a message of epoch"
        report.find("epochs", f"{text} {epochs[place[row]]}", reads.get(int(rows[row]), "line"))


def _host(facts: Facts, host: str | None) -> int:
    return NONE if host is None else facts.hosts.number(host)


def _named(facts: Facts, row: int) -> str:
    return facts.hosts[facts.records.get(row, "host")]


def judge_numbers(facts: Facts, agreement: Agreement) -> int:
    """Find producers' numbers that are there twice, or out of order; return how many there are."""
    records, reads, report = facts.records, facts.reads, facts.report
    read = np.flatnonzero(agreement.reads_stay & (reads["producer"] != NONE))
    if facts.log is not None:
        read = read[places_of(np.sort(records["offset"]), reads["offset"][read]) == NONE]
    known = np.flatnonzero(records["producer"] != NONE)
    column = {
        name: joined(records[name][known], reads[name][read])
        for name in ("producer", "sequence", "offset", "queue", "queue_offset", "line")
    }
    order = np.lexsort((column["offset"], column["sequence"], column["producer"]))
    first = order[firsts(begins(column["producer"][order], column["sequence"][order]))]
    for at in rows_of(column["offset"][order] != column["offset"][first]):
        one, other = int(first[at]), int(order[at])
        text = f"number {column['sequence'][one]} of producer"
        text += f" {facts.producers[int(column['producer'][one])]} is at {column['offset'][one]},"
        lines = int(column["line"][one]), int(column["line"][other])
        report.find("once", f"{text} and again at {column['offset'][other]}", *lines)
    order = np.lexsort((column["queue_offset"], column["queue"], column["producer"]))
    number = column["sequence"][order]
    falls = ~begins(column["producer"][order], column["queue"][order])
    falls[1:] &= number[1:] < number[:-1]
    for at in rows_of(falls):
        one, other = int(order[at - 1]), int(order[at])
        text = f"{facts.name_of(int(column['queue'][one]))} has number {number[at - 1]} before"
        text += f" {number[at]} of producer {facts.producers[int(column['producer'][one])]}"
        report.find("order", text, int(column["line"][one]), int(column["line"][other]))
    return len(order)


def judge_real_time(facts: Facts, agreement: Agreement) -> int:
    """Find sends that began after another was acknowledged, or read, and are before it in the log.

    Also acknowledgements whose epoch is older than one that came before. Returns how many sends
    were placed.
    """
    sends, reads, report = facts.sends, facts.reads, facts.report
    kept = agreement.acked[agreement.acks_stay]
    unknown, place = _places_of_unknown(facts, agreement)
    row = joined(kept, unknown)
    offset = joined(sends["offset"][kept], place)
    read = np.flatnonzero(agreement.reads_stay)
    ended = joined(sends["ended"][kept], reads["t"][read])
    known = joined(sends["offset"][kept], reads["offset"][read])
    line = joined(sends["end_line"][kept], reads["line"][read])
    order = np.argsort(ended, kind="stable")
    ended, known, line = ended[order], known[order], line[order]
    # At equal times the end counts as later: this makes the check weaker, never too strict.
    before = np.searchsorted(ended, sends["began"][row])
    bound = np.maximum.accumulate(joined(np.array([NONE]), known))[before]
    for at in rows_of(offset <= bound):
        earlier = int(np.argmax(known[: before[at]]))
        text = f"the send at {offset[at]} began after that at {bound[at]} had ended"
        report.find("linear", text, int(line[earlier]), sends.get(int(row[at]), "line"))
    firm = kept[~facts.is_alone(kept)]
    order = np.argsort(sends["ended"][firm], kind="stable")
    epoch, ended = sends["epoch"][firm][order], sends["ended"][firm][order]
    before = np.searchsorted(ended, sends["began"][firm])
    bound = np.maximum.accumulate(joined(np.array([NONE]), epoch))[before]
    for at in rows_of(sends["epoch"][firm] < bound):
        text = f"an acknowledgement of epoch {sends['epoch'][firm[at]]}, its send began after one"
        report.find("epochs", f"{text} of {bound[at]}", sends.get(int(firm[at]), "end_line"))
    return len(row)


def _places_of_unknown(facts: Facts, agreement: Agreement) -> tuple[Numbers, Numbers]:
    """Return the sends of unknown outcome of which one record is known, and its offsets."""
    sends, records, reads = facts.sends, facts.records, facts.reads
    rows = facts.rows_with(UNKNOWN, PENDING)
    digests, counts = np.unique(sends["digest"], return_counts=True)
    rows = rows[looked_up(digests, counts, sends["digest"][rows], 0) == 1]
    if facts.log is not None:
        digest, offset = records["digest"], records["offset"]
    else:
        read = np.flatnonzero(agreement.reads_stay)
        digest, offset = reads["digest"][read], reads["offset"][read]
    order = np.lexsort((offset, digest))
    digest, offset = digest[order], offset[order]
    new = begins(digest)
    # One place each, however often it was seen there: the first and the last are the same.
    last = np.ones(len(new), np.bool_)
    last[:-1] = new[1:]
    single = new.copy()
    single[new] = offset[new] == offset[last]
    found = looked_up(digest[single], offset[single], sends["digest"][rows], NONE)
    return rows[found != NONE], found[found != NONE]
