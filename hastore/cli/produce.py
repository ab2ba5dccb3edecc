"""`hastore produce`: send each line of a file or of stdin as a message, and print the outcomes."""

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import IO, Any

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    Seconds,
    bootstrap_addresses,
    print_error,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_topics
from hastore.cli.message_text import GivenMessage, parse_json, parse_keyed
from hastore.client.arguments import COMPRESSION_THRESHOLD, Compression
from hastore.client.messages import SendResult
from hastore.client.producer.preparer import MAX_DELAY_LEVEL, pairs_of
from hastore.client.producer.producer import Acks, Producer
from hastore.errors import DurabilityError, HastoreError, NotStoredError, OutcomeUnknown, UsageError
from hastore.record.compression import ALGORITHMS
from hastore.record.properties import check_topic

MAX_LINE_BYTES = 4 * 1024 * 1024
NO_MASTER_NOTE_S = 1.0
_ERRORS_SHOWN = 10


def parse_acks(text: str | None) -> Acks:
    """Return the Producer's `acks` for the text of `--acks`."""
    choices: dict[str | None, Acks] = {None: None, "0": 0, "1": 1, "all": "all"}
    return choices[text]


with_acks = click.option(
    "--acks",
    type=click.Choice(["0", "1", "all"]),
    help="Which nodes confirm: none (0), the master (1), slaves too (all). "
    "Default: all under a SYNC_MASTER, else 1. In mode dledger 1 and all mean a majority.",
)
with_sync_flush = click.option(
    "--sync-flush",
    is_flag=True,
    help="A node confirms only when the message is synced to its disk.",
)


def describe(future: Future[SendResult]) -> tuple[int, dict[str, Any], str | None]:
    """Wait for a send; return its exit code, its object for `--json`, and the error's text."""
    try:
        return DONE, _fields(future.result()), None
    except DurabilityError as stored:
        result = stored.result if isinstance(stored.result, SendResult) else None
        return DIFFER, _fields(result) if result else _refusal("UNKNOWN"), str(stored)
    except OutcomeUnknown as unknown:
        return DIFFER, _refusal("TIMEOUT"), str(unknown)
    except NotStoredError as refused:
        return FAILED, _refusal(refused.status), str(refused)
    except UsageError as wrong:
        too_large = str(wrong).startswith("PROPERTIES_SIZE_EXCEEDED")
        status = "PROPERTIES_SIZE_EXCEEDED" if too_large else "MESSAGE_ILLEGAL"
        return FAILED, _refusal(status), str(wrong)
    except HastoreError as failed:
        return FAILED, _refusal("FAILED"), str(failed)


def _fields(result: SendResult) -> dict[str, Any]:
    return {
        "status": result.status.value,
        "msg_id": result.msg_id,
        "offset": result.offset,
        "queue_id": result.queue_id,
        "queue_offset": result.queue_offset,
        "level": result.level,
    }


def _refusal(status: str) -> dict[str, Any]:
    keys = ("msg_id", "offset", "queue_id", "queue_offset", "level")
    return {"status": status} | dict.fromkeys(keys)


class _Printer(threading.Thread):
    """Print results in the order of the lines, while the caller still sends lines."""

    def __init__(self, as_json: bool) -> None:
        super().__init__(name="printer", daemon=True)
        self._futures: queue.SimpleQueue[Future[SendResult] | None] = queue.SimpleQueue()
        self.code = DONE
        self.sent = self.succeeded = 0
        self.broken: OSError | None = None
        self._as_json = as_json

    def put(self, future: Future[SendResult] | None) -> None:
        """Add the future of the next line; None after the last line."""
        self._futures.put(future)

    def run(self) -> None:
        """Print until None comes. If stdout fails, keep the error in `broken` and count on."""
        while (future := self._futures.get()) is not None:
            code, fields, problem = describe(future)
            self.sent += 1
            self.succeeded += code == DONE
            self.code = max(self.code, code)
            if problem is not None:
                fields |= {"line": self.sent, "reason": problem}
                if self.sent - self.succeeded <= _ERRORS_SHOWN:
                    print_error(f"line {self.sent}: {problem}")
            if self._as_json and self.broken is None:
                try:
                    print_json(fields)
                except OSError as broken:
                    self.broken = broken
        hidden = self.sent - self.succeeded - _ERRORS_SHOWN
        if hidden > 0:
            where = "" if self._as_json else "; --json prints all"
            print_note(f"... and {hidden} more errors{where}")


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines. A line over the limit is cut, but stays long enough to be refused."""
    while line := file.readline(MAX_LINE_BYTES + 2):
        rest = line
        while len(rest) == MAX_LINE_BYTES + 2 and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 2)
        yield line.removesuffix(b"\n")


def _pairs(properties: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the value of each --property; raises UsageError."""
    found = []
    for text in properties:
        name, mark, value = text.partition("=")
        if not name or not mark:
            raise UsageError(f"--property {text}: give it as NAME=VALUE")
        found.append((name, value))
    pairs_of(None, None, found)  # once, instead of for each line
    return found


Parse = Callable[[bytes], GivenMessage]


def _send(
    producer: Producer, topic: str, line: bytes, parse: Parse, options: dict[str, Any]
) -> Future[SendResult]:
    """Send a line. If it is invalid, only its own future fails, and the other lines are sent."""
    try:
        body, own = parse(line)
        return producer.send(topic, body, **({**options, **own} if own else options))
    except UsageError as wrong:
        refused: Future[SendResult] = Future()
        refused.set_exception(wrong)
        return refused


def _parser(
    form: str,
    separator: str | None,
    of_messages: Mapping[str, object],
    *,
    keep_queues: bool,
    queue_id: int | None,
) -> Parse:
    """Return what reads a line; raises UsageError for options that contradict each other."""
    if keep_queues and (form != "json" or queue_id is not None):
        raise UsageError("--keep-queues: give it with --input json, and without --queue")
    if form == "json":
        given = [name for name, value in of_messages.items() if value]
        given += [] if separator is None else ["--key-separator"]
        if given:
            raise UsageError(
                f"{given[0]}: with --input json each object says that itself; leave it out"
            )
        return partial(parse_json, keep_queues=keep_queues)
    if separator is None:
        return lambda line: GivenMessage(line, {})
    if not separator:
        raise UsageError("--key-separator: it is empty; give one or more characters")
    if of_messages["--key"] is not None:
        raise UsageError("give --key or --key-separator, not both")
    return partial(parse_keyed, separator=separator.encode())


@contextlib.contextmanager
def _noting_no_master(producer: Producer, addresses: list[str], timeout_s: float) -> Iterator[None]:
    """Print a note when no master is found within a second; sending goes on."""

    def look() -> None:
        if producer.master is None:
            where = ", ".join(addresses)
            print_note(f"no master yet at {where}; trying for {timeout_s:g} s (--timeout)")

    timer = threading.Timer(NO_MASTER_NOTE_S, look)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@click.command("produce", short_help="Send lines as messages to a topic.")
@click.argument("topic", shell_complete=complete_topics)
@click.option("--file", "path", metavar="F", help="The file with the lines (default: stdin).")
@click.option(
    "--queue", "queue_id", type=click.IntRange(0), metavar="N", help="Send to this queue."
)
@click.option("--key", metavar="K", help="The key of every message, for `hastore query`.")
@click.option(
    "--key-separator", "separator", metavar="TEXT",
    help="Each line is KEY TEXT BODY, such as k1:body with TEXT ':'.",
)  # fmt: skip
@click.option("--tag", "tags", metavar="T", help="The tag of every message.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="A property of every message; may be given several times.",
)
@click.option(
    "--delay-level",
    type=click.IntRange(1, MAX_DELAY_LEVEL),
    metavar="L",
    help="Deliver each message later: level 1 is a second, 18 two hours.",
)
@click.option(
    "--input", "form", type=click.Choice(["lines", "json"]), default="lines", show_default=True,
    help="What a line is: a body, or an object as `hastore consume --json` prints it, with key, "
    "tags and properties.",
)  # fmt: skip
@click.option("--keep-queues", is_flag=True, help="Of JSON: send each message to its queue_id.")
@click.option(
    "--compression",
    type=click.Choice(ALGORITHMS),
    help="Compress the bodies of long messages; consumers decompress them.",
)
@click.option(
    "--compression-threshold",
    type=click.IntRange(0, MAX_LINE_BYTES),
    default=COMPRESSION_THRESHOLD,
    show_default=True,
    metavar="BYTES",
    help="From how many bytes on a body is compressed.",
)
@with_acks
@with_sync_flush
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to try each line, and to look for a master.",
)
@with_bootstrap
@with_json
def produce_command(
    topic: str,
    path: str | None,
    queue_id: int | None,
    key: str | None,
    separator: str | None,
    tags: str | None,
    properties: Sequence[str],
    delay_level: int | None,
    form: str,
    keep_queues: bool,
    compression: Compression,
    compression_threshold: int,
    acks: str | None,
    sync_flush: bool,
    timeout_s: float,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Send each line of a file or of stdin as a message to TOPIC.

    Exit code 1: some messages were not stored, and the outcome of every message is known. Exit code
    4: some messages are stored but not confirmed, or their outcome is unknown. With --json the
    object of a failed message also has `line` and `reason`. To copy a topic:

    hastore consume TOPIC --json | hastore produce OTHER --input json
    """
    addresses = bootstrap_addresses(bootstrap)
    check_topic(topic)
    options = {
        "key": key, "tags": tags, "queue": queue_id, "delay_level": delay_level,
        "properties": _pairs(properties),
    }  # fmt: skip
    of_messages = {"--key": key, "--tag": tags, "--property": properties,
                   "--delay-level": delay_level}  # fmt: skip
    parse = _parser(form, separator, of_messages, keep_queues=keep_queues, queue_id=queue_id)
    printer = _Printer(as_json)
    try:
        file = sys.stdin.buffer if path in (None, "-") else open(str(path), "rb")
    except OSError as failure:
        raise UsageError(f"--file {path}: {failure.strerror}") from failure
    with (
        file,
        Producer(
            addresses,
            acks=parse_acks(acks),
            sync_flush=sync_flush,
            delivery_timeout_s=timeout_s,
            compression=compression,
            compression_threshold=compression_threshold,
        ) as producer,
        _noting_no_master(producer, addresses, timeout_s),
    ):
        printer.start()
        try:
            for line in _lines(file):
                printer.put(_send(producer, topic, line, parse, options))
        finally:
            producer.flush()
            printer.put(None)
            printer.join()
    if printer.broken is not None:
        raise printer.broken
    if not as_json:
        failed = printer.sent - printer.succeeded
        print_note(f"{printer.succeeded} messages sent" + (f", {failed} failed" if failed else ""))
    return printer.code
