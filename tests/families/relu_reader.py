"""Run as a program without hf_lgelu: load every ReLU model in a folder and write what it computes.

Usage: relu_reader.py FOLDER. Each subfolder holds inputs.pt and either a transformers checkpoint or, for a
row of TIMM_FAMILIES, model.safetensors. FOLDER/soft may hold checkpoints with λ-GELU, which cannot be loaded here.
Writes FOLDER/logits.pt: {"modules": ..., "logits": {name: tensor}, "refusals": {name: text}}.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from family import logits_of
from safetensors.torch import load_file
from timm_families import TIMM_FAMILIES, TimmFamily
from torch import nn


def _read_transformers(folder: Path) -> nn.Module:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder)


def _read_timm(folder: Path, family: TimmFamily) -> nn.Module:
    if family.accepts == "nothing":
        model = family.build()
        _put_relu(model)
    else:
        model = family.build("relu" if family.accepts == "string" else nn.ReLU)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    return model


def _put_relu(module: nn.Module) -> None:
    for name, child in module.named_children():
        if "GELU" in type(child).__name__:
            setattr(module, name, nn.ReLU())
        _put_relu(child)


def _refusal(folder: Path) -> str:
    try:
        _read_transformers(folder)
    except (KeyError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def main(root: Path) -> None:
    torch.set_num_threads(1)
    timm_families = {family.name: family for family in TIMM_FAMILIES}
    logits = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name != "soft"):
        family = timm_families.get(folder.name)
        model = _read_transformers(folder) if family is None else _read_timm(folder, family)
        logits[folder.name] = logits_of(model, torch.load(folder / "inputs.pt"))
    modules = [name for name in sys.modules if name.partition(".")[0] == "hf_lgelu"]
    refusals = {folder.name: _refusal(folder) for folder in (root / "soft").glob("*")}
    torch.save({"modules": modules, "logits": logits, "refusals": refusals}, root / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
