"""What returns layer by layer, against networks put together by hand; the time left, against its closed form."""

import copy
import re

import pytest
import torch
from torch import nn

from hf_lgelu import convert_to_relu
from hf_lgelu.refit.batches import Batch, read_batches
from hf_lgelu.refit.folds import deal_folds
from hf_lgelu.refit.gap import returned_by_layer, some_held_out
from hf_lgelu.refit.ladder import RUNGS, next_rung
from hf_lgelu.refit.page import render_markdown
from hf_lgelu.refit.progress import Progress
from hf_lgelu.refit.report import StepTaken


class Residual(nn.Module):
    """x + W₂·gate(W₁·x), twice, with one module that runs in both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2)
        )  # fmt: skip
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        x = self.shared(x + self.first(x))
        return self.head(self.shared(x + self.second(x)))


def kl(wanted, given):
    wanted, given = wanted.double().log_softmax(-1), given.double().log_softmax(-1)
    return (wanted.exp() * (wanted - given)).sum(-1).mean().item()


@torch.no_grad()
def test_what_returns_is_that_of_a_network_with_the_originals_values_put_in():
    torch.manual_seed(0)
    model = Residual().double().eval()
    for parameter in model.parameters():
        parameter.mul_(3)
    other = copy.deepcopy(model)
    for part in (other.first, other.second):
        part[1] = nn.ReLU()
        part[2].weight.mul_(1.1)
    x = torch.randn(50, 6, dtype=torch.float64)
    shared, head = model.shared, model.head
    first, second = model.first(x), model.second(shared(x + model.first(x)))
    middle = shared(x + first)  # of the original
    wanted = model(x)
    whole = kl(wanted, other(x))
    after = head(shared(middle + other.second(middle)))
    mine = shared(x + other.first(x))
    expected = [
        whole - kl(wanted, after),
        whole - kl(wanted, head(shared(mine + second))),
        whole - kl(wanted, head(shared(middle + second))),
        whole,  # both runs of the shared map as they are in the original
    ]
    layers = [["first.2"], ["second.2"], ["first.2", "second.2"], ["shared"]]
    found = returned_by_layer(model, other, layers, [Batch(x[:30]), Batch(x[30:])])
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert max(found) > 1e-3
    assert returned_by_layer(model, other, layers, []) is None


class InPlace(nn.Module):
    """What is behind the layer overwrites its output."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 5)
        self.last, self.head = nn.SiLU(inplace=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.last(self.down(self.act(self.up(x)))).mul_(2))


@torch.no_grad()
def test_what_returns_is_the_layers_output_not_what_is_written_over_it():
    torch.manual_seed(0)
    model = InPlace().double().eval()
    other = copy.deepcopy(model)
    other.act = nn.ReLU()
    other.head.weight.mul_(1.1)
    x = torch.randn(50, 6, dtype=torch.float64)
    wanted = model(x)
    given = other.head(nn.functional.silu(model.down(model.act(model.up(x)))) * 2)
    expected = kl(wanted, other(x)) - kl(wanted, given)
    assert returned_by_layer(model, other, [["down"]], [Batch(x)]) == pytest.approx([expected], rel=1e-6)
    assert abs(expected) > 1e-4


def test_the_report_has_what_returns_where_the_scale_is_the_originals():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 9), nn.SiLU(), nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    rows = torch.randn(400, 6)
    converted, report = convert_to_relu(model, rows)
    folds = deal_folds(read_batches(rows))
    (batch,) = some_held_out(folds)
    assert len(batch) == folds.held_out_units  # few: all of them
    with torch.no_grad():
        wanted = model(batch.inputs)
        given = converted[3:](model[:3](batch.inputs))
        whole = kl(wanted, converted(batch.inputs))
    assert [layer.returns for layer in report.layers] == pytest.approx([whole - kl(wanted, given), whole], rel=1e-4)
    assert report.next_step[0] == "place"
    report = convert_to_relu(model, rows, effort="place").report
    assert report.steps[-1].is_kept
    assert report.layers[0].returns is None  # its outputs now have the scale of the second gate's slopes
    assert report.layers[1].returns is not None
    assert report.next_step[0] == "blocks"


def test_the_time_left_is_that_of_the_rung_and_of_all_behind_it():
    progress = Progress(shown=False)
    progress.plan(("refit", "place", "blocks"))
    place, blocks = RUNGS["place"].usual_time, RUNGS["blocks"].usual_time
    assert progress.left("refit", 3.0, 0.25) == pytest.approx(9 + 12 * (place + blocks))
    progress.took("refit", 10.0)
    refit = (10 + 26 / place) / 2  # by what both took
    assert progress.left("place", 13.0, 0.5) == pytest.approx(13 + refit * blocks)
    assert progress.left("blocks", 5.0, 0.5) == pytest.approx(5.0)
    steps = [StepTaken("refit", 0.1, True, 10.0), StepTaken("place", 0.1, True, 20 * place)]
    assert next_rung(steps, ("refit", "place", "blocks"))[:2] == ("blocks", pytest.approx(15 * blocks))
    assert next_rung(steps, ("refit", "place")) is None
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tqdm.std.tqdm.set_postfix_str", lambda bar, text, refresh: said.append(text))
        bar = Progress(shown=True).bar("refit", 4)
        bar.set_postfix_str("h.0")
        bar.update(2)
        bar.set_postfix_str("h.1")
        bar.close()
    assert said[0] == "h.0"
    assert said[1].startswith("h.1, about 00:0")
    assert said[1].endswith(" left in all")


class BatchNormed(nn.Module):
    """A convolution without a bias whose constant is in the BatchNorm behind it; with `skip` behind a sum."""

    def __init__(self, skip):
        super().__init__()
        torch.manual_seed(0)
        self.skip = skip
        self.c1, self.b1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.act = nn.GELU()
        self.c2, self.b2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.b1(self.c1(x))
        inner = self.c2(self.act(x))
        return self.tail(self.b2(inner + x if self.skip else inner))

    def tail(self, x):
        return self.head(x.flatten(2).tanh().mean(-1) * 10)


@pytest.mark.parametrize("skip", [False, True])
def test_a_constant_that_is_in_the_batchnorm_behind_returns_with_its_map(skip):
    model = BatchNormed(skip)
    with torch.no_grad():
        for _ in range(20):
            model.train()(torch.randn(64, 3, 6, 6))
    model.eval()
    rows = torch.randn(300, 3, 6, 6)
    converted, report = convert_to_relu(model, rows)
    assert not torch.equal(converted.b2.bias, model.b2.bias)
    (layer,) = report.layers
    assert layer.layers == ("c2",)
    if skip:  # the BatchNorm gives what came by the skip, too
        assert layer.returns is None
        return
    with torch.no_grad():
        inputs = torch.cat([batch.inputs for batch in some_held_out(deal_folds(read_batches(rows)))])
        whole = kl(model(inputs), converted(inputs))
        behind = torch.randn(4, 8, 6, 6)
        assert torch.equal(model.tail(behind), converted.tail(behind))
    assert layer.returns == pytest.approx(whole, rel=1e-4)  # all of it: behind the two nothing differs


class Functional(nn.Module):
    """Uses the weights of its second layer in a function."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down, self.last, self.head = (
            nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4)
        )  # fmt: skip

    def forward(self, x):
        x = nn.functional.linear(self.act(self.up(x)), self.down.weight, self.down.bias)
        return self.head(self.last(x * 2)) * 3


def test_of_a_module_that_is_not_called_nothing_is_said():
    report = convert_to_relu(Functional().eval(), torch.randn(300, 6)).report
    assert {layer.layers: layer.returns is None for layer in report.layers} == {("down",): True, ("head",): False}
    assert re.search(r"\| `down` \| refit \|.* \| – \| 32 \|", render_markdown(report))
    assert "so much would go" not in str(report)
