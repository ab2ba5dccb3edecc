"""`hastore completion`: the script with which a shell completes commands, topics, groups, nodes."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from hastore.cli.common import DONE

PROGRAM = "hastore"
VARIABLE = "_HASTORE_COMPLETE"  # click looks for it, by the program's name


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
