"""Beside another library's trainer: what its loss collects, and checkpoints of its own form."""

from collections import defaultdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import ARGUMENTS, rows, tiny_model, tiny_trainer
from transformers import Trainer

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments
from hf_lgelu.models.surgery import TemporaryRelu

TRAIN, EVALUATION = rows(20), rows(10, seed=1)


class Collecting(Trainer):
    """Averages what its loss saw into the log, as TRL's SFTTrainer does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        self._metrics["train" if model.training else "eval"]["seen"].append(loss.item())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *args, **options):
        seen = self._metrics["train" if self.model.training else "eval"]["seen"]
        super().log({**logs, "seen": sum(seen) / len(seen)} if seen else logs, *args, **options)
        seen.clear()


class Both(LambdaGELUTrainer, Collecting):
    pass


@pytest.mark.parametrize("options", [{}, {"batch_eval_metrics": True}])
def test_what_the_loss_collects_is_of_the_network_as_it_is(options, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        for linear in model.linears:
            linear.weight *= 0.3  # where gate and ReLU differ most
    arguments = LambdaGELUTrainingArguments(str(tmp_path), **{**ARGUMENTS, **options, "per_device_eval_batch_size": 5})
    compute = {"compute_metrics": lambda _, compute_result=False: {}} if options else {}
    trainer = Both(model, arguments, train_dataset=TRAIN, eval_dataset=EVALUATION, **compute)
    found = trainer.evaluate()
    logged = trainer.state.log_history[-1]["seen"]
    x, y = (torch.stack([row[name] for row in EVALUATION]) for name in ("features", "labels"))
    model.eval()
    with torch.no_grad():
        own = torch.nn.functional.cross_entropy(model(x).logits, y).item()
        with TemporaryRelu(model).applied():
            substituted = torch.nn.functional.cross_entropy(model(x).logits, y).item()
    assert abs(own - substituted) > 1e-3
    assert logged == pytest.approx(own, rel=1e-5)
    assert found["eval_relu_loss"] == pytest.approx(substituted, rel=1e-5)


class OwnForm(Trainer):
    """Its checkpoints hold a tensor file of another form, which it reads itself."""

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        torch.save(self.model.state_dict(), f"{output_dir}/own.pt")
        path = f"{output_dir}/model.safetensors"  # a part of the whole, under its own names
        part = {name: tensor for name, tensor in load_file(path).items() if name.startswith("linears.")}
        save_file({name.removeprefix("linears."): tensor for name, tensor in part.items()}, path, {"format": "pt"})

    def _load_own(self, folder):
        self.model.load_state_dict(torch.load(f"{folder}/own.pt", weights_only=True))

    def _load_from_checkpoint(self, checkpoint_path):
        self._load_own(checkpoint_path)

    def _load_best_model(self):
        self._load_own(self.state.best_model_checkpoint)


class WithOwnForm(LambdaGELUTrainer, OwnForm):
    pass


def test_checkpoints_of_another_form_are_read_by_their_own_trainer(tmp_path):
    """Bit for bit the run that was not interrupted; and the best epoch is put back."""
    options = {
        **ARGUMENTS,
        "num_train_epochs": 4,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "harden": True,
        "load_best_model_at_end": True,
        "metric_for_best_model": "relu_loss",
        "learning_rate": 0.3,
    }

    def run(folder, checkpoint=None):
        arguments = LambdaGELUTrainingArguments(str(folder), **options)
        trainer = WithOwnForm(tiny_model(), arguments, train_dataset=TRAIN, eval_dataset=EVALUATION)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run(tmp_path / "run")
    best = torch.load(f"{whole.state.best_model_checkpoint}/own.pt", weights_only=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, best[name])
    first = sorted((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))[1]
    resumed = run(tmp_path / "again", str(first))
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, whole.model.state_dict()[name])


class Named(LambdaGELUTrainer):
    """As sentence-transformers' with several data sets: a batch begins with the name of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        given = {name: value for name, value in inputs.items() if name != "dataset_name"}
        return super().compute_loss(model, given, return_outputs, **options)


def test_a_batch_that_begins_with_text_is_evaluated(tmp_path):
    def collate(samples):
        return {"dataset_name": "nli", **{name: torch.stack([row[name] for row in samples]) for name in samples[0]}}

    arguments = LambdaGELUTrainingArguments(str(tmp_path), **{**ARGUMENTS, "remove_unused_columns": False})
    named = Named(tiny_model(), arguments, eval_dataset=EVALUATION, data_collator=collate).evaluate()
    plain = tiny_trainer(tmp_path, tiny_model(), eval_dataset=EVALUATION).evaluate()
    assert {name: named[name] for name in ("eval_loss", "eval_relu_loss")} == pytest.approx(
        {name: plain[name] for name in ("eval_loss", "eval_relu_loss")}
    )
