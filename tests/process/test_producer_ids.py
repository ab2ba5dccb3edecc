"""Producers of a group with identities keep their ids, and messages, through a failover."""

from __future__ import annotations

import asyncio
import secrets
import threading

import pytest

from hastore import aio
from hastore.client import Consumer, Producer
from hastore.client.producer.repeatable_sender import RepeatableSender
from hastore.errors import ForbiddenError
from hastore.protocol.api import own_prefix
from tests.cli.kit import hastore
from tests.process.harness import wait_until
from tests.security.conftest import IdentitiesText

BATCH = 7


@pytest.fixture
def group(make_group, tmp_path, monkeypatch):
    """A pair with the identities "orders" and "other", which may both do all with topics.

    Commands are "orders".
    """
    made = make_group(2)
    text, made.securities = IdentitiesText(), {}
    for name in ("orders", "other"):
        key, path = secrets.token_hex(32), tmp_path / f"{name}.key"
        path.write_text(key)
        path.chmod(0o600)
        text.add(name, key, produce='["*"]', consume='["*"]')
        made.securities[name] = {"identity": name, "key_file": str(path)}
    text.write(tmp_path / "identities.yaml")
    for node in made:
        node.write(security={"identities": str(tmp_path / "identities.yaml")})
    client = tmp_path / "client.yaml"
    client.write_text("identity: orders\nkey_file: orders.key\n")
    monkeypatch.setenv("HASTORE_SECURITY", str(client))
    for node in made:
        node.start()
    return made


class Load:
    """Single messages, batches, and the messages of an asyncio producer, until `stop` is set."""

    def __init__(self, group):
        self.sent, self.failures, self.stop = [], [], threading.Event()
        self._where = group.bootstrap, group.securities["orders"]
        self.threads = [
            threading.Thread(target=self._run, args=(kind,))
            for kind in (self._single, self._batches, lambda: asyncio.run(self._aio()))
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, send):
        try:
            send()
        except Exception as failure:
            self.failures.append(failure)

    def _numbers(self):
        number = 0
        while not self.stop.is_set():
            yield number
            number += 1
            self.stop.wait(0.002)

    def _single(self):
        bootstrap, security = self._where
        with Producer(bootstrap, security=security) as producer:
            for number in self._numbers():
                producer.send_sync("t", b"single %d" % number)
                self.sent.append(b"single %d" % number)

    def _batches(self):
        bootstrap, security = self._where
        with Producer(bootstrap, security=security) as producer:
            for number in self._numbers():
                bodies = [b"batch %d.%d" % (number, each) for each in range(BATCH)]
                producer.send_batch("t", bodies).result(60)
                self.sent += bodies

    async def _aio(self):
        bootstrap, security = self._where
        async with aio.Producer(bootstrap, security=security) as producer:
            for number in self._numbers():
                await producer.send("t", b"aio %d" % number)
                self.sent.append(b"aio %d" % number)


def test_ids_of_an_identity_through_a_failover(group):
    master, slave = group[1], group[2]
    load = Load(group)

    def wait_for_more():
        enough = len(load.sent) + 100
        wait_until(
            lambda: len(load.sent) > enough or load.failures, 60, lambda: repr(load.failures)
        )

    try:
        wait_for_more()
        master.kill()
        promoted = hastore("promote", "-c", str(slave.path), "--async")
        assert promoted.returncode == 0, promoted.stderr
        wait_for_more()
    finally:
        load.stop.set()
        for thread in load.threads:
            thread.join(60)
    assert load.failures == []
    found, ids = [], set()
    security = group.securities["other"]  # it may read the ids, and use none of them
    with Consumer("t", slave.api, security=security) as consumer:
        while len(found) < len(load.sent):
            messages = consumer.poll(timeout_s=60)
            assert messages, f"{len(found)} of {len(load.sent)}"
            for message in messages:
                found.append(message.body)
                ids.add(message.properties["HS_PID"])
    assert sorted(found) == sorted(load.sent)
    assert len(ids) == 3 and all(each.startswith(own_prefix("orders")) for each in ids), ids
    sender = RepeatableSender((slave.api,), ids.pop(), security=security)
    try:
        with pytest.raises(ForbiddenError, match="belongs to another identity than other"):
            sender.begin(0)
    finally:
        sender.close()
