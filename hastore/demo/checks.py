"""What `hastore demo` needs, looked at before its first step: nobody waits for a late refusal."""

import importlib.util
import os
import pathlib
import shutil
from collections.abc import Iterator
from importlib.metadata import version

from hastore.config.model import MIB
from hastore.config.values import human_size
from hastore.demo.data import find_flights
from hastore.demo.nodes import free_ports
from hastore.errors import HastoreError, UsageError
from hastore.spark.java_runtime import find_java

PORTS = 6  # three for each node
LOG_FILE_BYTES = 64 * MIB  # a few files, so that the log rolls over
_FLIGHT_BYTES = 480  # of log; 457 where it was measured
_OTHER_BYTES = 64 * MIB  # queues and index of a node
_SPARK_PACKAGES = ("pyspark", "pyarrow", "matplotlib")
_SPARK_MIN = (4, 1)
_NO_SPARK = "or leave the step out by --no-spark"


def what_is_missing(folder: pathlib.Path, rows: int, *, with_spark: bool) -> Iterator[str]:
    """Yield each thing that the demo lacks, with its remedy; makes and starts nothing."""
    try:
        find_flights()
    except UsageError as missing:
        yield str(missing)
    if with_spark:
        yield from _spark()
    yield from _room(folder, rows)
    try:
        free_ports(PORTS)
    except HastoreError as none:
        yield str(none)


def needed_bytes(rows: int) -> int:
    """Return about how much both stores take: a node makes the log's next file ahead of its use."""
    files = rows * _FLIGHT_BYTES // LOG_FILE_BYTES + 2
    return 2 * (files * LOG_FILE_BYTES + _OTHER_BYTES)


def _spark() -> Iterator[str]:
    lacking = [name for name in _SPARK_PACKAGES if importlib.util.find_spec(name) is None]
    if lacking:
        remedy = f"pip install 'hastore[spark,demo]', {_NO_SPARK}"
        yield f"the Spark step needs {', '.join(lacking)}; {remedy}"
    elif (found := _numbers(version("pyspark"))) < _SPARK_MIN:
        wanted, have = (".".join(map(str, each)) for each in (_SPARK_MIN, found))
        remedy = f"pip install 'pyspark>={wanted}', {_NO_SPARK}"
        yield f"the Spark step needs pyspark {wanted} or later, this is pyspark {have}; {remedy}"
    try:
        find_java()
    except UsageError as missing:
        yield f"{str(missing).rstrip('.')}, {_NO_SPARK}"


def _numbers(text: str) -> tuple[int, ...]:
    """Return a version's leading numbers."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _room(folder: pathlib.Path, rows: int) -> Iterator[str]:
    if (folder / "node1").exists():
        yield f"{folder} holds a demo already; give another --folder"
        return
    place = folder
    while not place.exists() and not place.is_symlink():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield f"{place} is no folder that this user may write; give another --folder"
        return
    free, needed = shutil.disk_usage(place).free, needed_bytes(rows)
    if free < needed:
        sizes = f"{human_size(free)} are free, the demo needs about {human_size(needed)}"
        yield f"{place}: {sizes}; give another --folder, or less by --scale"
