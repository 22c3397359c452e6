"""What of an output is a prediction, what its classes are, and which of them have scores."""

import math
import types

import pytest
import torch
from torch import nn

from hf_lgelu.comparing.comparison import NetComparison, compare_outputs, label_sums_of, metrics_of
from hf_lgelu.comparing.distance import networks_table
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader, Outputs, with_nearest_queries
from hf_lgelu.refit.output_loss import output_loss
from hf_lgelu.refit.task import evaluate_conversion


def test_which_labels_count():
    logits = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2], [2, 0, 0]])[None]
    labels = torch.tensor([[0, 1, 1, -100]])

    def score(labels, mask, is_causal):
        inputs = {"input_ids": torch.zeros(1, 4)} | ({} if mask is None else {"attention_mask": torch.tensor([mask])})
        return label_sums_of(Outputs({"logits": logits}, {"logits": "scores"}), Batch(inputs, labels), is_causal)

    assert metrics_of(score(labels, None, False)) == {"accuracy": 2 / 3}
    padding = [True, False, True, True]
    assert metrics_of(score(labels, padding, False)) == {"accuracy": 0.5}
    # Of a language model the prediction at t is of the token at t + 1, and neither may be padding.
    in_front = [False, True, True, True]
    following = score(labels, in_front, True)
    assert following["predicted"] == 1
    assert metrics_of(following)["perplexity"] == pytest.approx(1 + 2 * math.exp(-2), rel=1e-6)
    assert score(labels, padding, True)["predicted"] == 0
    assert score(labels.int(), in_front, True) == following
    both = score(labels, None, True) + following
    loss = 3 * math.log(2 + math.exp(2)) - 4
    assert (both["predicted"], both["loss"]) == (3, pytest.approx(loss, rel=1e-6))


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_label_that_is_none_of_the_classes_is_refused(wrong):
    network = nn.Linear(2, 3)
    labels = torch.tensor([0, -100, 2, wrong, 1])
    with pytest.raises(ValueError, match=rf"{wrong}.* 3 classes"):
        compare_outputs(OutputReader(network), {}, [Batch(torch.randn(5, 2), labels)])


@pytest.mark.parametrize(
    ("part", "given", "expected"),
    [
        ("encoder.layer.0.dense", ("attention_mask",), "attention_mask"),
        ("h.0.mlp", ("attention_mask",), "attention_mask"),
        ("model.encoder.layers.0.fc1", ("attention_mask", "decoder_input_ids"), "attention_mask"),
        ("model.decoder.layers.0.fc1", ("attention_mask", "decoder_input_ids"), None),
        (
            "model.decoder.layers.0.fc1",
            ("attention_mask", "decoder_input_ids", "decoder_attention_mask"),
            "decoder_attention_mask",
        ),
        ("model.decoder.layers.0.fc1", ("decoder_attention_mask",), "decoder_attention_mask"),
    ],
)
def test_the_mask_is_that_of_the_part_of_the_network(part, given, expected):
    tensors = {
        "attention_mask": torch.tensor([[1, 1, 0]]), "decoder_attention_mask": torch.tensor([[1, 0, 0]]),
        "decoder_input_ids": torch.tensor([[3, 4, 5]]),
    }  # fmt: skip
    batch, values = Batch({"input_ids": torch.ones(1, 3).long()} | {n: tensors[n] for n in given}), torch.randn(1, 3, 2)
    wanted = values[0] if expected is None else values[0][tensors[expected][0].bool()]
    assert torch.equal(batch.without_padding(values, part), wanted.reshape(-1, 2))
    assert batch.counted(torch.randn(1, 4, 2), part) is None


@pytest.mark.parametrize(
    ("problem", "has_logits"),
    [("regression", False), ("multi_label_classification", False), ("single_label_classification", True), (None, True)],
)
def test_only_classes_that_exclude_each_other_have_a_kl(problem, has_logits):
    config = MLPConfig(num_features=6, hidden_size=4, num_hidden_layers=1, num_labels=3, problem_type=problem)
    found = OutputReader(MLPForClassification(config))({"features": torch.randn(5, 6)})
    assert {name: value.shape for name, value in found.tensors.items()} == {"logits": (5, 3)}
    assert found.has_classes("logits") == has_logits


class Given(nn.Module):
    """Gives what it is given, under names of outputs."""

    def forward(self, **outputs):
        return outputs


def test_the_farthest_output_decides_and_each_has_the_measure_of_its_kind():
    draws = torch.Generator().manual_seed(0)
    logits, values, chances = (torch.randn(20, 3, generator=draws) for _ in range(3))
    chances, states = chances.softmax(-1), torch.randn(20, 4, generator=draws)
    given = {"logits": logits, "values": values, "prediction_logits": chances, "loss": states, "hidden_states": states}

    def distance(**others):
        comparison, read = NetComparison(), OutputReader(Given())
        comparison.add(Batch(given), read(given), read(given | others))
        return comparison.distance, comparison.gaps

    none, _ = distance(loss=-states, hidden_states=-states)
    assert (none.value, list(none.outputs)) == (0, ["logits", "prediction_logits", "values"])
    far, gaps = distance(logits=logits + torch.tensor([1e-4, 0, 0]), values=values + 0.1)
    exact = 20 * 3 * 0.1**2 / (values - values.mean(0)).square().sum().item()
    assert (far.output, far.kl, far.agreement) == ("values", None, None)
    assert [far.value, sum(gaps), far.outputs["values"].relative_error] == pytest.approx([exact] * 3, rel=1e-5)
    assert 0 < far.outputs["logits"].kl < 1e-7
    assert "in `values`" in far.in_words
    # Probabilities are compared as what they are, whatever column is exchanged.
    turned = chances[:, [1, 0, 2]]
    kl = (chances * (chances / turned).log()).sum(-1).mean().item()
    near, gaps = distance(prediction_logits=turned)
    assert [near.value, sum(gaps)] == pytest.approx([kl, kl], rel=1e-5)
    assert near.output == "prediction_logits"


def test_the_original_of_a_table_has_the_measures_of_all_outputs():
    given = {"logits": torch.randn(20, 3), "values": torch.randn(20, 2)}
    read, comparison = OutputReader(Given()), NetComparison()
    comparison.add(Batch(given), read(given), read({name: value + 0.1 for name, value in given.items()}))
    titles, (original, other) = networks_table({}, {"other": comparison.distance}, main=True)
    assert titles[1:] == [
        "logits: KL to the original (nats)", "logits: same prediction", "values: relative error (share of squares)",
    ]  # fmt: skip
    assert original[1:] == ["0", "100 %", "0"]
    assert float(other[3]) > 0


def test_outputs_of_another_shape_are_refused():
    read = OutputReader(Given())
    one, other = ({"waveform": torch.randn(2, length)} for length in (9, 8))
    with pytest.raises(ValueError, match=r"\(2, 9\).*\(2, 8\).*same task"):
        NetComparison().add(Batch(one), read(one), read(other))


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (torch.randn(40, 3), "scores"),
        (torch.randn(40, 1), "values"),
        (torch.randn(40, 3).softmax(-1), "probabilities"),
        (torch.randn(40, 3).sigmoid(), "values"),
        (torch.randn(4, 3, 8), "values"),  # a raw map: which of its axes are classes is not known
    ],
)
def test_the_kind_of_a_tensor_without_a_name(output, kind):
    assert OutputReader(nn.Identity())(output).kinds == {"": kind}


@pytest.mark.parametrize(
    ("head", "kind"), [(nn.Linear(8, 5), "scores"), (nn.Conv1d(3, 5, 1), "scores"), (nn.Flatten(1), "scores")]
)
def test_a_map_whose_classes_a_layer_gives_holds_scores(head, kind):
    assert OutputReader(head)(torch.randn(4, 3, 8)).kinds == {"": kind}


def test_a_picture_without_a_batch_axis_has_its_classes_first():
    (found,) = OutputReader(nn.Conv2d(3, 5, 1))(torch.randn(3, 6, 7)).tensors.values()
    assert found.shape == (6, 7, 5)


class Places(nn.Module):
    """As a detector's interface: scores and boxes of places."""

    def __init__(self, columns, config):
        super().__init__()
        self.config, self._columns = config, columns

    def forward(self, pixel_values):
        return {"logits": pixel_values[..., : self._columns], "pred_boxes": pixel_values[..., :4]}


@pytest.mark.parametrize(
    ("columns", "config", "has_logits"),
    [
        (3, types.SimpleNamespace(num_labels=3), False),  # RT-DETR, D-FINE, Deformable DETR: a sigmoid of each
        (4, types.SimpleNamespace(num_labels=3), True),  # DETR, YOLOS: a softmax with "no object"
        (3, None, True),
    ],
)
def test_scores_of_places_have_a_kl_where_one_of_them_says_that_nothing_is_there(columns, config, has_logits):
    for names in (None, ["logits"]):  # also where the boxes do not count
        found = OutputReader(Places(columns, config), names)({"pixel_values": torch.randn(2, 5, 6)})
        assert found.has_classes("logits") == has_logits


def test_a_detectors_certainty_is_that_of_its_scores_also_where_it_gives_their_probabilities():
    scores, boxes = 3 * torch.randn(2, 5, 4), torch.rand(2, 5, 4)
    given = ({"logits": each, "pred_boxes": boxes} for each in (scores, scores.softmax(-1)))
    kinds = ({"logits": kind, "pred_boxes": "values"} for kind in ("scores", "probabilities"))
    for outputs in map(Outputs, given, kinds):
        torch.testing.assert_close(outputs.certainty(), 1 - scores.softmax(-1)[..., 3])


def test_boxes_of_chosen_queries_are_compared_with_the_nearest_in_whatever_order():
    draws = torch.Generator().manual_seed(0)
    scores, boxes = torch.randn(2, 7, 3, generator=draws), torch.rand(2, 7, 4, generator=draws)
    order = torch.stack([torch.randperm(7, generator=draws) for _ in range(2)])
    rows = torch.arange(2)[:, None]
    other = {"logits": scores[rows, order] + 0.01, "pred_boxes": boxes[rows, order], "logits_beside": scores}
    fixed = Outputs({"logits": scores, "pred_boxes": boxes}, {"logits": "values", "pred_boxes": "values"})
    chosen = fixed._replace(queries_are_chosen=True)
    assert with_nearest_queries(fixed, Outputs(other, {})).tensors is other
    found = with_nearest_queries(chosen, Outputs(other, {})).tensors
    torch.testing.assert_close(found["logits"], scores + 0.01, atol=0, rtol=0)
    torch.testing.assert_close(found["pred_boxes"], boxes, atol=0, rtol=0)
    assert found["logits_beside"] is scores


def test_queries_are_chosen_where_the_output_says_so():
    outputs = {"logits": torch.randn(2, 5, 3), "pred_boxes": torch.rand(2, 5, 4)}
    for given, expected in ((outputs, False), ({**outputs, "enc_topk_logits": torch.ones(1)}, True)):
        found = OutputReader(torch.nn.Identity())(given, lambda model, inputs: inputs)
        assert found.queries_are_chosen == expected


@pytest.mark.parametrize("are_logits", [True, False])
def test_a_detector_is_as_far_as_its_scores_and_its_boxes_are(are_logits):
    kinds = {"logits": "scores" if are_logits else "values", "pred_boxes": "values"}
    draws = torch.Generator().manual_seed(2)
    scores, boxes = 3 * torch.randn(5, 7, 3, generator=draws) - 3, torch.randn(5, 7, 4, generator=draws)
    worse = {"scores": {"logits": scores + 0.3, "pred_boxes": boxes}, "boxes": {"logits": scores, "pred_boxes": -boxes}}
    found, twice = {}, {}
    for name, other in worse.items():
        found[name], parts = NetComparison(), [NetComparison(), NetComparison()]
        for comparison, part in zip([found[name], found[name], *parts], 2 * [slice(3), slice(3, 5)], strict=True):
            of_both = ({key: value[part] for key, value in each.items()}
                       for each in ({"logits": scores, "pred_boxes": boxes}, other))  # fmt: skip
            comparison.add(Batch({}), *(Outputs(each, kinds) for each in of_both))
        parts[0].merge(parts[1])
        twice[name] = parts[0].distance.value
    # By hand, in float64 and of single classes: p·log(p/q) of both sides of each sigmoid, or of a softmax.
    z, b = scores.double(), boxes.double()
    z = z if are_logits else torch.stack([z, 0 * z], -1)
    p, q = z.softmax(-1), (z + (0.3 if are_logits else torch.tensor([0.3, 0]))).softmax(-1)
    sure = 1 - p[..., -1] if are_logits else p[..., 0].amax(-1)
    per_box = (4 * sure[..., None] * (2 * b).square()).flatten(1).sum(1) / b.flatten(0, 1).var(0, False).sum()
    expected = {"scores": (p * (p / q).log()).flatten(1).sum(1) / sure.sum(), "boxes": per_box / sure.sum()}
    for name, comparison in found.items():
        assert comparison.gaps == pytest.approx(expected[name].tolist(), rel=1e-5)
        assert comparison.distance.by_output == [comparison.distance.value]  # boxes alone decide nothing
        assert [comparison.distance.value, twice[name]] == pytest.approx(2 * [expected[name].sum().item()], rel=1e-5)
    assert found["boxes"].distance.in_words.startswith("distance of scores and boxes ")
    together = NetComparison()
    both = (Outputs(each, kinds) for each in ({"logits": scores, "pred_boxes": boxes}, worse["boxes"]))
    together.add(Batch({}, is_sample=True), *both)
    assert together.gaps == pytest.approx([expected["boxes"].sum().item()], rel=1e-5)


def _cells(*maps):
    """(pictures, cells, channels) of maps (pictures, channels, H, W), a cell at a time."""
    places = [(part, i, j) for part in maps for i in range(part.shape[2]) for j in range(part.shape[3])]
    return torch.stack([part[:, :, i, j] for part, i, j in places], 1)


MAPS = [torch.randn(2, 7, size, size, generator=torch.Generator().manual_seed(size)) for size in (4, 2)]
ROWS = _cells(*MAPS)
DECODED = torch.cat([100 * ROWS[..., :4], ROWS[..., 4:].sigmoid()], -1)
ANCHORS = torch.stack(MAPS[:1] * 2, 1).permute(0, 1, 3, 4, 2)


@pytest.mark.parametrize(
    ("given", "names", "expected"),
    [
        (MAPS[0], None, ROWS[:, :16]),
        (MAPS, None, ROWS),
        ((DECODED, MAPS), ["1"], ROWS),  # Ultralytics
        (ROWS, None, ROWS),
        (ROWS.mT, None, ROWS),
        ([ANCHORS], None, ROWS[:, [*range(16)] * 2]),  # YOLOv5
        (([part[:, 4:] for part in MAPS], [part[:, :4] for part in MAPS]), ["1", "0"], ROWS),  # a head for each
        ({"scores": ROWS[..., 4:].mT, "boxes": ROWS[..., :4].mT}, ["boxes", "scores"], ROWS),
        ((DECODED.mT, MAPS), ["0"], torch.cat([100 * ROWS[..., :4], ROWS[..., 4:]], -1)),  # from probabilities
    ],
)
def test_maps_of_a_detector_are_read_as_the_scores_and_the_box_of_each_cell(given, names, expected):
    found = OutputReader(nn.Identity(), names, 4)(given, lambda model, inputs: inputs)
    assert (list(found.tensors), found.has_classes("logits")) == (["logits", "pred_boxes"], False)
    torch.testing.assert_close(found.tensors["logits"], expected[..., 4:], rtol=0, atol=1e-4)
    assert torch.equal(found.tensors["pred_boxes"], expected[..., :4])
    torch.testing.assert_close(found.certainty(), expected[..., 4:].sigmoid().amax(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("given", [MAPS, torch.cat([ROWS[..., :4], ROWS[..., 4:].sigmoid()], -1)])
def test_an_objectness_multiplies_the_chance_of_each_class(given):
    found = OutputReader(nn.Identity(), None, 5)(given, lambda model, inputs: inputs)
    chances = ROWS[..., 4:].double().sigmoid()
    exact = chances[..., :1] * chances[..., 1:]
    torch.testing.assert_close(found.tensors["logits"].double(), exact.logit(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.certainty().double(), exact.amax(-1), rtol=0, atol=1e-6)
    assert torch.equal(found.tensors["pred_boxes"], ROWS[..., :4])


@pytest.mark.parametrize(
    ("given", "channels"), [((DECODED, [MAPS[0][:, :6]]), 4), (MAPS, 7), (torch.randn(2, 7), 4), (MAPS, 2.5)]
)
def test_maps_of_other_channels_each_are_no_detectors(given, channels):
    with pytest.raises(ValueError, match=rf"box_channels={channels}.*\(2, "):
        OutputReader(nn.Identity(), None, channels)(given, lambda model, inputs: inputs)


class Copier(nn.Module):
    """As an encoder-decoder's interface: what it gives is made of the decoder's tokens where there are some."""

    def __init__(self, scale):
        super().__init__()
        self.table = nn.Embedding.from_pretrained(scale * torch.eye(9)[:, :4].contiguous())

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, decoder_attention_mask=None):
        return {"logits": self.table(input_ids if decoder_input_ids is None else decoder_input_ids)}


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        ((), [2, 1]),  # the decoder's tokens are then the encoder's
        (("decoder_input_ids",), [3, 3]),
        (("decoder_input_ids", "decoder_attention_mask"), [1, 3]),
    ],
)
def test_the_encoders_mask_says_nothing_of_a_decoder_that_is_as_long(given, counted):
    tensors = {
        "input_ids": torch.tensor([[1, 2, 3], [2, 3, 1]]),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "decoder_input_ids": torch.tensor([[0, 5, 1], [3, 2, 6]]),
        "decoder_attention_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
    }
    batch = Batch({name: tensors[name] for name in ("input_ids", "attention_mask", *given)})
    original, other = Copier(1.5), Copier(2.0)  # of 1.0 the rows would be probabilities
    found = NetComparison()
    found.add(batch, *(OutputReader(network)(batch.inputs) for network in (original, other)))
    # By hand: the rows of the decoder's tokens, or without them of the encoder's, that are no padding.
    ids = tensors[given[0] if given else "input_ids"]
    rows = torch.cat([row[:count] for row, count in zip(ids, counted, strict=True)])
    p, q = (network.table(rows).double().log_softmax(-1) for network in (original, other))
    expected = (p.exp() * (p - q)).sum().item()
    assert (found.rows, found.rows * found.distance.kl) == (sum(counted), pytest.approx(expected, rel=1e-9))
    loss = output_loss(OutputReader(original)(batch.inputs), OutputReader(other), batch)
    assert loss.item() == pytest.approx(expected / sum(counted), rel=1e-5)


class Tokens(nn.Module):
    """Two gates, and a plain one used twice, on tokens of which some are padding."""

    def __init__(self, gate):
        super().__init__()
        self.first, self.shared, self.last = gate(), gate(), nn.Linear(3, 2)

    def forward(self, values, attention_mask):
        return self.last(self.shared(-values) + self.shared(self.first(values)))


def test_live_units_are_those_of_a_network_whose_zeros_are_known():
    """−0 is zero, a tiny number is none, padding does not count, and a gate that is called twice counts twice."""
    values = torch.tensor([[[1.0, -1.0, 0.0], [2.0, 2.0, 1e-30]], [[-3.0, -3.0, 5.0], [9.0, 9.0, 9.0]]])
    batch = Batch({"values": values, "attention_mask": torch.tensor([[1, 1], [1, 0]])})
    original = Tokens(nn.GELU)
    substitution = TemporaryRelu(original, kinds=("gelu",))
    found, _ = evaluate_conversion(OutputReader(original), Tokens(nn.ReLU), substitution, [batch, batch])
    assert found.live_units == {"first": 5 / 9, "shared": (3 + 5) / 18}


def evaluation_numbers(found):
    changes = (found.direct, found.refitted)
    return [found.rows, found.samples, found.original_metrics["accuracy"], *(change.kl for change in changes),
            *(change.relative_error for change in changes), *(change.agreement for change in changes)]  # fmt: skip


def test_outputs_of_large_vocabularies_are_compared_a_few_samples_at_a_time(monkeypatch):
    # In float64: a product of three rows is summed otherwise than one of eleven, to its dtype's rounding.
    original, converted = (nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 5)).double() for _ in range(2))
    batch = Batch(torch.randn(11, 3, dtype=torch.float64), torch.randint(5, (11,)))
    seen = []
    original.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    whole, gaps = evaluate_conversion(
        OutputReader(original), converted, TemporaryRelu(original, kinds=("gelu",)), [batch]
    )
    assert max(seen) == 11
    monkeypatch.setattr("hf_lgelu.comparing.comparison._VALUES_AT_ONCE", 15)  # of three samples
    seen.clear()
    parts, few_gaps = evaluate_conversion(
        OutputReader(original), converted, TemporaryRelu(original, kinds=("gelu",)), [batch]
    )
    assert max(seen) == 3
    assert few_gaps == pytest.approx(gaps)
    for part, all_together in zip(evaluation_numbers(parts), evaluation_numbers(whole), strict=True):
        assert part == pytest.approx(all_together, rel=1e-9)
