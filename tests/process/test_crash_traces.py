"""A crash of the interpreter, in the tests or in a node, prints the stack of each thread."""

import resource
import signal
import subprocess
import sys

from tests.process.harness import ROOT, wait_until

CRASH = """
import faulthandler, resource, threading, time

def bystander():
    time.sleep(30)

def test_crash():
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert soft == hard
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # no core file of this crash
    threading.Thread(target=bystander, daemon=True).start()
    time.sleep(0.1)
    faulthandler._sigsegv()
"""


def test_a_crash_of_the_tests_leaves_a_trace(tmp_path):
    path = tmp_path / "test_crash.py"
    path.write_text(CRASH)
    options = ["-c", str(ROOT / "setup.cfg"), "--rootdir", str(ROOT), "-p", "tests.conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(path)],
        cwd=ROOT, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == -signal.SIGSEGV, said
    assert "Fatal Python error: Segmentation fault" in said
    assert "in bystander" in said and "in test_crash" in said, said


def test_a_crash_of_a_node_leaves_a_trace(make_group):
    node = make_group(1, master_role="ASYNC_MASTER", cold=True).start()[1]
    core, hard = resource.prlimit(node.pid, resource.RLIMIT_CORE)
    assert core == hard
    resource.prlimit(node.pid, resource.RLIMIT_CORE, (0, hard))
    node.send(signal.SIGSEGV)
    assert node.exit_code() == -signal.SIGSEGV
    wait_until(lambda: "Fatal Python error: Segmentation fault" in node.log, 60, node.last_words)
    assert "server/api/server.py" in node.log, "a thread is missing"
