"""What the tests of the pipeline's commands share."""

import contextlib

import pytest

from hastore.cli.common import run_code
from hastore.cli.main import pipeline_group
from hastore.cli.pipeline import common


@pytest.fixture
def run(spark, monkeypatch, capfd):
    """Run `hastore pipeline ...` in the tests' session; return exit code, stdout and stderr."""
    monkeypatch.setattr(common, "_open", lambda name, session: contextlib.nullcontext(spark))

    def run(*arguments):
        capfd.readouterr()
        code = run_code(pipeline_group, "pipeline", [str(each) for each in arguments])
        return code, *capfd.readouterr()

    return run
