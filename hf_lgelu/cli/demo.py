"""`hf-lgelu demo`: train a GELU network on small pictures of digits, and convert it to ReLU without training.

digits.npz holds the 1,797 pictures (8 × 8, from 0 to 16) and classes of "Optical Recognition of Handwritten Digits", by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0.
"""

import csv
import shlex
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu.cli.arguments import DemoArguments
from hf_lgelu.cli.command import main, say
from hf_lgelu.files import whole_folder
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

_LAYERS, _UNITS, _EPOCHS = 8, 64, 20


def demo(arguments: DemoArguments) -> None:
    """Train a network, save it with its rows and with other rows, and convert it by `hf-lgelu convert`."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        features, labels = torch.from_numpy(file["images"]).flatten(1) / 16, torch.from_numpy(file["labels"]).long()
    is_test = torch.arange(len(labels)) % 4 == 0
    folder = arguments.output_dir
    with whole_folder(folder) as new:
        say(f"Training a network of {_LAYERS} GELU layers on {len(labels) - is_test.sum():,} pictures of digits ...")
        _trained(features[~is_test], labels[~is_test]).save_pretrained(new / "gelu")
        for name, chosen in {"rows.csv": ~is_test, "test.csv": is_test}.items():
            with (new / name).open("w", newline="", encoding="utf-8") as table:
                writer = csv.writer(table)
                writer.writerow([*(f"pixel{number}" for number in range(features.shape[1])), "label"])
                rows = zip(features[chosen].tolist(), labels[chosen].tolist(), strict=True)
                writer.writerows([*row, label] for row, label in rows)
    data = f"--data {folder}/rows.csv"
    words = ["convert", f"{folder}/gelu", "--data", f"{folder}/rows.csv", "--evaluation", f"{folder}/test.csv"]
    words += ["--output_dir", f"{folder}/relu"]
    say(f"hf-lgelu {shlex.join(words)}")
    if main(words):
        raise RuntimeError(f"the conversion of {folder}/gelu failed")
    say(
        f"""
Try next:
  hf-lgelu convert {folder}/gelu {data} --effort distill --output_dir {folder}/nearer
  hf-lgelu compare {folder}/gelu {folder}/relu --data {folder}/test.csv
  hf-lgelu export {folder}/relu --to int8 --data {folder}/test.csv --original {folder}/gelu --output_dir {folder}/int8
  hf-lgelu convert YOUR_MODEL --data YOUR_TEXTS_IMAGES_OR_ROWS --output_dir FOLDER"""
    )


def _trained(features: Tensor, labels: Tensor) -> MLPForClassification:
    """A GELU network, in eval mode; torch's global random numbers stay as they were."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        network = MLPForClassification(
            MLPConfig(num_features=64, hidden_size=_UNITS, num_hidden_layers=_LAYERS, num_labels=10, hidden_act="gelu")
        )
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
        for _ in range(_EPOCHS):
            for batch in torch.randperm(len(labels)).split(64):
                loss = nn.functional.cross_entropy(network(features[batch]).logits, labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return network.eval()
