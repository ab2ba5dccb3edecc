"""`hastore pipeline` without Spark: its help, and what it says when a requirement is missing."""

import subprocess
import sys

HELP_WITHOUT = """
import sys
for name in ("pyspark", "pyarrow"):
    sys.modules[name] = None
from hastore.cli.main import cli
from hastore.cli.common import run_code
for arguments in (["--help"], ["pipeline", "--help"]):
    assert run_code(cli, "hastore", arguments) == 0
import hastore.cli.pipeline.common as common
try:
    common.check_spark()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_help_works_without_spark_and_a_job_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT], capture_output=True, text=True, timeout=300
    )
    assert done.stderr == ""
    last = done.stdout.splitlines()[-1]
    assert (
        last.startswith("UsageError this job needs py") and 'pip install "hastore[spark]"' in last
    )
