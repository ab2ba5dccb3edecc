"""The kit that plays walk-throughs leaves no process behind, also if a walk-through fails."""

import psutil
import pytest

from tests.walk_through import checkout, play, processes


def test_a_walk_through_that_fails_leaves_no_process(tmp_path):
    with pytest.raises(AssertionError), checkout(tmp_path, "conf"):
        try:
            play(tmp_path, "sleep 600 > sleep.out 2>&1 & exit 1", "sh")
        finally:
            left = processes(tmp_path)
    assert [one.info["name"] for one in left] == ["sleep"]
    assert psutil.wait_procs(left, timeout=60)[1] == []
