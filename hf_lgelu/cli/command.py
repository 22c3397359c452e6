"""The command `hf-lgelu`: how a call is read and answered; the table COMMANDS has what it offers.

A command's own module, and with it torch, is imported when the command runs.
"""

import argparse
import dataclasses
import difflib
import importlib
import os
import signal
import sys
import threading
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hf_lgelu.cli.arguments import COMMANDS, GROUPS, Arguments, Command
from hf_lgelu.cli.paths import require_paths
from hf_lgelu.version import __version__

FAILED, WRONG_CALL = 1, 2
"""Exit statuses; 0 is for what was done, 128 + n for signal n."""


class _WrongCallError(ValueError):
    """An error in the words of a call."""


def main(words: Sequence[str] | None = None) -> int:
    """The exit status of one call, `words` or the command line's: 0, or 1 or 2 after one line that says why."""
    words = list(sys.argv[1:] if words is None else words)
    if words[:1] in (["-h"], ["--help"]):
        print(_overview())
        return 0
    if words[:1] == ["--version"]:
        print(__version__)
        return 0
    try:
        command = _command(words)
        arguments = _arguments(command, words[1:])
    except _WrongCallError as error:
        print(f"hf-lgelu: {error}", file=sys.stderr)
        return WRONG_CALL
    return 0 if arguments is None else _answer(command, arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongCallError(message.removeprefix("argument "))


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of a command's own words: an option a field of its dataclass, in groups."""
    # Those without a default come first in their group.
    options = sorted(dataclasses.fields(command.arguments), key=lambda entry: entry.default is not dataclasses.MISSING)
    required = [entry for entry in options if entry.default is dataclasses.MISSING]
    words = [f"{'' if _is_word(entry) else f'--{entry.name} '}{entry.name.upper()}" for entry in required]
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser = _Parser(
        prog=f"hf-lgelu {command.name}",
        usage=" ".join([f"hf-lgelu {command.name}", *words, "[OPTIONS]"]),
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title in GROUPS:
        group = parser.add_argument_group(title)
        for entry in (option for option in options if option.metadata["group"] == title):
            name, help = entry.name, entry.metadata["help"]
            # `str | None` is read as str.
            kind = next(iter(typing.get_args(entry.type)), entry.type)
            if _is_word(entry):
                group.add_argument(name, metavar=name.upper(), help=help)
            elif kind is bool:
                group.add_argument(f"--{name}", action="store_true", help=help)
            else:
                group.add_argument(
                    f"--{name}", type=kind, default=entry.default, required=entry in required,
                    choices=entry.metadata.get("choices"), help=help,
                )  # fmt: skip
    return parser


def _is_word(entry: dataclasses.Field) -> bool:
    return bool(entry.metadata.get("is_word"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint " (did you mean x?)" with the known name that is nearest to `word`, or ""."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def say(text: str) -> None:
    """Print a line at once. The work goes on, in silence, where nobody reads any more (`hf-lgelu … | head`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _stop_saying()


def _stop_saying() -> None:
    """Point stdout to nowhere, so that its flush at the end of the process does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: hf-lgelu COMMAND ...",
            "",
            "Smooth networks as ReLU networks: by learned hardness (λ-GELU), or refitted without training.",
            "",
            *lines,
            "",
            "hf-lgelu COMMAND --help has the options of each, and two examples.",
        )
    )


def _command(words: Sequence[str]) -> Command:
    if not words:
        raise _WrongCallError(f"give a command: {', '.join(COMMANDS)}; hf-lgelu --help says what they do")
    if words[0] not in COMMANDS:
        raise _WrongCallError(f"there is no command {words[0]!r}{did_you_mean(words[0], COMMANDS)}; hf-lgelu --help")
    return COMMANDS[words[0]]


def _arguments(command: Command, words: Sequence[str]) -> Arguments | None:
    """The arguments in a command's words; None where the words ask for help, which is printed."""
    parser = parser_of(command)
    if "-h" in words or "--help" in words:
        parser.print_help()
        return None
    if "" in words:
        raise _WrongCallError(f"{command.name}: one of its arguments is empty; hf-lgelu {command.name} --help")
    # Dashes in the names of options are underscores.
    spelled = (word.partition("=") if word.startswith("--") else (word, "", "") for word in words)
    words = [(name.replace("-", "_").replace("__", "--", 1) if name.startswith("--") else name) + equals + value
             for name, equals, value in spelled]  # fmt: skip
    known = [f"--{entry.name}" for entry in dataclasses.fields(command.arguments) if not _is_word(entry)]
    # argparse would speak first of what is missing: of --dta as of a --data that was left out.
    for name in (word.partition("=")[0] for word in words if word.startswith("--")):
        if name not in known:
            raise _WrongCallError(
                f"{command.name}: there is no option {name}{did_you_mean(name, known)}; hf-lgelu {command.name} --help"
            )
    try:
        return command.arguments(**vars(parser.parse_args(words)))
    except (_WrongCallError, ValueError) as error:
        raise _WrongCallError(f"{command.name}: {error}; hf-lgelu {command.name} --help") from error


def _answer(command: Command, arguments: Arguments) -> int:
    module, _, function = command.run.partition(":")
    ended_by = [signal.SIGINT]
    try:
        with _signals_as_interrupts(ended_by):
            require_paths(arguments)
            if arguments.progress:
                print(f"hf-lgelu {command.name}: loading torch and transformers ...", file=sys.stderr, flush=True)
            getattr(importlib.import_module(module), function)(arguments)
    except BrokenPipeError:  # `hf-lgelu check ... | head`: nobody reads on
        _stop_saying()
        return 128 + signal.SIGPIPE
    except (ValueError, TypeError, RuntimeError, OSError, ImportError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"hf-lgelu {command.name}: {reason}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt as interrupt:
        left = str(interrupt) or "nothing was written"
        print(f"hf-lgelu {command.name}: interrupted; {left}", file=sys.stderr)
        return 128 + ended_by[-1]
    return 0


@contextmanager
def _signals_as_interrupts(seen: list[signal.Signals]) -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as SIGINT does, so that what was half written is removed; `seen` gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> NoReturn:
        seen.append(signal.Signals(number))
        raise KeyboardInterrupt

    previous: dict[int, Any] = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP: leave it so
            previous[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
