"""RocketMQ's own Java clients under load, driven by lines of JSON (java/), and the proof of it.

The clients come from Maven Central, the program around them is in `java/`. It needs Java 17 and
Maven. A load of numbered messages notes each acknowledgement, the consumers note each delivery;
both with the clock of time.monotonic, so that they can be compared with a kill.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hastore.demo.proof import ProofError
from hastore.errors import HastoreError, UsageError
from hastore.fs.private_files import append_private
from hastore.record.codec import decode_record
from hastore.store.offline.reader import StoreReader

VERSION = "5.3.3"  # of RocketMQ's clients, as java/pom.xml has it
MIN_JAVA = 17
BUILD_S = 600.0
CALL_S = 120.0
STOP_S = 10.0
_SOURCES = pathlib.Path(__file__).with_name("java")
_JVM = ("-XX:+UseSerialGC", "-Xms64m", "-Xmx512m", "-Djava.net.preferIPv4Stack=true")


def require_java() -> None:
    """Raise UsageError, which names the remedy, without Java 17 or later, or without Maven."""
    for tool, package in (("java", "default-jdk"), ("javac", "default-jdk"), ("mvn", "maven")):
        if shutil.which(tool) is None:
            raise UsageError(
                f"RocketMQ's clients need Java {MIN_JAVA} and Maven, and {tool} is not on the "
                f"PATH: apt-get install {package}, or leave out CLIENTS=rocketmq"
            )
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < MIN_JAVA:
        have = said.splitlines()[0] if said else "this one"
        raise UsageError(f"RocketMQ's clients need Java {MIN_JAVA} or later, not {have}")


def build(target: pathlib.Path) -> str:
    """Compile the program below `target`, get the clients with Maven; return the class path.

    Raises HastoreError with Maven's first error.
    """
    paths = target / "classpath.txt"
    command = ["mvn", "-q", "-B", "-f", str(_SOURCES / "pom.xml"), "compile"]
    command += ["dependency:build-classpath", f"-Dmdep.outputFile={paths}"]
    command += [f"-Dbuild.folder={target}", f"-Drocketmq.version={VERSION}"]
    said = ""
    for offline in (["-o"], []):  # first without the network: all files may be there already
        done = subprocess.run(
            [*command, *offline], capture_output=True, text=True, timeout=BUILD_S, check=False
        )
        if done.returncode == 0:
            return f"{target / 'classes'}:{paths.read_text().strip()}"
        said = done.stdout + done.stderr
    first = next((line for line in said.splitlines() if "ERROR" in line), "it printed no error")
    raise HastoreError(f"Maven could not get RocketMQ's clients: {first}")


class JavaClients:
    """A JVM with the clients; `call` waits for the answer to a request."""

    def __init__(self, class_path: str, folder: pathlib.Path) -> None:
        """Start the JVM; its files, and the clients' own logs, are below `folder`."""
        home = folder / "clients"
        home.mkdir(parents=True, exist_ok=True)
        self.log = folder / "clients.log"
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        command = ["java", *_JVM, f"-Duser.home={home}", f"-Djava.io.tmpdir={home}"]
        command += ["-cp", class_path, "hastore.clients.Clients"]
        with append_private(self.log) as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=home,
                env={**os.environ, "ROCKETMQ_HOME": str(home)},
                start_new_session=True,  # Ctrl-C reaches only the demo, which then ends it
            )
        self._reader = threading.Thread(target=self._read, name="java clients", daemon=True)
        self._reader.start()

    def call(self, op: str, *, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Send a request, return its result; raise HastoreError for a failure of the clients."""
        assert self._process.stdin is not None
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            try:
                line = json.dumps({"id": number, "op": op, **arguments})
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                raise HastoreError(f"the Java clients have ended; see {self.log}") from None
        return future.result(timeout_s)

    def close(self) -> None:
        """End the JVM at once, without a word to the servers."""
        self._process.kill()
        self._process.wait()
        self._reader.join(STOP_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                answer = json.loads(line)
                future = self._waiting.pop(answer["id"])
                if "error" in answer:
                    future.set_exception(HastoreError(f"the Java clients: {answer['error']}"))
                else:
                    future.set_result(answer.get("result"))
        finally:  # also if what they print cannot be read
            for future in list(self._waiting.values()):
                future.set_exception(HastoreError(f"the Java clients have ended; see {self.log}"))


@dataclass(frozen=True, slots=True)
class Gap:
    """The longest time without an event; `at_ms` is its begin."""

    ms: float
    at_ms: float


@dataclass(frozen=True, slots=True)
class Told:
    """What the clients saw: acknowledgements and failures of the load, deliveries.

    An acknowledged message is "STREAM:NUMBER"; times are milliseconds of time.monotonic.
    """

    acknowledged: dict[str, float]
    failed: dict[str, str]
    statuses: Counter[str]
    delivered: list[tuple[str, float]]

    def acknowledgement_gap(self, begin_ms: float = 0.0, end_ms: float = float("inf")) -> Gap:
        """Return the longest gap of any stream between two times."""
        streams: dict[str, list[float]] = {}
        for name, at in self.acknowledged.items():
            if begin_ms <= at <= end_ms:
                streams.setdefault(name.partition(":")[0], []).append(at)
        return max((longest_gap(times) for times in streams.values()), key=lambda gap: gap.ms)

    def delivery_gap(self, begin_ms: float = 0.0, end_ms: float = float("inf")) -> Gap:
        """Return the longest gap of all consumers together between two times."""
        return longest_gap(at for _, at in self.delivered if begin_ms <= at <= end_ms)

    def consumed_again(self, since_ms: float) -> int:
        """Return how many messages were delivered since a time, and were delivered before that."""
        known: set[str] = set()
        again: set[str] = set()
        for name, at in sorted(self.delivered, key=lambda one: one[1]):
            if name in known and at >= since_ms:
                again.add(name)
            known.add(name)
        return len(again)


def longest_gap(times: Iterable[float]) -> Gap:
    """Return the longest gap between events; of less than two events, none."""
    ordered = sorted(times)
    gaps = (Gap(later - earlier, earlier) for earlier, later in itertools.pairwise(ordered))
    return max(gaps, key=lambda gap: gap.ms, default=Gap(0.0, 0.0))


def told(streams: Sequence[dict[str, Any]], deliveries: Iterable[Sequence[Any]]) -> Told:
    """Return what `load.stop` and `push.numbers` returned."""
    acknowledged: dict[str, float] = {}
    failed: dict[str, str] = {}
    statuses: Counter[str] = Counter()
    for stream in streams:
        name = stream["stream"]
        acknowledged |= {f"{name}:{number}": at for number, at, _ in stream["acknowledged"]}
        failed |= {f"{name}:{number}": text for number, _, _, text in stream["failed"]}
        statuses.update(stream["statuses"])
    return Told(acknowledged, failed, statuses, [(name, at) for name, at in deliveries])


def prove_stored(store: pathlib.Path, topic: str, seen: Told) -> Counter[str]:
    """Return how often each message of `topic` is in an unused store.

    Raises ProofError if an acknowledged one is not there.
    """
    stored: Counter[str] = Counter()
    with StoreReader(str(store)) as reader:
        for _, raw in reader.raw_records():
            record = decode_record(raw)
            if record.topic == topic:
                stored[bytes(record.body).partition(b" ")[0].decode()] += 1
    lost = [name for name in seen.acknowledged if name not in stored]
    if lost:
        raise ProofError(f"{len(lost)} acknowledged messages are not in {store}: {lost[:5]}")
    return stored


def prove_consumed(seen: Told) -> Counter[str]:
    """Return how often each message was delivered.

    Raises ProofError if an acknowledged one never was.
    """
    delivered = Counter(name for name, _ in seen.delivered)
    missed = [name for name in seen.acknowledged if name not in delivered]
    if missed:
        raise ProofError(f"{len(missed)} acknowledged messages were not consumed: {missed[:5]}")
    return delivered
