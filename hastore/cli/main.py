"""The command `hastore`, and its group `hastore pipeline`.

A command is imported when it is used, so that each starts fast, and only a job needs pyspark.
"""

from typing import NoReturn

import click

import hastore
from hastore.cli.common import JsonErrors, LazyGroup, run

_COMMANDS = {  # in the order in which a new user needs them
    "dev": "hastore.testing.dev:dev_command",
    "init": "hastore.cli.init:init_command",
    "status": "hastore.cli.status:status_command",
    "top": "hastore.cli.top:top_command",
    "produce": "hastore.cli.produce:produce_command",
    "consume": "hastore.cli.read:consume_command",
    "query": "hastore.cli.read:query_command",
    "topics": "hastore.cli.topics:topics_group",
    "promote": "hastore.cli.flip:promote_command",
    "demote": "hastore.cli.flip:demote_command",
    "flip": "hastore.cli.planned_flip:flip_command",
    "can-stop": "hastore.cli.can_stop:can_stop_command",
    "node": "hastore.cli.node:node_group",
    "dledger": "hastore.cli.dledger:dledger_group",
    "rescued": "hastore.cli.rescued:rescued_group",
    "backup": "hastore.cli.backup:backup_group",
    "restore": "hastore.cli.backup:restore_command",
    "keys": "hastore.cli.keys:keys_group",
    "serve": "hastore.cli.nodes:serve_command",
    "log": "hastore.cli.log:log_group",
    "groups": "hastore.cli.groups:groups_group",
    "positions": "hastore.cli.positions:positions_group",
    "pipeline": "hastore.cli.main:pipeline_group",
    "perf": "hastore.cli.perf:perf_group",
    "doctor": "hastore.cli.doctor:doctor_command",
    "check": "hastore.cli.check:check_command",
    "completion": "hastore.cli.completion:completion_command",
    "demo": "hastore.cli.demo:demo_command",
}
_JOBS = {
    "export": "hastore.cli.pipeline.export:export_command",
    "compact": "hastore.cli.pipeline.compact:compact_command",
    "audit": "hastore.cli.pipeline.audit:audit_command",
    "index": "hastore.cli.pipeline.index:index_command",
    "stats": "hastore.cli.pipeline.stats:stats_command",
    "run": "hastore.cli.pipeline.run:run_command",
}


@click.group(
    "hastore",
    cls=LazyGroup,
    places=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(hastore.__version__, prog_name="hastore")
def cli() -> None:
    """A replicated, append-only commit log: a master and its slaves, or an elected leader."""


@click.group("pipeline", cls=JsonErrors, places=_JOBS, short_help="Run jobs over the log on Spark.")
def pipeline_group() -> None:
    """Run jobs over the log of a store or of running nodes, on Spark.

    They need: pip install "hastore[spark]", and Java 17 or later. Ctrl-C stops a job cleanly; run
    the same command again to continue it.
    """


def main() -> NoReturn:
    """Run `hastore`."""
    run(cli, "hastore")


if __name__ == "__main__":
    main()
