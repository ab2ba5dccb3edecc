"""`hastore check`: was each promise kept in the histories that applications have recorded?"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    Folder,
    complete_files,
    counted,
    print_error,
    print_json,
    print_note,
    print_text,
    progress_bar,
    with_json,
)
from hastore.config.file import load_config
from hastore.errors import UsageError

if TYPE_CHECKING:
    from hastore.history.files import Lines
    from hastore.history.rules.findings import Report


@click.command("check", short_help="Check the history that a test has recorded.")
@click.argument(
    "files",
    metavar="HISTORY...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
)
@click.option(
    "--store",
    type=Folder(),
    metavar="DIR",
    help="Compare the log of this store, too; its node may be running, but nothing may be sent.",
)
@click.option(
    "-c",
    "--config",
    metavar="FILE",
    shell_complete=complete_files,
    help="The same: the store of the node with this configuration file.",
)
@click.option(
    "--expect",
    metavar="NAME,NAME",
    default="",
    help="What must have been met: flip, unknown, refused, retention, rescued, commit, range, or"
    " a fault that the test has noted, such as kill.",
)
@with_json
def check_command(
    files: tuple[pathlib.Path, ...],
    store: str | None,
    config: str | None,
    expect: str,
    as_json: bool,
) -> int:
    """Check histories, which hastore.history.Recorder has written, against what is promised.

    Several HISTORY files are of one group and one machine, such as those of several processes. Exit
    code 4: a promise was broken, or the history proves nothing: nothing was acknowledged or read,
    or something expected did not happen.
    """
    from hastore.history.files import Lines, check  # here: numpy takes time

    if config is not None:
        if store is not None:
            raise UsageError("give --store or -c, not both")
        store = load_config(config).store.root
    expected = [name.strip() for name in expect.split(",") if name.strip()]
    lines = Lines()
    with progress_bar() as progress:
        task = progress.add_task("checking", total=None, note="")
        report = check(
            files,
            store=store,
            expect=expected,
            lines=lines,
            on_progress=lambda done: progress.update(task, completed=done),
        )
    if as_json:
        print_json(report.as_dict(lines.name))
    else:
        _show(report, lines)
    return DONE if report.ok else DIFFER


def _show(report: Report, lines: Lines) -> None:
    """Print what was checked, and what is wrong."""
    counts = report.counts
    print_text(
        f"{counted(counts['sends'], 'send')}: {counts['acknowledged']:,} acknowledged in"
        f" {counted(counts['epochs_of_acknowledgements'], 'epoch')}, of these"
        f" {counts['acknowledged_and_found']:,} found; {counts['unknown']:,} unknown,"
        f" {counts['refused']:,} refused; {counts['ordered_in_real_time']:,} ordered in real time"
    )
    print_text(
        f"{counted(counts['records'], 'record')} of the log,"
        f" {counted(counts['read'], 'message')} read,"
        f" {counted(counts['commits'], 'commit')},"
        f" {counted(counts['positions_asked_for'], 'answer')} about positions,"
        f" {counted(counts['ranges'], 'range')}"
    )
    if report.faults:
        print_text("faults: " + ", ".join(f"{name} {n}" for name, n in report.faults.items()))
    for one in report.excused:
        print_note(f"lost beyond the fault budget: {one.named(lines.name)}")
    if report.losses > len(report.excused):
        print_note(f"and {report.losses - len(report.excused):,} more such losses")
    for one in report.findings:
        print_error(one.named(lines.name))
    for promise, number in report.broken.items():
        named = sum(one.promise == promise for one in report.findings)
        if number > named:
            print_note(f"{promise}: and {number - named:,} more")
    for why in report.vacuous:
        print_error(f"the history proves nothing: {why}")
    if report.ok:
        print_text("all promises were kept")
