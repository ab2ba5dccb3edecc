"""The folder of a demo's stores: one for all demos of a checkout, and nothing else is removed."""

import os
import pathlib
import subprocess
import sys

import pytest

from hastore.demo import nodes as module
from hastore.demo.nodes import (
    LOCK,
    MARKER,
    default_folder,
    demo_folder,
    folder_problem,
    replaced_bytes,
)
from hastore.demo.requirements import missing_requirements
from hastore.errors import UsageError
from hastore.fs.filesystem import REAL
from tests.process.harness import ROOT


def fill(folder):
    """Leave in the folder what a demo leaves; return the paths."""
    (folder / "node1" / "commitlog").mkdir(parents=True)
    (folder / "node1" / "lock").touch()
    (folder / "node1" / "commitlog" / "0").write_bytes(bytes(100_000))
    (folder / "node1.yaml").write_text("node: 1\n")
    (folder / "link").symlink_to(folder.parent)


def test_the_next_demo_replaces_the_stores_of_the_one_before(tmp_path):
    folder = tmp_path / "data" / "demo"
    with demo_folder(folder, replace=True):
        assert sorted(os.listdir(folder)) == [MARKER, LOCK]
        assert not folder.stat().st_mode & 0o077, "other users can read the demo's logs"
        fill(folder)
    assert folder_problem(folder, replace=True) is None
    assert replaced_bytes(folder) >= 100_000
    with demo_folder(folder, replace=True):
        assert sorted(os.listdir(folder)) == [MARKER, LOCK]
    assert folder.parent.is_dir(), "the target of a link in it stays"


def test_a_named_folder_is_never_replaced(tmp_path):
    with demo_folder(tmp_path / "mine", replace=False):
        fill(tmp_path / "mine")
    assert "already contains a demo" in folder_problem(tmp_path / "mine", replace=False)
    with pytest.raises(UsageError, match="already contains a demo; .* --folder"):
        with demo_folder(tmp_path / "mine", replace=False):
            pass
    assert (tmp_path / "mine" / "node1.yaml").exists()


def test_a_folder_that_no_demo_made_is_kept(tmp_path):
    (tmp_path / "letters").touch()
    assert f"no {MARKER}" in folder_problem(tmp_path, replace=True)
    with pytest.raises(UsageError, match="is not empty, and no demo made it .* --folder"):
        with demo_folder(tmp_path, replace=True):
            pass
    # A demo that was told to use it does not make it a demo's.
    with demo_folder(tmp_path, replace=False):
        (tmp_path / "node1").mkdir()
    assert "no demo made it" in folder_problem(tmp_path, replace=True)
    assert sorted(os.listdir(tmp_path)) == ["letters", "node1"]


def test_two_demos_do_not_share_a_folder(tmp_path):
    with demo_folder(tmp_path / "demo", replace=True):
        fill(tmp_path / "demo")
        for replace in (False, True):
            with pytest.raises(UsageError, match="another demo is using .* --folder"):
                with demo_folder(tmp_path / "demo", replace=replace):
                    pass
        (told,) = missing_requirements(tmp_path / "demo", 100, with_spark=False, replace=True)
        assert "another demo is using" in told
        assert (tmp_path / "demo" / "node1.yaml").exists()
    assert folder_problem(tmp_path / "demo", replace=True) is None


def test_a_store_in_use_is_not_removed(tmp_path):
    with demo_folder(tmp_path / "demo", replace=True):
        fill(tmp_path / "demo")
    lock = REAL.lock(str(tmp_path / "demo" / "node1" / "lock"))
    with pytest.raises(UsageError, match="a node is running on .*node1, of an earlier demo"):
        with demo_folder(tmp_path / "demo", replace=True):
            pass
    lock.close()
    assert (tmp_path / "demo" / "node1" / "commitlog").is_dir()


def test_an_installed_package_uses_the_cache(tmp_path, monkeypatch):
    assert default_folder() == ROOT / "data" / "demo"
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "hastore" / "demo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/reader")
    assert default_folder() == pathlib.Path("/home/reader/.cache/hastore/demo")


def test_the_room_of_the_stores_that_are_replaced_counts_as_free(tmp_path, monkeypatch):
    from tests.demo.test_requirements import Usage

    with demo_folder(tmp_path / "demo", replace=True):
        fill(tmp_path / "demo")
    usage = Usage(9, 9, module.replaced_bytes(tmp_path / "demo"))
    monkeypatch.setattr("hastore.demo.requirements.shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr(
        "hastore.demo.requirements.needed_bytes", lambda rows, nodes: usage.free + 1
    )
    assert not list(missing_requirements(tmp_path / "demo", 9, with_spark=False, replace=True))
    assert list(missing_requirements(tmp_path / "new", 9, with_spark=False))


def test_the_command_without_spark_needs_no_package_of_spark():
    """SPARK=0 installs neither pyspark nor pyarrow."""
    without = "import sys; sys.modules.update(dict.fromkeys(['pyspark', 'pyarrow']))"
    done = subprocess.run(
        [sys.executable, "-c", f"{without}; from hastore.cli.main import cli; cli(['demo', '-h'])"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0 and "--no-spark" in done.stdout, done.stderr
