"""The terms of a log's entries as (term, its first index) pairs; no entries.

Terms never fall along a log, so the term of any index is found by bisection. Each node has one map,
in its MemberState.

Invariants: `begin_index` <= `end_index` + 1; the pairs rise strictly in both parts; the first pair
begins at `begin_index` or before, unless the log is empty. `prev_term` is the term of the entry
before `begin_index`, -1 if there is none.
"""

from bisect import bisect_right

from hastore.protocol.dledger import NO_TERM


class TermMap:
    """Which term each entry of a log has."""

    def __init__(
        self,
        begin_index: int,
        end_index: int,
        terms: tuple[tuple[int, int], ...],
        prev_term: int = NO_TERM,
    ) -> None:
        self.begin_index = begin_index
        self.end_index = end_index
        self.prev_term = prev_term
        self._terms = [term for term, _ in terms]
        self._firsts = [first for _, first in terms]
        self._check()

    def _check(self) -> None:
        rising = all(
            part[i] < part[i + 1]
            for part in (self._terms, self._firsts)
            for i in range(len(part) - 1)
        )
        empty = self.end_index == self.begin_index - 1
        covered = bool(self._firsts) and self._firsts[0] <= self.begin_index
        inside = not self._firsts or self._firsts[-1] <= self.end_index
        if empty:
            self._terms, self._firsts = [], []
        elif not (rising and covered and inside and self.begin_index <= self.end_index):
            raise ValueError(
                f"the terms {self.pairs} do not fit a log of the entries {self.begin_index} to"
                f" {self.end_index}"
            )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The (term, first index) pairs."""
        return tuple(zip(self._terms, self._firsts, strict=True))

    @property
    def end_term(self) -> int:
        """The term of the last entry; of the entry before the log's begin, if the log is empty."""
        return self._terms[-1] if self._terms else self.prev_term

    def term_at(self, index: int) -> int | None:
        """Return the term of an entry, or of the one before the begin; None outside these."""
        if index == self.begin_index - 1:
            return self.prev_term
        if not self.begin_index <= index <= self.end_index:
            return None
        return self._terms[bisect_right(self._firsts, index) - 1]

    def first_of_term(self, index: int) -> int:
        """Return the first index in this log of the term that the entry `index` has."""
        if index < self.begin_index:
            return index
        return max(self._firsts[bisect_right(self._firsts, index) - 1], self.begin_index)

    def last_at_most(self, term: int, index: int) -> int | None:
        """Return the last entry up to `index` whose term is at most `term`.

        The entry before the begin counts too. None: all of them have a greater term.
        """
        run = bisect_right(self._terms, term)
        last = self._firsts[run] - 1 if run < len(self._firsts) else self.end_index
        last = min(last, index)
        if last >= self.begin_index and run > 0:
            return last
        before = self.begin_index - 1
        return before if before <= index and self.prev_term <= term else None

    def runs(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return (term, number of entries) of the entries `first` to `last`."""
        found = []
        run = bisect_right(self._firsts, first) - 1
        while first <= last:
            after = self._firsts[run + 1] if run + 1 < len(self._firsts) else self.end_index + 1
            count = min(after, last + 1) - first
            found.append((self._terms[run], count))
            first += count
            run += 1
        return tuple(found)

    def append(self, term: int, count: int) -> None:
        """Add `count` entries of a term at the end; the term must not fall."""
        if term < self.end_term or count < 1:
            raise ValueError(f"{count} entries of term {term} after term {self.end_term}")
        if not self._terms or term > self._terms[-1]:
            self._terms.append(term)
            self._firsts.append(self.end_index + 1)
        self.end_index += count

    def truncate(self, index: int) -> None:
        """Remove the entries from `index` on."""
        if index < self.begin_index:
            raise ValueError(f"truncation at {index}, before the begin {self.begin_index}")
        while self._firsts and self._firsts[-1] >= index:
            del self._firsts[-1], self._terms[-1]
        self.end_index = min(self.end_index, index - 1)
        if self.end_index < self.begin_index:
            self._terms, self._firsts = [], []

    def retain(self, begin_index: int) -> None:
        """Forget the entries below `begin_index`, as retention has removed them."""
        if not self.begin_index < begin_index <= self.end_index + 1:
            return
        prev_term = self.term_at(begin_index - 1)
        assert prev_term is not None
        run = bisect_right(self._firsts, begin_index) - 1
        del self._terms[:run], self._firsts[:run]
        self.begin_index = begin_index
        self.prev_term = prev_term
        if begin_index > self.end_index:
            self._terms, self._firsts = [], []

    def install(self, index: int, prev_term: int) -> None:
        """Begin an empty log at `index`."""
        self.begin_index, self.end_index, self.prev_term = index, index - 1, prev_term
        self._terms, self._firsts = [], []
