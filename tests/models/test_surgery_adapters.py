"""LoRA together with λ-GELU, by the real peft: λ is learned, hardened, saved, loaded and merged with the adapter."""

from functools import partial

import pytest
import small_networks as networks
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, get_peft_model
from small_networks import put_gates_of_two_forms
from torch import nn
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import hf_lgelu
from hf_lgelu import from_pretrained, hardness_profile, initialize_hardness, substitute_relu
from hf_lgelu.models.optimizer_groups import hardness_modules_to_save
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.sites import find_sites, lambda_gelu_modules
from hf_lgelu.training.refusals import check_hardness_learns

IDS = torch.arange(12).reshape(2, 6)
SITES = ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]


def gpt2(activation="lambda_gelu"):
    torch.manual_seed(0)
    return networks.gpt2(activation_function=activation, n_embd=8, initializer_range=0.5).eval()


LORA = {"r": 2, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "init_lora_weights": False}


def lora(model, **options):
    return get_peft_model(model, LoraConfig(**LORA, **options)).eval()


@pytest.fixture
def adapted():
    model = gpt2()
    return lora(model, modules_to_save=hardness_modules_to_save(model))


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model):
    """A few steps, and a hardening that leaves each layer another λ."""
    optimizer = torch.optim.AdamW(hf_lgelu.hardness_parameter_groups(model, 0.05))
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    initialize_hardness(model, "increasing", 3.0, 9.0)
    hf_lgelu.anneal_hardness(model, 0.5, target_hardness=20.0)
    return model


def test_the_names_are_those_of_the_modules():
    assert hardness_modules_to_save(gpt2()) == SITES
    with pytest.raises(ValueError, match="λ-GELU"):
        hardness_modules_to_save(gpt2("relu"))


def test_the_copies_that_do_not_run_are_no_sites(adapted):
    live = [f"base_model.model.{site}.modules_to_save.default" for site in SITES]
    assert [site.name for site in find_sites(adapted)] == live
    assert [name for name, _ in lambda_gelu_modules(adapted)] == live
    assert list(hardness_profile(adapted)) == live
    initialize_hardness(adapted, "increasing", 1.5, 3.0)
    assert list(hardness_profile(adapted).values()) == pytest.approx([1.5, 3.0])
    with adapted.disable_adapter():  # then the originals run
        assert list(hardness_profile(adapted).values()) == pytest.approx([1.05, 1.05])


def test_an_adapter_with_hardness_names_no_base(tmp_path):
    """By the name of the plain checkpoint, PEFT would load a base without λ."""
    gpt2("gelu_new").save_pretrained(tmp_path / "plain")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "plain", activation_function="lambda_gelu_tanh")
    lora(model, modules_to_save=hardness_modules_to_save(model)).save_pretrained(tmp_path / "adapter")
    assert PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path in (None, "")


def test_hardness_is_saved_loaded_and_merged_with_the_adapter(adapted, tmp_path):
    expected = logits(trained(adapted))
    profile = list(hardness_profile(adapted).values())
    assert profile == pytest.approx([11.5, 14.5])
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path).eval()
    assert list(hardness_profile(loaded).values()) == profile
    assert torch.equal(logits(loaded), expected)
    merged = loaded.merge_and_unload()
    assert type(merged) is GPT2LMHeadModel
    assert list(hardness_profile(merged)) == SITES
    assert list(hardness_profile(merged).values()) == profile
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)
    with TemporaryRelu(adapted).applied():
        relu = logits(adapted)
    assert (relu - expected).abs().max() > 1e-3
    substitute_relu(merged)
    assert merged.config.activation_function == "relu"
    torch.testing.assert_close(logits(merged), relu, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "operate", [hf_lgelu.replace_activations, substitute_relu, lambda m: substitute_relu(m, kinds=("gelu",))]
)
def test_surgery_on_an_adapter_names_the_merge(adapted, operate):
    with pytest.raises(RuntimeError, match=r"model = model\.merge_and_unload\(\)"):
        operate(adapted)
    inner = nn.ModuleDict({"inner": adapted})
    with pytest.raises(RuntimeError, match=r"'inner'.*PEFT"):
        operate(inner)
    assert len(lambda_gelu_modules(adapted)) == 2


def test_an_s_that_peft_has_frozen_is_told():
    model = lora(gpt2())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match=r"is frozen .*modules_to_save=hardness_modules_to_save\(model\)"):
        check_hardness_learns(model, optimizer)


INPUTS = {"input_ids": IDS, "use_cache": False}


def converted(model):
    data = {"input_ids": torch.randint(20, (40, 6), generator=torch.Generator().manual_seed(0))}
    return hf_lgelu.convert_to_relu(model, data).model


def changed(model, operate, **options):
    operate(model, **options)
    return model


@pytest.mark.parametrize(
    ("activation", "operate"),
    [
        ("gelu", partial(changed, operate=hf_lgelu.replace_activations)),
        ("gelu", partial(changed, operate=substitute_relu, kinds=("gelu",))),
        ("lambda_gelu", partial(changed, operate=substitute_relu)),
        ("gelu", converted),
    ],
    ids=["gates", "swap", "substituted", "converted"],
)
def test_an_adapter_on_a_changed_network_does_not_name_the_original_as_its_base(activation, operate, tmp_path):
    """Loaded by that name it would sit on another network, and nothing would say so."""
    gpt2(activation).save_pretrained(tmp_path / "original")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "original")
    lora(operate(model), task_type="CAUSAL_LM").save_pretrained(tmp_path / "adapter")
    assert PeftConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path in (None, "")
    with pytest.raises(OSError, match=r"connect|None|Repo id"):  # it looks for a checkpoint of no name
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")


def test_an_adapter_of_gates_that_need_the_package_is_loaded_with_its_base(tmp_path):
    base = gpt2("gelu_new")
    put_gates_of_two_forms(base)
    base.save_pretrained(tmp_path / "base")
    soft = from_pretrained(AutoModelForCausalLM, tmp_path / "base")
    lora(soft).save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        expected = soft.eval()(tokens).logits
        by_peft = PeftModel.from_pretrained(
            from_pretrained(AutoModelForCausalLM, tmp_path / "base"), tmp_path / "adapter"
        )
        whole = [
            from_pretrained(kind, tmp_path / "adapter") for kind in (AutoModelForCausalLM, AutoPeftModelForCausalLM)
        ]
        for again in (by_peft, *whole):
            assert torch.equal(again.eval()(tokens).logits, expected)
    with pytest.raises(RuntimeError, match=r"hf_lgelu\.from_pretrained"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
