"""Messages that consumers get later: delayed ones, and those of transactions.

They have a topic of their own. Each delayed message that was acknowledged must be there once, and
each message of a transaction if and only if the database has it. The database is the walk's: no
fault harms it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hastore.client.messages import Message
from hastore.client.producer.producer import Producer
from hastore.client.producer.transactions import Decision
from hastore.errors import ClientError, HastoreError, NotStoredError
from tests.world.clients import ClientHost
from tests.world.history import Log, Sent

TOPIC = "later"
GROUP = "transactions"
LEVELS = (1, 2)  # 1 s and 5 s
RATE_S = 0.4


@dataclass
class Database:
    """What was sent, and what must become of it; `True`: it must be delivered, `False`: never."""

    sent: set[bytes] = field(default_factory=set)
    must: dict[bytes, bool] = field(default_factory=dict)

    def due(self, log: Log) -> list[bytes]:
        """Return the messages that must be delivered, and are not in the log."""
        there = delivered(log)
        return [body for body, wanted in self.must.items() if wanted and body not in there]


def delivered(log: Log) -> Counter[bytes]:
    """Return how often each message is in its topic."""
    return Counter(record.body for record in log.records() if record.topic == TOPIC)


class LaterHost(ClientHost):
    """An application that sends delayed messages and transactions until `quiet`."""

    quiet = False  # it is asked to send no more
    idle = False  # all that it has sent is settled
    database: Database
    _deciding: bytes | None = None

    def work(self) -> None:
        self._deciding, self.idle = None, False
        producer = Producer(
            self.boot, delivery_timeout_s=15.0, transaction_group=GROUP, check=self._check
        )
        number = 0
        while not self.stopping:
            self.pause(RATE_S)
            if self.quiet:
                self.idle = producer.flush(20.0)
                continue
            number += 1
            body = Sent(self.name, self.run_number, number).body
            self.database.sent.add(body)
            if self.chance.random() < 0.6:
                self._delay(producer, body)
            else:
                self._transact(producer, body)
        producer.close(20.0)

    def _delay(self, producer: Producer, body: bytes) -> None:
        try:
            future = producer.send(TOPIC, body, delay_level=self.chance.choice(LEVELS))
        except HastoreError:
            self.database.must[body] = False
            return
        future.add_done_callback(partial(self._ended, body))

    def _ended(self, body: bytes, future: Any) -> None:
        failure = future.exception()
        if failure is None:
            self.database.must[body] = True
        elif isinstance(failure, NotStoredError):
            self.database.must[body] = False
        elif not isinstance(failure, ClientError):
            self.history.violate(f"{self.name}: a delayed send ended with {failure!r}")

    def _transact(self, producer: Producer, body: bytes) -> None:
        self._deciding = body
        try:
            begun = producer.transaction(TOPIC, body)
        except HastoreError as failure:
            self._deciding = None
            if isinstance(failure, NotStoredError):
                self.database.must[body] = False
            return
        self.pause(RATE_S)
        commits = self.database.must[body] = self.chance.random() < 0.7
        self._deciding = None
        try:
            if self.chance.random() < 0.3:
                begun.leave_open()  # a check decides, as after an error of commit or rollback
            elif commits:
                begun.commit()
            else:
                begun.rollback()
        except HastoreError:
            pass

    def _check(self, message: Message) -> Decision:
        """Say what the database says; what it does not have, and nobody works on, is undone."""
        body = message.body
        if body == self._deciding:
            return Decision.UNKNOWN
        return Decision.COMMIT if self.database.must.setdefault(body, False) else Decision.ROLLBACK


def wrong(database: Database, log: Log, *, strict: bool, retention: bool) -> list[str]:
    """Return what is wrong at the end of a walk."""
    found = []
    there = delivered(log)
    for body, count in there.items():
        if body not in database.sent:
            found.append(f"the log has {body[:60]!r} in {TOPIC}, which nobody sent")
        elif strict and count > 1:
            found.append(f"{body[:40]!r} was delivered {count} times")
        elif strict and database.must.get(body) is False:
            found.append(f"{body[:40]!r} was delivered, though it was refused or rolled back")
    if strict and not retention:
        found += [f"{body[:40]!r} was not delivered" for body in database.due(log)]
    return found
