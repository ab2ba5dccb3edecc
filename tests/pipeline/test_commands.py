"""`hastore pipeline` without Spark: its help, and what it says when a requirement is missing."""

import subprocess
import sys

import pytest

from hastore.cli.pipeline import screen
from hastore.cli.pipeline.common import counted
from hastore.errors import UsageError
from hastore.store.fs.filesystem import REAL
from hastore.store.rebuild.settings import find_sizes

HELP_WITHOUT = """
import sys
for name in ("pyspark", "pyarrow"):
    sys.modules[name] = None
from hastore.cli.main import cli
from hastore.cli.common import run_code
for arguments in (["--help"], ["pipeline", "--help"]):
    assert run_code(cli, "hastore", arguments) == 0
import hastore.cli.pipeline.common as common
try:
    common.check_spark()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_help_works_without_spark_and_a_job_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""
    last = done.stdout.splitlines()[-1]
    assert (
        last.startswith("UsageError this job needs py") and 'pip install "hastore[spark]"' in last
    )


def test_a_summary_of_one_file_says_so():
    assert [counted(n, "file") for n in (0, 1, 1500)] == ["0 files", "1 file", "1,500 files"]


def test_the_size_of_index_files_that_tells_nothing_is_refused_with_the_options_to_give(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "20261122000000000").write_bytes(b"\0" * 100)
    with pytest.raises(UsageError, match="--index-slots and --index-entries"):
        find_sizes(REAL, str(tmp_path))
    assert find_sizes(REAL, str(tmp_path), slots=5, entries=7).entries == 7


def test_a_progress_line_has_a_count_only_if_the_step_counts(monkeypatch, capsys):
    monkeypatch.setattr(screen, "LINE_EVERY_S", 0.0)
    with screen.Screen() as shown:
        shown.begin("start Spark", None, "")
        shown.begin("export", 9, "tasks")
        shown.advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["start Spark", "export: 0 of 9 tasks", "export: 5 of 9 tasks"]
