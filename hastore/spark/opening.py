"""Open what a query names: for batch reads and streams, on the driver and in tasks."""

from typing import TYPE_CHECKING

from hastore.errors import UsageError
from hastore.spark.worker import zone_of_task

if TYPE_CHECKING:
    from hastore.spark.options.source_options import SourceOptions
    from hastore.spark.read.backend import Backend, Head


def check_zone(options: "SourceOptions") -> None:
    """Raise UsageError if the plan read a time in another zone than the session now has."""
    assumed, current = options.assumed_zone, zone_of_task()
    if assumed is not None and current not in (None, assumed):
        raise UsageError(
            f"a timestamp without a time zone was read in {assumed}, but the session's zone is "
            f"now {current}: call hastore.spark.register(spark) again, or write the zone"
        )


def open_backend(options: "SourceOptions") -> "Backend":
    """Return what reads ranges."""
    if options.path is not None:
        from hastore.spark.read.stores import PathBackend

        return PathBackend(options.path, options.limits.fail_on_data_loss)
    from hastore.spark.read.servers import ServerBackend

    return ServerBackend(options.bootstrap, options.limits.fail_on_data_loss, options.security)


def open_head(options: "SourceOptions") -> "Head":
    """Return what follows the ends of queues."""
    if options.path is not None:
        from hastore.spark.read.stores import PathHead

        return PathHead(options.path)
    from hastore.spark.read.servers import ServerHead

    return ServerHead(options.bootstrap, options.security)
