"""A log of positions only: rewriting them comes to an end."""

from __future__ import annotations

import pathlib

from hastore.protocol.committed_positions import CommitBody
from hastore.server.api.commit_records import commit_record
from hastore.store.message_store import MessageStore
from tests.server.retention.test_kept_positions import go_on, in_log, kept_in
from tests.store.kit import FILE_SIZE, opened, put

TOPICS = 400  # of one group; the index has all its commits under one key
FILES = 12  # the most that the log may have


def commit(store: MessageStore, number: int, at: int) -> None:
    body = CommitBody("g", f"topic-{number}" + "x" * 60, {0: (at, None, None)})
    end = put(store, commit_record(body, 1))[0].end_offset
    assert end is not None and store.wait_dispatched(end, 10)


def test_positions_of_many_topics_are_not_rewritten_for_ever(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        kept = kept_in(store)
        first = 0

        def look() -> int:
            """Remove the oldest files beyond FILES, as retention does; return the rewrites."""
            nonlocal first
            assert store.wait_dispatched(store.max_offset, 10)
            beyond = (store.max_offset - first) // FILE_SIZE - FILES
            if beyond <= 0:
                return 0
            first += beyond * FILE_SIZE
            assert kept.gather(store, first, go_on)
            return kept.rewrite(65537, store, first, store.put_encoded, 1, go_on)

        at = 0
        while first < FILES * FILE_SIZE:  # the first commits are removed and rewritten
            at += 1
            for number in range(TOPICS):
                commit(store, number, at)
            look()
        # No more commits come, so the copies in the log soon suffice.
        written, limit = 0, 20 * TOPICS
        while (count := look()) and written <= limit:
            written += count
        assert written <= limit
        said = in_log(store)
        assert len(said) == TOPICS
        assert {place.queue_offset for pair in said for place in said.find(*pair).values()} == {at}
