"""hf-lgelu itself: its help, what it says to a wrong call, how it ends."""

import dataclasses
import shlex
import subprocess
import sys
import types

import pytest

from hf_lgelu.cli.arguments import COMMANDS, GROUPS, ExportArguments
from hf_lgelu.cli.command import command_line, main
from hf_lgelu.files import whole_folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_has_two_examples_that_are_right_calls_and_says_each_default(command, call):
    status, said, errors = call(command.command, "--help")
    assert (status, errors) == (0, "")
    assert len(command.examples) == 2
    for example in command.examples:
        assert f"\n  {example}\n" in said
        name, *words = shlex.split(example)[1:]
        assert name == command.command
        assert command(**vars(command_line()[1][name].parse_args(words)))
    titles = [title for title in GROUPS if f"\n{title}:\n" in said]
    assert titles[0] == "most used" or command.command == "demo"
    for entry in dataclasses.fields(command):
        words = entry.metadata["help"]
        assert words.count("Default: ") == (entry.default is not dataclasses.MISSING), entry.name
        assert "Left out" not in words


def test_help_names_what_comes_first_and_what_an_option_is_for(call):
    assert call("compare", "--help")[1].startswith("usage: hf-lgelu compare MODEL CONVERTED --data DATA [OPTIONS]\n")
    said = " ".join(call("export", "--help")[1].split())
    assert "--license LICENSE With --to relu or gelu: Licence" in said
    assert "--opset OPSET With --to onnx: Version" in said


def test_dashes_in_the_names_of_options_are_underscores(call):
    status, _, errors = call("convert", "/not/there", "--sequence-length", "9", "--data=/a-b", "--output_dir", "o")
    assert (status, "no folder or file /not/there" in errors) == (1, True)


def test_help_is_given_and_paths_are_refused_before_anything_heavy_loads(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rows.csv").write_text("a\n1\n")
    there, full = str(tmp_path / "rows.csv"), str(tmp_path / "model")
    calls = [
        ["profile", "/not/there"],
        ["convert", full, "--data", "/not/there.csv", "--output_dir", "new"],
        ["convert", full, "--data", there, "--output_dir", full],
        ["convert", there, "--data", there, "--output_dir", full],
        ["export", full, "--output_dir", there],
    ]
    program = f"""
import sys
from hf_lgelu.cli import command
for words in (["--help"], ["--version"], ["convert", "--help"]):
    command.main(words)
print([command.main(words) for words in {calls!r}])
print(sorted({{"torch", "transformers", "datasets", "numpy", "matplotlib"}} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert finished.stdout.splitlines()[-2:] == ["[1, 1, 1, 1, 1]", "[]"], finished.stderr
    reasons = ("folder or file /not/there", "/not/there.csv", "is the checkpoint itself", "is not empty", "is a file")
    for reason, line in zip(reasons, finished.stderr.splitlines(), strict=True):
        assert reason in line


CONVERT = ("convert", "m", "--data", "x", "--output_dir", "y")
EXPORT = ("export", "m", "--output_dir", "y")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("convrt",), "invalid choice: 'convrt'"),
        ((*CONVERT, "--dta", "x"), "hf-lgelu convert: unrecognized arguments: --dta x; hf-lgelu convert --help"),
        ((*CONVERT, "--std", "0.5"), "--std: only an ONNX file takes that"),
        (("convert", "m", "--data", "x"), "the following arguments are required: --output_dir"),
        (("profile",), "the following arguments are required: MODEL"),
        ((*CONVERT, "--max_samples", "0"), "--max_samples must be 1 or more, got 0"),
        ((*CONVERT, "--private"), "--private needs --push_to_hub"),
        ((*CONVERT, "--max_kl", "0"), "convert: max_kl must be a number above 0"),
        ((*CONVERT, "--width", "0.5"), "width is a multiple of the present units, finite and at least 1"),
        ((*CONVERT, "--effort", "place", "--bf16"), "`bf16` is for `effort` 'distill'"),
        ((*EXPORT, "--to", "tflite"), "--to: invalid choice: 'tflite'"),
        ((*EXPORT, "--to", "onnx", "--push_to_hub", "a/b"), "--push_to_hub: --to onnx does not take that"),
        ((*EXPORT, "--to", "onnx", "--license", "mit"), "--license: --to onnx does not take that"),
        (
            (*EXPORT, "--to", "onnx", "--evaluation", "e", "--max_eval_samples", "9"),
            "--max_eval_samples: --to onnx does not take that",
        ),
        ((*EXPORT, "--to", "gelu", "--allow_soft"), "--allow_soft: --to gelu does not take that"),
        ((*EXPORT, "--data", "a.csv", "--original", "b"), "--data and --original: --to relu does not take that"),
        ((*EXPORT, "--to", "int8", "--data", "a.csv", "--evaluation", "b"), "--evaluation: --to int8 does not take"),
        ((*EXPORT, "--to", "int8"), "--to int8 needs --data: inputs"),
        (("convert", "m", "--output_dir", "o", "--column", "x"), "--column needs --evaluation or --data"),
        (("compare", "a", "--data", "x"), "compare: the following arguments are required: CONVERTED"),
        (("profile", "a", "--plot", ""), "profile: an argument is empty"),
        (("convert", "m", "--output_dir"), "--output_dir: expected one argument"),
    ],
)
def test_a_wrong_call_gets_one_line_and_status_2(words, reason, call):
    status, said, errors = call(*words)
    assert (status, said) == (2, "")
    assert reason in errors
    assert errors.startswith("hf-lgelu")
    assert errors.count("\n") == 1


def test_a_tilde_that_the_shell_left_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert ExportArguments(model="m", output_dir="~/relu").output_dir == "/somewhere/relu"


def fail(arguments):
    raise ValueError("first line\n  second line")


def write_and_be_interrupted(arguments):
    with whole_folder(f"{arguments.model}/out") as new:
        (new / "half").write_text("x")
        raise KeyboardInterrupt


@pytest.fixture
def fake_command(monkeypatch):
    def add(function):
        monkeypatch.setitem(COMMANDS, "fake", type("Fake", (COMMANDS["profile"],), {"command": "fake"}))
        monkeypatch.setitem(sys.modules, "hf_lgelu.cli.fake", types.SimpleNamespace(fake=function))

    return add


def test_what_failed_is_said_in_one_line(fake_command, call):
    fake_command(fail)
    assert call("fake", ".") == (1, "", "hf-lgelu fake: first line second line\n")


def test_an_interrupt_leaves_nothing_half_written(fake_command, tmp_path, capsys):
    fake_command(write_and_be_interrupted)
    assert main(["fake", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "hf-lgelu fake: interrupted\n"
    assert list(tmp_path.iterdir()) == []
