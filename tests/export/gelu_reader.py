"""Run as a program without hf_lgelu: load every GELU model in a folder with an Auto class and write what it computes.

Usage: gelu_reader.py FOLDER. Each subfolder holds inputs.pt ({"auto": class name, "inputs": keyword arguments}) and a
checkpoint. Writes FOLDER/logits.pt: {"modules": those of hf_lgelu, "logits": {name: tensor}}.
"""

import sys
from pathlib import Path

import torch
import transformers


@torch.no_grad()
def main(root: Path) -> None:
    torch.set_num_threads(1)
    logits = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        example = torch.load(folder / "inputs.pt")
        model = getattr(transformers, example["auto"]).from_pretrained(folder).eval()
        logits[folder.name] = model(**example["inputs"]).logits
    modules = [name for name in sys.modules if name.partition(".")[0] == "hf_lgelu"]
    torch.save({"modules": modules, "logits": logits}, root / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
