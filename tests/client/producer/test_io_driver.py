"""The producer's thread and its callers drive the I/O in turn, and no wake-up is lost."""

from __future__ import annotations

import logging
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hastore import Producer
from hastore.client import lifecycle
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.messages import SendResult, Status
from hastore.client.producer import io_driver
from hastore.client.producer.io_driver import IoDriver
from hastore.errors import ClientError, OutcomeUnknown
from hastore.record.codec import decode_record
from tests.client.conftest import Node


def bodies(node: Node) -> list[bytes]:
    log, at, found = bytes(node.backend.store.log), 0, []
    while at < len(log):
        record = decode_record(log, at)
        found.append(record.body)
        at += record.size
    return found


def test_the_caller_of_a_single_put_drives_the_io(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: set[str] = set()
    real = SocketTransport.send

    def send(self: SocketTransport, *arguments: Any) -> bool:
        if len(arguments) > 2:
            senders.add(threading.current_thread().name)
        return real(self, *arguments)

    monkeypatch.setattr(SocketTransport, "send", send)
    monkeypatch.setattr(io_driver, "IDLE_S", 600.0)  # also a slow caller comes in time
    with Producer([node.address]) as producer:
        for number in range(50):
            producer.send_sync("t", b"%d" % number)
        assert senders == {threading.current_thread().name}
        producer.send("t", b"50").result(60)  # wakes the thread, which takes over
        assert senders == {threading.current_thread().name, "ProducerSender"}
        producer.send_sync("t", b"51")
    assert bodies(node) == [b"%d" % number for number in range(52)]


def test_callers_threads_and_futures_mixed(node: Node) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    took: list[float] = []
    failures: list[BaseException] = []

    def work(number: int, producer: Producer) -> None:
        chance = random.Random(seed + number)
        waiting: list[Future[SendResult]] = []
        try:
            for place in range(300):
                body = b"%d:%d" % (number, place)
                if chance.random() < 0.5:
                    began = time.perf_counter()
                    producer.send_sync("t", body, queue=0)
                    took.append(time.perf_counter() - began)
                else:
                    waiting.append(producer.send("t", body, queue=0))
                if chance.random() < 0.05:
                    waiting.pop().result(60) if waiting else None
                if chance.random() < 0.02:
                    time.sleep(chance.choice([0.001, 0.06]))
            for future in waiting:
                future.result(60)
        except BaseException as failure:
            failures.append(failure)

    with Producer([node.address]) as producer:
        threads = [threading.Thread(target=work, args=(n, producer)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures
    stored = bodies(node)
    assert len(stored) == 1200
    for number in range(4):
        mine = [body for body in stored if body.startswith(b"%d:" % number)]
        assert mine == [b"%d:%d" % (number, place) for place in range(300)]
    # After a lost wake-up the thread would ask for the master only 300 ms later.
    assert sum(seconds > 0.25 for seconds in took) <= len(took) // 100


class Alarm(Exception):
    """The exception of a caller's signal handler."""


def test_a_signal_during_a_run_loses_and_doubles_nothing(node: Node) -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)

    def raise_alarm(*_: Any) -> None:
        raise Alarm

    # Not SIGALRM, which the tests' own timeout uses.
    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, raise_alarm)
    acknowledged: list[bytes] = []
    interrupted = 0
    try:
        with Producer([node.address], delivery_timeout_s=60) as producer:
            producer.send_sync("t", b"first")
            for number in range(400):
                body = b"%d" % number
                timer = None
                try:
                    if number % 4 == 0:
                        wait_s = chance.uniform(0.0, 0.002)
                        timer = threading.Timer(
                            wait_s, lambda: signal.pthread_kill(main, signal.SIGUSR1)
                        )
                        timer.start()
                    producer.send_sync("t", body, queue=0)
                    acknowledged.append(body)
                    if timer is not None:
                        timer.join()
                except (Alarm, OutcomeUnknown):
                    interrupted += 1
            producer.send_sync("t", b"last", queue=0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    stored = bodies(node)
    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored)
    assert [body for body in stored if body in set(acknowledged)] == acknowledged
    assert stored[0] == b"first" and stored[-1] == b"last"
    print("interrupted", interrupted)


def test_signals_at_any_instant_leave_no_thread_waiting(node: Node) -> None:
    """The main thread is interrupted repeatedly; other threads' Futures and callbacks end."""
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)

    def raise_alarm(*_: Any) -> None:
        if armed:
            armed.clear()
            raise Alarm

    armed: list[bool] = []
    main, before = threading.get_ident(), signal.signal(signal.SIGUSR1, raise_alarm)
    ended = threading.Event()
    futures: list[Future[SendResult]] = []
    called: list[Future[SendResult]] = []
    slowest: list[float] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not ended.is_set():
                future = producer.send("t", b"other", queue=1)
                futures.append(future)
                future.add_done_callback(called.append)
                began = time.perf_counter()
                future.result(60)
                slowest.append(time.perf_counter() - began)
        except BaseException as failure:
            failures.append(failure)

    def send_signals() -> None:
        mine = random.Random(seed + 1)
        while not ended.wait(mine.uniform(0.0, 0.004)):
            signal.pthread_kill(main, signal.SIGUSR1)

    threads = [threading.Thread(target=work), threading.Thread(target=send_signals)]
    interrupted = 0
    with Producer([node.address], delivery_timeout_s=120, max_in_flight=8) as producer:
        producer.send_sync("t", b"first", queue=0)
        for thread in threads:
            thread.start()
        begin = time.monotonic()
        while time.monotonic() < begin + 4.0 or (
            (interrupted <= 100 or len(slowest) <= 10) and time.monotonic() < begin + 60.0
        ):
            choice = chance.random()
            try:
                armed.append(True)
                if choice < 0.5:
                    producer.send_sync("t", b"mine", queue=0)
                elif choice < 0.9:
                    futures.append(producer.send("t", b"mine", queue=0))
                else:
                    producer.flush(60)
                armed.clear()
            except Alarm:
                interrupted += 1
        ended.set()
        threads[1].join()
        signal.signal(signal.SIGUSR1, before)
        threads[0].join(60)
        assert not threads[0].is_alive()
        assert producer.flush(60)
        assert producer.send_sync("t", b"last", queue=0).offset is not None
    assert not failures
    assert all(future.done() for future in futures)
    with_callback = set(called)
    assert called == [future for future in futures if future in with_callback]
    assert max(slowest) < 60.0
    assert interrupted > 100 and len(slowest) > 10
    assert len(node.backend.store.units["t", 1]) == len(called)


def test_close_ends_a_waiting_caller(node: Node) -> None:
    node.backend.transfer.hold = True
    producer = Producer([node.address], delivery_timeout_s=60)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            producer.send_sync("t", b"1", queue=0)
        except ClientError as failure:
            ended.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    producer.close(0.1)
    thread.join(60)
    assert not thread.is_alive()
    assert [type(failure) for failure in ended] == [OutcomeUnknown]


def test_a_caller_may_drive_before_the_thread_has_run(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the constructor, before the thread has run: the connections are opened."""
    may_run = threading.Event()
    real = IoDriver._run

    def run(self: IoDriver) -> None:
        may_run.wait()
        real(self)

    monkeypatch.setattr(IoDriver, "_run", run)
    producer = Producer([node.address], delivery_timeout_s=60)
    try:
        assert producer.send_sync("t", b"1", queue=0).queue_offset == 0
        assert not may_run.is_set()
    finally:
        may_run.set()
        producer.close()


class Shipping(logging.Handler):
    """Ships each line by a producer, as handlers of applications do."""

    def __init__(self, ship: Callable[[bytes], object]) -> None:
        super().__init__()
        self._ship = ship

    def emit(self, record: logging.LogRecord) -> None:
        assert record.pathname != lifecycle.__file__, "the line names its own place"
        self._ship(record.getMessage().encode())


@pytest.mark.parametrize("call", ["send", "send_sync", "flush", "close"])
@pytest.mark.parametrize("driver", ["caller", "thread"])
def test_a_log_handler_may_send_by_the_producer_but_not_wait(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    driver: str, call: str,
) -> None:  # fmt: skip
    """The producer logs who the master is while a caller or its own thread drives the core."""
    may_run, real = threading.Event(), IoDriver._run
    monkeypatch.setattr(IoDriver, "_run", lambda self: (may_run.wait(), real(self)))
    producers: list[Producer] = []
    ended: list[SendResult] = []

    def ship(line: bytes) -> None:
        if line.startswith(b"producer: the master is"):
            use = getattr(producers[0], call)
            use("logs", line, queue=0) if call.startswith("send") else use()

    def work() -> None:
        producers.append(Producer([node.address]))
        if driver == "caller":
            ended.append(producers[0].send_sync("t", b"1", queue=0))
            may_run.set()
        else:
            future = producers[0].send("t", b"1", queue=0)
            may_run.set()
            ended.append(future.result(60))

    logger, handler = logging.getLogger("hastore.client"), Shipping(ship)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        may_run.set()
    assert [result.status for result in ended] == [Status.PUT_OK]
    producers[0].close()
    shipped = [body for body in bodies(node) if body.startswith(b"producer: the master is")]
    assert len(shipped) == (call == "send")
    assert ("must not wait" in capfd.readouterr().err) == (call != "send")


def test_a_caller_never_opens_connections_beside_the_thread(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[str] = []
    overlaps: list[tuple[str, ...]] = []

    def guarded(name: str) -> None:
        real = getattr(SocketTransport, name)

        def call(self: SocketTransport, *arguments: Any) -> Any:
            inside.append(name)
            if len(inside) > 1 and {threading.get_ident()} != owners | {threading.get_ident()}:
                overlaps.append(tuple(inside))
            owners.add(threading.get_ident())
            time.sleep(0.001)
            try:
                return real(self, *arguments)
            finally:
                inside.remove(name)
                owners.discard(threading.get_ident())

        monkeypatch.setattr(SocketTransport, name, call)

    owners: set[int] = set()
    for name in ("open", "collect", "send"):
        guarded(name)
    for _ in range(10):
        with Producer([node.address]) as producer:  # the queue is named: no wait for a master
            producer.send_sync("t", b"1", queue=0)
    assert not overlaps
