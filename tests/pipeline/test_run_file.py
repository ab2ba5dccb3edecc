"""`hastore pipeline run`: a file of jobs, its mistakes, its summary, an interrupted run."""

import fcntl
import json
import os
import shutil

import pytest
import yaml

from hastore.cli.common import run_code
from hastore.cli.main import pipeline_group
from hastore.cli.pipeline import common
from hastore.cli.pipeline import run as run_module
from hastore.cli.pipeline.jobs_file import read_jobs
from hastore.client.security import named_file
from hastore.errors import HastoreError
from tests.pipeline.audit.kit import copied, flip
from tests.pipeline.test_export_commits import SPARK, run_here, values
from tests.spark.stores import numbered, write_store

EXPORT = {"job": "export", "path": "store", "topic": "t", "target": "lake/t"}
STATS = {"job": "stats", "path": "store", "since": "2030-01-01T00:00:00Z"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a store; the tasks of exports run in this process, and nothing else does."""
    write_store(tmp_path / "store", numbered(20, queues=2))
    run_here(monkeypatch)
    started = []

    class Session:
        def __enter__(self):
            started.append("start")
            return SPARK

        def __exit__(self, *_):
            started.append("end")

    monkeypatch.setattr(common, "_open", lambda *_: Session())
    return tmp_path, started


@pytest.fixture
def run(folder, capsys):
    """Write a file of jobs and run it; return the exit code, the object on stdout, and stderr."""

    def run(*jobs, options=(), **more):
        file = folder[0] / "jobs.yaml"
        if jobs:
            file.write_text(yaml.safe_dump({"jobs": list(jobs), **more}))
        words = ["run", str(file), *map(str, options), "--json"]
        code = run_code(pipeline_group, "pipeline", words)
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    return run


def test_a_relative_path_in_hastore_security_begins_in_the_folder_of_the_command(
    run, monkeypatch, tmp_path_factory
):
    here = tmp_path_factory.mktemp("here")
    (here / "client.yaml").write_text("{}")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HASTORE_SECURITY", "client.yaml")
    seen, call = [], run_module._Run._call

    def watched(self, job, result):
        seen.append(named_file())
        return call(self, job, result)

    monkeypatch.setattr(run_module._Run, "_call", watched)
    assert run(EXPORT)[0] == 0
    assert seen == [str(here / "client.yaml")]
    assert os.environ["HASTORE_SECURITY"] == "client.yaml"


def outcomes(said):
    return [(one["name"], one["exit_code"], one["resumed"]) for one in said["jobs"]]


def test_the_jobs_run_in_order_in_one_session_and_give_one_summary(folder, run):
    place, started = folder
    other = {**EXPORT, "name": "again", "target": "lake/u", "metadata": True, "file_size": 1}
    code, said, err = run(EXPORT, other, STATS)
    assert code == said["exit_code"] == 0 and "error" not in said
    assert outcomes(said) == [("export-1", 0, False), ("again", 0, False), ("stats-3", 0, False)]
    assert [one["summary"].get("messages") for one in said["jobs"]] == [20, 20, None]
    assert len(values(place / "lake" / "t")) == len(values(place / "lake" / "u")) == 20
    assert started == ["start", "end"]
    assert err.splitlines() == [
        "job 1 of 3: export-1", "job 2 of 3: again", "job 3 of 3: stats-3",
    ]  # fmt: skip
    assert not (place / "jobs.yaml.state").exists()
    started.clear()
    code, said, _ = run()
    assert [one["summary"].get("messages") for one in said["jobs"]] == [0, 0, None]
    assert started == [], "nothing was new"


def test_for_people_there_is_a_table_at_the_end(folder, capsys):
    file = folder[0] / "jobs.yaml"
    file.write_text(yaml.safe_dump({"jobs": [EXPORT, {**STATS, "path": "none"}, STATS]}))
    assert run_code(pipeline_group, "pipeline", ["run", str(file)]) == 3
    captured = capsys.readouterr()
    rows = [line.split()[:3] for line in captured.out.splitlines()[-4:]]
    assert rows[0] == ["name", "job", "result"]
    assert rows[1:3] == [["export-1", "export", "done"], ["stats-2", "stats", "failed"]]
    assert rows[3] == ["stats-3", "stats", "not"]
    assert "20 messages exported" in captured.out
    assert captured.err.splitlines()[-1].startswith("error: stats-2: there is no directory")


def test_a_run_ends_at_the_first_job_that_fails_and_continues_there(folder, run):
    place, _ = folder
    audit = {"job": "stats", "path": "later", "since": "2030-01-01T00:00:00Z"}
    code, said, _ = run(STATS, EXPORT, audit, {**STATS, "name": "last"})
    assert code == said["exit_code"] == 3 and said["type"] == "StoreError"
    assert said["error"].startswith("stats-3: there is no directory")
    assert outcomes(said) == [("stats-1", 0, False), ("export-2", 0, False), ("stats-3", 3, False)]
    assert said["not_run"] == ["last"]
    shutil.copytree(place / "store", place / "later")
    code, said, _ = run()
    assert code == 0 and not (place / "jobs.yaml.state").exists()
    # The export runs again, because it takes what has come since.
    assert [resumed for _, _, resumed in outcomes(said)] == [True, False, False, False]


def test_with_keep_going_the_others_run_too(folder, run):
    missing = {**STATS, "path": "none"}
    code, said, _ = run(missing, EXPORT, {**missing, "topic": "t"}, options=["--keep-going"])
    assert code == 3 and [one["exit_code"] for one in said["jobs"]] == [3, 0, 3]
    assert said["error"].startswith("stats-1: ") and said["not_run"] == []


def test_after_the_end_of_sparks_jvm_the_other_jobs_get_a_new_session(folder, run, monkeypatch):
    place, started = folder
    call, ends = run_module._Run._call, []

    def killed(self, job, result):
        code, error = call(self, job, result)
        ends.append(-9)
        return code, error

    monkeypatch.setattr(run_module._Run, "_call", killed)
    monkeypatch.setattr("hastore.pipeline.running.jvm_end", lambda: ends[0] if ends else None)
    code, said, _ = run(EXPORT, {**EXPORT, "name": "again", "target": "lake/u"})
    assert code == 0 and outcomes(said) == [("export-1", 0, False), ("again", 0, False)]
    assert started == ["start", "end", "start", "end"]


def test_a_spark_that_does_not_end_takes_no_summary(folder, run, monkeypatch):
    class Session:
        def __enter__(self):
            return SPARK

        def __exit__(self, *_):
            raise HastoreError("Spark's JVM did not end within 30 s, and was killed")

    monkeypatch.setattr(common, "_open", lambda *_: Session())
    code, said, err = run(EXPORT)
    assert code == said["exit_code"] == 1 and outcomes(said) == [("export-1", 0, False)]
    assert "did not end" in said["error"] and "error: Spark's JVM did not end" in err


def test_a_difference_is_the_exit_code_of_the_run(folder, run, monkeypatch):
    from hastore.pipeline.audit import job as audit_job

    one, other = copied(folder[0], "three-files")
    flip(other, 500, 1)
    monkeypatch.setattr(
        audit_job, "audit",
        lambda spark, a, b, **options: audit_job.compare(a, b, run_tasks, 1, **options),
    )  # fmt: skip
    monkeypatch.setattr("hastore.pipeline.audit.audit", audit_job.audit)

    def run_tasks(tasks):
        for task in tasks:
            yield task, audit_job.run_task(task)

    code, said, err = run({"job": "audit", "a": one.name, "b": other.name}, EXPORT)
    assert code == 4 and "error" not in said and said["not_run"] == ["export-2"]
    assert said["jobs"][0]["summary"]["differing_ranges"] == 1
    assert err.splitlines()[-1].startswith("error: ") and "differ in 1 of 1 range" in err


def test_a_signal_ends_the_run_and_the_next_one_continues(folder, run, monkeypatch):
    place, _ = folder

    def stop(number):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        run_here(patch, stop)
        code, said, err = run(STATS, EXPORT, {**STATS, "name": "last"})
    assert code == said["exit_code"] == 130 and said["type"] == "Stopped"
    assert "20 messages were exported" in said["error"] and said["not_run"] == ["last"]
    code, said, _ = run()
    assert code == 0 and [one["resumed"] for one in said["jobs"]] == [True, False, False]
    assert len(values(place / "lake" / "t")) == 20


def test_what_is_kept_counts_only_for_the_same_job_and_not_for_long(folder, run, monkeypatch):
    failing = {**STATS, "path": "none"}
    run(STATS, failing)
    assert outcomes(run(STATS, failing)[1])[0] == ("stats-1", 0, True)
    assert outcomes(run({**STATS, "topic": "t"}, failing)[1])[0] == ("stats-1", 0, False)
    assert outcomes(run(options=["--restart"])[1])[0] == ("stats-1", 0, False)
    monkeypatch.setattr(run_module, "_KEPT_S", 0)
    assert outcomes(run()[1])[0] == ("stats-1", 0, False)


def test_two_runs_of_a_file_at_once_are_refused(folder, run):
    run(EXPORT)
    with open(folder[0] / "jobs.yaml") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, said, _ = run()
    assert code == 2 and "another run of" in said["error"]


WRONG = (
    ("jobs: [", "is no YAML"),
    ("job: export", "has no list `jobs`"),
    ("jobs: [5]", "job 1 is no mapping"),
    ("jobs: [{job: exprot}]", "job is 'exprot'; use one of export, compact, audit, index, stats"),
    (
        "jobs: [{job: export, targe: x}]",
        "(export-1): there is no 'targe'; correct it: did you mean 'target'",
    ),
    ("jobs: [{job: export, target: x, master: y}]", "there is no 'master'"),
    ("jobs: [{job: export, path: x}]", "Missing option '--target'"),
    ("jobs: [{job: export, target: [x, y]}]", "target is a list; give one value"),
    ("jobs: [{job: export, target: x, headers: 1}]", "headers is 1; write true or false"),
    ("jobs: [{job: export, target: x, file-size: 0}]", "0 is not in the range"),
    ("jobs: [{job: export, target: x, topic: {a: b}}]", "write a text or a number"),
    ("jobs: [{job: audit, a: x}]", "b is missing"),
    ("jobs: [{job: audit, a: x, b: y}, {name: audit-1, job: stats}]", "two jobs have the name"),
    ("{jobs: [{job: stats}], spork: 1}", "there is no 'spork'; correct it: did you mean 'spark'"),
    ("{jobs: [{job: stats}], spark: {conf: {memory: 1}}}", "give names that begin with spark."),
    (
        "jobs:\n- job: export\n  topic: a\n  topic: b\n  target: x",
        "jobs.yaml:4: topic is given twice (also line 3); keep one of them, or give an option that "
        "may be repeated a list, such as topic: [a, b]",
    ),
    ("jobs: [{job: stats}]\njobs: [{job: stats}]", "jobs.yaml:2: jobs is given twice"),
    ("spark: {conf: {spark.x: 1, 'spark.x': 2}}", "jobs.yaml:1: spark.x is given twice"),
    (
        "jobs: [{job: export, target: x, file-size: 1, file_size: 2}]",
        "job 1 (export-1): file-size is given twice; leave one of them out",
    ),
)


@pytest.mark.parametrize(("text", "told"), WRONG)
def test_all_mistakes_of_a_file_are_found_before_its_first_job(folder, run, text, told):
    (folder[0] / "jobs.yaml").write_text(text)
    code, said, err = run()
    assert code == said["exit_code"] == 2 and told in said["error"]
    assert str(folder[0] / "jobs.yaml") in said["error"] and len(err.splitlines()) == 1


def test_one_look_names_the_mistakes_of_all_jobs(folder, run):
    text = "{spork: 1, jobs: [{job: exprot}, {job: stats}, {job: audit, a: x}], spark: [1]}"
    (folder[0] / "jobs.yaml").write_text(text)
    code, said, _ = run()
    places = ("there is no 'spork'", "job 1: job is 'exprot'", "(audit-3): b is missing", "spark:")
    assert code == 2 and all(place in said["error"] for place in places)


def test_what_is_taken_over_by_an_alias_may_be_given_anew(folder):
    text = """
jobs:
  - &first {job: export, path: store, topic: a, target: x}
  - &other {<<: *first, topic: b, target: y}
  - {<<: *other, target: z}
"""
    found = read_jobs("jobs.yaml", text, {"export": pipeline_group.get_command(None, "export")})
    assert [{*one.arguments} for one in found.jobs] == [
        {"--path=store", f"--topic={topic}", f"--target={target}"}
        for topic, target in (("a", "x"), ("b", "y"), ("b", "z"))
    ]


STATE = '{{"hastore_pipeline_run": {}}}'


def test_a_file_that_is_not_there_and_a_state_that_is_something_else(folder, run):
    assert "cannot be read" in run()[1]["error"]
    run(EXPORT)
    for text in ("{", "[]", "[" * 100_000, *map(STATE.format, ("[]", '{"x": 1}', '{"x": {}}'))):
        (folder[0] / "jobs.yaml.state").write_text(text)
        code, said, _ = run()
        assert code == 2 and "is not the state of an interrupted run" in said["error"]
    text = (folder[0] / "jobs.yaml").read_text()
    code, said, _ = run(options=["--restart", "--state", folder[0] / "jobs.yaml"])
    assert code == 2 and "is not the state of an interrupted run" in said["error"]
    assert (folder[0] / "jobs.yaml").read_text() == text


def test_sparks_options_of_the_file_and_of_the_command_line(folder, run, monkeypatch):
    sessions = []
    opened = common._open
    monkeypatch.setattr(
        common, "_open", lambda name, session: sessions.append(session) or opened(name, session)
    )
    spark = {"master": "local[1]", "memory": "2g", "conf": {"spark.x": 1, "spark.y": True}}
    run(EXPORT, spark=spark, options=["--memory", "3g", "--conf", "spark.x=2"])
    (session,) = sessions
    assert (session.master, session.memory) == ("local[1]", "3g")
    assert dict(session.settings) == {"spark.x": "2", "spark.y": "true"}


def test_numbers_are_taken_as_they_are_written(folder):
    text = """
spark: {memory: 010, conf: {spark.x: 1_000, spark.y: 1.50, spark.z: true}}
jobs:
  - {job: export, path: store, topic: [0123, 12:30, 1e3, 0x1F, 1_0], target: 007, file_size: 1}
  - {job: stats, path: store, since: 2030-01-01T00:00:00Z}
"""
    commands = {name: pipeline_group.get_command(None, name) for name in ("export", "stats")}
    found = read_jobs("jobs.yaml", text, commands)
    topics = [f"--topic={name}" for name in ("0123", "12:30", "1e3", "0x1F", "1_0")]
    assert found.jobs[0].arguments == (
        "--path=store", *topics, "--target=007", "--file-size=1",
    )  # fmt: skip
    assert found.jobs[1].arguments == ("--path=store", "--since=2030-01-01T00:00:00+00:00")
    settings = (("spark.x", "1_000"), ("spark.y", "1.50"), ("spark.z", "true"))
    assert found.session == common.SessionOptions(None, "010", settings)


def test_a_state_that_cannot_be_written_is_told_before_the_first_job(folder, run, monkeypatch):
    place, started = folder
    (place / "there").write_text("")
    code, said, _ = run(EXPORT, STATS, options=["--state", place / "there" / "state"])
    assert code == 2 and "cannot be written" in said["error"] and "--state" in said["error"]
    assert started == [] and not (place / "lake").exists()
    code, said, _ = run(EXPORT, options=["--state", place / "there" / "state"])
    assert code == 0, "an export keeps its positions in its target"

    def fail(path, content):
        raise OSError(28, "No space left on device", path)

    put = run_module._Kept.put

    def full(self, job, result):
        with monkeypatch.context() as patch:
            patch.setattr(type(run_module.REAL), "replace_bytes", lambda _, *given: fail(*given))
            put(self, job, result)

    monkeypatch.setattr(run_module._Kept, "put", full)
    code, said, err = run(STATS, {**STATS, "name": "last"})
    assert code == 0 and outcomes(said) == [("stats-1", 0, False), ("last", 0, False)]
    assert "No space left" in said["jobs"][0]["not_kept"] and "its result is not kept" in err
