"""What a pruned network is held to, beside its logits: codes, masked scores, half precision, experts without rows."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BartConfig, BartModel

from hf_lgelu import measure_zeros, prune_units, remove_dead_units

DEAD = 40


class Applied(nn.Module):
    """A hidden layer of ReLU between `up` and `down`; `function` says what is given of both."""

    def __init__(self, function, features=4, units=8, outputs=2):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(features, units), nn.ReLU(), nn.Linear(units, outputs)
        self.function = function

    def forward(self, x):
        hidden = self.gate(self.up(x))
        return self.function(self, hidden)


def rows(count=64, features=4):
    return torch.randn(count, features, generator=torch.Generator().manual_seed(1))


def with_a_dead_unit(function, **sizes):
    model = Applied(function, **sizes)
    with torch.no_grad():
        model.up.bias[0] = -99.0
    return model


@pytest.mark.parametrize(
    "code", [lambda hidden: hidden.argmax(-1), lambda hidden: hidden > 0.5, lambda hidden: hidden.sort(-1).indices]
)
@pytest.mark.parametrize("prune", [remove_dead_units, lambda model, data: prune_units(model, data, fraction=0.25)])
def test_codes_of_the_units_that_the_model_also_gives_are_outputs(prune, code):
    model = with_a_dead_unit(lambda self, hidden: {"logits": self.down(hidden), "code": code(hidden)})
    with pytest.raises(RuntimeError, match="in its shape, or in codes, masks or indices"):
        prune(model, rows())


def test_codes_of_what_stays_do_not_hinder():
    model = with_a_dead_unit(lambda self, hidden: {"logits": self.down(hidden), "class": self.down(hidden).argmax(-1)})
    pruned = remove_dead_units(model, rows())
    assert pruned.removed == {"up": [0]}
    assert torch.equal(pruned.model(rows())["class"], model(rows())["class"])


def normalized(self, hidden):
    return F.layer_norm(hidden, hidden.shape[-1:])  # whose mean depends on the number of units


def masked(self, hidden):
    scores = self.down(normalized(self, hidden)).clone()
    scores[..., 0] = torch.finfo(scores.dtype).min
    return scores


def unit_length(self, hidden):
    return F.normalize(self.down(normalized(self, hidden)), dim=-1)


@pytest.mark.parametrize(
    ("function", "dtype"), [(masked, torch.float32), (masked, torch.bfloat16), (unit_length, torch.bfloat16)]
)
@pytest.mark.parametrize("prune", [remove_dead_units, lambda model, data: prune_units(model, data, fraction=0.3)])
def test_neither_a_masked_score_nor_half_precision_hides_a_change(prune, function, dtype):
    model = Applied(function, features=32, units=64, outputs=768).to(dtype)
    with torch.no_grad():
        model.up.bias[:DEAD] = -99.0
    data = rows(16, 32).to(dtype)
    cut = Applied(function, features=32, units=64 - DEAD, outputs=768).to(dtype)
    cut.up.weight.data, cut.up.bias.data = model.up.weight.data[DEAD:], model.up.bias.data[DEAD:]
    cut.down.weight.data, cut.down.bias.data = model.down.weight.data[:, DEAD:], model.down.bias.data
    before, after = (network(data)[:, 1:].detach().double() for network in (model, cut))
    assert F.cosine_similarity(before, after).mean() < 0.95  # another network
    with pytest.raises(RuntimeError, match="where rounding explains"):
        prune(model, data)


@pytest.mark.parametrize("widens", [True, False])
def test_a_forward_in_half_precision_hides_no_change_either(widens):
    """Autocast inside, or a cast of its own, cannot be taken to float32."""

    class Shifted(Applied):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.down(self.gate(self.up(x if widens else x.to(torch.bfloat16))) + 1.0)  # 0 does not stay 0

    model, data = Shifted(None, features=8, units=16, outputs=4), rows(4096, 8)
    with pytest.raises(RuntimeError, match=r"where rounding explains 0\.[1-3]"):
        prune_units(model, data, fraction=0.3)


def test_codes_that_rounding_tips_over_are_those_of_a_finer_arithmetic():
    def quantized(self, hidden):
        y = self.down(hidden)
        return y, (y * 32000).round().to(torch.int64)

    pruned = remove_dead_units(with_a_dead_unit(quantized, features=32, units=64, outputs=8), rows(4096, 32))
    assert pruned.removed == {"up": [0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_what_changes_nothing_is_removed(dtype):
    model = with_a_dead_unit(lambda self, hidden: F.normalize(self.down(hidden), dim=-1), outputs=768).to(dtype)
    pruned = remove_dead_units(model, rows().to(dtype))
    assert pruned.removed == {"up": [0]}
    assert pruned.max_change < 1e-6
    assert {parameter.dtype for parameter in pruned.model.parameters()} == {dtype}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Routed(nn.Module):
    """A row goes to the second expert where its first number is positive."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts, self.head = nn.ModuleList([Expert(), Expert()]), nn.Linear(4, 2)

    def forward(self, x):
        chosen, mixed = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            of_expert = (chosen == number).nonzero().flatten()
            mixed = mixed.index_add(0, of_expert, expert(x[of_expert]))
        return self.head(mixed)


def test_the_units_of_an_expert_that_saw_no_row_are_not_dead():
    model, data = Routed(), rows(32)
    data[:, 0] = data[:, 0].abs()
    zeros = measure_zeros(model, data)["experts.0.act"]
    assert zeros.values == 0
    assert zeros.dead_units == []
    assert zeros.apoz.isnan().all()
    with torch.no_grad():
        model.experts[1].gate_proj.bias[3] = -99.0
        dead = (model.experts[1].gate_proj(data) <= 0).all(0).nonzero().flatten().tolist()
    assert 3 in dead
    assert remove_dead_units(model, data).removed == {"experts.1.gate_proj": dead}
    with pytest.raises(ValueError, match=r"experts\.0\.act ran on no row of these data"):
        prune_units(model, data, fraction=0.25)
    pruned = prune_units(model, data, fraction=0.25, criterion="magnitude")
    assert set(pruned.removed) == {"experts.0.gate_proj", "experts.1.gate_proj"}


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    name: str = "scores"


@pytest.mark.parametrize(
    "function",
    [
        lambda self, hidden: (self.down(hidden), hidden[:0, :1]),
        lambda self, hidden: Output(self.down(hidden)),
        lambda self, hidden: (torch.complex(self.down(hidden), self.down(hidden)).conj(), self.down(hidden)),
    ],
    ids=["an empty tensor beside", "a dataclass", "complex numbers"],
)
def test_outputs_of_odd_kinds_are_compared(function):
    pruned = remove_dead_units(with_a_dead_unit(function), rows())
    assert pruned.removed == {"up": [0]}
    assert pruned.max_change < 1e-6


def test_integer_parameters_and_inference_mode_are_no_hindrance():
    model = with_a_dead_unit(lambda self, hidden: self.down(hidden))
    model.register_parameter("codes", nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False))
    with torch.inference_mode():
        pruned = remove_dead_units(model, rows())
    pruned.model(rows()).sum().backward()
    assert pruned.model.up.weight.grad.shape == (7, 4)


class Joined(nn.Module):
    """Two hidden layers of different widths go into one, beside the input itself."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.down = nn.Linear(4, 6), nn.Linear(4, 8), nn.Linear(18, 2)
        self.act, self.other_act = nn.ReLU(), nn.ReLU()

    def forward(self, x):
        return self.down(torch.cat([self.act(self.one(x)), self.other_act(self.other(x)), x], -1))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))),
        Joined(),
    ],
    ids=["spectral norm", "weight norm", "joined"],
)
def test_layers_that_cannot_be_cut_are_refused_in_words(model):
    with pytest.raises(ValueError, match="has no hidden layer that can be pruned"):
        prune_units(model, rows(), fraction=0.5)


def test_a_gate_that_is_called_by_keyword_is_counted():
    class Named(Applied):
        def forward(self, x):
            return self.down(self.gate(input=self.up(x)))

    model = Named(None)
    with torch.no_grad():
        model.up.bias[0] = -99.0
        expected = (model.up(rows()) <= 0).double().mean(0)
    assert torch.equal(measure_zeros(model, rows())["gate"].apoz, expected)
    assert remove_dead_units(model, rows()).removed == {"up": [0]}


def test_a_gate_of_a_single_number_has_no_units_that_could_be_told():
    class Scaled(Applied):
        def forward(self, x):
            return self.down(self.up(x)) * self.gate(self.up.bias.sum())

    with pytest.raises(ValueError, match=r"gate: which axis of its input, of shape \(\), counts units cannot be told"):
        measure_zeros(Scaled(None), rows())


def test_widths_are_found_where_another_key_holds_the_same_number(tmp_path):
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=24,
        activation_function="relu",
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(3, 50, (2, 7)), "decoder_input_ids": torch.randint(3, 50, (2, 5))}
    pruned = prune_units(BartModel(config).eval(), inputs, fraction=0.5)
    assert pruned.config_key == "encoder_ffn_dim, decoder_ffn_dim"
    assert pruned.model.config.max_position_embeddings == 24
    pruned.model.save_pretrained(tmp_path)
    loaded = BartModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).last_hidden_state, pruned.model.eval()(**inputs).last_hidden_state)
