"""How the block of a transaction ends it after a commit or rollback that was not confirmed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from hastore import Decision
from hastore.aio.transactions import Transaction as AioTransaction
from hastore.client.producer.checker import Transaction
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.transactions import Begun, TransactionOptions
from hastore.errors import OutcomeUnknown

BEGUN = Begun("t", "A" * 32, "g")
OPTIONS = TransactionOptions("g", None, None, False, 1_000)


class Driver:
    """Loses the answer to each end; notes which ends it gets."""

    takes_polls = True

    def __init__(self, make_future: Any) -> None:
        self._make_future = make_future
        self.ends: list[bool] = []

    def call(self, make: Any, *, is_poll: bool = False) -> Any:
        self.ends.append(make(1).commit)
        future = self._make_future()
        future.set_exception(OutcomeUnknown("no answer"))
        return future


@pytest.mark.parametrize("wanted", [Decision.COMMIT, Decision.ROLLBACK])
@pytest.mark.parametrize("caught", [False, True])
def test_an_end_of_unknown_outcome_is_not_followed_by_the_other_one(
    wanted: Decision, caught: bool
) -> None:
    """The database has committed, perhaps: only a check can know."""
    driver = Driver(SendFuture)
    transaction = Transaction(BEGUN, None, driver, OPTIONS)
    with contextlib.nullcontext() if caught else pytest.raises(OutcomeUnknown):
        with transaction:
            with contextlib.suppress(OutcomeUnknown) if caught else contextlib.nullcontext():
                transaction.commit() if wanted is Decision.COMMIT else transaction.rollback()
    assert set(driver.ends) == {wanted is Decision.COMMIT}
    assert transaction.outcome is Decision.UNKNOWN


def test_a_commit_that_ran_into_the_applications_own_timeout_is_not_rolled_back() -> None:
    async def main() -> None:
        driver = Driver(asyncio.get_running_loop().create_future)
        transaction = AioTransaction(BEGUN, None, driver, OPTIONS)
        with pytest.raises(TimeoutError):
            async with transaction:
                try:
                    await transaction.commit()
                except OutcomeUnknown as failure:
                    raise TimeoutError from failure
        assert driver.ends == [True] and transaction.outcome is Decision.UNKNOWN

    asyncio.run(main())
