"""Jobs that find nothing to do end without Spark: what is new is looked up before it is started."""

import json
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from hastore.cli.common import run_code
from hastore.cli.main import pipeline_group
from hastore.cli.pipeline import common
from hastore.cli.pipeline.export import _show
from hastore.errors import UnreachableError, UsageError
from hastore.pipeline import export as export_job
from hastore.pipeline import lag, running
from hastore.pipeline.audit.job import audit
from hastore.pipeline.compact import COLUMNS, compact
from hastore.pipeline.delta_stream import DeltaBatches
from hastore.pipeline.export import export
from hastore.pipeline.index import IndexOptions, run_index
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.read_positions import end_positions, positions_as_state
from hastore.pipeline.stats import StatsOptions, run_stats
from hastore.pipeline.target import Target
from hastore.pipeline.where import Where
from hastore.spark.options.offsets import GlobalTimestamp
from hastore.spark.options.source_options import parse_options
from hastore.spark.read.planning import open_backend
from tests.pipeline.test_export_commits import SPARK, run_here
from tests.spark.stores import numbered, write_store


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    write_store(path, numbered(20, queues=2))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `hastore pipeline ... --json` without Spark; return the summary."""
    monkeypatch.setattr(common, "_open", lambda *_: pytest.fail("Spark was started"))

    def run(*arguments):
        words = [str(word) for word in arguments]
        assert run_code(pipeline_group, "pipeline", [*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("form", ["parquet", "delta"])
@pytest.mark.parametrize("more", [(), ("--merge",)])
def test_an_export_with_nothing_new(store, run, tmp_path, monkeypatch, form, more):
    target = tmp_path / "out"
    options = export_job.ExportOptions(format=form)
    with monkeypatch.context() as patch:
        run_here(patch)
        assert export(SPARK, Where(str(store), topics=("t",)), str(target), options).messages == 20
    before = sorted(target.rglob("part-*"))
    found = run(
        *("export", "--path", store, "--topic", "t", "--target", target, "--format", form), *more
    )
    assert (found["messages"], found["commits"]) == (0, 0)
    assert sorted(target.rglob("part-*")) == before


INTERNAL = ("RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX", "%RETRY%g")


def test_what_waits_or_was_rolled_back_can_be_left_out_of_an_export(tmp_path, monkeypatch, capsys):
    names = ("t", "%DLQ%g", *INTERNAL)
    write_store(tmp_path / "store", [one for name in names for one in numbered(2, topic=name)])
    found = {}
    given = ((None, False), (None, True), ("(?i)T|.*R.*", True))
    for number, (pattern, exclude) in enumerate(given):
        where = Where(str(tmp_path / "store"), None, (), pattern, exclude)
        with monkeypatch.context() as patch:
            run_here(patch)
            found[number] = export(SPARK, where, str(tmp_path / f"out{number}"))
        _show(found[number])
    said = capsys.readouterr().out
    assert [set(one.messages_by_topic) for one in found.values()] == [
        {*names}, {"t", "%DLQ%g"}, {"t"}
    ]  # fmt: skip
    assert said.count("--exclude-internal") == 1
    assert f"are in {', '.join(sorted(INTERNAL))}: give" in said


def test_an_export_of_a_store_without_messages(run, tmp_path):
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    found = run("export", "--path", tmp_path / "store", "--target", tmp_path / "out")
    assert found["messages"] == 0


def test_an_export_that_was_killed_within_its_commit_is_finished(store, run, tmp_path, monkeypatch):
    target = tmp_path / "out"
    with monkeypatch.context() as patch:
        run_here(patch)
        patch.setattr(Target, "_apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export(SPARK, Where(str(store), topics=("t",)), str(target))
    assert not list(target.glob("topic=*"))
    assert run("export", "--path", store, "--topic", "t", "--target", target)["messages"] == 0
    assert len(list(target.glob("topic=t/*/part-*"))) == 1


def test_a_compaction_with_nothing_new(store, run, tmp_path):
    target = tmp_path / "out"
    with open_backend(Where(str(store), topics=("t",)).parsed()) as backend:
        ends = end_positions(backend, backend.available())
    state = {"topic": "t", "to_topic": None, "changes": None, "keep_without_key": False}
    state |= {"columns": list(COLUMNS), **positions_as_state(ends, {"t"})}
    with Target(target, "compact") as opened:
        opened.commit({**state, "keys": 20, "without_key": 0}, [])
    found = run("compact", "--path", store, "--topic", "t", "--target", target)
    assert (found["read"], found["keys"]) == (0, 20)


def test_figures_of_a_time_without_messages(store, run):
    """Also if only some of the queues have none, which is no error."""
    found = run("stats", "--path", store, "--since", "2030-01-01T00:00:00Z")
    assert (found["topics"], found["minutes"], found["lag"]) == ([], [], [])


def test_limits_of_figures_are_in_utc_whatever_the_zone_of_the_session():
    """One that spark-submit or a notebook made need not be in UTC."""
    limits = StatsOptions("2026-11-22T10:00:00", "2026-11-22T12:00:00.0001+01:00").limits()
    for zone in ("UTC", "America/New_York"):
        parsed = parse_options(Where("store").options(limits), zone)
        assert parsed.limits.start == GlobalTimestamp(1_795_341_600_000)
        assert parsed.limits.end == GlobalTimestamp(1_795_345_200_001)
        assert parsed.assumed_zone is None


@pytest.mark.parametrize("form", ["file:{}", "file://{}", "FILE://localhost{}"])
def test_a_store_is_named_by_a_uri_as_for_spark(store, run, tmp_path, form):
    path = form.format(store)
    found = run("stats", "--path", path, "--since", "2030-01-01T00:00:00Z")
    assert (found["source"], found["topics"]) == (path, [])


class FakeNodes:
    """Two nodes, asked as `Admin` asks them."""

    def __init__(self, servers):
        self.servers = servers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def status(self):
        common_fields = {"max_offset": 900, "confirmed_offset": 900, "epoch": 1, "slaves": []}
        for node, role in ((1, "SYNC_MASTER"), (2, "SLAVE")):
            one = {"node": node, "role": role, "writable": role != "SLAVE", **common_fields}
            yield type("Info", (), {"status": one})


def test_the_lag_alone_is_sampled_and_drawn(run, monkeypatch, tmp_path):
    monkeypatch.setattr(lag, "Admin", FakeNodes)
    arguments = ("stats", "--servers", "127.0.0.1:1", "--lag-only", "--plots", tmp_path / "plots")
    found = run(*arguments)
    assert [one["node"] for one in found["lag"]] == ["node 2", "unconfirmed"]
    assert found["plots"] == [str(tmp_path / "plots" / "lag.png")]


def test_samples_stay_when_no_node_answers_for_a_while(run, monkeypatch):
    asked = []

    class Restarting(FakeNodes):
        def status(self):
            asked.append(1)
            if len(asked) in failing:
                raise UnreachableError("no answer from 127.0.0.1:1 within 5 s")
            return super().status()

    now_ms = [0.0]
    clock = SimpleNamespace(monotonic_ms=lambda: now_ms[0], wall_ms=lambda: int(now_ms[0]))
    sleep = SimpleNamespace(sleep=lambda seconds: now_ms.append(now_ms.pop() + 1_000 * seconds))
    monkeypatch.setattr(lag, "Admin", Restarting)
    monkeypatch.setattr(lag, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(lag, "time", sleep)
    failing = {2, 3, 5}
    found = run("stats", "--servers", "127.0.0.1:1", "--lag-only", "--sample", "5")
    assert len(asked) == 6
    assert [(one["node"], one["samples"]) for one in found["lag"]] == [
        ("node 2", 3),
        ("unconfirmed", 3),
    ]


def test_nodes_of_which_none_answers_at_first_are_not_sampled(monkeypatch):
    def silent(self):
        raise UnreachableError("no answer from 127.0.0.1:1 within 5 s")

    monkeypatch.setattr(FakeNodes, "status", silent)
    monkeypatch.setattr(lag, "Admin", FakeNodes)
    with pytest.raises(UnreachableError, match="no answer from"):
        lag.sample_lag("127.0.0.1:1", 60, JobProgress())


def test_the_start_of_spark_is_not_in_the_seconds_of_a_job(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])

    def start():
        now[0] += 40
        return "session"

    watch = running.Stopwatch(start)
    now[0] += 1
    assert watch.start() == "session"
    now[0] += 2
    assert watch.seconds == 3


class Connected:
    """A session of Spark Connect, as far as the jobs look at it: its client is not installed."""

    __module__ = "pyspark.sql.connect.session"


@pytest.mark.parametrize(
    "job",
    [
        lambda spark, store, target: export(spark, Where(store, topics=("t",)), target),
        lambda spark, store, target: compact(spark, Where(store, topics=("t",)), target),
        lambda spark, store, target: audit(spark, store, store),
        lambda spark, store, target: run_index(spark, IndexOptions(store, output=target)),
        lambda spark, store, target: run_stats(spark, Where(store), StatsOptions()),
        lambda spark, store, target: DeltaBatches(target)(Frame(spark), 0),
    ],
    ids=["export", "compact", "audit", "index", "stats", "DeltaBatches"],
)
def test_a_session_of_spark_connect_is_refused_with_the_remedy(store, tmp_path, job):
    with pytest.raises(UsageError, match="session of Spark Connect: give them a session of"):
        job(Connected(), str(store), str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


class Frame(NamedTuple):
    """What `foreachBatch` passes, as far as DeltaBatches looks at it first."""

    sparkSession: Connected  # noqa: N815
