"""The plan: folds and held-out part are a partition by sample that order, duplicates and processes do not change."""

from collections import Counter

import pytest
import torch
from torch import nn

from hf_lgelu.networks.batches import Batch, read_batches
from hf_lgelu.refit.folds import SecondSet, deal_folds
from hf_lgelu.refit.samples import read_samples


def features(count, width=3, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def tokens(lengths):
    """Sequences of these lengths, all distinct."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length] = row + 1
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def planned(inputs, batch_size=None, labels=None):
    return deal_folds(read_samples([Batch(inputs, labels)]), batch_size=batch_size)


def rows_of(part):
    """Every row of a part as a tuple."""
    return [tuple(row) for batch in part for row in batch.load().inputs.tolist()]


@pytest.mark.parametrize(
    ("count", "batch_size"),
    [*((count, 3) for count in (16, 40, 63, 64, 65, 67, 100, 301)), *((67, size) for size in (1, 2, 7, 100, None))],
)
def test_every_distinct_row_is_in_one_part(count, batch_size):
    x = features(count)
    plan = planned(torch.cat([x, x[:9]]), batch_size)
    parts = [rows_of(part) for part in (*plan.folds, plan.held_out)]
    assert sorted(row for part in parts for row in part) == sorted(map(tuple, x.tolist()))
    assert (plan.samples.given, len(plan.samples.keys), plan.rows) == (count + 9, count, count)
    assert plan.held_out_samples == len(parts[-1])
    if batch_size:
        assert max(len(batch) for part in (*plan.folds, plan.held_out) for batch in part) <= batch_size


@pytest.mark.parametrize(
    ("count", "least", "batch_size"),
    [
        *((count, least, 5) for count, least in ((64, 16), (65, 16), (128, 16), (203, 26), (1000, 125))),
        *((203, 26, size) for size in (1, 2, 16, None)),
    ],
)
def test_four_equal_folds_of_equal_batches_and_a_held_out_part(count, least, batch_size):
    """An eighth is held out, at least 16, and what equal folds and batches leave over: less than 4 batches."""
    plan = planned(features(count), batch_size)
    assert len(plan.folds) == 4
    sizes = {len(batch) for fold in plan.folds for batch in fold}
    assert len(sizes) == 1
    assert len({len(fold) for fold in plan.folds}) == 1
    assert least <= plan.held_out_samples <= least + 4 * max(sizes)
    assert {len(batch) for batch in plan.held_out[:-1]} <= sizes


@pytest.mark.parametrize(("count", "batch_size", "sizes"), [(16, 16, [16]), (63, None, [63]), (23, 8, [8, 8, 7])])
def test_under_64_rows_all_are_fitted_on(count, batch_size, sizes):
    plan = planned(features(count), batch_size)
    assert plan.held_out == ()
    assert [[len(batch) for batch in fold] for fold in plan.folds] == [sizes]


@pytest.mark.parametrize("inputs", [features(15), features(15).repeat(9, 1), tokens([3, 5, 7])])
def test_fewer_than_16_distinct_rows_are_refused(inputs):
    with pytest.raises(ValueError, match=r"16 .* 15"):
        planned(inputs)


@pytest.mark.parametrize(
    "lengths", [[8] * 20, [*range(1, 41)], [3] * 200, [1] * 100 + [30] * 10, [100, *[5] * 40], [16, 16, 16, 16]]
)
def test_rows_of_sequences_are_their_tokens(lengths):
    plan = planned(tokens(lengths))
    total = sum(lengths)
    assert (plan.rows, len(plan.samples.keys)) == (total, len(lengths))
    held = sum(int(batch.load().inputs["attention_mask"].sum()) for batch in plan.held_out)
    assert max(16, total / 8) <= held < total / 2
    assert len(plan.folds) == (4 if len(lengths) - plan.held_out_samples >= 4 else 1)


@pytest.mark.parametrize("lengths", [[200], [4, 60], [1000, 3, 3, 3]])
def test_nothing_is_held_out_where_too_little_would_be_left_on_either_side(lengths):
    plan = planned(tokens(lengths))
    assert plan.held_out == ()
    assert len(plan.folds) == 1
    assert sum(len(batch) for batch in plan.folds[0]) == len(lengths)


def test_seeds_belong_to_the_content():
    x = features(120)
    seeds = {}
    for inputs in (x, x.flip(0), torch.cat([x, x])):
        plan = planned(inputs, 8)
        for batch in (batch for part in (*plan.folds, plan.held_out) for batch in part):
            assert len(batch.seeds) == len(batch)
            for seed, row in zip(batch.seeds, batch.load().inputs.tolist(), strict=True):
                assert seeds.setdefault(tuple(row), seed) == seed
                torch.Generator().manual_seed(seed)
    assert len(set(seeds.values())) == 120
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert max(seeds.values()) > 2**62


def widths(plan):
    return {batch.load().inputs["input_ids"].shape for fold in plan.folds for batch in fold}


def test_short_sequences_are_not_padded_to_the_longest_of_all():
    """As a collator gives them, each batch padded to its longest: at most two shapes, and every token once."""
    lengths = [3 + index % 4 for index in range(140)] + [20 + index % 13 for index in range(52)]
    given = [Batch(tokens([length, length + 1])) for length in lengths]
    for number, batch in enumerate(given):
        batch.inputs["input_ids"] += 1000 * number * batch.inputs["attention_mask"]
    plan = deal_folds(read_samples(given), batch_size=8)
    assert len(widths(plan)) == 2
    assert min(width for _, width in widths(plan)) < 12
    assert max(width for _, width in widths(plan)) == 33
    found = Counter()
    for part in (*plan.folds, plan.held_out):
        for batch in part:
            taken = batch.load().inputs
            found.update(taken["input_ids"][taken["attention_mask"].bool()].tolist())
    expected = Counter()
    for batch in given:
        expected.update(batch.inputs["input_ids"][batch.inputs["attention_mask"].bool()].tolist())
    assert found == expected


def lengths_of(batches):
    return [length for batch in batches for length in batch.load().tensors["attention_mask"].sum(1).tolist()]


def test_what_looks_at_the_gates_sees_short_and_long_sequences():
    """Of batches each padded to its own length the folds have the short ones first."""
    batches = []
    for length in range(2, 130):
        ids = torch.full((1, length), length)
        batches.append(Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}))
    plan = deal_folds(read_samples(batches), batch_size=4)
    seen = lengths_of(plan.spread)
    fitted = lengths_of(batch for fold in plan.folds for batch in fold)
    assert len(seen) == 4 * 16  # 2,048 tokens of the longest are 15 sequences, four batches of a fold
    assert sum(seen) / len(seen) == pytest.approx(sum(fitted) / len(fitted), rel=0.1)
    assert min(seen) < 20 < 110 < max(seen)


def test_sequences_whose_parts_are_long_in_turn_all_fit():
    """Of an encoder and a decoder: where one is long, the other is short."""
    batch = Batch(
        {
            f"{part}{name}": torch.ones(1, length, dtype=torch.long)
            for part, length in (("", 20), ("decoder_", 19))
            for name in ("input_ids", "attention_mask")
        }
    )
    given = []
    for number in range(64):
        inputs = {name: value.clone() for name, value in batch.inputs.items()}
        inputs["input_ids"][0, 0] = number + 2
        cut = {"": 3, "decoder_": 19} if number % 2 else {"": 20, "decoder_": 3}
        lengths = {name: cut["decoder_" * name.startswith("decoder_")] for name in inputs}
        given.append(Batch({name: value[:, : lengths[name]] for name, value in inputs.items()}))
    plan = deal_folds(read_samples(given))
    assert sum(len(batch.load()) for part in (*plan.folds, plan.held_out) for batch in part) == 64


def test_what_is_given_twice_is_counted_among_pictures_of_several_sizes():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    small, large = torch.randn(12, 3, 6, 6), torch.randn(12, 3, 8, 8)
    second = SecondSet(
        model, [torch.cat([small[:5], torch.randn(4, 3, 6, 6)])], deal_folds(read_samples(read_batches([small, large])))
    )
    assert sum(map(len, second)) == 9
    assert second.repeated() == 5
