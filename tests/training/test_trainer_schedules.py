"""The multiplier through warm-up and decay: every learning-rate schedule that Trainer offers."""

import pytest
from tiny_training import lambda_gelus, rows, tiny_model, tiny_trainer
from transformers import TrainerCallback
from transformers.trainer_utils import SchedulerType

SCHEDULER_OPTIONS = {
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3, "warmup_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 8},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    # "max" of a falling loss is never better, so the rate falls at every second evaluation.
    "reduce_lr_on_plateau": {"mode": "max", "factor": 0.5, "patience": 0},
}
# The others multiply each group's rate too.
QUICK = ("linear", "cosine_with_restarts", "reduce_lr_on_plateau")
KEEPS_RATIO = [
    pytest.param(scheduler.value, marks=() if scheduler.value in QUICK else pytest.mark.slow)
    for scheduler in SchedulerType
    if scheduler.value != "greedy"
]


class Rates(TrainerCallback):
    """The learning rates with which each step is made."""

    def __init__(self, model):
        self.steps = []
        self.hardness = {id(module.raw_hardness) for module in lambda_gelus(model)}

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        rates = {True: set(), False: set()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                rates[id(parameter) in self.hardness].add(float(group["lr"]))
        self.steps.append((rates[False], rates[True]))


@pytest.mark.parametrize("scheduler", KEEPS_RATIO)
def test_ratio_holds_through_every_schedule(tmp_path, scheduler):
    model = tiny_model()
    rates = Rates(model)
    trainer = tiny_trainer(
        tmp_path,
        model,
        lr_scheduler_type=scheduler,
        lr_scheduler_kwargs=SCHEDULER_OPTIONS.get(scheduler),
        learning_rate=0.02,
        warmup_steps=5,
        num_train_epochs=7,
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="epoch",
        eval_dataset=rows(4, seed=1),
        metric_for_best_model="loss",
        callbacks=[rates],
    )
    trainer.train()
    assert len(rates.steps) == 21
    used = []
    for weights, hardness in rates.steps:
        (weight_rate,), (hardness_rate,) = weights, hardness
        assert hardness_rate == pytest.approx(9 * weight_rate, rel=1e-14, abs=0)
        used.append(weight_rate)
    assert max(used) <= 0.02
    assert len(set(used)) > 1 or scheduler == "constant"
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in logged] == used
    assert [entry["hardness_learning_rate"] for entry in logged] == [min(hardness) for _, hardness in rates.steps]


@pytest.mark.skipif("GREEDY" not in SchedulerType.__members__, reason="this transformers has no such schedule")
def test_greedy_is_refused_where_there_is_a_ratio_to_lose(tmp_path):
    options = {"lr_scheduler_type": "greedy", "eval_strategy": "epoch", "eval_dataset": rows(4)}
    with pytest.raises(ValueError, match="lr_scheduler_type 'greedy'"):
        tiny_trainer(tmp_path, **options)
    tiny_trainer(tmp_path, tiny_model("gelu"), require_lambda_gelu=False, **options).train()
