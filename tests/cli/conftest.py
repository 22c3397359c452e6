"""Small trained networks with their rows in CSV files, and the command called in this process."""

import csv
from types import SimpleNamespace

import datasets
import pytest
import torch
from transformers.utils import logging

from hf_lgelu.cli.command import main
from hf_lgelu.models.hardening import anneal_hardness
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

FEATURES = 5


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """What `datasets` makes of files is kept with the tests, not among the user's."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture
def call(capsys):
    """call(words) → (exit status, what went to stdout, what went to stderr)."""

    def run(*words):
        status = main([str(word) for word in words])
        return status, *capsys.readouterr()

    yield run
    logging.enable_progress_bar()
    datasets.enable_progress_bars()


@pytest.fixture
def pushed(monkeypatch):
    """(files, repository, whether it is private) of each push, of which none reaches the Hub."""
    found = []

    def push(folder, repo_id, *, private):
        found.append((sorted(path.name for path in folder.iterdir()), repo_id, private))
        return SimpleNamespace(commit_url="http://hub/commit/1")

    monkeypatch.setattr("hf_lgelu.cli.checkpoint.push_to_hub", push)
    return found


def trained(activation, rows, labels):
    torch.manual_seed(1)
    model = MLPForClassification(
        MLPConfig(num_features=FEATURES, hidden_size=16, num_hidden_layers=2, num_labels=2, hidden_act=activation)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows).logits, labels).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with rows.csv, test.csv, and the checkpoints gelu, soft and hard, trained on the first."""
    place = tmp_path_factory.mktemp("place")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(300, FEATURES, generator=generator)
    labels = (rows[:, 0] * rows[:, 1] + rows[:, 2] > 0).long()
    for name, part in (("rows", slice(200)), ("test", slice(200, 300))):
        with (place / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*"abcde", "label"])
            writer.writerows(
                [*row, label] for row, label in zip(rows[part].tolist(), labels[part].tolist(), strict=True)
            )
    trained("gelu", rows[:200], labels[:200]).save_pretrained(place / "gelu")
    lambda_gelu = trained("lambda_gelu", rows[:200], labels[:200])
    lambda_gelu.save_pretrained(place / "soft")
    anneal_hardness(lambda_gelu, 1.0)
    lambda_gelu.save_pretrained(place / "hard")
    return place


@pytest.fixture(scope="session")
def converted(place, tmp_path_factory):
    """(folder, what was said) of one conversion with a second set."""
    folder = tmp_path_factory.mktemp("out") / "relu"
    words = ["convert", place / "gelu", "--data", place / "rows.csv", "--evaluation", place / "test.csv"]
    assert main([str(word) for word in (*words, "--output_dir", folder, "--disable_tqdm")]) == 0
    return folder


@pytest.fixture(scope="session")
def test_rows(place):
    """(features, labels) of test.csv, read by the csv module."""
    with (place / "test.csv").open(newline="") as file:
        _, *lines = csv.reader(file)
    numbers = torch.tensor([[float(number) for number in line] for line in lines])
    return numbers[:, :FEATURES], numbers[:, FEATURES].long()


@pytest.fixture(scope="session")
def sentence_folder(tmp_path_factory):
    """A checkpoint of sentence-transformers with CLS pooling and a normalization, by that package; and its texts."""
    package = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    place = tmp_path_factory.mktemp("sentences")
    words = ["the", "a", "cat", "dog", "saw", "ate", "big", "small", "red", "green"]
    (place / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(place / "vocab.txt")).save_pretrained(place / "bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = BertModel(BertConfig(vocab_size=15, max_position_embeddings=32, **sizes))
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.mul_(3)  # or its gates hardly matter
    bert.save_pretrained(place / "bert")
    modules = [Transformer(str(place / "bert")), Pooling(16, pooling_mode="cls"), Normalize()]
    package.SentenceTransformer(modules=modules, device="cpu").save(str(place / "folder"))
    texts = [f"the {a} {b} {c} a {d} {e}" for a in words[6:] for b in words[2:4] for c in words[4:6]
             for d in words[6:] for e in words[2:4]]  # fmt: skip
    (place / "texts.txt").write_text("\n".join(texts) + "\n")
    return place / "folder", place / "texts.txt"
