"""Corrupted histories: messages that nobody sent, or twice; wrong orders, epochs and queues."""

from __future__ import annotations

import copy
import random

from hastore.history.rules import events as e
from tests.history.healthy import HOSTS, TOPIC
from tests.history.mutations import Copy, breaks, one_of

# -- phantom, refused


@breaks("phantom")
def store_what_nobody_sent(h: Copy, rng: random.Random) -> None:
    h.append(e.digest_of(TOPIC, None, b"nobody sent this"))


@breaks("phantom")
def forget_a_send(h: Copy, rng: random.Random) -> None:
    send, ok, _ = one_of(h.acked(), rng)
    h.drop(send, ok)


@breaks("phantom")
def read_what_nobody_sent(h: Copy, rng: random.Random) -> None:
    h.without_log()
    seen = one_of([m for one in h.reads() for m in one.messages], rng)
    seen.digest = e.digest_of(TOPIC, None, b"nobody sent this")


@breaks("phantom")
def read_before_it_is_sent(h: Copy, rng: random.Random) -> None:
    read = {m.digest: one for one in h.reads() for m in one.messages}
    send, ok, _ = one_of([one for one in h.acked() if one[0].digest in read], rng)
    send.t = read[send.digest].t + 1
    ok.t = max(ok.t, send.t + 1)


@breaks("refused")
def store_what_was_refused(h: Copy, rng: random.Random) -> None:
    h.append(one_of(h.refused(), rng).digest)


@breaks("refused")
def refuse_what_is_stored(h: Copy, rng: random.Random) -> None:
    send, ok, _ = one_of(h.acked(), rng)
    h.after(ok, e.Fail(send.client, send.op, ok.t, "BUSY"))
    h.drop(ok)


@breaks("refused")
def call_a_timeout_a_failure(h: Copy, rng: random.Random) -> None:
    send, _ = one_of(h.of_unknown(), rng)
    info = next(one for one in h.all(e.Info) if (one.client, one.op) == (send.client, send.op))
    h.after(info, e.Fail(send.client, send.op, info.t, "TIMEOUT"))
    h.drop(info)


@breaks("refused")
def read_what_was_refused(h: Copy, rng: random.Random) -> None:
    h.without_log()
    seen = one_of([m for one in h.reads() for m in one.messages], rng)
    seen.digest = one_of(h.refused(), rng).digest


# -- once


@breaks("once")
def store_an_acknowledged_message_twice(h: Copy, rng: random.Random) -> None:
    h.append(one_of(h.acked(), rng)[2].digest)


@breaks("once")
def store_an_unknown_message_twice(h: Copy, rng: random.Random) -> None:
    h.append(one_of(h.of_unknown(), rng)[1].digest)


@breaks("once")
def store_a_number_twice(h: Copy, rng: random.Random) -> None:
    one, other = rng.sample(h.all(e.Record), 2)
    other.producer, other.sequence = one.producer, one.sequence


@breaks("once")
def read_a_number_twice(h: Copy, rng: random.Random) -> None:
    h.without_log()
    one, other = rng.sample([m for each in h.reads() for m in each.messages], 2)
    other.producer, other.sequence = one.producer, one.sequence


@breaks("once")
def read_a_second_copy_without_a_log(h: Copy, rng: random.Random) -> None:
    """Under a number of its own, as of a client that was started again and repeats its message."""
    end = h.log.end
    h.without_log()
    read = h.reads()[-1]
    digest = one_of(h.acked_digests(), rng)
    read.messages.append(e.Seen(read.messages[-1].queue_offset + 1, end, digest))


# -- linear, order


@breaks("linear")
def acknowledge_one_record_twice(h: Copy, rng: random.Random) -> None:
    send, ok, _ = one_of(h.acked(), rng)
    more = copy.copy(send), copy.copy(ok)
    more[0].op = more[1].op = 999_999
    h.after(ok, *more)


@breaks("linear")
def order_two_against_real_time(h: Copy, rng: random.Random) -> None:
    acked = h.acked()
    one = one_of(acked, rng)
    other = one_of([each for each in acked if each[0].t > one[1].t], rng)
    one[0].t, other[0].t = other[0].t, one[0].t
    one[1].t, other[1].t = other[1].t, one[1].t


@breaks("linear")
def store_an_unknown_one_before_it_is_sent(h: Copy, rng: random.Random) -> None:
    records = h.all(e.Record)
    send, record = one_of([one for one in h.of_unknown() if one[1] is not records[-1]], rng)
    send.t = max(one.t for one in h.all(e.Ok)) + 1
    info = next(one for one in h.all(e.Info) if (one.client, one.op) == (send.client, send.op))
    info.t = send.t + 1


@breaks("linear")
def append_below_what_was_read(h: Copy, rng: random.Random) -> None:
    """Only a reader knows that the later record was there first."""
    read = one_of([one for one in h.reads() if one.messages[-1].offset >= h.log.begin], rng)
    last = read.messages[-1]
    before = [one for one in h.acked() if one[2].offset < last.offset and one[0].t < read.t]
    send, ok, _ = one_of(before, rng)
    h.drop(*(one for one in h.all(e.Read) if one is not read))
    h.drop(*(one for one in h.all(e.Ok) if one is not ok and one.offset is not None))
    h.drop(*h.all(e.Commit), *h.all(e.Position), *h.all(e.Closed), *h.all(e.Range))
    send.t, ok.t = read.t + 1, max(ok.t, read.t + 2)


@breaks("order")
def exchange_two_numbers_of_a_producer(h: Copy, rng: random.Random) -> None:
    one = one_of(h.all(e.Record), rng)
    same = [
        other for other in h.all(e.Record)
        if other is not one and (other.producer, other.queue) == (one.producer, one.queue)
    ]  # fmt: skip
    other = one_of(same, rng)
    one.sequence, other.sequence = other.sequence, one.sequence


# -- epochs


@breaks("epochs")
def go_back_to_an_old_epoch(h: Copy, rng: random.Random) -> None:
    first = min(one.epoch for one in h.all(e.Epoch))
    h.acked()[-1][1].epoch = first


@breaks("epochs")
def acknowledge_by_the_master_before(h: Copy, rng: random.Random) -> None:
    """Nothing else is known of real time."""
    first = min(one.epoch for one in h.all(e.Epoch))
    ok = one_of([one[1] for one in h.acked() if one[1].epoch != first], rng)
    h.drop(*(one for one in h.all(e.Ok) if one is not ok and one.offset is not None))
    h.drop(*h.all(e.Closed))
    ok.epoch = first


@breaks("epochs")
def store_by_another_node(h: Copy, rng: random.Random) -> None:
    one = one_of(h.all(e.Record), rng)
    one.host = next(host for host in HOSTS.values() if host != one.host)


@breaks("epochs")
def let_the_history_of_epochs_go_back(h: Copy, rng: random.Random) -> None:
    last = h.all(e.Epoch)[-1]
    h.after(last, e.Epoch(last.epoch - 1, last.start, 1))


@breaks("epochs")
def tell_a_reader_another_epoch(h: Copy, rng: random.Random) -> None:
    second = h.all(e.Epoch)[1]
    seen = [m for one in h.reads() for m in one.messages if m.offset < (second.start or 0)]
    one_of(seen, rng).epoch = second.epoch


# -- queues


@breaks("queues")
def leave_a_gap_in_a_queue(h: Copy, rng: random.Random) -> None:
    one = one_of(h.all(e.Record), rng)
    for other in h.all(e.Record):
        if other.queue == one.queue and other.queue_offset > one.queue_offset:
            other.queue_offset += 1
    one_of([r for r in h.all(e.Record)
            if r.queue == one.queue and r.queue_offset > one.queue_offset], rng)  # fmt: skip


@breaks("queues")
def give_a_queue_offset_twice(h: Copy, rng: random.Random) -> None:
    one = one_of([one for one in h.all(e.Record) if one.queue_offset], rng)
    one.queue_offset -= 1


@breaks("queues")
def begin_a_queue_again(h: Copy, rng: random.Random) -> None:
    """As a master would that does not know what retention has removed."""
    h.log.begin = 0
    h.drop(next(one for one in h.all(e.Record) if one.queue == 0))


@breaks("queues")
def order_a_queue_against_the_log(h: Copy, rng: random.Random) -> None:
    one = one_of(h.all(e.Record), rng)
    others = [other for other in h.all(e.Record) if other.queue == one.queue and other is not one]
    other = one_of(others, rng)
    one.queue_offset, other.queue_offset = other.queue_offset, one.queue_offset
