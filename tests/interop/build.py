"""Compile the Java program and work out its class path: once for each RocketMQ, by Maven, into
java/target.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess

import pytest

JAVA = pathlib.Path(__file__).parent / "java"
TARGET = JAVA / "target"
BUILD_S = 600.0
# Maven's profile, and the class that adds what it has. 4 is the bare store.
PROFILES = {5: ("rocketmq-5", "five", "FiveStore"), 4: ("rocketmq-4", "four", "FourStore")}

VERSIONS = {5: "HASTORE_ROCKETMQ_VERSION", 4: "HASTORE_ROCKETMQ_4_VERSION"}


def missing(what: str) -> None:
    """Skip, with one line; in CI fail: there RocketMQ is compulsory."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"interop tests: {what}, and CI must run them", pytrace=False)
    pytest.skip(f"interop tests need Java 17 and Maven: {what}")


def command(major: int) -> tuple[str, str]:
    """Return class path and main argument; builds when the sources or the version changed."""
    for program in ("java", "javac", "mvn"):
        if shutil.which(program) is None:
            missing(f"{program} is not there")
    version = os.environ.get(VERSIONS[major], "")
    profile, name, program = PROFILES[major]
    target = TARGET / name
    target.mkdir(parents=True, exist_ok=True)
    with open(TARGET / f".lock-{name}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, wanted = target / "built", _digest(version)
        if not stamp.exists() or stamp.read_text() != wanted:
            _build(version, profile, target)
            stamp.write_text(wanted)
    jars = (target / "classpath.txt").read_text().strip()
    return f"{target / 'classes'}:{jars}", f"interop.{name}.{program}"


def _digest(version: str) -> str:
    digest = hashlib.sha256(version.encode())
    for path in [JAVA / "pom.xml", *sorted((JAVA / "src").rglob("*"))]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _build(version: str, profile: str, target: pathlib.Path) -> None:
    command = ["mvn", "-q", "-B", "-f", str(JAVA / "pom.xml"), f"-P{profile}", "compile"]
    command += ["dependency:build-classpath", f"-Dmdep.outputFile={target / 'classpath.txt'}"]
    if version:
        command.append(f"-Drocketmq.version={version}")
    said = ""
    for offline in (["-o"], []):  # everything is there already, more often than not
        done = subprocess.run(
            [*command, *offline], capture_output=True, text=True, timeout=BUILD_S, check=False
        )
        if done.returncode == 0:
            return
        said = done.stdout + done.stderr
    missing(f"Maven could not build tests/interop/java: {said[-2000:]}")
