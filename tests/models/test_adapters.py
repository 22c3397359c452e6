"""LoRA beside λ-GELU, with the real peft: λ is learned, hardened, saved, loaded and merged with the adapter."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import hf_lgelu
from hf_lgelu import hardness_modules_to_save, hardness_profile, initialize_hardness, substitute_relu, temporary_relu
from hf_lgelu.models.sites import find_sites, lambda_gelu_modules
from hf_lgelu.training.optim import check_hardness_learns

IDS = torch.arange(12).reshape(2, 6)
SITES = ["transformer.h.0.mlp.act", "transformer.h.1.mlp.act"]


def gpt2(activation="lambda_gelu"):
    torch.manual_seed(0)
    config = GPT2Config(
        activation_function=activation, n_layer=2, n_embd=8, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def lora(model, **options):
    config = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False, **options)
    return get_peft_model(model, config).eval()


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
    with pytest.raises(ValueError, match="has no λ-GELU"):
        hardness_modules_to_save(gpt2("relu"))
    shared = gpt2("gelu")
    hf_lgelu.replace_activations(shared, granularity="network")
    with pytest.raises(ValueError, match="granularity 'network'"):
        hardness_modules_to_save(shared)


def test_the_copies_that_do_not_run_are_no_sites(adapted):
    live = [f"base_model.model.{site}.modules_to_save.default" for site in SITES]
    assert [site.name for site in find_sites(adapted)] == live
    assert [name for name, _ in lambda_gelu_modules(adapted)] == live
    assert list(hardness_profile(adapted)) == live
    initialize_hardness(adapted, "increasing", 1.5, 3.0)
    assert list(hardness_profile(adapted).values()) == pytest.approx([1.5, 3.0])
    with adapted.disable_adapter():  # then the originals run
        assert list(hardness_profile(adapted).values()) == pytest.approx([1.05, 1.05])


def test_s_learns_beside_the_adapter(adapted):
    before = [module.raw_hardness.item() for _, module in lambda_gelu_modules(adapted)]
    optimizer = torch.optim.AdamW(hf_lgelu.hardness_parameter_groups(adapted, 0.05))
    check_hardness_learns(adapted, optimizer)
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    assert all(
        module.raw_hardness.item() != s for (_, module), s in zip(lambda_gelu_modules(adapted), before, strict=True)
    )


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
    with temporary_relu(adapted):
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
    with pytest.raises(RuntimeError, match="its module 'inner' is PeftModel of PEFT"):
        operate(inner)
    assert len(lambda_gelu_modules(adapted)) == 2


def test_an_s_that_peft_has_frozen_is_told():
    model = lora(gpt2())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ValueError, match=r"is frozen .*modules_to_save=hardness_modules_to_save\(model\)"):
        check_hardness_learns(model, optimizer)
