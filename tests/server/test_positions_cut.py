"""Positions that were kept ahead of retention, and whose bytes a flip cut away instead."""

from __future__ import annotations

import pathlib

from tests.server.test_kept_positions import commit, found, go_on, kept_in
from tests.store.kit import opened


def test_what_was_kept_and_cut_away_holds_over_nothing(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        common = commit(store, "g", {0: 1})
        for at in range(2, 6):
            commit(store, "g", {0: at})
        kept = kept_in(store)
        assert kept.gather(store, store.max_offset, go_on)  # and the removal fails, or a crash
        store.truncate(common)
        end = commit(store, "g", {0: 3, 1: 3})
        assert kept.gather(store, end, go_on)
        assert found(kept, "g") == found(kept_in(store), "g") == {0: 3, 1: 3}
