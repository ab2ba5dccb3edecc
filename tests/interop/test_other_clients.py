"""RocketMQ's clients in Go (2.1.2) and C++ (the Python wheel `rocketmq` 0.4.4) with hastore pairs.

Both are fetched when they are first used; where they cannot be had, the test says so. The wheel
gets an environment of its own.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from hastore.security.identity import Identity
from tests.interop.acl import Identified
from tests.interop.name_server import NAME_SERVER_5, NameServerProcess
from tests.interop.rocketmq_clients import HastoreSite
from tests.process.harness import hastore, wait_until

pytestmark = pytest.mark.full
HERE = pathlib.Path(__file__).parent
WHEEL = "rocketmq==0.4.4"
COUNT = 20
FETCH_S = 300
RUN_S = 240


def fetched(what, *command, **options):
    """Run a command that fetches a client; skip the test with its last line if it cannot."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, **options)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        pytest.skip(f"{what} is not to be had here: {last}")


@pytest.fixture
def go_client():
    if shutil.which("go") is None:
        pytest.skip("RocketMQ's Go client needs Go")
    program = HERE / "goclient" / "target" / "client"
    program.parent.mkdir(exist_ok=True)
    fetched("RocketMQ's Go client", "go", "mod", "download", cwd=HERE / "goclient")
    # Without optimizations: it compiles Go's own packages too, and the client runs for seconds.
    build = ["go", "build", "-gcflags=all=-N -l", "-ldflags=-s -w", "-o", str(program), "."]
    subprocess.run(build, cwd=HERE / "goclient", timeout=FETCH_S, check=True)
    return [str(program)]


@pytest.fixture
def cpp_client():
    home = pathlib.Path(sys.prefix, "rocketmq-cpp")  # beside the packages of the tests
    python = home / "bin" / "python"
    if not (home / "fetched").exists():
        fetched("an environment", sys.executable, "-m", "venv", "--without-pip", str(home))
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        pip += ["--disable-pip-version-check", "--only-binary=:all:"]
        fetched("RocketMQ's C++ client", *pip, WHEEL)
        fetched("RocketMQ's C++ client", str(python), "-c", "import rocketmq.client")
        (home / "fetched").touch()
    return [str(python), str(HERE / "cppclient" / "client.py")]


def run(client, group, topic, folder, *more, kills=False, identity=None, servers=None):
    """Run a client with the addresses of a group; return what it saw.

    With `kills`, kill the master when half is sent, and promote node 2. One `more` argument lets
    the consumer read all the time; half is received then, too. `identity`: its AccessKey and
    SecretKey. `servers`: the addresses of name servers, instead of the group's.
    """
    keys = {} if identity is None else {"ACCESS_KEY": identity[0], "SECRET_KEY": identity[1]}
    servers = servers or HastoreSite(group, "group").namesrv
    with open(folder / "client.err", "w+") as errors:
        process = subprocess.Popen(
            [*client, servers, topic, str(COUNT), *more],
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder,
            env={"HOME": str(folder), "PATH": "/usr/bin:/bin", "ROCKETMQ_GO_LOG_LEVEL": "error",
                 **keys},
        )  # fmt: skip
        try:
            said = ""
            if kills:
                while "half" not in said.splitlines():
                    line = process.stdout.readline()
                    assert line, "the client ended before it had sent the half"
                    said += line
                group[1].kill()
                group[1].edit_role("SLAVE")
                group[2].edit_role("SYNC_MASTER")
            said += process.communicate(timeout=RUN_S)[0]
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        assert process.returncode == 0, said[-2000:] + errors.read()[-2000:]
    return json.loads(said.splitlines()[-1])


@pytest.mark.slow("builds the client, and its consumers wait for their share of the queues")
def test_the_go_client_sends_and_receives(go_client, make_group, tmp_path):
    seen = run(go_client, make_group().start(), "FromGo", tmp_path)
    assert seen["status"] == ["0"] * COUNT
    assert seen["received"] == {f"go {number}": 1 for number in range(COUNT)}
    assert seen["tagged"] == {f"go {number}": 1 for number in range(1, COUNT, 2)}
    assert seen["rich"] == ["odd", "k1", "value"]


@pytest.mark.slow("builds the client, which waits for an answer, and then before it tries again")
def test_what_the_go_client_cannot_send_back_comes_again(go_client, make_group, tmp_path):
    """It takes any answer for a success: the message was never consumed again."""
    group = make_group().start()
    process = subprocess.Popen(
        [*go_client, HastoreSite(group, "group").namesrv, "Back", "1", "back"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        env={"HOME": str(tmp_path), "ROCKETMQ_GO_LOG_LEVEL": "error"},
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "came\n"
        group[2].kill()  # nobody confirms what is sent back
        assert process.communicate("go on\n", timeout=RUN_S)[0] == "2\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow("builds the client, and its consumers wait for their share of the queues")
@pytest.mark.parametrize("name", ["go", "cpp"])
def test_signed_requests_are_served(name, request, make_group, tmp_path):
    client = request.getfixturevalue(f"{name}_client")
    topic, rights = f"Signed_{name}", (f"Signed_{name}",)
    known = Identified(tmp_path, Identity("app", rights, rights, groups=(f"{name}-*",)))
    group = known.asked_by(make_group()).start()
    seen = run(client, group, topic, tmp_path, identity=("app", known.secrets["app"]))
    assert set(map(str, seen["status"])) == {"0"} and len(seen["status"]) == COUNT
    assert seen["received"] == {f"{name} {number}": 1 for number in range(COUNT)}
    acl = group[1].status()["acl"]
    assert acl["signed"] and not acl["unproved"]


@pytest.mark.slow("fetches the client, and its consumer waits for its share of the queues")
def test_the_cpp_client_sends_and_receives(cpp_client, make_group, tmp_path):
    seen = run(cpp_client, make_group().start(), "FromCpp", tmp_path)
    assert seen["status"] == [0] * COUNT
    assert seen["received"] == {f"cpp {number}": 1 for number in range(COUNT)}
    assert seen["rich"] == ["odd", "k1"]


@pytest.mark.slow("a master is killed, and clients look for a name server that lives")
@pytest.mark.parametrize("name", ["go", "cpp"])
def test_a_kill_of_the_master_loses_nothing(name, request, make_group, tmp_path):
    client = request.getfixturevalue(f"{name}_client")
    seen = run(client, make_group(3).start(), f"Kill_{name}", tmp_path, kills=True)
    assert set(map(str, seen["status"])) == {"0"} and len(seen["status"]) == COUNT
    # One whose acknowledgement the kill cut off is stored, and comes, twice.
    assert sorted(seen["received"]) == sorted(f"{name} {number}" for number in range(COUNT))


@pytest.mark.slow("a master is killed, and a consumer looks for a new route after 30 s")
def test_the_cpp_consumer_goes_on_over_a_kill_of_the_master(cpp_client, make_group, tmp_path):
    begun = time.monotonic()
    seen = run(cpp_client, make_group(3).start(), "During_cpp", tmp_path, "during", kills=True)
    print(f"{time.monotonic() - begun:.1f} s, {seen['received']}")
    assert seen["status"] == [0] * COUNT
    assert sorted(seen["received"]) == sorted(f"cpp {number}" for number in range(COUNT))


@pytest.mark.slow("builds the client, and its consumers wait for their share of the queues")
@pytest.mark.parametrize("name", ["go", "cpp"])
def test_a_name_server_of_rocketmq_leads_to_a_group(name, request, make_group, tmp_path, ports):
    """Half of the queues are a write twin's, whose address has a 0 before the port there."""
    client = request.getfixturevalue(f"{name}_client")
    server = NameServerProcess(NAME_SERVER_5, tmp_path, ports.take()).start()
    try:
        group, topic = make_group(), f"Named_{name}"
        for node in group:
            node.write(remoting={"name_servers": [server.address]})
        group.start()
        done = hastore("topics", "create", topic, "--bootstrap", ",".join(group.bootstrap))
        assert done.returncode == 0, done.stderr
        wait_until(lambda: set(server.brokers(topic)) == {"g0", "g0@2"}, 120, "not registered")
        seen = run(client, group, topic, tmp_path, servers=server.address)
        assert set(map(str, seen["status"])) == {"0"} and len(seen["status"]) == COUNT
        assert seen["received"] == {f"{name} {number}": 1 for number in range(COUNT)}
        forwarded = group[2].status()["forwarding"]["forwarded"]
        assert forwarded >= COUNT // 4, "the twin was used"
    finally:
        server.kill()
