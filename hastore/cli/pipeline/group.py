"""The group `hastore pipeline`. It works without pyspark, which only a job itself needs."""

import click

from hastore.cli.common import LazyGroup

_JOBS = {
    "export": "hastore.cli.pipeline.export:export_command",
    "compact": "hastore.cli.pipeline.compact:compact_command",
    "audit": "hastore.cli.pipeline.audit:audit_command",
    "index": "hastore.cli.pipeline.index:index_command",
    "stats": "hastore.cli.pipeline.stats:stats_command",
}


@click.group("pipeline", cls=LazyGroup, places=_JOBS, short_help="Run jobs over the log on Spark.")
def pipeline_group() -> None:
    """Run jobs over the log of a store or of running nodes, on Spark.

    They need: pip install "hastore[spark]", and Java 17 or later. Ctrl-C stops a job cleanly; run
    the same command again to continue it.
    """
