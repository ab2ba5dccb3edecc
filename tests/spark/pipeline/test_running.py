"""The frame of the jobs on a real session: results, failures, lost workers, a stop."""

import contextlib
import time

import pytest

from hastore.errors import HastoreError, PositionLostError
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.running import run_action, run_tasks
from tests.pipeline import jobs


def running(spark):
    tracker = spark.sparkContext.statusTracker()
    return tracker.getActiveStageIds()


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


def test_results_arrive_with_their_tasks(spark):
    assert sorted(run_tasks(spark, "square", jobs.square, range(7))) == [
        (n, n * n) for n in range(7)
    ]
    assert list(run_tasks(spark, "nothing", jobs.square, [])) == []


def test_an_error_of_a_task_ends_the_run_with_its_type_and_text(spark):
    with pytest.raises(PositionLostError, match="^message three is gone$"):
        list(run_tasks(spark, "fail", jobs.fail_at_three, [3, 1]))
    wait_until(lambda: not running(spark))  # the other task would sleep for ten minutes


def test_leaving_the_results_cancels_the_tasks(spark):
    tasks = [1, 0, 0, 0]
    with contextlib.closing(run_tasks(spark, "sleep", sleep_if, tasks)) as results:
        assert next(results) == (0, 0)
    wait_until(lambda: not running(spark))


def sleep_if(seconds):
    time.sleep(600 * seconds)
    return seconds


def test_a_defect_of_a_task_is_one_line(spark):
    with pytest.raises(HastoreError, match="^divide: Spark failed: .*ZeroDivisionError") as caught:
        list(run_tasks(spark, "divide", jobs.divide, [0]))
    assert "\n" not in str(caught.value)


def test_a_worker_that_was_killed_is_named_with_cause_and_remedy(spark):
    """Spark itself says "Connection reset"."""
    text = "^die: a Python worker .*out of memory.*fewer tasks at a time"
    with pytest.raises(HastoreError, match=text) as caught:
        list(run_tasks(spark, "die", jobs.die, [0]))
    assert "\n" not in str(caught.value)
    frame = spark.range(1).mapInArrow(die, "id long")
    with pytest.raises(HastoreError, match=text):
        run_action(spark, "die", frame.collect, JobProgress())


def die(batches):
    for batch in batches:
        jobs.die(0)
        yield batch


def test_an_action_returns_its_result_and_reports_its_tasks(spark):
    class Seen(JobProgress):
        total = done = 0

        def begin(self, text, total, unit):
            Seen.total, Seen.done = total, 0

        def advance(self, amount):
            Seen.done += amount

    frame = spark.range(100, numPartitions=5)
    assert run_action(spark, "count", frame.count, Seen()) == 100


def test_the_sources_error_keeps_its_type(spark, tmp_path):
    frame = (
        spark.read.format("hastore").option("path", str(tmp_path / "no")).option("subscribe", "t")
    )
    with pytest.raises(HastoreError, match="there is no directory") as caught:
        run_action(spark, "count", lambda: frame.load().count(), JobProgress())
    assert type(caught.value).__name__ == "StoreError"
