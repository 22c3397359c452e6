"""What would leave the gates out of a training, or leave them soft, is refused or said."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments

from hf_lgelu import (
    HardeningCallback,
    LambdaGELU,
    LambdaGELUTrainer,
    LambdaGELUTrainingArguments,
    LambdaSiLU,
    MLPConfig,
    MLPForClassification,
    anneal_hardness,
    hardness_parameter_groups,
    hardness_profile,
    replace_activations,
    separate_hardness_group,
)
from hf_lgelu.training.hardening import smallest_soft_hardness

ROWS = [{"features": torch.randn(4), "labels": number % 2} for number in range(16)]


def mlp():
    torch.manual_seed(0)
    return MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))


def arguments(folder, kind=LambdaGELUTrainingArguments, **options):
    return kind(folder, num_train_epochs=8, per_device_train_batch_size=8, use_cpu=True, report_to=[],
                save_strategy="no", disable_tqdm=True, **options)  # fmt: skip


def llama():
    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                         vocab_size=11, hidden_act="lambda_silu")  # fmt: skip
    return LlamaForCausalLM(config)


TOKENS = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 8


def test_a_fused_kernel_in_the_gates_place_is_found_by_the_first_backward_pass(tmp_path):
    model = llama()
    for layer in model.model.layers:  # as liger-kernel binds LigerSwiGLUMLP.forward

        def fused(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

        layer.mlp.forward = fused.__get__(layer.mlp)
    trainer = LambdaGELUTrainer(model, arguments(tmp_path, harden=True), train_dataset=TOKENS)
    with pytest.raises(RuntimeError, match="none of the 2 raw hardnesses has a gradient"):
        trainer.train()
    LambdaGELUTrainer(llama(), arguments(tmp_path, harden=True), train_dataset=TOKENS).train()


class Block(nn.Module):
    """One activation under two names, of which it runs by the second."""

    def __init__(self):
        super().__init__()
        self.act = nn.GELU()
        self.net = nn.Sequential(nn.Linear(4, 8), self.act, nn.Linear(8, 2))

    def forward(self, features, labels):
        logits = self.net(features)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("options", [{}, {"harden": True}, {"harden": True, "switch_fraction": 0.0}, {"frozen": True}])
def test_a_gate_that_never_runs_is_named_once(tmp_path, said, options):
    model = Block()
    replace_activations(model)
    assert list(hardness_profile(model)) == ["act", "net.1"]
    if options == {"frozen": True}:
        model.act.raw_hardness.requires_grad_(False)
        options = {}
    args = arguments(tmp_path, **options)
    LambdaGELUTrainer(model, args, train_dataset=ROWS).train()
    handlers = 2  # of `said`
    told = [text for text in said() if "has no gradient for λ of 1 of 2 gates (act)" in text]
    assert len(told) == handlers * model.act.raw_hardness.requires_grad


def test_gates_that_all_run_are_not_named(tmp_path, said):
    LambdaGELUTrainer(mlp(), arguments(tmp_path), train_dataset=ROWS).train()
    assert not [text for text in said() if "has no gradient" in text]


@pytest.mark.parametrize(
    ("config", "refused"), [(None, True), ({"swiglu": False}, True), ({"swiglu": False, "geglu": False}, False)]
)
def test_ligers_mlps_are_refused_and_its_other_kernels_are_not(tmp_path, config, refused):
    args = arguments(tmp_path)
    args.use_liger_kernel, args.liger_kernel_config = True, config
    if refused:
        with pytest.raises(ValueError, match=r"liger_kernel_config=\{'swiglu': False, 'geglu': False\}"):
            LambdaGELUTrainer(llama(), args, train_dataset=TOKENS)
    else:
        LambdaGELUTrainer(llama(), args, train_dataset=TOKENS)


class StopAfter(TrainerCallback):
    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.epoch >= self.epochs


@pytest.fixture
def said(caplog):
    """What the package has logged."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    ours = logging.getLogger("hf_lgelu")
    ours.addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records]
    logger.removeHandler(caplog.handler)
    ours.removeHandler(caplog.handler)


@pytest.mark.parametrize(("epochs", "soft"), [(3, True), (8, False)])
def test_a_training_that_stops_with_soft_gates_says_so(tmp_path, said, epochs, soft):
    model = mlp()
    callbacks = [HardeningCallback(), StopAfter(epochs)]
    Trainer(model, arguments(tmp_path, TrainingArguments), train_dataset=ROWS, callbacks=callbacks).train()
    told = [text for text in said() if "the gates are still soft" in text]
    assert bool(told) == soft
    assert (min(hardness_profile(model).values()) < 79) == soft


def test_the_soft_gates_are_told_by_their_smallest_hardness(tmp_path, said):
    """Of [3, 400, …] the mean would be hard; λ-SiLU at 90 is soft where λ-GELU at 85 is hard."""
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2, hidden_act="gelu"))
    replace_activations(model, granularity="channel", inputs=torch.randn(2, 4), include=lambda name: ".0." in name)
    replace_activations(model)
    model.layers[0].activation.hardness_override.copy_(torch.tensor([3.0, *[400.0] * 7]))
    model.layers[1].activation.hardness_override.fill_(300.0)
    assert smallest_soft_hardness(model) == 3.0
    HardeningCallback().on_train_end(None, TrainerState(), None, model)
    (told,) = {text for text in said() if "the gates are still soft" in text}
    assert "down to λ = 3, less than 50% of its target" in told
    model.layers[0].activation.hardness_override.fill_(400.0)
    assert smallest_soft_hardness(model) is None
    gates = nn.ModuleList([LambdaGELU(), LambdaSiLU()])
    gates[0].hardness_override.fill_(85.0)  # half of 159.6 is 79.8
    gates[1].hardness_override.fill_(90.0)  # half of 277.3 is 138.6
    assert smallest_soft_hardness(gates) == 90.0


@pytest.mark.parametrize("hard", [False, True])
def test_a_network_that_is_hard_already_is_said_to_become_soft(tmp_path, said, hard):
    model = mlp()
    if hard:
        anneal_hardness(model, 1.0)
    LambdaGELUTrainer(model, arguments(tmp_path, harden=True), train_dataset=ROWS).train()
    assert any("are hardened (λ up to 159.6)" in text for text in said()) == hard


@pytest.mark.parametrize(("rates", "lost"), [(1e-3, True), ([1e-3, 1e-3, 9e-3], False)])
def test_a_scheduler_that_gives_all_groups_one_rate_is_told(tmp_path, said, rates, lost):
    model = mlp()
    optimizer = torch.optim.AdamW(hardness_parameter_groups(model, 1e-3, weight_decay=0.1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=16)
    trainer = LambdaGELUTrainer(model, arguments(tmp_path), train_dataset=ROWS, optimizers=(optimizer, scheduler))
    trainer.train()
    assert any("gives every parameter group the same learning rate" in text for text in said()) == lost


def test_tensor_parallelism_is_refused():
    class Split(nn.Module):
        tp_size = 2

        def __init__(self):
            super().__init__()
            self.inner = mlp()

    model = Split()
    for groups in (
        lambda: hardness_parameter_groups(model, 1e-3),
        lambda: separate_hardness_group(torch.optim.SGD(model.parameters(), 0.1), model),
    ):
        with pytest.raises(RuntimeError, match="tensor parallelism over 2 processes"):
            groups()


ADDED = {
    "added": lambda trainer: trainer.add_callback(HardeningCallback()),
    "added as a class": lambda trainer: trainer.add_callback(HardeningCallback),
    "put in by hand": lambda trainer: trainer.callback_handler.callbacks.append(HardeningCallback()) or trainer.train(),
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("harden", [True, False])
def test_two_callbacks_do_not_harden_one_model(tmp_path, harden, name):
    """The last one's target would be where λ goes, and the first one's what counts as hardened."""
    callbacks = [] if harden else [HardeningCallback(target_hardness=20.0)]
    trainer = LambdaGELUTrainer(mlp(), arguments(tmp_path, harden=harden), train_dataset=ROWS, callbacks=callbacks)
    with pytest.raises(ValueError, match="2 HardeningCallbacks would harden one model"):
        ADDED[name](trainer)
    if name.startswith("added"):
        trainer.train()  # by the one that it had
        expected = 159.577 if harden else 20.0
        assert list(hardness_profile(trainer.model).values()) == pytest.approx([expected] * 2, rel=1e-5)


def test_two_callbacks_are_not_passed(tmp_path):
    with pytest.raises(ValueError, match="2 HardeningCallbacks would harden one model"):
        LambdaGELUTrainer(
            mlp(), arguments(tmp_path), train_dataset=ROWS, callbacks=[HardeningCallback(), HardeningCallback()]
        )
