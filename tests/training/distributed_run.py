"""What each of two processes runs for test_distributed.py: `torchrun --nproc_per_node 2 distributed_run.py FOLDER`.

It checks what only the processes themselves can see, and leaves the rest in FOLDER/report.json.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tiny_training import hardness_values, lambda_gelus, raw_values
from torch import distributed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback

from hf_lgelu import (
    LambdaGELUTrainer,
    LambdaGELUTrainingArguments,
    anneal_hardness,
    freeze_hardness,
    hardness_parameter_groups,
)
from hf_lgelu.models.hardening import hardening_progress, release_hardness

EPOCHS, SWITCH, UPDATES = 4, 1, 3  # 20 samples, 2 per process: 5 batches an epoch, in updates of 2, 2 and 1
RUNS = {
    "epoch": {"gradient_checkpointing": True},
    "step": {"gradient_checkpointing_kwargs": {"use_reentrant": True}, "hardening_strategy": "steps"},
}
RESUMED = "epoch"  # what a step hardens by is in its number, and the other run has nothing more to keep


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(hidden_act="lambda_gelu", vocab_size=11, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (count, 6), generator=generator)
    return [{"input_ids": row, "labels": row[0] % 3} for row in tokens]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def assert_ranks_identical(network: torch.nn.Module) -> None:
    """Parameters and buffers, bit for bit."""
    values = torch.cat([tensor.double().flatten() for tensor in network.state_dict().values()])
    others = [torch.empty_like(values) for _ in range(2)]
    distributed.all_gather(others, values)
    assert torch.equal(*others)


class Watch(TrainerCallback):
    """s and λ after each update, and whether the ranks agree."""

    def __init__(self) -> None:
        self.raw: list[list[float]] = []
        self.hardness: list[list[float]] = []

    def on_step_end(self, args, state, control, model, **kwargs) -> None:
        self.raw.append(raw_values(model))
        self.hardness.append(hardness_values(model))
        assert_ranks_identical(model)


def trainer_for(folder: Path, **options) -> LambdaGELUTrainer:
    args = LambdaGELUTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.02,
        weight_decay=0.01,
        num_train_epochs=EPOCHS,
        harden=True,
        **options,
    )
    return LambdaGELUTrainer(
        model(), args, train_dataset=samples(20, 0), eval_dataset=samples(7, 1), compute_metrics=accuracy
    )


def train(folder: Path, **options) -> dict:
    trainer, watch = trainer_for(folder, save_strategy="steps", save_steps=2 * UPDATES, **options), Watch()
    trainer.add_callback(watch)
    before = raw_values(trainer.model)
    trainer.train()
    assert trainer.args.world_size == distributed.get_world_size() == 2
    assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
    learned, frozen = watch.raw[: SWITCH * UPDATES], watch.raw[SWITCH * UPDATES :]
    assert before != learned[0] != learned[-1]
    assert len(frozen) == (EPOCHS - SWITCH) * UPDATES
    assert frozen == [learned[-1]] * len(frozen)
    if folder.name == RESUMED:
        resumed = trainer_for(folder / "resumed", save_strategy="no", **options)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{2 * UPDATES}"))
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    return {"hardness": watch.hardness, "raw": watch.raw[-1], "metrics": evaluate(trainer)}


def evaluate(trainer: LambdaGELUTrainer) -> dict[str, float]:
    """Of the hardened network, and of the soft one that it came from, where a swap matters."""
    hardened = trainer.evaluate()
    release_hardness(trainer.model)
    return {**hardened, **{f"soft_{name}": value for name, value in trainer.evaluate().items()}}


def accelerate_loop() -> list[float]:
    """Without a trainer; DDP waits for every gradient, and s must go on having one."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    network = model()
    optimizer = torch.optim.AdamW(hardness_parameter_groups(network, 0.02))
    prepared, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(samples(16, 0), batch_size=2))
    assert isinstance(prepared, torch.nn.parallel.DistributedDataParallel)
    assert not prepared.find_unused_parameters
    raw = []
    for epoch in range(1, EPOCHS + 1):
        progress = hardening_progress(epoch, EPOCHS)
        if progress is not None:
            anneal_hardness(accelerator.unwrap_model(prepared), progress)
        for inputs in loader:
            accelerator.backward(prepared(**inputs).loss)
            if progress is not None:
                assert all(module.raw_hardness.grad == 0 for module in lambda_gelus(network))
                freeze_hardness(accelerator.unwrap_model(prepared))
            optimizer.step()
            optimizer.zero_grad()
            assert_ranks_identical(network)
        raw.append(raw_values(network))
    assert raw[0] != raw_values(model())
    assert raw == [raw[0]] * EPOCHS
    return hardness_values(network)


def main() -> None:
    """Run everything; any failed check ends the process with an error."""
    torch.set_num_threads(1)
    # Older Trainers resume several processes on a CPU from "cpu:0", a place that torch does not know.
    torch.serialization.register_package(0, lambda _: None, lambda tensor, place: tensor if place == "cpu:0" else None)
    folder = Path(sys.argv[1])
    report = {name: train(folder / name, **options) for name, options in RUNS.items()}
    report["accelerate"] = accelerate_loop()
    if distributed.get_rank() == 0:
        (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
