"""Inputs that do not fit are told before the work, and a decoder's inputs are made of labels."""

import pytest
import torch
from refit_nets import BY_NAME
from small_networks import convert_with, t5
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.refit import layerwise


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr(layerwise, "fit_ridge", lambda *_: pytest.fail("the work had begun"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": torch.randn(40, 6)}, r"inputs of data \(a tensor \(2, 6\) float32\): mat1 .*"),
        ({"data": torch.randn(40, 7).double()}, r"float64\): .*names, shapes and dtypes"),
        ({"data": iter(())}, "data holds no inputs.*once"),
        ({"data": {"x": torch.randn(40, 6).double()}}, r"x: \(2, 6\) float64\): .*must be Tensor, not dict"),
        ({"evaluation_data": torch.randn(9, 7).double()}, r"of evaluation_data \(a tensor \(2, 7\) float64\)"),
        ({"evaluation_data": torch.randn(0, 6).double()}, "evaluation_data holds no inputs"),
        ({"evaluation_data": iter(())}, "evaluation_data holds no inputs"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_known_before_the_work(options, message, no_work):
    net = BY_NAME["mlp"]
    with pytest.raises(ValueError, match=message):
        convert_with(net.model(), **{"data": net.inputs(), **options})


class Fussy(nn.Module):
    """Raises what models raise of inputs that lack something."""

    def __init__(self, error):
        super().__init__()
        self.inner, self._error = BY_NAME["mlp"].model(), error

    def forward(self, x):
        raise self._error
        return self.inner(x)


@pytest.mark.parametrize("error", [AssertionError("224"), KeyError("mask"), AttributeError("no shape")], ids=repr)
def test_whatever_a_model_says_of_inputs_comes_with_what_was_given(error, no_work):
    with pytest.raises(ValueError, match=r"data \(a tensor \(2, 6\)") as caught:
        convert_to_relu(Fussy(error), BY_NAME["mlp"].inputs())
    assert caught.value.__cause__ is error


def test_one_iterator_for_both_sets_is_no_evaluation(no_work):
    batches = (BY_NAME["mlp"].inputs(seed=seed) for seed in range(2))
    with pytest.raises(ValueError, match="read before"):
        convert_to_relu(BY_NAME["mlp"].model(), batches, evaluation_data=batches)


def test_every_batch_of_the_second_set_counts():
    net = BY_NAME["mlp"]
    second = net.inputs(seed=9, units=50)
    batches = (part for part in (second[:0], *second.split(20)))
    whole, in_parts = (
        convert_to_relu(net.model(), net.inputs(), evaluation_data=given).report.evaluation
        for given in (second, batches)
    )
    assert in_parts.samples == whole.samples == 50
    assert in_parts.refitted.kl == pytest.approx(whole.refitted.kl, rel=1e-9)


class Mean(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).mean()


def test_a_network_with_one_number_for_all_inputs(no_work):
    net = BY_NAME["mlp"]
    with pytest.raises(ValueError, match=r"Mean gives one number"):
        convert_to_relu(Mean(net.model()), net.inputs())


def encoder_decoder():
    torch.manual_seed(0)
    options = {"feed_forward_proj": "gelu", "decoder_start_token_id": 0, "tie_word_embeddings": False}
    return t5(num_layers=1, **options).eval()


def targets(count, longest, seed=0):
    """(count, longest) of tokens, the first row of full length, the others shorter and padded with -100."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count, 1), generator=generator)
    lengths[0] = longest
    tokens = torch.randint(1, 30, (count, longest), generator=generator)
    return tokens.masked_fill(torch.arange(longest) >= lengths, -100)


@pytest.mark.parametrize("bare", [False, True])
def test_a_decoders_inputs_and_mask_come_of_the_labels(bare):
    model, labels = encoder_decoder(), targets(6, 5)
    ids = torch.randint(1, 30, (6, 7))
    (batch,) = read_batches([(ids if bare else {"input_ids": ids}, labels)], model=model)
    expected = torch.zeros_like(labels)  # the start token, then the labels up to the last but one
    expected[:, 1:] = labels[:, :-1].clamp(min=0)
    assert torch.equal(batch.inputs["decoder_input_ids"], expected)
    assert torch.equal(batch.inputs["decoder_attention_mask"].bool(), labels != -100)
    assert torch.equal(batch.inputs["input_ids"], ids)
    with torch.no_grad():
        ours, own = model(**batch.inputs).logits, model(input_ids=ids, labels=labels).logits
    torch.testing.assert_close(ours[labels != -100], own[labels != -100])


def test_targets_of_other_lengths_in_every_batch():
    """As a collator pads them; tokens that are padding are no rows of the decoder and no predictions."""
    model, generator = encoder_decoder(), torch.Generator().manual_seed(1)
    labels = [targets(24, longest, seed=longest) for longest in (4, 6)]
    batches = [(torch.randint(1, 30, (24, 7), generator=generator), label) for label in labels]
    report = convert_to_relu(model, batches, evaluation_data=batches).report
    tokens = sum(int((label != -100).sum()) for label in labels)
    assert report.evaluation.rows == tokens
    apart = report.held_out
    assert 0 < apart.samples < apart.rows < tokens
    decoder = next(layer for layer in report.layers if layer.layers[0].startswith("decoder"))
    assert decoder.rows == tokens - apart.rows
    encoder = next(layer for layer in report.layers if layer.layers[0].startswith("encoder"))
    assert encoder.rows == 7 * (48 - apart.samples)  # its inputs have no mask


class Tagger(nn.Module):
    """Scores for each token, of layers that see (B, T) or, as torch's own encoder by default, (T, B)."""

    def __init__(self, time_first):
        super().__init__()
        torch.manual_seed(0)
        self.time_first = time_first
        self.embedding = nn.Embedding(40, 6)
        self.before, self.act, self.behind = nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)
        self.scores = nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        x = self.embedding(input_ids)
        x = x.transpose(0, 1) if self.time_first else x
        x = x + self.behind(self.act(self.before(x)))
        return self.scores(x.transpose(0, 1) if self.time_first else x)


@pytest.mark.parametrize("batch_size", [pytest.param(5, marks=pytest.mark.slow), 7])
def test_padding_is_left_out_of_layers_that_have_time_first(batch_size):
    """As many units as tokens, too, where a batch's shapes do not say which axis is which."""
    ids = torch.randint(1, 30, (64, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < torch.randint(2, 8, (64, 1), generator=torch.Generator().manual_seed(2))
    given = {"input_ids": torch.where(mask, ids, 39), "attention_mask": mask.long()}
    converted = [
        convert_with(Tagger(time_first), given, batch_size=batch_size).model.state_dict()
        for time_first in (False, True)
    ]
    fitted, found = (weights["behind.weight"] for weights in converted)
    torch.testing.assert_close(found, fitted, rtol=1e-4, atol=1e-5)
    assert (fitted - Tagger(False).behind.weight).abs().max() > 1e-2  # it was fitted at all
