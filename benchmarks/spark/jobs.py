"""The jobs beside their peers: audit and cmp, index and RocketMQ's recovery, export and Spark."""

import contextlib
import pathlib
import shutil
import subprocess
import time
from typing import Any

from benchmarks.common import Target, at_least, figure, say
from benchmarks.rocketmq import RocketStores
from benchmarks.side_by_side import start_peer
from benchmarks.spark.data import FILE_BYTES, QUEUES, TOPIC, Messages, write_parquet, write_store
from hastore.pipeline.audit.job import audit as run_audit
from hastore.pipeline.export import ExportOptions
from hastore.pipeline.export import export as run_export
from hastore.pipeline.index import IndexOptions, run_index
from hastore.pipeline.where import Where

DIGESTS = {"xxh3-128": at_least(4.0), "sha256": at_least(1.0)}
INDEX_RATE = Target(1_500_000.0, "at least", "figure")
MB = 1e6
Figures = list[dict[str, Any]]


def audit(
    spark: Any, folder: pathlib.Path, messages: Messages, repeats: int, _missing: str | None
) -> Figures:
    """Compare a store with its copy, and the same files by `cmp`; both from the page cache."""
    one, other = folder / "one", folder / "other"
    end = write_store(one, messages)
    shutil.copytree(one, other)
    names = sorted(file.name for file in (one / "commitlog").iterdir())
    size = sum((one / "commitlog" / name).stat().st_size for name in names)
    samples: dict[str, list[float]] = {}

    def compare() -> float:
        began = time.perf_counter()
        for name in names:
            files = [str(store / "commitlog" / name) for store in (one, other)]
            subprocess.run(["cmp", *files], check=True)
        return size / MB / (time.perf_counter() - began)

    def digest(algorithm: str) -> float:
        began = time.perf_counter()
        summary = run_audit(spark, str(one), str(other), algorithm=algorithm)
        seconds = time.perf_counter() - began
        if not summary.equal or not summary.complete or summary.end != end:
            raise RuntimeError(f"the audit of equal stores returned {summary}")
        return end / MB / seconds

    for number in range(-1, repeats):
        taken = {name: digest(name) for name in DIGESTS} | {"cmp": compare()}
        for name, rate in taken.items():
            if number >= 0:
                samples.setdefault(name, []).append(rate)
        say(
            f"audit {number + 1}/{repeats}: " + ", ".join(f"{n} {r:,.0f}" for n, r in taken.items())
        )
    return [
        figure(f"audit, {name}", "MB/s a side", samples[name], "cmp of the same files",
               samples["cmp"], target)
        for name, target in DIGESTS.items()
    ]  # fmt: skip


def index(
    spark: Any, folder: pathlib.Path, messages: Messages, repeats: int, _missing: str | None
) -> Figures:
    """Build a store's consume queues from its log, and let RocketMQ do so when it opens it."""
    store, built = folder / "store", folder / "built"
    write_store(store, messages)
    ours: list[float] = []
    theirs: list[float] = []

    def rebuild() -> float:
        shutil.rmtree(built, ignore_errors=True)
        began = time.perf_counter()
        summary = run_index(spark, IndexOptions(str(store), output=str(built), index=False))
        seconds = time.perf_counter() - began
        if summary.units != messages.count:
            raise RuntimeError(f"the index has {summary.units} units of {messages.count}")
        return messages.count / seconds

    with contextlib.ExitStack() as stack:
        rocket = start_peer(
            stack,
            "RocketMQ",
            lambda: RocketStores(
                folder, mappedFileSizeCommitLog=FILE_BYTES, messageIndexEnable=False
            ),
        )
        if rocket is not None:
            shutil.copytree(store / "commitlog", rocket.root("master") / "commitlog")
        for number in range(-1, repeats):
            rate = rebuild()
            peer = recover(rocket, messages.count) if rocket is not None else 0.0
            if number < 0 and rocket is not None:
                check_queues(built, rocket.root("master"), messages.count)
            if number >= 0:
                ours.append(rate)
                theirs += [peer] if rocket is not None else []
            say(f"index {number + 1}/{repeats}: {rate:,.0f} and {peer:,.0f} msg/s")
    name, peer_name = "consume queues from the log", "RocketMQ's own recovery, one process"
    one = figure(name, "msg/s", ours, peer_name, theirs, at_least(3.0))
    return [one, figure(name, "msg/s", ours, target=INDEX_RATE)]


def recover(rocket: RocketStores, count: int) -> float:
    """Let RocketMQ open a store that has only its log; return the messages per second."""
    root = rocket.root("master")
    for entry in root.iterdir():
        if entry.name != "commitlog":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    began = time.perf_counter()
    rocket.open("master")
    status = rocket.jvms["master"].call("store.status")
    while status["behind"]:
        time.sleep(0.01)
        status = rocket.jvms["master"].call("store.status")
    seconds = time.perf_counter() - began
    rocket.jvms["master"].call("store.close")
    return count / seconds


def check_queues(ours: pathlib.Path, theirs: pathlib.Path, count: int) -> None:
    """Raise RuntimeError if the two sides built other queues."""
    for queue in range(QUEUES):
        folder = f"consumequeue/{TOPIC}/{queue}"
        names = sorted(file.name for file in (ours / folder).iterdir())
        left = len(range(queue, count, QUEUES)) * 20
        for name in names:
            pair = [(root / folder / name).read_bytes()[:left] for root in (ours, theirs)]
            if not pair[0] or pair[0] != pair[1]:
                raise RuntimeError(f"{folder}/{name} is not what RocketMQ builds")
            left -= len(pair[0])
        if left > 0:
            raise RuntimeError(f"{folder} lacks {left} bytes")


def export(
    spark: Any, folder: pathlib.Path, messages: Messages, repeats: int, _missing: str | None
) -> Figures:
    """Export a topic to Parquet, and let Spark copy the same rows from Parquet to Parquet."""
    store, parquet = folder / "store", folder / "parquet"
    write_store(store, messages)
    write_parquet(spark, store, parquet)
    ours: list[float] = []
    theirs: list[float] = []
    where = Where(path=str(store), topics=(TOPIC,))

    def exported() -> float:
        target = folder / "exported"
        shutil.rmtree(target, ignore_errors=True)
        began = time.perf_counter()
        summary = run_export(spark, where, str(target), ExportOptions())
        seconds = time.perf_counter() - began
        if summary.messages != messages.count:
            raise RuntimeError(f"{summary.messages} of {messages.count} messages were exported")
        return messages.count / seconds

    def copied() -> float:
        began = time.perf_counter()
        rows = spark.read.parquet(str(parquet))
        rows.write.mode("overwrite").parquet(str(folder / "copied"))
        return messages.count / (time.perf_counter() - began)

    for number in range(-1, repeats):
        pair = exported(), copied()
        if number >= 0:
            ours.append(pair[0])
            theirs.append(pair[1])
        say(f"export {number + 1}/{repeats}: {pair[0]:,.0f} and {pair[1]:,.0f} rows/s")
    name, peer = f"export to Parquet, {messages.body_bytes} B", "Spark, from Parquet to Parquet"
    return [figure(name, "rows/s", ours, peer, theirs, at_least(0.6))]
