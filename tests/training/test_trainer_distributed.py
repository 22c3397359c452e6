"""Two processes with gloo: DistributedDataParallel, AdamW, accumulation, gradient checkpointing, hardening.

One launch for everything, in distributed_run.py, which asserts that there really are two processes.
"""

import json
from pathlib import Path

import distributed_run
import pytest
from closed_forms import hardened, hardness, progress_at, target
from distributed_run import EPOCHS, RUNS, SWITCH, UPDATES
from two_processes import run_in_two_processes

from hf_lgelu import LambdaGELUTrainer, LambdaGELUTrainingArguments

TARGET = float(target())


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """(folder, report) of a run in two processes."""
    folder = tmp_path_factory.mktemp("distributed")
    run_in_two_processes(Path(__file__).parent / "distributed_run.py", folder)
    return folder, json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_hardening_in_two_processes_is_algorithm_1(launched, name):
    _, report = launched
    path, raw = report[name]["hardness"], report[name]["raw"]
    steps = EPOCHS * UPDATES
    assert len(path) == steps
    start = [float(hardness(value, 0.1)) for value in raw]
    for step, values in enumerate(path, start=1):
        if name == "step":
            progress = progress_at(step, steps, steps // 4)
        else:
            progress = progress_at((step - 1) // UPDATES + 1, EPOCHS, SWITCH)
        if progress is not None:
            assert values == pytest.approx([hardened("linear", value, TARGET, progress) for value in start], rel=1e-6)
    assert path[-1] == pytest.approx([TARGET] * 2, rel=1e-7)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize("name", RUNS)
def test_evaluation_of_an_uneven_set_is_that_of_one_process(launched, tmp_path, name):
    """7 samples in batches of 2 on 2 processes: the last round is filled up with a sample that must not count."""
    folder, report = launched
    model = type(distributed_run.model()).from_pretrained(folder / name / f"checkpoint-{EPOCHS * UPDATES}")
    args = LambdaGELUTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, per_device_eval_batch_size=2
    )
    trainer = LambdaGELUTrainer(
        model, args, eval_dataset=distributed_run.samples(7, 1), compute_metrics=distributed_run.accuracy
    )
    assert trainer.accelerator.num_processes == 1
    alone, together = distributed_run.evaluate(trainer), report[name]["metrics"]
    for prefix in ("eval", "soft_eval"):
        for metric in ("accuracy", "relu_accuracy"):
            assert together[f"{prefix}_{metric}"] == pytest.approx(alone[f"{prefix}_{metric}"], rel=1e-6)
        live = f"{prefix}_relu_live_units"  # in which the sample that fills up counts
        assert together[live] == pytest.approx(alone[live], abs=0.1)


def test_a_plain_accelerate_loop_hardens_in_two_processes(launched):
    _, report = launched
    assert report["accelerate"] == pytest.approx([TARGET] * 2, rel=1e-7)
