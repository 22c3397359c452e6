"""What an evaluation of λ-GELU's trainer reads of the data, and what callbacks see of it."""

from plain_evaluation import SAMPLES, accuracy
from tiny_training import tiny_trainer
from torch.utils.data import Dataset
from transformers import TrainerCallback


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
