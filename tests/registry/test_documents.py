"""What the documents say of ZooKeeper, done: the runbook's section, and the Python of a cluster."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hastore import Consumer, Producer
from tests.cli.kit import hastore
from tests.documents.blocks import ROOT, RUNBOOK, Block, take
from tests.process.harness import Group, wait_until

API = "docs/python-api.md"
PRODUCER = take(API, 'with Producer("zk://')
CONSUMER = take(API, 'with Consumer("orders", "zk://')
LIMIT_S = 120.0

pytestmark = pytest.mark.full


def play(block: Block, servers: Any, **names: Any) -> None:
    shown = "zk://127.0.0.1:2181/shop"
    assert shown in block.text
    code = block.text.replace(shown, f"{servers.registry}/test")
    exec(compile(code, str(block), "exec"), names)  # noqa: S102 - it is the product's own


def test_a_whole_cluster(
    two_groups: list[Group], servers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(two_groups) == 2
    play(PRODUCER, servers, Producer=Producer)
    told = ""

    def both() -> bool:
        nonlocal told
        play(CONSUMER, servers, Consumer=Consumer)
        told += capsys.readouterr().out
        return len(re.findall(r"^g\d \d b'\.\.\.'$", told, re.M)) >= 2

    wait_until(both, LIMIT_S, lambda: told)
    assert "('g1', 3): 0" in told


def test_zookeeper_is_gone_and_then_the_master_dies(mortal_pair: Group, mortal: Any) -> None:
    """The steps of the runbook, of which the last leads back."""
    text = (ROOT / RUNBOOK).read_text().partition("## ZooKeeper is gone")[2].partition("\n## ")[0]
    assert [line[:7] for line in text.splitlines() if line[:1].isdigit()] == [
        "1. Stop", "2. Star", "3. Give", "4. To g"
    ]  # fmt: skip
    group, (old, new) = mortal_pair, tuple(mortal_pair)
    with Producer(group.bootstrap) as producer:
        producer.send_sync("orders", b"before")
    mortal.each[0].kill()
    old.kill()
    new.stop()
    for node in group:  # 1
        for key in [key for key in node.settings if key.startswith("registry")]:
            del node.settings[key]
        node.write(role="SLAVE")
    for node in group:  # 2
        node.start()
    done = hastore("promote", "-c", str(new.path))
    assert done.returncode == 0, done.stderr
    new.wait_in_sync(old.number)
    with Producer(group.bootstrap) as producer:  # 3
        producer.send_sync("orders", b"meanwhile")
