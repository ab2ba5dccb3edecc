"""What hastore's client is asked to do: each load returns its rate, or the times of its puts."""

import contextlib
import threading
import time
from collections import deque
from typing import Any

from benchmarks.bare import BODY, timed
from hastore.client.producer import Producer


def blocking(bootstrap: list[str], count: int) -> list[float]:
    """Return the times, in ms, of synchronous puts one after the other."""
    with Producer(bootstrap, max_in_flight=1) as producer:
        return timed(lambda: producer.send_sync("blocking", BODY), count)


def pipelined(
    bootstrap: list[str],
    *,
    in_flight: int,
    count: int,
    acks: Any = None,
    sync_flush: bool = False,
    queues: int | None = None,
) -> float:
    """Return messages a second with so many puts in flight; to `queues` queues in turn."""
    with Producer(bootstrap, max_in_flight=in_flight, acks=acks, sync_flush=sync_flush) as producer:
        producer.send_sync("pipelined", BODY)
        began = time.perf_counter()
        if queues is None:
            futures = deque(producer.send("pipelined", BODY) for _ in range(count))
        else:
            topic = f"queues{queues}"
            futures = deque(
                producer.send(topic, BODY, queue=number % queues) for number in range(count)
            )
        for future in futures:
            future.result()
        return count / (time.perf_counter() - began)


def shared(bootstrap: list[str], *, producers: int, in_flight: int, count: int) -> float:
    """Return messages a second of so many producers, a thread each, that share `in_flight`."""
    each, ready = count // producers, threading.Barrier(producers + 1)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with Producer(bootstrap, max_in_flight=in_flight // producers) as producer:
                producer.send_sync("shared", BODY)
                ready.wait()
                for future in [producer.send("shared", BODY) for _ in range(each)]:
                    future.result()
        except BaseException as failure:
            failures.append(failure)
            ready.abort()
            raise

    threads = [threading.Thread(target=work) for _ in range(producers)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failures:
        raise failures[0]
    return each * producers / seconds


def batched(bootstrap: list[str], *, batch: int, in_flight: int, count: int) -> float:
    """Return messages a second by `send_batch`."""
    bodies = [BODY] * batch
    with Producer(bootstrap, max_in_flight=batch * in_flight) as producer:
        producer.send_sync("batched", BODY)
        began = time.perf_counter()
        futures = [producer.send_batch("batched", bodies) for _ in range(count // batch)]
        for future in futures:
            future.result()
        return count / (time.perf_counter() - began)
