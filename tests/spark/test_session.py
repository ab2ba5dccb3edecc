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
