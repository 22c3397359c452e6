"""hf-lgelu itself: its help, what it says to a wrong call, how it ends."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from hf_lgelu.cli.command import main, parser_of
from hf_lgelu.cli.table import COMMANDS, Command
from hf_lgelu.files import whole_folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_has_two_examples_that_are_right_calls(command, call):
    status, said, errors = call(command.name, "--help")
    assert (status, errors) == (0, "")
    assert len(command.examples) == 2
    for example in command.examples:
        assert f"\n  {example}\n" in said
        words = [word for word in shlex.split(example) if "=" not in word]  # without variables of the environment
        assert words[:2] == ["hf-lgelu", command.name]
        arguments = parser_of(command).parse_args(words[2:])
        assert command.complaint(arguments) is None


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_row_names_what_there_is_and_says_its_defaults(command):
    module, _, function = command.run.partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
    assert list(COMMANDS) == [row.name for row in COMMANDS.values()]
    for option in command.options:
        optional = option.name.startswith("--") and not option.settings.get("required")
        if optional and option.settings.get("action") != "store_true":
            assert "Left out:" in option.help, option.name
        assert option.help.endswith("."), option.name


def test_one_name_for_one_thing():
    """An option of one name has one meaning: the same type, default and form wherever it is."""
    forms = {}
    for command in COMMANDS.values():
        for option in command.options:
            form = {key: str(value) for key, value in option.settings.items()}
            assert forms.setdefault(option.name, form) == form, option.name


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "give a command: convert, harden, check, profile, card, kernels"),
        (("convrt",), "there is no command 'convrt' (did you mean convert?)"),
        (("convert", "m", "--dta", "x"), "convert: there is no option --dta (did you mean --data?)"),
        (("convert", "m", "--max_sample=3"), "there is no option --max_sample (did you mean --max_samples?)"),
        (("convert", "m"), "the following arguments are required: --data, --output_dir"),
        (("convert",), "the following arguments are required: MODEL, --data, --output_dir"),
        (("convert", "m", "--data", "x", "--output_dir", "y", "--max_samples", "0"), "--max_samples: must be a whole"),
        (("convert", "m", "--data", "x", "--output_dir", "y", "--batch_size", "-1"), "--batch_size: must be a whole"),
        (("convert", "m", "--data", "x", "--output_dir", "y", "--seed", "4294967296"), "--seed: must be below 2**32"),
        (("convert", "m", "--data", "x", "--output_dir", "y", "--seed", "one"), "--seed: must be a whole number"),
        (("harden", "m", "--output_dir", "y", "--to", "tflite"), "--to: 'tflite' is none of relu, gelu, onnx;"),
        (("harden", "m", "--output_dir", "y", "--to=geul"), "is none of relu, gelu, onnx (did you mean gelu?)"),
        (
            ("harden", "m", "--output_dir", "y", "--to", "onnx", "--push_to_hub"),
            "what --to onnx writes with `hf upload`",
        ),
        (
            ("harden", "m", "--output_dir", "y", "--to", "onnx", "--license", "mit", "--facts", "f"),
            "--license and --facts: for a card, and --to onnx writes none",
        ),
        (("harden", "m", "--output_dir", "y", "--to", "onnx", "--facts", "f"), "harden: --facts: for a card"),
        (
            ("harden", "m", "--output_dir", "y", "--to", "onnx", "--evaluation", "e", "--max_eval_samples", "9"),
            "--max_eval_samples: --to onnx compares outputs on the first rows and scores none",
        ),
        (("harden", "m", "--output_dir", "y", "--to", "gelu", "--allow_soft"), "--allow_soft: --to gelu takes soft"),
        (("harden", "m", "--output_dir", "y", "--to", "onnx", "--allow_soft"), "--allow_soft: --to onnx takes soft"),
        (("harden", "m", "--output_dir", "y", "--private"), "--private: of a push, and nothing is pushed without"),
        (
            ("convert", "m", "--data", "x", "--output_dir", "y", "--private"),
            "--private: of a push, and nothing is pushed without --push_to_hub",
        ),
        (("convert", "m", "--data", "x", "--output_dir", "y", "--max_kl", "0"), "--max_kl: must be a number above 0"),
        (("convert", "m", "--data", "", "--output_dir", "y"), "convert: one of its arguments is empty"),
        (("convert", "m", "--data", "x", "--output_dir", "y", "--keep", ","), "--keep: must be names or numbers"),
        (("check", "m", "--outputs", ","), "--outputs: must be names or numbers with commas between, got ','"),
        (
            ("convert", "m", "--data", "x", "--output_dir", "y", "--evaluation", "none", "--max_eval_samples", "9"),
            "convert: nothing reads --max_eval_samples without a set that --evaluation names",
        ),
        (
            ("check", "m", "--evaluation_split", "test", "--column", "x"),
            "--evaluation_split and --column without",
        ),
        (("harden", "m", "--output_dir", "y", "--batch_size", "9"), "harden: nothing reads --batch_size without"),
        (("check", "a", "b"), "check: nothing takes 'b'"),
        (("profile", "m", "--figure"), "--figure: expected one argument"),
    ],
)
def test_a_wrong_call_gets_one_line_and_status_2(words, reason, call):
    status, said, errors = call(*words)
    assert (status, said) == (2, "")
    assert reason in errors
    assert errors.startswith("hf-lgelu: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--width_budget 0.5", "width_budget is a share of the units there are, 1 or more"),
        ("--distill_steps 0", "distill_steps must be a whole number from 1 on, got 0"),
        ("--distill_steps 5 --effort refit", "distill_steps=5 is for effort='distill', and the last rung asked for is"),
        ("--bf16", "bf16=True is for effort='distill'"),
        ("--target relu:0.1", "--target: target must be one of relu, relu6"),
        ("--target leaky_relu:7", "with a slope from 0 to below 1"),
        ("--target leaky", "got 'leaky' (did you mean leaky_relu?)"),
        ("--target relu6 --effort place", "kinks are placed and blocks widened for ReLU only, not for target='relu6'"),
    ],
)
def test_dials_that_do_not_go_together_are_refused_before_anything_is_loaded(words, reason, call):
    status, said, errors = call("convert", "no/model", "--data", "no.csv", "--output_dir", "y", *words.split())
    assert (status, said) == (2, "")
    assert reason in errors
    assert errors.count("\n") == 1


def test_a_tilde_that_the_shell_left_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    convert = parser_of(COMMANDS["convert"]).parse_args(["m", "--data", "x", "--output_dir=~/relu"])
    assert convert.output_dir == "/somewhere/relu"
    assert parser_of(COMMANDS["profile"]).parse_args(["m", "--figure=~/it.png"]).figure == "/somewhere/it.png"


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
            "fake", "a command of this test", f"{__name__}:{function.__name__}", COMMANDS["check"].options, ("", "")
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
for words in (["--help"], ["convert", "--help"], ["convert"], ["--version"]):
    command.main(words)
heavy = {"torch", "transformers", "datasets", "numpy", "matplotlib"} & set(sys.modules)
print("loaded:", sorted(heavy))
"""


def test_help_loads_nothing_heavy():
    finished = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "loaded: []"
    assert finished.stderr.count("\n") == 1  # the wrong call
