"""Rights by topic pattern, names and keys."""

import random
import time

import pytest

from hastore.security.identity import (
    Identity,
    key_problem,
    matches,
    name_problem,
    pattern_problem,
    short,
)


@pytest.mark.parametrize(
    ("pattern", "topic", "fits"),
    [
        ("orders", "orders", True),
        ("orders", "orders2", False),
        ("orders", "Orders", False),
        ("orders*", "orders", True),
        ("orders-*", "orders-eu", True),
        ("orders-*", "orders", False),
        ("*-dead", "orders-dead", True),
        ("*", "", True),
        ("*", "anything|%RETRY%x", True),
        ("**", "x", True),
        ("?", "x", True),
        ("?", "", False),
        ("a?c", "abc", True),
        ("a?c", "a\nc", True),
        ("a*b*c", "a1b2b3c", True),
        ("a*b*c", "acb", False),
        ("a*bc", "abcbc", True),
        ("*ab*ab", "ab", False),
        ("a|b", "a", False),  # no expression: | is a character of topics
        ("a|b", "a|b", True),
        ("a%b", "a%b", True),
        ("a-b", "aXb", False),
        ("orders", "orders\n", False),
        ("*", "HASTORE_POSITIONS", False),
        ("H*", "HASTORE_POSITIONS", False),
        ("?ASTORE_POSITIONS", "HASTORE_POSITIONS", False),
        ("HASTORE_*", "HASTORE_POSITIONS", True),
        ("HASTORE_POSITIONS", "HASTORE_POSITIONS", True),
        ("*", "HASTORE", True),
    ],
)
def test_a_pattern_stands_for_topics(pattern, topic, fits):
    assert pattern_problem(pattern) is None
    assert matches((pattern,), topic) is fits
    assert Identity("a", produce=(pattern,)).may_produce(topic) is fits
    assert Identity("a", consume=("no", pattern)).may_consume(topic) is fits
    assert not Identity("a", produce=(pattern,), is_admin=True).may_consume(topic)
    assert not Identity("a", consume=(pattern,), is_admin=True).may_produce(topic)


def test_patterns_agree_with_a_plain_matcher():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)

    def plain(pattern, topic):
        if not pattern:
            return not topic
        if pattern[0] == "*":
            return any(plain(pattern[1:], topic[at:]) for at in range(len(topic) + 1))
        return bool(topic) and pattern[0] in ("?", topic[0]) and plain(pattern[1:], topic[1:])

    for _ in range(5_000):
        pattern = "".join(chance.choices("ab*?", k=chance.randrange(1, 8)))
        topic = "".join(chance.choices("ab", k=chance.randrange(0, 9)))
        assert matches((pattern,), topic) is plain(pattern, topic), (pattern, topic)


def test_a_hostile_topic_costs_neither_time_nor_memory():
    pattern, topic = "*a" * 63 + "*", "a" * 62 + "b" * 32_700
    started = time.process_time()
    for count in range(100):
        assert not matches((pattern,), topic + str(count))
    assert time.process_time() - started < 20  # a pattern that goes back would take years


@pytest.mark.parametrize(
    "pattern", ["", "a.b", "orders.*", "[ab]", "a b", "a\n", "\u00e9", "*" * 128]
)
def test_what_is_no_pattern_is_named_with_a_remedy(pattern):
    problem = pattern_problem(pattern)
    assert problem is not None and "; " in problem and problem.isprintable()


@pytest.mark.parametrize("name", ["a", "orders", "node-1.example@x", "0", "Z" * 64])
def test_names_that_are_allowed(name):
    assert name_problem(name) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", " a", "a ", "a b", "-a", ".a", "a:b", "a/b", "a,b", "a=b", "a\0", "a\n", "\x1b[31ma"),
        *("A" * 65, "a" * (1 << 20), "\u0430dmin", "\uff41dmin", "e\u0301", "\u00e9", "\u212a"),
        *("a\u200bb", "\u202eadmin", "\ud800"),
    ],
)
def test_names_that_are_not(name):
    problem = name_problem(name)
    assert problem is not None and problem.isprintable() and problem.isascii()
    assert len(problem) < 250
    assert len(short(name)) <= 80


def test_a_key_is_64_hex_digits_and_never_quoted():
    assert key_problem("0123456789abcdef" * 4) is None
    for wrong in ("", "secret", "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n", "\uff10" * 64):
        problem = key_problem(wrong)
        assert problem is not None and (not wrong or wrong not in problem)


def test_a_key_in_a_wrong_place_is_not_shown():
    key, verifier = "0123456789abcdef" * 4, "q83vEjRWeJqrze8SNFZ4mqvN7xI0VniaqzEjRWeJqr0="
    for wrong in (key, key.upper()):
        problem = name_problem(wrong)
        assert "a key stands where a name belongs" in problem and wrong[:12] not in problem
        for text in (short(wrong), short(f"x {wrong} y"), pattern_problem(f"{wrong}{wrong}")):
            assert wrong[:12] not in text and "(hidden)" in text or "longer than" in text
    assert verifier[:12] not in short(f"$4096:{verifier}")
    assert short("orders-app.example") == "'orders-app.example'"
