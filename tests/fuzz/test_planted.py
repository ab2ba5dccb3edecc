"""Mistakes that are planted in readers: the committed corpora find each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from hastore.record import codec
from tests.fuzz import corpus, kit


class Mistake(NamedTuple):
    """What one of hastore's modules has instead, and which target's corpus must find it."""

    target: str
    module: str
    name: str
    instead: Any


def _no_crc(check: Callable[..., int]) -> Callable[..., int]:
    """Return a check of records that takes bodies with a wrong CRC, too."""

    def checked(buffer: bytes, at: int, end: int, physical_offset: int) -> int:
        parts = codec.find_parts(buffer, at, end)
        return parts[0] if parts is not None and parts[2] == physical_offset else 0

    del check
    return checked


ONLY = (msgspec.DecodeError,)
MISTAKES = [
    Mistake("hello", "hastore.protocol.hello", "UNREADABLE", ONLY),
    Mistake("dledger_link", "hastore.protocol.dledger_link", "UNREADABLE", ONLY),
    Mistake("own_records", "hastore.protocol.committed_positions", "UNREADABLE", ONLY),
    Mistake("state_files", "hastore.ha.node.node_state", "UNREADABLE", ONLY),
    Mistake("identities", "hastore.client.security", "UNREADABLE_YAML", (ValueError,)),
    Mistake("records", "tests.fuzz.targets.records", "check_record", _no_crc(codec.check_record)),
    Mistake("remoting_frames", "hastore.protocol.remoting", "_USUAL_FIELDS", 7),
    Mistake("zmtp", "hastore.protocol.zmtp", "PIECE_BYTES", 1),
    Mistake("ha_link", "hastore.protocol.ha_link", "HEADER_BYTES", 13),
    Mistake("recovery", "hastore.store.log.recovery", "_longer", lambda *_: 0),
    Mistake("log_walks", "hastore.record.log_walk", "_BLANK_HEAD", 0),
    Mistake("filters", "hastore.record.sql_filter", "_DOUBLE", _no_crc),
    Mistake("texts", "hastore.server.metrics.page", "_escaped", str),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: f"{one.target}-{one.name}")
def test_the_corpus_finds_a_planted_mistake(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, inputs = kit.target(mistake.target), corpus.read(mistake.target)
    monkeypatch.setattr(importlib.import_module(mistake.module), mistake.name, mistake.instead)
    for data in inputs:
        try:
            module.one(data)
        except kit.Refused:
            continue
        except Exception:
            return
    pytest.fail("no input of the corpus finds it")
