"""Which messages a reader wants: by tags, or by an SQL expression over properties. Pure.

    tags   "red || green"     the TAGS of a message is one of these, as RocketMQ's subscriptions say
    sql    "price > 10"       the expression is true of its properties (sql_filter.py)

Nodes evaluate filters on pulls, and readers of files themselves. An inner batch of RocketMQ, one
record with several messages, matches every filter: only who takes it apart knows its messages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hastore.errors import UsageError
from hastore.record.hashes import tag_codes, tags_of
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.record.properties import decode_properties, stored_tags
from hastore.record.sql_filter import MAX_CHARACTERS, SqlError, SqlFilter, compile_sql

TAGS, SQL = "tags", "sql"
MAX_EXPRESSION = MAX_CHARACTERS
_CACHED = 256


class MessageFilter(NamedTuple):
    """A checked filter: `codes` and `tags`, the hashes of the tags and the tags, or `sql`."""

    kind: str
    expression: str
    codes: frozenset[int] | None = None
    tags: frozenset[bytes] = frozenset()
    sql: SqlFilter | None = None

    @property
    def terms(self) -> int:
        """What a record costs at most, in parts of an SQL expression."""
        return 1 if self.sql is None else self.sql.terms

    def matches(self, properties: bytes) -> bool:
        """Whether a message with these raw properties is wanted. Never raises."""
        if self.sql is None:
            return (stored_tags(properties) or b"") in self.tags
        return self.sql.matches(dict(decode_properties(properties)))

    def matches_record(self, sys_flag: int, properties: bytes) -> bool:
        """Whether a record is wanted: as `matches` says, or if it is an inner batch."""
        return bool(sys_flag & FLAG_INNER_BATCH) or self.matches(properties)


def make_filter(tags: str | None = None, sql: str | None = None) -> MessageFilter | None:
    """Return the filter of at most one of two expressions; None if all messages are wanted.

    Raises UsageError, which names the argument, what is wrong, and the remedy.
    """
    if tags is not None and sql is not None:
        raise UsageError("tags and sql: give one of them; TAGS is a property, too: TAGS = 'red'")
    if sql is not None:
        return compile_filter(SQL, sql)
    return None if tags is None else compile_filter(TAGS, tags)


def compile_filter(kind: str, expression: str) -> MessageFilter | None:
    """Return a filter; None if it means all messages, as the tags "*" and "" do.

    Raises UsageError for a wrong expression. Expressions are cached.
    """
    if len(expression) > MAX_EXPRESSION:
        length = f"{len(expression):,} characters; at most {MAX_EXPRESSION:,}"
        raise UsageError(f"{kind}: an expression of {length}: use fewer values")
    if kind == TAGS:
        return _by_tags(expression)
    if kind != SQL:
        raise UsageError(f"{kind!r} is no kind of filter; the kinds are {TAGS} and {SQL}")
    try:
        return MessageFilter(SQL, expression, sql=compile_sql(expression))
    except SqlError as failure:
        raise UsageError(
            f"sql: {failure}. Write RocketMQ's SQL92, such as price > 10 AND region = 'eu'"
        ) from failure


@lru_cache(_CACHED)
def _by_tags(expression: str) -> MessageFilter | None:
    try:
        codes = tag_codes(expression)
    except UsageError as failure:
        raise UsageError(f"tags: {failure}") from failure
    if codes is None:
        return None
    if not codes:
        raise UsageError(f'tags: {expression:.20} names no tag; write "a || b", or * for all')
    names = frozenset(tag.encode("utf-8", "surrogateescape") for tag in tags_of(expression))
    return MessageFilter(TAGS, expression, codes, names)
