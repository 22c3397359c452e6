"""Every family of the tables: λ-GELU in, forward, backward, to disk and back, ReLU in, and out of the house."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from families import BY_NAME, FAMILIES
from family import Family, get, logits_of, main_output, normal
from fresh_process import run_fresh
from safetensors.torch import load_file, save_file
from timm_families import TIMM_FAMILIES, TimmFamily
from torch import nn

from hf_lgelu import LambdaGELU, from_pretrained, replace_activations, substitute_relu
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.export.plain import export_relu
from hf_lgelu.models.config_keys import UnsupportedConfigError
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites
from hf_lgelu.networks.smooth_calls import find_smooth_calls

HERE = Path(__file__).parent
ALL: tuple[Family | TimmFamily, ...] = FAMILIES + TIMM_FAMILIES
STRING = tuple(family for family in FAMILIES if family.keys)
NO_RELU_KEY = tuple(family for family in FAMILIES if not family.relu_config)
LEAVES_THE_HOUSE = tuple(family for family in ALL if family not in NO_RELU_KEY)


def over(families, quick=ALL):
    """A test of each; of those that are not in `quick` a slow one."""
    return pytest.mark.parametrize(
        "family", [pytest.param(one, id=one.name, marks=() if one in quick else pytest.mark.slow) for one in families]
    )


def _of_each_form() -> list[Family | TimmFamily]:
    """The first family of each way in which a config says its gates, whatever the key, or a timm model takes them."""
    forms: dict = {}
    for family in LEAVES_THE_HOUSE:
        if isinstance(family, Family):
            form = tuple((key.count("."), value) for key, value in family.relu_config.items())
        else:
            form = family.accepts
        forms.setdefault(form, family)
    return list(forms.values())


OF_EACH_FORM = _of_each_form()
_BUILT: dict[str, nn.Module] = {}


def with_lambda_gelu(family: Family | TimmFamily) -> nn.Module:
    """The family's model with λ-GELU, by name, by class or by surgery: a copy, since each is made once."""
    if family.name not in _BUILT:
        _BUILT[family.name] = _build(family)
    return copy.deepcopy(_BUILT[family.name])


def _build(family: Family | TimmFamily) -> nn.Module:
    if isinstance(family, Family):
        by_surgery = not family.keys
        model = family.build() if by_surgery else family.build("lambda_gelu")
    else:
        by_surgery = family.accepts == "nothing"
        model = family.build({"string": "lambda_gelu", "class": LambdaGELU, "nothing": None}[family.accepts])
    if by_surgery:
        replace_activations(model)
    return model


@torch.no_grad()
def learn(model: nn.Module) -> nn.Module:
    """Give every site another hardness than the initial one and than its neighbours have."""
    for index, module in enumerate(lambda_gelus(model)):
        module.raw_hardness.fill_(0.04 * (index + 1))
    return model


def lambda_gelus(model: nn.Module) -> list[LambdaGate]:
    return [module for module in model.modules() if isinstance(module, LambdaGate)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def assert_apart(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).abs().max() > 1e-3 * one.abs().max()


@over(ALL, quick=OF_EACH_FORM)
def test_there_are_as_many_hardnesses_as_the_architecture_has_activations(family):
    model = with_lambda_gelu(family)
    assert len({id(module.raw_hardness) for module in lambda_gelus(model)}) == family.sites
    assert len(find_sites(model, LEARNED_KINDS)) == family.sites
    assert find_sites(model, ("gelu", "silu", "mish")) == []


@over(ALL, quick=OF_EACH_FORM)
def test_every_hardness_gets_a_gradient(family):
    model = with_lambda_gelu(family)
    output = main_output(model(**family.inputs()))
    assert torch.isfinite(output).all()
    (output * normal(*output.shape)).sum().backward()
    for module in lambda_gelus(model):
        assert module.raw_hardness.grad is not None
        assert torch.isfinite(module.raw_hardness.grad).all()
        assert module.raw_hardness.grad.abs() > 0


def _back(family: Family | TimmFamily, model: nn.Module, folder: Path) -> nn.Module:
    """The model from a folder in which it was saved, or of timm from a file of its tensors."""
    if isinstance(family, TimmFamily):
        save_file(model.state_dict(), folder / "model.safetensors")
        fresh = with_lambda_gelu(family)
        fresh.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        return fresh
    model.save_pretrained(folder)
    return family.model_class.from_pretrained(folder) if family.keys else from_pretrained(family.model_class, folder)


# Families whose config has a key are saved below.
@over(ALL, quick=[one for one in ALL if (one in OF_EACH_FORM if isinstance(one, TimmFamily) else not one.keys)])
def test_checkpoint_comes_back_exactly(family, tmp_path):
    model = with_lambda_gelu(family)
    untrained = logits_of(model, family.inputs())
    trained = logits_of(learn(model), family.inputs())
    assert_apart(trained, untrained)
    assert torch.equal(logits_of(_back(family, model, tmp_path), family.inputs()), trained)


@over(STRING, quick=OF_EACH_FORM)
def test_surgery_writes_the_key_that_the_family_reads(family, tmp_path):
    model = family.build()
    report = replace_activations(model)
    assert len(report) == family.sites
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: get(saved, key) for key in family.keys} == {
        key: template.format(family.gate) for key, template in family.keys.items()
    }
    assert "lambda_gelu" not in saved
    expected = logits_of(learn(model), family.inputs())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(family.model_class.from_pretrained(tmp_path), family.inputs()), expected)


@over(ALL, quick=OF_EACH_FORM)
def test_what_stays_smooth(family):
    model = with_lambda_gelu(family)
    substitute_relu(model)
    assert find_sites(model) == []
    calls = Counter()
    for call in find_smooth_calls(model, family.inputs()):
        calls[f"{call.module_class} {call.operation}"] += call.count
    assert calls == family.smooth


@over(NO_RELU_KEY)
def test_substitution_that_no_key_can_say_is_remembered_and_no_export(family, tmp_path):
    model = with_lambda_gelu(family)
    with pytest.raises(UnsupportedConfigError, match="'relu' at"):
        export_relu(model, tmp_path / "relu", inputs=family.inputs(), allow_soft=True)
    assert len(substitute_relu(model)) == family.sites
    assert lambda_gelus(model) == []
    model.save_pretrained(tmp_path / "memory")
    again = from_pretrained(family.model_class, tmp_path / "memory")
    assert torch.equal(logits_of(again, family.inputs()), logits_of(model, family.inputs()))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """is_quick → what `_read_elsewhere` finds of those families; one process reads all of them."""
    found = {}

    def of(is_quick):
        if is_quick not in found:
            families = [family for family in LEAVES_THE_HOUSE if (family in OF_EACH_FORM) == is_quick]
            found[is_quick] = _read_elsewhere(families, SOFT if is_quick else {}, tmp_path_factory.mktemp("relu"))
        return found[is_quick]

    return of


def _read_elsewhere(families, soft, root):
    """From one process without hf_lgelu: {family: (logits with λ-GELU, with ReLU here, with ReLU there)}, and what it
    said of each checkpoint with λ-GELU."""
    here = {family.name: _leave(family, root / family.name) for family in families}
    for name, (family, options) in soft.items():
        model = BY_NAME[family].build()
        replace_activations(model, **options)
        model.save_pretrained(root / "soft" / name)
    reader = run_fresh(HERE / "relu_reader.py", root)
    assert reader.returncode == 0, reader.stderr[-3000:]
    result = torch.load(root / "logits.pt")
    assert result["modules"] == []
    return {name: (*logits, result["logits"][name]) for name, logits in here.items()}, result["refusals"]


# Checkpoints with λ-GELU: of each way in which surgery leaves a config, and of the ways in which families say theirs.
SOFT = {
    "by the key": ("bert", {}),
    "some sites": ("bert", {"include": lambda name: ".1." in name}),
    "of a timm network": ("timm-wrapper-resnet18", {"include": lambda name: "1" in name}),
    "a table of its own": ("openai-gpt", {"include": lambda name: ".1." in name}),
}


@pytest.mark.parametrize("name", SOFT)
def test_a_checkpoint_with_lambda_gelu_is_refused_by_a_process_without_the_package(elsewhere, name):
    said = elsewhere(True)[1][name]
    assert ("'lambda_gelu'" if name == "by the key" else "hf_lgelu") in said


def _leave(family: Family | TimmFamily, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    model = learn(with_lambda_gelu(family))
    smooth = logits_of(model, family.inputs())
    if isinstance(family, Family):
        export = export_relu(model, folder, inputs=family.inputs(), allow_soft=True)
        assert len(export.gates) == family.sites
        assert torch.equal(logits_of(model, family.inputs()), smooth)  # the model given is left alone
    else:
        folder.mkdir()
    report = substitute_relu(model)
    assert len(report) == family.sites
    if isinstance(family, Family):
        saved = json.loads((folder / "config.json").read_text())
        assert {key: get(saved, key) for key in family.relu_config} == family.relu_config
        assert "lambda_gelu" not in json.dumps(saved)
    else:
        save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(family.inputs(), folder / "inputs.pt")
    return smooth, logits_of(model, family.inputs())


@over(LEAVES_THE_HOUSE, quick=OF_EACH_FORM)
def test_relu_model_computes_the_same_in_a_process_without_hf_lgelu(family, elsewhere):
    smooth, relu, relu_elsewhere = elsewhere(family in OF_EACH_FORM)[0][family.name]
    assert_apart(smooth, relu)
    assert_close(relu_elsewhere, relu)
