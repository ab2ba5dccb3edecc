"""Read what a job has committed in a bucket, where a list of its objects may have more.

The functions need pyarrow, and no Spark.
"""

import pyarrow as pa
import pyarrow.dataset as pads

from hastore.errors import UsageError
from hastore.pipeline.object_target import DATA, ObjectTarget
from hastore.pipeline.places import Bucket


def committed_files(target: str) -> list[str]:
    """Return the URLs of the files that a job has committed in s3://BUCKET/FOLDER, sorted.

    They hold each exported message once, or the latest of each key of a compacted topic; other
    files in the target do not count. They stay for a day at least, also if they are merged or
    replaced meanwhile. [] if there are none yet. Raises UsageError, and StoreError if the bucket is
    not reached.
    """
    opened = ObjectTarget(target)
    opened.look()
    return _urls(opened)


def committed_dataset(target: str) -> pads.Dataset:
    """Return `committed_files` as a dataset of pyarrow, with `topic` and, of an export, `date`.

    Raises UsageError if nothing is exported yet, and what `committed_files` raises.
    """
    opened = ObjectTarget(target)
    opened.look()
    files = _urls(opened)
    if not files:
        raise UsageError(
            f"nothing was exported to {target} yet, or no key is left; run `hastore pipeline "
            "export` or `compact`"
        )
    place = Bucket(target)
    partitions = pa.schema([("topic", pa.string())])
    if opened.kind != "compact":
        partitions = partitions.append(pa.field("date", pa.date32()))
    with place.named():
        return pads.dataset(
            [file.removeprefix("s3://") for file in files],
            filesystem=place.filesystem,
            format="orc" if opened.kind == "export --format orc" else "parquet",
            partitioning=pads.partitioning(partitions, flavor="hive"),
            partition_base_dir=place.path(DATA),  # the target's own name is no partition
        )


def _urls(target: ObjectTarget) -> list[str]:
    return sorted(f"{target.path}/{name}" for name in target.files())
