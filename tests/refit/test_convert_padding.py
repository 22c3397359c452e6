"""Sequences of different lengths are padded where that changes nothing: what is reported is what the model gives."""

import pytest
import torch
from torch import nn
from transformers import BigBirdConfig, BigBirdForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from hf_lgelu import convert_to_relu
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.samples import read_samples

PAD = 29


class Pooled(nn.Module):
    """Tokens and perhaps their numbers, a gate, and what `pool` makes of (B, T, 6) and the mask."""

    def __init__(self, pool, numbered=False):
        super().__init__()
        self.embed, self.places = nn.Embedding(30, 6), nn.Embedding(20, 6)
        self.up, self.act, self.down, self.head = nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6), nn.Linear(6, 4)
        self.pool, self.numbered = pool, numbered

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        if self.numbered:
            x = x + self.places(torch.arange(input_ids.shape[1]))
        return self.head(self.pool(x + self.down(self.act(self.up(x))), attention_mask[..., None].to(x.dtype)))


def last(x, mask):
    return x[:, -1]


def mean(x, mask):
    return (x * mask).sum(1) / mask.sum(1)


def whole(x, mask):
    return x.mean(1)


def classifier():
    """Of the last token that is not `PAD`, whatever the mask says."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 20, "num_labels": 4, "vocab_size": 30}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, pad_token_id=PAD, bos_token_id=0, eos_token_id=0))


def drawn(build, offset=0.0):
    """`offset` is added to the scores of all classes, which changes nothing."""
    torch.manual_seed(0)
    model = build()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    if offset:
        nn.init.constant_(model.head.bias, offset)
    return model.eval()


def batches(model, count, seed, in_front=False):
    """Of one length each, with the classes that the model finds; every second one with padding of the user's own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = int(torch.randint(5, 14, (1,), generator=generator))
        ids = torch.randint(0, PAD, (8, length), generator=generator)
        mask = torch.ones_like(ids)
        if number % 2:
            mask[: 8 // 2, : length // 3] = 0
            mask = mask if in_front else mask.flip(1)
        inputs = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
        with torch.no_grad():
            found = model(**inputs)
        made.append({**inputs, "labels": getattr(found, "logits", found).argmax(-1)})
    return made


@pytest.mark.parametrize(
    ("build", "in_front"),
    [
        (classifier, False),
        pytest.param(lambda: Pooled(mean), False, marks=pytest.mark.slow),
        pytest.param(lambda: Pooled(mean), True, marks=pytest.mark.slow),
        pytest.param(lambda: Pooled(mean, numbered=True), False, marks=pytest.mark.slow),
        (lambda: Pooled(last), True),
    ],
    ids=["last that is no padding", "mean", "mean, left", "numbered", "last, left"],
)
def test_the_original_predicts_what_it_does_without_more_padding(build, in_front):
    model = drawn(build)
    report = convert_to_relu(model, batches(model, 24, 1, in_front), evaluation_data=batches(model, 9, 2)).report
    assert report.held_out.original_metrics["accuracy"] == 1
    assert report.held_out.samples >= 20


@pytest.mark.parametrize("offset", [0.0, 20.0])
@pytest.mark.parametrize(
    ("pool", "numbered", "in_front"),
    [
        (last, False, False),
        (whole, True, False),
        (whole, True, True),
        (mean, True, True),  # more padding in front would number the tokens anew
    ],
)
def test_a_network_whose_outputs_change_with_padding_is_refused(pool, numbered, in_front, offset):
    model = drawn(lambda: Pooled(pool, numbered), offset)
    with pytest.raises(ValueError, match=r"padded to 13"):
        convert_to_relu(model, batches(model, 24, 1, in_front))
    (one,) = [batch for batch in batches(model, 24, 1) if batch["input_ids"].shape[1] == 13][:1]
    assert convert_to_relu(model, one).report.distinct_samples == 8


def padded_wide(given, width=40, in_front=False):
    """The same batches as one, as a tokenizer makes it with padding="max_length"."""

    def filled(name, fill):
        rows = [row for batch in given for row in batch[name]]
        return torch.stack([
            torch.cat([row.new_full((width - len(row),), fill), row] if in_front
                      else [row, row.new_full((width - len(row),), fill)])
            for row in rows
        ])  # fmt: skip

    return {"input_ids": filled("input_ids", PAD), "attention_mask": filled("attention_mask", 0)}


def widths_of(folds):
    every = [*folds.fitted, *folds.choosing]
    return {batch.load().tensors["input_ids"].shape[1] for batch in every}


@pytest.mark.parametrize("in_front", [False, True])
def test_padding_that_changes_nothing_is_not_run(in_front):
    model = drawn(lambda: Pooled(mean))
    given = batches(model, 24, 1, in_front)
    folds = deal_folds(
        read_samples(read_batches(padded_wide(given, in_front=in_front)), model=model), OutputReader(model)
    )
    assert max(widths_of(folds)) <= 13
    at_once = 2048 // 13
    assert folds.samples.at_once == at_once
    # what is run is what was given, of each sample its own tokens on the side of its padding
    wanted = {tuple(row[mask.bool()].tolist()) for batch in given
              for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)}  # fmt: skip
    found = set()
    for batch in (*folds.fitted, *folds.choosing):
        loaded = batch.load().tensors
        for row, mask in zip(loaded["input_ids"], loaded["attention_mask"], strict=True):
            found.add(tuple(row[mask.bool()].tolist()))
            assert (row[mask == 0] == PAD).all() or (row[mask == 0] == 0).all()
            assert bool(mask[-1 if in_front else 0])
    assert found == wanted


@pytest.mark.parametrize("numbered", [False, True])
def test_padding_that_the_network_reads_stays(numbered):
    """A mean over all positions; numbers counted from the first position, padded in front."""
    model = drawn(lambda: Pooled(mean if numbered else whole, numbered=numbered))
    wide = padded_wide(batches(model, 24, 1, in_front=numbered), width=20, in_front=numbered)
    folds = deal_folds(read_samples(read_batches(wide), model=model), OutputReader(model))
    assert widths_of(folds) == {20}
    seen = {tuple(row.tolist()) for batch in (*folds.fitted, *folds.choosing)
            for row in batch.load().tensors["input_ids"]}  # fmt: skip
    assert seen == {tuple(row.tolist()) for row in wide["input_ids"]}


def test_what_goes_with_the_tokens_keeps_their_padding():
    """Boxes (B, T, 4) have no mask's shape, and are as long as the tokens."""

    class Boxed(Pooled):
        def forward(self, input_ids, attention_mask, bbox):
            return super().forward(input_ids, attention_mask) + bbox.sum(1)

    wide = padded_wide(batches(drawn(lambda: Pooled(mean)), 24, 1), width=20)
    folds = deal_folds(
        read_samples(
            read_batches({**wide, "bbox": torch.randn(len(wide["input_ids"]), 20, 4)}), model=drawn(lambda: Boxed(mean))
        ),
        OutputReader(drawn(lambda: Boxed(mean))),
    )
    assert widths_of(folds) == {20}


def test_labels_of_tokens_go_with_them():
    model = drawn(lambda: Pooled(lambda x, mask: x))
    wide = padded_wide(batches(drawn(lambda: Pooled(mean)), 24, 1), width=40)
    with torch.no_grad():
        classes = model(**wide).argmax(-1).masked_fill(wide["attention_mask"] == 0, -100)
    report = convert_to_relu(model, {**wide, "labels": classes}).report
    assert report.held_out.original_metrics["accuracy"] == 1
    assert (
        max(
            widths_of(
                deal_folds(read_samples(read_batches({**wide, "labels": classes}), model=model), OutputReader(model))
            )
        )
        <= 13
    )


def test_a_network_that_is_another_on_short_texts_is_left_as_it_is():
    """BigBird gives up its block-sparse attention at the first of them, for good."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BigBirdConfig(vocab_size=30, block_size=4, num_random_blocks=1, max_position_embeddings=64, **sizes)
    torch.manual_seed(0)
    model = BigBirdForSequenceClassification(config).eval()
    before = [type(module).__name__ for module in model.modules()]
    wide = padded_wide(batches(drawn(lambda: Pooled(mean)), 24, 1), width=64)
    assert widths_of(deal_folds(read_samples(read_batches(wide), model=model), OutputReader(model))) == {64}
    assert [type(module).__name__ for module in model.modules()] == before
    assert "BigBirdBlockSparseAttention" in before
    assert model.bert.attention_type == model.bert.encoder.layer[0].attention_type == "block_sparse"
