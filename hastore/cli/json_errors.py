"""Commands whose `--json` covers errors: each ends with one JSON object on stdout.

A program that runs such a command reads its last line of stdout: the summary, or an object with
`error`, `type` and `exit_code`. The line `error: ...` for people is on stderr in both cases.
"""

from typing import Any

import click

from hastore.cli.common import FAILED, LazyGroup, explain, print_error, print_json
from hastore.errors import HastoreError

_ASKED = "hastore.json"  # in click's meta: whether the arguments have --json


class Stopped(click.exceptions.Exit):
    """A signal ended the command; the text says what remains, and the code is 128 + its number."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code)
        self.text = text


class JsonErrors(LazyGroup):
    """A group of commands that print an error as JSON, too, if they are called with --json."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether errors are wanted as JSON: those of the arguments are among them."""
        ctx.meta[_ASKED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. With --json, the object is printed after the line on stderr."""
        if not ctx.meta[_ASKED]:
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except Stopped as stop:
            _print("Stopped", stop.text, stop.exit_code)
            raise
        except BrokenPipeError:
            raise
        except (click.ClickException, HastoreError, OSError) as error:
            code, text = explain(error, ctx.find_root().info_name or "")
            print_error(text)
            _print(type(error).__name__, text, code)
            raise click.exceptions.Exit(code) from error
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as defect:
            _print(type(defect).__name__, str(defect) or type(defect).__name__, FAILED)
            raise


def _print(kind: str, text: str, code: int) -> None:
    print_json({"error": " ".join(text.split()), "type": kind, "exit_code": code})
