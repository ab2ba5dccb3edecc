"""A position covers the delivered messages: across breaks, cancels, signals and closes."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hastore import Consumer, Message, Producer, aio
from hastore.client.connections import socket_transport
from hastore.errors import ClientError, PositionLostError
from tests.client.conftest import Node

COUNT = 6_000
QUEUES = 4


def fill(node: Node, count: int, topic: str = "t", first: int = 0) -> None:
    with Producer([node.address]) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number, queue=number % QUEUES)
        assert producer.flush(60)


def new_seed() -> int:
    seed = int(os.environ.get("HASTORE_TEST_SEED", time.time_ns() % 2**32))
    print(f"HASTORE_TEST_SEED={seed}")
    return seed


def check_all_once(found: list[Message], count: int = COUNT) -> None:
    """Assert that each message was delivered once, and each queue in order."""
    numbers = [int(message.body) for message in found]
    assert sorted(numbers) == list(range(count))
    for queue in range(QUEUES):
        own = [number for number in numbers if number % QUEUES == queue]
        assert own == sorted(own)


def read_so_far(consumer: Consumer) -> int:
    return sum(place.queue_offset for place in consumer.positions().values())


# -- iteration


def test_a_commit_in_a_loop_covers_what_the_loop_has_seen(node: Node) -> None:
    fill(node, 100)
    seen: list[Message] = []
    with Consumer("t", [node.address], group="g") as consumer:
        for message in consumer:
            seen.append(message)
            if len(seen) == 7:
                consumer.commit()
                assert sum(p.queue_offset for p in consumer.committed().values()) == 7
            if len(seen) == 30:
                break
        assert read_so_far(consumer) == 30
        with pytest.raises(ZeroDivisionError):
            for message in consumer:
                seen.append(message)
                if len(seen) == 42:
                    raise ZeroDivisionError
        consumer.commit()
    with Consumer("t", [node.address], group="g") as consumer:
        assert read_so_far(consumer) == 42
        for message in consumer:
            seen.append(message)
            if len(seen) % 9 == 0:  # a `poll` in the body takes the messages that follow
                seen += consumer.poll(2, timeout_s=0.0)
            if len(seen) >= 100:
                break
    check_all_once(seen, 100)


def test_a_seek_in_a_loop_counts_at_once(node: Node) -> None:
    fill(node, 100)
    with Consumer("t", [node.address], queues=[0]) as consumer:
        seen = []
        for message in consumer:
            seen.append(message.queue_offset)
            if len(seen) == 3:
                consumer.seek(0, 20)
            if message.queue_offset == 24:
                break
    assert seen == [0, 1, 2, 20, 21, 22, 23, 24]


def test_the_same_in_an_asynchronous_loop(node: Node) -> None:
    fill(node, 100)
    seen: list[Message] = []

    async def main() -> None:
        async with aio.Consumer("t", [node.address], group="g") as consumer:
            async for message in consumer:
                seen.append(message)
                if len(seen) == 7:
                    await consumer.commit()
                    kept = await consumer.committed()
                    assert sum(place.queue_offset for place in kept.values()) == 7
                if len(seen) == 30:
                    break
            await consumer.commit()
        async with aio.Consumer("t", [node.address], group="g") as consumer:
            async for message in consumer:
                seen.append(message)
                if len(seen) == 100:
                    break
            assert sum(p.queue_offset for p in (await consumer.positions()).values()) == 100

    asyncio.run(main())
    check_all_once(seen, 100)


def test_both_consumers_take_the_same_arguments() -> None:
    for name in ("__init__", "poll", "seek", "seek_to_time", "commit", "committed", "positions"):
        ours, theirs = getattr(Consumer, name), getattr(aio.Consumer, name)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters
    public = {name for name in dir(Consumer) if not name.startswith("_")}
    assert public == {name for name in dir(aio.Consumer) if not name.startswith("_")}


# -- cancelling


def test_a_poll_that_is_cancelled_has_taken_nothing(node: Node) -> None:
    fill(node, COUNT)
    rng = random.Random(new_seed())
    found: list[Message] = []
    cancelled = 0

    async def attempt(call: Coroutine[Any, Any, Any]) -> Any:
        nonlocal cancelled
        task = asyncio.ensure_future(call)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.003)
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            cancelled += 1
            return None

    async def main() -> None:
        limit = time.monotonic() + 60.0
        async with aio.Consumer("t", [node.address], group="g", max_bytes=9_000) as consumer:
            while len(found) < COUNT:
                assert time.monotonic() < limit, f"only {len(found)} came"
                what = rng.random()
                if what < 0.6:
                    found.extend(await attempt(consumer.poll(rng.randint(1, 120), 1.0)) or [])
                elif what < 0.7:
                    found.extend(await consumer.poll(rng.randint(1, 60), 0.01))
                elif what < 0.8:
                    async for message in consumer:
                        found.append(message)
                        if rng.random() < 0.1 or len(found) == COUNT:
                            break
                elif what < 0.9:
                    await attempt(consumer.commit())
                    await consumer.commit()
                    kept = await consumer.committed()
                    assert sum(place.queue_offset for place in kept.values()) == len(found)
                else:
                    queue = rng.randrange(QUEUES)
                    await attempt(consumer.seek(queue, await consumer.position(queue)))
            assert await consumer.poll(timeout_s=0.05) == []

    asyncio.run(main())
    assert cancelled > 20
    check_all_once(found)


def test_a_timeout_around_a_poll_is_kept(node: Node) -> None:
    async def main() -> None:
        async with aio.Consumer("t", [node.address]) as consumer:
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    while True:
                        await consumer.poll(timeout_s=0.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.poll(timeout_s=120.0), 0.2)
            assert time.monotonic() - began < 60.0

    asyncio.run(main())


def test_tasks_share_a_consumer_which_has_no_thread(node: Node) -> None:
    fill(node, COUNT)
    found: list[Message] = []
    before = set(threading.enumerate())

    async def work(consumer: aio.Consumer) -> None:
        while len(found) < COUNT:
            found.extend(await consumer.poll(50, timeout_s=0.1))
            assert set(threading.enumerate()) <= before

    async def main() -> None:
        async with aio.Consumer("t", [node.address], max_bytes=9_000) as consumer:
            await asyncio.gather(*(work(consumer) for _ in range(5)))

    asyncio.run(main())
    check_all_once(found)


def test_close_in_another_task_ends_an_iteration_that_never_waits(node: Node) -> None:
    """Its body awaits nothing, so the others run only while its next call waits for its turn."""
    fill(node, COUNT)

    async def main() -> None:
        consumer = aio.Consumer("t", [node.address], max_bytes=9_000)
        found: list[Message] = []

        async def read() -> None:
            async for message in consumer:
                found.append(message)

        reading = asyncio.create_task(read())
        while not found:
            await asyncio.sleep(0)
        await consumer.close()
        await reading
        assert len(found) < COUNT

    asyncio.run(main())


def test_close_ends_waiting_calls(node: Node) -> None:
    async def main() -> None:
        consumer = aio.Consumer("t", [node.address], group="g")
        assert await consumer.poll(timeout_s=0.1) == []
        polls = [asyncio.ensure_future(consumer.poll(timeout_s=120.0)) for _ in range(2)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await consumer.close()
        assert await polls[0] == []
        with pytest.raises(ClientError, match="aio.Consumer of t at .* is closed"):
            await polls[1]  # it had not begun
        assert time.monotonic() - began < 60.0
        with pytest.raises(ClientError, match="closed"):
            await consumer.poll()
        await consumer.close()
        nobody = aio.Consumer("t", ["tcp://127.0.0.1:9"], group="g")
        commit = asyncio.ensure_future(nobody.commit())
        await asyncio.sleep(0.1)
        await nobody.close()
        with pytest.raises(ClientError, match="closed"):
            await commit

    asyncio.run(main())


def test_closing_from_a_thread_and_from_a_signal_handler(node: Node) -> None:
    for close in (
        lambda consumer: threading.Timer(0.2, consumer.close).start(),
        lambda consumer: alarm(0.2, lambda *_: consumer.close()),
    ):
        consumer = Consumer("t", [node.address])
        assert consumer.poll(timeout_s=0.1) == []
        began = time.monotonic()
        close(consumer)
        assert consumer.poll(timeout_s=120.0) == []
        assert time.monotonic() - began < 60.0
        with pytest.raises(ClientError, match="closed"):
            consumer.poll()
        assert list(consumer) == []


def test_a_signal_handler_may_not_use_a_consumer_that_is_in_use(node: Node) -> None:
    raised: list[str] = []
    with Consumer("t", [node.address]) as consumer:

        def handle(*_: object) -> None:
            try:
                consumer.poll(timeout_s=0.0)
            except ClientError as failure:
                raised.append(str(failure))

        alarm(0.2, handle)
        assert consumer.poll(timeout_s=0.6) == []
        assert "signal handler" in raised[0]
        fill(node, 3)
        assert len(consumer.poll(timeout_s=60.0)) > 0


# -- signals


class Interrupted(BaseException):
    """The exception of the handler."""


def alarm(delay_s: float, handle: Callable[..., object]) -> None:
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, delay_s)


def interrupt(*_: object) -> None:
    raise Interrupted


@pytest.fixture(autouse=True)
def handler() -> Any:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


# An interrupt during `socket()` or `close()` leaves the socket to the reference count, and the
# interpreter only reports an exception inside a finalizer.
interrupts_calls = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Cut:
    """Interrupts calls after a random time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.count = 0
        self.returned = False  # whether the last call returned: the signal may come after it

    def __call__(self, call: Callable[[], list[Message]]) -> list[Message]:
        """Return the result of a call, [] when it was interrupted."""
        got: list[Message] = []
        scale = self._rng.choice((3e-5, 2e-4, 1e-3, 4e-3))
        try:
            self.returned = False
            alarm(1e-6 + self._rng.random() * scale, interrupt)
            got = call()
            self.returned = True
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except Interrupted:
            self.count += 1
        return got

    def iterate(self, consumer: Consumer, found: list[Message], count: int) -> None:
        """Iterate until the interrupt comes, or `found` has `count` messages."""

        def read() -> None:
            alarm(1e-6 + self._rng.random() * 2e-3, interrupt)
            for message in consumer:
                found.append(message)
                if len(found) == count:
                    break

        # In a function of its own: since CPython 3.12 the jump at the end of a loop, where signals
        # are handled, does not belong to a `try` that ends with the loop.
        try:
            read()
        except Interrupted:
            self.count += 1
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@interrupts_calls
def test_an_exception_of_a_signal_handler_loses_no_message(pair: tuple[Node, Node]) -> None:
    master, slave = pair
    fill(master, COUNT)
    rng = random.Random(new_seed())
    cut, found, longest_s = Cut(rng), [], 0.0
    with Consumer("t", [master.address], group="g", max_bytes=9_000, timeout_s=120) as consumer:
        while len(found) < COUNT:
            what = rng.random()
            began = time.monotonic()
            if what < 0.6:
                most = rng.randint(1, 120)
                found += cut(lambda most=most: consumer.poll(most, 120.0))
            elif what < 0.7:
                found += consumer.poll(rng.randint(1, 30), 120.0)
            elif what < 0.8:
                cut.iterate(consumer, found, COUNT)
            elif what < 0.9:
                cut(consumer.commit)  # type: ignore[arg-type]
                consumer.commit()
                kept = consumer.committed()
                assert sum(place.queue_offset for place in kept.values()) == len(found)
            else:
                place = consumer.position(1)
                cut(lambda place=place: consumer.seek(1, place))  # type: ignore[arg-type]
            assert read_so_far(consumer) == len(found)
            longest_s = max(longest_s, time.monotonic() - began)
        assert consumer.poll(timeout_s=0.05) == []
    check_all_once(found)
    print(f"{cut.count} calls were interrupted; the longest pause was {longest_s:.2f} s")
    assert cut.count > 20
    assert longest_s < 60.0


@interrupts_calls
def test_interrupted_seeks_have_moved_nothing(node: Node) -> None:
    fill(node, 400)
    rng = random.Random(new_seed())
    cut = Cut(rng)
    seeks: list[Callable[[Consumer], None]] = [
        lambda consumer: consumer.seek_to_earliest(),
        lambda consumer: consumer.seek_to_latest(),
        lambda consumer: consumer.seek_to_time(0),
    ]
    with Consumer("t", [node.address]) as consumer:
        while cut.count < 60:
            seek = rng.choice(seeks)
            place = read_so_far(consumer)
            cut(lambda seek=seek: seek(consumer))  # type: ignore[arg-type]
            after = 400 if seek is seeks[1] else 0
            assert read_so_far(consumer) == (after if cut.returned else place)
        consumer.seek_to_earliest()
        assert len(consumer.poll(500)) > 0


@interrupts_calls
def test_an_interrupted_first_call_leaves_no_address_without_a_connection(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_transport, "CONNECT_MS", 120_000.0)
    master, slave = pair
    fill(master, 40)
    rng = random.Random(new_seed())
    cut = Cut(rng)
    for _ in range(60):
        with Consumer("t", [master.address]) as consumer:
            found = cut(lambda consumer=consumer: consumer.poll(40, 60.0))
            limit = time.monotonic() + 60.0  # less than CONNECT_MS in this test
            while len(found) < 40 or not consumer._core.requester.transport.is_up(slave.address):
                assert time.monotonic() < limit, f"{len(found)} of 40 came"
                found += consumer.poll(40, 0.05)
            assert sorted(int(message.body) for message in found) == list(range(40))
    assert cut.count > 10


def test_a_lost_position_is_raised_again_and_hides_no_other_queue(node: Node) -> None:
    fill(node, 40)
    found: list[Message] = []
    raised = 0
    with Consumer("t", [node.address]) as consumer:
        consumer.seek(2, 99)
        limit = time.monotonic() + 60.0
        while len(found) < 30:
            assert time.monotonic() < limit
            try:
                found += consumer.poll(5)
            except PositionLostError as lost:
                assert lost.queue_id == 2
                raised += 1
        for _ in range(3):
            with pytest.raises(PositionLostError):
                consumer.poll()
    assert sorted(int(m.body) for m in found) == [n for n in range(40) if n % QUEUES != 2]
    assert raised
