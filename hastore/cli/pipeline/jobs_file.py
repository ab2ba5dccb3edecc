"""A file of jobs for `hastore pipeline run`: YAML, checked as the command line of each job is.

    spark: {master: "local[4]", memory: 2g, conf: {spark.sql.shuffle.partitions: 8}}
    jobs:
      - {name: flights, job: export, path: data/node2, topic: [flights], target: lake/flights}
      - {job: audit, a: data/node1, b: data/node2}

The keys of a job are the long options of its command, without the dashes, and its arguments.
"""

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from hastore.cli.pipeline.common import SessionOptions
from hastore.errors import UNREADABLE_YAML, UsageError

_OF_THE_FILE = ("name", "job")
_OF_THE_RUN = frozenset({"master", "memory", "conf", "json", "help"})
_SPARK = ("master", "memory", "conf")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


@dataclass(frozen=True)
class PlannedJob:
    """A job of the file: its unique name, its command, and the arguments of that."""

    name: str
    job: str
    command: click.Command
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class JobsFile:
    """The jobs in their order, and how Spark is started for them."""

    jobs: tuple[PlannedJob, ...]
    session: SessionOptions


def read_jobs(path: str, text: str, commands: Mapping[str, click.Command]) -> JobsFile:
    """Return what the text of a file says; `path` names it in errors.

    Each job's arguments are parsed as its command parses them, so that all mistakes of the file
    are found before the first job begins. Raises UsageError, which names the first of each job.
    """
    import yaml

    try:
        tree = _tree(path, text)
    except (yaml.YAMLError, *UNREADABLE_YAML) as broken:
        raise UsageError(f"{path} is no YAML; correct it: {broken}") from broken
    if not isinstance(tree, dict) or not isinstance(tree.get("jobs"), list) or not tree["jobs"]:
        raise UsageError(f"{path} has no list `jobs`; see hastore pipeline run --help")
    jobs: list[PlannedJob] = []
    session = SessionOptions(None, None, ())
    wrong: list[str] = []
    with _noted(wrong):
        _check_keys(path, tree, ("jobs", "spark"))
    for number, entry in enumerate(tree["jobs"], 1):
        with _noted(wrong):
            planned = _planned(f"{path}: job {number}", number, entry, commands)
            if any(planned.name == one.name for one in jobs):
                raise UsageError(
                    f"{path}: two jobs have the name {planned.name!r}; give each its own"
                )
            jobs.append(planned)
    with _noted(wrong):
        session = _session(f"{path}: spark", tree.get("spark"))
    if wrong:
        raise UsageError(". ".join(wrong))
    return JobsFile(tuple(jobs), session)


@contextlib.contextmanager
def _noted(wrong: list[str]) -> Iterator[None]:
    """Note what is wrong, and go on, so that one look names all."""
    try:
        yield
    except UsageError as error:
        wrong.append(str(error))


def _tree(path: str, text: str) -> Any:
    """Return what a text of YAML says, with numbers as texts, as they are written.

    YAML would read the topic 0123 as 83, and 12:30 as 750. The options read their own numbers.
    Raises UsageError for a key that is given twice: YAML's parser would drop the first value.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {
            first: [pair for pair in pairs if pair[0] not in _NUMBERS]
            for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        # Here, and not where the mapping is made: by then the keys of aliases (<<) are in it, too.
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    raise UsageError(
                        f"{path}:{line}: {key.value} is given twice (also line {lines[name]}); "
                        "keep one of them, or give an option that may be repeated a list, such as "
                        "topic: [a, b]"
                    )
                lines[name] = line
            return node

    loader = Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _planned(
    where: str, number: int, entry: object, commands: Mapping[str, click.Command]
) -> PlannedJob:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no mapping; write job: export, path: ..., target: ...")
    job = str(entry.get("job"))
    if job not in commands:
        raise UsageError(f"{where}: job is {entry.get('job')!r}; use one of {', '.join(commands)}")
    command, name = commands[job], str(entry.get("name", f"{job}-{number}"))
    where = f"{where} ({name})"
    positional = [one.name for one in command.params if isinstance(one, click.Argument)]
    options = {_long(one): one for one in command.params if isinstance(one, click.Option)}
    known = [*_OF_THE_FILE, *positional, *(set(options) - _OF_THE_RUN)]
    given: dict[str, object] = {}
    for key, value in entry.items():
        word = str(key).replace("_", "-")
        if word in given:
            raise UsageError(f"{where}: {word} is given twice; leave one of them out")
        given[word] = value
    _check_keys(where, given, known)
    arguments: list[str] = []
    for key, value in given.items():
        if key in options:
            arguments += _words(where, key, options[key], value)
    if positional:
        missing = [key for key in positional if given.get(str(key)) is None]
        if missing:
            raise UsageError(f"{where}: {missing[0]} is missing")
        arguments += ["--", *(str(given[str(key)]) for key in positional)]
    try:
        command.make_context(job, list(arguments)).close()
    except click.ClickException as wrong:
        raise UsageError(f"{where}: {wrong.format_message()}") from wrong
    except UsageError as wrong:
        raise UsageError(f"{where}: {wrong}") from wrong
    return PlannedJob(name, job, command, tuple(arguments))


def _long(option: click.Option) -> str:
    return next(word[2:] for word in option.opts if word.startswith("--"))


def _words(where: str, key: str, option: click.Option, value: object) -> list[str]:
    """Return an option of the file as words of a command line."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {key} is {value}; write true or false")
        return [f"--{key}"] if value else []
    values = value if isinstance(value, list) else [value]
    if len(values) > 1 and not option.multiple:
        raise UsageError(f"{where}: {key} is a list; give one value")
    words = []
    for one in values:
        if one is None or isinstance(one, list | dict | bool):
            raise UsageError(f"{where}: {key} is {one!r}; write a text or a number")
        # YAML reads a time as one; an option takes it in ISO 8601.
        words.append(f"--{key}={one.isoformat() if hasattr(one, 'isoformat') else one}")
    return words


def _session(where: str, tree: object) -> SessionOptions:
    if tree is None:
        return SessionOptions(None, None, ())
    if not isinstance(tree, dict) or not isinstance(tree.get("conf", {}), dict):
        raise UsageError(f"{where}: give master, memory, and conf with names and values")
    _check_keys(where, tree, _SPARK)
    conf = {str(name): value for name, value in tree.get("conf", {}).items()}
    for name in conf:
        if not name.startswith("spark."):
            raise UsageError(f"{where}: conf has {name!r}; give names that begin with spark.")
    texts = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in conf.items()
    }
    master, memory = (None if tree.get(key) is None else str(tree[key]) for key in _SPARK[:2])
    return SessionOptions(master, memory, tuple(texts.items()))


def _check_keys(where: str, tree: Mapping[Any, object], known: Any) -> None:
    for key in tree:
        if key not in known:
            near = difflib.get_close_matches(str(key), [str(one) for one in known], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise UsageError(f"{where}: there is no {key!r}; correct it: {hint}")
