"""All scopes of both modes by name, and the planted mistakes that each must show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tests.dledger import planted as dledger_planted
from tests.explore import classic_model, classic_scopes, dledger_model, dledger_scopes
from tests.explore.search import Search
from tests.ha import planted as classic_planted

MODES: dict[str, dict[str, Any]] = {
    "classic": classic_scopes.SCOPES,
    "dledger": dledger_scopes.SCOPES,
}
SHOWS = {"classic": classic_scopes.SHOWS, "dledger": dledger_scopes.SHOWS}
MODELS: dict[str, Callable[[Any], Any]] = {
    "classic": classic_model.Group,
    "dledger": dledger_model.Group,
}
PLANTED = {"classic": classic_planted.planted, "dledger": dledger_planted.planted}


def search_of(
    mode: str,
    name: str,
    *,
    states_max: int,
    probe_every: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Return a search of a scope."""
    model = MODELS[mode](MODES[mode][name])
    return Search(model, states_max=states_max, probe_every=probe_every, progress=progress)


def planted_by_scope(
    mode: str, name: str
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[None]]]]:
    """Yield each mistake that a scope must show, and what plants it."""
    for bug, scope in SHOWS[mode].items():
        if scope == name:
            yield bug, functools.partial(PLANTED[mode], bug)
