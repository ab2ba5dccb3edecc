"""A standalone cluster of Spark, a master and two workers of one core, on loopback."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from pyspark import find_spark_home

from hastore.spark.session import find_java, java_home_for_spark
from tests.spark.quick import QUICK_JVM

START_S = 240  # a busy machine starts three JVMs
SPARK_HOME = Path(find_spark_home._find_spark_home())
_PR_SET_PDEATHSIG = 1
SMALL = {
    "spark.driver.extraJavaOptions": QUICK_JVM,
    "spark.executor.extraJavaOptions": QUICK_JVM,
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def _end_with_the_tests() -> None:
    """Let this process be killed when the tests are."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Cluster:
    """Started by `with`; its end kills the master, the workers and their executors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.master = ""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._homes = str(java_home_for_spark(find_java()))

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)
            deploy = "org.apache.spark.deploy"
            log = self._start("master", f"{deploy}.master.Master")
            self.master = self._wait(log, r"(spark://127\.0\.0\.1:\d+)")
            for number in (1, 2):
                work = self.folder / f"work{number}"
                size = ("--cores", "1", "--memory", "640m", "--work-dir", str(work))
                self._start(f"worker{number}", f"{deploy}.worker.Worker", *size, self.master)
            for number in (1, 2):
                log = self.folder / f"worker{number}.log"
                self._wait(log, r"(Successfully registered with master)")
            stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    def environment(self, **more: str) -> dict[str, str]:
        """Return an environment for a driver: without the variables of this process's Python."""
        clean = {k: v for k, v in os.environ.items() if "PYTHON" not in k and "SPARK" not in k}
        java = {"JAVA_HOME": self._homes, "SPARK_LOCAL_IP": "127.0.0.1"}
        return clean | java | {"PATH": "/usr/bin:/bin"} | more

    def executors(self) -> set[Path]:
        """Return the folders of all executors that the workers have started until now."""
        return set(self.folder.glob("work*/app-*/*"))

    def stop(self) -> None:
        """Kill each process group: executors are in that of their worker."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()

    def _start(self, name: str, kind: str, *arguments: str) -> Path:
        log = self.folder / f"{name}.log"
        address = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [str(SPARK_HOME / "bin" / "spark-class"), kind, *address, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=self.folder,
                    env=self.environment(
                        SPARK_DAEMON_MEMORY="256m",
                        SPARK_NO_DAEMONIZE="1",
                        SPARK_DAEMON_JAVA_OPTS=QUICK_JVM,
                    ),  # fmt: skip
                    start_new_session=True,
                    preexec_fn=_end_with_the_tests,
                )
            )
        return log

    def _wait(self, log: Path, pattern: str) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            text = log.read_text("utf-8", "replace")
            if found := re.search(pattern, text):
                return found[1]
            assert self._processes[-1].poll() is None, text[-2_000:]
            time.sleep(0.1)
        raise AssertionError(f"{log.name} has no {pattern} after {START_S} s: {text[-2_000:]}")
