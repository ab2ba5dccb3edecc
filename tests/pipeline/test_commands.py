"""`hastore pipeline` without Spark: its help, and what it says when a requirement is missing."""

import json
import logging
import subprocess
import sys

import pytest

from hastore.cli.common import counted, run_code, size_from_mib
from hastore.cli.main import pipeline_group
from hastore.cli.pipeline import common
from hastore.errors import StoreFullError, UnreachableError, UsageError
from hastore.fs.filesystem import REAL
from hastore.store.rebuild.layout import find_sizes
from tests.spark.stores import numbered, write_store

HELP_WITHOUT = """
import sys
for name in ("pyspark", "pyarrow"):
    sys.modules[name] = None
from hastore.cli.main import cli
from hastore.cli.common import counted, run_code
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


def test_a_size_has_a_unit_or_is_in_mib():
    given = ("1", "256", "256MiB", "1GiB", "1_024 KiB", "1073741824B")
    found = [size_from_mib(text) / (1 << 20) for text in given]
    assert found == [1, 256, 256, 1024, 1, 1024]


def test_a_progress_line_has_a_count_only_if_the_step_counts(monkeypatch, capsys):
    monkeypatch.setattr(common, "LINE_EVERY_S", 0.0)
    with common.Screen() as shown:
        shown.begin("start Spark", None, "")
        shown.begin("export", 9, "tasks")
        shown.advance(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["start Spark", "export: 0 of 9 tasks", "export: 5 of 9 tasks"]


WRONG = (
    ("stats --path {store} --since yesterday", "error: --since: Expected milliseconds"),
    ("stats --path {store} --since 2 --until 1", "error: --since (2) is beyond --until (1)"),
    ("stats --servers x:y:z", "error: --servers: expected tcp://HOST:PORT"),
    ("stats --path {store} --topic t --exclude-internal", "--exclude-internal is for --pattern"),
    ("stats --path {store} --pattern a)(b --exclude-internal", "--pattern is not a regular expr"),
    ("export --path {store} --topic , --target {none}", "error: name a topic: --topic is ','"),
    ("export --path {store} --target {none} --file-size 12MB", "'12MB' is no size; write one"),
    ("export --path {store} --target {none} --file-size 64KiB", "range: 1MiB to 1024TiB"),
    ("stats --path {store} --topic none", "there is no topic 'none'"),
    ("stats --path {store} --sample 5", "--sample needs --servers"),
    ("stats --path {store} --lag-only", "--lag-only needs --servers"),
    ("stats --servers 127.0.0.1:1 --lag-only --sample inf", "--sample has no end within a year"),
    ("stats --servers 127.0.0.1:1 --lag-only --parquet {none}", "leave it out, or --lag-only"),
    ("stats --path {none}", "there is no directory {none}"),
    ("stats --path {empty}", "{empty} is no store"),
    ("stats --path {store} --parquet {empty}", "{empty} exists"),
    ("stats --path {store} --plots {file}", "{file} is a file"),
    ("export --target {none}", "give either --path"),
    ("export --path {none} --target {none}", "there is no directory {none}"),
    ("export --path {store} --target {file}", "{file} is a file"),
    ("export --path {store} --target {store}", "holds files of something else"),
    ("export --path {store} --target gs://a/b", "is not a folder of this machine"),
    ("export --path {store} --catalog lake --table a.b", "are for --format iceberg"),
    ("export --path {store} --catalog lake --format iceberg", "--catalog and --table together"),
    ("export --path {store} --target {none} --format iceberg --merge", "leave out --merge"),
    ("export --path {store} --target {store} --format iceberg", "files of something else"),
    ("export --path {store} --format iceberg", "Missing option '--target'"),
    ("export --path {store} --target {none} --pattern (", "is not a regular expression"),
    ("export --path {store} --target {none} --drop-value", "give a JSON schema"),
    ("export --path {store} --target {exported} --headers", "was without --headers"),
    ("export --path {store} --target {exported} --json-schema infer", "without --json-schema"),
    ("compact --path {store} --topic t --target {exported}", "target of `hastore pipeline export`"),
    ("compact --path {store} --topic t,u --target {none}", "takes one topic"),
    ("compact --path {store} --topic none --target {none}", "there is no topic 'none'"),
    ("index --path {none}", "{none} is no store"),
    ("index --path {store} --output {store}", "{store} is not empty"),
    ("index --path {store} --verify --output {none}", "give either --verify or --output"),
    ("audit {none} {store}", "{none}: no such folder"),
    ("audit {store} {empty}", "{empty} is no store"),
    ("audit {store} tcp://nowhere", "expected tcp://HOST:PORT"),
    ("audit {store} {store} --from 5 --to 5", "--from 5 is not below --to 5"),
)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("places")
    found = {name: root / name for name in ("store", "none", "empty", "file", "exported")}
    write_store(found["store"], numbered(3))
    found["empty"].mkdir()
    found["file"].write_text("")
    columns = ["key", "value", "partition", "offset", "timestamp", "timestampType"]
    shape = {"columns": columns, "json_schema": None, "keep_value": True}
    commit = {"format": 1, "job": "export", "number": 1, "files": [], "removed": []}
    commits = found["exported"] / "_hastore" / "commits"
    commits.mkdir(parents=True)
    (commits / "00000001.json").write_text(json.dumps({**commit, "state": {"shape": shape}}))
    return found


def told(captured, code):
    """Return the error that a command with --json told on both streams."""
    said = json.loads(captured.out)
    assert said["exit_code"] == code
    assert captured.err.splitlines()[-1].removeprefix("error: ") == said["error"]
    return said


@pytest.mark.parametrize("as_json", [(), ("--json",)])
@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_what_is_wrong_is_said_before_spark_starts(
    arguments, as_json, text, places, monkeypatch, capsys
):
    pytest.importorskip("pyspark")
    monkeypatch.setattr(common, "_open", lambda *_: pytest.fail("Spark was started"))
    before = sorted(places["store"].parent.rglob("*"))
    words = [word.format(**places) for word in arguments.split()]
    code = run_code(pipeline_group, "hastore pipeline", [*words, *as_json])
    assert code == (3 if "no such folder" in text or "no store" in text or "no dir" in text else 2)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and text.format(**places) in line
    assert sorted(places["store"].parent.rglob("*")) == before
    if as_json:
        told(captured, code)
    else:
        assert captured.out == ""


OF_COMMANDS = (
    ("export --path {store} --topic t --target {none}", "give --allow-data-loss to go on"),
    ("compact --path {store} --topic t --target {none}", "give --allow-data-loss to go on"),
    ("stats --path {store}", "run it again"),
)


@pytest.mark.parametrize(("arguments", "remedy"), OF_COMMANDS)
def test_what_a_job_opens_knows_the_options_of_its_command(
    arguments, remedy, places, monkeypatch, capsys
):
    """tests/spark/options/test_names.py has the errors that name them."""
    pytest.importorskip("pyspark")
    command = arguments.split()[0]

    def fail(options):
        names = options.names
        raise UnreachableError(f"{names.said('path')}: {names.without_loss('go on')}")

    monkeypatch.setattr(f"hastore.pipeline.{command}.open_backend", fail)
    words = [word.format(**places) for word in arguments.split()]
    assert run_code(pipeline_group, "hastore pipeline", words) == 1
    assert f"error: --path: {remedy}\n" in capsys.readouterr().err


RIGHT = (
    "stats --path {store} --since 1970-01-01T00:00Z",
    "export --path {store} --target {exported} --no-decompress",
    "compact --path {store} --topic t --target {none}",
    "index --path {store}",
    "audit {store} {store}",
)
FAILURES = (  # what a job raises, its exit code, and the error's type and text
    (StoreFullError("the disk is full"), 3, "StoreFullError", "the disk is full"),
    (UnreachableError("no node answered"), 1, "UnreachableError", "no node answered"),
    (OSError(5, "it broke"), 1, "OSError", "pipeline: [Errno 5] it broke"),
    (KeyboardInterrupt(), 130, "Stopped", "stopped: "),
)


@pytest.mark.parametrize("arguments", RIGHT)
def test_with_json_each_job_ends_with_one_object_on_stdout(arguments, places, monkeypatch, capsys):
    """Of whatever kind the failure is. A defect has its traceback, too."""
    pytest.importorskip("pyspark")
    words = [*(word.format(**places) for word in arguments.split()), "--json"]

    def fail(error):
        raise error

    for error, code, kind, text in FAILURES:
        monkeypatch.setattr(common, "_open", lambda *_, error=error: fail(error))
        assert run_code(pipeline_group, "pipeline", words) == code
        said = told(capsys.readouterr(), code)
        assert said["type"] == kind and said["error"].startswith(text)
    assert run_code(pipeline_group, "pipeline", [*words, "--nonsense"]) == 2
    assert "No such option" in told(capsys.readouterr(), 2)["error"]
    monkeypatch.setattr(common, "_open", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_code(pipeline_group, "pipeline", words)
    assert json.loads(capsys.readouterr().out)["type"] == "ZeroDivisionError"


def test_right_arguments_start_spark(places, monkeypatch):
    pytest.importorskip("pyspark")
    started = []
    monkeypatch.setattr(common, "_open", lambda name, _: started.append(name) or 1 / 0)
    for arguments in RIGHT:
        with pytest.raises(ZeroDivisionError):
            words = [word.format(**places) for word in arguments.split()]
            pipeline_group(words, standalone_mode=False, obj=None)
    assert started == ["stats", "export", "compact", "index", "audit"]


def test_a_signal_within_a_call_to_the_jvm_leaves_no_traceback(caplog):
    """Py4J logs it at the root logger; anything else that is logged there is kept."""
    pytest.importorskip("pyspark")
    from hastore.pipeline.running import SignalStop

    def log():
        logging.getLogger().error("KeyboardInterrupt while sending command.")
        logging.getLogger().error("something else")

    with SignalStop().raised():  # as `run` has one, and each of its jobs
        with SignalStop().raised():
            pass
        log()
    assert [record.message for record in caplog.records] == ["something else"]
    log()
    assert len(caplog.records) == 3
