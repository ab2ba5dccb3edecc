"""What the attacks share: nodes, attackers in processes of their own, measured clients, and rows.

An attack is a function of a `Run` that returns rows. It measures the same thing in turn without and
with its attackers, in the same run and on the same nodes, so that a busy machine slows both alike.
Every put that a node acknowledged is read again at the end.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hastore import Consumer, OutgoingMessage, Producer, Security
from tests.process.harness import ROOT, Group, Node

ROUNDS_S = 4.0  # a round, without the attack and with it, takes at least this, if there is time
ROUNDS_MAX = 3
LONGEST_S = 120.0  # within which an attacker, a put or a check ends, on a busy machine too
BIG_FILES = {
    "commitlog_file_size": "16MiB",
    "consume_queue_units": 300_000,
    "index_slots": 50_000,
    "index_entries": 500_000,
}
PAUSE_S = 0.002
SETTLE_S, QUICK_MS = 3.0, 5.0
PUTS = "puts"
QUEUES = 4
IN_VAIN = {"failed", "not let in", "ended"}  # what attackers count that were kept out


@dataclass
class Row:
    """One figure of an attack: without it, under it, and the target."""

    name: str
    what: str  # the quantity, with its unit
    quiet: float | None
    attacked: float
    most: float  # the target: at most so much, or with `times` so many times `quiet`
    times: bool = False
    more: str = ""  # what else was seen
    unserved: str = ""  # who was not served at all: the target is missed
    lost: list[str] = field(default_factory=list)  # what must not happen, and did

    @property
    def ratio(self) -> float | None:
        """How many times the quiet figure; None without one."""
        return self.attacked / self.quiet if self.quiet else None

    @property
    def ok(self) -> bool:
        """Whether the target was kept and nothing was lost."""
        measured = self.ratio if self.times else self.attacked
        kept = measured is not None and measured <= self.most
        return kept and not self.lost and not self.unserved

    def cells(self) -> list[str]:
        """Return the texts of the row: name, quantity, quiet, attacked, ratio, target, verdict."""
        quiet = "" if self.quiet is None else _figure(self.quiet)
        ratio = ""
        if self.ratio is not None:
            ratio = f"{self.ratio:.2f}" if self.ratio < 100 else f"{self.ratio:,.0f}"
        target = f"{_figure(self.most)} times" if self.times else _figure(self.most)
        verdict = "ok" if self.ok else "missed"
        verdict += "".join(f"; {one}" for one in (self.unserved, self.more, *self.lost) if one)
        return [self.name, self.what, quiet, _figure(self.attacked), ratio, target, verdict]


COLUMNS = ["attack", "what", "quiet", "attacked", "ratio", "target: at most", "verdict"]


def table(rows: list[Row]) -> str:
    """Return the rows as a table of Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *[row.cells() for row in rows]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


class Run:
    """One attack's time, seed, folder, nodes and attackers; its end leaves no process behind."""

    def __init__(self, folder: pathlib.Path, seconds: float, seed: int) -> None:
        self.folder = folder
        self.seconds = seconds
        self.seed = seed
        self.chance = random.Random(seed)
        self.lost: list[str] = []
        self.counts: Counter[str] = Counter()  # what all its attackers have counted
        self.worst_ms = 0.0  # the longest time that an attacker waited for an answer
        self._end = time.monotonic() + seconds
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def left_s(self) -> float:
        """Return the seconds that are left; at least a little."""
        return max(0.5, self._end - time.monotonic())

    def keep(self, opened: contextlib.AbstractContextManager[Any]) -> Any:
        """Enter a context that ends with the run."""
        return self._stack.enter_context(opened)

    def group(self, count: int = 1, **options: Any) -> Group:
        """Return a group of nodes that do not run yet; a single node is an ASYNC_MASTER."""
        options["store"] = BIG_FILES | (options.get("store") or {})
        if count == 1:
            options.setdefault("master_role", "ASYNC_MASTER")
        made: Group = self.keep(Group(self.folder, count, **options))
        return made

    def node(self, **options: Any) -> Node:
        """Return a single running node that takes puts."""
        group = self.group(1, **options)
        group[1].start("master")
        group[1].wait_writable()
        return group[1]

    def producer(self, *nodes: Node, **options: Any) -> Producer:
        """Return a producer that is closed with the run."""
        addresses = [node.api for node in nodes]
        made: Producer = self.keep(Producer(addresses, delivery_timeout_s=LONGEST_S, **options))
        return made

    def fill(self, node: Node, topic: str, most: int, body: bytes, key: str | None = None) -> int:
        """Put up to `most` messages, for at most a third of the time; return how many."""
        until, count = time.monotonic() + self.left_s() / 3.0, 0
        with Producer([node.api], acks=1, delivery_timeout_s=LONGEST_S) as producer:
            while count < most and time.monotonic() < until:
                part = [OutgoingMessage(body, key=key, queue=n % QUEUES) for n in range(1_000)]
                producer.send_batch(topic, part).result(LONGEST_S)
                count += len(part)
        settled(node)
        return count

    @contextlib.contextmanager
    def strangers(self, kind: str, /, **arguments: Any) -> Iterator[dict[str, Any]]:
        """Let a kind of strangers.py attack during the block.

        Yields what they said when they were ready; `counts` gets what they counted.
        """
        arguments |= {"seed": self.chance.getrandbits(32)}
        words = [sys.executable, "-m", "tests.attack.strangers", kind, json.dumps(arguments)]
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            first = process.stdout.readline()
            assert first, f"the attackers {kind} never began, see stderr"
            seen: dict[str, Any] = json.loads(first)
            yield seen
            process.stdin.close()  # they end, also if this process is killed
            last = process.stdout.read()
            assert process.wait(LONGEST_S) == 0 and last, f"the attackers {kind} failed, see stderr"
            counted = json.loads(last)
            self.worst_ms = max(self.worst_ms, counted.pop("worst_ms"))
            assert counted.keys() - IN_VAIN, f"the attackers {kind} did nothing: {counted}"
            self.counts.update(counted)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()

    def rounds(self) -> tuple[int, float]:
        """Return how often to measure, and for how many seconds each time on each side."""
        left_s = self.left_s()
        count = max(1, min(ROUNDS_MAX, int(left_s / ROUNDS_S)))
        return count, left_s / count / 2.0

    def compare(
        self,
        measure: Callable[[float], list[float]],
        attack: Callable[[], contextlib.AbstractContextManager[Any]],
        settle: Callable[[], object] = lambda: None,
    ) -> tuple[list[float], list[float]]:
        """Measure in turn without and with the attack; return what was measured on each side.

        `settle` ends once the node has done with what the attackers have left behind.
        """
        quiet: list[float] = []
        attacked: list[float] = []
        count, seconds = self.rounds()
        for _ in range(count):
            quiet += measure(seconds)
            with attack():
                attacked += measure(seconds)
            settle()
        return quiet, attacked


class Putter:
    """A client that puts one message after the other, and knows what was acknowledged."""

    def __init__(self, run: Run, producer: Producer) -> None:
        self._run = run
        self._producer = producer
        self._sent = 0
        self.acknowledged: set[bytes] = set()
        producer.send_sync(PUTS, self._body(), queue=0)  # finds the master
        self.acknowledged.add(b"puts-0")

    def _body(self) -> bytes:
        self._sent += 1
        return b"puts-%d" % (self._sent - 1)

    def one(self) -> float:
        """Put a message; return how long it took, in ms."""
        body = self._body()
        begin = time.perf_counter()
        self._producer.send_sync(PUTS, body, queue=self._sent % QUEUES)
        took_ms = (time.perf_counter() - begin) * 1000.0
        self.acknowledged.add(body)
        return took_ms

    def settle(self) -> None:
        """Put until a put is quick again, or for a few seconds."""
        until = time.monotonic() + SETTLE_S
        while self.one() > QUICK_MS and time.monotonic() < until:
            pass

    def latencies(self, seconds: float, pause_s: float = PAUSE_S) -> list[float]:
        """Put for some seconds; return how long each put took, in ms.

        Without pauses the quick puts between two stalls would outnumber those that met a stall.
        """
        until = time.monotonic() + seconds
        found = [self.one()]
        while time.monotonic() < until:
            time.sleep(pause_s)
            found.append(self.one())
        return found

    def throughput(self, seconds: float) -> list[float]:
        """Put many at a time for some seconds; return the thousands of puts a second, once."""
        flight: list[tuple[bytes, Future[Any]]] = []
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            for _ in range(200):
                body = self._body()
                future = self._producer.send(PUTS, body, queue=self._sent % QUEUES)
                flight.append((body, future))
        for body, future in flight:
            future.result(LONGEST_S)
            self.acknowledged.add(body)
        return [len(flight) / (time.monotonic() - begin) / 1000.0]

    def check(self, *nodes: Node, security: Security | None = None) -> None:
        """Note each acknowledged put that a node does not have exactly once."""
        for node in nodes:
            missing = set(self.acknowledged)
            twice = 0
            seen: set[bytes] = set()
            with Consumer(PUTS, [node.api], timeout_s=LONGEST_S, security=security) as consumer:
                until = time.monotonic() + LONGEST_S
                while missing and time.monotonic() < until:
                    for message in consumer.poll(5_000, timeout_s=1.0):
                        twice += message.body in seen
                        seen.add(message.body)
                        missing.discard(message.body)
            if missing:
                self._run.lost.append(f"LOST {len(missing)} acknowledged puts on {node.number}")
            if twice:
                self._run.lost.append(f"STORED TWICE: {twice} puts on {node.number}")


def p50(found: list[float]) -> float:
    """Return the median."""
    return statistics.median(found)


def put_row(
    run: Run, name: str, sides: tuple[list[float], list[float]], most: float, more: str
) -> Row:
    """Return the row of puts whose median may be at most `most` times the quiet one."""
    quiet, attacked = sides
    more = f"slowest {max(attacked):,.0f} ms (quiet {max(quiet):,.0f} ms); {more}"
    return Row(name, "put, p50, ms", p50(quiet), p50(attacked), most, True, more, lost=run.lost)


def settled(node: Node) -> None:
    """Wait until a node has replayed its log, so that its queues and index have all messages."""
    node.wait_status(lambda s: s["dispatched_offset"] == s["max_offset"], "all replayed", LONGEST_S)


def command(
    *words: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `hastore WORDS` in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, str(ROOT / "bin" / "hastore"), *words],
        capture_output=True, timeout=LONGEST_S, check=False, env=environment,
    )  # fmt: skip
