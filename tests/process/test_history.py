"""The history checker accepts correct histories and rejects each kind of corrupted history."""

import copy
import dataclasses
import random

import pytest

from tests.process.history import ACKED, REFUSED, UNKNOWN, Put, check
from tests.process.stores import Found

PORTS = {1: 111, 2: 222}


def a_history(seed):
    """Return consistent puts, records, epochs, archived records and reads."""
    rng = random.Random(seed)
    puts, records, rescued, queues = [], [], [], {}
    now = offset = 0
    for number in range(60):
        epoch, port = (65537, 111) if number < 30 else (131074, 222)
        body, key = b"body %d" % number, f"k{number}"
        began = now = now + rng.randrange(1, 5)
        now += rng.randrange(1, 5)
        outcome = rng.choice([ACKED] * 6 + [UNKNOWN, UNKNOWN, REFUSED])
        level = "SYNC_MEM(1)" if rng.random() < 0.8 else "MASTER_MEM"
        put = Put("T", body, key, began, now, outcome, level, epoch=epoch)
        puts.append(put)
        gone = outcome == ACKED and level == "MASTER_MEM" and number in range(25, 30)
        stored = outcome == ACKED or (outcome == UNKNOWN and rng.random() < 0.5)
        if not stored:
            continue
        queue = number % 4
        properties = {"KEYS": key, "HS_PID": "p", "HS_SEQ": str(number)}
        found = Found(offset, 100, "T", queue, queues.get(queue, 0), port, 0, body, properties)
        put.offset, put.queue_id, put.queue_offset = offset, queue, found.queue_offset
        if gone:
            rescued.append(found)
            continue
        records.append(found)
        queues[queue] = found.queue_offset + 1
        offset += 100
    start = next(r.offset for r in records if r.store_port == 222)
    epochs = [(65537, 0, 111), (131074, start, 222)]
    return puts, records, epochs, rescued, [(r.offset, r.body) for r in records[::7]]


def run(history):
    puts, records, epochs, rescued, reads = history
    return check(puts, records, epochs=epochs, rescued=rescued, reads=reads)


@pytest.mark.parametrize("seed", range(20))
def test_accepts_a_correct_history(seed):
    assert run(a_history(seed)) == []


def durable(history):
    return next(p for p in history[0] if p.durable and p.offset is not None)


def record_of(history, put):
    return next(i for i, r in enumerate(history[1]) if r.body == put.body)


def change(history, index, **fields):
    history[1][index] = dataclasses.replace(history[1][index], **fields)


def lose_acked(h):
    del h[1][record_of(h, durable(h))]


def lose_acked_though_archived(h):
    h[3].append(h[1].pop(record_of(h, durable(h))))


def lose_last(h):
    last = max((p for p in h[0] if p.durable), key=lambda p: p.offset)
    del h[1][record_of(h, last)]


def other_bytes(h):
    change(h, record_of(h, durable(h)), body=b"rot")


def swap_bodies(h):
    acked = [p for p in h[0] if p.durable]
    i, j = record_of(h, acked[0]), record_of(h, acked[5])
    one, other = h[1][i].body, h[1][j].body
    change(h, i, body=other)
    change(h, j, body=one)


def double(h):
    last = h[1][-1]
    again = dataclasses.replace(h[1][0], offset=last.offset + last.size)
    h[1].append(again)


def double_unknown(h):
    put = next(p for p in h[0] if p.outcome == UNKNOWN)
    last = h[1][-1]
    for place in (1, 2):
        offset = last.offset + place * 100
        h[1].append(dataclasses.replace(last, offset=offset, body=put.body, properties={}))


def store_refused(h):
    put = next(p for p in h[0] if p.outcome == REFUSED)
    change(h, record_of(h, durable(h)), body=put.body)


def phantom(h):
    last = h[1][-1]
    h[1].append(dataclasses.replace(last, offset=last.offset + 100, body=b"?", properties={}))


def another_offset(h):
    durable(h).offset += 100


def another_queue(h):
    durable(h).queue_id += 1


def another_queue_offset(h):
    durable(h).queue_offset += 1


def another_topic(h):
    change(h, record_of(h, durable(h)), topic="U")


def another_key(h):
    index = record_of(h, durable(h))
    change(h, index, properties={**h[1][index].properties, "KEYS": "other"})


def overlap(h):
    change(h, 3, size=150)


def out_of_order(h):
    """Place the later put before the earlier one, each acknowledged at its own offset."""
    acked = [p for p in h[0] if p.durable]
    one, other = acked[1], acked[2]
    one.began_ns, other.began_ns = other.began_ns, one.began_ns
    one.ended_ns, other.ended_ns = other.ended_ns, one.ended_ns


def unknown_out_of_order(h):
    put = next(p for p in h[0] if p.outcome == UNKNOWN and p.offset is not None)
    put.began_ns = 10**9


def same_sequence(h):
    change(h, 1, properties={**h[1][1].properties, "HS_SEQ": h[1][0].properties["HS_SEQ"]})


def wrong_master(h):
    change(h, 2, store_port=222)


def epoch_back(h):
    last = max((p for p in h[0] if p.durable), key=lambda p: p.offset)
    last.epoch = 65537


def history_back(h):
    h[2].append((131073, h[2][-1][1], 111))


def never_settled(h):
    durable(h).outcome = None


def false_read(h):
    h[4].append((h[1][0].offset, b"something else"))


def read_beyond(h):
    h[4].append((10**9, b"body"))


def lose_unarchived(h):
    """Lose a put that only the master acknowledged, without an archive."""
    put = next(p for p in h[0] if p.outcome == ACKED and p.level == "MASTER_MEM")
    h[1][:] = [r for r in h[1] if r.body != put.body]
    h[3].clear()


def gap_in_queue(h):
    del h[1][next(i for i, r in enumerate(h[1]) if r.queue_offset == 1)]


CORRUPTIONS = [
    *(lose_acked, lose_acked_though_archived, lose_last, other_bytes, swap_bodies, double),
    *(double_unknown, store_refused, phantom, another_offset, another_queue, another_queue_offset),
    *(another_topic, another_key, overlap, out_of_order, unknown_out_of_order, same_sequence),
    *(wrong_master, epoch_back, history_back, never_settled, false_read, read_beyond),
    *(lose_unarchived, gap_in_queue),
]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_rejects(corrupt):
    for seed in range(20):
        history = copy.deepcopy(a_history(seed))
        corrupt(history)
        assert run(history), f"seed {seed}"
