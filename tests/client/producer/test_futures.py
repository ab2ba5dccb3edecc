"""The lazy Future behaves like the stdlib's, and misses no waiter."""

import asyncio
import concurrent.futures
import copy
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

import hastore.aio
from hastore.client.messages import SendResult
from hastore.client.producer.futures import SendFuture, Unread
from hastore.client.producer.producer import _joined
from hastore.errors import (
    FlushSlaveTimeout,
    HastoreError,
    NotStoredError,
    OutcomeUnknown,
    UsageError,
)
from hastore.protocol.api import PutDone, Status
from tests.client.interrupts import interrupt_everywhere
from tests.process.harness import ROOT

REPLY = PutDone(1, Status.PUT_OK, 7, "SYNC_MEM(1)", [10, 20, 30], [0, 1, 2], [5, 6, 7])


def settle(future: "SendFuture[SendResult]", place: int) -> None:
    if future.settle("t", REPLY, place):
        future.notify()


def test_a_settled_one_has_its_result_without_ever_making_a_condition() -> None:
    future: SendFuture[SendResult] = SendFuture()
    assert not future.done()
    future.settle("t", REPLY, 1)
    assert future.done()
    assert "returned SendResult(PUT_OK" in repr(future), "it raised AttributeError"
    assert future.result().offset == 20
    assert future.result() is future.result()
    assert future._observers is None
    assert future.exception() is None


def test_a_batch_has_all_its_results() -> None:
    future: SendFuture[list[SendResult]] = SendFuture()
    future.settle("t", REPLY, 1, 3)
    assert [each.queue_offset for each in future.result(0)] == [6, 7]


def test_a_queue_offset_that_the_node_does_not_know_is_none() -> None:
    future: SendFuture[SendResult] = SendFuture()
    future.settle("t", PutDone(1, Status.PUT_OK, 7, "SYNC_MEM(1)", [10], [3], [-1]), 0)
    result = future.result(0)
    assert (result.offset, result.queue_id, result.queue_offset) == (10, 3, None)


def test_it_cannot_be_cancelled_and_times_out() -> None:
    future: SendFuture[SendResult] = SendFuture()
    assert not future.cancel()
    assert not future.cancelled()
    assert not future.running()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.01)
    with pytest.raises(concurrent.futures.TimeoutError):
        future.exception(0.01)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        future.nothing  # noqa: B018
    assert "pending" in repr(future)


def test_a_failure_is_raised_each_time() -> None:
    future: SendFuture[SendResult] = SendFuture()
    future.set_exception(NotStoredError("no", "BUSY"))
    for _ in range(2):
        with pytest.raises(NotStoredError):
            future.result(60)
    assert isinstance(future.exception(), NotStoredError)


def test_the_stdlib_functions_take_it() -> None:
    futures: list[SendFuture[SendResult]] = [SendFuture() for _ in range(3)]
    settle(futures[0], 0)
    done, open_ = concurrent.futures.wait(futures, timeout=0.01)
    assert done == {futures[0]} and len(open_) == 2
    called: list[object] = []
    futures[1].add_done_callback(called.append)
    timer = threading.Timer(0.05, lambda: [settle(f, 1) for f in futures[1:]])
    timer.start()
    ended = list(concurrent.futures.as_completed(futures, timeout=60))
    timer.join()
    assert len(ended) == 3
    assert called == [futures[1]]
    futures[2].add_done_callback(called.append)
    assert called == [futures[1], futures[2]]


def test_asyncio_takes_it() -> None:
    async def wait(future: "SendFuture[SendResult]") -> SendResult:
        threading.Timer(0.02, lambda: settle(future, 2)).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 60)

    assert asyncio.run(wait(SendFuture())).offset == 30


def test_asyncio_of_python_3_14_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one reads the attributes of a Future that has ended, instead of calling its methods."""

    def snapshot(self: Any) -> tuple[bool, bool, Any, Any]:
        return self._state == "FINISHED", False, self._result, self._exception

    def copy_state(source: Any, dest: Any) -> None:
        done, _, result, failure = source._get_snapshot()
        assert done
        dest.set_result(result) if failure is None else dest.set_exception(failure)

    monkeypatch.setattr(concurrent.futures.Future, "_get_snapshot", snapshot, raising=False)
    monkeypatch.setattr(asyncio.futures, "_copy_future_state", copy_state)

    async def wait(end: Any) -> SendResult:
        future: SendFuture[SendResult] = SendFuture()
        threading.Timer(0.02, lambda: end(future)).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 5)

    assert asyncio.run(wait(lambda future: settle(future, 2))).offset == 30
    with pytest.raises(NotStoredError):
        asyncio.run(wait(lambda future: future.set_exception(NotStoredError("no", "BUSY"))))


def test_no_waiter_is_missed() -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(2_000):
        future: SendFuture[SendResult] = SendFuture()
        called: list[object] = []
        results: list[SendResult] = []
        asks = chance.random() < 0.5

        def wait(
            future: "SendFuture[SendResult]" = future,
            called: "list[object]" = called,
            results: "list[SendResult]" = results,
            asks: bool = asks,
        ) -> None:
            if asks:
                future.add_done_callback(called.append)
            results.append(future.result(60))

        waiter = threading.Thread(target=wait)
        waiter.start()
        for _ in range(chance.randrange(300)):
            pass
        settle(future, 0)
        waiter.join(60)
        assert [each.offset for each in results] == [10]
        assert len(called) == asks


COLLECTED = """
import gc

from hastore.client.producer.futures import SendFuture
from hastore.protocol.api import PutDone, Status

REPLY = PutDone(1, Status.PUT_OK, 1, "", [0], [0], [0])


class Litter:
    def __init__(self, future):
        self.me, self.future = self, future

    def __del__(self):  # as another thread may do while a finalizer waits
        self.future._condition


for early in [SendFuture() for _ in range(100)]:  # now the class shares all keys that it ever will
    SendFuture.settle(early, "t", REPLY, 0)
held = []
gc.disable()
for number in range(200):
    held.extend({} for _ in range(100))  # empty the free list: the next dict is allocated
    future = SendFuture()
    gc.collect()
    Litter(future)
    tuples = [(number, number, number, place) for place in range(20)]
    del tuples  # fill the tuples' free list: the receipt's allocation starts no collection
    gc.set_threshold(1, 1000, 1000)
    gc.enable()
    SendFuture.settle(future, "t", REPLY, 0)
    gc.disable()
    held.append(future)
    assert future.done() and future._receipt is not None
    assert future.result(0).offset == 0
print("alive")
"""


def test_a_collection_in_the_middle_of_settling_crashes_nothing() -> None:
    """CPython 3.11 frees an instance's values twice when two threads make its dict at once."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"alive\n"), done.stderr.decode()


def test_after_a_failing_callback_the_others_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    future: SendFuture[SendResult] = SendFuture()
    called: list[object] = []
    future.add_done_callback(lambda _: called.append(1 / 0))
    future.add_done_callback(called.append)
    settle(future, 0)
    future.notify()
    assert called == [future]
    assert "ZeroDivisionError" in caplog.text


def test_it_cannot_be_copied() -> None:
    future: SendFuture[SendResult] = SendFuture()
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(UsageError, match="cannot be pickled"):
            copied(future)


@pytest.mark.parametrize("ending", ["settle", "succeed", "fail"])
def test_interrupted_anywhere_it_is_pending_or_ended(ending: str) -> None:
    """The waiter is notified by a later notification, in place of the lost one."""
    result = SendResult(Status.PUT_OK, "t", 0)
    failure = NotStoredError("no", "BUSY")

    def make() -> "tuple[SendFuture[SendResult], list[object], threading.Thread]":
        future: SendFuture[SendResult] = SendFuture()
        called: list[object] = []
        future.add_done_callback(called.append)
        waiter = threading.Thread(target=lambda: called.append(future.exception(10)))
        waiter.start()
        return future, called, waiter

    def end(made: "tuple[SendFuture[SendResult], list[object], threading.Thread]") -> None:
        arguments = {"settle": ("t", REPLY, 1), "succeed": (result,), "fail": (failure,)}
        getattr(made[0], ending)(*arguments[ending])

    for future, called, waiter in interrupt_everywhere(make, end):
        if not future.done():
            settle(future, 2)
            assert future.result().offset == 30
        future.notify()
        future.notify()
        waiter.join(60)
        assert not waiter.is_alive()
        assert called.count(future) == 1 and len(called) == 2


def test_an_interrupted_waiter_that_holds_the_condition_blocks_no_other() -> None:
    future: SendFuture[SendResult] = SendFuture()
    taken = threading.Thread(target=future._condition.acquire)
    taken.start()
    taken.join()
    settle(future, 0)
    assert future.result(60).offset == 10


UNKNOWN, REFUSED = OutcomeUnknown("no answer"), NotStoredError("BUSY", Status.BUSY)
UNCONFIRMED = FlushSlaveTimeout("FLUSH_SLAVE_TIMEOUT", None)


@pytest.mark.parametrize(
    ("failures", "worst"),
    [
        ([UNCONFIRMED, REFUSED, UNKNOWN], UNKNOWN),
        ([UNCONFIRMED, REFUSED], REFUSED),
        ([None, UNCONFIRMED, None], UNCONFIRMED),
    ],
)
def test_a_batch_in_parts_ends_with_the_failure_that_says_least(
    failures: list[HastoreError | None], worst: HastoreError
) -> None:
    """Whoever takes DurabilityError for "all are stored" must not lose the other parts."""
    parts: list[Future[list[SendResult]]] = []
    for failure in failures:
        part: SendFuture[list[SendResult]] = SendFuture()
        part.settle("t", REPLY, 0, 1) if failure is None else part.fail(failure)
        parts.append(part)
    assert _joined(parts, Unread()).exception(0) is worst

    async def main() -> None:
        loop, left = asyncio.get_running_loop(), iter(failures)

        def send(*_given: Any, **_more: Any) -> asyncio.Future[list[SendResult]]:
            waiter: asyncio.Future[list[SendResult]] = loop.create_future()
            failure = next(left)
            waiter.set_result([]) if failure is None else waiter.set_exception(failure)
            return waiter

        producer = hastore.aio.Producer(["tcp://127.0.0.1:9"])
        producer._driver.send = send  # type: ignore[method-assign]
        with pytest.raises(HastoreError) as raised:
            await producer.send_batch("t", [b"x"] * 256 * len(failures), queue=0)
        assert raised.value is worst
        await producer.close(0.0)

    asyncio.run(main())
