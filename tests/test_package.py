"""What a user gets who installs the package: names, version, typing, and no optional package needed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hf_lgelu

ROOT = Path(__file__).parents[1]

WITHOUT_EXTRAS = """
import importlib.machinery, sys
absent = {"timm", "datasets", "evaluate", "sklearn", "matplotlib", "tensorboard", "trackio"}
absent |= {"onnx", "onnxscript", "onnxruntime", "maraboupy", "torch_pruning"}
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *args: None if name.split(".")[0] in absent else find(name, *args)
)
import hf_lgelu
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(activation_function="lambda_gelu", n_layer=2, n_embd=8, n_head=2, vocab_size=9))
assert len(hf_lgelu.hardness_profile(model)) == 2
assert not absent & set(sys.modules)
try:
    import timm
except ModuleNotFoundError:
    print("fine without extras")
"""


def test_it_imports_and_works_without_any_optional_package():
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.stdout.strip() == "fine without extras", finished.stderr[-2000:]


def test_every_public_name_is_there_and_documented():
    assert sorted(hf_lgelu.__all__) == sorted(set(hf_lgelu.__all__))
    for name in set(hf_lgelu.__all__) - {"__version__"}:
        assert getattr(hf_lgelu, name).__doc__, f"{name} has no docstring"


@pytest.mark.slow
def test_the_wheel_carries_the_package_its_licence_and_its_types(tmp_path):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "-o", tmp_path, ROOT], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        text = archive.read(metadata).decode()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_lgelu").rglob("*.py")}
    assert modules <= set(names)
    assert "hf_lgelu/py.typed" in names
    assert "hf_lgelu/export/hub/model_card_template.md" in names
    sources = {f"hf_lgelu/activation/kernels/cpu/{name}" for name in ("lambda_gelu.cpp", "formulas.h", "loops.h")}
    assert sources <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"Version: {hf_lgelu.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    assert not any(name.startswith(("tests", "scripts")) for name in names)
