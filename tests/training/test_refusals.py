"""What training refuses before it begins, one row a refusal: the call, the error, and the noun that the error names."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from tiny_training import Fused, Layerwise, lambda_gelus, tiny_model, tiny_trainer
from torch import nn
from transformers import Adafactor, TrainingArguments

import hf_lgelu
from hf_lgelu import (
    HardeningCallback,
    HardeningConfig,
    LambdaGELU,
    LambdaGELUTrainer,
    anneal_hardness,
    hardness_parameter_groups,
)
from hf_lgelu.models.hardening import hardening_progress, is_hardened, release_hardness
from hf_lgelu.models.optimizer_groups import separate_hardness_group
from hf_lgelu.versions import MATRIX_OPTIMIZERS

NO_GATE = (ValueError, "TinyClassifier has no λ-GELU activation")

# {option of HardeningConfig: (values that are refused, what the error names)}; arguments of training have the same
OF_HARDENING = {
    "hardening_strategy": (["batch"], "unknown hardening_strategy 'batch'; accepted: epoch, steps"),
    "hardening_schedule": (["steep"], "unknown schedule 'steep'; accepted: linear, geometric, inverse, cosine"),
    "switch_fraction": ([1.0, -0.01, 1.5, float("nan")], r"switch_fraction must lie in \[0, 1\)"),
    "target_hardness": ([1.0, -3.0, float("inf"), 1e39], "target_hardness must be a finite number > 1 within float32"),
    "tolerance": ([0.0], "tolerance must lie in"),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [(name, value, message) for name, (values, message) in OF_HARDENING.items() for value in values],
)
def test_options_of_hardening(tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        HardeningConfig(**{name: value})
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, harden=True, **{name: value})


IDLE = "would do nothing, since harden is off: give harden=True"
OF_ARGUMENTS = [
    ({"harden": True, "target_hardness": 100.0, "tolerance": 0.005}, "give target_hardness or tolerance, not both"),
    ({"target_hardness": 50.0}, f"target_hardness {IDLE}"),
    ({"hardening_schedule": "cosine", "switch_fraction": 0.5}, f"switch_fraction, hardening_schedule {IDLE}"),
    ({"hardness_lr_multiplier": -1.0}, "hardness_lr_multiplier must be a finite number >= 0, got -1"),
]


@pytest.mark.parametrize(("options", "message"), OF_ARGUMENTS)
def test_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, **options)


def test_arguments_of_another_class(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match="args must be LambdaGELUTrainingArguments, got TrainingArguments"):
        LambdaGELUTrainer(tiny_model(), args)


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
    with pytest.raises(ValueError, match="DeepSpeed: its engine makes the optimizer step inside backward"):
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
    with pytest.raises(NO_GATE[0], match=NO_GATE[1] + ", nor another λ-gate; it has GELUActivation × 2"):
        call(tiny_model("gelu"))


RATE = "must be a finite number >= 0"
OF_NUMBERS = [
    *(
        (lambda model, end=end: anneal_hardness(model, 0.5, target_hardness=end), "target_hardness must be a finite")
        for end in (1, 0.5, float("nan"), torch.tensor([2.0, 1.0]))
    ),
    (lambda model: is_hardened(model, 0.5), "target_hardness must be a finite"),
    (lambda model: is_hardened(model, fraction=0), r"fraction must be a number in \(0, 1\]"),
    (lambda model: is_hardened(model, fraction=1.5), r"fraction must be a number in \(0, 1\]"),
    *(
        (lambda model, progress=progress: anneal_hardness(model, progress), r"progress must lie in \[0, 1\], got")
        for progress in (-1e-9, 1 + 1e-9, float("nan"))
    ),
    (lambda model: anneal_hardness(model, 0.5, schedule="steep"), "unknown schedule 'steep'; accepted: linear"),
    *(
        (lambda model, at=at: hardening_progress(*at), f"got position={at[0]} and total={at[1]}")
        for at in ((0, 5), (-1, 5), (6, 5), (1, 0))
    ),
    (lambda model: hardening_progress(1, 10, 1), r"switch_fraction must lie in \[0, 1\), got"),
    *(
        (lambda model, rate=rate: hardness_parameter_groups(model, rate), f"learning_rate {RATE}")
        for rate in (-1e-3, float("nan"))
    ),
    (lambda model: hardness_parameter_groups(model, 0.1, float("inf")), f"hardness_lr_multiplier {RATE}"),
    (lambda model: hardness_parameter_groups(model, 0.1, weight_decay=-0.1), f"weight_decay {RATE}"),
    *(
        (lambda model, c=c: separate_hardness_group(sgd(model), model, c), f"hardness_lr_multiplier {RATE}")
        for c in (-1, float("nan"))
    ),
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


def of_one_matrix():
    return nn.Sequential(nn.Linear(4, 4, bias=False), LambdaGELU(raw_shape=(4, 1)))


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
    "scheduled": (tiny_model, scheduled, "SGD has a scheduler already"),
    "separated": (tiny_model, separated, "has a hardness group already"),
    "grouped": (
        tiny_model,
        lambda model: torch.optim.SGD(hardness_parameter_groups(model, 0.1)),
        "has a hardness group already",
    ),
    "layerwise": (tiny_model, lambda model: Layerwise(model.parameters()), "Layerwise replaces the parameter groups"),
    "fused": (tiny_model, lambda model: Fused(model.parameters()), "Fused replaces the parameter groups or ignores"),
    "L-BFGS": (tiny_model, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS takes one group alone"),
    **{
        muon.__name__: (of_one_matrix, lambda model, muon=muon: muon(model.parameters()), "Muon takes matrices alone")
        for muon in MATRIX_OPTIMIZERS
    },
    "without one s": (tiny_model, without_one, "SGD replaces the parameter groups"),
    "relative steps": (tiny_model, of_relative_steps, "Adafactor has no learning rate to multiply"),
    "flat": (Flattened, sgd, r"FSDP1 has flattened the raw hardness.*fsdp_version: 2"),
}


@pytest.mark.parametrize(("build", "make", "message"), OF_OPTIMIZERS.values(), ids=OF_OPTIMIZERS)
def test_optimizers_that_cannot_give_s_a_rate_are_left_alone(build, make, message):
    model = build()
    optimizer = make(model)
    before = [(len(group["params"]), group.get("lr")) for group in optimizer.param_groups]
    with pytest.raises(RuntimeError, match=message):
        separate_hardness_group(optimizer, model)
    assert [(len(group["params"]), group.get("lr")) for group in optimizer.param_groups] == before
