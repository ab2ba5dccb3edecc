"""The figures of the Spark side, each beside a peer in the same session.

    python -m benchmarks.spark [--repeats 5] [--scale 1] [--dir FOLDER] [--only PART] [--write-docs]

Both sides run in turn in one session with `local[2]`, after a round to warm up. Bodies are random
bytes. The folder should be on a disk, whose page cache holds the data: the pages of /dev/shm are
slower to map. `--only reads` runs one part. Each part writes results/spark_PART.json; all together
are drawn in docs/img/benchmarks-spark.png, and written into docs/benchmarks.md by --write-docs.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import pyspark

from benchmarks import plot
from benchmarks.common import ROOT, save, say, scratch
from benchmarks.maven import peer_version
from benchmarks.report import DOCUMENT, Document, between, read, section, show
from benchmarks.spark import jobs, latency, reads
from benchmarks.spark.data import QUEUES, Messages
from benchmarks.spark.session import MASTER, MEMORY, start
from hastore.spark.session import end_session

COUNTS = {200: 2_000_000, 1024: 700_000}  # messages, by the size of their bodies
AUDIT_TIMES = 4  # so many times the messages: else the start of Spark's tasks is half of its time
MARKS = ("<!-- spark figures -->", "<!-- end of spark figures -->")
IMAGE = ROOT / "docs" / "img" / "benchmarks-spark.png"


def run(given: argparse.Namespace, parts: list[str]) -> None:
    """Run parts; each writes its results."""
    spark, missing = start()
    settings = {
        "master": MASTER, "memory": MEMORY, "messages": COUNTS, "audit_times": AUDIT_TIMES,
        "scale": given.scale,
        "queues": QUEUES, "spark": pyspark.__version__, "kafka": peer_version("kafka"),
        "connector": peer_version("sparkkafka"), "rocketmq": peer_version("rocketmq"),
    }  # fmt: skip
    try:
        for part in parts:
            figures: list[dict[str, Any]] = []
            for size, measure in MEASURES[part].items():
                times, room = (AUDIT_TIMES, 2) if part == "audit" else (1, 8)
                messages = Messages(max(QUEUES, int(COUNTS[size] * times * given.scale)), size)
                began = time.monotonic()
                with scratch(given.dir, room * messages.log_bytes()) as folder:
                    figures += measure(spark, folder, messages, given.repeats, missing)
                say(f"spark: {part}, {size} B: {time.monotonic() - began:.0f} s")
            save(f"spark_{part}", figures, settings)
    finally:
        end_session(spark)


Measure = Callable[..., list[dict[str, Any]]]
MEASURES: dict[str, dict[int, Measure]] = {
    "reads": {200: reads.measure, 1024: reads.measure},
    "latency": {200: latency.measure},
    "audit": {1024: jobs.audit},
    "index": {200: jobs.index},
    "export": {1024: jobs.export},
}
PARTS = tuple(MEASURES)


def documents() -> list[Document]:
    """Return the latest results of all parts."""
    return [found for part in PARTS if (found := read(f"spark_{part}")) is not None]


def write_docs(found: list[Document]) -> None:
    """Write figures into docs/benchmarks.md."""
    image = f"\n![every ratio beside its target]({IMAGE.relative_to(DOCUMENT.parent)})\n"
    between(DOCUMENT, MARKS, image + "".join(map(section, found)) + "\n")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all amounts")
    parser.add_argument("--dir", help="folder for the stores (default: the temporary folder)")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--no-run", action="store_true", help="only show the latest results")
    given = parser.parse_args()
    parts = [given.only] if given.only else list(PARTS)
    if not given.no_run:
        run(given, parts)
    found = documents()
    for document in found:
        if document["benchmark"].removeprefix("spark_") in parts:
            show(document)
    if found:
        machine = found[0]["machine"]
        title = f"hastore on Spark beside its peers, {machine['date']}, {machine['cores']} cores"
        with_target = [one for document in found for one in document["figures"] if "target" in one]
        plot.draw(with_target, title, IMAGE)
    if given.write_docs:
        write_docs(found)


if __name__ == "__main__":
    main()
