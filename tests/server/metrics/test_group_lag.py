"""How far consumer groups are behind."""

from prometheus_client.parser import text_string_to_metric_families

from hastore.protocol.committed_positions import Place
from hastore.server.metrics.node_metrics import PAIRS_MAX, add_group_lag, lag_of
from hastore.server.metrics.page import Page


def at(queue_offset: int) -> Place:
    return Place(queue_offset, None, None, 0)


def everything(_topic: str, _group: str | None) -> bool:
    return True


def lags(page: Page) -> dict[tuple[str, str], float]:
    families = {one.name: one for one in text_string_to_metric_families(page.render().decode())}
    samples = families["hastore_consumer_lag_messages"].samples
    found = {(one.labels["consumer_group"], one.labels["topic"]): one.value for one in samples}
    assert len(found) == len(samples)
    return found


def test_the_lag_is_what_can_still_be_read_of_the_queues_with_a_position() -> None:
    ranges = {0: (0, 10), 1: (40, 50), 2: (0, 7)}
    assert lag_of(ranges, {0: at(4)}) == 6
    assert lag_of(ranges, {0: at(10), 1: at(0)}) == 10, "30 messages were removed unread"
    assert lag_of(ranges, {0: at(12), 9: at(0)}) == 0


def test_pairs_beyond_the_bound_are_added_up() -> None:
    page = Page("c", "g", "1")
    positions = {(f"group{n}", "t"): {0: at(0)} for n in range(PAIRS_MAX + 3)}
    positions = {("other", "other"): {0: at(0)}, **positions}
    add_group_lag(page, positions, lambda topic: {0: (0, 5)}, everything)
    found = lags(page)
    assert len(found) == PAIRS_MAX
    assert found["group0", "t"] == 5
    assert found["other", "other"] == 5 * 5


def test_pairs_that_nobody_may_know_of_are_left_out() -> None:
    page = Page("c", "g", "1")
    positions = {(group, topic): {0: at(0)} for group in ("a", "b") for topic in ("t", "u")}
    may_count = {("t", "a")}.__contains__
    add_group_lag(page, positions, lambda _: {0: (0, 5)}, lambda *pair: may_count(pair))
    assert lags(page) == {("a", "t"): 5}


def test_the_sum_of_pairs_beyond_the_bound_has_none_that_nobody_may_know_of() -> None:
    page = Page("c", "g", "1")
    positions = {(f"group{n}", f"t{n % 2}"): {0: at(0)} for n in range(2 * PAIRS_MAX + 4)}
    add_group_lag(page, positions, lambda _: {0: (0, 5)}, lambda topic, _group: topic == "t1")
    assert lags(page)["other", "other"] == 2 * 5


def test_pairs_that_nobody_may_know_of_take_no_names_from_others() -> None:
    page = Page("c", "g", "1")
    positions = {(f"group{n}", "hidden"): {0: at(0)} for n in range(PAIRS_MAX)}
    positions["own", "t"] = {0: at(0)}
    add_group_lag(page, positions, lambda _: {0: (0, 5)}, lambda topic, _group: topic == "t")
    assert lags(page) == {("own", "t"): 5}
