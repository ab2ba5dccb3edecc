"""Groups of node processes that end with their test; if it fails, the end of their logs."""

import pytest

from tests.process.harness import Group


@pytest.fixture
def make_group(tmp_path, request):
    """Return a function that makes groups of nodes; all nodes are killed after the test."""
    groups = []

    def make(count=2, **options):
        groups.append(Group(tmp_path, count, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
    report = getattr(request.node, "report_call", None)
    if report is not None and report.failed:
        for group in groups:
            for node in group:
                print(f"---- node {node.number}: the end of stderr\n{node.last_lines(25)}")


@pytest.fixture
def pair(make_group):
    """A running pair: node 1 SYNC_MASTER, node 2 SLAVE."""
    return make_group().start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.report_call = report
    return report
