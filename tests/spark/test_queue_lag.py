"""The lag of a query, from the forms in which Spark gives its progress."""

import json
from types import SimpleNamespace

from hastore.spark import QueueLag, lag

END = {"version": 1, "next": {"t": {"0": 7, "10": 3}}, "before": {"t": {"0": [5, 100]}}}
LATEST = {"t": {"0": 9, "2": 4, "10": 3}}
EXPECTED = [QueueLag("t", 0, 7, 9, 2), QueueLag("t", 2, 0, 4, 4), QueueLag("t", 10, 3, 3, 0)]


def test_each_queue_has_its_lag_in_every_form_of_a_progress():
    texts = {"endOffset": json.dumps(END), "latestOffset": json.dumps(LATEST)}
    trees = {"endOffset": END, "latestOffset": LATEST}
    assert lag({"sources": [texts]}) == EXPECTED
    assert lag(json.dumps({"sources": [trees]})) == EXPECTED
    assert lag(SimpleNamespace(json=json.dumps({"sources": [trees]}))) == EXPECTED
    assert lag(SimpleNamespace(lastProgress={"sources": [texts]})) == EXPECTED


def test_a_query_without_progress_or_with_other_sources_has_no_lag():
    assert lag(SimpleNamespace(lastProgress=None)) == []
    kafka = {"endOffset": '{"t":{"0":5}}', "latestOffset": '{"t":{"0":9}}'}
    rate = {"endOffset": 5, "latestOffset": None}
    new = {"endOffset": None, "latestOffset": None}
    assert lag({"sources": [kafka, rate, new]}) == []


def test_messages_that_a_cut_removed_give_no_negative_lag():
    source = {"endOffset": json.dumps(END), "latestOffset": '{"t":{"0":5}}'}
    assert lag({"sources": [source]}) == [
        QueueLag("t", 0, 7, 5, 0),
        QueueLag("t", 10, 3, 3, 0),
    ]
