"""RocketMQ's own name server in a JVM, by its own main class, and what it says when asked."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import threading

from hastore.protocol.registration import Route, decode_route, question_of_route
from hastore.protocol.remoting import Answer
from hastore.server.name_servers import Line
from tests.interop.build import Program, command
from tests.interop.rocketmq import NO_TLS
from tests.process.harness import wait_until

NAME_SERVER_5 = Program(
    "nameserver", "nameserver-5", "org.apache.rocketmq.namesrv.NamesrvStartup",
    "rocketmq.version", "HASTORE_ROCKETMQ_VERSION", sources=(),
)  # fmt: skip
NAME_SERVER_4 = Program(  # Maven Central has no later one of version 4
    "nameserver", "nameserver-4", "org.apache.rocketmq.namesrv.NamesrvStartup",
    "rocketmq.version", "HASTORE_NAME_SERVER_4_VERSION", version="4.9.7", sources=(),
)  # fmt: skip
START_S = 120.0
_JVM = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xms64m", "-Xmx256m"),
    *("-XX:MaxDirectMemorySize=128m", "-Djava.net.preferIPv4Stack=true", NO_TLS),
)


class NameServerProcess:
    """A name server on a port of loopback; it can be killed and started again."""

    def __init__(self, program: Program, folder: pathlib.Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._folder = folder / f"{program.name}-{port}"
        (self._folder / "conf").mkdir(parents=True)
        for name in ("logback_namesrv.xml", "rmq.namesrv.logback.xml"):
            text = '<configuration><root level="OFF"/></configuration>'
            (self._folder / "conf" / name).write_text(text)
        self._settings = self._folder / "namesrv.properties"
        lines = [f"listenPort={port}", "bindAddress=127.0.0.1"]
        lines.append(f"kvConfigPath={self._folder}/kvConfig.json")
        self._settings.write_text("\n".join(lines) + "\n")
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> NameServerProcess:
        """Start it, and wait until it answers."""
        classes, main = command(self._program)
        run = ["java", *_JVM, f"-Duser.home={self._folder}", f"-Djava.io.tmpdir={self._folder}"]
        with open(self._folder / "output", "ab") as out:
            self._process = subprocess.Popen(
                [*run, "-cp", classes, main, "-c", str(self._settings)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._folder,
                env={**os.environ, "ROCKETMQ_HOME": str(self._folder)}, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, START_S, self._output)
        return self

    def kill(self) -> None:
        """Kill and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def route(self, topic: str) -> Route | None:
        """Return what it says of a topic; None without a route."""
        line = Line(self.address, threading.Event())
        line.open()
        try:
            answer = line.ask(question_of_route(topic))
        finally:
            line.close()
        if answer.code == Answer.TOPIC_NOT_EXIST:
            return None
        assert answer.code == Answer.SUCCESS, answer
        return decode_route(answer.body)

    def brokers(self, topic: str) -> dict[str, dict[str, str]]:
        """Return the addresses by id of each broker that has a topic."""
        route = self.route(topic)
        if route is None:
            return {}
        return {one.brokerName: one.brokerAddrs for one in route.brokerDatas}

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._output()
        host, port = self.address.split(":")
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            return False
        return True

    def _output(self) -> str:
        return (self._folder / "output").read_text(errors="replace")[-2000:]
