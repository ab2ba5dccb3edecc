"""Get the peers from Maven Central: RocketMQ with the program that drives it, Kafka, Spark's Kafka.

Maven resolves the class paths once, into `benchmarks/java/*/target`. HASTORE_ROCKETMQ_VERSION,
HASTORE_KAFKA_VERSION and HASTORE_SPARKKAFKA_VERSION choose other versions.
"""

import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess

JAVA = pathlib.Path(__file__).resolve().parent / "java"
BUILD_S = 600.0


class NoPeer(Exception):
    """A peer cannot run on this machine; the text tells the user why."""


@functools.cache
def java_missing() -> str | None:
    """Return what this machine lacks to run the peers in Java, or None if nothing."""
    for program in ("java", "javac", "mvn"):
        if shutil.which(program) is None:
            return f"no {program} here: the peers need Java 17 or later and Maven"
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', said)
    if found is None or int(found[1]) < 17:
        return f"Java 17 or later is needed, not {said.splitlines()[0] if said else 'this one'}"
    return None


@functools.cache
def class_path(peer: str) -> str:
    """Return the class path of `rocketmq` or `kafka`, built if needed; raise NoPeer on failure."""
    missing = java_missing()
    if missing is not None:
        raise NoPeer(missing)
    folder = JAVA / peer
    version = os.environ.get(f"HASTORE_{peer.upper()}_VERSION", "")
    target = folder / "target"
    target.mkdir(exist_ok=True)
    with open(target / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, wanted = target / "built", _digest(folder, version)
        if not stamp.exists() or stamp.read_text() != wanted:
            _build(folder, peer, version)
            stamp.write_text(wanted)
    return f"{target / 'classes'}:{(target / 'classpath.txt').read_text().strip()}"


def peer_version(peer: str) -> str:
    """Return the version of a peer."""
    given = os.environ.get(f"HASTORE_{peer.upper()}_VERSION")
    found = re.search(rf"<{peer}\.version>([^<]+)<", (JAVA / peer / "pom.xml").read_text())
    return given or (found[1] if found else "unknown")


def _digest(folder: pathlib.Path, version: str) -> str:
    digest = hashlib.sha256(version.encode())
    for path in [folder / "pom.xml", *sorted((folder / "src").rglob("*"))]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _build(folder: pathlib.Path, peer: str, version: str) -> None:
    paths = folder / "target" / "classpath.txt"
    command = ["mvn", "-q", "-B", "-f", str(folder / "pom.xml"), "compile"]
    command += ["dependency:build-classpath", f"-Dmdep.outputFile={paths}"]
    if version:
        command.append(f"-D{peer}.version={version}")
    said = ""
    for offline in (["-o"], []):  # first without the network: all files may be there already
        done = subprocess.run(
            [*command, *offline], capture_output=True, text=True, timeout=BUILD_S, check=False
        )
        if done.returncode == 0:
            return
        said = done.stdout + done.stderr
    first = next((line for line in said.splitlines() if "ERROR" in line), "it printed no error")
    raise NoPeer(f"Maven could not get {peer}: {first}")


if __name__ == "__main__":
    for name in ("rocketmq", "kafka", "sparkkafka"):
        print(f"{name} {peer_version(name)}: {len(class_path(name).split(':'))} entries")
