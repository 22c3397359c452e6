"""The command `hf-lgelu`, which reads and answers a call of a command in the table COMMANDS.

The module of a command, and with it torch, is imported when the command runs.
"""

import argparse
import dataclasses
import difflib
import importlib
import os
import re
import signal
import sys
import threading
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_lgelu.cli.arguments import COMMANDS, GROUPS, MOST_USED, OPTIONS, Arguments
from hf_lgelu.cli.data import open_sets
from hf_lgelu.files import local, require_replaceable, require_there
from hf_lgelu.version import __version__

FAILED, WRONG_CALL = 1, 2
"""Exit statuses; 0 is success, 128 + n is an end by signal n."""


class _WrongCallError(ValueError):
    """A wrong word in a call."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of a call with `words` or the command line's. One line on stderr says why it failed."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] in (["-h"], ["--help"]):
        width = max(map(len, COMMANDS))
        print("usage: hf-lgelu COMMAND ...\n")
        print(
            "Turn smooth networks into ReLU networks: by learned hardness (λ-GELU), or by a refit without training.\n"
        )
        print("\n".join(f"  {name:{width}}  {kind.__doc__}" for name, kind in COMMANDS.items()))
        print("\nhf-lgelu COMMAND --help has the options of each, and two examples.")
        return 0
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    try:
        if not words:
            raise _WrongCallError(f"give a command: {', '.join(COMMANDS)}; hf-lgelu --help says what they do")
        name = words[0]
        if name not in COMMANDS:
            raise _WrongCallError(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}; hf-lgelu --help")
        arguments = _arguments(COMMANDS[name], words[1:])
    except _WrongCallError as error:
        print(f"hf-lgelu: {error}", file=sys.stderr)
        return WRONG_CALL
    return 0 if arguments is None else _answer(arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongCallError(message.removeprefix("argument "))


def parser_of(kind: type[Arguments]) -> argparse.ArgumentParser:
    """The parser of a command: each field of its dataclass is an option in one of the groups."""

    def order(entry: Any) -> tuple[int, ...]:
        """The key that sorts a group: the most used, required options, words without a name, the data."""
        return (
            [*kind.most_used, entry.name].index(entry.name),
            entry.default is not dataclasses.MISSING,
            "is_word" not in entry.metadata,
            not entry.name.startswith("data"),
        )

    options = sorted(dataclasses.fields(kind), key=order)
    required = [entry for entry in options if entry.default is dataclasses.MISSING]
    names = [("" if "is_word" in entry.metadata else f"--{entry.name} ", entry.name.upper()) for entry in required]
    examples = "\n".join(f"  {example}" for example in kind.examples)
    parser = _Parser(
        prog=f"hf-lgelu {kind.command}",
        usage=" ".join([f"hf-lgelu {kind.command}", *map("".join, names), "[OPTIONS]"]),
        description=kind.__doc__,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    grouped = [(MOST_USED if entry.name in kind.most_used else entry.metadata["group"], entry) for entry in options]
    for title in (MOST_USED, *GROUPS):
        group = parser.add_argument_group(title)
        for entry in (entry for of, entry in grouped if of == title):
            name, help = entry.name, entry.metadata["help"]
            # `str | None` is read as str.
            of_type = next(iter(typing.get_args(entry.type)), entry.type)
            if "is_word" in entry.metadata:
                group.add_argument(name, metavar=name.upper(), help=help)
            elif of_type is bool:
                group.add_argument(f"--{name}", action="store_true", help=help)
            else:
                group.add_argument(
                    f"--{name}",
                    type=of_type,
                    default=entry.default,
                    required=entry in required,
                    choices=entry.metadata.get("choices"),
                    help=help,
                )
    return parser


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint " (did you mean x?)" with the known name nearest to `word`, or ""."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def in_options(text: str) -> str:
    """A message with options in the place of Python's arguments, which stand in backquotes or are its first word."""
    for argument, option in OPTIONS.items():
        text = text.replace(f"`{argument}`", option)
    first, space, rest = text.partition(" ")
    argument = first.removesuffix(":")
    return OPTIONS.get(argument, argument) + first[len(argument) :] + space + rest


def say(text: str) -> None:
    """Print a line at once. If nobody reads stdout any more (`hf-lgelu … | head`), the work goes on in silence."""
    try:
        print(in_options(text), flush=True)
    except BrokenPipeError:
        _stop_saying()


def _stop_saying() -> None:
    """Point stdout to nowhere, so that the flush at the end of the process does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _arguments(kind: type[Arguments], words: Sequence[str]) -> Arguments | None:
    """The arguments in a command's words; None if the words ask for help, which is printed."""
    parser = parser_of(kind)
    if "-h" in words or "--help" in words:
        parser.print_help()
        return None
    try:
        if "" in words:
            raise ValueError("an argument is empty")
        # A dash in the name of an option stands for an underscore.
        words = [re.sub("^--[^=]*", lambda name: f"--{name[0][2:].replace('-', '_')}", word) for word in words]
        known = [f"--{entry.name}" for entry in dataclasses.fields(kind) if "is_word" not in entry.metadata]
        # argparse would first name what is missing: for --dta, that --data was left out.
        for name in (word.partition("=")[0] for word in words if word.startswith("--")):
            if name not in known:
                raise ValueError(f"there is no option {name}{did_you_mean(name, known)}")
        return kind(**vars(parser.parse_args(words)))
    except ValueError as error:
        raise _WrongCallError(f"{kind.command}: {in_options(str(error))}; hf-lgelu {kind.command} --help") from error


def _answer(arguments: Arguments) -> int:
    name, ended_by = arguments.command, [signal.SIGINT]

    def leave(number: int, frame: Any) -> NoReturn:
        ended_by.append(signal.Signals(number))
        raise KeyboardInterrupt

    # SIGTERM and SIGHUP end the work as SIGINT does, so that half-written files are removed.
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    usual = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in usual:
        signal.signal(number, leave)
    try:
        require_paths(arguments)
        sets = open_sets(arguments)
        if arguments.progress:
            print(f"hf-lgelu {name}: loading torch and transformers ...", file=sys.stderr, flush=True)
        getattr(importlib.import_module(f"hf_lgelu.cli.{name}"), name)(arguments, **sets)
    except BrokenPipeError:  # of a print: `hf-lgelu profile ... | head`
        _stop_saying()
        return 128 + signal.SIGPIPE
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"hf-lgelu {name}: {in_options(reason)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        left = str(interrupt) or "nothing was written"
        print(f"hf-lgelu {name}: interrupted; {left}", file=sys.stderr)
        return 128 + ended_by[-1]
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)
    return 0


def require_paths(arguments: Any) -> None:
    """Raise OSError or ValueError for an output folder that is not empty or that holds what is read, and for a
    checkpoint or data set that is not there. The Hub may be asked for these."""
    read = {
        value: entry.metadata["reads"]
        for entry in dataclasses.fields(arguments)
        if "reads" in entry.metadata and (value := getattr(arguments, entry.name)) not in (None, "none")
    }
    output = getattr(arguments, "output_dir", None)
    if output is not None:
        folder = Path(output)
        for name, kind in read.items():
            path, what = local(name), "the checkpoint" if kind == "model" else name
            if path is not None and path.resolve().is_relative_to(folder.resolve()):
                where = f"is {what} itself" if folder.samefile(path) else f"holds {what}"
                raise ValueError(f"{folder} {where}, which would be lost; give another output folder")
        require_replaceable(output, overwrite=getattr(arguments, "overwrite", False))
    for name, kind in read.items():
        require_there(name, kind)
