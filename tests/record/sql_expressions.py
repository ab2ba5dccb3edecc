"""Random SQL filters and records, to be read by hastore and by RocketMQ's own parser."""

from __future__ import annotations

import random

NAMES = ("a", "b", "TAGS", "_x$1")
STRINGS = ("", "5", "-5", "+5", "5.0", " 5", "5 ", "1e3", ".5", "5.", "0x1p3", "1f", "2D", "NaN")
STRINGS += ("-Infinity", "true", "TRUE", "false", "x", "x''y", "abc", "2147483647", "2147483648")
STRINGS += ("-2147483648", "9223372036854775807", "9223372036854775808", "0", "-0", "-0.0", "007")
NUMBERS = ("0", "5", "5.0", ".5", "5.", "1e3", "1E-3", "2147483647", "2147483648", "5L", "5l")
NUMBERS += ("9223372036854775807", "9223372036854775808", "0.0", "1e999", "3000000000", "10")
SIGNS = ("=", "<>", ">", ">=", "<", "<=")
PARTS = ("CONTAINS", "startswith", "EndsWith")
BLANKS = (" ", "  ", "\n", "\t", " /* a */ ", " -- b\n")


class Expressions:
    """Writes expressions, most of which are right."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def _any(self, among: tuple[str, ...]) -> str:
        return self._chance.choice(among)

    def _word(self, word: str) -> str:
        return word if self._chance.random() < 0.8 else word.lower()

    def _value(self) -> str:
        kind = self._chance.randrange(10)
        if kind < 4:
            return self._any(NAMES)
        if kind < 7:
            return self._any(NUMBERS)
        if kind < 8:
            return self._any(("-", "+", "- -", "-+")) + self._any((*NUMBERS, *NAMES))
        if kind < 9:
            return f"'{self._any(STRINGS)}'"
        return self._any(("TRUE", "false", "NULL"))

    def _list(self) -> str:
        count = self._chance.randrange(1, 8)
        return ", ".join(f"'{self._any(STRINGS)}'" for _ in range(count))

    def _test(self) -> str:
        negation = "NOT " if self._chance.random() < 0.3 else ""
        left = self._any(NAMES) if self._chance.random() < 0.7 else self._value()
        kind = self._chance.randrange(8)
        if kind < 4:
            return f"{left} {self._any(SIGNS)} {self._value()}"
        if kind == 4:
            limits = f"{self._value()} {self._word('AND')} {self._value()}"
            return f"{left} {negation}{self._word('BETWEEN')} {limits}"
        if kind == 5:
            return f"{left} {negation}{self._word('IN')} ({self._list()})"
        if kind == 6:
            return f"{left} {negation}{self._any(PARTS)} '{self._any(STRINGS)}'"
        return f"{left} {self._word('IS')} {negation}{self._word('NULL')}"

    def condition(self, depth: int = 3) -> str:
        """Return an expression."""
        kind = self._chance.randrange(8)
        if depth == 0 or kind < 2:
            return self._test() if self._chance.random() < 0.9 else self._value()
        inner = [self.condition(depth - 1) for _ in range(2)]
        if kind < 4:
            return f"{inner[0]} {self._word('AND')} {inner[1]}"
        if kind < 6:
            return f"{inner[0]} {self._word('OR')} {inner[1]}"
        if kind < 7:
            return f"{self._word('NOT')} ({inner[0]})"
        return f"({inner[0]}) {self._any(SIGNS)} {inner[1]}"

    def text(self) -> str:
        """Return an expression with blanks and comments; a few are damaged."""
        pieces = self.condition().split(" ")
        if self._chance.random() < 0.1:
            pieces.pop(self._chance.randrange(len(pieces)))
        return "".join(piece + self._any(BLANKS) for piece in pieces)

    def record(self) -> dict[str, str]:
        """Return the properties of a record."""
        names = [name for name in NAMES if self._chance.random() < 0.7]
        return {name: self._any(STRINGS).replace("''", "'") for name in names}
