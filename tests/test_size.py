"""What the project weighs, as a ratchet with some air: lower the limit where a number has fallen.

The goals are in the right column; where a number and a clear file disagree, the clear file counts.
"""

import ast
import contextlib
import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_networks import NETWORKS
from word_tokenizer import word_tokenizer

import hf_lgelu

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_lgelu"

AIR = 1.02  # so that a mend is no negotiation
LIMITS = {  # limit, goal
    "package: lines": (18_900, 19_000),
    "package: modules": (100, 100),
    "package: classes": (119, 120),
    "refit: lines": (4_150, 4_800),
    "refit: modules": (20, 20),
    "package: raise statements": (244, 290),
    "package: public names": (31, 32),
    "convert_to_relu: parameters": (8, 10),
    "scripts: lines": (8_800, 9_000),
    "tests: lines": (27_900, 28_000),
    "pages without api and changelog: words": (11_900, 12_000),
    "README: words": (1_190, 1_200),
}
ROADS = {  # files in which a function runs: limit, goal
    "convert_to_relu": (40, 28),
    "hf-lgelu convert": (52, 42),
    "a training of four hardened epochs": (21, 20),
    "export_relu": (28, 16),
    "from_pretrained": (5, 6),
}


def _files(folder: str, suffix: str = ".py") -> list[Path]:
    """Files that belong to the project: tracked, or new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return [ROOT / name for name in listed if name.endswith(suffix) and (ROOT / name).is_file()]


def _lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def _words(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").split()) for file in files)


@pytest.fixture(scope="module")
def sizes():
    if not (ROOT / ".git").exists():
        pytest.skip("sizes are counted in a clone")
    package, refit = _files("hf_lgelu"), _files("hf_lgelu/refit")
    nodes = [node for file in package for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    (convert,) = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "convert_to_relu")
    return {
        "package: lines": _lines(package),
        "package: modules": len(package),
        "package: classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "refit: lines": _lines(refit),
        "refit: modules": len(refit),
        "package: raise statements": sum(isinstance(node, ast.Raise) for node in nodes),
        "package: public names": len(hf_lgelu.__all__),
        "convert_to_relu: parameters": len(convert.args.args) + len(convert.args.kwonlyargs),
        "scripts: lines": _lines(_files("scripts")),
        "tests: lines": _lines(_files("tests")),
        "pages without api and changelog: words": _words(
            [file for file in _files("docs", ".md") if file.name != "api.md"]
        ),
        "README: words": _words([ROOT / "README.md"]),
    }


@pytest.mark.parametrize("name", LIMITS)
def test_nothing_grows(sizes, name):
    limit, _ = LIMITS[name]
    assert sizes[name] <= AIR * limit, f"{name} has grown: what could go instead?"


class Road:
    """Files of the package in which a function runs inside the block."""

    def __enter__(self):
        self.files = set()
        self._before = sys.gettrace()
        threading.settrace(self._note)
        sys.settrace(self._note)  # told of calls alone: setprofile is told of all that is written in C too
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
        threading.settrace(None)
        self.files = {file for file in self.files if file.startswith(str(PACKAGE))}

    def _note(self, frame, event, arg):
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class, which runs at its import
            self.files.add(frame.f_code.co_filename)


@pytest.fixture(scope="module")
def roads(tmp_path_factory):
    from transformers import BertForSequenceClassification

    from hf_lgelu.cli.command import main

    folder = tmp_path_factory.mktemp("roads")
    network = NETWORKS["bert padded right"]
    model, inputs = network.model().float(), network.inputs(96)
    del model.bert.encoder.layer[1:]
    model.config.num_hidden_layers = 1
    texts = [" ".join(f"w{token}" for token in row) for row in inputs["input_ids"].tolist()]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    word_tokenizer([f"w{number}" for number in range(1, 30)], 16).save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    rows = [{"input_ids": ids, "labels": int(ids[0] % 2)} for ids in inputs["input_ids"]]
    found = {}
    with Road() as found["convert_to_relu"]:
        hf_lgelu.convert_to_relu(model, inputs)
    words = ["convert", f"{folder}/model", "--data", f"{folder}/texts.txt", "--output_dir", f"{folder}/out"]
    with Road() as found["hf-lgelu convert"], contextlib.suppress(SystemExit):
        main(words)
    assert (folder / "out" / "config.json").exists()
    arguments = hf_lgelu.LambdaGELUTrainingArguments(
        str(folder / "run"), num_train_epochs=4, eval_strategy="epoch", harden=True, use_cpu=True, report_to=[],
        per_device_train_batch_size=64, disable_tqdm=True,
    )  # fmt: skip
    with Road() as found["from_pretrained"]:
        learning = BertForSequenceClassification.from_pretrained(folder / "model", hidden_act="lambda_gelu")
    with Road() as found["a training of four hardened epochs"]:
        trainer = hf_lgelu.LambdaGELUTrainer(model=learning, args=arguments, train_dataset=rows, eval_dataset=rows[:32])
        trainer.train()
    with Road() as found["export_relu"]:
        hf_lgelu.export_relu(trainer.model, folder / "relu")
    return {name: len(road.files) for name, road in found.items()}


@pytest.mark.parametrize("name", ROADS)
def test_no_road_gets_longer(roads, name):
    limit, _ = ROADS[name]
    assert roads[name] <= limit, f"{name} runs through more files: which of them could be one?"
