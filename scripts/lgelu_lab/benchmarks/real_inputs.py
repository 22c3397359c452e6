"""What networks that nobody here trained are fed: texts and blocks of text, one batch a sample."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from lgelu_lab.benchmarks.data import Batch as Inputs
from lgelu_lab.benchmarks.real_networks import RealNetwork

_FEWEST_WORDS = 8


def paragraphs(lines: Sequence[str]) -> list[str]:
    """The paragraphs of a WikiText split from 8 words on: no headings, no sentence with <unk>, signs as written."""
    found = []
    for line in lines:
        if line.strip().startswith("="):
            continue
        text = " ".join(part for part in re.split(r"(?<= \.) ", line.strip()) if "<unk>" not in part)
        for pattern, written in ((r" @([-,.])@ ", r"\1"), (r" ([,.;:!?%)\]])", r"\1"), (r"([(\[$]) ", r"\1")):
            text = re.sub(pattern, written, text)
        if len(text.split()) >= _FEWEST_WORDS:
            found.append(text.replace(" 's", "'s").replace(" n't", "n't"))
    return found


def in_batches(samples: Sequence[Inputs], pad: int, at_once: int, *, labelled: bool = True) -> list[Inputs]:
    """Batches of samples, with or without their labels; samples of about the same length go together."""
    kept = [{name: tensor for name, tensor in sample.items() if labelled or name != "labels"} for sample in samples]
    ordered = sorted(kept, key=lambda sample: sample["input_ids"].shape[-1])
    return [joined(ordered[start : start + at_once], pad) for start in range(0, len(ordered), at_once)]


def joined(samples: Sequence[Inputs], pad: int) -> Inputs:
    """One batch, the sequences padded behind where the samples differ in length."""
    fill = {"input_ids": pad, "attention_mask": 0}
    longest = {name: max(sample[name].shape[1] for sample in samples) for name in fill if name in samples[0]}
    return {
        name: torch.cat(
            [
                F.pad(sample[name], (0, longest[name] - sample[name].shape[1]), value=fill[name])
                if name in fill
                else sample[name]
                for sample in samples
            ]
        )
        for name in samples[0]
    }


def _texts(texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any, length: int) -> list[Inputs]:
    samples = []
    for index, text in enumerate(texts):
        encoded = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        sample = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        samples.append(sample if labels is None else {**sample, "labels": torch.tensor([labels[index]])})
    return samples


def _blocks(texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any, length: int) -> list[Inputs]:
    tokens = torch.tensor(tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"])
    return [{"input_ids": block[None]} for block in tokens.split(length) if len(block) == length]


def cut_samples(
    network: RealNetwork, texts: Sequence[str], labels: Sequence[int] | None, tokenizer: Any
) -> list[Inputs]:
    """A sample a text, or of a language model the blocks of all texts joined."""
    cut = _blocks if network.task == "text" else _texts
    return cut(texts, labels, tokenizer, network.length)


def read_samples(
    network: RealNetwork, split: Any, tokenizer: Any, wanted: int | None = None, seed: int = 0
) -> list[Inputs]:
    """At most `wanted` samples of a split, the first of a seeded order."""
    corpus = network.corpus
    if corpus.label is None:  # running text: its paragraphs, or blocks of them
        texts, labels = paragraphs(split[corpus.column][:]), None
    else:
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:wanted].tolist()
        chosen = split.select(order)
        texts, labels = chosen[corpus.column][:], chosen[corpus.label][:]
    samples = cut_samples(network, texts, labels, tokenizer)
    if corpus.label is None:
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
        samples = [samples[index] for index in order]
    if not samples:
        raise ValueError(f"{corpus.hub_id or corpus.folders[0]} holds nothing that {network.name} could be judged on")
    return samples[:wanted]
