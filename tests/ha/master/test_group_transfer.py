"""Waiting puts: each ends exactly once, in order, by progress, deadline or the epoch's end."""

import random
import threading
import time

import pytest

from hastore.clock import SYSTEM_CLOCK, SystemClock
from hastore.ha.master.group_transfer import GroupTransferService, Need, Outcome, PutProgress
from hastore.service import raise_failure

FAR = float("inf")
NEEDS = list(Need)


def progress(serial, end, *, need=None, by_classics=None):
    limits = {one: end if need in (None, one) else 0 for one in Need}
    return PutProgress(serial, limits, lambda need, end: f"{need.name}@{end}", by_classics)


class Ends:
    """Outcomes and levels that `done` received, by put."""

    def __init__(self):
        self.seen = []

    def __call__(self, name):
        return lambda outcome, level: self.seen.append((name, outcome, level))

    def outcomes(self):
        return {name: outcome for name, outcome, _ in self.seen}


@pytest.fixture
def ends():
    return Ends()


@pytest.fixture
def flushes():
    return []


@pytest.fixture
def transfer(flushes):
    service = GroupTransferService(
        SYSTEM_CLOCK, lambda: flushes.append(1), on_failure=raise_failure
    )
    yield service
    service.stop()


def test_progress_completes_in_offset_order(transfer, ends):
    transfer.advance(progress(1, 0))
    for end in (30, 10, 20, 20):
        transfer.add(end, FAR, Need.SLAVES, ends(end))
    assert transfer.waiting == 4
    transfer.advance(progress(2, 19))
    assert transfer.waiting == 3
    transfer.advance(progress(3, 30))
    assert transfer.waiting == 0
    assert [name for name, _, _ in ends.seen] == [10, 20, 20, 30]
    assert {outcome for _, outcome, _ in ends.seen} == {Outcome.CONFIRMED}
    assert ends.seen[0][2] == "SLAVES@10"


class Clock(SystemClock):
    """A clock that the test sets forward."""

    now_ms = 0.0

    def monotonic_ms(self):
        return self.now_ms


def test_one_wait_at_a_time_is_timed(ends):
    clock = Clock()
    transfer = GroupTransferService(clock, lambda: None, on_failure=raise_failure)
    transfer.advance(progress(1, 0))
    transfer.add(10, FAR, Need.SLAVES, ends("timed"))
    clock.now_ms = 5.0
    transfer.add(20, FAR, Need.SLAVES, ends("beside it"))
    transfer.advance(progress(2, 9))
    assert (transfer.timed, transfer.timed_ms) == (0, 0.0)
    clock.now_ms = 7.0
    transfer.advance(progress(3, 20))
    assert (transfer.timed, transfer.timed_ms) == (1, 7.0)
    transfer.add(30, FAR, Need.SLAVES, ends("lost"))
    transfer.abandon(4)
    clock.now_ms = 100.0
    transfer.advance(progress(5, 40))
    assert transfer.timed == 1, "it was not confirmed"


def test_a_put_that_is_already_confirmed_does_not_wait(transfer, ends):
    transfer.advance(progress(1, 100))
    transfer.add(100, FAR, Need.SLAVES, ends("a"))
    assert ends.seen == [("a", Outcome.CONFIRMED, "SLAVES@100")] and transfer.waiting == 0
    transfer.add(101, FAR, Need.SLAVES, ends("b"))
    assert transfer.waiting == 1


def test_each_need_has_its_own_limit(transfer, ends):
    transfer.advance(progress(1, 0))
    for need in NEEDS:
        transfer.add(10, FAR, need, ends(need))
    transfer.advance(progress(2, 10, need=Need.SLAVES))
    assert set(ends.outcomes()) == {Need.SLAVES}
    transfer.advance(progress(3, 10))
    assert set(ends.outcomes()) == set(Need)


def test_a_sync_is_requested_for_puts_that_wait_for_the_disk(transfer, ends, flushes):
    transfer.advance(progress(1, 0))
    transfer.add(10, FAR, Need.SLAVES, ends("a"))
    assert not flushes
    transfer.add(10, FAR, Need.MASTER_DISK, ends("b"))
    transfer.add(10, FAR, Need.SLAVE_DISKS, ends("c"))
    assert len(flushes) == 2


def test_where_every_put_is_for_the_disk_every_wait_asks(flushes, ends):
    service = GroupTransferService(
        SYSTEM_CLOCK, lambda: flushes.append(1), always_flush=True, on_failure=raise_failure
    )
    service.advance(progress(1, 0))
    service.add(10, FAR, Need.SLAVES, ends("a"))
    assert flushes


def test_older_progress_neither_confirms_nor_takes_back(transfer, ends):
    transfer.advance(progress(5, 100))
    transfer.advance(progress(4, 50))  # of a slower thread
    transfer.add(80, FAR, Need.SLAVES, ends("a"))
    assert ends.outcomes() == {"a": Outcome.CONFIRMED}


def test_the_end_of_an_epoch_ends_every_wait_with_its_fate_open(transfer, ends):
    transfer.advance(progress(1, 0))
    for need in NEEDS:
        transfer.add(10, FAR, need, ends(need))
    assert transfer.abandon(2) == 3
    assert ends.outcomes() == {
        Need.MASTER_DISK: Outcome.FLUSH_DISK_TIMEOUT,
        Need.SLAVES: Outcome.FLUSH_SLAVE_TIMEOUT,
        Need.SLAVE_DISKS: Outcome.FLUSH_SLAVE_TIMEOUT,
    }
    assert {level for _, _, level in ends.seen} == {"MASTER_MEM"}


def test_nothing_of_an_ended_epoch_confirms_a_later_put(transfer, ends):
    transfer.advance(progress(1, 0))
    transfer.abandon(3)
    transfer.advance(progress(2, 1000))  # computed before the epoch's end, delivered after it
    transfer.add(10, FAR, Need.SLAVES, ends("late"))  # its epoch has ended
    assert ends.outcomes() == {"late": Outcome.FLUSH_SLAVE_TIMEOUT}
    transfer.advance(progress(4, 0))  # the next epoch opens
    transfer.add(10, FAR, Need.SLAVES, ends("next"))
    transfer.advance(progress(2, 1000))
    assert "next" not in ends.outcomes()
    transfer.advance(progress(5, 10))
    assert ends.outcomes()["next"] is Outcome.CONFIRMED


def test_deadlines_end_only_their_own(transfer, ends):
    transfer.start()
    transfer.advance(progress(1, 0))
    now = SYSTEM_CLOCK.monotonic_ms()
    transfer.add(30, now + 60_000, Need.SLAVES, ends("patient"))
    transfer.add(20, now + 30, Need.SLAVES, ends("hasty"))
    transfer.add(10, now + 30, Need.MASTER_DISK, ends("disk"))
    deadline = time.monotonic() + 60
    while len(ends.seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert ends.outcomes() == {
        "hasty": Outcome.FLUSH_SLAVE_TIMEOUT, "disk": Outcome.FLUSH_DISK_TIMEOUT,
    }  # fmt: skip
    transfer.advance(progress(2, 30))
    assert ends.outcomes()["patient"] is Outcome.CONFIRMED and transfer.waiting == 0


def test_classic_slaves_complete_from_the_front(transfer, ends):
    transfer.advance(progress(1, 0))
    for end in (10, 20, 30):
        transfer.add(end, FAR, Need.SLAVES, ends(end))
    transfer.add(10, FAR, Need.SLAVE_DISKS, ends("disk"))
    transfer.advance(progress(2, 0, by_classics=lambda end: end <= 20))
    assert set(ends.outcomes()) == {10, 20}


def test_a_put_that_a_classic_slave_cannot_confirm_holds_up_no_other(transfer, ends):
    """As after its link broke: it has the first put, but its new stream began behind that."""
    transfer.advance(progress(1, 0))
    for end in (10, 20, 30):
        transfer.add(end, FAR, Need.SLAVES, ends(end))
    transfer.advance(progress(2, 0, by_classics=lambda end: 10 < end <= 20))
    assert ends.outcomes() == {20: Outcome.CONFIRMED} and transfer.waiting == 2
    transfer.advance(progress(3, 30))
    assert [name for name, _, _ in ends.seen] == [20, 10, 30]


def test_many_threads_end_each_put_exactly_once(transfer):
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    transfer.start()
    transfer.advance(progress(1, 0))
    counts, guard = {}, threading.Lock()
    serial = iter(range(2, 1 << 30))

    def done(name):
        def note(outcome, level):
            with guard:
                counts[name] = counts.get(name, 0) + 1

        return note

    def put(base):
        for n in range(300):
            now = SYSTEM_CLOCK.monotonic_ms()
            transfer.add(
                base + n, now + rng.choice((1, 50_000)), rng.choice(NEEDS), done((base, n))
            )

    def advance():
        for n in range(200):
            transfer.advance(progress(next(serial), n * 10))
            if rng.random() < 0.02:
                transfer.abandon(next(serial))

    threads = [threading.Thread(target=put, args=(base,)) for base in (0, 500, 1000)]
    threads += [threading.Thread(target=advance) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    transfer.abandon(next(serial))
    deadline = time.monotonic() + 60
    while len(counts) < 900 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(counts) == 900 and set(counts.values()) == {1}


def test_a_put_of_an_earlier_epoch_is_not_matched_to_a_later_one(transfer, ends):
    """Between append and wait the node was demoted, rejoined and was promoted again."""
    transfer.advance(progress(1, 1000)._replace(epoch=131073))
    transfer.add(10, FAR, Need.SLAVES, ends("late"), epoch=65537)
    transfer.add(10, FAR, Need.SLAVES, ends("own"), epoch=131073)
    assert ends.outcomes() == {"late": Outcome.FLUSH_SLAVE_TIMEOUT, "own": Outcome.CONFIRMED}
