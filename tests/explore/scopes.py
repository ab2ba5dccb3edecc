"""All scopes of both modes by name, and the planted mistakes that each must show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tests.dledger import planted as dledger_planted
from tests.explore import dledger_scopes
from tests.explore.dledger_model import Group
from tests.explore.search import Model, Search

MODES: dict[str, dict[str, Any]] = {"dledger": dledger_scopes.SCOPES}
SHOWS = {"dledger": dledger_scopes.SHOWS}
PLANTED = {"dledger": dledger_planted.planted}


def model_of(mode: str, name: str) -> Model:
    """Return a scope's model."""
    return Group(MODES[mode][name])


def search_of(
    mode: str,
    name: str,
    *,
    states_max: int,
    probe_every: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Return a search of a scope."""
    return Search(
        model_of(mode, name), states_max=states_max, probe_every=probe_every, progress=progress
    )


def planted_by_scope(
    mode: str, name: str
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]]]]:
    """Yield each mistake that a scope must show, and what plants it."""
    for bug, scope in SHOWS[mode].items():
        if scope == name:
            yield bug, functools.partial(PLANTED[mode], bug)
