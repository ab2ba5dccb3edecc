"""What a shell completes: commands, topics, groups, nodes; `hastore completion` prints its script.

The shell runs the command for each TAB (click's own mechanism), so what finds the values,
`complete_topics` and its like, may not print, ask for long or fail: without an answer there is
nothing to complete.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import click
from click.shell_completion import CompletionItem, get_completion_class

from hastore.cli.common import DONE, bootstrap_addresses
from hastore.config.file import load_config

PROGRAM = "hastore"
VARIABLE = "_HASTORE_COMPLETE"  # click looks for it, by the program's name
WAIT_S = 1.0  # for the nodes
_SHOWN = 1_000  # completions at most

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


@click.command("completion", short_help="Print the script that completes commands in a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> int:
    """Print the script with which SHELL completes commands, options, topics, groups and nodes.

    bash (4.4 or later): hastore completion bash >> ~/.bash_completion

    zsh: hastore completion zsh >> ~/.zshrc

    fish: hastore completion fish > ~/.config/fish/completions/hastore.fish

    It counts in shells that start afterwards. Topics and groups are asked of the nodes that
    --bootstrap, HASTORE_BOOTSTRAP or conf/ name, for at most a second.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    made = kind(context.find_root().command, {}, PROGRAM, VARIABLE)
    # Without a look at the version of this machine's shell: the script may be for another one.
    sys.stdout.write((made.source_template % made.source_vars()).strip() + "\n")
    return DONE


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
