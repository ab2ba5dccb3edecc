"""How an audit is cut into tasks."""

import pytest

from hastore.pipeline.audit.job import cut_tasks
from hastore.pipeline.audit.sides import FOLDER, Extent

MIB = 1024 * 1024


def sizes(start_mib, end_mib, cores):
    """Return the sizes of the tasks in MiB."""
    side = Extent("/store", FOLDER, 0, end_mib * MIB, "readable offset", end_mib * MIB)
    tasks = cut_tasks(side, side, int(start_mib * MIB), end_mib * MIB, "sha256", cores)
    assert [task.start for task in tasks[1:]] == [task.end for task in tasks[:-1]]
    assert all(task.start % (16 * MIB) == 0 for task in tasks[1:])
    assert not tasks or (tasks[0].start, tasks[-1].end) == (start_mib * MIB, end_mib * MIB)
    return [(task.end - task.start) / MIB for task in tasks]


@pytest.mark.parametrize(
    ("start", "end", "cores", "expected"),
    [
        (0, 0, 2, []),
        (0, 1, 2, [1]),
        (0, 100, 2, [100]),
        (0, 300, 2, [80, 80, 80, 60]),  # at least 128 MiB would be three: one core would wait
        (0, 790, 2, [208, 208, 208, 166]),  # two for each core
        (0, 1_000, 16, [128] * 7 + [104]),  # fewer than cores: at least 128 MiB
        (0.5, 790, 2, [207.5, 208, 208, 166]),  # all but the first begin with a range
    ],
)
def test_each_core_gets_the_same_number_of_tasks(start, end, cores, expected):
    assert sizes(start, end, cores) == expected


def test_a_task_of_a_large_log_has_a_gib_at_most():
    found = sizes(0, 100_000, 2)
    assert len(found) == 98
    assert max(found) <= 1024
