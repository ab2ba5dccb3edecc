"""The local session: its settings, and its error when Spark does not start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import require_java

ROOT = Path(__file__).resolve().parent.parent.parent
START = """
import hastore.spark.session as session
from hastore.errors import HastoreError
try:
    session.local_session("broken", memory="1k")
except HastoreError as error:
    print(error)
"""
KILLED = """
import os, signal
from pyspark import SparkContext
from hastore.errors import HastoreError
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.running import explained_end, own_session, run_action
from tests.spark.quick import QUICK
for killed in (True, False):
    try:
        with own_session("run", master="local[1]", memory="512m", settings=QUICK) as spark:
            if killed:
                os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)
            with explained_end("count"):
                print(run_action(spark, "count", lambda: spark.range(5).count(), JobProgress()))
    except HastoreError as error:
        print(error)
"""


def test_an_active_session_is_returned(spark):
    from hastore.spark.session import local_session

    assert local_session("another") is spark


def test_workers_run_this_interpreter_on_loopback(spark):
    settings = spark.sparkContext.getConf()
    assert settings.get("spark.driver.host") == "127.0.0.1"
    assert settings.get("spark.ui.enabled") == "false"
    assert spark.sparkContext.pythonExec == sys.executable


def test_sql_creates_a_view(spark):
    from tests.spark.stores import GOLDEN

    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW flights USING hastore "
        f"OPTIONS (path '{GOLDEN / 'three-files'}', subscribe 'TopicA', startingOffsets 'earliest')"
    )
    assert spark.table("flights").count() == 400


@pytest.mark.timeout(900)
def test_the_output_of_a_jvm_that_does_not_start_is_shown():
    require_java()
    done = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert "Spark does not start" in done.stdout
    assert "heap" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow("two JVMs start")
@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_end_of_a_jvm_is_told_with_its_cause_and_another_session_can_be_made():
    require_java()
    done = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    told, counted = done.stdout.splitlines()
    assert told.startswith("count: Spark's JVM ended (signal 9)."), done
    assert counted == "5"
