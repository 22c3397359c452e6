"""The command `hf-lgelu`, which reads and answers a call of a command in the table COMMANDS.

The module of a command, and with it torch, is imported when the command runs.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import os
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_lgelu.cli.arguments import COMMANDS, GROUPS, Arguments
from hf_lgelu.cli.data import open_sets
from hf_lgelu.files import local, require_replaceable, require_there

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
"""Exit statuses; 0 is success."""


class _Parser(argparse.ArgumentParser):
    """Prints what is wrong with a call in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_CALL, f"{self.prog}: {message.removeprefix('argument ')}; {self.prog} --help\n")


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of a call with `words` or the command line's. One line on stderr says why it failed."""
    try:
        arguments = _arguments(list(sys.argv[1:] if words is None else words))
    except SystemExit as left:  # after help, or a wrong call
        return int(left.code or 0)
    return _answer(arguments)


def command_line() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser of a call, and the parsers of the commands by name."""
    parser = _Parser(
        prog="hf-lgelu",
        description="Turn smooth networks into ReLU networks: by learned hardness (λ-GELU), or without training.",
        epilog="hf-lgelu COMMAND --help has the options of each, and two examples.",
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("hf-lgelu"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for kind in COMMANDS.values():
        _add_command(commands, kind)
    return parser, commands.choices


def _add_command(commands: Any, kind: type[Arguments]) -> None:
    """Add the parser of a command: each field of its dataclass is an option in one of the groups."""
    required = [entry for entry in dataclasses.fields(kind) if entry.default is dataclasses.MISSING]
    required.sort(key=lambda entry: "is_word" not in entry.metadata)
    names = [("" if "is_word" in entry.metadata else f"--{entry.name} ") + entry.name.upper() for entry in required]
    examples = "\n".join(f"  {example}" for example in kind.examples)
    parser = commands.add_parser(
        kind.command,
        usage=" ".join([f"hf-lgelu {kind.command}", *names, "[OPTIONS]"]),
        help=kind.__doc__,
        description=kind.__doc__,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for entry in sorted(dataclasses.fields(kind), key=lambda entry: entry not in required):
        name, group = entry.name, groups[entry.metadata["group"]]
        help = (f"With --to {' or '.join(kind.forms[name])}: " if name in kind.forms else "") + entry.metadata["help"]
        of_type = next(iter(typing.get_args(entry.type)), entry.type)  # `str | None` is read as str
        if "is_word" in entry.metadata:
            group.add_argument(name, metavar=name.upper(), help=help)
        elif of_type is bool:
            group.add_argument(f"--{name}", action="store_true", help=help)
        else:
            choices, default = entry.metadata.get("choices"), entry.default
            group.add_argument(
                f"--{name}", type=of_type, default=default, required=entry in required, choices=choices, help=help
            )


def say(text: str) -> None:
    """Print a line at once. If nobody reads stdout any more (`hf-lgelu … | head`), the work goes on in silence."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # to nowhere, so that the flush at the end of the process does not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _arguments(words: list[str]) -> Arguments:
    """The arguments in the words of a call. Exits after help, and for a wrong call."""
    # A dash in the name of an option stands for an underscore.
    words = [re.sub("^--[^=]*", lambda name: f"--{name[0][2:].replace('-', '_')}", word) for word in words]
    parser, commands = command_line()
    known, others = parser.parse_known_args(words)
    found = vars(known)
    name = found.pop("command")
    if others:
        commands[name].error(f"unrecognized arguments: {' '.join(others)}")
    if "" in words:
        commands[name].error("an argument is empty")
    try:
        return COMMANDS[name](**found)
    except ValueError as error:
        commands[name].error(str(error))


def _answer(arguments: Arguments) -> int:
    name = arguments.command
    try:
        require_paths(arguments)
        sets = open_sets(arguments)
        if arguments.progress:
            print(f"hf-lgelu {name}: loading torch and transformers ...", file=sys.stderr, flush=True)
        getattr(importlib.import_module(f"hf_lgelu.cli.{name}"), name)(arguments, **sets)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"hf-lgelu {name}: {reason}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"hf-lgelu {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def require_paths(arguments: Any) -> None:
    """Raise OSError or ValueError for a checkpoint or data set that is not there (the Hub may be asked), for an output
    folder that holds one, and for one that is not empty, unless nothing is written (--dry_run)."""
    read = {
        value: entry.metadata["reads"]
        for entry in dataclasses.fields(arguments)
        if "reads" in entry.metadata and (value := getattr(arguments, entry.name)) not in (None, "none")
    }
    output = getattr(arguments, "output_dir", None)
    if output is not None:
        folder = Path(output)
        for name, kind in read.items():
            path, what = local(name), "the checkpoint" if kind == "model" else f"the data set {name}"
            if path is not None and path.resolve().is_relative_to(folder.resolve()):
                where = f"is {what} itself" if folder.samefile(path) else f"holds {what}"
                raise ValueError(f"{folder} {where}, which would be lost; give another output folder")
        if not getattr(arguments, "dry_run", False):
            require_replaceable(output, overwrite=getattr(arguments, "overwrite", None))
    for name, kind in read.items():
        require_there(name, kind)
