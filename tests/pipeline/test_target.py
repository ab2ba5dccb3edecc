"""The commits of a target: all of a run's files or none, wherever a run dies."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hastore.errors import StoreFullError, UsageError
from hastore.pipeline import target as module
from hastore.pipeline.target import StagedFile, Target, escape, local_path


class Crash(BaseException):
    """The process dies here."""


def crash(*_args, **_named):
    """Stand in for a function of which the process dies."""
    raise Crash


class Killer:
    """Lets the first `steps` changes of files pass, and dies before the next one.

    With a `failure` only the next one fails, and those after it pass.
    """

    CALLS = ((os, "rename"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync"), (shutil, "rmtree"))

    def __init__(self, monkeypatch, steps, failure=None):
        self.left = steps
        self.failure = failure
        self.died = False
        for owner, name in self.CALLS:
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))

    def wrap(self, function):
        def called(*args, **kwargs):
            if self.left <= 0 and not (self.died and self.failure):
                self.died = True
                raise self.failure or Crash
            self.left -= 1
            return function(*args, **kwargs)

        return called


def stage(target, name, text):
    path = target.staging / name
    path.write_text(text)
    staged = str(path.relative_to(target.path))
    return StagedFile(staged, f"topic=t/date=1970-01-01/{name}", 1, len(text))


def visible(path):
    found = {}
    for file in sorted(Path(path).rglob("*.parquet")):
        if not str(file.relative_to(path)).startswith("_"):
            found[file.name] = file.read_text()
    return found


def first_and_second(path):
    """Commit two files, then a third one that replaces the first."""
    with Target(path, "export") as target:
        if target.state.get("done", 0) < 1:
            files = [stage(target, "a.parquet", "A"), stage(target, "b.parquet", "B")]
            target.commit({"done": 1}, files)
        if target.state["done"] < 2:
            old = "topic=t/date=1970-01-01/a.parquet"
            target.commit({"done": 2}, [stage(target, "c.parquet", "C")], removed=[old])


def test_wherever_a_run_dies_the_next_one_completes_it(tmp_path, monkeypatch):
    steps = 0
    while True:
        path = tmp_path / str(steps)
        with monkeypatch.context() as patch:
            Killer(patch, steps)
            try:
                first_and_second(path)
                died = False
            except Crash:
                died = True
        with Target(path, "export") as target:
            done = target.state.get("done", 0)
            expected = [{}, {"a.parquet": "A", "b.parquet": "B"}]
            expected.append({"b.parquet": "B", "c.parquet": "C"})
            assert visible(path) == expected[done], f"after {steps} steps"
        first_and_second(path)
        assert visible(path) == expected[2]
        with Target(path, "export"):
            left = [file for file in (path / "_hastore" / "staging").rglob("*") if file.is_file()]
            assert left == []
        steps += 1
        if not died:
            break
    assert steps > 20


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_wherever_a_run_fails_the_next_one_completes_it(tmp_path, monkeypatch, failure):
    """Unlike a process that dies, a run that fails leaves the `with`, which removes files."""
    steps = 0
    died = True
    while died:
        path = tmp_path / str(steps)
        with monkeypatch.context() as patch:
            killer = Killer(patch, steps, failure)
            try:
                first_and_second(path)
                died = killer.died
            except (OSError, StoreFullError, KeyboardInterrupt):
                pass
        with Target(path, "export") as target:
            done = target.state.get("done", 0)
            expected = [{}, {"a.parquet": "A", "b.parquet": "B"}]
            expected.append({"b.parquet": "B", "c.parquet": "C"})
            assert visible(path) == expected[done], f"after {steps} steps"
        first_and_second(path)
        assert visible(path) == expected[2]
        steps += 1
    assert steps > 20


def test_a_commit_that_finds_no_room_frees_what_was_staged(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, pytest.raises(StoreFullError, match="no room is left"):
        with Target(tmp_path / "t", "export") as target:
            files = [stage(target, "a.parquet", "A")]
            patch.setattr(json, "dump", full)
            target.commit({"done": 1}, files)
    assert not target.staging.exists()


def test_a_second_run_is_refused_and_the_lock_dies_with_its_process(tmp_path):
    hold = (
        "import sys, time\nfrom hastore.pipeline.target import Target\n"
        "with Target(sys.argv[1], 'export'):\n print('locked', flush=True)\n time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "t")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(UsageError, match="another run writes into"),
            Target(tmp_path / "t", "export"),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with Target(tmp_path / "t", "export") as target:
        assert target.number == 0


def test_a_task_that_outlives_its_driver_does_not_stop_the_next_run(tmp_path, monkeypatch):
    with Target(tmp_path / "t", "export"):
        pass
    dead = tmp_path / "t" / "_hastore" / "staging" / "dead"
    dead.mkdir(parents=True)
    rmdir = os.rmdir

    def write_first(path, **where):
        if os.path.basename(path) == "dead":
            (dead / "part-late.parquet").write_text("x")
        rmdir(path, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", write_first)
        with Target(tmp_path / "t", "export") as target:
            target.commit({"done": 1}, [stage(target, "a.parquet", "A")])
    assert visible(tmp_path / "t") == {"a.parquet": "A"}
    with Target(tmp_path / "t", "export"):
        assert not dead.exists()


def test_a_target_of_another_job_or_with_other_files_is_refused(tmp_path):
    with Target(tmp_path / "t", "compact") as target:
        target.commit({}, [])
    with (
        pytest.raises(UsageError, match="a target of `hastore pipeline compact`"),
        Target(tmp_path / "t", "export"),
    ):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with (
        pytest.raises(UsageError, match="holds files of something else"),
        Target(tmp_path / "other", "export"),
    ):
        pass
    assert os.listdir(tmp_path / "other") == ["file"]


@pytest.mark.parametrize("text", ["gs://bucket/x", "hdfs://host/x", "abfss:x"])
def test_places_without_an_atomic_rename_are_refused(text):
    with pytest.raises(UsageError, match="not a folder of this machine"):
        local_path(text)
    assert local_path("file:///a/b") == local_path("file:/a/b") == Path("/a/b")
    assert local_path("FILE://localhost/a b%20") == Path("/a b%20")
    for relative in ("file://lake/flights", "file:flights"):  # /lake is not meant, nor ./file:
        with pytest.raises(UsageError, match="write the whole path, file:///FOLDER"):
            local_path(relative)


def test_files_of_others_are_not_taken_for_the_jobs_own(tmp_path):
    own = ["part-0123456789abcdef-0000.parquet", "part-0123456789abcdef-merged.parquet"]
    own.append(f"part-{'0' * 32}.parquet")
    with Target(tmp_path / "t", "export") as target:
        target.commit({}, [stage(target, name, "x") for name in own])
        folder = tmp_path / "t" / "topic=t" / "date=1970-01-01"
        for name in ("part-00000-6b1c0a52-c000.snappy.parquet", "mine.parquet", "_part.parquet"):
            (folder / name).write_text("x")
        assert sorted(map(os.path.basename, target.files())) == sorted(own)


def test_a_damaged_commit_is_named(tmp_path):
    with Target(tmp_path / "t", "export") as target:
        target.commit({}, [])
    commit = tmp_path / "t" / "_hastore" / "commits" / "00000001.json"
    json.loads(commit.read_text())
    commit.write_text("{")
    with pytest.raises(module.StoreBrokenError, match="00000001.json is damaged"):
        Target(tmp_path / "t", "export").__enter__()


def test_a_commit_with_a_name_that_is_too_long_says_how_to_go_on(tmp_path):
    """An older version has made such commits, and left its file staged."""
    folder = f"topic={'g' * 250}"
    with Target(tmp_path / "t", "export") as target:
        long = dataclasses.replace(stage(target, "a.parquet", "A"), final=f"{folder}/a.parquet")
        with pytest.raises(UsageError, match=f"the name of {folder} is too long"):
            target.commit({"done": 1}, [stage(target, "b.parquet", "B"), long])
    with pytest.raises(UsageError, match=f"remove {tmp_path}/t/{long.staged} to go on without"):
        Target(tmp_path / "t", "export").__enter__()
    (tmp_path / "t" / long.staged).unlink()
    with Target(tmp_path / "t", "export") as target:
        assert target.state == {"done": 1}
    assert visible(tmp_path / "t") == {"b.parquet": "B"}


def test_names_of_folders_are_escaped_as_spark_does():
    assert escape("%RETRY%g|a=b/中") == "%25RETRY%25g|a%3Db%2F中"
