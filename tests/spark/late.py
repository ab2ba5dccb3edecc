"""Run a query to its end on a machine that may be loaded, where Spark gives up slow processes."""

from pyspark.errors import StreamingQueryException


def is_late_process(error):
    """Whether Spark gave up the process of a stream's source, which has 10 s to start."""
    return "failed to connect back" in str(error)


def finish(start, seconds):
    """Call `start`, which starts a query, until one has ended without that error; return it.

    Where the query begins must be explicit: the error may come before it has a position.
    """
    while True:
        query = start()
        try:
            assert query.awaitTermination(seconds)
            return query
        except StreamingQueryException as failed:
            if not is_late_process(failed):
                raise
