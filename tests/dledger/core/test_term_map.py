"""TermMap against a plain list of terms, with random operations (the seed is printed)."""

import random

import pytest

from hastore.dledger.core.term_map import TermMap


class ListedTerms:
    """The dumb alternative: the term of every entry."""

    def __init__(self):
        self.begin, self.prev, self.terms = 0, -1, []

    @property
    def end(self):
        return self.begin + len(self.terms) - 1

    def at(self, index):
        if index == self.begin - 1:
            return self.prev
        return self.terms[index - self.begin] if self.begin <= index <= self.end else None

    def last_at_most(self, term, index):
        fitting = [i for i in range(self.begin - 1, self.end + 1) if self.at(i) <= term]
        return max((i for i in fitting if i <= index), default=None)

    def runs(self, first, last):
        found = []
        for index in range(first, last + 1):
            if found and found[-1][0] == self.at(index):
                found[-1] = (self.at(index), found[-1][1] + 1)
            else:
                found.append((self.at(index), 1))
        return tuple(found)


def change(numbers, listed, terms):
    """Do the same random change to both."""
    kind = numbers.randrange(6)
    if kind < 3:
        term = max(listed.at(listed.end), 0) + numbers.choice([0, 0, 1, 3])
        count = numbers.randint(1, 4)
        listed.terms += [term] * count
        terms.append(term, count)
    elif kind == 3 and listed.terms:
        index = numbers.randint(listed.begin, listed.end + 1)
        del listed.terms[index - listed.begin :]
        terms.truncate(index)
    elif kind == 4 and listed.terms:
        index = numbers.randint(listed.begin, listed.end + 1)
        terms.retain(index)
        listed.prev = listed.at(index - 1)
        del listed.terms[: index - listed.begin]
        listed.begin = index
    elif numbers.random() < 0.2:
        listed.prev = max(listed.at(listed.end), 0)
        listed.begin, listed.terms = listed.end + numbers.randint(2, 9), []
        terms.install(listed.begin, listed.prev)


def test_the_map_says_what_the_list_says():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    for _ in range(60):
        listed, terms = ListedTerms(), TermMap(0, -1, ())
        for _ in range(40):
            change(numbers, listed, terms)
            begin, end = listed.begin, listed.end
            assert (terms.begin_index, terms.end_index) == (begin, end)
            assert terms.end_term == listed.at(end)
            for index in range(begin - 2, end + 2):
                assert terms.term_at(index) == listed.at(index)
            if listed.terms:
                first = numbers.randint(begin, end)
                last = numbers.randint(first, end)
                assert terms.runs(first, last) == listed.runs(first, last)
                same = [i for i in range(begin, last + 1) if listed.at(i) == listed.at(last)]
                assert terms.first_of_term(last) == same[0]
            term, index = numbers.randint(-1, 9), numbers.randint(begin - 2, end + 1)
            assert terms.last_at_most(term, index) == listed.last_at_most(term, index)
            again = TermMap(begin, end, terms.pairs, terms.prev_term)
            assert again.pairs == terms.pairs


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 5, ()),
        (0, 5, ((1, 1),)),
        (0, 5, ((1, 0), (1, 3))),
        (0, 5, ((2, 0), (1, 3))),
        (0, 5, ((1, 0), (2, 6))),
        (4, 2, ((1, 0),)),
    ],
)
def test_pairs_that_fit_no_log_are_refused(arguments):
    with pytest.raises(ValueError, match="do not fit a log"):
        TermMap(*arguments)


def test_what_cannot_be_appended_or_cut_is_refused():
    terms = TermMap(3, 5, ((2, 3),), 1)
    with pytest.raises(ValueError, match="after term 2"):
        terms.append(1, 1)
    with pytest.raises(ValueError, match="after term 2"):
        terms.append(2, 0)
    with pytest.raises(ValueError, match="before the begin 3"):
        terms.truncate(2)
