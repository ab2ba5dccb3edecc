"""Histories: what clients saw, recorded by their tests and checked; see docs/testing.md.

with Recorder("history.jsonl") as recorder:
    producer = recorder.producer(Producer(bootstrap))
    ...
assert check(["history.jsonl"]).ok
"""

from hastore.history.files import check
from hastore.history.recorder import RecordedConsumer, RecordedProducer, Recorder
from hastore.history.rules.findings import Finding, Report

__all__ = ["Finding", "RecordedConsumer", "RecordedProducer", "Recorder", "Report", "check"]
