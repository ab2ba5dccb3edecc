"""Check the requirements of `hastore demo` before its first step, so that it fails early."""

import importlib.util
import os
import pathlib
import shutil
from collections.abc import Iterator
from importlib.metadata import version

from hastore.config.checks import human_size
from hastore.config.model import MIB
from hastore.demo.flights import find_flights
from hastore.demo.nodes import PORTS_PER_NODE, folder_problem, free_ports, replaced_bytes
from hastore.demo.zookeeper import find_zookeeper
from hastore.errors import HastoreError, UsageError

LOG_FILE_BYTES = 64 * MIB  # small, so that the log rolls over a few times
_FLIGHT_BYTES = 480  # of log per flight; measured: 457
_HISTORY_BYTES = 300  # of history per flight; measured: 277
_OTHER_BYTES = 64 * MIB  # consume queues and key index of a node
_SPARK_PACKAGES = ("pyspark", "pyarrow", "matplotlib")
_SPARK_MIN = (4, 1)
_NO_SPARK = "or skip that step with --no-spark"


def missing_requirements(
    folder: pathlib.Path,
    rows: int,
    *,
    with_spark: bool,
    nodes: int = 2,
    with_zookeeper: bool = False,
    replace: bool = False,
) -> Iterator[str]:
    """Yield each missing requirement with its remedy; creates and starts nothing.

    With `replace` the stores of an earlier demo in `folder` are going to be removed.
    """
    try:
        find_flights()
    except UsageError as missing:
        yield str(missing)
    if with_spark:
        yield from _spark()
    if with_zookeeper:
        yield from _zookeeper()
    yield from _room(folder, rows, nodes, replace=replace)
    try:
        free_ports(PORTS_PER_NODE * nodes)
    except HastoreError as none:
        yield str(none)


def needed_bytes(rows: int, nodes: int = 2) -> int:
    """Return about how many bytes the stores and the history take.

    Each store has a log file that is allocated ahead.
    """
    files = rows * _FLIGHT_BYTES // LOG_FILE_BYTES + 2
    return nodes * (files * LOG_FILE_BYTES + _OTHER_BYTES) + rows * _HISTORY_BYTES


def _spark() -> Iterator[str]:
    lacking = [name for name in _SPARK_PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        remedy = f"pip install 'hastore[spark,demo]', {_NO_SPARK}"
        yield f"the Spark step needs {', '.join(lacking)}; {remedy}"
    elif (found := _numbers(version("pyspark"))) < _SPARK_MIN:
        wanted, have = (".".join(map(str, each)) for each in (_SPARK_MIN, found))
        remedy = f"pip install 'pyspark>={wanted}', {_NO_SPARK}"
        yield f"the Spark step needs pyspark {wanted} or later, {have} is installed; {remedy}"
    if "pyspark" in lacking:
        return
    try:
        require_java_of_spark()
    except UsageError as missing:
        yield f"{str(missing).rstrip('.')}, {_NO_SPARK}"


def _zookeeper() -> Iterator[str]:
    if importlib.util.find_spec("kazoo") is None:
        yield "the roles in ZooKeeper need kazoo; pip install 'hastore[zk]'"
    try:
        find_zookeeper()
    except UsageError as missing:
        yield str(missing)


def require_java_of_spark() -> None:
    """Raise UsageError without a Java that Spark accepts; needs pyspark."""
    from hastore.spark.session import find_java  # here: the command must start without pyspark

    find_java()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "4.1.0rc1" gives (4, 1)."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _room(folder: pathlib.Path, rows: int, nodes: int, *, replace: bool) -> Iterator[str]:
    place = folder
    while not place.exists() and not place.is_symlink():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield f"{place} is not a folder that this user may write to; give another --folder"
        return
    problem = folder_problem(folder, replace=replace)
    if problem is not None:
        yield problem
        return
    free = shutil.disk_usage(place).free + (replaced_bytes(folder) if replace else 0)
    needed = needed_bytes(rows, nodes)
    if free < needed:
        sizes = f"{human_size(free)} are free, the demo needs about {human_size(needed)}"
        yield f"{place}: {sizes}; give another --folder, or send less with --scale"
