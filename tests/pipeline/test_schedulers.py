"""What starts `hastore pipeline run`: the units of systemd, cron, and the DAG for Airflow.

Airflow is not installed here: the DAG runs with stand-ins for the few names that it imports.
"""

from __future__ import annotations

import json
import logging
import pathlib
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import yaml

from hastore.cli.common import run_code
from hastore.cli.main import pipeline_group
from tests.documents.blocks import ROOT, take
from tests.pipeline.test_run_file import EXPORT, STATS
from tests.pipeline.test_run_file import folder as folder  # noqa: PLC0414 - a fixture
from tests.test_named_commands import problem_of

UNITS = ROOT / "deploy" / "systemd"
DAG = ROOT / "deploy" / "airflow" / "hastore_pipeline.py"
PAGE = "docs/pipeline-jobs.md"
INSTALL = take(PAGE, "wheel=$(ls")
CRON = take(PAGE, "5 * * * * hastore")
AIRFLOW = take(PAGE, "airflow dags test")
INSTALLED = "/opt/hastore/bin/hastore"
WAITING = """#!{python} -IS
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print("ready", file=sys.stderr, flush=True)
signal.pause()
"""


def setting(name: str) -> str:
    """Return the one value of a setting of the service."""
    lines = (UNITS / "hastore-pipeline.service").read_text().splitlines()
    (found,) = [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]
    return found


def test_the_line_of_the_service_runs_the_jobs(folder: Any, capsys: Any) -> None:
    place, _ = folder
    file, state = place / "jobs.yaml", place / "state" / "jobs.state"
    state.parent.mkdir()
    file.write_text(yaml.safe_dump({"jobs": [EXPORT, STATS]}))
    words = shlex.split(setting("ExecStart"))
    assert words[:2] == [INSTALLED, "pipeline"]
    places = {"/etc/hastore/jobs.yaml": file, "/var/lib/hastore-pipeline/jobs.state": state}
    assert set(places) <= set(words) and setting("StateDirectory") in str(words)
    words = [str(places.get(word, word)) for word in words[2:]]
    for repetition in range(2):
        assert run_code(pipeline_group, "pipeline", words) == 0
        said = json.loads(capsys.readouterr().out)
        found = [one["summary"].get("messages") for one in said["jobs"]]
        assert found == [0 if repetition else 20, None]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs Debian's systemd")
def test_systemd_takes_the_units(tmp_path: pathlib.Path) -> None:
    for name in ("hastore-pipeline.service", "hastore-pipeline.timer"):
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(text.replace(INSTALLED, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.iterdir())],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_installs_the_units(tmp_path: pathlib.Path) -> None:
    lines = INSTALL.text.splitlines()
    own = [line for line in lines if line.startswith("install ")]
    assert len(own) == 3 and len(lines) == 8
    (tmp_path / "jobs.yaml").write_text("jobs: []\n")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    typed = "\n".join(own).replace("-o root -g hastore ", "")
    for place in ("/etc/hastore", "/etc/systemd"):
        typed = typed.replace(place, f"{tmp_path}{place}")
    subprocess.run(["sh", "-ec", typed], cwd=tmp_path, check=True)
    installed = {path.name for path in (tmp_path / "etc").rglob("*") if path.is_file()}
    assert installed == {"jobs.yaml", "hastore-pipeline.service", "hastore-pipeline.timer"}


def test_the_line_of_cron_is_a_command_and_is_left_out_while_one_runs(
    tmp_path: pathlib.Path,
) -> None:
    command = CRON.text.split(maxsplit=6)[6]
    assert problem_of(command.partition("/opt/hastore/bin/")[2]) is None
    lock = tmp_path / "lock"
    typed = command.replace("/run/lock/hastore-jobs", str(lock)).replace(INSTALLED, "echo ran #")
    for held, told in ((False, "ran\n"), (True, "")):
        before = ["flock", str(lock)] if held else []
        done = subprocess.run(
            [*before, "sh", "-c", typed], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, told)


class FakeOperator:
    """What the DAG uses of Airflow's BaseOperator."""

    def __init__(self, *, task_id: str) -> None:
        self.task_id = task_id
        self.output = f"output of {task_id}"
        self.log = logging.getLogger("airflow.task")


class FakeDag:
    """A DAG, which keeps its settings."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __enter__(self) -> FakeDag:
        return self

    def __exit__(self, *_: object) -> None: ...


class AirflowError(Exception):
    """In place of AirflowException: Airflow tries again."""


class FailError(AirflowError):
    """In place of AirflowFailException: it does not."""


@pytest.fixture
def dag(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the DAG's file."""
    parts = {
        "airflow": {},
        # At the end of the file `report` takes a reference to the summary of the task before.
        "airflow.sdk": {
            "DAG": FakeDag, "BaseOperator": FakeOperator, "task": lambda _: lambda given: given
        },
        "airflow.sdk.exceptions": {
            "AirflowException": AirflowError, "AirflowFailException": FailError
        },
    }  # fmt: skip
    for name, names in parts.items():
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(DAG))


class Instance:
    """A task instance of Airflow: keeps XComs."""

    def __init__(self) -> None:
        self.pushed: dict[str, Any] = {}

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


@pytest.mark.parametrize(
    ("code", "raised"),
    [(0, None), (1, AirflowError), (2, FailError), (3, AirflowError), (4, FailError),
     (143, AirflowError)],
)  # fmt: skip
def test_airflow_repeats_what_may_succeed(
    dag: dict[str, Any],
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    code: int,
    raised: type[Exception] | None,
) -> None:
    said = {"exit_code": code, "jobs": ["x" * 100_000], **({"error": "it failed"} if code else {})}
    program = tmp_path / "hastore"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho progress >&2\n'
        f"echo '{json.dumps(said)}'\nexit {code}\n"
    )
    program.chmod(0o755)
    operator = dag["HastorePipelineOperator"](
        task_id="jobs", file="a.yaml", state="a.state", hastore=str(program)
    )
    instance = Instance()
    with caplog.at_level(logging.INFO, "airflow.task"):
        if raised is None:
            assert operator.execute({"ti": instance}) == said
        else:
            with pytest.raises(raised, match=f"exit code {code}: it failed") as caught:
                operator.execute({"ti": instance})
            assert caught.type is raised and instance.pushed == {"return_value": said}
    assert "progress" in caplog.text
    words = (tmp_path / "words").read_text().strip()
    assert problem_of("hastore " + words) is None and "--state a.state" in words


def test_a_task_that_airflow_ends_stops_its_jobs(
    dag: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    program = tmp_path / "hastore"
    program.write_text(WAITING.format(python=sys.executable))
    program.chmod(0o755)
    operator = dag["HastorePipelineOperator"](task_id="jobs", file="a.yaml", hastore=str(program))

    class StopAtOnce(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "ready":
                operator.on_kill()

    operator.log = logging.Logger("airflow.task")
    operator.log.addHandler(StopAtOnce())
    with pytest.raises(AirflowError, match="exit code 143: see the log"):
        operator.execute({"ti": Instance()})


def test_a_task_that_takes_too_long_stops_its_jobs(
    dag: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    """Airflow raises its timeout in `execute`, and calls `on_kill` only after that has ended."""
    program = tmp_path / "hastore"
    program.write_text(WAITING.format(python=sys.executable))
    program.chmod(0o755)
    operator = dag["HastorePipelineOperator"](task_id="jobs", file="a.yaml", hastore=str(program))

    def on_alarm(*_: object) -> None:
        raise TimeoutError("execution_timeout")

    def end_it() -> None:  # else a mistake would hang the test
        operator._process.kill()

    class AlarmWhenReady(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "ready":
                signal.setitimer(signal.ITIMER_REAL, 0.05)

    operator.log = logging.Logger("airflow.task")
    operator.log.addHandler(AlarmWhenReady())
    before = signal.signal(signal.SIGALRM, on_alarm)
    late = threading.Timer(30.0, end_it)
    late.start()
    try:
        with pytest.raises(TimeoutError, match="execution_timeout"):
            operator.execute({"ti": Instance()})
    finally:
        signal.signal(signal.SIGALRM, before)
        late.cancel()
    assert operator._process.returncode == 143


def test_the_dag_never_runs_the_jobs_twice_at_a_time(dag: dict[str, Any]) -> None:
    settings = dag["dag"].settings
    assert settings["max_active_runs"] == 1 and not settings["catchup"]
    assert settings["dag_id"] in AIRFLOW.text and settings["params"]["hastore"] == INSTALLED
    given = json.loads(shlex.split(AIRFLOW.text)[-1])
    assert set(given) <= set(settings["params"])
    jobs = dag["jobs"]
    assert set(jobs.template_fields) == {"file", "state", "hastore"}
    assert all(f"params.{name} " in getattr(jobs, name) for name in jobs.template_fields)
