"""A JVM with RocketMQ's own classes, told what to do by lines of JSON (java/rocketmq)."""

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
# What RocketMQ's own start script gives a broker on a Java of today; its 8 GiB of heap would be
# held against it in the comparison of memory, and a quarter of a GiB is what it uses here.
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
    """One process; `call` asks and waits for the answer."""

    def __init__(self, class_path: str, folder: pathlib.Path, name: str, heap: str = "1g") -> None:
        self.name = name
        home = folder / f"{name}.home"
        home.mkdir(parents=True, exist_ok=True)
        self._errors = folder / f"{name}.err"
        command = ["java", *_OPENS, *SERVER_FLAGS, f"-Xms{heap}", f"-Xmx{heap}"]
        command += [f"-Duser.home={home}", "-Dpeer.log=ERROR", "-Djava.net.preferIPv4Stack=true"]
        command += ["-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"]
        command += [f"-Djava.io.tmpdir={home}"]  # netty's keys and lz4's library stay behind a kill
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
        """Ask for something; `finish` has the answer."""
        assert self._process.stdin is not None
        text = json.dumps({"op": op, **arguments})
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"{self.name} has ended: {self.last_words()}") from None

    def finish(self, timeout_s: float = CALL_S) -> Any:
        """Wait for the answer to what was asked for; PeerError for what RocketMQ threw."""
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
        """Ask for something and wait for it."""
        self.begin(op, **arguments)
        return self.finish(timeout_s)

    def wait_slaves(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until the store in this process has so many slaves, and they all it has."""
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
        """Return the end of what it logged."""
        return " | ".join(self._errors.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL and reap."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
