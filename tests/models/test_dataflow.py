"""The graph of one forward pass: calls of sites, parameters behind views, and a model that is as before."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_lgelu import LambdaGELU
from hf_lgelu.models.dataflow import describe, is_site, operation_name, shape_of, trace_sites, users, uses_once
from hf_lgelu.models.sites import find_sites


class Model(nn.Module):
    """The first activation runs twice, the second once, the third never; a weight is used as it is and turned."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.again = nn.Linear(3, 4)
        self.again.weight = self.first.weight
        self.one, self.two, self.three = LambdaGELU(), LambdaGELU(), LambdaGELU()
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x, scale=1.0, parts=None):
        hidden = self.one(self.first(x)) * self.mask * scale
        hidden = self.two(self.one(hidden))
        return {"logits": F.linear(hidden, self.first.weight.t()), "kept": hidden, "ids": x.argmax(-1)}


def trace(model, inputs):
    return trace_sites(model, find_sites(model, ("lambda_gelu",)), inputs)


def test_calls_are_listed_by_site_in_order():
    flow = trace(Model(), torch.ones(2, 3))
    assert {site: len(calls) for site, calls in flow.calls.items()} == {0: 2, 1: 1}
    first, second = flow.calls[0]
    assert operation_name(first.args[0]) == "linear"
    assert operation_name(second.args[0]) == "mul"
    assert all(is_site(call) and shape_of(call) == (2, 4) for call in (first, second))
    assert describe(first) == "an activation in one"
    assert describe(first.args[0]) == "linear in first"


def test_parameters_are_found_behind_views_and_have_one_name():
    flow = trace(Model(), torch.ones(2, 3))
    linear = flow.calls[0][0].args[0]
    assert flow.parameter(linear.args[1]) == "first.weight"
    assert flow.is_direct(linear.args[1])
    turned = next(user for user in flow.parameter_users("first.weight") if user is not linear)
    assert operation_name(turned) == "linear"
    assert flow.parameter(turned.args[1]) == "first.weight"
    assert not flow.is_direct(turned.args[1])
    assert len(flow.parameter_users("first.weight")) == 2
    assert flow.is_tied("first.weight")
    assert not flow.is_tied("first.bias")
    assert flow.parameter(flow.calls[0][0]) is None
    mask = flow.calls[0][1].args[0].args[0].args[1]
    assert mask.op == "placeholder"
    assert flow.parameter(mask) is None  # a buffer, which may not be saved


def test_every_floating_output_counts_as_a_use():
    flow = trace(Model(), torch.ones(2, 3))
    names = sorted(operation_name(user) or user.op for user in users(flow.calls[1][0]))
    assert names == ["linear", "output"]
    assert describe(next(user for user in users(flow.calls[1][0]) if user.op == "output")) == "the model's output"


def test_a_second_use_by_the_same_operation_is_seen():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = LambdaGELU()

        def forward(self, x):
            hidden = self.act(x)
            return hidden * hidden + x * 2

    call = trace(Square(), torch.ones(2, 3)).calls[0][0]
    (product,) = users(call)
    assert not uses_once(product, call)
    assert uses_once(call, call.args[0])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(3, 4), LambdaGELU(), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.act(self.first(x))
        return self.last(hidden) if hidden.sum() > 0 else hidden


def test_a_model_that_branches_on_values_is_refused_and_left_as_it_was():
    model = Branching()
    with pytest.raises(ValueError, match=r"Branching runs on the example inputs, but torch\.export cannot"):
        trace(model, torch.ones(2, 3))
    assert isinstance(model.act, LambdaGELU)
