"""A wheel of this tree, and plain sessions as a new user starts them: what they find and print."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from pyspark import find_spark_home

from hastore.errors import UsageError
from hastore.spark.registering import import_folder
from hastore.spark.session import find_java, java_home_for_spark
from hastore.spark.worker import check_spark_version
from tests.spark.conftest import ROOT, pip, require_java
from tests.spark.quick import QUICK_JVM
from tests.spark.stores import GOLDEN, numbered, write_store

START = """
import os, sys
from pyspark.sql import SparkSession

def session(zone="UTC"):
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.session.timeZone", zone)
        .getOrCreate()
    )

def load(**options):
    return spark.read.format("hastore").options(**options).load(sys.argv[1])

spark = session()
"""
WITHOUT_A_LINE = (
    START
    + """
assert not any(name.startswith("hastore") for name in sys.modules)
print("rows", load(subscribe="t").count())
"""
)
WITH_ONE_LINE = (
    START
    + """
import hastore.spark
hastore.spark.register(spark)
print("from", os.path.dirname(os.path.dirname(os.path.dirname(hastore.spark.__file__))))
frame = load(subscribe="t")
for rows in (3, 2_001, 19_999):
    print("rows", len(frame.take(rows)))
frame.show(3)
print("rows", load(subscribe="t", startingTimestamp="1970-01-01T01:00").count())
spark.sparkContext.parallelize([1]).map(lambda _: __import__("hastore")).count()
another = spark.newSession()
hastore.spark.register(another)
print("rows", another.read.format("hastore").load(sys.argv[1], subscribe="t").count())
try:
    hastore.spark.register(spark, python=sys.argv[2])
except hastore.errors.UsageError as error:
    print("absent", error)

spark.stop()
spark = session("Asia/Tokyo")
hastore.spark.register(spark)
hastore.spark.register(spark)
print("rows", load(subscribe="t", startingTimestamp="1970-01-01T10:00").count())
spark.conf.set("spark.sql.session.timeZone", "UTC")
try:
    load(subscribe="t", startingTimestamp="1970-01-01T10:00").count()
except Exception as error:
    print("refused", "register(spark) again" in str(error))
print("rows", hastore.spark.read_topic(spark, "t", path=sys.argv[1]).count())
spark.stop()
"""
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """20,000 messages, a second apart: more than a socket holds."""
    path = tmp_path_factory.mktemp("store")
    write_store(path, numbered(20_000, size=1_000), file_size=1 << 25, units_per_file=20_000)
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment outside the repository, with the wheel; it is never activated."""
    require_java()
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    # --ignore-installed, because this pip also sees the hastore of its own environment.
    options = ("--ignore-installed", "--no-deps", "--no-index")
    pip(folder / "bin" / "python", "install", *options, str(wheel))
    # Its dependencies; the .pth files in that folder, as that of an editable hastore, do not count.
    site = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(command, *arguments, path, cwd):
    """Run a command in a clean environment; return its lines of stdout, and its stderr."""
    clean = {k: v for k, v in os.environ.items() if "PYTHON" not in k and "SPARK" not in k}
    java = str(java_home_for_spark(find_java()))
    clean |= {"PATH": path, "JAVA_HOME": java, "SPARK_LOCAL_IP": "127.0.0.1"}
    clean |= {"JDK_JAVA_OPTIONS": QUICK_JVM}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=550,
        env=clean,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.full
def test_the_wheel_has_every_file_of_the_packages(wheel):
    tree = [path for name in ("hastore", "pyspark_hastore") for path in (ROOT / name).rglob("*")]
    files = {str(path.relative_to(ROOT)) for path in tree if path.is_file()}
    expected = {name for name in files if "__pycache__" not in name}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected


@pytest.mark.slow("a JVM of its own starts, and Python for its tasks")
@pytest.mark.full
@pytest.mark.long
def test_one_line_makes_the_format_known_in_an_environment_that_is_not_active(
    environment, store, tmp_path
):
    python = environment / "bin" / "python"
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": bare, "platbase": bare}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    lines, errors = run(
        [python, "-c", WITH_ONE_LINE],
        *(store, bare / "bin" / "python"),
        path="/usr/bin:/bin",
        cwd=tmp_path,
    )
    found = Path(next(line for line in lines if line.startswith("from "))[5:])
    site = sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment})
    assert found == Path(site)
    assert [line for line in lines if line.startswith("rows")] == [
        *("rows 3", "rows 2001", "rows 19999", "rows 16400", "rows 20000"),
        *("rows 16400", "rows 20000"),
    ]
    (absent,) = [line for line in lines if line.startswith("absent")]
    assert "bare/bin/python, does not find hastore; install it there" in absent
    assert "refused True" in lines
    assert "only showing top 3 rows" in lines
    for noise in ("BrokenPipe", "ConnectionReset"):
        assert noise not in errors


@pytest.mark.slow("a JVM of its own starts, and Python for its tasks")
@pytest.mark.full
def test_no_line_is_needed_by_spark_submit_in_an_active_environment(environment, store, tmp_path):
    script = tmp_path / "count.py"
    script.write_text(WITHOUT_A_LINE)
    submit = Path(find_spark_home._find_spark_home(), "bin", "spark-submit")
    lines, errors = run(
        [submit, script], store, path=f"{environment / 'bin'}:/usr/bin:/bin", cwd=tmp_path
    )
    assert "rows 20000" in lines
    assert "Traceback" not in errors


def test_workers_search_the_folder_from_which_hastore_is_imported(spark):
    from hastore.spark import register

    register(spark)
    first = spark.sparkContext.environment["PYTHONPATH"].split(os.pathsep)[0]
    assert first == import_folder() == str(ROOT)


@pytest.mark.parametrize("version", ["4.1.4", "3.5.9", "4.0.0.dev1"])
def test_an_older_spark_is_refused(version):
    with pytest.raises(UsageError, match=r"needs Spark 4\.2 or later; this is pyspark"):
        check_spark_version(version)


@pytest.mark.parametrize("version", ["4.2.0", "4.10.0", "5.0.0", "main"])
def test_newer_sparks_are_accepted(version):
    check_spark_version(version)


@pytest.mark.full
def test_a_chosen_interpreter_is_kept(spark, monkeypatch, tmp_path):
    from hastore.spark import register

    context = spark.sparkContext
    before = context.pythonExec
    try:
        another = tmp_path / "python"
        another.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        another.chmod(0o755)
        monkeypatch.setenv("PYSPARK_PYTHON", str(another))
        context.pythonExec = str(another)
        register(spark)
        assert context.pythonExec == str(another)
        register(spark, python=sys.executable)
        assert context.pythonExec == sys.executable
    finally:
        context.pythonExec = before
        register(spark)
    assert spark.read.format("hastore").load(str(GOLDEN / "variants"), mode="log").count()
