"""Plain sessions, as a new user starts them: what finds the format, and what they print."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from hastore.spark.java_runtime import find_java, java_home_for_spark
from tests.spark.conftest import require_java
from tests.spark.stores import GOLDEN, numbered, write_store

ROOT = Path(__file__).resolve().parent.parent.parent
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
def environment(tmp_path_factory):
    """A virtual environment outside the repository, with hastore as a wheel would install it."""
    require_java()
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder}))
    for package in ("hastore", "pyspark_hastore"):
        shutil.copytree(ROOT / package, site / package)
    # Its dependencies; the .pth files in that folder, as that of an editable hastore, do not count.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(python, script, argument, *, path, cwd, **more):
    """Run a script in a clean environment; return its lines of stdout, and its stderr."""
    clean = {k: v for k, v in os.environ.items() if "PYTHON" not in k and "SPARK" not in k}
    java = str(java_home_for_spark(find_java()))
    clean |= {"PATH": path, "JAVA_HOME": java, "SPARK_LOCAL_IP": "127.0.0.1", **more}
    done = subprocess.run(
        [str(python), "-c", script, str(argument)],
        capture_output=True,
        text=True,
        timeout=550,
        env=clean,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr


def check_one_line(lines, errors, folder):
    assert Path(next(line for line in lines if line.startswith("from "))[5:]) == folder
    assert [line for line in lines if line.startswith("rows")] == [
        *("rows 3", "rows 2001", "rows 19999", "rows 16400", "rows 16400", "rows 20000"),
    ]
    assert "refused True" in lines
    assert "only showing top 3 rows" in lines
    for noise in ("BrokenPipe", "ConnectionReset", "Traceback"):
        assert noise not in errors


def test_one_line_makes_the_format_known_in_an_environment_that_is_not_active(
    environment, store, tmp_path
):
    lines, errors = run(
        environment / "bin" / "python", WITH_ONE_LINE, store, path="/usr/bin:/bin", cwd=tmp_path
    )
    site = sysconfig.get_path("purelib", vars={"base": environment, "platbase": environment})
    check_one_line(lines, errors, Path(site))


def test_one_line_makes_the_format_known_when_hastore_is_imported_from_a_folder(store, tmp_path):
    require_java()
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WITH_ONE_LINE}"
    lines, errors = run(sys.executable, script, store, path="/usr/bin:/bin", cwd=tmp_path)
    check_one_line(lines, errors, ROOT)


def test_no_line_is_needed_in_an_active_environment(environment, store, tmp_path):
    lines, errors = run(
        environment / "bin" / "python",
        WITHOUT_A_LINE,
        store,
        path=f"{environment / 'bin'}:/usr/bin:/bin",
        cwd=tmp_path,
    )
    assert "rows 20000" in lines
    assert "Traceback" not in errors


def test_a_chosen_interpreter_is_kept(spark, monkeypatch):
    from hastore.spark import register

    context = spark.sparkContext
    before = context.pythonExec
    try:
        monkeypatch.setenv("PYSPARK_PYTHON", "another")
        context.pythonExec = "another"
        register(spark)
        assert context.pythonExec == "another"
        register(spark, python=sys.executable)
        assert context.pythonExec == sys.executable
    finally:
        context.pythonExec = before
        register(spark)
    assert spark.read.format("hastore").load(str(GOLDEN / "variants"), mode="log").count()
