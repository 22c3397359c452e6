"""What convert_to_relu refuses, in which words, and that the given model is as it was."""

import copy
import re

import pytest
import torch
from refit_nets import BY_NAME, drawn
from small_networks import convert_with
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.refit.refusals import ConversionRefusedError


def rows(count=80, width=6, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Wired(nn.Module):
    """up → gate → what `behind` does with the gate's output."""

    def __init__(self, behind, **modules):
        super().__init__()
        self.up, self.act, self.down, self.head = nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 7), nn.Linear(7, 3)
        for name, module in modules.items():
            setattr(self, name, module)
        self._behind = behind

    def forward(self, x):
        return self._behind(self, self.act(self.up(x)))


def wired(behind, **modules):
    torch.manual_seed(0)
    return drawn(Wired(behind, **modules))


def tied():
    model = wired(lambda net, x: net.head(net.down(x)), decoder=nn.Linear(7, 7))
    model.decoder.weight = model.down.weight
    return model


def recurrent(net, x):
    return net.head(net.memory(x[:, None])[0][:, -1])


STRUCTURES = {
    "shared": (
        wired(lambda net, x: net.head(net.down(x) @ net.down.weight)),
        r"\n  down\.weight: down\.weight is used 2 times in a forward pass, and not as a plain map each time",
    ),
    "in one sum": (wired(lambda net, x: net.head(net.down(x) + net.down(net.act(x)))), r"\n  down\.weight: .* one sum"),
    "tied": (tied(), r"\n  down\.weight: down\.weight is tied: several modules hold it"),
    "at the output": (
        wired(lambda net, x: x.softmax(-1)),
        r"\n  act: its output is the model's, and no linear map with weights comes after it",
    ),
    "both ways": (
        wired(lambda net, x: [net.head(x), x]),
        r"\n  act: its output is the model's",
    ),
    "cut weight": (
        wired(lambda net, x: x @ net.down.weight[:, :5]),
        r"\n  down\.weight: matmul takes down\.weight in a form that is no plain linear layer",
    ),
    "bilinear": (
        wired(lambda net, x: net.head(net.pair(x, x)), pair=nn.Bilinear(7, 7, 7)),
        r"\n  pair\.weight: bilinear takes pair\.weight in a form that is no plain linear layer",
    ),
    "recurrent": (
        wired(recurrent, memory=nn.GRU(7, 7, batch_first=True)),
        r"\n  memory\.weight_hh_l0: gru takes memory\.weight_hh_l0 in a form",
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_gate_whose_consumers_cannot_be_refitted_is_exchanged_alone_and_named(name):
    model, reason = STRUCTURES[name]
    refused = None
    try:
        converted, report = convert_with(model, rows(), max_kl=None)
    except ConversionRefusedError as error:
        refused, converted, report = error, error.model, error.report
    assert isinstance(model.act, nn.GELU)
    assert isinstance(converted.act, nn.ReLU)
    (unfit,) = (layer for layer in report.layers if layer.is_unfit)
    assert (unfit.sites, unfit.choice) == (("act",), "unchanged")
    assert re.search(reason, f"\n  {unfit.layers[0]}: {unfit.note.removeprefix('not refitted: ')}")
    assert any(warning.startswith("act: only the gate was exchanged: ") for warning in report.warnings)
    assert (refused is not None) == (len(report.layers) == 1)
    if refused is not None:  # nothing else comes after the gate: the plain swap
        assert "no nearer to the original" in str(refused)
        swapped = copy.deepcopy(model)
        swapped.act = nn.ReLU()
        assert torch.equal(next(iter(converted(rows()))), next(iter(swapped(rows()))))
        assert report.next_step is None


def test_a_gate_that_works_in_place_on_what_is_used_again_is_refused():
    def behind(net, x):
        hidden = net.down(x)
        return net.head(net.spare(hidden) + hidden)

    with pytest.raises(ConversionRefusedError, match=r"spare of Wired .*in place"):
        convert_to_relu(wired(behind, spare=nn.SiLU(inplace=True)), rows())


def test_a_gate_that_the_inputs_do_not_reach():
    model = wired(lambda net, x: net.head(x), spare=nn.SiLU())
    report = convert_with(model, rows()).report
    assert any("the inputs never reach this gate" in warning for warning in report.warnings)
    assert [layer.layers for layer in report.layers] == [("spare",), ("head",)]


@pytest.mark.parametrize("where", ["inputs", "weights"])
def test_numbers_that_are_not_finite(where):
    net = BY_NAME["mlp"]
    model, inputs = net.model(), net.inputs()
    if where == "inputs":
        inputs[::3, 0] = float("nan")
    else:
        with torch.no_grad():
            model[2].weight[0, 0] = float("inf")
    with pytest.raises(ConversionRefusedError, match=" 2 is not finite"):
        convert_to_relu(model, inputs)
    assert isinstance(model[1], nn.GELU)


def test_a_second_set_that_is_not_finite_is_not_taken_for_one_from_elsewhere():
    net = BY_NAME["mlp"]
    second = net.inputs(seed=9)
    second[0, 0] = float("nan")
    report = convert_to_relu(net.model(), net.inputs(), evaluation_data=second).report
    (warning,) = report.warnings
    assert warning.startswith("on the second set the outputs are not finite: look for NaN or infinities in the data")


PLAIN = BY_NAME["mlp"].model()  # its gates are "1" and "3"
TO_DISTILL = {"effort": "distill"}
REFUSED = {  # what is converted, on what, how: the error, and what it names
    "no gate": (nn.Sequential(nn.Linear(6, 3), nn.ReLU()).double(), rows(), {}, ValueError, "nothing in it is smooth"),
    "tanh": (nn.Sequential(nn.Tanh()), rows(), {}, ValueError, r"\(kinds=\) makes ReLU of tanh, sigmoid, softsign"),
    "15 rows": (PLAIN, rows(15).repeat(10, 1), {}, ValueError, "the 150 samples given have 15"),
    "sparse": (PLAIN, torch.eye(6).to_sparse(), {}, TypeError, r"dense tensors of numbers, .* torch\.sparse_coo"),
    "no argument": (PLAIN, {"rows": rows()}, {}, ValueError, r"No name .* is an argument of its forward \(input\)"),
    "a batch of none": (PLAIN, rows(), {"batch_size": 0}, ValueError, "batch_size"),
    "no effort": (PLAIN, rows(), {"effort": "fast"}, ValueError, "refit, place, distill, got 'fast'"),
    "nothing to hold out": (PLAIN, rows(40), {"effort": "place"}, ValueError, "held out"),
    "no unit wider": (PLAIN, rows(), {"effort": "place", "width": 1.001}, ConversionRefusedError, "whole unit more"),
    "narrower": (PLAIN, rows(), {"width": 0.5}, ValueError, "width"),
    "endless": (PLAIN, rows(), {"width": float("inf")}, ValueError, "width"),
    "unknown gate": (PLAIN, rows(), {"keep": ["7"]}, ValueError, "no gate is named 7"),
    "letters of gates": (PLAIN, rows(), {"keep": "13"}, TypeError, r"sequence of names such as \['1'\], got '13'"),
    "number of gates": (PLAIN, rows(), {"keep": 1}, TypeError, r"sequence of names such as \['1'\], got 1"),
    "numbers of gates": (PLAIN, rows(), {"keep": [1]}, TypeError, r"sequence of names such as \['1'\], got \[1\]"),
    "all gates": (PLAIN, rows(), {"keep": ["1", "3"]}, ValueError, "there is nothing to convert"),
    "bf16 of place": (PLAIN, rows(), {"effort": "place", "bf16": True}, ValueError, "`bf16` is for"),
    "steps of place": (PLAIN, rows(), {"effort": "place", "distill_steps": 9}, ValueError, "`distill_steps` is for"),
    "no steps": (PLAIN, rows(), TO_DISTILL | {"distill_steps": 0}, ValueError, "distill_steps"),
    "steps in float16": (copy.deepcopy(PLAIN).half(), rows().half(), TO_DISTILL, ValueError, r"model\.float\(\)"),
} | {
    f"max_kl of {value}": (PLAIN, rows(), {"max_kl": value}, ValueError, "max_kl must be a number above 0, or None")
    for value in (0, -1.0, float("nan"))
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_the_work(name, monkeypatch):
    model, data, options, error, named = REFUSED[name]
    monkeypatch.setattr("hf_lgelu.refit.layerwise.write_refit", None)
    with pytest.raises(error, match=named):
        convert_with(model, data, **options)


def test_a_refit_that_is_worse_than_the_plain_swap(monkeypatch):
    """A fit that adds noise to the weights: the guard sees it on rows that nothing was fitted on, and only there."""
    net = BY_NAME["mlp"]
    model = net.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr("hf_lgelu.refit.layerwise.write_refit", _add_noise)
    with pytest.raises(ConversionRefusedError) as caught:
        convert_to_relu(model, net.inputs())
    held_out = caught.value.report.held_out
    assert held_out.refitted.kl > held_out.direct.kl > 0
    assert str(caught.value).startswith(
        f"on {held_out.rows:,} rows that were held out, the converted network is no nearer to the original "
        f"(KL {held_out.refitted.kl:.3g} nat) than the plain swap (KL {held_out.direct.kl:.3g} nat); "
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert convert_to_relu(model, net.inputs(units=60)).report.held_out is None  # too few rows for a guard


def test_a_refusal_names_gates_that_no_map_makes_up_for(monkeypatch):
    monkeypatch.setattr("hf_lgelu.refit.layerwise.write_refit", _add_noise)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 5), nn.GELU())
    with pytest.raises(ConversionRefusedError, match=r"no nearer .*leave gates smooth \(`keep`\) .*: 3\."):
        convert_to_relu(model, torch.randn(200, 6))


@torch.no_grad()
def _add_noise(student, traced, layer, fit):
    student.get_submodule(layer.maps[0].name).weight.add_(5.0)
