"""README.md and docs/: each block runs alone, in a folder that holds what it loads. `make lint` checks the links."""

import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from docs_world import build_world

import hf_lgelu
from hf_lgelu.cli.command import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page and number, text) of every fenced block in this language."""
    found = []
    for page in PAGES:
        texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        found += [(f"{page.name}-{number}", text) for number, text in enumerate(texts, 1)]
    return found


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PYTHON = blocks("python")
ROADS = [text for name, text in PYTHON if name.startswith("README")]  # run, and looked at, by a test of their own
CONSUMERS = [(name, text) for name, text in PYTHON if name.startswith("use.md")]  # the first is digits.py
ANSWERS = [(name, text) for name, text in blocks("text") if name.startswith("use.md")]
OF_DOCS = [
    pytest.param(name, text, id=name, marks=[pytest.mark.consumers] if "onnxruntime_genai" in text else [])
    for name, text in PYTHON
    if not name.startswith(("README", "use.md"))
]
# Commands of the library that need no network. Those of scripts/ are run by the laboratory's tests and by make.
NAMED = {
    " ".join(line.partition("#")[0].split()): name
    for name, text in blocks("bash")
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith("hf-lgelu ") and "push_to_hub" not in line and not line.startswith("hf-lgelu demo")
}
# One that another page has with more options is run there.
COMMANDS = [line for line in NAMED if not any(other.startswith(f"{line} ") for other in NAMED)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    build_world(folder)
    return folder


@pytest.fixture
def _in_a_copy(world, tmp_path, monkeypatch):
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)


@pytest.mark.usefixtures("_in_a_copy")
@pytest.mark.parametrize(("name", "text"), OF_DOCS)
def test_a_block_runs_alone(name, text, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    text = text.replace("box_channels=64)", "box_channels=64, distill_steps=4)")  # or it takes ten seconds
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


@pytest.mark.usefixtures("_in_a_copy")
@pytest.mark.parametrize("command", COMMANDS, ids=[f"{NAMED[line]}-{line[9:40]}" for line in COMMANDS])
def test_a_command_succeeds(command):
    words = shlex.split(command)[1:]
    if words[1].startswith("out/"):  # what another command writes
        folder = words[1].removesuffix("/model.onnx")
        assert main(shlex.split(next(line for line in NAMED if f" --output_dir {folder}" in line))[1:]) == 0
    assert main(words) == 0
    if "--output_dir" in words and "--dry_run" not in words:
        assert os.listdir(words[words.index("--output_dir") + 1])


@pytest.mark.usefixtures("_in_a_copy")
def test_the_roads_of_the_readme_end_in_relu(monkeypatch):
    from transformers import AutoModelForSequenceClassification

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    convert, harden = ROADS
    names: dict = {}
    exec(convert, names)
    assert names["report"].held_out.refitted.kl < names["report"].held_out.direct.kl
    assert (names["model"].config.hidden_act, names["relu_model"].config.hidden_act) == ("gelu", "relu")
    inputs = {key: value[:4] for key, value in names["data"].items()}
    reloaded = AutoModelForSequenceClassification.from_pretrained("out/converted")
    torch.testing.assert_close(reloaded(**inputs).logits, names["relu_model"](**inputs).logits, rtol=0, atol=1e-6)
    names = {}
    exec(harden, names)
    evaluations = [entry for entry in names["trainer"].state.log_history if "eval_relu_loss" in entry]
    assert len(evaluations) == 8
    assert evaluations[-1]["eval_relu_loss"] == pytest.approx(evaluations[-1]["eval_loss"], abs=1e-3)
    assert AutoModelForSequenceClassification.from_pretrained("out/hardened").config.hidden_act == "relu"
    assert Path("out/hardened/tokenizer.json").is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path, tmp_path, monkeypatch, capsys):
    """But for the numbers, which another processor rounds in another way."""
    notebook, names = json.loads(path.read_text(encoding="utf-8")), {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert re.sub(r"[\d.e-]+", "#", capsys.readouterr().out) == re.sub(r"[\d.e-]+", "#", shown)


@pytest.mark.consumers
@pytest.mark.parametrize(
    ("text", "answers"),
    [(text, answers) for (_, text), (_, answers) in zip(CONSUMERS[1:], ANSWERS, strict=True)],
    ids=[name for name, _ in CONSUMERS[1:]],
)
def test_a_tool_answers_as_the_page_says(text, answers, tmp_path):
    """In a process of its own: some of these packages change torch or numpy for the whole process."""
    (tmp_path / "digits.py").write_text(CONSUMERS[0][1], encoding="utf-8")
    (tmp_path / "block.py").write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    given = [line for line in done.stdout.splitlines() if line.startswith(("GELU: ", "Swapped: ", "ReLU: "))]
    assert _values("\n".join(given), float) == _values(answers, lambda word: pytest.approx(float(word), 0.01, 1e-4))


def _values(text: str, number: Callable[[str], object]) -> list[object]:
    """The words of `text`, and `number` of each that has a point or an exponent. Counts stay words: they are exact."""
    return [
        number(word) if re.fullmatch(r"\d+(\.\d+)?(e[-+]\d+)?", word) and not word.isdigit() else word
        for word in text.split()
    ]


def test_a_stranger_meets_code_early_and_the_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```bash")) <= 15
    assert len(lines) <= 200


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} == set(re.findall(r"\(([\w/-]+\.md)\)", index))


def test_the_site_has_every_public_name():
    names = re.findall(r"^::: hf_lgelu\.(\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(pkgutil.resolve_name(f"hf_lgelu.{name}") for name in names)
    assert sorted(name for name in names if "." not in name) == hf_lgelu.__all__
