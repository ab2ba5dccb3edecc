"""Transactions of the asyncio producer, and the task in which it is asked about others.

    task: poll --> await check(message) --> end it, or leave it open --> poll ...

The task refers to the driver, not to the Producer, so that an unused Producer can be freed. It ends
once the driver takes no more polls.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Self

from hastore.client.messages import SendResult
from hastore.client.producer.transactions import (
    AGAIN_S,
    Caller,
    Decision,
    Refusals,
    TransactionOptions,
    TransactionState,
    asked_in,
    decided,
    end_request,
    note_answer,
    note_failed_check,
    poll_request,
)
from hastore.errors import HastoreError


class Transaction(TransactionState):
    """A transaction of hastore.aio.Producer; see that of hastore.Producer.

    A block that is cancelled leaves its transaction open.
    """

    async def commit(self) -> SendResult:
        """Commit: consumers get the message. Returns where it is, once that is confirmed.

        Raises OutcomeUnknown or NotStoredError if that is not known within the delivery timeout:
        commit again, or let a check decide. Raises TransactionError if it can never be committed.
        """
        if self._may_end(Decision.COMMIT):
            return self._committed(await self._send_end(commit=True))
        assert self._result is not None
        return self._result

    async def rollback(self) -> None:
        """Roll back: nobody gets the message. Raises as `commit` does."""
        if self._may_end(Decision.ROLLBACK):
            await self._send_end(commit=False)
            self._ended = Decision.ROLLBACK

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._end_of_block(kind, failure) as how:
            if how is Decision.COMMIT:
                await self.commit()
            elif how is Decision.ROLLBACK:
                await self.rollback()


class Beginning:
    """A transaction that begins when it is awaited, or with the block of an `async with`."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Transaction]]) -> None:
        self._begin = begin
        self._transaction: Transaction | None = None

    def __await__(self) -> Generator[Any, None, Transaction]:
        return self._begin().__await__()

    async def __aenter__(self) -> Transaction:
        self._transaction = await self._begin()
        return self._transaction

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._transaction is not None
        await self._transaction.__aexit__(kind, failure, trace)


async def run_checks(driver: Caller, options: TransactionOptions) -> None:
    """Ask the master for half messages that the group must decide, until the producer ends."""
    make, refusals = poll_request(options), Refusals(options.group)
    while driver.takes_polls:
        try:
            reply, payload = await driver.call(make, is_poll=True)
        except HastoreError as failure:
            if driver.takes_polls:
                refusals.note(failure)
                await asyncio.sleep(AGAIN_S)
            continue
        refusals.end()
        for message, begun in asked_in(reply, payload, options):
            if not driver.takes_polls:  # closed meanwhile, as perhaps what the check looks into
                return
            assert options.check is not None, "without a check there is no task"
            try:
                answer = options.check(message)
                if inspect.isawaitable(answer):
                    answer = await answer
                how = decided(answer, begun)
            except asyncio.CancelledError as failure:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                note_failed_check(begun, failure)  # of something that the check awaited
                continue
            except Exception as failure:
                note_failed_check(begun, failure)
                continue
            if how is not Decision.UNKNOWN and driver.takes_polls:
                end = end_request(begun, options, commit=how is Decision.COMMIT)
                driver.call(end).add_done_callback(partial(note_answer, begun))
