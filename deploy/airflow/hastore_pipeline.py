"""An example DAG for Airflow 3: run the jobs of a file with `hastore pipeline run` once an hour.

Put this file into Airflow's folder of DAGs, and give the parameters `file`, `state` and `hastore`.
`state` is a file that Airflow's user can write, as it seldom can in the folder of `file`. hastore
needs an environment of its own on the workers, so that Airflow and Spark need not agree on
libraries. docs/pipeline-jobs.md, "Schedulers", has the exit codes and the summary.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import DAG, BaseOperator, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException

# 2: wrong arguments or a wrong file; 4: a job found a difference. A repetition would find the same.
FOR_A_PERSON = (2, 4)


class HastorePipelineOperator(BaseOperator):
    """Run the jobs of a file; its XCom is the summary, also that of a run that failed."""

    template_fields = ("file", "state", "hastore")

    def __init__(
        self, *, file: str, state: str | None = None, hastore: str = "hastore", **kwargs: Any
    ) -> None:
        """Keep the paths of the file of jobs, of its state, and of the program `hastore`.

        The state has the results of jobs until the run has ended, by default beside the file.
        """
        super().__init__(**kwargs)
        self.file = file
        self.state = state
        self.hastore = hastore
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the jobs, with their progress in the task's log.

        Raises AirflowException if it is worth to try again, else AirflowFailException.
        """
        command = [self.hastore, "pipeline", "run", self.file, "--json"]
        if self.state:
            command += ["--state", self.state]
        self.log.info("%s", " ".join(command))
        with tempfile.TemporaryFile("w+") as output:  # a pipe that nobody reads could fill up
            with subprocess.Popen(
                command, stdout=output, stderr=subprocess.PIPE, text=True
            ) as self._process:
                assert self._process.stderr is not None
                try:
                    for line in self._process.stderr:
                        self.log.info("%s", line.rstrip())
                except BaseException:  # as of execution_timeout: `with` would wait for the jobs
                    self.on_kill()
                    self._process.stderr.read()  # else their last words would end them at once
                    raise
            output.seek(0)
            told = output.read()
        code = self._process.returncode
        summary: dict[str, Any] = json.loads(told.splitlines()[-1]) if told else {}
        if code == 0:
            return summary
        context["ti"].xcom_push(key="return_value", value=summary)
        text = f"exit code {code}: {summary.get('error', 'see the log')}"
        raise AirflowFailException(text) if code in FOR_A_PERSON else AirflowException(text)

    def on_kill(self) -> None:
        """Stop the jobs; the next run goes on where they were."""
        if self._process is not None:
            self._process.terminate()


with DAG(
    dag_id="hastore_pipeline",
    description="The jobs of a file, on Spark",
    schedule="5 * * * *",
    start_date=datetime.fromisoformat("2026-01-01T00:00:00+00:00"),
    catchup=False,  # a run takes all that is new, so a missed one need not be made up for
    max_active_runs=1,  # a second run of the same file is refused
    params={
        "file": "/etc/hastore/jobs.yaml",
        "state": "/var/lib/hastore/jobs.state",
        "hastore": "/opt/hastore/bin/hastore",
    },
    default_args={
        "retries": 3,
        "retry_delay": timedelta(minutes=2),
        "retry_exponential_backoff": True,
        "execution_timeout": timedelta(hours=6),
    },
) as dag:
    jobs = HastorePipelineOperator(
        task_id="jobs",
        file="{{ params.file }}",
        state="{{ params.state }}",
        hastore="{{ params.hastore }}",
    )

    @task
    def report(summary: dict[str, Any]) -> list[str]:
        """Return a line for each job; a place to tell others of new data."""
        return [f"{one['name']}: {one['seconds']} s, {one['summary']}" for one in summary["jobs"]]

    report(jobs.output)
