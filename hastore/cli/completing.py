"""Values that a shell completes: topics, groups, nodes. Silent and short, whatever fails.

The shell runs the command for each TAB (click's own mechanism), so nothing here may print, ask for
long or fail: without an answer there is nothing to complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem

from hastore.cli.common import bootstrap_addresses
from hastore.config.file import load_config

WAIT_S = 1.0  # for the nodes
_SHOWN = 1_000  # completions at most

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _silently(find: Callable[[click.Context, str], Iterator[CompletionItem]]) -> Complete:
    """Return `find` as click wants it: what fits the begin, and nothing after any failure."""

    def complete(
        context: click.Context, _parameter: click.Parameter, begin: str
    ) -> list[CompletionItem]:
        found: list[CompletionItem] = []
        with contextlib.suppress(Exception):  # a shell shows no errors while it completes
            for item in find(context, begin):
                if item.value.startswith(begin):
                    found.append(item)
                if len(found) >= _SHOWN:
                    break
        return found

    return complete


def _addresses(context: click.Context) -> list[str]:
    return bootstrap_addresses(context.params.get("bootstrap"))


def _topics(context: click.Context, begin: str) -> Iterator[CompletionItem]:
    from hastore.client.consumer.admin import Admin

    with Admin(_addresses(context), timeout_s=WAIT_S) as admin:
        for name in sorted(admin.topic_configs()):
            if not name.startswith("%") or begin.startswith("%"):
                yield CompletionItem(name)


def _groups(context: click.Context, _begin: str) -> Iterator[CompletionItem]:
    from hastore.client.consumer.positions_client import Positions

    with Positions(_addresses(context), timeout_s=WAIT_S) as positions:
        for group in sorted({group for group, _ in positions.all()}):
            yield CompletionItem(group)


def _nodes(context: click.Context, _begin: str) -> Iterator[CompletionItem]:
    for number, node in load_config(context.params["path"]).nodes.items():
        yield CompletionItem(str(number), help=node.api)


complete_topics = _silently(_topics)
complete_groups = _silently(_groups)
complete_nodes = _silently(_nodes)
