"""The name in the activation tables of transformers and timm."""

import pytest
from timm.layers import create_act, create_act_layer, get_act_layer
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN, get_activation

from hf_lgelu import LambdaGELU
from hf_lgelu.registry import register_activation

TIMM_TABLE = create_act._ACT_LAYER_DEFAULT
TABLES = {"ACT2CLS": ACT2CLS, "ACT2FN": ACT2FN, "create_act": TIMM_TABLE}


class Other(nn.Module):
    pass


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
