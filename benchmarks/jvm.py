"""A JVM with RocketMQ's own classes, controlled by lines of JSON (java/rocketmq)."""

import json
import os
import pathlib
import select
import signal
import subprocess
import time
from typing import Any

from benchmarks.common import Cost

CALL_S = 180.0
# The flags of RocketMQ's own start script for a broker on a current Java. Its 8 GiB of heap would
# be unfair in the comparison of memory; the broker uses a quarter of a GiB here.
SERVER_FLAGS = (
    *("-server", "-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25"),
    *("-XX:InitiatingHeapOccupancyPercent=30", "-XX:MaxDirectMemorySize=4g"),
)
_OPENS = (
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.misc=ALL-UNNAMED",
    "--add-opens=java.base/jdk.internal.ref=ALL-UNNAMED",
)


class PeerError(RuntimeError):
    """RocketMQ threw, or its process ended."""


class Jvm:
    """One process; `call` sends a request and waits for the answer."""

    def __init__(self, class_path: str, folder: pathlib.Path, name: str, heap: str = "1g") -> None:
        self.name = name
        home = folder / f"{name}.home"
        home.mkdir(parents=True, exist_ok=True)
        self._errors = folder / f"{name}.err"
        command = ["java", *_OPENS, *SERVER_FLAGS, f"-Xms{heap}", f"-Xmx{heap}"]
        command += [f"-Duser.home={home}", "-Dpeer.log=ERROR", "-Djava.net.preferIPv4Stack=true"]
        command += ["-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"]
        command += [f"-Djava.io.tmpdir={home}"]  # else netty and lz4 leave files in /tmp at a kill
        command += ["-cp", class_path, "bench.Bench"]
        with open(self._errors, "ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=home,
                env={**os.environ, "ROCKETMQ_HOME": str(home)},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def begin(self, op: str, **arguments: Any) -> None:
        """Send a request; `finish` returns its answer."""
        assert self._process.stdin is not None
        text = json.dumps({"op": op, **arguments})
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} has ended: {self.last_words()}") from None

    def finish(self, timeout_s: float = CALL_S) -> Any:
        """Wait for the answer to `begin`; raise PeerError if RocketMQ failed or ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise PeerError(f"{self.name} did not answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.name} has ended: {self.last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}: {self.last_words()}")
        return answer.get("result")

    def call(self, op: str, *, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Send a request and wait for its answer."""
        self.begin(op, **arguments)
        return self.finish(timeout_s)

    def wait_slaves(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until the store in this process has `count` slaves that have its whole log."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.call("store.status")
            if status["slaves"] == count and status["reported"] >= status["max"]:
                return
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name}: its slaves did not get in sync: {status}")
            time.sleep(0.02)

    def cost(self) -> Cost:
        """Return what the process has used."""
        return Cost.of(self.pid)

    def last_words(self, lines: int = 6) -> str:
        """Return the last lines of its log."""
        return " | ".join(self._errors.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
