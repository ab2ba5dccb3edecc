"""What a job says, and how its session ends, after Spark's JVM was killed; without a JVM."""

import subprocess
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkContext

from hastore.errors import HastoreError
from hastore.pipeline.running import explain, explained_end
from hastore.spark import session

LOST = (
    ConnectionRefusedError(111, "Connection refused"),
    Py4JError("An error occurred while calling o33.statusTracker"),
    Py4JNetworkError("Answer from Java side is empty"),
)


class Jvm:
    """The process, and its gateway."""

    pid = 7

    def __init__(self, code):
        self.code = code
        self.stdin = SimpleNamespace(close=lambda: None)
        self.proc = self

    def wait(self, timeout):
        if self.code is None:
            raise subprocess.TimeoutExpired("java", timeout)
        return self.code

    def shutdown(self):
        pass


@pytest.fixture
def jvm(monkeypatch):
    """Set how the JVM of this process has ended: by an exit code, or not."""

    def end(code):
        monkeypatch.setattr(SparkContext, "_gateway", Jvm(code))
        monkeypatch.setattr(SparkContext, "_jvm", None)
        monkeypatch.setattr(SparkContext, "_active_spark_context", None)

    return end


@pytest.mark.parametrize("error", LOST)
def test_a_jvm_that_was_killed_is_named_with_cause_and_remedy(jvm, error):
    jvm(-9)
    text = r"^export: Spark's JVM ended \(signal 9\).*out of memory.*--memory.*same command again"
    with pytest.raises(HastoreError, match=text) as caught, explained_end("export"):
        raise error
    assert str(explain("export", error)) == str(caught.value)
    jvm(3)
    assert "ended (exit code 3)" in str(explain("export", error))


@pytest.mark.parametrize("error", LOST)
def test_while_the_jvm_runs_an_error_stays_what_it_is(jvm, error):
    jvm(None)
    with pytest.raises(type(error)) as caught, explained_end("export"):
        raise error
    assert caught.value is error
    assert "JVM ended" not in str(explain("export", error))


@pytest.mark.parametrize("error", LOST)
def test_the_session_of_a_jvm_that_has_ended_hides_no_error_of_the_job(jvm, error):
    def stop():
        raise error

    spark = SimpleNamespace(stop=stop)
    jvm(-9)
    session.end_session(spark)
    assert SparkContext._gateway is None
    jvm(None)
    with pytest.raises(type(error)):
        session.end_session(spark)
