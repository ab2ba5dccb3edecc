"""Who is asked about transactions goes on to be asked, whatever the application's check raises."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest

from hastore import Decision, Message
from hastore.aio import transactions
from hastore.aio.transactions import run_checks
from hastore.client.producer import checker
from hastore.client.producer.checker import Checker, Transaction
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.transactions import TransactionOptions, asked_in, begin
from hastore.errors import ClientError, ForbiddenError, OutcomeUnknown
from hastore.protocol import api
from hastore.record.codec import Host, build_record, patch_for_store

HOST = Host.parse("127.0.0.1:1")
ROUNDS = 2


def half(number: int, unique: str = "u") -> tuple[api.Checks, bytes]:
    """An answer that asks for one half message."""
    raw = bytearray(
        build_record(
            "t", b"%d" % number,
            queue_id=0, properties=[("UNIQ_KEY", unique)], born_timestamp_ms=1, born_host=HOST,
        )
    )  # fmt: skip
    patch_for_store(
        raw, 0, queue_offset=number, physical_offset=0, store_timestamp_ms=2, store_host=HOST
    )
    return api.Checks(1, [(0, number, 1)]), bytes(raw)


class Driver:
    """Asks for a half message in each poll; notes which ends it gets."""

    def __init__(self, make_future: Any) -> None:
        self._make_future = make_future
        self.polls = 0
        self.ends: list[int] = []

    @property
    def takes_polls(self) -> bool:
        return self.polls <= ROUNDS

    def call(self, make: Any, *, is_poll: bool = False) -> Any:
        future = self._make_future()
        if not is_poll:
            self.ends.append(make(1).queue_offset)
            future.set_result(None)
            return future
        self.polls += 1
        if self.takes_polls:
            future.set_result(half(self.polls))
        else:
            future.set_exception(ClientError("the producer is closed"))
        return future


def options(check: Any) -> TransactionOptions:
    return TransactionOptions("g", check, None, False, 1_000)


def test_a_check_that_awaits_what_was_cancelled_ends_no_later_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> Driver:
        driver = Driver(asyncio.get_running_loop().create_future)

        async def check(message: Message) -> Decision:
            if message.body == b"1":
                query = asyncio.ensure_future(asyncio.sleep(60))
                query.cancel()
                await query
            return Decision.COMMIT

        await run_checks(driver, options(check))
        return driver

    assert asyncio.run(main()).ends == [2]
    assert "stays open" in caplog.text


def test_the_cancelled_task_of_the_checks_ends() -> None:
    async def main() -> None:
        driver = Driver(asyncio.get_running_loop().create_future)

        async def check(_: Message) -> Decision:
            await asyncio.sleep(60)
            return Decision.COMMIT

        task = asyncio.ensure_future(run_checks(driver, options(check)))
        while not driver.polls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


class Two(Driver):
    """Asks for two half messages at once; `closed` is that of its producer."""

    closed = False

    @property
    def takes_polls(self) -> bool:
        return not self.closed and super().takes_polls

    def call(self, make: Any, *, is_poll: bool = False) -> Any:
        if not is_poll or self.polls == ROUNDS:
            return super().call(make, is_poll=is_poll)
        self.polls += 1
        (first, raw), (_, more) = half(1), half(2)
        future = self._make_future()
        future.set_result((api.Checks(1, [*first.halves, (len(raw), 2, 1)]), raw + more))
        return future


@pytest.mark.parametrize("awaits", [False, True])
def test_nobody_is_asked_once_the_producer_is_closed(awaits: bool) -> None:
    """What the check looks into may be closed, too."""
    asked: list[bytes] = []

    async def main() -> None:
        driver = Two(asyncio.get_running_loop().create_future)

        def check(message: Message) -> Decision:
            asked.append(message.body)
            driver.closed = True
            return Decision.UNKNOWN

        await run_checks(driver, options(check))

    def thread() -> None:
        driver: Any = Two(SendFuture)

        def check(message: Message) -> Decision:
            asked.append(message.body)
            driver.closed = True
            return Decision.UNKNOWN

        checker = Checker(driver, options(check))
        checker.start()
        checker.join(60)

    asyncio.run(main()) if awaits else thread()
    assert asked == [b"1"]


@pytest.mark.parametrize("raised", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_the_thread_of_the_checks_survives(
    caplog: pytest.LogCaptureFixture, raised: type[BaseException]
) -> None:
    def check(message: Message) -> Decision:
        if message.body == b"1":
            raise raised
        return Decision.COMMIT

    driver: Any = Driver(SendFuture)
    checker = Checker(driver, options(check))
    checker.start()
    checker.join(60)
    assert driver.ends == [2]
    assert "stays open" in caplog.text


@pytest.mark.parametrize("unique", ["odd\udcff", "u" * 256])
def test_an_id_that_cannot_be_sent_back_is_not_used(unique: str) -> None:
    """An earlier version of a node gives such a UNIQ_KEY."""
    [(message, begun)] = asked_in(*half(3, unique), options(None))
    assert begun.unique == message.message_id and begun.queue_offset == 3


ENDS: dict[str, Callable[[Transaction], object]] = {
    "commit": lambda one: one.commit(),
    "rollback": lambda one: one.rollback(),
    "leave open": lambda one: one.leave_open(),
    "interrupt": lambda one: one.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None),
}


@pytest.mark.parametrize("end", [*ENDS, "dropped"])
def test_the_work_of_its_own_block_is_not_asked_about(end: str) -> None:
    """The check found no order yet, and rolled back what the block then wanted to commit."""
    of_group, driver = options(None), FailingDriver()
    transaction = Transaction(begin("t", of_group), None, driver, of_group)
    asked = half(1, transaction.transaction_id)
    assert list(asked_in(*asked, of_group)) == []
    assert len(list(asked_in(*asked, options(None)))) == 1, "another producer does not know"
    if end == "dropped":
        del transaction
        gc.collect()
    else:
        with contextlib.suppress(OutcomeUnknown):
            ENDS[end](transaction)
    assert len(list(asked_in(*asked, of_group))) == 1


def test_a_half_message_that_is_being_sent_is_not_asked_about() -> None:
    """Its confirmation may come after the first check; without one its block never begins."""
    of_group = options(None)
    begun = begin("t", of_group)
    asked = half(1, begun.unique)
    with pytest.raises(OutcomeUnknown):
        with of_group.running.sending(begun.unique):
            assert list(asked_in(*asked, of_group)) == []
            raise OutcomeUnknown("no answer")
    assert len(list(asked_in(*asked, of_group))) == 1
    with of_group.running.sending(begun.unique):
        transaction = Transaction(begun, None, FailingDriver(), of_group)
    assert list(asked_in(*asked, of_group)) == []
    transaction.leave_open()


class FailingDriver:
    """Loses the answer to each end."""

    takes_polls = True

    def call(self, make: Any, *, is_poll: bool = False) -> Any:
        future: SendFuture[Any] = SendFuture()
        future.set_exception(OutcomeUnknown("no answer"))
        return future


class Refused(Driver):
    """Is refused twice for one reason, asked, and refused twice again."""

    def call(self, make: Any, *, is_poll: bool = False) -> Any:
        assert is_poll
        future = self._make_future()
        self.polls += 1
        if self.polls == 3:
            future.set_result((api.Checks(1, []), b""))
        else:
            future.set_exception(ForbiddenError("FORBIDDEN: not yours"))
        return future

    @property
    def takes_polls(self) -> bool:
        return self.polls <= 5


@pytest.mark.parametrize("awaits", [False, True])
def test_a_refusal_that_stays_is_logged_once(
    awaits: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checker, transactions):
        monkeypatch.setattr(module, "AGAIN_S", 0.0)

    async def main() -> None:
        driver = Refused(asyncio.get_running_loop().create_future)
        await run_checks(driver, options(lambda _: Decision.UNKNOWN))

    if awaits:
        asyncio.run(main())
    else:
        driver: Any = Refused(SendFuture)
        asking = Checker(driver, options(lambda _: Decision.UNKNOWN))
        asking.start()
        asking.join(60.0)
    told = "transactions: group g is not asked: FORBIDDEN: not yours"
    assert [one.getMessage() for one in caplog.records] == [told] * 2
