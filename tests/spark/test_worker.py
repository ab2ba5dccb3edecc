"""A worker ends quietly if Spark has closed its connection, and a stream's process with the JVM."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hastore.spark.worker import end_with_parent

ROOT = Path(__file__).resolve().parent.parent.parent
# The part of pyspark.daemon that prints: Spark's `worker` flushes its output when a task has ended.
DAEMON = """
import os, socket, struct, sys, traceback
from hastore.spark.worker import end_quietly

def worker(sock):
    outfile = os.fdopen(os.dup(sock.fileno()), "wb", 65536)
    end_quietly()
    end_quietly()
    {action}

def serve_next(sock):
    # The next call of `worker`: it waits for a task, finds no more input, and tells Spark so.
    outfile = os.fdopen(os.dup(sock.fileno()), "wb", 65536)
    try:
        sock.recv(1)
    except ConnectionResetError:
        pass
    for _ in range(3):
        outfile.write(b"x")
        outfile.flush()

def connect(family):
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]

ours, sparks = connect(sys.argv[1])
if sys.argv[1] == "reset":
    sparks.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
if sys.argv[1] != "open":
    sparks.close()
try:
    worker(ours)
except BaseException:
    traceback.print_exc()
    os._exit(3)
print("survived")
"""


def run(tmp_path, family, action):
    script = tmp_path / "daemon.py"
    script.write_text(DAEMON.format(action=action))
    return subprocess.run(
        [sys.executable, str(script), family],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
    )


@pytest.mark.parametrize("family", ["reset", "closed", "unix"])
@pytest.mark.parametrize(
    "action",
    [
        "for _ in range(3): outfile.write(b'x'); outfile.flush()",
        "for _ in range(3): outfile.write(bytes(10_000_000))",
        "serve_next(sock)",
    ],
)
def test_a_closed_connection_ends_the_worker_without_a_traceback(tmp_path, family, action):
    done = run(tmp_path, family, action)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_other_broken_connections_are_errors(tmp_path):
    done = run(tmp_path, "open", "a, b = socket.socketpair(); b.close(); a.send(b'x')")
    assert done.returncode == 3
    assert "BrokenPipeError" in done.stderr


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, text=True,
                         stderr=subprocess.PIPE)
child.stderr.readline()
print("the parent ends", flush=True)
"""
CHILD = """
import sys, threading, time
from hastore.spark.worker import end_with_parent
end_with_parent()
end_with_parent()
print(threading.active_count(), file=sys.stderr, flush=True)
time.sleep(600)
print("the child was left", flush=True)
"""


def test_a_streams_process_ends_with_the_jvm_that_has_started_it():
    """It holds the output open, so the run ends once both have ended."""
    done = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD], env={**os.environ, "SPARK_PYTHON_RUNTIME": "x"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "the parent ends\n", done.stderr


def test_other_processes_do_not_watch_their_parent(monkeypatch):
    monkeypatch.delenv("SPARK_PYTHON_RUNTIME", raising=False)
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before
