"""Checkpoints of families that transformers saves under other names than the model has: they are taken up whole.

transformers' own Trainer loads them by name, warns, and goes on from random weights.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_networks import put_gates_of_two_forms
from tiny_training import assert_same_state, state_of, tiny_trainer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hf_lgelu import hardness_profile

SMALL = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12}


def vit(seed, activation="lambda_gelu", layers=2):
    torch.manual_seed(seed)
    sizes = {**SMALL, "num_hidden_layers": layers}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3, hidden_act=activation)
    return ViTForImageClassification(config)


def vit_of_two_forms(seed):
    model = vit(seed, "gelu")
    put_gates_of_two_forms(model)
    return model


def mixtral(seed):
    torch.manual_seed(seed)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    experts["experts_implementation"] = "eager"  # the other one runs on no CPU with torch 2.8
    return MixtralForCausalLM(MixtralConfig(**SMALL, **experts, vocab_size=11, hidden_act="lambda_gelu"))


def skip_unless_renamed(checkpoint, model):
    if load_file(checkpoint / "model.safetensors").keys() <= model.state_dict().keys():
        pytest.skip("this transformers saves the family under the model's own names")


def images():
    generator = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 3} for i in range(12)]


def texts():
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 11, (6,), generator=generator) for _ in range(12)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


FAMILIES = {"vit": (vit, images), "vit of two forms": (vit_of_two_forms, images), "mixtral": (mixtral, texts)}


def trainer_for(folder, model, data, **options):
    return tiny_trainer(folder, model, train=data, eval_dataset=data[:4], num_train_epochs=4, **options)


@pytest.mark.parametrize(("family", "harden"), [("vit", False), ("vit of two forms", True), ("mixtral", True)])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, family, harden):
    build, data = FAMILIES[family]
    whole = trainer_for(tmp_path, build(0), data(), save_strategy="epoch", harden=harden)
    whole.train()
    checkpoint = tmp_path / "checkpoint-6"
    skip_unless_renamed(checkpoint, whole.model)
    resumed = trainer_for(tmp_path / "resumed", build(1), data(), save_strategy="no", harden=harden)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_state(state_of(resumed.model), state_of(whole.model))
    assert min(hardness_profile(whole.model).values()) > (159 if harden else 1)


def test_the_best_epoch_is_put_back(tmp_path):
    states = []

    def score(_):
        states.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        return {"score": -len(states)}  # the first epoch is the best

    trainer = trainer_for(
        tmp_path,
        vit(0),
        images(),
        save_strategy="epoch",
        eval_strategy="epoch",
        report_substitution=False,
        load_best_model_at_end=True,
        metric_for_best_model="score",
    )
    trainer.compute_metrics = score
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert_same_state(trainer.model.state_dict(), states[0])
    assert not torch.equal(next(iter(states[0].values())), next(iter(states[-1].values())))


def test_a_checkpoint_of_another_network_is_refused_in_several_files_too(tmp_path):
    first = trainer_for(tmp_path, vit(0), images(), save_strategy="epoch")
    first.train()
    folder = tmp_path / "checkpoint-6"
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"encoder.layer.2|layers.2"):
        trainer_for(tmp_path / "r", vit(1, layers=3), images()).train(resume_from_checkpoint=str(folder))
    baseline = trainer_for(tmp_path / "r", vit(1, "gelu"), images(), require_lambda_gelu=False)
    with pytest.raises(ValueError, match="say other gates"):
        baseline.train(resume_from_checkpoint=str(folder))


def bert(seed):
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**SMALL, vocab_size=11, hidden_act="lambda_gelu"))


def sentences():
    return [{"input_ids": row["input_ids"], "labels": i % 2} for i, row in enumerate(texts())]


@pytest.mark.parametrize(("build", "data"), [(vit, images), (bert, sentences)])
def test_a_checkpoint_without_one_of_the_weights_is_refused(tmp_path, build, data):
    """Of a family that is renamed, and of one that is not. Trainer warns, and the weight is random."""
    trainer = trainer_for(tmp_path, build(0), data(), save_strategy="epoch")
    trainer.train()
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    tensors = load_file(weights)
    del tensors["classifier.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"classifier\.weight"):
        trainer.train(resume_from_checkpoint=str(weights.parent))


def with_another_head(seed):
    model = vit(seed)
    model.classifier = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    return model


def test_a_renamed_checkpoint_that_from_pretrained_does_not_give_back_is_refused(tmp_path):
    trainer_for(tmp_path, with_another_head(0), images(), save_strategy="epoch").train()
    other = with_another_head(1)
    before = state_of(other)
    skip_unless_renamed(tmp_path / "checkpoint-6", other)
    with pytest.raises(ValueError, match=r"from_pretrained\(.*checkpoint-6"):
        trainer_for(tmp_path / "r", other, images()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same_state(state_of(other), before)


def test_a_body_in_bfloat16_and_a_head_in_float32_are_resumed_exactly(tmp_path):
    def build(seed):
        model = vit(seed).to(torch.bfloat16)
        model.classifier.float().register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
        return model

    halves = [{**row, "pixel_values": row["pixel_values"].bfloat16()} for row in images()]
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "report_substitution": False}
    whole = trainer_for(tmp_path, build(0), halves, **options)
    whole.train()
    resumed = trainer_for(tmp_path / "resumed", build(1), halves, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_same_state(state_of(resumed.model), state_of(whole.model))
