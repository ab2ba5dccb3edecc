"""The demo with RocketMQ's own clients: its figures as functions, and all of it in both modes."""

import json
import pathlib
import shutil

import pytest

from hastore.demo import java_clients
from hastore.demo.java_clients import longest_gap, prove_consumed, require_java, told
from hastore.demo.proof import ProofError
from hastore.errors import UsageError
from tests.interop.build import missing
from tests.process.harness import hastore
from tests.spark.quick import QUICK_JVM

STREAMS = [
    {
        "stream": 0,
        "acknowledged": [[0, 100.0, 1.0], [1, 105.0, 1.0], [3, 400.0, 2.0]],
        "failed": [[2, 390.0, 5.0, "refused"]],
        "statuses": {"SEND_OK": 3},
    },
    {"stream": 1, "acknowledged": [[0, 250.0, 1.0]], "failed": [], "statuses": {"SEND_OK": 1}},
]
DELIVERED = [["0:0", 101.0], ["0:1", 106.0], ["1:0", 251.0], ["0:3", 401.0], ["0:3", 500.0]]


def test_the_longest_gap_of_a_stream_is_not_hidden_by_another_stream():
    seen = told(STREAMS, DELIVERED)
    assert (seen.acknowledgement_gap().ms, seen.acknowledgement_gap().at_ms) == (295.0, 105.0)
    assert seen.acknowledgement_gap(0.0, 200.0).ms == 5.0
    assert seen.delivery_gap().ms == 150.0
    assert longest_gap([]).ms == longest_gap([7.0]).ms == 0.0
    assert seen.failed == {"0:2": "refused"} and seen.statuses == {"SEND_OK": 4}


def test_what_was_consumed_again_before_a_time_does_not_count():
    seen = told(STREAMS, [*DELIVERED, ["0:0", 102.0], ["0:3", 501.0]])
    assert [seen.consumed_again(since) for since in (0.0, 102.5, 501.0, 502.0)] == [2, 1, 1, 0]


def test_an_acknowledged_message_that_was_not_delivered_fails_the_proof():
    assert prove_consumed(told(STREAMS, DELIVERED))["0:3"] == 2
    with pytest.raises(ProofError, match=r"1 acknowledged messages were not consumed: \['1:0'\]"):
        prove_consumed(told(STREAMS, [one for one in DELIVERED if one[0] != "1:0"]))


def test_without_java_17_it_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="need Java 17 and Maven, and java is not on the PATH"):
        require_java()
    for tool in ("java", "javac", "mvn"):
        (tmp_path / tool).write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setattr(java_clients.os, "environ", {"PATH": f"{tmp_path}:/bin"})
    with pytest.raises(UsageError, match='Java 17 or later, not openjdk version "11'):
        require_java()


@pytest.mark.full
@pytest.mark.slow("Maven, a JVM, three nodes and a kill")
@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_clients_go_on_through_a_kill(tmp_path, monkeypatch, mode):
    if shutil.which("mvn") is None:
        missing("mvn is not on the PATH")
    monkeypatch.setenv("JDK_JAVA_OPTIONS", QUICK_JVM)  # for Maven too
    folder = tmp_path / "demo" / "stores"
    words = ["--clients", "rocketmq", "--json", "--scale", "0.4", "--mode", mode]
    done = hastore("demo", *words, "--folder", str(folder), timeout_s=900)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["acknowledged"] > 500 and set(facts["statuses"]) == {"SEND_OK"}
    assert facts["stored_twice"] <= facts["acknowledged"] // 100
    assert facts["consumed_again"] <= facts["acknowledged"] // 100  # no queue has changed hands
    assert f"{facts['acknowledged']:,} messages were acknowledged with SEND_OK\n" in done.stderr
    assert "each node has each of them" in done.stderr
    assert pathlib.Path(facts["folder"]) == folder
