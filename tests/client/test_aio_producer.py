"""The asyncio producer against real API servers: batches, cancelling, window, closing."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pathlib
import pickle
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hastore.aio import OutgoingMessage, Producer
from hastore.aio.producer import LoopDriver
from hastore.errors import (
    ClientError,
    MessageIllegalError,
    NotStoredError,
    OutcomeUnknown,
    UnreachableError,
    UsageError,
)
from hastore.protocol.api import Status
from hastore.record.codec import decode_record
from tests.client.conftest import Node

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOBODY = "tcp://127.0.0.1:9"
SCHEMES = pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])


def bodies(node: Node, queue: int = 0) -> list[bytes]:
    log, at, found = bytes(node.backend.store.log), 0, []
    while at < len(log):
        record = decode_record(log, at)
        if record.queue_id == queue:
            found.append(record.body)
        at += record.size
    return found


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run on a loop of its own, and assert that no thread was started."""
    before = set(threading.enumerate())

    async def watched() -> Any:
        result = await main()
        assert set(threading.enumerate()) <= before
        return result

    return asyncio.run(asyncio.wait_for(watched(), 120))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class LoopLikeUvloop(asyncio.SelectorEventLoop):
    """Call soon what is due at once, and return its handle, which does not know a time."""

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **more: Any) -> Any:
        if when - self.time() < 0.0005:
            return self.call_soon(callback, *args, **more)
        return super().call_at(when, callback, *args, **more)


@SCHEMES
def test_it_runs_on_a_loop_whose_handles_do_not_know_their_time(node: Node, scheme: str) -> None:
    """On uvloop the producer failed, with all messages under way, at a timer due at once."""

    async def main() -> None:
        async with Producer([node.address.replace("tcp", scheme, 1)]) as producer:
            driver = producer._driver
            driver._timer = driver._loop.call_at(0.0, driver._on_timer)  # as if it had set it
            assert not hasattr(driver._timer, "when")
            sends = [producer.send("t", b"%d" % number, queue=0) for number in range(20)]
            await asyncio.gather(*sends)
            assert bodies(node) == [b"%d" % number for number in range(20)]

    with asyncio.Runner(loop_factory=LoopLikeUvloop) as runner:
        runner.run(asyncio.wait_for(main(), 120))


@SCHEMES
def test_sends_of_one_loop_iteration_share_a_frame_in_order(node: Node, scheme: str) -> None:
    async def main() -> None:
        async with Producer([node.address.replace("tcp", scheme, 1)]) as producer:
            first = await producer.send("t", b"first", key="k", tags="x", queue=0)
            assert (first.status, first.offset, first.epoch) == (Status.PUT_OK, 0, 65537)
            assert (producer.master, producer.epoch) == (node.address, 65537)
            before = node.backend.store.appends
            sends = [producer.send("t", b"%d" % number, queue=1) for number in range(3_000)]
            results = await asyncio.gather(*sends)
            assert node.backend.store.appends - before <= 30
            assert [result.queue_offset for result in results] == list(range(3_000))
            assert len(await producer.send_batch("t", [b"a", OutgoingMessage(b"b")], queue=2)) == 2
            many = await producer.send_batch("t", [b"%d" % n for n in range(2_000)], queue=3)
            assert [result.queue_offset for result in many] == list(range(2_000))
            assert await producer.send_batch("t", []) == []
            assert await producer.flush(60)

    threads = set(threading.enumerate())
    run(main)
    assert set(threading.enumerate()) == threads
    assert bodies(node, 1) == [b"%d" % number for number in range(3_000)]
    stored = decode_record(bytes(node.backend.store.log))
    assert (stored.keys, stored.tags) == (["k"], "x")


@SCHEMES
@pytest.mark.parametrize("max_in_flight", [4, 1024])
def test_cancelling_anything_anywhere_breaks_nothing(
    node: Node, scheme: str, max_in_flight: int
) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    acknowledged: list[bytes] = []
    cancelled = 0

    async def main() -> None:
        nonlocal cancelled
        address = node.address.replace("tcp", scheme, 1)
        async with Producer([address], max_in_flight=max_in_flight) as producer:

            async def work(body: bytes) -> None:
                await producer.send("t", body, queue=0)
                acknowledged.append(body)

            async def batch(names: list[bytes]) -> None:
                await producer.send_batch("t", names, queue=0)
                acknowledged.extend(names)

            tasks: list[asyncio.Task[Any]] = []
            for number in range(1_500):
                if chance.random() < 0.1:
                    names = [b"%d.%d" % (number, place) for place in range(chance.randrange(1, 9))]
                    tasks.append(asyncio.create_task(batch(names)))
                else:
                    tasks.append(asyncio.create_task(work(b"%d" % number)))
                if chance.random() < 0.05:
                    tasks.append(asyncio.create_task(producer.flush()))  # type: ignore[arg-type]
                if chance.random() < 0.3:
                    chance.choice(tasks[-40:]).cancel()
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.choice([0, 0, 0, 0.001]))
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result in (None, True) or isinstance(result, asyncio.CancelledError)
                cancelled += isinstance(result, asyncio.CancelledError)
            assert await producer.flush(60)
            await producer.send("t", b"last", queue=0)

    run(main)
    stored = bodies(node)
    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored)
    order = [tuple(map(int, body.split(b"."))) for body in stored[:-1]]
    assert order == sorted(order)
    assert stored[-1] == b"last"
    assert cancelled > 100


def test_a_send_that_waits_for_room_and_is_cancelled_is_never_stored(node: Node) -> None:
    async def main() -> None:
        node.backend.transfer.hold = True
        async with Producer([node.address], max_in_flight=3) as producer:
            tasks = [
                asyncio.create_task(producer.send("t", b"%d" % number, queue=0))
                for number in range(10)
            ]
            await until(lambda: node.backend.transfer.waiting)
            assert len(bodies(node)) <= 3
            for task in tasks[1:9:2]:
                task.cancel()
            await asyncio.sleep(0)
            node.backend.transfer.hold = False
            node.backend.transfer.end_all()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in ended) == 4

    run(main)
    # 1 was in flight and cannot be recalled; 3, 5, 7 had not been sent.
    assert bodies(node) == [b"0", b"1", b"2", b"4", b"6", b"8", b"9"]


def test_no_node_reachable() -> None:
    async def main() -> None:
        async with Producer([NOBODY], delivery_timeout_s=0.3) as producer:
            began = time.monotonic()
            ended = await asyncio.gather(
                producer.send("t", b""),
                producer.send("t", b"", queue=0),
                producer.send_batch("t", [b"a", b"b"]),
                return_exceptions=True,
            )
            assert time.monotonic() - began < 30.0  # less than the default delivery timeout
            assert [type(each) for each in ended] == [
                UnreachableError, NotStoredError, UnreachableError,
            ]  # fmt: skip
            assert all(f"({NOBODY}: " in str(each) for each in ended), "why nobody answers"

    run(main)


def test_messages_that_no_master_would_take(node: Node) -> None:
    long = {"a": "x" * 40_000}

    async def main() -> None:
        async with Producer([node.address]) as producer:
            for failure, call in (
                (MessageIllegalError, lambda: producer.send("a/b", b"")),
                (MessageIllegalError, lambda: producer.send("t", bytes(4 * 1024 * 1024 + 1))),
                (MessageIllegalError, lambda: producer.send("t", b"", properties=long)),
                (UsageError, lambda: producer.send("t", "text")),  # type: ignore[arg-type]
                (UsageError, lambda: producer.send("t", b"", properties={"HS_SEQ": "7"})),
                (MessageIllegalError, lambda: producer.send("t", b"", queue=77)),
            ):
                with pytest.raises(failure):
                    await call()
            big = await producer.send("t", bytes(4 * 1024 * 1024))
            assert big.status is Status.PUT_OK

    run(main)


def test_a_failover_keeps_the_order(pair: tuple[Node, Node]) -> None:
    master, slave = pair

    async def main() -> None:
        async with Producer([master.address], delivery_timeout_s=60) as producer:
            await producer.send("t", b"first", queue=0)
            master.backend.transfer.hold = True
            sends = [
                asyncio.create_task(producer.send("t", b"%d" % number, queue=0))
                for number in range(2_000)
            ]
            await until(lambda: master.backend.transfer.waiting)
            master.backend.writable = False
            slave.backend.entries = [(65537, 0), (131074, slave.backend.store.max_offset)]
            slave.backend.writable = True
            for each in pair:
                each.backend.master = 2
            await asyncio.to_thread(master.stop)
            results = await asyncio.gather(*sends)
            assert results[-1].epoch == 131074
            assert producer.master == slave.address

    asyncio.run(main())
    assert bodies(slave) == [b"first"] + [b"%d" % number for number in range(2_000)]
    master.restart()


def test_closing_ends_by_its_deadline(node: Node) -> None:
    async def main() -> None:
        node.backend.transfer.hold = True
        producer = Producer([node.address], max_in_flight=1, delivery_timeout_s=120)
        sent = asyncio.create_task(producer.send("t", b"1", queue=0))
        waits = asyncio.create_task(producer.send("t", b"2", queue=0))
        await until(lambda: node.backend.transfer.waiting)
        assert not await producer.flush(0.01)
        began = time.monotonic()
        await producer.close(timeout_s=0.1)
        assert time.monotonic() - began < 50.0
        with pytest.raises(OutcomeUnknown, match="closed"):
            await sent
        with pytest.raises(NotStoredError, match="closed"):
            await waits
        with pytest.raises(ClientError, match="is closed"):
            await producer.send("t", b"3")
        with pytest.raises(ClientError, match="is closed"):
            await producer.flush()
        await producer.close()

    run(main)


def test_a_second_close_does_not_end_what_the_first_waits_for(node: Node) -> None:
    async def main() -> None:
        node.backend.transfer.hold = True
        producer = Producer([node.address])
        sent = asyncio.create_task(producer.send("t", b"1", queue=0))
        await until(lambda: node.backend.transfer.waiting)
        first = asyncio.create_task(producer.close())
        await until(lambda: producer._lifecycle.closed)
        await producer.close(0.01)
        cancelled = asyncio.create_task(producer.close())
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not sent.done() and not first.done()
        node.backend.transfer.end_all()
        assert (await sent).queue_offset == 0
        await first
        assert producer._driver.ended

    run(main)


def test_closing_that_is_cancelled_ends_at_once(node: Node) -> None:
    async def main() -> None:
        node.backend.transfer.hold = True
        producer = Producer([node.address])
        sent = asyncio.create_task(producer.send("t", b"1", queue=0))
        await until(lambda: node.backend.transfer.waiting)
        before = descriptors()
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(OutcomeUnknown):
            await sent
        assert descriptors() < before

    run(main)


def test_one_producer_for_each_loop(node: Node) -> None:
    kept: list[Producer] = []

    async def first() -> None:
        async with Producer([node.address]) as producer:
            await producer.send("t", b"x", queue=0)
        kept.append(producer)

    async def other_loop() -> None:
        with pytest.raises(ClientError, match="is closed"):
            await kept[0].send("t", b"x")

    for _ in range(3):
        run(first)
    assert len(bodies(node)) == 3
    run(other_loop)
    with pytest.raises(UsageError, match="no event loop is running"):
        Producer([node.address])


def test_it_is_refused_on_another_loop_or_none(node: Node) -> None:
    async def main() -> None:
        async with Producer([node.address]) as producer:
            said: list[BaseException] = []

            def elsewhere() -> None:
                for call in (producer.send, producer.send_batch):
                    try:
                        asyncio.run(call("t", b""))
                    except UsageError as failure:
                        said.append(failure)
                for close in (producer.flush, producer.close):
                    try:
                        asyncio.run(close())
                    except UsageError as failure:
                        said.append(failure)
                coroutine = producer.send("t", b"")
                try:
                    coroutine.send(None)
                except UsageError as failure:
                    said.append(failure)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert len(said) == 5
            await producer.send("t", b"x", queue=0)

    asyncio.run(main())


def test_acks_0_and_linger(node: Node) -> None:
    async def main() -> None:
        async with Producer([node.address], acks=0) as producer:
            result = await producer.send("t", b"x", queue=0)
            assert (result.status, result.offset) == (Status.PUT_OK, None)
        async with Producer([node.address], linger_ms=20_000) as producer:
            sends = [asyncio.create_task(producer.send("t", b"y", queue=1)) for _ in range(10)]
            await asyncio.sleep(0.1)
            assert not any(each.done() for each in sends)
            assert await producer.flush(60)
            assert all(each.done() for each in sends)

    run(main)
    assert bodies(node, 0) == [b"x"]
    assert bodies(node, 1) == [b"y"] * 10


def test_an_idle_producer_sleeps(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    real = LoopDriver._on_ready
    monkeypatch.setattr(LoopDriver, "_on_ready", lambda self: (looks.append(1), real(self))[1])

    async def main() -> None:
        async with Producer([node.address]) as producer:
            await producer.send("t", b"1", queue=0)
            # A stretch without a look comes between two PINGs. A busy loop never has one.
            limit = time.monotonic() + 60
            before = -1
            while before != len(looks):
                assert time.monotonic() < limit, f"{len(looks)} looks"
                before = len(looks)
                await asyncio.sleep(0.5)

    run(main)


@SCHEMES
def test_dropped_it_warns_and_leaves_no_descriptor(node: Node, scheme: str) -> None:
    address = node.address.replace("tcp", scheme, 1)

    async def main() -> None:
        async with Producer([address]) as producer:  # makes the loop's own descriptors
            await producer.send("t", b"1", queue=0)
        before = descriptors()
        for _ in range(20):
            producer = Producer([address])
            await producer.send("t", b"1", queue=0)
        del producer
        gc.collect()
        await until(lambda: descriptors() <= before)

    gc.collect()
    before = descriptors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert sum("was not closed" in str(each.message) for each in caught) == 20
    end = time.monotonic() + 60
    while descriptors() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_dropped_after_its_loop_it_leaves_no_descriptor(node: Node) -> None:
    kept: list[Producer] = []

    async def main() -> None:
        node.backend.transfer.hold = True
        kept.append(Producer([node.address]))
        sent = asyncio.create_task(kept[0].send("t", b"1", queue=0))
        await until(lambda: node.backend.transfer.waiting)
        sent.cancel()

    before = descriptors()
    asyncio.run(main())
    with pytest.warns(ResourceWarning, match="messages not acknowledged: 1 to 't'"):
        kept.clear()
        gc.collect()
    end = time.monotonic() + 60
    while descriptors() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_cannot_be_pickled_or_copied(node: Node) -> None:
    async def main() -> None:
        async with Producer([node.address]) as producer:
            for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(UsageError, match="one in each process"):
                    attempt(producer)

    run(main)


FORK = """
import asyncio, os, sys
from hastore.aio import Producer
from hastore.errors import ClientError

async def use(producer):
    for call in (lambda: producer.send("t", b""), producer.flush):
        try:
            await call()
            return 2
        except ClientError as failure:
            assert "fork" in str(failure)
    await producer.close()
    async with Producer([sys.argv[1]]) as own:
        await own.send("t", b"child", queue=0)
    return 0

async def main():
    async with Producer([sys.argv[1]]) as producer:
        await producer.send("t", b"parent", queue=0)
        pid = os.fork()
        if not pid:
            code = 3
            try:
                code = asyncio.run(use(producer))
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        await producer.send("t", b"parent", queue=0)

asyncio.run(main())
"""


def test_in_a_forked_child_calls_raise_and_the_parent_goes_on(node: Node) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, node.address], cwd=ROOT, timeout=120, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert bodies(node) == [b"parent", b"child", b"parent"]


def test_closing_leaves_the_loop_to_others_while_the_kernel_takes_no_more(node: Node) -> None:
    """With `acks` 0 no answer comes, so `close` waits only for unsent bytes."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def main() -> int:
        producer = Producer([node.address], acks=0)
        await producer.send("t", b"first", queue=0)
        with node.server._io_lock:  # the node reads nothing
            while not producer._driver.unsent_bytes:
                await producer.send("t", bytes(2 * 1024 * 1024), queue=0)
            ticking = asyncio.create_task(tick())
            await producer.close()
            ticking.cancel()
        return ticks

    assert asyncio.run(main()) > 50
