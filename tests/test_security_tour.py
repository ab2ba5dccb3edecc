"""Run the walk-through at the top of docs/security.md: its blocks unchanged, in one shell."""

import json

import pytest

from tests.walk_through import TOUR_S, as_typed, blocks, checkout, play, processes

HEADING = "## A group with TLS and identities everywhere"
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -e '.[tls]'\n"
INIT = "bin/hastore init --tls group\n"
PORTS = ("10911", "10912", "10913", "10921", "10922", "10923")


def script(ports: dict[str, str]) -> str:
    """Return the walk-through as one script, on other ports."""
    parts = [as_typed(*block) for block in blocks("docs/security.md", HEADING, "\n### ")]
    assert parts[0] == INSTALL and parts[1] == INIT
    changes = [f"s/127.0.0.1:{port}/127.0.0.1:{other}/" for port, other in ports.items()]
    changes.append("s/commitlog_file_size: 1GiB/commitlog_file_size: 1MiB/")
    edits = "".join(f" -e '{one}'" for one in changes)
    typed = "\n".join([INIT, f"sed -i{edits} group/node1.yaml group/node2.yaml", *parts[2:]])
    before, edit, after = typed.partition("group/node1.yaml group/node2.yaml")
    for port, other in ports.items():
        after = after.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
    return before + edit + after


@pytest.mark.full
@pytest.mark.slow("types a whole page of docs/security.md into a shell")
@pytest.mark.timeout(TOUR_S)
def test_the_walk_through_works(tmp_path):
    with checkout(tmp_path, "bin", "conf", "hastore") as ports:
        typed = script({port: str(ports.take()) for port in PORTS})
        told, errors = play(tmp_path, typed, "sh")
        left = processes(tmp_path)
    assert len([line for line in told.splitlines() if line.startswith("ready ")]) == 2, told
    sent = [json.loads(line) for line in told.splitlines() if line.startswith('{"status"')]
    assert [one["status"] for one in sent] == ["PUT_OK"] * 2 and "SYNC_MEM(1)\n" in told, told
    assert told.count("two pears\n") == 2 and told.count("three apples\n") == 1
    assert told.count("four plums\n") == 1, told
    # Three requests are refused, each for its own reason, and nothing else.
    assert told.count("refused, as it must be\n") == 3, told + errors
    assert "identity shop has no right to produce 'payments'" in errors
    assert "this node asks its clients who they are" in errors
    assert "identity shop is unknown here or has another key" in errors
    wrong = [line for line in errors.splitlines() if line.startswith("error:")]
    assert len(wrong) == 3, errors
    noted = [json.loads(line) for line in told.splitlines() if line.startswith('{"time"')]
    assert {one["action"] for one in noted} >= {"authenticate", "Put"}, told
    assert 'hastore_writable{cluster="demo",group="g0",node="1"} 1\n' in told, told
    assert "prometheus" in told.rpartition("NAME")[2] and "shop" not in told.rpartition("NAME")[2]
    assert left == [] and not (tmp_path / "group").exists()
