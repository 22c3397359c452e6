"""One process with packages that people use together with this one; `make test-neighbours` installs them together."""

import copy
import importlib

import pytest
import torch
from small_networks import VOCABULARY, bert, llama
from word_tokenizer import word_tokenizer

import hf_lgelu

pytestmark = pytest.mark.neighbours

NEIGHBOURS = ("diffusers", "llmcompressor", "optimum", "peft", "sentence_transformers", "timm")


def test_a_conversion_a_quantization_and_a_hardening_side_by_side(tmp_path):
    imported = {name: importlib.import_module(name) for name in NEIGHBOURS}
    from llmcompressor.modifiers.quantization import QuantizationModifier

    torch.manual_seed(0)
    tokens = {"input_ids": torch.randint(3, 40, (96, 12))}
    with torch.no_grad():
        converted, _ = hf_lgelu.convert_to_relu(llama(intermediate_size=48), tokens)
        before = converted(**tokens).logits
    assert converted.config.hidden_act == "relu"

    converted.save_pretrained(tmp_path)
    word_tokenizer([f"w{number}" for number in range(1, VOCABULARY)], 16).save_pretrained(tmp_path)
    rows = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    recipe = QuantizationModifier(config_groups={"rows": rows}, ignore=["lm_head"])
    quantized = imported["llmcompressor"].oneshot(model=str(tmp_path), recipe=recipe)
    written = copy.deepcopy(converted)
    for name, layer in written.model.named_modules():
        if isinstance(layer, torch.nn.Linear):  # its weights rounded by hand to 8 bits, with a scale for each row
            scale = quantized.model.get_submodule(name).weight_scale
            layer.weight.data = torch.clamp(torch.round(layer.weight / scale), -128, 127) * scale
    with torch.no_grad():
        assert torch.equal(converted(**tokens).logits, before)
        after = quantized(**tokens).logits
        torch.testing.assert_close(after, written(**tokens).logits, rtol=1e-4, atol=1e-6)
    assert not torch.equal(after, before)

    gates = bert(hidden_act="lambda_gelu")
    lora = imported["peft"].LoraConfig(target_modules=["query"], modules_to_save=["intermediate_act_fn"])
    adapted = imported["peft"].get_peft_model(gates, lora)
    rows = [{"input_ids": ids, "labels": int(ids[0] % 3)} for ids in tokens["input_ids"]]
    arguments = hf_lgelu.LambdaGELUTrainingArguments(
        str(tmp_path / "run"), harden=True, switch_fraction=0.5, num_train_epochs=2, eval_strategy="epoch",
        learning_rate=0.01, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = hf_lgelu.LambdaGELUTrainer(adapted, arguments, train_dataset=rows, eval_dataset=rows)
    (started,) = set(hf_lgelu.hardness_profile(adapted).values())
    trainer.train()
    learned, hardened = (entry for entry in trainer.state.log_history if "eval_relu_loss" in entry)
    assert abs(learned["hardness/mean"] - started) > 0.01
    assert hardened["hardness/mean"] == pytest.approx(159.577, rel=1e-4)
    assert hardened["eval_relu_loss"] == pytest.approx(hardened["eval_loss"], abs=1e-3)
    vit = imported["timm"].create_model("test_vit", act_layer="lambda_gelu").eval()
    hf_lgelu.anneal_hardness(vit, 1.0)
    image = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        hard = vit(image)
        hf_lgelu.substitute_relu(vit)
        torch.testing.assert_close(vit(image), hard, rtol=0, atol=1e-2)
