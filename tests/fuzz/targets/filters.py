"""Filter expressions: SQL and tags. Compiling is bounded, and evaluating never fails."""

from __future__ import annotations

from hastore.errors import UsageError
from hastore.record import sql_filter
from hastore.record.message_filter import SQL, TAGS, MessageFilter, compile_filter
from hastore.record.properties import encode_properties
from hastore.record.sql_filter import MAX_DEPTH, MAX_TERMS, compile_sql
from tests.fuzz import kit

REACHES = (
    compile_filter, MessageFilter.matches, compile_sql, sql_filter.compare, sql_filter.read_double,
    sql_filter._ordered, sql_filter._is_in, sql_filter._has, sql_filter._read_as,
    sql_filter._check_limits, sql_filter._compare_doubles, sql_filter._negated,
)  # fmt: skip
LEAST = kit.Least(0.5, 3)
TOKENS = (
    *(b" AND ", b" OR ", b"NOT ", b" IS NULL", b" IS NOT NULL", b" BETWEEN 1 AND 2", b" IN ('a')"),
    *(b" CONTAINS 'a'", b" STARTSWITH 'a'", b"TRUE", b"NULL", b"1.5e3", b"99999999999L", b"/* */"),
    *(b"n", b"d", b"t", b"missing", b"-", b"<=", b"<>", b"''", b"x", b"h"),
)
PROPERTIES = {
    "a": "eu",
    "n": "5",
    "d": "5.0",
    "t": "true",
    "e": "",
    "x": "0x1.8p3",
    "h": "NaN",
    "big": "9" * 19,
    "neg": "-0.0",
    "inf": "Infinity",
    "o": "1e999",
    "p": "0x1p99999",
    "w": " 7 ",
    "u": "é",
    "l": "٣",
}
LONG = b"n\x01\xff\xfe\x02a\x01" + b"9" * 16_000 + b"x\x02d\x01" + b"0" * 16_000 + b"1"
RAW = encode_properties(list(PROPERTIES.items()))


def seeds() -> list[bytes]:
    """Return expressions of both kinds; the first byte says which."""
    sqls = [
        "region = 'eu' AND (price > 100 OR vip IS NOT NULL)",
        "n BETWEEN 1 AND 9",
        "n > 4",
        "a IN ('eu', 'us')",
        "a NOT IN ('x')",
        "a CONTAINS 'e'",
        "a NOT STARTSWITH 'x'",
        "NOT (n = 5)",
        "d >= 5.0",
        "t = TRUE",
        "missing IS NULL",
        "missing = 1",
        "-n = -5",
        "n <> 6",
        "a > 5",
        "big > 1",
        "x > 1.0",
        "h = 1.0",
        "neg < 0.1",
        "inf > 1.0",
        "o > 1.0",
        "p < 1.0",
        "a = 'it''s'",
        "n = 99999999999",
        "n NOT BETWEEN 6 AND 9",
        "(n) = 5 /* c */ -- d\n AND TRUE",
        "n BETWEEN 9 AND 1",
        "n = NULL",
        "1 = 1",
        "5",
        "n >",
        "",
        "'a' > 1",
        "n IN (1)",
        "1e999 = n",
        "n = 99999999999999999999",
        "NOT " * 120 + "TRUE",
        " OR ".join(["n = 1"] * 60),
        "x" * 99,
        "TRUE = 5",
        "n BETWEEN NULL AND 1",
        "+n = 5",
        "l = 3",
        "w = 7",
        "t AND t",
        "5 IN ('a')",
    ]
    tags = ["a || b", "*", "", " || ", "a", "é||b", "||"]
    return [*(b"s" + one.encode() for one in sqls), *(b"t" + one.encode() for one in tags)]


def one(data: bytes) -> None:
    """Compile an expression and evaluate it, on properties of every kind and on none."""
    kind, text = (SQL if data[:1] != b"t" else TAGS), kit.text_of(data[1:])
    with kit.documented(UsageError):
        found = compile_filter(kind, text)
    if found is None:
        return
    assert 1 <= found.terms <= MAX_TERMS + MAX_DEPTH
    assert isinstance(found.matches(RAW), bool)
    assert isinstance(found.matches(b""), bool)
    assert isinstance(found.matches(LONG), bool)
    if found.sql is not None:
        swapped = dict(zip(PROPERTIES, reversed(PROPERTIES.values()), strict=True))
        assert isinstance(found.sql.matches(swapped), bool)
        assert found.sql.matches(PROPERTIES) == found.matches(RAW)
