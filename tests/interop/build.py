"""Compile the Java programs and resolve their class paths with Maven, once per program and version.

The results are in the `target` folder beside each pom.xml.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
from dataclasses import dataclass

import pytest

HERE = pathlib.Path(__file__).parent
BUILD_S = 600.0
# Maven runs for seconds: the second compiler of its JVM would cost more than it saves.
QUICK_MAVEN = {"MAVEN_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


@dataclass(frozen=True)
class Program:
    """A program to build.

    `name` is the folder of the results, `operations` the class with the program's operations. The
    version is Maven's property `version_key`, or the environment variable `version_variable`.
    """

    folder: str
    name: str
    operations: str
    version_key: str
    version_variable: str
    profile: str | None = None
    version: str = ""  # instead of the one in pom.xml
    sources: tuple[str, ...] = ("java",)  # folders beside its own; java has interop.Peer


ROCKETMQ_5 = Program(
    "java", "five", "interop.five.FiveStore",
    "rocketmq.version", "HASTORE_ROCKETMQ_VERSION", "rocketmq-5",
)  # fmt: skip
ROCKETMQ_4 = Program(  # only the store
    "java", "four", "interop.four.FourStore",
    "rocketmq.version", "HASTORE_ROCKETMQ_4_VERSION", "rocketmq-4",
)  # fmt: skip
OLD_BROKER = Program(  # Maven Central has no broker of 4.9.8
    "oldbroker", "oldbroker", "interop.oldbroker.OldBroker",
    "rocketmq.version", "HASTORE_ROCKETMQ_4_BROKER_VERSION", sources=("java",),
)  # fmt: skip
JEROMQ = Program(
    "jeromq", "jeromq", "interop.jeromq.Dealers", "jeromq.version", "HASTORE_JEROMQ_VERSION"
)

_CLIENTS = ("../../hastore/demo/java",)
CLIENTS_5 = Program(
    "clients", "clients-5", "interop.clients.AdminTool",
    "rocketmq.version", "HASTORE_ROCKETMQ_VERSION", sources=_CLIENTS,
)  # fmt: skip
CLIENTS_4 = Program(
    "clients", "clients-4", "interop.clients.AdminTool",
    "rocketmq.version", "HASTORE_ROCKETMQ_4_VERSION", version="4.9.8", sources=_CLIENTS,
)  # fmt: skip


def missing(what: str) -> None:
    """Skip the test with one line; in CI fail, because Java is required there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"interop tests: {what}, and CI must run them", pytrace=False)
    pytest.skip(f"interop tests need Java 17 and Maven: {what}")


def command(program: Program) -> tuple[str, str]:
    """Return class path and main argument; build first if the sources or the version changed."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            missing(f"{tool} is not installed")
    version = os.environ.get(program.version_variable, program.version)
    target = HERE / program.folder / "target" / program.name
    target.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".lock-{program.name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, wanted = target / "built", _digest(program, version)
        if not stamp.exists() or stamp.read_text() != wanted:
            _build(program, version, target)
            stamp.write_text(wanted)
    jars = (target / "classpath.txt").read_text().strip()
    return f"{target / 'classes'}:{jars}", program.operations


def _digest(program: Program, version: str) -> str:
    digest = hashlib.sha256(version.encode())
    for folder in sorted({*program.sources, program.folder}):
        for path in [HERE / folder / "pom.xml", *sorted((HERE / folder / "src").rglob("*"))]:
            if path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _build(program: Program, version: str, target: pathlib.Path) -> None:
    command = ["mvn", "-q", "-B", "-f", str(HERE / program.folder / "pom.xml"), "compile"]
    command += ["dependency:build-classpath", f"-Dmdep.outputFile={target / 'classpath.txt'}"]
    command.append(f"-Dbuild.folder={target}")  # of poms that serve several versions
    if program.profile is not None:
        command.append(f"-P{program.profile}")
    if version:
        command.append(f"-D{program.version_key}={version}")
    said = ""
    for offline in (["-o"], []):  # usually all files have been downloaded before
        done = subprocess.run(
            [*command, *offline], capture_output=True, text=True, timeout=BUILD_S, check=False,
            env={**os.environ, **QUICK_MAVEN},
        )  # fmt: skip
        if done.returncode == 0:
            return
        said = done.stdout + done.stderr
    missing(f"Maven could not build tests/interop/{program.folder}: {said[-2000:]}")
