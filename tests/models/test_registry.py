"""The name in the activation tables of transformers and timm."""

import sys

import pytest
import timm
import torch
from timm.layers import create_act, create_act_layer, get_act_layer
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN, get_activation

from hf_lgelu import LambdaGELU, register_activation, registry

TIMM_TABLE = create_act._ACT_LAYER_DEFAULT
TABLES = {"ACT2CLS": ACT2CLS, "ACT2FN": ACT2FN, "create_act": TIMM_TABLE}


class Other(nn.Module):
    pass


def test_the_name_is_in_every_table_after_import():
    assert [table.get("lambda_gelu") for table in TABLES.values()] == [LambdaGELU] * 3


def test_registering_again_changes_nothing():
    before = [dict(table.items()) for table in TABLES.values()]
    register_activation()
    register_activation()
    assert [dict(table.items()) for table in TABLES.values()] == before


@pytest.mark.parametrize("missing", TABLES)
def test_registering_fills_a_table_that_lost_the_name(missing, monkeypatch):
    monkeypatch.delitem(TABLES[missing], "lambda_gelu")
    register_activation()
    assert TABLES[missing].get("lambda_gelu") is LambdaGELU


@pytest.mark.parametrize("taken", TABLES)
def test_a_taken_name_is_refused_and_no_table_changes(taken, monkeypatch):
    for table in TABLES.values():
        monkeypatch.delitem(table, "lambda_gelu")
    monkeypatch.setitem(TABLES[taken], "lambda_gelu", Other)
    with pytest.raises(RuntimeError, match=f"{taken} as .*Other"):
        register_activation()
    assert [table.get("lambda_gelu") for table in TABLES.values()] == [
        Other if name == taken else None for name in TABLES
    ]


def test_a_string_builds_a_new_activation_at_each_lookup():
    built = [ACT2FN["lambda_gelu"], ACT2FN["lambda_gelu"], get_activation("lambda_gelu"), ACT2CLS["lambda_gelu"]()]
    assert all(type(module) is LambdaGELU for module in built)
    assert len({id(module.raw_hardness) for module in built}) == 4


def test_timm_builds_it_by_string_by_class_and_with_inplace_first():
    assert get_act_layer("lambda_gelu") is LambdaGELU
    assert get_act_layer("Lambda_GELU") is LambdaGELU
    assert get_act_layer(LambdaGELU) is LambdaGELU
    for module in (create_act_layer("lambda_gelu", inplace=True), create_act_layer(LambdaGELU), LambdaGELU(True)):
        assert type(module) is LambdaGELU
        assert module.hardness.item() == pytest.approx(1.05, abs=1e-6)


def test_inplace_is_ignored():
    # vgg calls act_layer(True): were True λ, this would be another function, and in place another x.
    x = torch.linspace(-2, 2, 9)
    before = x.clone()
    output = LambdaGELU(True)(x)
    assert torch.equal(x, before)
    expected = 0.5 * x.double() * (1 + torch.erf(1.05 * x.double() / 2**0.5))
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-6)


def test_timm_is_optional(monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "timm.layers.create_act")
    assert registry.timm_activation_classes() is None
    monkeypatch.delitem(TIMM_TABLE, "lambda_gelu")
    register_activation()
    assert "lambda_gelu" not in TIMM_TABLE


def test_a_timm_that_keeps_its_table_elsewhere_is_an_error_that_says_so(monkeypatch):
    monkeypatch.delattr(create_act, "_ACT_LAYER_DEFAULT")
    with pytest.raises(RuntimeError, match="act_layer"):
        register_activation()


def test_timm_create_model_takes_the_string():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, act_layer="lambda_gelu")
    assert sum(isinstance(module, LambdaGELU) for module in model.modules()) == 2
