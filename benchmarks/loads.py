"""The loads for hastore's client: each returns its rate, or the times of its puts."""

import contextlib
import importlib.util
import itertools
import multiprocessing
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.bare import BODY, timed
from benchmarks.common import ended
from benchmarks.maven import NoPeer
from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.producer.producer import Producer
from hastore.client.security import SecurityLike
from hastore.errors import UsageError

TOPIC_QUEUES = 1_000  # a topic has 1,024 at most
CLIENT_PROCESSES = 4
SHARED_S = 60.0
SOCKETS_SCHEME, ZMQ_SCHEME = "tcp://", "zmq+tcp://"


def over_zmq(bootstrap: list[str]) -> list[str]:
    """Return the addresses of the same nodes over libzmq; raise NoPeer if pyzmq is missing.

    This opens no connection: a process that will fork must have no client of its own.
    """
    addresses = [address.replace(SOCKETS_SCHEME, ZMQ_SCHEME, 1) for address in bootstrap]
    try:
        parse_bootstrap(addresses)
    except UsageError as reason:
        raise NoPeer(str(reason)) from None
    if importlib.util.find_spec("zmq") is None:
        raise NoPeer("pyzmq is not here: pip install 'hastore[bench]'")
    return addresses


def blocking(bootstrap: list[str], count: int, security: SecurityLike = None) -> list[float]:
    """Return the durations, in ms, of synchronous puts, one after the other."""
    with Producer(bootstrap, max_in_flight=1, security=security) as producer:
        return timed(lambda: producer.send_sync("blocking", BODY), count)


def pipelined(
    bootstrap: list[str],
    *,
    in_flight: int,
    count: int,
    acks: Any = None,
    sync_flush: bool = False,
    queues: int | None = None,
    security: SecurityLike = None,
) -> float:
    """Return the messages per second with `in_flight` puts unacknowledged, to queues in turn."""
    with Producer(
        bootstrap,
        max_in_flight=in_flight,
        acks=acks,
        sync_flush=sync_flush,
        security=security,
    ) as producer:
        producer.send_sync("pipelined", BODY)
        began = time.perf_counter()
        if queues is None:
            futures = deque(producer.send("pipelined", BODY) for _ in range(count))
        else:
            places = [divmod(number, TOPIC_QUEUES) for number in range(queues)]
            where = [(f"queues{queues}-{topic}", queue) for topic, queue in places]
            futures = deque(
                producer.send(topic, BODY, queue=queue)
                for topic, queue in itertools.islice(itertools.cycle(where), count)
            )
        for future in futures:
            future.result()
        return count / (time.perf_counter() - began)


def shared(bootstrap: list[str], *, producers: int, in_flight: int, count: int) -> float:
    """Return the messages per second of several producers that share `in_flight`.

    Each has a thread, in up to four processes: a single interpreter would be the bottleneck. The
    Producers are created after the fork, and this process must have none, since a client cannot be
    used after a fork.
    """
    processes = min(producers, CLIENT_PROCESSES)
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(processes + 1)
    arguments = (bootstrap, producers // processes, in_flight // producers, count // producers)
    children = [
        fork.Process(target=_producers, args=(*arguments, ready), daemon=True)
        for _ in range(processes)
    ]
    for child in children:
        child.start()
    with ended(*children):
        ready.wait(SHARED_S)
        began = time.perf_counter()
        for child in children:
            child.join(SHARED_S)
        seconds = time.perf_counter() - began
        if any(child.exitcode for child in children):
            raise RuntimeError("a client process failed, or was late")
    return count // producers * producers / seconds


def _producers(bootstrap: list[str], threads: int, in_flight: int, count: int, ready: Any) -> None:
    def work(producer: Producer) -> None:
        for future in [producer.send("shared", BODY) for _ in range(count)]:
            future.result()

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
        producers = [
            stack.enter_context(Producer(bootstrap, max_in_flight=in_flight))
            for _ in range(threads)
        ]
        for producer in producers:
            producer.send_sync("shared", BODY)
        ready.wait(SHARED_S)
        for _ in pool.map(work, producers):
            pass


def batched(
    bootstrap: list[str],
    *,
    batch: int,
    in_flight: int,
    count: int,
    security: SecurityLike = None,
) -> float:
    """Return the messages per second with `send_batch`."""
    bodies = [BODY] * batch
    with Producer(bootstrap, max_in_flight=batch * in_flight, security=security) as producer:
        producer.send_sync("batched", BODY)
        began = time.perf_counter()
        futures = [producer.send_batch("batched", bodies) for _ in range(count // batch)]
        for future in futures:
            future.result()
        return count / (time.perf_counter() - began)
