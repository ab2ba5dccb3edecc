"""SQL filters: what matches, what is refused, and what one may cost.

CASES is checked against RocketMQ's own parser in tests/interop/test_sql_filters.py.
"""

import pytest

from hastore.record.sql_filter import (
    MAX_CHARACTERS,
    MAX_TERMS,
    SqlError,
    compile_sql,
    read_double,
)

RECORDS = (
    {"region": "eu", "price": "5"},
    {"region": "us", "price": "12.5", "vip": "true"},
    {"region": "it's", "price": "dear"},
    {"price": "-7", "vip": "FALSE", "limit": "5"},
    {},
)
# An expression, and the numbers of the records that match; RocketMQ reads none of it as "".
CASES = {
    "region = 'eu'": "0",
    "region <> 'eu'": "12",
    "region = 'it''s'": "2",
    "price = 5": "0",
    "price = 5.0": "0",
    "price > 4": "0",  # 12.5 is no whole number: nothing else is read
    "price > 4.0": "01",
    "price > 4.0 OR region = 'us'": "01",
    "region = 'us' OR price > 4": "01",
    "price > 4 OR region = 'us'": "0",
    "price >= limit": "",
    "price <= limit": "3",
    "price BETWEEN -10 AND 5": "03",
    "price NOT BETWEEN -10 AND 4.5": "0",
    "price BETWEEN -10.5 AND 4.5 AND vip IS NOT NULL": "3",
    "-5 < price": "0",
    "+5 = price": "0",
    "vip = TRUE": "1",
    "vip <> TRUE": "3",
    "TRUE = vip": "",  # without meaning in this order
    "vip": "",
    "NOT vip": "13",
    "NOT (vip = TRUE)": "3",
    "vip IS NULL": "024",
    "vip is not null": "13",
    "region IN ('eu', 'us')": "01",
    "region NOT IN ('eu', 'it''s')": "1",
    "region CONTAINS 't''s' or region startswith 'e'": "02",
    "region NOT ENDSWITH 's'": "0",
    "region < price STARTSWITH '' OR region = 'eu'": "0",  # what has no text is not evaluated
    "region < price STARTSWITH 'e' OR region = 'eu'": "",
    "region < price NOT CONTAINS '' OR region = 'eu'": "0",
    "REGION = 'eu'": "",
    "TRUE": "01234",
    "NOT NULL": "",
    "region = 'eu' -- a comment\n AND /* another */ price = 5": "0",
    "region = 'eu' AND price = 5 OR vip = TRUE AND region = 'us'": "01",
    "region = 'eu' AND (price = 5 OR vip = TRUE) AND region = 'us'": "",
}
REFUSED = {
    "": "it is empty",
    "  ": "it is empty",
    "price >": "it ends too early: 'price >'",
    "(price > 5": "it ends too early",
    "region = 'eu": 'unexpected "\'eu" at character 10',
    "region LIKE 'e%'": "unexpected \"LIKE 'e%'\" at character 8",
    "price + 1 > 5": "unexpected '+ 1 > 5' at character 7",
    "region = NULL": "nothing equals NULL; write IS NULL or IS NOT NULL",
    "region > 'eu'": "'eu' has no order: only numbers do",
    "price > (vip = TRUE)": "vip = TRUE has no order",
    "5": "5 is neither true nor false; compare it",
    "region AND 'eu'": "'eu' is neither true nor false",
    "TRUE = 5": "TRUE cannot be compared with 5",
    "price BETWEEN 5 AND 4": "BETWEEN 5 AND 4 holds nothing",
    "price BETWEEN NULL AND 4": "BETWEEN needs two numbers, not NULL",
    "5 IN ('5')": "IN needs a property before it, not 5",
    "price IN (5)": "unexpected '5)' at character 11",
    "price > 9223372036854775808": "larger than 64 bits hold",
    "price > 1e999": "1e999 is no number that it can hold",
}
TOO_MUCH = {
    "a = 1" + " OR a = 1" * MAX_TERMS: "more than 500 terms: use IN",
    "NOT " * 200 + "a": "nested more than 100 deep",
    "- " * 4000 + "a > 5": "nested more than 100 deep",
    "a = '" + "x" * MAX_CHARACTERS + "'": "characters; at most 8,192",
}


@pytest.mark.parametrize("text", CASES)
def test_a_filter_matches_what_it_matches_in_rocketmq(text: str) -> None:
    found = compile_sql(text)
    assert "".join(str(n) for n, one in enumerate(RECORDS) if found.matches(one)) == CASES[text]


@pytest.mark.parametrize("text", [*REFUSED, *TOO_MUCH])
def test_a_wrong_filter_is_refused_with_the_place_and_the_reason(text: str) -> None:
    with pytest.raises(SqlError) as failure:
        compile_sql(text)
    assert {**REFUSED, **TOO_MUCH}[text] in str(failure.value)
    assert len(str(failure.value)) < 300


def test_what_follows_a_complete_filter_is_refused() -> None:
    """RocketMQ ignores it, and a consumer would get what it did not ask for."""
    with pytest.raises(SqlError, match="unexpected 'ORR price = 5' at character 15"):
        compile_sql("region = 'eu' ORR price = 5")


def test_blanks_and_parentheses_are_free() -> None:
    assert compile_sql("(" * 4000 + "a = '1'" + ")" * 4000).matches({"a": "1"})


@pytest.mark.parametrize("digits", ["9" * 30_000, "0" * 30_000 + "5", "٥", "1e" + "9" * 3000])
def test_a_property_of_many_digits_is_no_reason_to_fail(digits: str) -> None:
    for text in ("a > 4", "a > 4.5", "a > 3000000000"):
        compile_sql(text).matches({"a": digits})
    assert compile_sql("a > 4").matches({"a": digits}) is (digits[-1] in "5٥")


def test_a_long_property_that_is_no_number_is_read_once() -> None:
    """Not from each of its digits anew: a producer's message would stop its readers for seconds."""
    found = compile_sql("n > 1.5 OR n < 0.5 OR n = 3")
    for text in ("1" * 32_000 + "x", "0x" + "1" * 32_000 + "p", "1" * 32_000 + "e"):
        assert not found.matches({"n": text})
    assert found.matches({"n": "0" * 32_000 + "2.5"}) and read_double("0" * 100 + "7") == 7.0
