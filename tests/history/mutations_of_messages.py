"""Corrupted histories: messages that are lost, moved, changed, or acknowledged wrongly."""

from __future__ import annotations

import random

from hastore.history.rules import events as e
from tests.history.healthy import QUEUES, TOPIC
from tests.history.mutations import Copy, breaks, one_of

# -- durable


@breaks("durable")
def lose_an_acknowledged_message(h: Copy, rng: random.Random) -> None:
    h.drop(one_of(h.acked(), rng)[2])


@breaks("durable")
def lose_one_and_close_the_gap(h: Copy, rng: random.Random) -> None:
    lost = one_of(h.acked(), rng)[2]
    h.drop(lost)
    for one in h.all(e.Record):
        if one.queue == lost.queue and one.queue_offset > lost.queue_offset:
            one.queue_offset -= 1


@breaks("durable")
def cut_the_end(h: Copy, rng: random.Random) -> None:
    last = max((record for _, _, record in h.acked()), key=lambda one: one.offset)
    h.drop(*(one for one in h.all(e.Record) if one.offset >= last.offset))
    h.log.end = last.offset


@breaks("durable")
def lose_one_that_is_archived(h: Copy, rng: random.Random) -> None:
    lost = one_of(h.acked(), rng)[2]
    h.drop(lost)
    h.after(h.all(e.Record)[-1], e.Rescued(lost.offset, lost.digest))


@breaks("durable")
def change_a_byte(h: Copy, rng: random.Random) -> None:
    one = one_of(h.acked(), rng)[2]
    one.digest = f"{int(one.digest, 16) ^ 1:016x}"


@breaks("durable")
def exchange_two_records(h: Copy, rng: random.Random) -> None:
    one, other = rng.sample(h.acked(), 2)
    one[2].digest, other[2].digest = other[2].digest, one[2].digest


@breaks("durable")
def lose_what_was_read(h: Copy, rng: random.Random) -> None:
    """A reader got a message that was never confirmed, and is gone."""
    read = h.reads()[-1]
    last = read.messages[-1]
    digest = e.digest_of(TOPIC, "k", b"unconfirmed")
    send = e.Send("p9", 0, 1, TOPIC, digest)
    h.after(h.lines[0], send, e.Info("p9", 0, 2, "TIMEOUT"))
    read.messages.append(e.Seen(last.queue_offset + 1, h.log.end, digest))


@breaks("durable")
def let_power_losses_undo_a_sync(h: Copy, rng: random.Random) -> None:
    _, ok, record = one_of(h.acked(), rng)
    ok.level = "SYNC_DISK(1)"
    h.drop(record)
    h.after(ok, e.Fault(ok.t + 1, "power", 1), e.Fault(ok.t + 1, "power", 2))


@breaks("durable")
def let_one_lost_machine_undo_two_copies(h: Copy, rng: random.Random) -> None:
    _, ok, record = one_of(h.acked(), rng)
    h.drop(record)
    h.after(ok, e.Fault(ok.t + 1, "lost", 1))


@breaks("durable")
def let_power_losses_one_after_the_other_undo_two_copies(h: Copy, rng: random.Random) -> None:
    _, ok, record = one_of(h.acked(), rng)
    h.drop(record)
    h.after(ok, e.Fault(ok.t + 1, "power", 1), e.Fault(ok.t + 2, "in-sync", 1),
            e.Fault(ok.t + 3, "power", 2))  # fmt: skip


@breaks("durable")
def let_lost_disks_one_after_the_other_undo_two_copies(h: Copy, rng: random.Random) -> None:
    """After all that was seen: so the readers' messages are excused by the same faults, or not."""
    h.drop(one_of(h.acked(), rng)[2])
    end = max(one.t for one in h.lines if hasattr(one, "t"))
    h.after(h.lines[0], e.Fault(end + 1, "lost", 1), e.Fault(end + 2, "in-sync", 1),
            e.Fault(end + 3, "lost", 2))  # fmt: skip


@breaks("durable")
def let_a_kill_undo_what_the_master_had(h: Copy, rng: random.Random) -> None:
    last = max(one.epoch for one in h.all(e.Ok))
    send, ok, record = one_of([one for one in h.acked() if one[1].epoch == last], rng)
    send.acks, ok.level = "1", "MASTER_MEM"
    h.drop(record)
    h.after(ok, e.Fault(ok.t + 1, "kill", last & 0xFFFF))


@breaks("durable")
def let_a_planned_flip_undo_what_the_master_had(h: Copy, rng: random.Random) -> None:
    for epoch in h.all(e.Epoch):
        epoch.planned = True
    lost = {one.digest for one in h.all(e.Rescued)}
    acked = {(one.client, one.op) for one in h.all(e.Ok) if one.level == "MASTER_MEM"}
    one_of([one for one in h.all(e.Send)
            if one.digest in lost and (one.client, one.op) in acked], rng)  # fmt: skip


@breaks("durable")
def acknowledge_at_another_offset(h: Copy, rng: random.Random) -> None:
    ok = one_of(h.acked(), rng)[1]
    assert ok.offset is not None
    ok.offset += 7


@breaks("durable")
def read_another_message(h: Copy, rng: random.Random) -> None:
    begin = h.log.begin
    seen = one_of([m for read in h.reads() for m in read.messages if m.offset >= begin], rng)
    seen.digest = one_of([r.digest for r in h.all(e.Record) if r.offset != seen.offset], rng)


# -- reported


@breaks("reported")
def archive_nothing(h: Copy, rng: random.Random) -> None:
    acked = {(one.client, one.op) for one in h.all(e.Ok)}
    sent = {one.digest for one in h.all(e.Send) if (one.client, one.op) in acked}
    kept = {one.digest for one in h.all(e.Record)}
    one_of([one for one in h.all(e.Rescued) if one.digest in sent - kept], rng)
    h.drop(*h.all(e.Rescued))


# -- level


@breaks("level")
def downgrade_in_silence(h: Copy, rng: random.Random) -> None:
    one_of(h.acked(), rng)[1].level = "MASTER_MEM"


@breaks("level")
def acknowledge_before_the_sync(h: Copy, rng: random.Random) -> None:
    one_of(h.acked(), rng)[0].sync_flush = True


@breaks("level")
def state_a_level_of_no_slave(h: Copy, rng: random.Random) -> None:
    one_of(h.acked(), rng)[1].level = "SYNC_MEM(0)"


# -- place


@breaks("place")
def acknowledge_in_another_queue(h: Copy, rng: random.Random) -> None:
    ok = one_of(h.acked(), rng)[1]
    ok.queue = ((ok.queue or 0) + 1) % QUEUES


@breaks("place")
def acknowledge_at_another_queue_offset(h: Copy, rng: random.Random) -> None:
    ok = one_of(h.acked(), rng)[1]
    ok.queue_offset = (ok.queue_offset or 0) + 1


@breaks("place")
def read_at_another_queue_offset(h: Copy, rng: random.Random) -> None:
    begin = h.log.begin
    seen = one_of([m for read in h.reads() for m in read.messages if m.offset >= begin], rng)
    seen.queue_offset += 1


@breaks("place")
def read_in_another_queue(h: Copy, rng: random.Random) -> None:
    reads = [one for one in h.reads() if one.messages[0].offset >= h.log.begin]
    read = one_of(reads, rng)
    read.queue = (read.queue + 1) % QUEUES


@breaks("place")
def acknowledge_another_message_than_was_read(h: Copy, rng: random.Random) -> None:
    """Of what retention has removed since."""
    begin = h.log.begin
    read = {m.offset: m for one in h.all(e.Read) for m in one.messages if m.offset < begin}
    ok = one_of([one for one in h.all(e.Ok) if one.offset in read and one.level[:4] == "SYNC"], rng)
    ok.queue_offset = (ok.queue_offset or 0) + 1000


@breaks("place")
def let_two_readers_differ(h: Copy, rng: random.Random) -> None:
    h.without_log()
    h.drop(*(one for one in h.all(e.Ok) if one.offset is not None))
    mine = {m.offset: m for one in h.reads() for m in one.messages}
    theirs = {m.offset: m for name in ("m1", "m2") for one in h.reads(name) for m in one.messages}
    seen = mine[one_of(sorted(mine.keys() & theirs.keys()), rng)]
    seen.digest = one_of([one.digest for one in h.all(e.Send) if one.digest != seen.digest], rng)


@breaks("place")
def let_records_overlap(h: Copy, rng: random.Random) -> None:
    rng.choice(h.all(e.Record)[:-1]).size += 50


@breaks("place")
def store_beyond_the_end(h: Copy, rng: random.Random) -> None:
    h.log.end -= 1
