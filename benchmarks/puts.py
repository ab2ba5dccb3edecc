"""Put 1 KiB messages that a slave must confirm: client, master and slave as processes of their own.

    python -m benchmarks.puts [--repeats 5] [--dir FOLDER]

Each repeat runs all of it, in turn, on one running pair; nothing waits for a disk:
  * one blocking producer, beside a bare Python TCP ping-pong through three processes: 1 KiB from
    the first to the second and on to the third, 8 bytes back the same way;
  * 64 puts in flight; the same without waiting for the slave (acks=1), 512 in flight;
  * `send_batch` of 100, 8 in flight;
  * the producer's own batching, nothing held back: 1 024 in flight.
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Cost,
    Group,
    ended,
    figure,
    percentile,
    save,
    say,
    scratch,
    touch_memory,
)
from hastore.client.producer import Producer

BODY = os.urandom(BODY_BYTES)
BLOCKING_PUTS = 2_000
REPLY_BYTES = 8


# ---- the peer of the blocking put


def receive(sock: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes, empty at the end."""
    data = sock.recv(size)
    while data and len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data


def relay(listener: socket.socket, onward: tuple[str, int] | None) -> None:
    """Take 1 KiB messages; pass each on and its reply back, or reply at once at the chain's end."""
    sock, _ = listener.accept()
    with contextlib.ExitStack() as stack:
        stack.enter_context(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far = None
        if onward is not None:
            far = stack.enter_context(socket.create_connection(onward))
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := receive(sock, BODY_BYTES):
            reply = data[:REPLY_BYTES]
            if far is not None:
                far.sendall(data)
                reply = receive(far, REPLY_BYTES)
            sock.sendall(reply)


def ping_pong(count: int) -> list[float]:
    """Return the round trips, in ms, of `count` messages through three processes."""
    fork = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as stack:
        last = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        middle = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        processes = [
            fork.Process(target=relay, args=(last, None), daemon=True),
            fork.Process(target=relay, args=(middle, last.getsockname()), daemon=True),
        ]
        for process in processes:
            process.start()
        stack.enter_context(ended(*processes))
        sock = stack.enter_context(socket.create_connection(middle.getsockname()))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return timed(lambda: (sock.sendall(BODY), receive(sock, REPLY_BYTES)), count)


def timed(call: Callable[[], Any], count: int) -> list[float]:
    """Return how long each call took, in ms; a tenth more are made first, for warmth."""
    for _ in range(count // 10):
        call()
    clock, took = time.perf_counter, []
    for _ in range(count):
        began = clock()
        call()
        took.append((clock() - began) * 1_000.0)
    return took


# ---- hastore


def blocking(bootstrap: list[str]) -> list[float]:
    """Return the times, in ms, of synchronous puts one after the other."""
    with Producer(bootstrap, max_in_flight=1) as producer:
        return timed(lambda: producer.send_sync("blocking", BODY), BLOCKING_PUTS)


def pipelined(bootstrap: list[str], *, in_flight: int, count: int, acks: Any = None) -> float:
    """Return messages a second with so many puts in flight."""
    with Producer(bootstrap, max_in_flight=in_flight, acks=acks) as producer:
        producer.send_sync("pipelined", BODY)
        began = time.perf_counter()
        futures = deque(producer.send("pipelined", BODY) for _ in range(count))
        for future in futures:
            future.result()
        return count / (time.perf_counter() - began)


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


LOADS: dict[str, tuple[int, Callable[[list[str]], float]]] = {
    "64 puts in flight": (20_000, lambda b: pipelined(b, in_flight=64, count=20_000)),
    "acks=1, 512 in flight": (40_000, lambda b: pipelined(b, in_flight=512, count=40_000, acks=1)),
    "send_batch of 100, 8 in flight": (
        60_000,
        lambda b: batched(b, batch=100, in_flight=8, count=60_000),
    ),
    "own batching, 1 024 in flight": (
        60_000,
        lambda b: pipelined(b, in_flight=1_024, count=60_000),
    ),
}


def costs(group: Group) -> dict[str, Cost]:
    """Return what nodes and client (this process) have used."""
    return {**group.costs(), "client": Cost.of(os.getpid())}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="where the stores lie (default: the temporary folder)")
    given = parser.parse_args()
    p50: dict[str, list[float]] = {"ours": [], "bare": []}
    p99: dict[str, list[float]] = {"ours": [], "bare": []}
    rates: dict[str, list[float]] = {name: [] for name in LOADS}
    used: dict[str, dict[str, list[float]]] = {name: {} for name in LOADS}
    with scratch(given.dir, 8 * 1024 * MIB) as folder, Group(folder) as group:
        touch_memory(folder, 2 * 1024 * MIB)
        group.start()
        for repeat in range(given.repeats):
            for name, samples in (
                ("bare", ping_pong(BLOCKING_PUTS)),
                ("ours", blocking(group.bootstrap)),
            ):
                p50[name].append(percentile(samples, 0.50))
                p99[name].append(percentile(samples, 0.99))
            for name, (count, load) in LOADS.items():
                before = costs(group)
                rates[name].append(load(group.bootstrap))
                for who, cost in costs(group).items():
                    cpu_s = cost.cpu_s - before[who].cpu_s
                    used[name].setdefault(who, []).append(cpu_s / count * 1e6)
            say(
                f"puts {repeat + 1}/{given.repeats}: blocking {p50['ours'][-1]:.3f} ms, bare "
                f"{p50['bare'][-1]:.3f} ms; "
                + ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in rates.items())
            )
        memory = costs(group)
    peer = "bare TCP, three processes"
    figures = [
        figure("one blocking put, p50", "ms", p50["ours"], peer, p50["bare"]),
        figure("one blocking put, p99", "ms", p99["ours"], peer, p99["bare"]),
    ]
    for name, values in rates.items():
        cpu = {who: round(sorted(costs)[len(costs) // 2], 1) for who, costs in used[name].items()}
        figures.append(figure(name, "msg/s", values, cpu_us_per_message=cpu))
    for who, cost in memory.items():
        figures.append(
            figure(
                f"memory of the {who} that is not mapped log",
                "MiB",
                [cost.anonymous_mib],
                resident=cost.resident_mib,
            )
        )
    save("puts", figures, {"body": BODY_BYTES, "blocking_puts": BLOCKING_PUTS})


if __name__ == "__main__":
    main()
