"""Distinct samples by content: against sets of tuples of the entries, padded in any way."""

import pytest
import torch
from torch import nn

from hf_lgelu.networks.batches import Batch
from hf_lgelu.refit.samples import read_samples


def take_all(samples):
    everything = range(len(samples.keys))
    return samples.take(everything, samples.longest(everything))


def few_values(dtype, shape=(40, 3), seed=0):
    """Rows of which several are equal."""
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def sequences(padding_side="right", fill=0, extra=0):
    """[1], [1, 2], [1, 2, 3], ... as one padded batch; `extra` columns of nothing but padding."""
    tokens = [list(range(1, length + 1)) for length in range(1, 6)]
    width = 5 + extra
    rows, masks = [], []
    for row in tokens:
        pad, hidden = [fill] * (width - len(row)), [0] * (width - len(row))
        rows.append(row + pad if padding_side == "right" else pad + row)
        masks.append([1] * len(row) + hidden if padding_side == "right" else hidden + [1] * len(row))
    return Batch({"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)})


@pytest.mark.parametrize(
    ("dtype", "batch_size"),
    [
        *((dtype, 1) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)),
        *((dtype, 7) for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)),
        (torch.float32, 40),
    ],
)
def test_every_distinct_row_once(dtype, batch_size):
    x = few_values(dtype)
    samples = read_samples(Batch(part) for part in x.split(batch_size))
    taken = take_all(samples).inputs
    assert taken.dtype == dtype
    assert sorted(map(tuple, taken.tolist())) == sorted({tuple(row) for row in x.tolist()})
    assert len(samples.keys) < samples.given == 40
    assert list(samples.rows) == [1] * len(samples.keys)


def test_equal_bytes_make_equal_samples():
    """NaN equals itself; 0 and −0 are different inputs of a network with 1/x."""
    x = torch.tensor([[float("nan"), 1.0], [0.0, 1.0], [float("nan"), 1.0], [-0.0, 1.0]])
    assert len(read_samples([Batch(x)]).keys) == 3


def test_of_duplicates_the_first_stays():
    x = torch.tensor([[1.0], [2.0], [1.0], [2.0], [2.0]])
    samples = read_samples([Batch(x[:2], torch.tensor([0, 1])), Batch(x[2:], torch.tensor([2, 3, 4]))])
    taken = take_all(samples)
    assert sorted(zip(taken.inputs[:, 0].tolist(), taken.labels.tolist(), strict=True)) == [(1.0, 0), (2.0, 1)]


@pytest.mark.parametrize(
    "other", [sequences(extra=3), sequences(fill=9), sequences("left"), sequences("left", fill=4, extra=2)]
)
def test_padding_does_not_matter(other):
    plain, both = read_samples([sequences()]), read_samples([sequences(), other])
    assert both.keys == plain.keys
    assert sorted(both.rows) == [1, 2, 3, 4, 5]
    assert both.given == 10
    taken = take_all(both)
    assert taken.inputs["input_ids"].shape == taken.inputs["attention_mask"].shape
    hidden = zip(taken.inputs["input_ids"], taken.inputs["attention_mask"].bool(), strict=True)
    found = sorted(ids[mask].tolist() for ids, mask in hidden)
    assert found == [list(range(1, length + 1)) for length in range(1, 6)]


def test_sequences_of_different_lengths_are_padded_on_the_right():
    short = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 1]])}
    long = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    samples = read_samples(
        [Batch(short, labels=torch.tensor([[7, 8]])), Batch(long, labels=torch.tensor([[9, 10, 11, -100]]))]
    )
    assert samples.longest([0, 1]) == {"input_ids": 4, "attention_mask": 4, "labels": 4}
    assert sorted(lengths["input_ids"] for lengths in samples.lengths) == [2, 4]
    taken = take_all(samples)
    found = {tuple(row) for row in torch.cat([*taken.inputs.values(), taken.labels], 1).tolist()}
    assert found == {
        (1, 2, 0, 0, 1, 1, 0, 0, 7, 8, -100, -100),
        (3, 4, 5, 6, 1, 1, 1, 0, 9, 10, 11, -100),
    }
    wider = samples.take([0, 1], {"input_ids": 6, "attention_mask": 6, "labels": 5})
    assert wider.inputs["input_ids"].shape == (2, 6)
    assert wider.labels.shape == (2, 5)


def test_a_decoders_padding_lies_where_its_own_mask_has_it():
    def batch(length):
        tokens = torch.arange(1, length + 1)[None]
        in_front = (torch.arange(length) >= length - 2).long()[None]
        return Batch(
            {
                "input_ids": tokens, "attention_mask": in_front,
                "decoder_input_ids": tokens, "decoder_attention_mask": in_front.flip(1),
            },
            labels=tokens,
        )  # fmt: skip

    taken = take_all(read_samples([batch(3), batch(4)]))
    short = taken.inputs["input_ids"][:, 0].argmin()
    found = {name: value[short].tolist() for name, value in {**taken.inputs, "labels": taken.labels}.items()}
    assert found == {
        "input_ids": [0, 1, 2, 3], "attention_mask": [0, 0, 1, 1], "decoder_input_ids": [1, 2, 3, 0],
        "decoder_attention_mask": [1, 1, 0, 0], "labels": [1, 2, 3, -100],
    }  # fmt: skip


@pytest.mark.parametrize("frames", [None, lambda samples: samples // 4, lambda samples: int(samples / 4)])
def test_rows_of_a_sound_are_its_frames_where_the_model_says_how_many(frames):
    model = nn.Module()
    if frames is not None:
        model._get_feat_extract_output_lengths = frames
    mask = (torch.arange(24) < torch.tensor([[12], [22], [3], [0]])).long()
    samples = read_samples([Batch({"input_values": torch.randn(4, 24), "attention_mask": mask})], model=model)
    # What is too short for a frame is left out.
    assert sorted(samples.rows) == ([3, 12, 22] if frames is None else [3, 5])
