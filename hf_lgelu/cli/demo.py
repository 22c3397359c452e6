"""`hf-lgelu demo`: train a GELU network on small pictures of digits, and convert it to ReLU without training.

digits.npz holds the 1,797 pictures (8 × 8, from 0 to 16) and classes of "Optical Recognition of Handwritten Digits", by
E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0.
"""

import copy
import csv
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging

from hf_lgelu.cli.arguments import DemoArguments
from hf_lgelu.cli.command import say
from hf_lgelu.export.card import Provenance, render_conversion_card, save_card
from hf_lgelu.export.checkpoint_facts import facts_of_folder
from hf_lgelu.files import whole_folder
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.surgery import put_relu
from hf_lgelu.networks.sites import SMOOTH_KINDS
from hf_lgelu.refit.convert import convert_to_relu

_LAYERS, _UNITS, _EPOCHS = 8, 64, 20


def demo(arguments: DemoArguments) -> None:
    """Train, convert, save and reload. Print each network's accuracy on other pictures."""
    logging.disable_progress_bar()  # two small files
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        features, labels = torch.from_numpy(file["images"]).flatten(1) / 16, torch.from_numpy(file["labels"]).long()
    is_test = torch.arange(len(labels)) % 4 == 0
    rows, seen = (features[~is_test], labels[~is_test]), (features[is_test], labels[is_test])

    def accuracy(network: Callable[[Tensor], Tensor]) -> float:
        with torch.no_grad():
            return (network(seen[0]).argmax(-1) == seen[1]).double().mean().item()

    with whole_folder(arguments.output_dir, overwrite=arguments.overwrite) as new:
        say(f"Training a network of {_LAYERS} GELU layers on {len(rows[1]):,} pictures of digits ...")
        begun = time.perf_counter()
        original = _trained(*rows)
        swapped = copy.deepcopy(original)
        put_relu(swapped, kinds=SMOOTH_KINDS, rewrite_config=False)
        took = time.perf_counter() - begun
        say(f"That took {took:.0f} s. Converting it to ReLU without training, on the same pictures, unlabelled ...")
        converted, report = convert_to_relu(original, {"features": rows[0]})
        converted.save_pretrained(new)
        original.save_pretrained(new / "original")
        provenance = Provenance("original", "the pictures in rows.csv", len(rows[1]))
        save_card(render_conversion_card(report, provenance, facts_of_folder(new)), new)
        for name, (inputs, classes) in {"rows.csv": rows, "test.csv": seen}.items():
            with (new / name).open("w", newline="", encoding="utf-8") as table:
                writer = csv.writer(table)
                writer.writerow([*(f"pixel{number}" for number in range(inputs.shape[1])), "label"])
                writer.writerows([*row, label] for row, label in zip(inputs.tolist(), classes.tolist(), strict=True))
        networks: dict[str, Callable[[Tensor], Tensor]] = {
            "the GELU network": lambda inputs: original(inputs).logits,
            "ReLU swapped in, not converted": lambda inputs: swapped(inputs).logits,
            "converted to ReLU": lambda inputs: converted(inputs).logits,
            "the same, saved and reloaded by plain torch": _in_plain_torch(new),
        }
        if all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
            networks["the same in int8, by onnxruntime"] = _in_int8(converted, rows[0], new)
        say(f"\n{'':44}  accuracy on {len(seen[1])} other pictures")
        for title, network in networks.items():
            say(f"{title:44}  {accuracy(network):.3f}")
    folder, held_out = arguments.output_dir, report.held_out
    if held_out is not None:
        swap, refit = held_out.direct.in_words, held_out.refitted.in_words
        say(
            f"\nDistance to the GELU network, on {held_out.samples} pictures of rows.csv that the conversion held out: "
            f"{swap} with ReLU swapped in, {refit} converted. `hf-lgelu compare` below measures it on test.csv."
        )
    files = ". float32.onnx and int8.onnx are for onnxruntime" if "the same in int8, by onnxruntime" in networks else ""
    say(f"Saved in {folder}, with the model card README.md. The GELU network is in {folder}/original{files}.")
    say(
        f"""
Try next:
  hf-lgelu convert {folder}/original --data {folder}/rows.csv --effort distill --output_dir {folder}-nearer
  hf-lgelu compare {folder}/original {folder} --data {folder}/test.csv
  hf-lgelu export {folder} --to int8 --data {folder}/rows.csv --original {folder}/original --output_dir {folder}-int8
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


def _in_plain_torch(folder: Path) -> nn.Sequential:
    """The saved network as linear layers of torch with ReLU between them, without transformers and this package."""
    weights = load_file(folder / "model.safetensors")
    modules: list[nn.Module] = []
    for name in [*(f"layers.{number}.linear" for number in range(_LAYERS)), "classifier"]:
        linear = nn.Linear(*weights[f"{name}.weight"].T.shape)
        linear.load_state_dict({part: weights[f"{name}.{part}"] for part in ("weight", "bias")})
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def _in_int8(network: nn.Module, features: Tensor, folder: Path) -> Callable[[Tensor], Tensor]:
    """The network as an int8 ONNX file in the folder, run by onnxruntime."""
    from hf_lgelu.export.onnx_export import export_onnx
    from hf_lgelu.export.onnx_run import OnnxModel
    from hf_lgelu.export.quantize import quantize_onnx

    export_onnx(network, folder / "float32.onnx", features[:8])
    quantize_onnx(folder / "float32.onnx", folder / "int8.onnx", features[:64])
    session = OnnxModel(folder / "int8.onnx")
    return lambda inputs: torch.from_numpy(session({session.input_names[0]: inputs.numpy()})[0])
