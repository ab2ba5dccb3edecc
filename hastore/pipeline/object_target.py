"""A target in a bucket of S3, where nothing can be renamed: a commit is one new object.

    TARGET/_hastore/commits/00000001-RUN.json    a commit: the state after it, all files of it
    TARGET/_hastore/lists/00000001-RUN.json      files of many commits, which later ones refer to
    TARGET/_data/topic=T/date=D/part-....parquet the files, also those that no commit has yet
    TARGET/_hastore/changes/...                  files of `compact` that wait for their topic
    TARGET/_hastore/clock                        written before a commit, for the server's time

A commit names every file that is exported, and the positions up to which they were read. The last
commit is the one with the greatest number, of two the one with the greater run. So a reader that
takes the files from it sees each message once, whatever else lies in `_data`. Readers that list the
folder skip both names, and find nothing instead of files that are not committed (committed.py).

Two runs at once exclude each other by looking whether there is another commit before they write
theirs. If both write at the same moment, one of the two commits counts, and it is whole. Each looks
again after it, also whether later commits were made on top of its own: the other run ends with an
error, unless its commit was the earlier one by so much that it saw itself alone.

Files without a commit are removed when they are a day old: a run that died has left them. Files
and lists that a merge has replaced stay for a day, for readers that began before it. Days are of
the server's clock: runs may be on machines of which one has a wrong time.
"""

import contextlib
import posixpath
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pyarrow as pa

from hastore.errors import UsageError
from hastore.pipeline.places import Bucket, is_bucket
from hastore.pipeline.target import StagedFile, Target, another_run

DATA = "_data"
_FORMAT = 1
_COMMITS, _LISTS = "_hastore/commits", "_hastore/lists"
_CLOCK = "_hastore/clock"
CHANGES = "_hastore/changes"  # files of a job that are no data: other programs do not read them
_COMMIT_NAME = re.compile(r"([0-9]{8,})-([0-9a-f]{32})\.json")
_KEPT_COMMITS = 100  # for readers that have listed the commits a moment ago
_LISTED_FILES = 1000  # a commit has fewer of its own; the others are in lists
_DAY_MS = 24 * 3600 * 1000


class ObjectTarget:
    """The target of an export in a bucket; use it in a `with`."""

    flat = False
    in_place = True
    staging_name = DATA

    def __init__(self, url: str, kind: str | None = None) -> None:
        """Name the target: s3://BUCKET/FOLDER; `kind` is the job's, None only to read.

        Raises what Bucket raises.
        """
        self.kind = kind  # after `look`: of the last commit
        self._place = Bucket(url)
        self._fs = self._place.filesystem
        self.path = self._place.url
        self.run = uuid.uuid4().hex
        self.number = 0  # of the last commit; 0 without one
        self.state: dict[str, Any] = {}  # of the last commit
        self._began_ns = time.time_ns()
        self._name = ""  # of the last commit's object
        self._entry: dict[str, Any] = {}

    def __enter__(self) -> Self:
        """Find the last commit. Raises UsageError, StoreError, StoreBrokenError."""
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave files without a commit to a later run: a task may still write."""

    @property
    def root(self) -> str:
        """Return where the tasks write: s3://BUCKET/FOLDER."""
        return self.path

    def prepare(self, schema: pa.Schema) -> pa.Schema | None:
        """Return None: topic and date are the names of folders."""
        return None

    def look(self) -> dict[str, Any]:
        """Return the state of the last commit, and change nothing; {} without a commit.

        Raises UsageError for a bucket that is not there, or a place with other objects.
        """
        with self._place.named():
            self._check_place()
            self._name = max(self._commits(), key=_order, default="")
            if self._name:
                self._entry = self._place.read_json(f"{_COMMITS}/{self._name}")
                self._check(self._entry)
                self.number, self.state = _order(self._name)[0], self._entry["state"]
        return dict(self.state)

    def commit(
        self,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        *,
        removed: Sequence[str] = (),
    ) -> None:
        """Make files visible and remove others, by one new object.

        When this returns, the commit is durable. `state` is what the next run finds as `state`.
        Raises StoreInUseError if another run has committed meanwhile, or at the same moment and its
        commit counts, and StoreError; then the commit may have taken place.
        """
        number = self.number + 1
        name = f"{number:08}-{self.run}.json"
        cleaned_ms = self._entry.get("cleaned_ms", 0)
        with self._place.named():
            now_ms = self._place.now_ms(_CLOCK)
            # Versions that took a machine's own time may have left one of the future.
            cleans = not 0 <= now_ms - cleaned_ms < _DAY_MS
            there = self._commits()
            if max(there, key=_order, default="") != self._name:
                raise another_run(self.path)
            hidden = set(self._entry.get("hidden", ())) - set(removed)
            hidden.update(one.final for one in files if not one.final.startswith(f"{DATA}/"))
            lists, own = self._listed(
                name,
                [one for one in files if one.final not in hidden],
                set(removed).difference(self._entry.get("hidden", ())),
            )
            gone = [*removed, *(one for one in self._entry.get("lists", ()) if one not in lists)]
            entry = {
                "format": _FORMAT,
                "job": self.kind,
                "number": number,
                "before": self._name,  # the commit that this one was made on top of
                "state": dict(state),
                "lists": lists,
                "files": own,
                "hidden": sorted(hidden),
                "replaced": self._entry.get("replaced", {}) | dict.fromkeys(gone, now_ms),
                "cleaned_ms": now_ms if cleans else cleaned_ms,
            }
            if cleans:
                entry["replaced"] = {
                    one: at for one, at in entry["replaced"].items() if now_ms - at < _DAY_MS
                }
            self._place.write_json(f"{_COMMITS}/{name}", entry)  # the commit
        self.check_counts(name)
        self.number, self.state, self._name, self._entry = number, dict(state), name, entry
        with contextlib.suppress(OSError):  # it is in the way of nobody; a later run tries again
            for old in sorted(there, key=_order)[: -_KEPT_COMMITS + 1]:
                self._fs.delete_file(self._place.path(f"{_COMMITS}/{old}"))
            if cleans:
                self._clean()

    def check_counts(self, name: str | None = None) -> None:
        """Raise StoreInUseError unless the last commit is this one, or was made on top of it.

        Another run may have made one at the same moment, or several while this run stood still
        between its look and its commit. `name` is by default that of the last one of this run.
        """
        with self._place.named():
            if not self._counts(name or self._name):
                raise another_run(self.path)

    def files(self) -> dict[str, int]:
        """Return the files of the last commit and their sizes in bytes; the names are relative."""
        with self._place.named():
            return {file["name"]: file["bytes"] for file in self._all_files()}

    # -- inside ------------------------------------------------------------------------------------

    def _check_place(self) -> None:
        """Raise UsageError unless the bucket is there and the place is free, or a target."""
        self._place.check_bucket()
        ours = {_COMMITS.partition("/")[0], DATA}
        if not {name for name, _ in self._place.listing("")} <= ours:
            raise UsageError(
                f"the target {self.path} holds objects of something else; name a new or empty place"
            )

    def _check(self, entry: Mapping[str, Any]) -> None:
        if entry.get("format") != _FORMAT:
            raise UsageError(f"a newer version of hastore wrote {self.path}; use that one")
        if self.kind not in (None, entry.get("job")):
            raise UsageError(
                f"{self.path} is a target of `hastore pipeline {entry.get('job')}`; name another "
                "place"
            )
        self.kind = entry.get("job")

    def _counts(self, name: str) -> bool:
        number, there = _order(name)[0], self._commits()
        last = max(there, key=_order, default=name)
        while _order(last)[0] > number:
            before = self._place.read_json(f"{_COMMITS}/{last}").get("before")
            if before not in there:  # an older version does not say it, or it was removed since
                same = [one for one in there if _order(one)[0] == number]
                return max(same, key=_order, default=name) == name
            last = before
        return last == name

    def _commits(self) -> list[str]:
        names = [posixpath.basename(name) for name, _ in self._place.listing(_COMMITS)]
        return [name for name in names if _COMMIT_NAME.fullmatch(name)]

    def _listed(
        self, commit: str, files: Sequence[StagedFile], removed: set[str]
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the lists of a commit, which are written here, and the files of its own."""
        new = [{"name": one.final, "rows": one.rows, "bytes": one.size} for one in files]
        lists, own = list(self._entry.get("lists", ())), list(self._entry.get("files", ()))
        if not removed <= {file["name"] for file in own}:
            lists, own = [], self._all_files()  # lists never change: all are made anew
        own = [file for file in own if file["name"] not in removed] + new
        if len(own) >= _LISTED_FILES:
            lists.append(f"{_LISTS}/{commit}")
            self._place.write_json(lists[-1], {"files": own})
            own = []
        return lists, own

    def _all_files(self) -> list[dict[str, Any]]:
        files = [
            file
            for one in self._entry.get("lists", ())
            for file in self._place.read_json(one)["files"]
        ]
        return files + list(self._entry.get("files", ()))

    def _clean(self) -> None:
        """Remove objects that neither this commit nor readers need.

        They were a day old when the run began, so none is of a task that waits for its commit.
        """
        kept = {file["name"] for file in self._all_files()}
        kept.update(self._entry["lists"], self._entry["hidden"], self._entry["replaced"])
        # The server's time made the times of the objects; this machine's may be wrong.
        now_ns = self._fs.get_file_info(self._place.path(f"{_COMMITS}/{self._name}")).mtime_ns
        limit_ns = min(now_ns, self._began_ns) - _DAY_MS * 1_000_000
        for folder in (DATA, _LISTS, CHANGES):
            for name, info in self._place.listing(folder, recursive=True):
                if info.is_file and info.mtime_ns <= limit_ns and name not in kept:
                    self._fs.delete_file(info.path)


def target_of(path: str, kind: str) -> Target | ObjectTarget:
    """Return a folder or a place in a bucket as the target of a job; `kind` is the job's."""
    return ObjectTarget(path, kind) if is_bucket(path) else Target(path, kind)


def _order(name: str) -> tuple[int, str]:
    """Return what orders the names of commits."""
    number, _, run = name.partition("-")
    return int(number), run
