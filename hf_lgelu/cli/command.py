"""The command `hf-lgelu`: how a call is read and answered; the table COMMANDS has what it offers.

A command's own module, and with it torch, is imported when the command runs: help and the refusal of a wrong call take
no seconds.
"""

import argparse
import importlib
import itertools
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hf_lgelu.cli.near_names import did_you_mean
from hf_lgelu.cli.saying import stop_saying
from hf_lgelu.cli.table import COMMANDS, Command
from hf_lgelu.version import __version__

FAILED, WRONG_CALL = 1, 2
"""Exit statuses; 0 is for what was done, 128 + n for signal n."""


class _WrongCallError(ValueError):
    """What is wrong with the words of a call."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongCallError(message.removeprefix("argument "))


def main(words: Sequence[str] | None = None) -> int:
    """Answer one call, `words` or the command line's, and return its exit status: 0, or 1 or 2 with one line why."""
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


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of a command's own words."""
    examples = "\n".join(f"  {example}" for example in command.examples)
    parser = _Parser(
        prog=f"hf-lgelu {command.name}",
        usage=_usage(command),
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in command.options:
        parser.add_argument(option.name, help=option.help.replace("%", "%%"), **option.settings)
    return parser


def _usage(command: Command) -> str:
    """What a call must have; the rest is listed below it."""
    words = [option.settings.get("metavar", "") for option in command.options if not option.name.startswith("-")]
    for option in command.options:
        if option.settings.get("required"):
            words += [option.name, option.name.lstrip("-").upper()]
    return " ".join([f"hf-lgelu {command.name}", *words, *(["[OPTIONS]"] if command.options else [])])


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


def _arguments(command: Command, words: Sequence[str]) -> argparse.Namespace | None:
    """What a command's words say; None where they asked for help, which has then been given."""
    parser = parser_of(command)
    if "-h" in words or "--help" in words:
        parser.print_help()
        return None
    if "" in words:
        raise _WrongCallError(f"{command.name}: one of its arguments is empty; hf-lgelu {command.name} --help")
    known = [option.name for option in command.options if option.name.startswith("-")]
    # argparse would speak first of what is missing: of --dta as of a --data that was left out.
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise _WrongCallError(
                f"{command.name}: there is no option {name}{did_you_mean(name, known)}; hf-lgelu {command.name} --help"
            )
    try:
        _require_choices(command, words)
        arguments, surplus = parser.parse_known_args(list(words))
        if surplus:
            raise _WrongCallError(f"nothing takes {' '.join(surplus)!r}")
    except _WrongCallError as error:
        raise _WrongCallError(f"{command.name}: {error}; hf-lgelu {command.name} --help") from error
    complaint = command.complaint(arguments)
    if complaint is not None:
        raise _WrongCallError(f"{command.name}: {complaint}")
    return arguments


def _require_choices(command: Command, words: Sequence[str]) -> None:
    """Raise for a value that is none of an option's choices, with the one that may have been meant."""
    choices = {option.name: option.settings["choices"] for option in command.options if "choices" in option.settings}
    pairs = [word.partition("=")[::2] for word in words if "=" in word] + list(itertools.pairwise(words))
    for name, value in pairs:
        if name in choices and value not in choices[name]:
            raise _WrongCallError(
                f"{name}: {value!r} is none of {', '.join(choices[name])}{did_you_mean(value, choices[name])}"
            )


def _answer(command: Command, arguments: argparse.Namespace) -> int:
    module, _, function = command.run.partition(":")
    ended_by = [signal.SIGINT]
    try:
        with _signals_as_interrupts(ended_by):
            getattr(importlib.import_module(module), function)(arguments)
    except BrokenPipeError:  # `hf-lgelu check ... | head`: nobody reads on
        stop_saying()
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
