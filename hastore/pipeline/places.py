"""Where the files of a target are: in a folder, or in a bucket of an object store (S3).

Tasks write files there, and a merge reads them. In a folder a file is written under a name that
readers skip, and renamed later. A bucket has no rename, so there a file is written under its final
name at once; it does not count until a commit names it (object_target.py).
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pyarrow.fs as pafs

from hastore.errors import StoreBrokenError, StoreError, UsageError

_S3 = re.compile(r"^s3a?://", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[\d*m|\u21b3")
_ATTEMPTS = 5  # of a request; the time between them grows


class Place(Protocol):
    """A place for files; names are relative to the target, with `/` between folders."""

    filesystem: Any  # for pyarrow; None for the local one

    def path(self, name: str) -> str:
        """Return a file's path in `filesystem`."""
        ...

    def begin(self, name: str) -> str:
        """Return the path of a file that is written now; its folder is there."""
        ...

    def finish(self, name: str) -> int:
        """Make a file that was written durable; return its size in bytes."""
        ...

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Turn the OSError of a place that is not reached into a StoreError that names it."""
        ...


class Folder:
    """A local or mounted folder."""

    filesystem = None

    def __init__(self, path: str) -> None:
        self._root = path

    def path(self, name: str) -> str:
        """Return a file's path."""
        return os.path.join(self._root, name)

    def begin(self, name: str) -> str:
        """Return a file's path, and make its folder."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def finish(self, name: str) -> int:
        """Sync a file; return its size in bytes."""
        handle = os.open(self.path(name), os.O_RDONLY)
        try:
            os.fsync(handle)
            return os.fstat(handle).st_size
        finally:
            os.close(handle)

    def named(self) -> contextlib.AbstractContextManager[None]:
        """Leave errors as they are: they have the path."""
        return contextlib.nullcontext()


class Bucket:
    """A place in a bucket: s3://BUCKET/FOLDER. Server, region and keys are those of AWS' tools."""

    def __init__(self, url: str) -> None:
        """Find the bucket's file system; this asks AWS for the region if nothing gives it.

        Raises UsageError for a URL without a bucket, StoreError if AWS does not answer.
        """
        self.url = "s3://" + _S3.sub("", url).rstrip("/")
        self.root = self.url.removeprefix("s3://")
        self.bucket = self.root.partition("/")[0]
        if not self.bucket or "//" in self.root or "\0" in self.root:
            raise UsageError(
                f"the target {url!r} names no place in a bucket; use s3://BUCKET/FOLDER"
            )
        self.endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        with self.named():
            self.filesystem = _filesystem(
                self.endpoint,
                os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
                self.bucket,
            )

    def path(self, name: str) -> str:
        """Return an object's path: bucket and key."""
        return f"{self.root}/{name}"

    begin = path  # a bucket has no folders

    def finish(self, name: str) -> int:
        """Return the size of an object in bytes: an object that was written is durable."""
        size: int = self.filesystem.get_file_info(self.path(name)).size
        return size

    def check_bucket(self) -> None:
        """Raise UsageError unless the bucket is there."""
        if self.filesystem.get_file_info(self.bucket).type == pafs.FileType.NotFound:
            raise UsageError(
                f"there is no bucket {self.bucket!r}, or the keys have no right to it; make it, or "
                "give another --target"
            )

    def listing(self, folder: str, *, recursive: bool = False) -> list[tuple[str, pafs.FileInfo]]:
        """Return what is in a folder, by name; "" is the whole place."""
        found = self.filesystem.get_file_info(
            pafs.FileSelector(
                self.path(folder) if folder else self.root,
                recursive=recursive,
                allow_not_found=True,
            )
        )
        return [(info.path[len(self.root) + 1 :], info) for info in found]

    def now_ms(self, name: str) -> int:
        """Return the server's time, by which it dates its objects: that of one written now."""
        with self.filesystem.open_output_stream(self.path(name)) as stream:
            stream.write(b"its time is the server's\n")
        written_ns: int = self.filesystem.get_file_info(self.path(name)).mtime_ns
        return written_ns // 1_000_000

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write an object at once: it is there whole, or not at all."""
        data = json.dumps(value, ensure_ascii=False, indent=1).encode()
        with self.filesystem.open_output_stream(self.path(name)) as stream:
            stream.write(data)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read what `write_json` wrote. Raises StoreBrokenError; OSError if it is not there."""
        with self.filesystem.open_input_stream(self.path(name)) as stream:
            data = stream.read()
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreBrokenError(
                f"{self.url}/{name} is damaged: {error}; restore it from a backup"
            ) from error
        if not isinstance(value, dict):
            raise StoreBrokenError(
                f"{self.url}/{name} is damaged: it holds no object; restore it from a backup"
            )
        return value

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turn an OSError into a StoreError that names the target and the remedy."""
        try:
            yield
        except OSError as failure:
            raise StoreError(
                f"{self.url}: {one_line(failure)}. Check the bucket's name, the server "
                "(AWS_ENDPOINT_URL), the region (AWS_REGION), the keys and their rights, and run "
                "the same command again"
            ) from failure


def is_bucket(target: str) -> bool:
    """Return whether a target is a place in a bucket."""
    return _S3.match(target) is not None


def place_of(target: str) -> Place:
    """Return the place of a target's files: `target` is a path, or s3://BUCKET/FOLDER.

    Raises what Bucket raises.
    """
    return Bucket(target) if is_bucket(target) else Folder(target)


@functools.cache
def _filesystem(endpoint: str | None, region: str | None, bucket: str) -> Any:
    """Return the file system of a bucket; pyarrow finds the keys as AWS' tools do."""
    if endpoint is None and region is None:
        region = pafs.resolve_s3_region(bucket)
    return pafs.S3FileSystem(
        endpoint_override=endpoint,
        region=region,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )


def one_line(error: Exception) -> str:
    """Return an error's text without line ends, and without the colours that deltalake adds."""
    return " ".join(_COLOURS.sub("", str(error)).split())
