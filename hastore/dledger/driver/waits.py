"""TermWaits: what waits for the core on a leader: puts, by offset, and those who asked for
something else.

GroupTransferService holds the puts. It is told of each term before a put of the term is taken, and
of the term's end before the next one: an entry of a later term may lie at the same offset.
"""

import logging
from collections.abc import Callable
from functools import partial

from hastore.dledger.core.events import Settled
from hastore.dledger.driver.ordered_calls import OrderedCalls
from hastore.ha.master.group_transfer import GroupTransferService, Need, Progress

log = logging.getLogger(__name__)

Done = Callable[[Settled], None]


class Asked:
    """Who asked for something that takes a while; `done` is called once."""

    def __init__(self, done: Done) -> None:
        self.done = done


class TermWaits:
    """The caller holds the driver's lock; what is called in turn goes through `calls`."""

    def __init__(self, transfer: GroupTransferService, calls: OrderedCalls, level: str) -> None:
        # The term in which this node takes puts; 0: none. GroupTransferService knows this term.
        self.open_term = 0
        self._transfer = transfer
        self._calls = calls
        self._level = level
        self._term = 0
        self._serial = 0
        self._asked: list[Asked] = []

    def lead(self, term: int, committed_end: int) -> None:
        """Begin a term as leader; it is open once GroupTransferService knows of it."""
        if self._term == term:
            return
        self.end()
        self._term = term
        self._calls.add(partial(self._open, self._progress(committed_end)))

    def _open(self, progress: Progress) -> None:
        self._transfer.advance(progress)
        if self._term == progress.epoch:
            self.open_term = self._term

    def commit(self, committed_end: int) -> None:
        """Complete the puts that end at or before an offset; nothing on a follower."""
        if self._term:
            self._calls.add(partial(self._transfer.advance, self._progress(committed_end)))

    def end(self) -> None:
        """End the puts that wait, and the term: whether they are committed is not known."""
        if not self._term:
            return
        self._term = self.open_term = 0
        self._serial += 1
        self._calls.add(partial(self._abandon, self._serial))

    def ask(self, asked: Asked) -> None:
        """Remember who asked, until `settle` or `end_all`."""
        self._asked.append(asked)

    def settle(self, settled: Settled) -> None:
        """Tell who asked; the token of a put is no Asked."""
        if isinstance(settled.token, Asked):
            self._asked.remove(settled.token)
            self._calls.add(partial(settled.token.done, settled))

    def end_all(self, reason: str) -> None:
        """End everything: the core is not asked any more."""
        self.end()
        asked, self._asked = self._asked, []
        for one in asked:
            self._calls.add(partial(one.done, Settled(one, "TERM_CHANGED", reason=reason)))

    def _progress(self, end: int) -> Progress:
        self._serial += 1
        limits = dict.fromkeys(Need, end)
        return Progress(self._serial, limits, self._level_of, None, self._term)

    def _level_of(self, _need: Need, _end_offset: int) -> str:
        return self._level

    def _abandon(self, serial: int) -> None:
        ended = self._transfer.abandon(serial)
        if ended:
            log.warning("%d waiting puts ended: whether they are committed is not known", ended)
