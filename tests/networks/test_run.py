"""One run of a model on example inputs."""

import copy

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import hf_lgelu
from hf_lgelu import (
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    convert_to_relu,
    export_gelu,
    export_onnx,
    export_relu,
    substitute_relu,
)
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.run import evaluation_mode, own_forward, run_example


class Add(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, a, b=None, scale=1):
        assert not torch.is_grad_enabled()
        assert not self.training
        return (a if b is None else a + b) * scale * self.weight


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)
FORMS = [
    (ONE, 1.0),
    ({"a": ONE, "b": TWO, "scale": 10}, 30.0),
    (BatchEncoding({"a": ONE, "b": TWO}), 3.0),
    ((ONE, TWO, 2), 6.0),
    ([ONE], 1.0),
]


@pytest.mark.parametrize(("inputs", "expected"), FORMS, ids=lambda value: type(value).__name__)
def test_inputs_of_every_form(inputs, expected):
    assert run_example(Add(), inputs).tolist() == [expected] * 2


@pytest.mark.parametrize("bare", [False, True])
def test_outputs_have_their_names_though_the_config_wants_a_tuple(bare):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=20, return_dict=False)).eval()
    ids = torch.randint(0, 20, (2, 5))
    found = run_example(model, ids if bare else {"input_ids": ids})
    assert list(found) == ["logits"]
    (expected,) = model(ids)
    torch.testing.assert_close(found.logits, expected)
    assert model.config.return_dict is False


@pytest.mark.parametrize("inputs", ["ab", 3, None])
def test_other_inputs_are_refused(inputs):
    with pytest.raises(TypeError, match=f"got {type(inputs).__name__}"):
        run_example(Add(), inputs)


class Broken(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.dropout = nn.Dropout()
        self.check = check

    def forward(self, x):
        self.check()
        raise ArithmeticError


def test_every_module_gets_its_own_mode_back_also_after_an_error():
    def check():
        assert not any(module.training for module in model.modules())

    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2), Broken(check)).train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ArithmeticError):
        run_example(model, torch.ones(2, 2))
    assert [module.training for module in model.modules()] == modes
    with evaluation_mode(model):
        check()
    assert [module.training for module in model.modules()] == modes


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        x -= 1
        return x * self.weight


def test_what_works_in_place_on_its_inputs_leaves_those_of_the_caller():
    given = torch.full((2,), 3.0)
    for form in (given, {"x": given}, (given,)):
        assert [run_example(InPlace(), form).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert given.tolist() == [3.0, 3.0]


class Largest(nn.Module):
    """Remembers the largest input, in eval mode too, as an observer of torch.ao does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        self.largest.copy_(torch.maximum(self.largest, x.abs().max().detach()))
        return x


def test_what_only_looks_at_a_model_leaves_its_buffers(tmp_path):
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), Largest(), nn.Linear(16, 3))
    with torch.no_grad():
        net[0].bias[0] = -99.0  # never fires
    buffer = net[2].largest
    hf_lgelu.export_onnx(net, tmp_path / "net.onnx", torch.randn(4, 4))
    assert net[2].largest is buffer
    assert buffer == 0
    assert net.training
    net(torch.randn(3, 4))
    assert buffer > 0


def network(hardness=160.0):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2)).eval()
    anneal_hardness(model, 1.0, target_hardness=hardness)
    return model


def prepared(model):
    """As accelerate leaves a model that was trained with bf16 (Accelerator.prepare_model)."""
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", torch.bfloat16)
    model.forward = convert_outputs_to_fp32(autocast(type(model).forward)).__get__(model)
    return model


INPUTS = {"features": torch.randn(64, 4, generator=torch.Generator().manual_seed(0))}


def test_the_autocast_of_accelerate_goes_and_comes_back():
    model = network()
    exact = model(**INPUTS).logits
    rounded = prepared(model)(**INPUTS).logits
    assert (rounded - exact).abs().max() > 1e-5
    with own_forward(model):
        assert torch.equal(model(**INPUTS).logits, exact)
        assert "forward" not in vars(model)
    assert torch.equal(model(**INPUTS).logits, rounded)
    assert torch.equal(independent_copy(model)(**INPUTS).logits, exact)
    with pytest.raises(KeyError), own_forward(model):
        raise KeyError
    assert torch.equal(model(**INPUTS).logits, rounded)


def test_a_model_trained_with_bfloat16_leaves_as_one_that_was_not(tmp_path):
    model = network()
    report = export_relu(prepared(network()), tmp_path / "relu", inputs=INPUTS)
    expected = export_relu(model, tmp_path / "exact", inputs=INPUTS)
    assert report.change == expected.change
    change = export_gelu(prepared(network(1.7)), tmp_path / "gelu", inputs=INPUTS).change
    assert change.largest_change < 1e-5 * change.largest_output
    substitute_relu(relu := network())
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert export_onnx(prepared(relu), tmp_path / "model.onnx", INPUTS).max_abs_difference < 1e-5


def test_it_converts_as_a_model_that_was_not():
    config = MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2, hidden_act="gelu")
    torch.manual_seed(0)
    model = MLPForClassification(config).eval()
    wrapped = prepared(copy.deepcopy(model))
    expected = convert_to_relu(model, INPUTS).model(**INPUTS).logits
    converted = convert_to_relu(wrapped, INPUTS).model
    assert torch.equal(converted(**INPUTS).logits, expected)
    assert "_original_forward" not in vars(converted)
    assert "_original_forward" in vars(wrapped)
