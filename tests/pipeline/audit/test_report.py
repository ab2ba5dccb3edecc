"""The table of the first difference: long values are shown around the place where they differ."""

import base64

import pytest

from hastore.cli.pipeline.audit import _bodies, _judge, _show, side_by_side
from hastore.pipeline.audit.job import NotCompared, Summary
from hastore.pipeline.audit.sides import FOLDER, Extent


def encoded(*bodies):
    return tuple(base64.b64encode(body).decode() for body in bodies)


def test_values_that_fit_are_whole():
    assert side_by_side("KEYS=a", "KEYS=b") == ("KEYS=a", "KEYS=b")
    assert side_by_side("x" * 48, "x" * 48) == ("x" * 48, "x" * 48)


def test_long_values_are_shown_from_their_start_if_they_are_equal_or_differ_there():
    assert side_by_side("x" * 60, "x" * 60) == ("x" * 45 + "...", "x" * 45 + "...")
    assert side_by_side("a" + "x" * 60, "b" + "x" * 60)[1] == "b" + "x" * 44 + "..."


def test_long_values_are_shown_around_their_difference():
    a, b = side_by_side("x" * 500 + "left" + "y" * 90, "x" * 500 + "right" + "y" * 90)
    assert a == "..." + "x" * 16 + "left" + "y" * 22 + "..."
    assert b == "..." + "x" * 16 + "right" + "y" * 21 + "..."
    assert len(a) == len(b) == 48


def test_one_value_may_end_where_the_other_goes_on():
    a, b = side_by_side("x" * 100, "x" * 100 + "more")
    assert (a, b) == ("..." + "x" * 16, "..." + "x" * 16 + "more")


def test_bodies_are_shown_around_the_byte_that_differs():
    a, b = _bodies(*encoded(b"x" * 60_000 + b"left", b"x" * 60_000 + b"right"))
    assert (a, b) == ("..." + "x" * 16 + "left", "..." + "x" * 16 + "right")
    assert _bodies(*encoded(b"one\n", b"two\n")) == ("one.", "two.")


def test_a_character_of_several_bytes_is_not_cut():
    text = "\u00e9" * 5_000
    a, b = _bodies(*encoded((text + "1").encode(), (text + "2").encode()))
    assert a.endswith("\u00e9" * 16 + "1") and b.endswith("\u00e9" * 16 + "2")
    assert "\\x" not in a


def test_bytes_that_are_no_text_are_shown_by_their_numbers():
    a, b = _bodies(*encoded(b"\xff\x00" * 300 + b"1", b"\xff\x00" * 300 + b"2"))
    assert a != b and "\\xff" in a


@pytest.mark.parametrize(("end", "code"), [(0, 0), (5000, 1)])
def test_an_audit_that_compared_nothing_of_a_log_has_failed(end, code, capsys):
    """As when retention removes it first: then nobody knows whether both are equal."""
    one, other = (Extent(name, FOLDER, 0, end, "readable offset", end) for name in ("/a", "/b"))
    found = Summary(one, other, "xxh3-128", 0, end, equal=True, complete=True)
    if end:
        found.not_compared = [NotCompared(0, end, "/b removed it by retention")]
    _show(found)
    assert _judge(found) == code
    said = capsys.readouterr().err
    assert ("both logs are empty" in said) == (not end)
    assert ("nothing was compared" in said) == bool(end)
