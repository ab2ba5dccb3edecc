"""The driver's parts alone: ordered calls, waits by term, the outbox, pushes cut into frames."""

import errno
import os
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.dledger.core.events import OwnEntry, Settled
from hastore.dledger.driver.carry_out import (
    Asked,
    OrderedCalls,
    Outbox,
    TermWaits,
    contradiction,
    filled,
    lost_commit,
)
from hastore.dledger.driver.driver import Pace
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.ha.master.group_transfer import GroupTransferService, Need
from hastore.protocol.dledger import (
    AppendRequest,
    Code,
    CommitRequest,
    CompareRequest,
    PushResponse,
    PushType,
    TruncateRequest,
)
from hastore.service import raise_failure
from tests.dledger.driver.groups import HOST, STORE, record
from tests.dledger.links.groups import make_config


def test_calls_are_made_in_order_also_from_many_threads_and_from_calls():
    calls, made = OrderedCalls(), []
    lock = threading.Lock()
    numbers = iter(range(4_000))

    def work():
        for _ in range(1_000):
            with lock:
                calls.add(partial(made.append, next(numbers)))
            calls.run()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    calls.run()
    assert made == list(range(4_000))

    calls.add(lambda: (calls.add(lambda: made.append("inner")), calls.run(), made.append("outer")))
    calls.run()
    assert made[-2:] == ["outer", "inner"]


def test_a_failing_call_does_not_stop_the_next():
    calls, made = OrderedCalls(), []
    calls.add(lambda: 1 / 0)
    calls.add(lambda: made.append(1))
    with pytest.raises(ZeroDivisionError):
        calls.run()
    calls.run()
    assert made == [1]


@pytest.fixture
def waits():
    """TermWaits over a real GroupTransferService, and what became of its puts."""
    transfer = GroupTransferService(SYSTEM_CLOCK, lambda: None, on_failure=raise_failure)
    calls = OrderedCalls()
    made = TermWaits(transfer, calls, lambda: True)
    ended = []

    def wait(name, end, term):
        def done(outcome, level):
            ended.append((name, outcome.value, level))

        transfer.add(end, float("inf"), Need.SLAVES, done, epoch=term)

    return made, calls, wait, ended


class Seen(int):
    """A term as `_open` compares it; at that moment another thread ends it and begins the next."""

    between = staticmethod(lambda: None)

    def __eq__(self, other):
        self.between()
        return int(self) == int(other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("following", [0, 7])
def test_a_term_that_ends_while_it_opens_is_not_open(waits, following):
    """Nor is the next one, before the transfer service knows it: its puts would end unconfirmed."""
    made, calls, _, _ = waits
    made.lead(5, 100)
    threads = []

    def other_thread():
        made.end()
        if following:
            made.lead(following, 100)

    def between():
        Seen.between = staticmethod(lambda: None)
        threads.append(threading.Thread(target=other_thread))
        threads[0].start()
        threads[0].join(0.2)  # it waits for the lock, or it is through

    made._term = Seen(5)
    Seen.between = staticmethod(between)
    opens, calls._calls = calls._calls.popleft(), type(calls._calls)()
    opens()
    threads[0].join()
    assert made.open_term == 0
    calls.run()
    assert made.open_term == following


def test_puts_are_confirmed_by_offset(waits):
    made, calls, wait, ended = waits
    made.lead(3, 100)
    assert made.open_term == 0, "the transfer service does not know the term yet"
    calls.run()
    assert made.open_term == 3
    wait("a", 150, 3)
    wait("b", 250, 3)
    made.commit(200)
    calls.run()
    assert ended == [("a", "PUT_OK", "QUORUM_DISK")]


def test_a_put_of_an_earlier_term_is_never_confirmed_by_a_later_one(waits):
    """The calls of both terms are made late, together, in the order of the terms."""
    made, calls, wait, ended = waits
    made.lead(3, 100)
    calls.run()
    wait("old", 150, 3)
    made.end()
    made.lead(5, 100)
    made.commit(500)
    calls.run()
    assert ended == [("old", "FLUSH_SLAVE_TIMEOUT", "MASTER_MEM")]
    wait("late", 160, 3)
    wait("new", 200, 5)
    assert ended[1:] == [
        ("late", "FLUSH_SLAVE_TIMEOUT", "MASTER_MEM"),
        ("new", "PUT_OK", "QUORUM_DISK"),
    ]


def test_leading_a_later_term_ends_the_earlier_one(waits):
    made, calls, wait, ended = waits
    made.lead(3, 100)
    calls.run()
    wait("old", 150, 3)
    made.lead(4, 100)
    made.lead(4, 100)
    made.commit(500)
    calls.run()
    assert [one[1] for one in ended] == ["FLUSH_SLAVE_TIMEOUT"] and made.open_term == 4


def test_a_follower_confirms_nothing(waits):
    made, calls, _wait, ended = waits
    made.commit(500)
    made.end()
    calls.run()
    assert ended == [] and made.open_term == 0


def test_who_asked_is_told_once(waits):
    made, calls, _wait, _ended = waits
    told = []
    first, second = Asked(told.append), Asked(told.append)
    made.ask(first)
    made.ask(second)
    made.settle(Settled(object(), "COMMITTED", 5))
    made.settle(Settled(first, "COMMITTED", 7))
    made.end_all("the core begins anew")
    calls.run()
    assert [(one.outcome, one.index) for one in told] == [("COMMITTED", 7), ("TERM_CHANGED", -1)]
    assert told[1].reason == "the core begins anew"


# ---- the outbox


class Links:
    """Keep what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, peer, message):
        self.sent.append((peer, message))


def answer(index, term=1, code=Code.SUCCESS, push=PushType.APPEND):
    return PushResponse(term, push, code, index, 0, 9)


def waited_for(readers):
    """Return a store for whose next entries readers wait, or not."""
    return SimpleNamespace(messages=SimpleNamespace(readers_wait=lambda: readers))


def test_an_answer_says_whether_readers_wait():
    for readers in (True, False):
        links = Links()
        outbox = Outbox(links, waited_for(readers))
        outbox.post([(1, answer(3)), (2, CommitRequest(1, 3))])
        outbox.send()
        assert [getattr(message, "readers", None) for _, message in links.sent] == [readers, None]


def test_of_answers_in_a_row_the_last_one_is_sent():
    links = Links()
    outbox = Outbox(links, waited_for(False))
    outbox.post([(1, answer(3)), (1, answer(4))])
    outbox.post([(1, answer(5)), (2, answer(4)), (2, answer(6))])
    kept = [
        (2, answer(5)), (2, answer(7, term=2)), (2, answer(9, code=Code.INCONSISTENT_STATE)),
        (2, answer(10, push=PushType.COMMIT)), (2, answer(11)), (1, answer(12)),
    ]  # fmt: skip
    outbox.post(kept)
    outbox.send()
    assert links.sent == [(1, answer(5)), (2, answer(6)), *kept]
    outbox.send()
    assert len(links.sent) == 8


# ---- pushes and files


@pytest.fixture
def store(tmp_path):
    config = make_config(tmp_path, 1, {1: 1}, store=STORE)
    made = DLedgerMmapFileStore(config.store, node=1, store_host=HOST, index_file_bytes=32 * 4096)
    made.open()
    yield made
    made.close()


def push(store, first, last, term=1):
    return AppendRequest(
        term, first - 1, term if first else -1, 0, 0, ((term, last - first + 1),), -1
    )


def test_a_push_becomes_as_many_frames_as_it_has_files(store):
    store.append_own(OwnEntry(0, 1))
    for _ in range(40):
        store.put(1, [record(b"x" * 4_000) for _ in range(5)])
    assert store.end_index == 200
    file_size = store.messages.file_size
    parts = list(filled(push(store, 0, 200), store))
    assert len(parts) == 1 + store.position(200) // file_size > 2
    index = 0
    for part in parts:
        count = sum(n for _, n in part.runs)
        assert part.prev_index == index - 1 and part.pos == store.position(index)
        assert part.pos + part.size == store.end_position(index + count - 1)
        assert part.pos // file_size == (part.pos + part.size - 1) // file_size
        index += count
    assert index == 201
    (one,) = filled(push(store, 3, 7), store)
    assert (one.pos, one.pos + one.size) == (store.position(3), store.end_position(7))
    assert list(filled(CommitRequest(1, 5), store)) == [CommitRequest(1, 5)]


def test_what_cannot_be_read_is_left_out(store, monkeypatch):
    """An index unit of long ago is in a file, and the process has no descriptor left, say."""
    store.append_own(OwnEntry(0, 1))
    links = Links()
    outbox = Outbox(links, store)
    outbox.post([(2, push(store, 0, 0)), (3, CommitRequest(1, 0))])

    def fail(_index):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(store, "position", fail)
    outbox.send()
    assert [peer for peer, _ in links.sent] == [3]


def test_a_leader_compares_by_the_term_alone_where_its_disk_has_a_bad_sector(store, monkeypatch):
    """Without the question a follower would get nothing for as long as this node leads."""
    store.append_own(OwnEntry(0, 1))
    (whole,) = filled(CompareRequest(1, 0, 1), store)
    damages = []
    store.messages.hooks.on_damage = damages.append

    def fail(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(store.messages, "view", fail)
    assert list(filled(CompareRequest(1, 0, 1), store)) == [CompareRequest(1, 0, 1)]
    assert contradiction(whole, store) is None
    assert damages == [48, 48]


def test_a_leader_that_wants_a_committed_entry_removed_has_lost_it(store):
    for index in range(4):
        store.append_own(OwnEntry(index, 1))
    store.commit(2)
    assert lost_commit(TruncateRequest(3, 2, 1), store) == (
        "entry 2 of term 1 is committed here, and the leader of term 3 lacks it"
    )
    assert "has another one" in lost_commit(TruncateRequest(3, 2, 1, 2), store)
    assert lost_commit(TruncateRequest(3, 3, 1, 2), store) is None, "it is not committed"
    assert lost_commit(TruncateRequest(3, 2, 1, 1), store) is None, "an old request"
    assert lost_commit(TruncateRequest(3, 2, 2), store) is None, "it does not fit"
    store.append_own(OwnEntry(4, 3))
    assert lost_commit(TruncateRequest(3, 2, 1), store) is None, "this log is that leader's"


def test_what_the_store_does_not_have_is_left_out(store):
    store.append_own(OwnEntry(0, 1))
    links = Links()
    outbox = Outbox(links, store)
    outbox.post([(2, push(store, 0, 5)), (2, push(store, 0, 0)), (3, CommitRequest(1, 0))])
    outbox.send()
    assert [peer for peer, _ in links.sent] == [2, 3]
    outbox.post([(2, push(store, 0, 0)), (3, CommitRequest(1, 0))])
    outbox.drop_appends()
    outbox.send()
    assert [peer for peer, _ in links.sent] == [2, 3, 3]


# ---- sleep


def test_a_sooner_deadline_wakes_the_thread():
    pace = Pace(SYSTEM_CLOCK)
    now = SYSTEM_CLOCK.monotonic_ms()
    pace.deadline_ms = now + 600_000
    stopping = threading.Event()
    sleeper = threading.Thread(target=pace.sleep, args=(now + 600_000, stopping))
    sleeper.start()
    while not pace._until_ms:
        threading.Event().wait(0.001)
    pace.wake_if_sooner()
    pace.deadline_ms = now + 5
    pace.wake_if_sooner()
    sleeper.join(60)
    assert not sleeper.is_alive()


def test_a_deadline_that_moves_while_the_thread_falls_asleep_wakes_it():
    class Moving(Pace):
        """The deadline comes sooner right after the thread has read it."""

        @property
        def deadline_ms(self):
            known = self.known
            if sleeper.ident == threading.get_ident():
                self.known = 0.0
                mover = threading.Thread(target=self.wake_if_sooner)
                mover.start()
                mover.join(0.1)  # it may have to wait until the thread sleeps
            return known

        @deadline_ms.setter
        def deadline_ms(self, value):
            self.known = value

    pace = Moving(SYSTEM_CLOCK)
    now = SYSTEM_CLOCK.monotonic_ms()
    pace.deadline_ms = now + 600_000
    args = (now + 600_000, threading.Event())
    sleeper = threading.Thread(target=pace.sleep, args=args, daemon=True)
    sleeper.start()
    sleeper.join(20)
    assert not sleeper.is_alive()
