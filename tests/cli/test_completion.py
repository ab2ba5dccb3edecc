"""`hastore completion`, and what a shell gets at TAB, in this process."""

import click
import pytest
from click.shell_completion import ShellComplete

from hastore.cli import completion
from hastore.cli.main import cli
from hastore.client.consumer.positions_client import Positions
from hastore.client.producer.producer import Producer
from tests.cli.kit import hastore
from tests.cli.test_status import make_group

__all__ = ["make_group"]


def completed(*words):
    """Return what TAB offers after these words, the last of which is begun."""
    shell = ShellComplete(cli, {}, "hastore", "_HASTORE_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("shell", "text"),
    [("bash", "complete -o nosort -F"), ("zsh", "#compdef hastore"),
     ("fish", "complete --no-files")],
)  # fmt: skip
def test_the_script_of_each_shell(shell, text):
    done = hastore("completion", shell)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout and "_HASTORE_COMPLETE" in done.stdout


def test_another_shell_is_wrong_usage():
    assert hastore("completion", "csh").returncode == 2
    assert hastore("completion").returncode == 2


def test_commands_and_options():
    assert completed("do") == ["doctor"]
    assert {"flip", "top", "completion"} <= set(completed(""))
    assert completed("groups", "de") == ["dead-letters", "delete", "describe"]
    assert "--keep-queues" in completed("produce", "--k")


@pytest.fixture
def pair(make_group):
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    with Producer(group.api().split(",")) as producer:
        for topic in ("orders", "others", "zebras"):
            producer.send_sync(topic, b"x", queue=0)
    with Positions(group.api().split(",")) as positions:
        positions.commit("billing", "orders", {0: 1})
    group.wait(1, lambda s: s["dispatched_offset"] == s["readable_offset"] == s["max_offset"])
    return group


def test_topics_groups_and_nodes(pair, monkeypatch):
    monkeypatch.setenv("HASTORE_BOOTSTRAP", pair.api())
    monkeypatch.setattr(completion, "WAIT_S", 60.0)
    assert completed("consume", "o") == ["orders", "others"]
    assert completed("groups", "reset", "b", "--topic", "z") == ["zebras"]
    assert completed("groups", "describe", "") == ["billing"]
    assert completed("flip", "-c", pair.file(1), "--to", "") == ["1", "2"]
    one, two = (each.removeprefix("tcp://") for each in pair.api().split(","))
    assert completed("status", "--bootstrap", "1") == [one, two]
    assert completed("status", "--bootstrap", f"{one},") == [f"{one},{two}"]


def test_without_nodes_there_is_nothing_and_no_error(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HASTORE_BOOTSTRAP", "127.0.0.1:1")
    monkeypatch.setattr(completion, "WAIT_S", 0.05)
    assert completed("consume", "o") == completed("groups", "describe", "") == []
    monkeypatch.setenv("HASTORE_BOOTSTRAP", "garbage")
    assert completed("consume", "o") == completed("status", "--bootstrap", "1") == []
    assert completed("flip", "--to", "") == []
    assert completed("flip", "-c", str(tmp_path / "no.yaml"), "--to", "") == []
    assert capsys.readouterr() == ("", "")


def test_the_help_names_what_installs_it():
    for shell in ("bash", "zsh", "fish"):
        text = click.Context(cli).command.get_command(click.Context(cli), "completion").help
        assert f"hastore completion {shell} >" in text
