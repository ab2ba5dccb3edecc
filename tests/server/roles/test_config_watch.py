"""ConfigWatch: a changed file that is not valid, and what it takes to be followed after all."""

from __future__ import annotations

import pathlib

import pytest

from hastore.clock import SystemClock
from hastore.config.model import Role
from hastore.server.role_source import RETRY_MS, ConfigWatch

TEXT = """\
cluster: test
group: g0
node: 1
role: {role}
nodes:
  1: {{api: "tcp://127.0.0.1:1", ha: "127.0.0.1:2", http: "127.0.0.1:3"}}
  2: {{api: "tcp://127.0.0.1:4", ha: "127.0.0.1:5", http: "127.0.0.1:6"}}
store: {{root: {folder}/store}}
ha: {{secret_file: "{folder}/{secret}"}}
"""


class Clock(SystemClock):
    """Time that only a test lets pass."""

    now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.now_ms


class Watched:
    """A node's file, with a secret that it names, and what watches it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.path, self.clock = folder, folder / "node.yaml", Clock()
        self.secret = folder / "secret"
        self.secret.write_text("0123456789abcdef")
        self.secret.chmod(0o600)
        self.write("SLAVE")
        self.watch = ConfigWatch(str(self.path), {}, clock=self.clock)
        assert self.watch.first().role is Role.SLAVE

    def write(self, role: str, secret: str = "secret") -> None:
        self.path.write_text(TEXT.format(role=role, folder=self.folder, secret=secret))

    def follow(self) -> Role | None:
        """Return the role of a change that is followed."""
        config = self.watch.follow()
        return None if config is None else config.assigned_role


@pytest.fixture
def watched(tmp_path: pathlib.Path) -> Watched:
    """A node's file that is a slave's and valid."""
    return Watched(tmp_path)


def test_a_file_counts_once_what_it_names_is_mended(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.secret.chmod(0o644)
    watched.write("ASYNC_MASTER")
    for _ in range(3):
        assert watched.follow() is None
        assert watched.watch.problem is not None and "chmod 600" in watched.watch.problem
        watched.clock.now_ms += RETRY_MS
    assert len(caplog.records) == 1, "the same again"
    watched.secret.chmod(0o600)
    assert watched.follow() is Role.ASYNC_MASTER
    assert watched.watch.problem is None
    assert watched.watch.refused_ms == 0.0, "the order is as old as that"
    watched.clock.now_ms += 10 * RETRY_MS
    assert watched.follow() is None, "once for each change"
    watched.write("SLAVE")
    assert watched.follow() is Role.SLAVE and watched.watch.refused_ms is None


def test_it_is_not_checked_all_the_time(watched: Watched) -> None:
    watched.secret.chmod(0o644)
    watched.write("ASYNC_MASTER")
    assert watched.follow() is None
    watched.secret.chmod(0o600)
    watched.clock.now_ms += RETRY_MS - 1.0
    assert watched.follow() is None
    watched.clock.now_ms += 1.0
    assert watched.follow() is Role.ASYNC_MASTER


def test_a_wrong_file_that_was_away_is_still_wrong(watched: Watched) -> None:
    watched.write("MASTER")
    assert watched.follow() is None
    away = watched.path.rename(watched.folder / "away")
    assert watched.follow() is None
    assert watched.watch.problem is not None and "No such file" in watched.watch.problem
    away.rename(watched.path)
    assert watched.follow() is None
    assert watched.watch.problem is not None and "'MASTER' is not one of" in watched.watch.problem


def test_a_good_file_that_was_away_is_no_change(watched: Watched) -> None:
    away = watched.path.rename(watched.folder / "away")
    assert watched.follow() is None and watched.watch.problem is not None
    away.rename(watched.path)
    assert watched.follow() is None and watched.watch.problem is None


def test_an_order_in_a_file_that_could_not_be_read_is_as_old_as_that(watched: Watched) -> None:
    """The node's user had no right to read what another one had edited, and nobody looked."""
    watch, clock = watched.watch, watched.clock
    for role, read_after_ms, since in (
        (Role.SYNC_MASTER, 3_600_000.0, 1.0),  # also once it is followed, as for a refused file
        (Role.SLAVE, RETRY_MS, None),  # some editors move a file away before they write it
    ):
        clock.now_ms = 1.0
        watched.path.rename(watched.folder / "away")
        before = watch.refused_ms
        assert watched.follow() is None and watch.refused_ms == 1.0, "what the node knows then"
        (watched.folder / "away").rename(watched.path)
        assert watched.follow() is None and watch.refused_ms == before, "it is the same file"
        watched.path.unlink()
        assert watched.follow() is None
        clock.now_ms += read_after_ms
        watched.write(role.value)
        assert watched.follow() is role and watch.refused_ms == since
        clock.now_ms += 1.0
        assert watched.follow() is None and watch.refused_ms == since
    clock.now_ms = 5.0
    watched.write("MASTER")
    assert watched.follow() is None and watch.refused_ms == 5.0
    clock.now_ms = 6.0
    away = watched.path.rename(watched.folder / "away")
    assert watched.follow() is None and watch.refused_ms == 5.0
    away.rename(watched.path)
    assert watched.follow() is None and watch.refused_ms == 5.0


@pytest.mark.parametrize("name", ["a\\0b", "\\ud800"])
def test_what_cannot_be_a_path_ends_no_node(watched: Watched, name: str) -> None:
    watched.write("SLAVE", name)
    assert watched.follow() is None
    assert watched.watch.problem is not None and "cannot be a path" in watched.watch.problem
