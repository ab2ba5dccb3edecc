"""Histories: what clients saw, recorded by their tests and checked; see docs/testing.md.

with Recorder("history.jsonl") as recorder:
    producer = recorder.producer(Producer(bootstrap))
    ...
assert check(["history.jsonl"]).ok
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hastore.history.files import check
    from hastore.history.recorder import RecordedConsumer, RecordedProducer, Recorder
    from hastore.history.rules.findings import Finding, Report

_PLACES = {
    "Finding": "rules.findings",
    "RecordedConsumer": "recorder",
    "RecordedProducer": "recorder",
    "Recorder": "recorder",
    "Report": "rules.findings",
    "check": "files",
}
__all__ = ["Finding", "RecordedConsumer", "RecordedProducer", "Recorder", "Report", "check"]


def __getattr__(name: str) -> Any:
    """Import a part on first use: who only records needs no numpy."""
    if name in _PLACES:
        return getattr(import_module(f"hastore.history.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
