"""`hastore groups delete`: what it refuses, what it asks, and what it leaves."""

import json
import socket
import threading

import pytest

from hastore.cli.remoting_link import RemotingLink
from hastore.client.consumer.positions_client import Positions
from hastore.client.producer.producer import Producer
from hastore.errors import UnreachableError
from hastore.protocol.remoting import Code
from tests.cli.kit import hastore
from tests.cli.test_status import make_group
from tests.server.remoting.kit import RemotingClient

__all__ = ["make_group"]
UPDATE, ONE = 200, 352


@pytest.fixture
def pair(make_group):
    """A pair with the settings of group g, and a position of group p."""
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    client = RemotingClient(group.nodes[1].api)
    settings = {"groupName": "g", "retryMaxTimes": 5}
    assert client.ask(UPDATE, {}, json.dumps(settings).encode()).code == 0
    client.close()
    with Producer(group.nodes[1].api) as producer:
        producer.send_sync("t", b"x", queue=0)
    with Positions([group.nodes[1].api]) as positions:
        positions.commit("p", "t", {0: 1})
    return group


def settings_of(group, name):
    client = RemotingClient(group.nodes[1].api)
    try:
        return json.loads(client.ask(ONE, {"group": name}).body)["retryMaxTimes"]
    finally:
        client.close()


def delete(group, name, *more, stdin=None):
    return hastore("groups", "delete", name, "--bootstrap", group.api(), *more, stdin=stdin)


def test_the_settings_go_after_a_confirmation(pair):
    assert settings_of(pair, "g") == 5
    done = delete(pair, "g", stdin=b"n\n")
    assert done.returncode == 1 and "nothing was changed" in done.stderr
    done = delete(pair, "g", stdin=b"")
    assert done.returncode == 2 and "give --yes" in done.stderr
    assert settings_of(pair, "g") == 5
    done = delete(pair, "g", stdin=b"y\n")
    assert done.returncode == 0, done.stderr
    assert settings_of(pair, "g") == 16, "RocketMQ's default"
    done = delete(pair, "g", "--yes")
    assert done.returncode == 0, "again"


def test_positions_stay_and_are_named(pair):
    done = delete(pair, "p", "--yes")
    assert done.returncode == 0 and "its positions in t stay" in done.stderr
    done = delete(pair, "p", "--yes", "--json")
    assert json.loads(done.stdout) == {
        "group": "p", "deleted": True, "online": [], "positions_in": ["t"],
    }  # fmt: skip


def test_it_is_refused_while_members_are_online(pair):
    client = RemotingClient(pair.nodes[2].api)  # the slave knows them
    beat = {
        "clientID": "host@1", "producerDataSet": [],
        "consumerDataSet": [
            {"groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
             "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "unitMode": False,
             "subscriptionDataSet": []},
        ],
    }  # fmt: skip
    assert client.ask(34, {}, json.dumps(beat).encode()).code == 0
    try:
        done = delete(pair, "g", "--yes")
        assert done.returncode == 1 and "1 member of group g is online (host@1)" in done.stderr
        assert settings_of(pair, "g") == 5
        done = delete(pair, "g", "--yes", "--force", "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["online"] == ["host@1"]
        assert settings_of(pair, "g") == 16
    finally:
        client.close()


def test_wrong_usage_and_nodes_that_are_down(pair):
    done = delete(pair, "nosuch", "--yes")
    assert done.returncode == 2 and "there is no group nosuch" in done.stderr
    pair.stop(1)
    done = delete(pair, "g", "--yes")
    assert done.returncode == 1 and "error: no node takes writes" in done.stderr
    assert done.stderr.count("error: ") == 1, "the other lines are the node's own log"
    pair.stop(2)
    done = delete(pair, "g", "--yes", "--timeout", "0.2")
    assert done.returncode == 1 and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "text"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "tcp://"), (b"", "ends the connection"),
     (b"\0\0\0\x08\0\0\0\x04{}{}", "tcp://")],
)  # fmt: skip
def test_a_node_that_answers_garbage_is_one_error(answer, text):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with RemotingLink(address, None, 60.0) as link:
            with pytest.raises(UnreachableError, match=text):
                link.ask(Code.DELETE_SUBSCRIPTIONGROUP, {})
        thread.join()


def test_a_node_that_says_nothing_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with RemotingLink(address, None, 0.05) as link:
            with pytest.raises(UnreachableError, match="no answer within|timed out"):
                link.members("g")
