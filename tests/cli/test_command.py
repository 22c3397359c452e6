"""hf-lgelu itself: its help, what it says to a wrong call, how it ends."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from hf_lgelu.cli.arguments import COMMANDS, Command, ExportArguments
from hf_lgelu.cli.command import main, parser_of
from hf_lgelu.files import whole_folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_has_two_examples_that_are_right_calls(command, call):
    status, said, errors = call(command.name, "--help")
    assert (status, errors) == (0, "")
    assert len(command.examples) == 2
    for example in command.examples:
        assert f"\n  {example}\n" in said
        name, *words = shlex.split(example)[1:]
        assert name == command.name
        first = [
            part for option, word in zip(command.positional, words, strict=False) for part in (f"--{option}", word)
        ]
        words = [*first, *words[len(command.positional) :]]
        parsed = parser_of(command).parse_args_into_dataclasses(words, look_for_args_file=False)
        assert isinstance(parsed[0], command.arguments)


CONVERT = ("convert", "m", "--data", "x", "--output_dir", "y")
EXPORT = ("export", "m", "--output_dir", "y")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "give a command: convert, export, compare, check, profile"),
        (("convrt",), "there is no command 'convrt' (did you mean convert?)"),
        (("harden", "m"), "there is no command 'harden': a hardened checkpoint is exported, by hf-lgelu export"),
        (("convert", "m", "--dta", "x"), "convert: there is no option --dta (did you mean --data?)"),
        (("convert", "m", "--max_sample=3"), "there is no option --max_sample (did you mean --max_samples?)"),
        (("convert", "m", "--data", "x"), "the following arguments are required: --output_dir"),
        (("check",), "the following arguments are required: --model"),
        ((*CONVERT, "--max_samples", "0"), "--max_samples must be 1 or more, got 0"),
        ((*CONVERT, "--batch_size", "-1"), "--batch_size must be 1 or more, got -1"),
        ((*CONVERT, "--sequence_length", "1"), "--sequence_length must be 2 or more, got 1"),
        ((*CONVERT, "--seed", "4294967296"), "--seed must be from 0 to below 2**32"),
        ((*CONVERT, "--seed", "one"), "--seed: invalid int value: 'one'"),
        ((*CONVERT, "--private"), "--private: of a push, and nothing is pushed without --push_to_hub"),
        ((*CONVERT, "--max_kl", "0"), "max_kl must be a number above 0"),
        ((*CONVERT, "--keep", ","), "--keep must be a number, or names with commas between"),
        (
            (*CONVERT, "--evaluation", "none", "--max_eval_samples", "9"),
            "nothing reads --max_eval_samples without a set",
        ),
        ((*CONVERT, "--width", "0.5"), "width is a multiple of the units there are, 1 or more"),
        ((*CONVERT, "--distill_steps", "0"), "distill_steps must be a whole number, at least 1, got 0"),
        ((*CONVERT, "--bf16"), "bf16=True is for effort='distill'"),
        ((*CONVERT, "--target", "relu:0.1"), "target must be one of relu, relu6"),
        ((*CONVERT, "--target", "relu6", "--effort", "place"), "kinks are placed and blocks widened for ReLU only"),
        ((*CONVERT, "--target", "relu6", "--equalize"), "--equalize: units of relu6 cannot be rescaled"),
        ((*EXPORT, "--to", "tflite"), "--to: invalid choice: 'tflite'"),
        ((*EXPORT, "--to", "onnx", "--push_to_hub", "a/b"), "--push_to_hub: --to onnx writes no card"),
        ((*EXPORT, "--to", "onnx", "--license", "mit"), "--license: --to onnx writes no card"),
        (
            (*EXPORT, "--to", "onnx", "--evaluation", "e", "--max_eval_samples", "9"),
            "--max_eval_samples: --to onnx writes no card and scores nothing",
        ),
        ((*EXPORT, "--to", "gelu", "--allow_soft"), "--allow_soft: --to gelu takes soft"),
        ((*EXPORT, "--private"), "--private: of a push, and nothing is pushed without"),
        ((*EXPORT, "--batch_size", "9"), "nothing reads --batch_size without a set"),
        (("check", "m", "--evaluation_split", "test", "--column", "x"), "--evaluation_split and --column without"),
        (("check", "a", "b"), "check: nothing takes 'b'"),
        (("compare", "a", "--data", "x"), "compare: the following arguments are required: --converted"),
        (("compare", "a", "b", "c", "--data", "x"), "compare: nothing takes 'c'"),
        ((*CONVERT, "--int8"), "--int8 must be left out without --compare"),
        (("check", "a", "--evaluation", ""), "check: one of its arguments is empty"),
        (("profile", "m", "--figure"), "--figure: expected one argument"),
    ],
)
def test_a_wrong_call_gets_one_line_and_status_2(words, reason, call):
    status, said, errors = call(*words)
    assert (status, said) == (2, "")
    assert reason in errors
    assert errors.startswith("hf-lgelu: ")
    assert errors.count("\n") == 1


def test_a_tilde_that_the_shell_left_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert ExportArguments(model="m", output_dir="~/relu").output_dir == "/somewhere/relu"


def fail(arguments):
    raise ValueError("first line\n  second line")


def write_and_be_killed(arguments):
    with whole_folder(arguments.model) as new:
        (new / "half").write_text("x")
        os.kill(os.getpid(), signal_to_send)
        raise AssertionError("the signal ends this")


signal_to_send = signal.SIGTERM


@pytest.fixture
def fake_command(monkeypatch):
    def add(function):
        row = Command(
            "fake", "a command of this test", f"{__name__}:{function.__name__}", COMMANDS["check"].arguments, ("", "")
        )
        monkeypatch.setitem(COMMANDS, "fake", row)
        monkeypatch.setitem(sys.modules, __name__, sys.modules[function.__module__])

    return add


def test_what_failed_is_said_in_one_line(fake_command, call):
    fake_command(fail)
    assert call("fake", "x") == (1, "", "hf-lgelu fake: first line second line\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_leave_nothing_half_written(number, fake_command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[write_and_be_killed.__module__], "signal_to_send", number)
    fake_command(write_and_be_killed)
    # Under nohup, or in the background of a script, the tests themselves run with some of them ignored.
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    previous = signal.signal(number, usual)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    try:
        status = main(["fake", str(tmp_path / "out")])
    except SystemExit as left:
        status = left.code
    finally:
        after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
        signal.signal(number, previous)
    assert status == 128 + number
    assert capsys.readouterr().err == "hf-lgelu fake: interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []
    assert after == before


LIGHT = """
import sys
from hf_lgelu.cli import command
for words in (["--help"], ["--version"]):
    command.main(words)
print("loaded:", sorted({"torch", "transformers", "datasets", "numpy", "matplotlib"} & set(sys.modules)))
for words in (["convert", "--help"], ["convert"]):
    command.main(words)
print("loaded:", sorted({"torch", "datasets", "matplotlib"} & set(sys.modules)))
"""


def test_help_loads_nothing_heavy():
    finished = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("loaded: []") == 2
    assert finished.stderr.count("\n") == 1  # the wrong call
