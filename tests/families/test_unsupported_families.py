"""Families that λ-GELU cannot reach say so, and docs/families.md lists what can and what cannot."""

import re
from collections import Counter
from pathlib import Path

import pytest
import timm
import torch
import transformers
from families import FAMILIES
from family import logits_of
from timm_families import TIMM_FAMILIES
from unsupported_families import BUILT_ANEW, IGNORED, INPUTS, REFUSED

from hf_lgelu import LambdaSiLU, hardness_profile, replace_activations
from hf_lgelu.networks.sites import find_sites
from hf_lgelu.networks.smooth_calls import find_smooth_calls


def build(prefix: str, head: str, sizes: dict, key: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, key: "lambda_gelu"})
    return getattr(transformers, prefix + head)(config)


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_or_type_of_its_own_refuses_the_name(name):
    with pytest.raises(Exception, match=r"lambda_gelu|only supports 'gelu'"):
        build(*REFUSED[name])


@pytest.mark.parametrize("name", BUILT_ANEW)
def test_an_activation_built_anew_at_each_forward_is_found(name):
    prefix, head, sizes, sites, built = BUILT_ANEW[name]
    model = build(prefix, head, sizes, "hidden_act")
    assert len(hardness_profile(model)) == sites
    anew = [call for call in find_smooth_calls(model, INPUTS()) if call.module is None]
    assert [(call.module_class, call.line is None, call.count) for call in anew] == [("LambdaGELU", False, 1)] * built


@pytest.mark.parametrize("name", IGNORED)
def test_an_ignored_key_leaves_no_site_and_the_profile_says_so(name):
    prefix, head, sizes, key, expected, count = IGNORED[name]
    model = build(prefix, head, sizes, key)
    with pytest.raises(ValueError, match="λ-GELU"):
        hardness_profile(model)
    calls = Counter()
    for call in find_smooth_calls(model, INPUTS()):
        calls[f"{call.module_class} {call.operation}"] += call.count
    assert calls == {expected: count}


@pytest.mark.parametrize("name", ["gpt-oss"])
def test_activations_that_are_no_modules_of_a_known_kind_cannot_be_exchanged(name):
    prefix, head, sizes, key, _, _ = IGNORED[name]
    model = build(prefix, head, sizes, key)
    with pytest.raises(ValueError, match="find_smooth_calls"):
        replace_activations(model, kinds=("gelu", "silu", "mish"))


def test_timm_nfnet_would_lose_its_gain_so_surgery_is_on_its_own_risk():
    # The gain is a constant beside the activation; λ-GELU takes its place at every site all the same.
    model = timm.create_model("test_nfnet", num_classes=3)
    sites = len(find_sites(model, ("silu",)))
    replace_activations(model, kinds=("silu",))
    assert sum(isinstance(module, LambdaSiLU) for module in model.modules()) == sites == 20
    assert torch.isfinite(logits_of(model, {"x": torch.randn(2, 3, 96, 96)})).all()


def _page() -> dict[str, str]:
    """{family: the rows of docs/families.md that name it}."""
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    rows: dict[str, str] = {}
    for row in re.findall(r"^\| (.+) \|$", text, flags=re.MULTILINE):
        for name in re.split(r", | \| ", row):
            rows[name.strip()] = rows.get(name.strip(), "") + row
    return rows


def test_the_documentation_names_every_family_of_the_tables():
    names = {family.name for family in (*FAMILIES, *TIMM_FAMILIES)} | {*REFUSED, *BUILT_ANEW, *IGNORED, "timm-nfnet"}
    assert names - set(_page()) == set()


def test_the_documentation_has_the_tables_keys_and_smooth_calls():
    rows = _page()
    for family in FAMILIES:
        for key in family.keys:
            assert f"`{key}`" in rows[family.name], family.name
        if not family.keys:
            assert "surgery" in rows[family.name], family.name
        for call in family.smooth:
            assert call.split()[1] in rows[family.name], family.name
