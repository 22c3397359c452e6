"""A corpus of seconds and a checkpoint for it without DropOut, which would draw other numbers in every process."""

from pathlib import Path

import datasets
import torch
from lgelu_lab.benchmarks.wikitext import train_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 8


def write_corpus(folder: Path, train_lines: int, validation_lines: int) -> Path:
    """A data directory; lines of words in a seeded order, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "left", "it"]

    def lines(count: int) -> list[str]:
        choices = torch.randint(0, len(words), (count, 6), generator=generator).tolist()
        return [" " + " ".join(words[index] for index in sorted(line)) + "\n" for line in choices]

    target = folder / "data" / "wikitext2" / "data"
    target.mkdir(parents=True)
    for split, count in (("train", train_lines), ("validation", validation_lines)):
        rows = datasets.Dataset.from_dict({"text": lines(count)})
        rows.to_parquet(str(target / f"{split}-00000-of-00001.parquet"))
    return folder / "data"


def write_checkpoint(folder: Path) -> Path:
    """GPT-2 of 2 blocks, 16 wide, with its tokenizer."""
    tokenizer = train_tokenizer([" the cat sat on a mat and then left it\n"] * 4, 270, CONTEXT)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=CONTEXT, vocab_size=len(tokenizer), bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
