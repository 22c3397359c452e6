"""What a user gets who installs the package: names, version, typing, and no optional package needed."""

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fresh_process import run_fresh

import hf_lgelu

ROOT = Path(__file__).parents[1]
UV = (sys.executable, "-m", "uv")

ALONE = """
import importlib.machinery, sys
absent = {"timm", "datasets", "evaluate", "sklearn", "scipy", "pandas", "matplotlib", "tensorboard", "trackio"}
absent |= {"onnx", "onnxscript", "onnxruntime", "peft"}
# What the process was made with: transformers is to be imported here, with none of these.
for name in [name for name in sys.modules if name.split(".")[0] in ("transformers", "accelerate", *absent)]:
    del sys.modules[name]
find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, *args: None if name.split(".")[0] in absent else find(name, *args)
)
import hf_lgelu
from hf_lgelu.activation.hardness import hardness_for_tolerance
print("transformers" in sys.modules)
from transformers import LlamaConfig  # a family's config, whose validators import the activations half made
from transformers.activations import ACT2FN
print(LlamaConfig(hidden_act="lambda_silu").hidden_act, type(ACT2FN["lambda_silu"]).__name__)
from transformers import AutoConfig
print(type(AutoConfig.for_model(hf_lgelu.MLPConfig.model_type, num_features=2)).__name__)
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(activation_function="lambda_gelu", n_layer=2, n_embd=8, n_head=2, vocab_size=9))
print(len(hf_lgelu.hardness_profile(model)))
print("transformers.trainer" in sys.modules, sorted(absent & set(sys.modules)))
try:
    import timm
except ModuleNotFoundError:
    print("fine without extras")
"""


def test_an_import_loads_next_to_nothing():
    program = "import sys, hf_lgelu; print({'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert finished.stdout == "set()\n", finished.stderr[-2000:]


def test_the_package_works_without_any_optional_package(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    finished = run_fresh(tmp_path / "alone.py")
    said = ["False", "lambda_silu LambdaSiLU", "MLPConfig", "2", "False []", "fine without extras"]
    assert finished.stdout.splitlines() == said, finished.stderr[-2000:]


GUEST = """
import sys, tempfile
import diffusers, huggingface_hub, torch, transformers
from transformers import BertConfig, BertModel, MptConfig, MptModel

owners = [transformers.PreTrainedModel, huggingface_hub.ModelHubMixin, diffusers.ConfigMixin, diffusers.ModelMixin]
owners += [torch.nn.Module, torch.nn.init, transformers.PreTrainedConfig, transformers.AutoModel]
before, finders = [dict(vars(owner)) for owner in owners], list(sys.meta_path)

def look(place):
    for owner, held in zip(owners, before, strict=True):
        now = vars(owner)
        # transformers itself adds this one in its first load.
        changed = [name for name in {*held, *now} - {"smart_apply"} if now.get(name) is not held.get(name)]
        assert not changed, (place, owner, changed)
    added = [finder for finder in sys.meta_path if finder not in finders]
    assert len(added) == 1 and len(hf_lgelu._TABLES) == 2 and len(sys.meta_path) == len(finders) + 1

import hf_lgelu
look("import")
sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 9}
model, tokens = BertModel(BertConfig(**sizes)).eval(), torch.randint(9, (64, 8))
options = hf_lgelu.ConversionConfig(keep=("encoder.layer.1.intermediate.intermediate_act_fn",))
converted = hf_lgelu.convert_to_relu(model, {"input_ids": tokens}, options=options).model
look("conversion")
with tempfile.TemporaryDirectory() as folder:
    converted.save_pretrained(folder)
    look("save")
    loaded = hf_lgelu.from_pretrained(BertModel, folder)
    look("load")
    assert torch.equal(loaded(tokens).pooler_output, converted(tokens).pooler_output)
    for kind in (MptModel, int):
        try:
            hf_lgelu.from_pretrained(kind, folder)
        except ValueError:
            look("load that raised")
        else:
            raise AssertionError(kind)
print("as before")
"""


def test_host_libraries_are_left_as_they_were(tmp_path):
    (tmp_path / "guest.py").write_text(GUEST)
    finished = run_fresh(tmp_path / "guest.py")
    assert finished.stdout.splitlines()[-1:] == ["as before"], finished.stderr[-2000:]


IMPORTS = [
    "import hf_lgelu; from transformers import AutoModel",
    "import hf_lgelu; from transformers import Trainer",
    "import hf_lgelu; import transformers.activations",
    "import hf_lgelu; from transformers.models.bert import modeling_bert",
    "import hf_lgelu; import timm",
    "import hf_lgelu.models.mlp",
    "import hf_lgelu.models.loading",
    "import hf_lgelu.training.trainer",
    "import hf_lgelu; hf_lgelu.MLPConfig",
    "import timm; from transformers import BertModel, Trainer; import hf_lgelu",
]
REGISTERED = """
from transformers import AutoConfig, AutoModel
from transformers.activations import ACT2CLS, ACT2FN
import hf_lgelu, timm
assert ACT2FN.get("lambda_gelu") is ACT2CLS["lambda_gelu"] is hf_lgelu.LambdaGELU
assert type(AutoConfig.for_model(hf_lgelu.MLPConfig.model_type, num_features=3)) is hf_lgelu.MLPConfig
assert type(AutoModel.from_config(hf_lgelu.MLPConfig(num_features=3))) is hf_lgelu.MLPForClassification
model = timm.create_model("resnet18", act_layer="lambda_gelu")
assert any(type(module) is hf_lgelu.LambdaGELU for module in model.modules())
print("registered")
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", IMPORTS)
def test_everything_is_registered_in_whatever_order_the_libraries_are_imported(imports):
    command = [sys.executable, "-c", imports + REGISTERED]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.stdout.strip() == "registered", finished.stderr[-2000:]


def test_every_public_name_is_there_and_documented():
    assert sorted(hf_lgelu.__all__) == sorted(set(hf_lgelu.__all__))
    for name in set(hf_lgelu.__all__) - {"__version__"}:
        assert getattr(hf_lgelu, name).__doc__, f"{name} has no docstring"


def test_every_exception_of_our_own_can_be_imported():
    defined = set()
    for path in (ROOT / "hf_lgelu").rglob("*.py"):
        classes = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
        defined |= {node.name for node in classes if node.name.endswith("Error") and not node.name.startswith("_")}
    assert "ConversionRefusedError" in defined
    documented = re.findall(r"^::: ([\w.]+Error)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    for name in documented:
        assert issubclass(pkgutil.resolve_name(name), Exception)
    assert {name.rpartition(".")[2] for name in documented} == defined


@pytest.mark.wheel
def test_the_wheel_carries_the_package_and_runs_the_readmes_first_command_alone(tmp_path):
    subprocess.run([*UV, "build", "--quiet", "--out-dir", tmp_path, ROOT], check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        text = archive.read(metadata).decode()
        (commands,) = [name for name in names if name.endswith("entry_points.txt")]
        assert "hf-lgelu = hf_lgelu.cli.command:main" in archive.read(commands).decode()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_lgelu").rglob("*.py")}
    assert modules <= set(names)
    assert {"hf_lgelu/py.typed", "hf_lgelu/__init__.pyi"} <= set(names)
    assert {"hf_lgelu/export/model_card_template.md", "hf_lgelu/evaluate/relu_substitution/README.md"} <= set(names)
    sources = {f"hf_lgelu/activation/kernels/{name}" for name in ("gate.cpp", "formulas.h")}
    assert sources <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert f"Version: {hf_lgelu.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    assert not any(name.startswith(("tests", "scripts")) for name in names)
    subprocess.run([*UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "empty"], check=True)
    subprocess.run([*UV, "pip", "install", "--quiet", "--python", tmp_path / "empty", wheel], check=True, timeout=600)
    command, *words = re.search(r"^hf-lgelu \S+", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)[0].split()
    alone = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([tmp_path / "empty" / "bin" / command, *words], cwd=tmp_path, env=alone, check=True, timeout=600)
    assert (tmp_path / "hf-lgelu-demo" / "relu" / "README.md").is_file()


def test_gates_are_registered_after_each_import_of_a_table(tmp_path, monkeypatch):
    (tmp_path / "awaited_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    monkeypatch.setattr(hf_lgelu, "_TABLES", ("awaited_module",))
    monkeypatch.setattr(hf_lgelu, "_register", lambda: seen.append(sys.modules["awaited_module"].value))
    import awaited_module

    assert seen == [1]
    importlib.reload(awaited_module)
    assert seen == [1, 1]
    monkeypatch.delitem(sys.modules, "awaited_module")
