"""`hastore perf produce` and `hastore perf consume`: measure a group under load."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import click
from rich.table import Table

from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    bootstrap_addresses,
    print_error,
    print_json,
    progress_bar,
    stdout,
    with_bootstrap,
    with_json,
)
from hastore.cli.produce import parse_acks, with_acks, with_sync_flush
from hastore.cli.read import read_topic
from hastore.client.producer.producer import OutgoingMessage, Producer
from hastore.errors import DurabilityError, HastoreError, OutcomeUnknown, UnreachableError
from hastore.protocol.api import WINDOW

WAIT_S = 10.0  # how long `consume` waits for a further message


class Tally:
    """Count outcomes and latencies, in the producer's thread, and limit the calls in flight."""

    def __init__(self, in_flight: int) -> None:
        self.latencies_ms: list[float] = []
        self.acked = self.unknown = self.failed = 0
        self.why: BaseException | None = None  # of the first that is not acknowledged
        self._room = threading.BoundedSemaphore(in_flight)

    def begin(self, messages: int) -> Callable[[Future[Any]], None]:
        """Wait until fewer than `in_flight` calls are open; return a callback for the next one."""
        self._room.acquire()
        began = time.perf_counter()

        def ended(future: Future[Any]) -> None:
            latency_ms = (time.perf_counter() - began) * 1_000.0
            failure = future.exception()
            self.why = self.why or failure
            if failure is None:
                self.acked += messages
                self.latencies_ms.append(latency_ms)
            elif isinstance(failure, DurabilityError | OutcomeUnknown):
                self.unknown += messages
            else:
                self.failed += messages
            self._room.release()

        return ended


def summarise(
    messages: int, size: int, seconds: float, latencies_ms: list[float], tally: Tally | None
) -> dict[str, Any]:
    """Return the fields that both perf commands print; each latency is of one call, in ms.

    Messages that were read count as `acked`, because a node serves only readable messages.
    """
    ordered = sorted(latencies_ms)

    def at(share: float) -> float | None:
        index = min(len(ordered) - 1, int(share * len(ordered)))
        return round(ordered[index], 3) if ordered else None

    outcomes = {"acked": messages, "unknown": 0, "failed": 0}
    if tally is not None:
        outcomes = {"acked": tally.acked, "unknown": tally.unknown, "failed": tally.failed}
    return {
        "messages": messages,
        "bytes": size,
        "seconds": round(seconds, 3),
        "msgs_per_s": round(messages / seconds, 1) if seconds else None,
        "mb_per_s": round(size / seconds / 1e6, 2) if seconds else None,
        "p50_ms": at(0.5),
        "p99_ms": at(0.99),
        "p999_ms": at(0.999),
        "max_ms": round(ordered[-1], 3) if ordered else None,
    } | outcomes


def show(fields: dict[str, Any], as_json: bool) -> None:
    """Print the fields as JSON, or as a table for people."""
    if as_json:
        print_json(fields)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in fields.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int | float) else "-")
    stdout.print(table)


@click.group("perf")
def perf_group() -> None:
    """Measure a group under load."""


@perf_group.command("produce", short_help="Send messages; measure rate and latency.")
@click.option("--topic", required=True, metavar="T", help="The topic to send to.")
@click.option(
    "--count", required=True, type=click.IntRange(1), metavar="N", help="Number of messages."
)
@click.option(
    "--size",
    default=1024,
    show_default=True,
    type=click.IntRange(0),
    metavar="BYTES",
    help="Size of each body.",
)
@click.option(
    "--in-flight",
    default=64,
    show_default=True,
    type=click.IntRange(1, WINDOW),
    metavar="K",
    help="The most calls in flight; with 1, each call waits for its answer.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    metavar="M",
    help="Messages in each send_batch (default: the producer batches by itself).",
)
@with_acks
@with_sync_flush
@with_bootstrap
@with_json
def perf_produce(
    topic: str,
    count: int,
    size: int,
    in_flight: int,
    batch: int | None,
    acks: str | None,
    sync_flush: bool,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Send COUNT messages of SIZE bytes.

    Exit code 4 when some messages were not confirmed, 1 when some were refused.
    """
    body = os.urandom(size)
    tally = Tally(in_flight)
    window = min(WINDOW, in_flight * (batch or 1))
    with Producer(
        bootstrap_addresses(bootstrap),
        acks=parse_acks(acks),
        sync_flush=sync_flush,
        max_in_flight=window,
    ) as producer:
        wait_for_master(producer)
        with progress_bar() as progress:
            task = progress.add_task("sending", total=count, note="")
            began = time.perf_counter()
            sent = 0
            while sent < count:
                sent += _send(
                    producer, topic, body, min(batch or 0, count - sent), tally, in_flight
                )
                if sent % 1_000 < (batch or 1):
                    progress.update(task, completed=sent)
            producer.flush()
            seconds = time.perf_counter() - began
            progress.update(task, completed=sent)
    show(summarise(count, count * size, seconds, tally.latencies_ms, tally), as_json)
    if tally.why is not None:
        print_error(
            f"{tally.failed:,} messages were refused, and the outcome of {tally.unknown:,} is not "
            f"known; the first reason: {tally.why}"
        )
    return FAILED if tally.failed else DIFFER if tally.unknown else DONE


def wait_for_master(producer: Producer, timeout_s: float = 30.0) -> None:
    """Wait for a master, before the measurement. Raises UnreachableError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while producer.master is None:
        if time.monotonic() > deadline:
            raise UnreachableError("no master was found; see `hastore status`")
        time.sleep(0.01)


def _send(
    producer: Producer, topic: str, body: bytes, batch: int, tally: Tally, in_flight: int
) -> int:
    ended = tally.begin(batch or 1)
    future: Future[Any]
    if batch:
        future = producer.send_batch(topic, [OutgoingMessage(body)] * batch)
    else:
        future = producer.send(topic, body)
    future.add_done_callback(ended)
    if in_flight == 1:
        try:
            future.result()
        except HastoreError:
            pass  # the callback has counted it
    return batch or 1


@perf_group.command("consume", short_help="Read messages; measure rate and latency.")
@click.option("--topic", required=True, metavar="T", help="The topic to read.")
@click.option(
    "--count", required=True, type=click.IntRange(1), metavar="N", help="Number of messages."
)
@with_bootstrap
@with_json
def perf_consume(topic: str, count: int, bootstrap: str | None, as_json: bool) -> int:
    """Read COUNT messages from the topic's start; each latency is the time of one batch."""
    messages = size = 0
    latencies_ms: list[float] = []
    with progress_bar() as progress:
        task = progress.add_task("reading", total=count, note="")
        began = last = now = time.perf_counter()
        for batch in read_topic(bootstrap_addresses(bootstrap), topic, wait_s=WAIT_S):
            now = time.perf_counter()
            latencies_ms.append((now - last) * 1_000.0)
            taken = batch[: count - messages]
            messages += len(taken)
            size += sum(len(message.body) for message in taken)
            progress.update(task, completed=messages)
            if messages >= count:
                break
            last = time.perf_counter()
    # Up to the last message: the wait for more, if there are no more, measures nothing.
    show(summarise(messages, size, now - began, latencies_ms, None), as_json)
    if messages == count:
        return DONE
    print_error(
        f"{messages:,} of {count:,} messages came, and then none for {WAIT_S:g} s; give --count as "
        f"many as topic {topic} has (`hastore topics list`), or send more"
    )
    return FAILED
