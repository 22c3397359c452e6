"""What λ-GELU's trainer does on top of the training: synchronizations, data and surgery."""

import pytest
import torch
from plain_evaluation import SAMPLES, accuracy
from tiny_training import tiny_model, tiny_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from transformers import TrainerCallback

# 4 epochs. e_s = 1: λ is learned in the first, and hardens in the others.
HARDENING = {"learning": {}, "epoch": {"harden": True}, "step": {"harden": True, "hardening_strategy": "steps"}}


class Synchronizations(TorchDispatchMode):
    """Counts what makes the host wait for a device: a number read off a tensor, and a tensor turned into a list."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.numbers = self.lists = 0
        of_torch = torch.Tensor.tolist

        def tolist(tensor):
            self.lists += 1
            return of_torch(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.numbers += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def synchronizations(folder, monkeypatch, plain=False, **options):
    model = tiny_model("gelu" if plain else "lambda_gelu")
    trainer = tiny_trainer(folder, model, plain=plain, num_train_epochs=4, **options)
    with monkeypatch.context() as patch, Synchronizations(patch) as counted:
        trainer.train()
    assert trainer.state.global_step == 12
    return counted


@pytest.mark.parametrize(("hardening", "every"), [("learning", 4), ("epoch", 4), ("step", None)])
def test_the_device_is_waited_for_once_a_log_and_once_an_epoch_of_hardening(tmp_path, monkeypatch, hardening, every):
    log = {"logging_strategy": "steps", "logging_steps": every} if every else {}
    plain = synchronizations(tmp_path, monkeypatch, plain=True, **log)
    ours = synchronizations(tmp_path, monkeypatch, **log, **HARDENING[hardening])
    assert ours.numbers - plain.numbers == 1  # λ is looked at before the first step
    assert plain.numbers > 0
    at_the_end = 2 if HARDENING[hardening] else 0  # whether every λ is hard
    epochs = 4 if HARDENING[hardening] else 0  # the history has λ of each epoch
    assert ours.lists - plain.lists == (12 // every if every else 0) + epochs + at_the_end


# Evaluation


class Counted(Dataset):
    """Counts the samples that it hands out."""

    def __init__(self, samples):
        self.samples, self.handed_out = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.handed_out += 1
        return self.samples[index]


class Steps(TrainerCallback):
    """Counts the batches of evaluations, as a progress bar does."""

    count = 0

    def on_prediction_step(self, args, state, control, **others):
        self.count += 1


def test_an_evaluation_reads_the_data_twice_and_callbacks_see_one_loop(tmp_path):
    data, steps = Counted(SAMPLES), Steps()
    trainer = tiny_trainer(tmp_path, eval_dataset=data, compute_metrics=accuracy, callbacks=[steps])
    assert "eval_relu_accuracy" in trainer.evaluate()
    assert data.handed_out == 2 * len(SAMPLES) == 22
    assert steps.count == 3  # of 4, 4 and 3 samples
