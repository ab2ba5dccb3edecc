"""A warm process (warm.py) is like one of a new interpreter."""

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from hastore.errors import HastoreError
from hastore.testing import warm
from tests.process.networks import open_network

SAYS = """
import os, sys, threading
print(sys.argv[1:], os.getcwd(), os.environ.get("HASTORE_TEST_WARM"), os.getsid(0) == os.getpid())
print(os.readlink("/proc/thread-self/ns/net"), threading.active_count(), sys.path[0])
print("to stderr", file=sys.stderr)
if sys.argv[1] == "wait":
    sys.stdout.flush()
    sys.stdin.read()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def says(tmp_path):
    path = tmp_path / "says.py"
    path.write_text(SAYS)
    return [str(path), "end", "7"]


def run(command, out, namespace=None):
    with open(out, "wb") as file:
        process = warm.start(command, stdout=file, stderr=file, namespace=namespace)
    assert process.wait(60) == process.poll() == process.returncode
    return process.returncode, out.read_text()


def test_arguments_environment_streams_and_exit_code(says, tmp_path, monkeypatch):
    monkeypatch.setenv("HASTORE_TEST_WARM", "set later")
    monkeypatch.chdir(tmp_path)
    cold = subprocess.run(
        [sys.executable, *says], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, text=True, check=False,
    )  # fmt: skip
    code, said = run(says, tmp_path / "out")
    assert code == cold.returncode == 7
    assert sorted(said.splitlines()) == sorted(cold.stdout.splitlines())


def test_a_killed_process_is_reaped_by_whoever_asks_first(says, tmp_path):
    ours, theirs = os.pipe()
    process = warm.start([says[0], "wait", "0"], stdin=ours)
    os.close(ours)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    waiting = [threading.Thread(target=process.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    process.kill()
    for thread in waiting:
        thread.join()
    os.close(theirs)
    assert process.returncode == -signal.SIGKILL
    assert not os.path.exists(f"/proc/{process.pid}")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_its_parent_the_server(says):
    """Over one socket each would take the other's answers, and wait for its own for ever."""
    ours, theirs = os.pipe()
    process = warm.start([says[0], "wait", "0"], stdin=ours)
    os.close(ours)
    sock = warm._server._sock.fileno()
    with warm._server_lock:  # as another thread may
        child = os.fork()
    if child == 0:
        wrong = 1
        try:
            free = warm._server_lock.acquire(blocking=False)
            known = process.poll() is None and process.returncode is None
            process.kill()
            ended = process.wait(60) == warm.UNKNOWN_CODE
            wrong = not (free and known and ended and warm._server is None and is_closed(sock))
        finally:
            os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.wait(60) == -signal.SIGKILL, "the parent goes on"
    os.close(theirs)


def is_closed(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    script = tmp_path / "silent.py"
    script.write_text(
        "import socket, sys\nsock = socket.socket(fileno=int(sys.argv[1]))\n"
        "while sock.recv(9_999):\n    pass\n"
    )
    monkeypatch.setattr(warm, "SERVER", script)
    monkeypatch.setattr(warm, "ANSWER_S", 0.05)
    server = warm._Server()
    with pytest.raises(HastoreError, match=r"has not answered for 0\.05 s"):
        server.ask({"poll": 1})
    server.close()


class Interrupted(Exception):
    """As a signal handler raises it."""


def interrupted(monkeypatch, call):
    """Make a call that is interrupted after its request, before it has read the answer."""
    server = warm._server
    sock = server._sock

    class Handler:
        def recv(self, _size):
            raise Interrupted

        def __getattr__(self, name):
            return getattr(sock, name)

    monkeypatch.setattr(server, "_sock", Handler())
    with pytest.raises(Interrupted):
        call()
    monkeypatch.setattr(server, "_sock", sock)


def test_an_interrupt_mixes_up_no_answers(says, tmp_path, monkeypatch):
    """Such as the time limit of a test: the next tests use the same server."""
    run(says, tmp_path / "out")
    ours, theirs = os.pipe()
    one = warm.start([says[0], "wait", "3"], stdin=ours)
    interrupted(monkeypatch, one.poll)
    two = warm.start([says[0], "wait", "4"], stdin=ours)
    assert one.poll() is two.poll() is None
    interrupted(monkeypatch, lambda: warm.start([says[0], "wait", "0"], stdin=ours))
    assert one.poll() is None and not warm._server._unheard, "the unknown process was killed"
    os.close(ours)
    os.close(theirs)
    ends = select.poll()
    ends.register(one._end, select.POLLIN)
    assert ends.poll(60_000)
    interrupted(monkeypatch, one.poll)  # it is reaped, and nobody has heard its code
    assert (one.wait(60), two.wait(60)) == (3, 4)


@pytest.mark.parametrize("began", ["inside", "outside"])
def test_it_is_in_the_network_of_the_caller(says, tmp_path, monkeypatch, began):
    """Wherever the caller was when the server began."""
    monkeypatch.setattr(warm, "_server", None)
    if began == "outside":
        run(says, tmp_path / "out")
    outside = os.readlink("/proc/thread-self/ns/net")
    with open_network(2) as network:
        assert os.readlink("/proc/thread-self/ns/net") in run(says, tmp_path / "out")[1]
        place = network.namespace(1)
        if place is not None:
            assert os.readlink(place) in run(says, tmp_path / "out", place)[1]
    assert outside in run(says, tmp_path / "out")[1]
