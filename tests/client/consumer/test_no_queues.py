"""A consumer of a topic of which consumers read no queue, until an administrator gives it some."""

from __future__ import annotations

from typing import Any

import pytest

from hastore import Admin, Consumer, Producer
from hastore.errors import UnreachableError
from hastore.server.api import queries
from tests.client.conftest import Node


def test_a_topic_without_queues_for_consumers_is_named_and_looked_for_now_and_then(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[Any] = []
    real = queries._topics

    def counted(*given: Any) -> Any:
        asked.append(given)
        return real(*given)

    monkeypatch.setattr(queries, "_topics", counted)
    with Admin([node.address]) as admin, Consumer("t", [node.address], timeout_s=0.3) as consumer:
        admin.create_topic("t", queues=4, read_queues=0)
        assert consumer.poll(timeout_s=0.5) == []
        assert consumer.poll(timeout_s=0.5) == []
        assert 1 <= len(asked) <= 50
        with pytest.raises(UnreachableError, match="no queues that consumers read"):
            consumer.positions()
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 1 and "topic t has no queues that consumers read" in told[0]
        admin.set_topic("t", read_queues=4)
        with Producer([node.address]) as producer:
            producer.send_sync("t", b"1")
        assert [message.body for message in consumer.poll(timeout_s=60.0)] == [b"1"]
        assert len(consumer.positions()) == 4
