"""Transactions of the blocking producer, and the thread in which it is asked about others.

    ProducerChecks:  poll --> check(message) --> end it, or leave it open --> poll ...

The thread refers to the driver, not to the Producer, so that an unused Producer can be freed. It
ends once the driver takes no more polls.
"""

from __future__ import annotations

import threading
from functools import partial
from types import TracebackType
from typing import Self

from hastore.client.messages import SendResult
from hastore.client.producer.io_driver import IoDriver
from hastore.client.producer.transactions import (
    AGAIN_S,
    Begun,
    Decision,
    Refusals,
    TransactionOptions,
    TransactionState,
    asked_in,
    decided,
    end_request,
    note_answer,
    note_failed_check,
    note_lost_answer,
    poll_request,
)
from hastore.errors import HastoreError


class Transaction(TransactionState):
    """A transaction of hastore.Producer; `with` ends it with its block.

    The block's end commits it, an exception rolls it back, and the exception goes on. If the end
    cannot be confirmed within the delivery timeout, the transaction is left open, with a warning in
    the log: then a producer of the group is asked. The block raises TransactionError if the message
    is lost, because a failover has cut its half message.
    """

    def commit(self) -> SendResult:
        """Commit: consumers get the message. Returns where it is, once that is confirmed.

        Raises OutcomeUnknown or NotStoredError if that is not known within the delivery timeout:
        commit again, or let a check decide. Raises TransactionError if it can never be committed.
        """
        if self._may_end(Decision.COMMIT):
            return self._committed(self._send_end(commit=True).result())
        assert self._result is not None
        return self._result

    def rollback(self) -> None:
        """Roll back: nobody gets the message. Raises as `commit` does."""
        if self._may_end(Decision.ROLLBACK):
            self._send_end(commit=False).result()
            self._ended = Decision.ROLLBACK

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._end_of_block(kind, failure) as how:
            if how is Decision.COMMIT:
                self.commit()
            elif how is Decision.ROLLBACK:
                self.rollback()


class Checker:
    """Asks the master for half messages that its group must decide, and the application for each.

    `start` begins a thread, which calls the application's `check`.
    """

    def __init__(self, driver: IoDriver, options: TransactionOptions) -> None:
        self._driver = driver
        self._options = options
        self._thread = threading.Thread(target=self._run, name="ProducerChecks", daemon=True)
        self._pause = threading.Event()  # never set: a pause that a closed producer ends

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, for a while: the application's check may take long."""
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        driver, options = self._driver, self._options
        make, refusals = poll_request(options), Refusals(options.group)
        while driver.takes_polls:
            try:
                reply, payload = driver.call(make, is_poll=True).result()
            except HastoreError as failure:
                if driver.takes_polls:
                    refusals.note(failure)
                    self._pause.wait(AGAIN_S)
                continue
            refusals.end()
            for message, begun in asked_in(reply, payload, options):
                if not driver.takes_polls:
                    return
                assert options.check is not None, "without a check there is no thread"
                try:
                    how = decided(options.check(message), begun)
                except BaseException as failure:  # the application's, which must not end the thread
                    note_failed_check(begun, failure)
                    continue
                if how is not Decision.UNKNOWN:
                    self._end(begun, how)

    def _end(self, begun: Begun, how: Decision) -> None:
        make = end_request(begun, self._options, commit=how is Decision.COMMIT)
        try:
            ended = self._driver.call(make)
        except HastoreError as failure:
            note_lost_answer(begun, failure)
            return
        ended.add_done_callback(partial(note_answer, begun))
