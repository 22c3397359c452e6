"""What training refuses before it begins, and what it says where λ or a gate would not be what one thinks."""

import logging
from types import SimpleNamespace

import pytest
import small_networks as networks
import torch
from accelerate.utils import DistributedType
from tiny_training import Fused, Layerwise, lambda_gelus, tiny_model, tiny_trainer
from torch import nn
from torch.nn import functional as F
from transformers import Adafactor, Trainer, TrainerCallback, TrainerState, TrainingArguments

import hf_lgelu
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
)
from hf_lgelu.models.hardening import hardening_progress, is_hardened, release_hardness, smallest_soft_hardness
from hf_lgelu.models.optimizer_groups import hardness_modules_to_save, separate_hardness_group

NO_GATE = (ValueError, "TinyClassifier has no λ-GELU")


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_model_without_lambda_gelu(tmp_path, activation):
    model = tiny_model(activation)
    with pytest.raises(NO_GATE[0], match=NO_GATE[1]):
        tiny_trainer(tmp_path, model)
    tiny_trainer(tmp_path, model, require_lambda_gelu=False).train()
    for trainer in (
        tiny_trainer(tmp_path, model, plain=True, callbacks=[HardeningCallback()]),
        tiny_trainer(tmp_path, model, harden=True, require_lambda_gelu=False),
    ):
        with pytest.raises(NO_GATE[0], match=NO_GATE[1]):
            trainer.train()


def test_deepspeed(tmp_path):
    trainer = tiny_trainer(tmp_path, plain=True)
    trainer.args.distributed_state = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="DeepSpeed"):
        HardeningCallback().on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=None
        )


# Functions of the model

OF_A_MODEL = {
    "anneal_hardness": lambda model: anneal_hardness(model, 0.5),
    "freeze_hardness": hf_lgelu.freeze_hardness,
    "release_hardness": release_hardness,
    "is_hardened": is_hardened,
    "hardness_parameter_groups": lambda model: hardness_parameter_groups(model, 0.1),
    "separate_hardness_group": lambda model: separate_hardness_group(sgd(model), model),
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("call", OF_A_MODEL.values(), ids=OF_A_MODEL)
def test_functions_of_a_model_without_lambda_gelu(call):
    with pytest.raises(NO_GATE[0], match=NO_GATE[1] + ".* GELUActivation × 2"):
        call(tiny_model("gelu"))


OF_NUMBERS = [
    (lambda model: anneal_hardness(model, 0.5, target_hardness=1), "target_hardness"),
    (lambda model: is_hardened(model, float("nan")), "target_hardness"),
    (lambda model: anneal_hardness(model, 1 + 1e-9), "progress"),
    (lambda model: anneal_hardness(model, 0.5, schedule="steep"), "'steep'.*linear"),
    (lambda model: hardening_progress(0, 5), r"\[1, 5\], got 0"),
    (lambda model: hardening_progress(6, 5), r"\[1, 5\], got 6"),
    (lambda model: hardening_progress(1, 10, 1), "switch_fraction"),
    (lambda model: hardness_parameter_groups(model, float("nan")), "learning_rate"),
    (lambda model: hardness_parameter_groups(model, 0.1, float("inf")), "hardness_lr_multiplier"),
    (lambda model: hardness_parameter_groups(model, 0.1, weight_decay=-0.1), "weight_decay"),
    (lambda model: separate_hardness_group(sgd(model), model, -1), "hardness_lr_multiplier"),
]


@pytest.mark.parametrize(("call", "message"), OF_NUMBERS)
def test_numbers_out_of_range(call, message):
    model = tiny_model()
    before = [module.hardness.item() for module in lambda_gelus(model)]
    with pytest.raises(ValueError, match=message):
        call(model)
    assert [module.hardness.item() for module in lambda_gelus(model)] == before


# Optimizers


def scheduled(model):
    optimizer = sgd(model)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    return optimizer


def separated(model):
    optimizer = sgd(model)
    separate_hardness_group(optimizer, model)
    return optimizer


def without_one(model):
    return torch.optim.SGD([p for p in model.parameters() if p is not model.activations[1].raw_hardness], lr=0.1)


def of_relative_steps(model):
    return Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=False, lr=None)


class Flattened(nn.Module):
    """As FSDP without use_orig_params: one flat parameter, and the originals are views of it, not parameters."""

    def __init__(self):
        super().__init__()
        model = tiny_model()
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for name, parameter in list(model.named_parameters()):
            owner = model.get_submodule(name.rpartition(".")[0])
            attribute = name.rpartition(".")[2]
            del owner._parameters[attribute]
            setattr(owner, attribute, parameter.detach())
        self.model, self.flat = model, nn.Parameter(flat)


OF_OPTIMIZERS = {
    "scheduled": (tiny_model, scheduled, "SGD .*scheduler"),
    "separated": (tiny_model, separated, "hardness group"),
    "grouped": (
        tiny_model,
        lambda model: torch.optim.SGD(hardness_parameter_groups(model, 0.1)),
        "hardness group",
    ),
    "layerwise": (tiny_model, lambda model: Layerwise(model.parameters()), "Layerwise .*parameter groups"),
    "fused": (tiny_model, lambda model: Fused(model.parameters()), "Fused .*parameter groups"),
    "without one s": (tiny_model, without_one, "SGD .*parameter groups"),
    "relative steps": (tiny_model, of_relative_steps, "Adafactor .*learning rate"),
    "flat": (Flattened, sgd, "FSDP1 .*fsdp_version: 2"),
}


@pytest.mark.parametrize(("build", "make", "message"), OF_OPTIMIZERS.values(), ids=OF_OPTIMIZERS)
def test_optimizers_that_cannot_give_s_a_rate_are_left_alone(build, make, message):
    model = build()
    optimizer = make(model)
    before = [(len(group["params"]), group.get("lr")) for group in optimizer.param_groups]
    with pytest.raises(RuntimeError, match=message):
        separate_hardness_group(optimizer, model)
    assert [(len(group["params"]), group.get("lr")) for group in optimizer.param_groups] == before


# What a training says


ROWS = [
    {"features": torch.randn(4, generator=torch.Generator().manual_seed(row)), "labels": row % 2} for row in range(16)
]
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def mlp(layers=2, act="lambda_gelu", by=3.0):
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=layers, hidden_act=act))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(by)
    return model.eval()


def arguments(folder, kind=LambdaGELUTrainingArguments, **options):
    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **options}
    return kind(str(folder), **options)


def trainer(model, folder, callbacks=None, optimizers=(None, None), **options):
    return LambdaGELUTrainer(
        model, arguments(folder, **options), train_dataset=ROWS, callbacks=callbacks, optimizers=optimizers
    )


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return lambda: " ".join(record.getMessage() for record in caplog.records)


def test_one_gate_at_two_places_goes_into_no_adapter():
    model = mlp()
    model.layers[1].activation = model.layers[0].activation
    with pytest.raises(ValueError, match=r"layers\.1\.activation"):
        hardness_modules_to_save(model)


def test_what_is_said_of_an_optimizer_that_does_not_hold_s_is_true(tmp_path, said):
    model = mlp(act="gelu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    replace_activations(model, init_hardness=2.0)
    trainer(model, tmp_path, optimizers=(optimizer, None), num_train_epochs=1).train()
    assert list(hardness_profile(model).values()) == [2.0, 2.0]
    assert "the raw hardness is in no group and stays as it is" in said()


def test_a_training_on_from_half_hardened_gates_says_that_they_do_not_learn(tmp_path, said):
    model = mlp()
    anneal_hardness(model, 0.2)
    trainer(model, tmp_path, num_train_epochs=1, learning_rate=0.5).train()
    assert [round(value, 2) for value in hardness_profile(model).values()] == [32.76, 32.76]
    assert "Hardening has set λ of 2 gates (from 32.76 on), so λ is not learned" in said()


@pytest.mark.parametrize("ready", [release_hardness, lambda model: anneal_hardness(model, 1.0)])
def test_of_gates_that_learn_or_are_hard_nothing_is_said(ready, tmp_path, said):
    model = mlp()
    ready(model)
    trainer(model, tmp_path, num_train_epochs=1).train()
    assert "Hardening has set" not in said()


def test_gates_that_do_not_learn_are_named(tmp_path, said):
    model = mlp()
    model.layers[0].activation.raw_hardness.requires_grad_(False)
    trainer(model, tmp_path, num_train_epochs=1).train()
    assert "λ of 1 of 2 gates does not learn: their raw hardness is frozen (layers.0.activation)" in said()
    assert model.layers[1].activation.hardness.item() != pytest.approx(model.layers[0].activation.hardness.item())


@pytest.mark.parametrize("named", [False, True])
def test_an_adapter_without_its_gates_is_told(tmp_path, said, named):
    peft = pytest.importorskip("peft")
    model = mlp()
    saved = {"modules_to_save": hardness_modules_to_save(model)} if named else {}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linear"], r=2, **saved))
    before = hardness_profile(adapted)
    trainer(adapted, tmp_path, num_train_epochs=1, label_names=["labels"]).train()
    assert ("λ of 2 of 2 gates does not learn" in said()) != named
    assert (hardness_profile(adapted) != before) == named


def llama():
    return networks.llama(hidden_act="lambda_silu")


TOKENS = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 8


def test_a_fused_kernel_in_the_gates_place_is_found_by_the_first_backward_pass(tmp_path):
    model = llama()
    for layer in model.model.layers:  # as liger-kernel binds LigerSwiGLUMLP.forward

        def fused(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

        layer.mlp.forward = fused.__get__(layer.mlp)
    trainer = LambdaGELUTrainer(model, arguments(tmp_path, harden=True, num_train_epochs=8), train_dataset=TOKENS)
    with pytest.raises(RuntimeError, match=r"2 raw hardnesses .*gradient"):
        trainer.train()
    LambdaGELUTrainer(llama(), arguments(tmp_path, harden=True, num_train_epochs=8), train_dataset=TOKENS).train()


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


@pytest.mark.parametrize(("epochs", "soft"), [(3, True), (8, False)])
def test_a_training_that_stops_with_soft_gates_says_so(tmp_path, said, epochs, soft):
    model = mlp()
    callbacks = [HardeningCallback(), StopAfter(epochs)]
    Trainer(
        model, arguments(tmp_path, TrainingArguments, num_train_epochs=8), train_dataset=ROWS, callbacks=callbacks
    ).train()
    assert ("Training has ended with soft gates" in said()) == soft
    assert (min(hardness_profile(model).values()) < 79) == soft


def test_the_soft_gates_are_told_by_their_smallest_hardness(tmp_path, said):
    """Of 3 and 300 the mean would be hard; λ-SiLU at 90 is soft where λ-GELU at 85 is hard."""
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2, hidden_act="gelu"))
    replace_activations(model)
    model.layers[0].activation.hardness_override.fill_(3.0)
    model.layers[1].activation.hardness_override.fill_(300.0)
    assert smallest_soft_hardness(model) == 3.0
    HardeningCallback().on_train_end(None, TrainerState(), None, model)
    assert said().count("Training has ended with soft gates") == 1
    assert "down to λ = 3, less than 50% of its target" in said()
    model.layers[0].activation.hardness_override.fill_(400.0)
    assert smallest_soft_hardness(model) is None
    gates = nn.ModuleList([LambdaGELU(), LambdaSiLU()])
    gates[0].hardness_override.fill_(85.0)  # half of 159.6 is 79.8
    gates[1].hardness_override.fill_(90.0)  # half of 277.3 is 138.6
    assert smallest_soft_hardness(gates) == 90.0


@pytest.mark.parametrize(("hard", "switch_fraction"), [(False, 0.25), (True, 0.25), (True, 0.0)])
def test_a_network_that_is_hard_already_is_said_to_become_soft(tmp_path, said, hard, switch_fraction):
    model = mlp()
    if hard:
        anneal_hardness(model, 1.0)
    trainer(model, tmp_path, harden=True, switch_fraction=switch_fraction, num_train_epochs=8).train()
    assert ("are hardened (λ up to 159.6)" in said()) == hard


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
        with pytest.raises(RuntimeError, match="tensor parallelism"):
            groups()


def test_a_second_hardening_callback_is_refused(tmp_path):
    with pytest.raises(ValueError, match="harden=True and the options of hardening in `args`"):
        trainer(mlp(), tmp_path, [HardeningCallback()])
    run = trainer(mlp(), tmp_path, harden=True, num_train_epochs=8, target_hardness={"layers.0.activation": 20.0})
    run.add_callback(HardeningCallback)
    with pytest.raises(ValueError, match="HardeningCallback of its own"):
        run.train()
    run.pop_callback(HardeningCallback)
    run.pop_callback(HardeningCallback)
    run.train()
    assert list(hardness_profile(run.model).values()) == pytest.approx([20.0, 159.577], rel=1e-5)
