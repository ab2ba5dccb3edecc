"""A JVM with RocketMQ's own classes, steered by lines of JSON (java/src/main/java/interop)."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
import subprocess
import threading
from concurrent.futures import Future
from typing import Any

CALL_S = 60.0
_OPENS = (
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
)


class PeerError(AssertionError):
    """RocketMQ threw."""


class Peer:
    """One process; `call` waits for its answer, `begin` hands out a Future."""

    def __init__(
        self, program: tuple[str, str], folder: pathlib.Path, name: str, log: str = "WARN"
    ) -> None:
        self.name = name
        home = folder / f"{name}.home"
        home.mkdir(parents=True, exist_ok=True)
        self.errors = folder / f"{name}.err"
        self._ids = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        command = ["java", *_OPENS, "-Xms128m", "-Xmx768m", "-XX:+UseSerialGC"]
        command += ["-XX:TieredStopAtLevel=1", "-XX:MaxDirectMemorySize=1g", "-Xshare:auto"]
        command += [f"-Duser.home={home}", f"-Dpeer.log={log}", "-Djava.net.preferIPv4Stack=true"]
        command += ["-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"]
        command += [f"-Djava.io.tmpdir={home}"]  # netty's keys and lz4's library stay behind a kill
        command += ["-Drocketmq.client.rebalance.waitInterval=1000"]
        command += ["-Drocketmq.client.rebalance.minInterval=200"]
        class_path, operations = program
        command += ["-cp", class_path, "interop.Peer", operations]
        with open(self.errors, "ab") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=home,
                env={**os.environ, "ROCKETMQ_HOME": str(home)},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            future = self._waiting.pop(answer["id"])
            if "error" in answer:
                future.set_exception(PeerError(f"{self.name}: {answer['error']}"))
            else:
                future.set_result(answer.get("result"))
        for future in list(self._waiting.values()):
            future.set_exception(PeerError(f"{self.name} ended: {self.last_words()}"))

    def begin(self, op: str, **arguments: Any) -> Future[Any]:
        """Send a request."""
        assert self.process.stdin is not None
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = future
            text = json.dumps({"id": number, "op": op, **arguments})
            try:
                self.process.stdin.write(text.encode() + b"\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                raise PeerError(f"{self.name} has ended: {self.last_words()}") from None
        return future

    def call(self, op: str, *, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Send a request and return its result; PeerError for what RocketMQ threw."""
        return self.begin(op, **arguments).result(timeout_s)

    def last_words(self, lines: int = 15) -> str:
        """Return the end of what it logged."""
        return "\n".join(self.errors.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL and reap."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
