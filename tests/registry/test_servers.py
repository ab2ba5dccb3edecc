"""The tests' own servers."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.process.harness import ROOT, wait_until
from tests.registry.servers import java_and_jars

pytestmark = pytest.mark.full
SCRIPT = """
import pathlib, sys, time
from tests.registry.servers import Servers
servers = Servers(pathlib.Path(sys.argv[1]))
servers.each[0].start()
print(servers.each[0].process.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_the_tests_that_started_it(tmp_path):
    java_and_jars()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as tests:
        try:
            server = pathlib.Path("/proc", tests.stdout.readline().decode().strip())
            assert b"QuorumPeerMain" in (server / "cmdline").read_bytes()
        finally:
            tests.kill()

    def is_gone():
        try:
            return (server / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(is_gone, 60, "the server outlives the tests")
