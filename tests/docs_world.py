"""What a reader of the pages has: a folder `your/` with small models and data, and a file of texts."""

import json
import shutil
from pathlib import Path

import numpy as np
import small_networks as networks
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

import hf_lgelu

WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def build_world(folder: Path) -> None:
    """Everything that a first line of a block loads, below `folder`."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 32}
    for name, activation in (("bert", "gelu"), ("soft", "lambda_gelu"), ("hardened", "lambda_gelu")):
        model = networks.bert(**sizes, hidden_act=activation, num_labels=2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(3)  # or its gates hardly matter
        if name == "hardened":
            hf_lgelu.anneal_hardness(model, 1.0)
        model.save_pretrained(folder / "your" / name)
        tokenizer.save_pretrained(folder / "your" / name)
    networks.llama(**sizes, head_dim=16).save_pretrained(folder / "your" / "llama")
    tokenizer.save_pretrained(folder / "your" / "llama")
    _encoder(folder / "your" / "bert", folder / "your" / "encoder")
    shutil.copy(Path(__file__).parent / "small_detector.py", folder / "your_detector.py")
    (folder / "pictures").mkdir()
    for number, picture in enumerate(torch.randint(256, (64, 32, 32, 3), dtype=torch.uint8)):
        Image.fromarray(picture.numpy()).save(folder / "pictures" / f"{number}.png")
    rows = torch.randn(64, 3, 32, 32)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.SiLU(), nn.Conv2d(8, 4, 3, 2), nn.Flatten()).eval()
    hf_lgelu.export_onnx(network, folder / "your" / "net.onnx", {"input": rows[:4]})
    np.savez(folder / "your" / "rows.npz", input=rows.numpy())
    texts = _texts(160)
    for name in ("texts.txt", "other.txt"):
        (folder / name).write_text("\n".join(texts), encoding="utf-8")
    columns = dict(tokenizer(texts[:24], padding=True)) | {"labels": [index % 2 for index in range(24)]}
    rows = Dataset.from_dict(columns)
    DatasetDict(train=rows.select(range(16)), test=rows.select(range(16, 24))).save_to_disk(folder / "your" / "rows")


def _encoder(model: Path, folder: Path) -> None:
    """The files of a SentenceTransformer, written by hand: the package takes seconds to import."""
    shutil.copytree(model, folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


def _texts(count: int) -> list[str]:
    drawn = torch.randint(len(WORDS), (count, 8), generator=torch.Generator().manual_seed(0))
    return [" ".join(WORDS[index] for index in row) for row in drawn.tolist()]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *dict.fromkeys(WORDS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=32,
    )  # fmt: skip
