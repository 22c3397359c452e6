"""A converted language model trains on with transformers' own Trainer: the recipe of docs/convert.md."""

import re
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from two_processes import run_in_two_processes

from hf_lgelu import convert_to_relu

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)).eval()


def test_the_recipe_heals_a_conversion_on_two_processes(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "convert.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```python\n(# heal\.py.*?)^```", page, re.DOTALL | re.MULTILINE)
    # The same text on both processes, whose tokens follow each other.
    recipe = recipe.replace(
        "torch.randint(5, 100, (96, 32))", "5 + (torch.arange(96)[:, None] + torch.arange(32)) % 95"
    )
    llama().save_pretrained(tmp_path / "your" / "llama")
    script = tmp_path / "heal.py"
    script.write_text(
        f"import os, sys\nos.chdir(sys.argv[1])\n{recipe}\nassert trainer.accelerator.num_processes == 2\n"
    )
    run_in_two_processes(script, tmp_path)
    healed = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "healed").eval()
    assert healed.config.hidden_act == "relu"
    text = 5 + (torch.arange(3)[:, None] + torch.arange(32)) % 95
    assert healed(input_ids=text, labels=text).loss < llama()(input_ids=text, labels=text).loss


def test_lora_on_a_conversion_is_merged_into_a_plain_relu_model(tmp_path):
    text = {"input_ids": torch.randint(5, 100, (64, 16))}
    relu = convert_to_relu(llama(), text).model
    before = relu(**text).logits
    adapted = peft.get_peft_model(relu, peft.LoraConfig(target_modules=["up_proj", "down_proj"], r=2, lora_alpha=8))
    arguments = TrainingArguments(
        str(tmp_path / "runs"), learning_rate=1e-2, max_steps=3, use_cpu=True, report_to="none", save_strategy="no"
    )
    Trainer(adapted, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in text["input_ids"]]).train()
    with torch.no_grad():
        trained = adapted.eval()(**text).logits
        assert (trained - before).abs().max() > 1e-3
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(**text).logits, trained, rtol=1e-4, atol=1e-4)
    assert merged.config.hidden_act == "relu"
