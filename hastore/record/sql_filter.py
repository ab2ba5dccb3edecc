"""SQL filters: which records a consumer wants, by their properties, in RocketMQ's SQL92 dialect.

    region = 'eu' AND (price > 100 OR vip IS NOT NULL)

The dialect and its results are those of rocketmq-filter 5.3.3: comparisons (= <> > >= < <=),
BETWEEN, IN, IS NULL, CONTAINS, STARTSWITH, ENDSWITH, each with NOT, and AND, OR, NOT over
properties, numbers, strings, TRUE and FALSE. Every property is a string; beside a number it is
read as one. Logic has three values: what compares a missing property is unknown, and only what is
true matches. A comparison without meaning, such as of "abc" with a number, ends the evaluation:
the record does not match, whatever else the expression says.

One thing differs: RocketMQ ignores what follows a complete expression ("a = 1 b = 2"), and here
that is an error.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hastore.errors import HastoreError

if TYPE_CHECKING:
    from lark import Lark, Token

Properties = Mapping[str, str]
Evaluate = Callable[[Properties], Any]  # str, bool, int, Long, float, or None if unknown

MAX_CHARACTERS = 8 * 1024  # bounds the time to compile one, to some 10 ms
MAX_TERMS = 500  # bounds the time for one record, to some 0.2 ms
MAX_DEPTH = 100
_CACHED = 256  # expressions
_SHORT, _LONG_KEPT = 64, 16  # characters of a number; longer ones that are remembered

_GRAMMAR = r"""
?start: condition
?condition: conjunction
    | condition "OR"i conjunction -> either
?conjunction: equality
    | conjunction "AND"i equality -> both
?equality: comparison
    | equality "=" comparison -> equal
    | equality "<>" comparison -> not_equal
    | equality "IS"i "NULL"i -> is_null
    | equality "IS"i "NOT"i "NULL"i -> is_not_null
?comparison: unary
    | comparison (LESS | LESS_OR_SAME | MORE | MORE_OR_SAME) unary -> order
    | comparison "BETWEEN"i unary "AND"i unary -> between
    | comparison "NOT"i "BETWEEN"i unary "AND"i unary -> not_between
    | comparison "IN"i "(" STRING ("," STRING)* ")" -> is_in
    | comparison "NOT"i "IN"i "(" STRING ("," STRING)* ")" -> is_not_in
    | comparison (CONTAINS | STARTSWITH | ENDSWITH) STRING -> has
    | comparison "NOT"i (CONTAINS | STARTSWITH | ENDSWITH) STRING -> has_not
?unary: "+" unary
    | "-" unary -> negative
    | "NOT"i unary -> is_not
    | primary
?primary: "(" condition ")"
    | STRING -> string
    | FLOAT -> decimal
    | INTEGER -> integer
    | "TRUE"i -> true
    | "FALSE"i -> false
    | "NULL"i -> null
    | NAME -> name
CONTAINS: "CONTAINS"i
STARTSWITH: "STARTSWITH"i
ENDSWITH: "ENDSWITH"i
LESS: "<"
LESS_OR_SAME: "<="
MORE: ">"
MORE_OR_SAME: ">="
STRING: /'([^']|'')*'/
FLOAT: /([0-9]+\.[0-9]*(e[+-]?[0-9]+)?|\.[0-9]+(e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+)/i
INTEGER: /(0|[1-9][0-9]*)l?/i
NAME: /[a-z_$][a-z0-9_$]*/i
%ignore /[ \t\n\r\f]+/
%ignore /--[^\n\r]*[\n\r]/
%ignore /\/\*[^*]*\*(\*|[^*\/][^*]*\*)*\//
"""
_INTEGER = re.compile(r"[+-]?\d+")
# The digits are taken at once (++): a long property that is no number would else take seconds.
_DOUBLE = re.compile(
    r"([+-]?)(?:(NaN)|(Infinity)|((?:[0-9]++\.?[0-9]*+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)[fFdD]?"
    r"|(0[xX](?:[0-9a-fA-F]++\.?[0-9a-fA-F]*+|\.[0-9a-fA-F]++)[pP][+-]?[0-9]++)[fFdD]?)"
)
_JAVA_BLANKS = "".join(map(chr, range(0x21)))
_INT_MAX, _LONG_MAX = 2**31 - 1, 2**63 - 1


class SqlError(HastoreError):
    """An expression that is none, or that is too long; the text says where and why."""


class SqlFilter(NamedTuple):
    """A compiled expression."""

    text: str
    terms: int  # how many parts it has: what one evaluation costs, at most
    evaluate: Evaluate

    def matches(self, properties: Properties) -> bool:
        """Whether a record with these properties is wanted. Never raises for a record's sake."""
        try:
            return self.evaluate(properties) is True
        except _NoMeaningError:
            return False


class Long(int):
    """A whole number of 64 bits, as a constant outside 32 bits is one."""


class _NoMeaningError(Exception):
    """Two values cannot be compared."""


class _Node(NamedTuple):
    """A part of an expression."""

    text: str  # as in messages
    evaluate: Evaluate
    is_condition: bool = False  # it results in true, false or unknown
    is_constant: bool = False
    value: Any = None  # of a constant
    is_property: bool = False
    depth: int = 1
    terms: int = 1
    word: str = ""  # AND or OR, which joins the parts in `chained`
    chained: tuple[_Node, ...] = ()


def compile_sql(text: str) -> SqlFilter:
    """Compile an expression; raises SqlError, whose text names the place and what is wrong."""
    compiled = _compiled(text) if len(text) <= MAX_CHARACTERS else _too_long(text)
    if isinstance(compiled, SqlError):
        raise compiled.with_traceback(None)
    return compiled


def _too_long(text: str) -> SqlError:
    length = f"{len(text):,} characters; at most {MAX_CHARACTERS:,}"
    return SqlError(f"the SQL filter has {length}: use fewer values, or a tag")


@functools.lru_cache(maxsize=_CACHED)
def _compiled(text: str) -> SqlFilter | SqlError:
    """Compile an expression. A refusal is kept, too: a client asks again and again."""
    from lark.exceptions import UnexpectedInput  # it takes 50 ms, and few need it

    try:
        node: _Node = _condition(_parser().parse(text))  # type: ignore[arg-type]  # see _parser
    except UnexpectedInput as failure:
        return SqlError(f"SQL filter: {_place(text, failure)}")
    except SqlError as failure:
        return failure
    return SqlFilter(text, node.terms, node.evaluate)


def _place(text: str, failure: Any) -> str:
    position = failure.pos_in_stream
    token = getattr(failure, "token", None)
    if position is None or (token is not None and token.type == "$END"):
        return f"it ends too early: {text[-40:]!r}" if text.strip() else "it is empty"
    rest = text[position : position + 20]
    return f"unexpected {rest!r} at character {position + 1}"


@functools.cache
def _parser() -> Lark:
    """Return the parser; it makes a _Node of the whole text, since it is given the transformer."""
    import lark

    return lark.Lark(_GRAMMAR, parser="lalr", lexer="basic", transformer=_Maker())


def _joined(text: str, evaluate: Evaluate, *parts: _Node, is_condition: bool = True) -> _Node:
    depth = 1 + max(part.depth for part in parts)
    if depth > MAX_DEPTH:
        raise SqlError(f"the SQL filter is nested more than {MAX_DEPTH} deep: use IN, or fewer NOT")
    terms = 1 + sum(part.terms for part in parts)
    if terms > MAX_TERMS:
        raise SqlError(f"the SQL filter has more than {MAX_TERMS} terms: use IN for many values")
    return _Node(text[:60], evaluate, is_condition, depth=depth, terms=terms)


def _condition(node: _Node) -> _Node:
    """Return a part as a condition: a property is one, and never true."""
    if node.is_condition:
        return node
    if not node.is_property:
        raise SqlError(f"SQL filter: {node.text} is neither true nor false; compare it")
    evaluate = node.evaluate
    return _joined(node.text, lambda found: None if evaluate(found) is None else False, node)


def _constant(text: str, value: Any, *, is_condition: bool = False) -> _Node:
    return _Node(text[:60], lambda _found: value, is_condition, is_constant=True, value=value)


_NULL = _constant("NULL", None, is_condition=True)


class _Maker:
    """Makes a part of what each rule of the grammar found; the parser calls these methods."""

    def string(self, found: list[Token]) -> _Node:
        return _constant(found[0], unquoted(found[0]))

    def decimal(self, found: list[Token]) -> _Node:
        value = float(found[0])
        if not 0 < value < math.inf:
            raise SqlError(f"SQL filter: {found[0][:40]} is no number that it can hold")
        return _constant(found[0], value)

    def integer(self, found: list[Token]) -> _Node:
        digits = found[0].rstrip("lL")
        if len(digits) > 19 or int(digits) > _LONG_MAX:
            raise SqlError(f"SQL filter: {digits[:40]} is larger than 64 bits hold")
        value = int(digits)
        return _constant(found[0], value if value <= _INT_MAX else Long(value))

    def true(self, _found: list[Token]) -> _Node:
        return _constant("TRUE", True, is_condition=True)

    def false(self, _found: list[Token]) -> _Node:
        return _constant("FALSE", False, is_condition=True)

    def null(self, _found: list[Token]) -> _Node:
        return _NULL

    def name(self, found: list[Token]) -> _Node:
        name = str(found[0])
        return _Node(name[:60], lambda values: values.get(name), is_property=True)

    def negative(self, found: list[_Node]) -> _Node:
        [node] = found
        evaluate = node.evaluate
        return _joined(
            f"-{node.text}", lambda values: _negated(evaluate(values)), node, is_condition=False
        )

    def is_not(self, found: list[_Node]) -> _Node:
        return _not(_condition(found[0]))

    def either(self, found: list[_Node]) -> _Node:
        return _either(*map(_condition, found))

    def both(self, found: list[_Node]) -> _Node:
        return _both(*map(_condition, found))

    def equal(self, found: list[_Node]) -> _Node:
        return _equal(*found)

    def not_equal(self, found: list[_Node]) -> _Node:
        return _not(_equal(*found))

    def is_null(self, found: list[_Node]) -> _Node:
        return _same(found[0], _NULL)

    def is_not_null(self, found: list[_Node]) -> _Node:
        return _not(_same(found[0], _NULL))

    def order(self, found: list[Any]) -> _Node:
        left, sign, right = found
        return _ordered(left, str(sign), right)

    def between(self, found: list[_Node]) -> _Node:
        node, low, high = found
        _check_limits(low, high)
        return _both(_ordered(node, ">=", low), _ordered(node, "<=", high))

    def not_between(self, found: list[_Node]) -> _Node:
        node, low, high = found
        return _either(_ordered(node, "<", low), _ordered(node, ">", high))

    def is_in(self, found: list[Any]) -> _Node:
        return _is_in(found[0], found[1:], wanted=True)

    def is_not_in(self, found: list[Any]) -> _Node:
        return _is_in(found[0], found[1:], wanted=False)

    def has(self, found: list[Any]) -> _Node:
        return _has(*found, wanted=True)

    def has_not(self, found: list[Any]) -> _Node:
        return _has(*found, wanted=False)


def unquoted(literal: str) -> str:
    """Return the value of a string literal: two quotes in it stand for one."""
    return literal[1:-1].replace("''", "'")


def _not(node: _Node) -> _Node:
    evaluate = node.evaluate

    def opposite(found: Properties) -> bool | None:
        value = evaluate(found)
        return None if value is None else not value

    return _joined(f"NOT {node.text}", opposite, node)


def _either(left: _Node, right: _Node) -> _Node:
    return _chain(left, right, "OR", decides=True)


def _both(left: _Node, right: _Node) -> _Node:
    return _chain(left, right, "AND", decides=False)


def _chain(left: _Node, right: _Node, word: str, *, decides: bool) -> _Node:
    """Join two conditions; the first that is `decides` decides, and no later one is read.

    A chain of many, such as a OR b OR c, is one part: else its end would be nested deeply.
    """
    before = left.chained if left.word == word else (left,)
    chained = (*before, right)
    evaluates: list[Evaluate] = [node.evaluate for node in chained]

    def chain(found: Properties) -> Any:
        result: bool | None = not decides
        for evaluate in evaluates:
            one = evaluate(found)
            if one is decides:
                return decides
            if one is None:
                result = None
        return result

    node = _joined(f"({left.text} {word} {right.text})", chain, *chained)
    return node._replace(word=word, chained=chained)


def _equal(left: _Node, right: _Node) -> _Node:
    for node in (left, right):
        if node.is_constant and node.value is None:
            raise SqlError("SQL filter: nothing equals NULL; write IS NULL or IS NOT NULL")
    if left.is_constant and right.is_constant and left.is_condition and not right.is_condition:
        raise SqlError(f"SQL filter: {left.text} cannot be compared with {right.text}")
    return _same(left, right)


def _same(left: _Node, right: _Node) -> _Node:
    first, second = left.evaluate, right.evaluate

    def same(found: Properties) -> bool | None:
        one, other = first(found), second(found)
        if one is None:
            return True if other is None else None
        return other is not None and compare(one, other) == 0

    return _joined(f"{left.text} = {right.text}", same, left, right)


def _ordered(left: _Node, sign: str, right: _Node) -> _Node:
    for node in (left, right):
        is_number = node.is_constant and type(node.value) in (int, Long, float)
        if (node.is_constant and not is_number) or node.is_condition:
            raise SqlError(f"SQL filter: {node.text} has no order: only numbers do")
    first, second = left.evaluate, right.evaluate
    wants_less, wants_more = "<" in sign, ">" in sign
    wants_same = "=" in sign

    def ordered(found: Properties) -> bool | None:
        one = first(found)
        if one is None:
            return None
        other = second(found)
        if other is None:
            return None
        if type(one) is str and type(other) is str:
            one, other = read_double(one), read_double(other)
        order = compare(one, other)
        return wants_same if order == 0 else wants_less if order < 0 else wants_more

    return _joined(f"{left.text} {sign} {right.text}", ordered, left, right)


def _check_limits(low: _Node, high: _Node) -> None:
    if not (low.is_constant and high.is_constant):
        return
    if low.value is None or high.value is None:
        raise SqlError("SQL filter: BETWEEN needs two numbers, not NULL")
    try:
        order = compare(high.value, low.value)
    except _NoMeaningError:
        order = -1
    if order < 0:
        raise SqlError(f"SQL filter: BETWEEN {low.text} AND {high.text} holds nothing")


def _is_in(node: _Node, tokens: list[Token], *, wanted: bool) -> _Node:
    if not node.is_property:
        raise SqlError(f"SQL filter: IN needs a property before it, not {node.text}")
    evaluate = node.evaluate
    values = frozenset(unquoted(token) for token in tokens)

    def is_in(found: Properties) -> bool | None:
        value = evaluate(found)
        return None if value is None else (value in values) is wanted

    return _joined(f"{node.text} IN (...)", is_in, node)


def _has(node: _Node, part: str, token: str, *, wanted: bool) -> _Node:
    evaluate, piece = node.evaluate, unquoted(token)
    method = {"CONTAINS": str.__contains__, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith}
    test = method[part.upper()]

    def has(found: Properties) -> bool:
        value = evaluate(found)
        return type(value) is str and test(value, piece) is wanted

    def has_nothing(_found: Properties) -> bool:
        return False  # as RocketMQ: the value is not evaluated, so it may be without meaning

    return _joined(f"{node.text} {part} {token}", has if piece else has_nothing, node)


# ---- values, as Java compares them


def compare(one: Any, other: Any) -> int:
    """Return a negative number, 0 or a positive one, as RocketMQ orders two known values.

    A string beside a number is read as a number of that kind: beside 5, "5.0" is none.
    """
    kind, against = type(one), type(other)
    if kind is not against:
        if kind is bool:
            if against is str:
                raise _NoMeaningError
            return -1
        if kind is str:
            one = _read_as(against, one)
        elif against is str:
            other = _read_as(kind, other)
        elif against is bool:
            return -1
        elif float in (kind, against):
            one, other = float(one), float(other)
    if type(one) is float:
        return _compare_doubles(one, other)
    return int(one > other) - int(one < other)


def _compare_doubles(one: float, other: float) -> int:
    if one < other:
        return -1
    if one > other:
        return 1
    # NaN is the largest, and equals itself; -0.0 comes before 0.0.
    keys = [(math.isnan(value), math.copysign(1.0, value)) for value in (one, other)]
    if keys[0][0] and keys[1][0]:
        return 0
    return (keys[0] > keys[1]) - (keys[0] < keys[1])


def _read_as(kind: type, text: str) -> Any:
    if kind is bool:
        return text.lower() == "true"
    if kind is float:
        return read_double(text)
    if _INTEGER.fullmatch(text) is None:
        raise _NoMeaningError
    digits = text.lstrip("+-")
    if len(digits) > 19:
        digits = _without_zeros(digits)
    value = -int(digits) if text.startswith("-") else int(digits)
    largest = _INT_MAX if kind is int else _LONG_MAX
    if not -largest - 1 <= value <= largest:
        raise _NoMeaningError
    return kind(value)


@functools.lru_cache(_LONG_KEPT)
def _without_zeros(digits: str) -> str:
    """Return up to 19 decimal digits of any script without the zeros before them."""
    found = "".join(str(int(digit)) for digit in digits).lstrip("0") or "0"
    if len(found) > 19:
        raise _NoMeaningError
    return found


def read_double(text: str) -> float:
    """Return the number that Java's Double.valueOf reads."""
    return _read_short(text) if len(text) <= _SHORT else _read_long(text)


def _read_short(text: str) -> float:
    found = _DOUBLE.fullmatch(text.strip(_JAVA_BLANKS))
    if found is None:
        raise _NoMeaningError
    sign, is_nan, is_infinite, digits, hexadecimal = found.groups()
    if is_nan:
        return math.nan
    if is_infinite:
        value = math.inf
    elif digits is not None:
        value = float(digits)
    else:
        try:
            value = float.fromhex(hexadecimal)
        except OverflowError:
            value = math.inf
    return -value if sign == "-" else value


# Each term of an expression may read the same 32 KB.
_read_long = functools.lru_cache(_LONG_KEPT)(_read_short)


def _negated(value: Any) -> Any:
    if type(value) in (int, Long, float):
        return type(value)(-value)
    return None
