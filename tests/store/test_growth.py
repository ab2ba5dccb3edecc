"""A distance in bytes as a time: when the log's end was where."""

from hastore.store.growth import NOTES_MAX, Growth


def test_who_lacks_what_came_at_a_time_lags_since_then() -> None:
    growth = Growth()
    for end, now_ms in ((100, 1_000.0), (100, 2_000.0), (200, 3_000.0), (300, 4_000.0)):
        growth.note(end, now_ms)
    assert growth.behind_ms(300, 9_000.0) == 0.0
    assert growth.behind_ms(299, 9_000.0) == 5_000.0
    assert growth.behind_ms(100, 9_000.0) == 6_000.0, "while nothing came there was no lag"
    assert growth.behind_ms(50, 9_000.0) == 8_000.0
    assert growth.behind_ms(350, 9_000.0) == 0.0, "beyond the last note: since a moment"


def test_a_cut_begins_anew() -> None:
    growth = Growth()
    growth.note(300, 1_000.0)
    growth.note(200, 2_000.0)
    assert growth.behind_ms(250, 3_000.0) == 0.0
    assert growth.behind_ms(100, 3_000.0) == 1_000.0


def test_notes_are_bounded_and_old_ones_stay_known_roughly() -> None:
    growth = Growth()
    count = 20 * NOTES_MAX
    for number in range(1, count + 1):
        growth.note(number, number * 1_000.0)
    now_ms = (count + 1) * 1_000.0
    assert len(growth._ends) <= NOTES_MAX
    growth._thin_out(now_ms)
    assert len(growth._ends) < NOTES_MAX // 2
    assert growth.behind_ms(count - 1, now_ms) == 1_000.0
    for offset in (count // 2, count - NOTES_MAX):
        told, real = growth.behind_ms(offset, now_ms), now_ms - (offset + 1) * 1_000.0
        assert 0.97 * real <= told <= real
