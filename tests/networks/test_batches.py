"""Everything that a user may pass as data gives the same samples and labels."""

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import BatchEncoding
from transformers.modeling_outputs import ModelOutput

from hf_lgelu.networks.batches import read_batches

SAMPLES, WIDTH = 21, 3
X = torch.arange(SAMPLES * WIDTH, dtype=torch.float32).reshape(SAMPLES, WIDTH) / 7
Y = torch.arange(SAMPLES) % 5


class Pairs(torch.utils.data.Dataset):
    """Map-style: (list of numbers, number)."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index].tolist(), int(Y[index])


class Stream(IterableDataset):
    """Items, not batches."""

    def __iter__(self):
        for x, y in zip(X, Y, strict=True):
            yield {"x": x, "label": y}


def table():
    return datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})


def as_list(data, **options):
    return list(read_batches(data, **options))


def joined(batches, name):
    """All samples' inputs and labels."""
    inputs = [batch.inputs if name is None else batch.inputs[name] for batch in batches]
    return torch.cat(inputs), torch.cat([batch.labels for batch in batches])


NAMED = {
    "mapping": lambda: {"x": X, "labels": Y},
    "BatchEncoding": lambda: BatchEncoding({"x": X, "label": Y}),
    "ModelOutput": lambda: ModelOutput(x=X, labels=Y),
    "arrays": lambda: {"x": X.numpy(), "labels": Y.numpy()},
    "iterable": lambda: ({"x": X[i : i + 4], "labels": Y[i : i + 4]} for i in range(0, SAMPLES, 4)),
    "mapping and labels": lambda: [({"x": X[:9]}, Y[:9]), ({"x": X[9:]}, Y[9:])],
    "datasets": table,
    "datasets with tensors": lambda: table().with_format("torch"),
    "datasets stream": lambda: table().to_iterable_dataset(),
    "IterableDataset": Stream,
    "DataLoader": lambda: DataLoader(table().with_format("torch"), batch_size=5),
}
BARE = {
    "pairs": lambda: [(X[:9], Y[:9]), [X[9:], Y[9:]]],
    "dataset of pairs": Pairs,
    "TensorDataset": lambda: TensorDataset(X, Y),
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=8),
}


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("form", NAMED)
def test_named_inputs(form, batch_size):
    x, y = joined(as_list(NAMED[form](), batch_size=batch_size), "x")
    torch.testing.assert_close(x, X, rtol=0, atol=0)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("form", BARE)
def test_bare_inputs(form):
    x, y = joined(as_list(BARE[form]()), None)
    torch.testing.assert_close(x, X, rtol=0, atol=0)
    assert torch.equal(y, Y)


@pytest.mark.parametrize("data", [X, X.numpy(), [X[:4], X[4:]], TensorDataset(X)])
def test_without_labels(data):
    batches = as_list(data)
    assert all(batch.labels is None for batch in batches)
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), X)


def test_collate_makes_batches_of_a_list_of_items():
    items = [{"x": x, "extra": "text"} for x in X]
    batches = as_list(
        items, batch_size=8, data_collator=lambda given: {"x": torch.stack([item["x"] for item in given])}
    )
    assert torch.equal(torch.cat([batch.inputs["x"] for batch in batches]), X)


def test_constants_stay_and_gradients_go():
    (batch,) = read_batches({"x": X.clone().requires_grad_(), "use_cache": False, "mode": "a", "none": None})
    assert batch.constants == {"use_cache": False, "mode": "a", "none": None}
    assert batch.inputs.keys() == {"x", "use_cache", "mode", "none"}
    assert not batch.inputs["x"].requires_grad


@pytest.mark.parametrize(
    ("data", "name"), [(X, None), ({"x": X, "labels": Y}, "x"), (table(), "x"), (TensorDataset(X), None)]
)
def test_fewer_samples_of_something_with_a_length_are_spread_over_it(data, name):
    batches = as_list(data, max_samples=4, batch_size=3)
    inputs = torch.cat([batch.inputs if name is None else batch.inputs[name] for batch in batches])
    assert torch.equal(inputs, X[[0, 5, 10, 15]])


@pytest.mark.parametrize("wanted", [1, 4, 5, 8, SAMPLES, 100])
def test_fewer_samples_of_an_iterable_are_the_first_and_no_more_is_read(wanted):
    read = []

    def batches():
        for start in range(0, SAMPLES, 4):
            read.append(start)
            yield X[start : start + 4]

    taken = torch.cat([batch.inputs for batch in read_batches(batches(), max_samples=wanted)])
    assert torch.equal(taken, X[:wanted])
    assert len(read) == -(-min(wanted, SAMPLES) // 4)


class Images(torch.utils.data.Dataset):
    """Unprepared images."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        from PIL import Image

        return {"image": Image.new("RGB", (2, 2)), "label": index}


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (Images(), ValueError, "image: Image.*image processor.*data_collator"),
        (datasets.Dataset.from_dict({"ids": [[1, 2], [1]]}), ValueError, "equal lengths.*DataCollatorWithPadding"),
        (datasets.Dataset.from_dict({"text": ["a", "b"]}), TypeError, "'text'.*tokenizer"),
        (datasets.DatasetDict(train=table()), TypeError, "'train'"),
        (["a sentence", "another"], TypeError, "inputs.*tokenizer"),
        ([{"x": X, "text": ["a"] * SAMPLES}], TypeError, "'text'.*got text"),
        ([{"x": X, "text": np.array(["a"] * SAMPLES)}], TypeError, "'text'.*got ndarray"),
        ([{"x": 1.0, "label": 2} for _ in X], ValueError, r"no tensor.*\(x: float\).*data_collator"),
        ([{"use_cache": True}], ValueError, "no tensor.*use_cache"),
        ([{"x": X, "labels": ["a"] * SAMPLES}], TypeError, "labels.* text"),
        ([X.to_sparse()], TypeError, "dense.*sparse_coo.*indices"),
        ([{"input_ids": torch.arange(9)}] * 3, ValueError, r"\(sequences, tokens\).*holds batches, not.*data_collator"),
        ([[]], ValueError, "no tensor"),
        ([(X, Y), {"x": X}], ValueError, r"\(inputs, labels\).*x: \(21, 3\) float32"),
        ("squad", TypeError, "str cannot be read.*DataLoader"),
        (7, TypeError, "int cannot be read"),
        ([3], TypeError, "inputs.*got int"),
        (pd.DataFrame(X.numpy()), TypeError, r"DataFrame is a table.*torch\.tensor\(frame\.values"),
        (pd.DataFrame(X.numpy())[0], TypeError, "Series is a table"),
    ],
)
def test_what_cannot_be_read_says_what_to_do(data, error, words):
    with pytest.raises(error, match=words):
        as_list(data)


@pytest.mark.parametrize("data", [X, {"x": X}, iter([X]), DataLoader(TensorDataset(X))])
def test_collate_belongs_to_a_dataset(data):
    with pytest.raises(ValueError, match="data_collator"):
        as_list(data, data_collator=lambda items: items)


ROWS = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"x": ROWS}, {"y": ROWS}, "y: float32"),
        ({"x": ROWS}, {"x": ROWS.half()}, "float16"),
        ({"x": ROWS}, ({"x": ROWS}, torch.ones(2)), "differ"),
        ({"x": ROWS}, {"x": ROWS, "labels": torch.ones(2)}, "labels: float32"),
        ({"x": ROWS}, ROWS, "inputs: float32"),
        ({"x": ROWS, "k": 1}, {"x": ROWS, "k": 2}, "k = [12].*k = [12]"),
        (ROWS, torch.ones(2), r"one batch, \[\(inputs, labels\)\]"),
    ],
)
def test_batches_that_do_not_go_together(first, second, words):
    for batches in ([first, second], [second, first]):
        with pytest.raises(ValueError, match=words):
            list(read_batches(batches))
