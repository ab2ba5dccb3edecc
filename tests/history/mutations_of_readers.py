"""Corrupted histories: of consumers, positions and ranges; calls that do not end once."""

from __future__ import annotations

import copy
import random

from hastore.history.rules import events as e
from tests.history.healthy import TOPIC
from tests.history.mutations import Copy, breaks, one_of

# -- consumers


@breaks("prefix")
def leave_out_a_message(h: Copy, rng: random.Random) -> None:
    reads = [one for one in h.reads(least=3) if one.messages[0].offset >= h.log.begin]
    del one_of(reads, rng).messages[1]


@breaks("prefix")
def leave_out_a_poll(h: Copy, rng: random.Random) -> None:
    reads = [one for one in h.reads() if one.messages[0].offset >= h.log.begin]
    inner = [one for one in reads[:-1]
             if any(r.queue == one.queue for r in h.reads() if r.t < one.t)
             and any(r.queue == one.queue for r in reads if r.t > one.t)]  # fmt: skip
    h.drop(one_of(inner, rng))


@breaks("monotonic")
def read_a_poll_again(h: Copy, rng: random.Random) -> None:
    read = one_of(h.reads(), rng)
    h.after(read, copy.deepcopy(read))


@breaks("monotonic")
def turn_a_poll_round(h: Copy, rng: random.Random) -> None:
    one_of(h.reads(least=2), rng).messages.reverse()


@breaks("delivered")
def commit_what_nobody_got(h: Copy, rng: random.Random) -> None:
    h.drop(*h.all(e.Seek))
    commit = [one for one in h.all(e.Commit) if not one.back and one.places[0].position]
    found = one_of(commit, rng)
    found.places[0].position = 10_000


@breaks("delivered")
def let_the_next_owner_begin_too_late(h: Copy, rng: random.Random) -> None:
    begin, owned, fits = h.log.begin, {}, []
    for one in h.lines:
        if isinstance(one, e.Assigned):
            owned[one.queue] = one.client
        if isinstance(one, e.Seek) and owned.get(one.queue) == one.client:
            del owned[one.queue]  # it may leave out what it likes
        if isinstance(one, e.Read) and owned.get(one.queue) == one.client:
            del owned[one.queue]
            beyond = one.messages[0].queue_offset > 0 and one.messages[0].offset >= begin
            before = [r for r in h.all(e.Read) if r.client in ("m1", "m2") and r.t < one.t
                      and r.queue == one.queue]  # fmt: skip
            most = max((r.messages[-1].queue_offset for r in before), default=0)
            commits = [c for c in h.all(e.Commit) if c.places[0].queue == one.queue]
            beyond = beyond and any(c.t + 99 < one.began for c in commits)
            if beyond and one.messages[-1].queue_offset > most + 1 and before:
                fits.append((one, most))
    read, most = one_of(fits, rng)
    read.messages = [one for one in read.messages if one.queue_offset > most + 1]


@breaks("owners")
def let_two_members_own_a_queue(h: Copy, rng: random.Random) -> None:
    """Between two polls of the owner the other member polls twice."""
    fits, last = [], {}
    for one in h.lines:
        if isinstance(one, e.Assigned | e.Revoked):
            last.pop(one.queue, None)
        elif isinstance(one, e.Read) and one.client in ("m1", "m2"):
            if one.queue in last:
                fits.append((last[one.queue], one))
            last[one.queue] = one
    first, second = one_of([one for one in fits if one[0].t + 9 < one[1].began], rng)
    thief = "m2" if first.client == "m1" else "m1"
    t, queue = first.t, first.queue
    h.after(
        first,
        e.Assigned(thief, t + 1, TOPIC, queue),
        e.Read(thief, t + 2, t + 3, TOPIC, queue, copy.deepcopy(first.messages)),
        e.Read(thief, t + 4, t + 5, TOPIC, queue, copy.deepcopy(second.messages)),
    )


@breaks("owners")
def let_another_member_poll_once(h: Copy, rng: random.Random) -> None:
    """Between two polls of the owner, which goes on."""
    fits, last = [], {}
    for one in h.lines:
        if isinstance(one, e.Assigned | e.Revoked):
            last.pop(one.queue, None)
        elif isinstance(one, e.Read) and one.client in ("m1", "m2"):
            if one.queue in last:
                fits.append((last[one.queue], one))
            last[one.queue] = one
    first, second = one_of([one for one in fits if one[0].t + 9 < one[1].began], rng)
    thief = "m2" if first.client == "m1" else "m1"
    t, queue = first.t, first.queue
    h.after(
        first,
        e.Assigned(thief, t + 1, TOPIC, queue),
        e.Read(thief, t + 2, t + 3, TOPIC, queue, copy.deepcopy(second.messages)),
        e.Revoked(thief, t + 4, TOPIC, queue),
    )


# -- positions


@breaks("positions")
def let_the_next_owner_begin_before_what_was_committed(h: Copy, rng: random.Random) -> None:
    records = {(one.queue, one.queue_offset): one for one in h.all(e.Record)}
    fits, committed, new = [], {}, {}
    for one in h.lines:
        if isinstance(one, e.Commit):
            queue, position = one.places[0].queue, one.places[0].position
            committed[queue] = None if one.back or not position else (one.client, position)
        elif isinstance(one, e.Assigned):
            new[one.queue] = one.client
        elif isinstance(one, e.Seek):
            new.pop(one.queue, None)
        elif isinstance(one, e.Read) and new.get(one.queue) == one.client:
            del new[one.queue]
            owner, position = committed.get(one.queue) or (one.client, 0)
            if owner != one.client and (one.queue, position - 1) in records:
                fits.append((one, records[one.queue, position - 1]))
    read, record = one_of(fits, rng)
    seen = e.Seen(record.queue_offset, record.offset, record.digest, None, record.producer,
                  record.sequence)  # fmt: skip
    read.messages.insert(0, seen)


@breaks("positions")
def answer_an_older_position(h: Copy, rng: random.Random) -> None:
    answer = h.all(e.Position)[-1]
    place = one_of([one for one in answer.places if one.position], rng)
    assert place.position is not None
    place.position -= 1


@breaks("positions")
def forget_a_position(h: Copy, rng: random.Random) -> None:
    one_of([one for one in h.all(e.Position)[-1].places if one.position], rng).position = None


@breaks("delivered")
def answer_a_position_that_nobody_committed(h: Copy, rng: random.Random) -> None:
    for commit in h.all(e.Commit):
        commit.back = False
    one_of([one for one in h.all(e.Position)[-1].places if one.position], rng).position = 10_000


@breaks("positions")
def accept_a_commit_that_goes_back(h: Copy, rng: random.Random) -> None:
    commits = [one for one in h.all(e.Commit) if (one.places[0].position or 0) > 1]
    commit = one_of([one for one in commits if not one.back], rng)
    ok = next(o for o in h.all(e.Ok) if (o.client, o.op) == (commit.client, commit.op))
    again = copy.deepcopy(commit)
    again.op, again.t, again.places[0].position = 999_999, ok.t + 1, 1
    h.after(ok, again, e.Ok(again.client, again.op, ok.t + 2))


# -- ranges


@breaks("ranges")
def lose_a_row(h: Copy, rng: random.Random) -> None:
    one_of(h.all(e.Range), rng).count -= 1


@breaks("ranges")
def get_a_row_twice(h: Copy, rng: random.Random) -> None:
    one_of(h.all(e.Range), rng).count += 1


@breaks("ranges")
def get_another_row(h: Copy, rng: random.Random) -> None:
    found = one_of(h.all(e.Range), rng)
    found.digest = f"{int(found.digest, 16) ^ 1:016x}"


@breaks("ranges")
def get_rows_beyond_the_end(h: Copy, rng: random.Random) -> None:
    found = one_of(h.all(e.Range), rng)
    found.end += 1000
    found.count += 1000


# -- settled


@breaks("settled")
def end_a_send_twice(h: Copy, rng: random.Random) -> None:
    ok = one_of(h.acked(), rng)[1]
    h.after(ok, copy.copy(ok))


@breaks("settled")
def never_end_a_send(h: Copy, rng: random.Random) -> None:
    h.drop(one_of(h.acked(), rng)[1])


@breaks("settled")
def end_a_send_before_it_begins(h: Copy, rng: random.Random) -> None:
    send, ok, _ = one_of(h.acked(), rng)
    ok.t = send.t - 1
