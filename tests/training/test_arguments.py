"""Arguments of the training: from the command line, their defaults, and what is refused of them."""

import dataclasses

import pytest
from hardening_runs import check_path, epochs
from tiny_training import rows, tiny_model, tiny_trainer, watched
from transformers import HfArgumentParser, TrainingArguments

from hf_lgelu import HardeningCallback, HardeningConfig, LambdaGELUTrainer, LambdaGELUTrainingArguments

OURS = [
    field
    for field in dataclasses.fields(LambdaGELUTrainingArguments)
    if field.name in LambdaGELUTrainingArguments.__annotations__
]


def test_arguments_from_the_command_line(tmp_path):
    given = (
        f"--output_dir {tmp_path} --use_cpu --hardness_lr_multiplier 3 --harden --tolerance 0.01 --switch_fraction 0.5 "
        "--hardening_schedule geometric --hardening_strategy steps --log_hardness false --report_substitution false "
        "--require_lambda_gelu false"
    )
    (args,) = HfArgumentParser(LambdaGELUTrainingArguments).parse_args_into_dataclasses(given.split())
    trainer = LambdaGELUTrainer(tiny_model(), args, train_dataset=rows(6))
    (callback,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, HardeningCallback)]
    assert callback.config == args.hardening_config() == HardeningConfig(None, 0.01, 0.5, "geometric", "steps")
    assert callback.config.targets["lambda_gelu"] == pytest.approx(79.788, abs=5e-4)
    assert (args.hardness_lr_multiplier, args.harden) == (3.0, True)
    assert not any((args.log_hardness, args.report_substitution, args.require_lambda_gelu))
    assert all(field.metadata["help"] for field in OURS)


def test_default_arguments_are_the_papers():
    args = LambdaGELUTrainingArguments()
    assert args.hardness_lr_multiplier == 9
    assert not args.harden
    assert (args.switch_fraction, args.hardening_schedule, args.hardening_strategy) == (0.25, "linear", "epoch")
    assert args.hardening_config() == HardeningCallback().config == HardeningConfig()
    assert HardeningConfig().targets["lambda_gelu"] == pytest.approx(159.577, abs=5e-4)


def test_arguments_that_change_later_reach_the_callback_too(tmp_path):
    trainer = tiny_trainer(tmp_path, harden=True, num_train_epochs=4)
    trainer.args.switch_fraction = 0.5
    with watched(trainer.model) as seen:
        trainer.train()
    check_path(trainer.model, seen, epochs(4, 3), 4, switch=2)
    trainer.args.harden = False
    with pytest.raises(ValueError, match=r"switch_fraction .*harden"):
        trainer.train()
    trainer.args.switch_fraction = 0.25  # its default
    trainer.train()
    assert not any(isinstance(callback, HardeningCallback) for callback in trainer.callback_handler.callbacks)


def test_without_arguments_there_are_defaults_as_in_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = LambdaGELUTrainer(tiny_model(), train_dataset=rows(4))
    assert type(trainer.args) is LambdaGELUTrainingArguments
    assert (trainer.args.output_dir, trainer.args.hardness_lr_multiplier) == ("tmp_trainer", 9.0)


# {option of HardeningConfig: (values that are refused, what the error names)}; arguments of training have the same
OF_HARDENING = {
    "hardening_strategy": (["batch"], "'batch'; accepted: epoch, steps"),
    "hardening_schedule": (["steep"], "'steep'; accepted: linear, geometric"),
    "switch_fraction": ([1.0, -0.01, 1.5, float("nan")], r"switch_fraction .*\[0, 1\)"),
    "target_hardness": ([1.0, -3.0, float("inf"), 1e39], "target_hardness .*> 1"),
    "tolerance": ([0.0], "tolerance"),
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


IDLE = ".*harden=True"


OF_ARGUMENTS = [
    ({"harden": True, "target_hardness": 100.0, "tolerance": 0.005}, "target_hardness or tolerance"),
    ({"target_hardness": 50.0}, f"target_hardness{IDLE}"),
    ({"hardening_schedule": "geometric", "switch_fraction": 0.5}, f"switch_fraction, hardening_schedule{IDLE}"),
    ({"hardness_lr_multiplier": -1.0}, "hardness_lr_multiplier .*>= 0, got -1"),
]


@pytest.mark.parametrize(("options", "message"), OF_ARGUMENTS)
def test_arguments(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, **options)


def test_arguments_of_another_class(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match="LambdaGELUTrainingArguments, got TrainingArguments"):
        LambdaGELUTrainer(tiny_model(), args)
