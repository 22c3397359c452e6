"""Run as a program without hf_lgelu: load every export in a folder and write what it computes.

Usage: elsewhere_reader.py FOLDER. Each subfolder holds a checkpoint and inputs.pt: {"inputs": keyword arguments} with
either "auto", the name of an Auto class (and "text" for its tokenizer), or "code", Python that makes `model`.
Writes FOLDER/read.pt: {subfolder: {"model": outputs, "tokens": of the text}}.
"""

import os
import sys
from pathlib import Path

import torch

sys.modules["hf_lgelu"] = None  # an import fails as if it were not there

import transformers  # noqa: E402


def read(folder: Path) -> dict:
    example = torch.load(folder / "inputs.pt", weights_only=True)
    if "auto" in example:
        model = getattr(transformers, example["auto"]).from_pretrained(folder).eval()
        found = {"model": model(**example["inputs"]).logits}
        if "text" in example:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            found["tokens"] = tokenizer(example["text"])["input_ids"]
        return found
    os.chdir(folder)
    names = {}
    exec(example["code"], names)
    return {"model": names["model"](*example["inputs"].values())}


@torch.no_grad()
def main(root: Path) -> None:
    torch.set_num_threads(1)
    found = {folder.name: read(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}
    assert sys.modules["hf_lgelu"] is None
    assert not any(name.startswith("hf_lgelu.") for name in sys.modules)
    torch.save(found, root / "read.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
