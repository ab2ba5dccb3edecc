"""A JVM with the classes of another project, controlled by lines of JSON (see Peer.java)."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

CALL_S = 180.0
_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


class PeerError(AssertionError):
    """The other project's code threw an exception, or its process ended."""


class JavaProcess:
    """One process; `call` waits for the answer to a request, `begin` returns a Future."""

    def __init__(
        self,
        program: tuple[str, str],
        folder: pathlib.Path,
        name: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        main: str = "interop.Peer",
    ) -> None:
        self.name = name
        home = folder / f"{name}.home"
        home.mkdir(parents=True, exist_ok=True)
        self.errors = folder / f"{name}.err"
        self._ids = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        class_path, operations = program
        command = ["java", *_JVM, *options, f"-Duser.home={home}"]
        command += [f"-Djava.io.tmpdir={home}"]  # else libraries leave files in /tmp at a kill
        command += ["-cp", class_path, main, operations]
        with open(self.errors, "ab") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                cwd=home,
                env={**os.environ, **(environment or {})},
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
        """Send a request and return its result; raise PeerError for an exception of the peer."""
        return self.begin(op, **arguments).result(timeout_s)

    def last_words(self, lines: int = 15) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.errors.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """Send SIGKILL and reap the process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
