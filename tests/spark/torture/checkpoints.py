"""What a checkpoint folder of a streaming query says."""


def committed_batches(checkpoint):
    """Return how many batches were committed; Spark keeps the files of the last 100 only."""
    names = [path.name for path in (checkpoint / "commits").glob("[0-9]*")]
    return max((int(name) + 1 for name in names if name.isdigit()), default=0)
