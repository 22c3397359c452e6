"""Recordings of forward passes, replayed with other inputs and gates, against the networks themselves."""

import weakref
from collections import ChainMap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lgelu.graph.recorder import operation_name
from hf_lgelu.graph.recording import Recording, Recordings, all_tensors, gates_of
from hf_lgelu.networks.sites import find_sites


class Wired(nn.Module):
    """A gate between two linear maps, and code of a test's own in between."""

    def __init__(self, code):
        super().__init__()
        self.up, self.act, self.down, self.code = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), code
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        return self.down(self.act(self.code(self, self.up(x))))


def zero_a_column(net, h):
    h[:, 0] = 0
    return h


def through_views(net, h):
    halves = h.view(-1, 2, 4)
    halves[:, 1].mul_(2)
    h.t()[3] = 7
    first, second = h.chunk(2, -1)
    second.add_(first)
    return h


def into_a_given_tensor(net, h):
    out = torch.empty_like(h)
    torch.mul(h, 3, out=out)
    return out


def with_masks(net, h):
    mask = h[:, 0] > 0
    mask |= h[:, 1] > 0
    h[mask] = 0.5
    return h.masked_fill_(h > 1, -1)


def in_another_dtype(net, h):
    return h.add_(torch.ones(8, dtype=torch.float64)) + h.double().float()


def by_strides(net, h):
    h.as_strided((2, 2), (8, 1)).fill_(3)
    return h + h.expand(len(h), 8)


def by_weight_data(net, h):
    return h + F.linear(h[:, :4], net.up.weight.data)


def by_index(net, h):
    h[torch.tensor([0, 2])] = 1.5
    return h.index_add_(0, torch.tensor([0, 0, 1, 2, 2, 3]), h.clone()).scatter_(1, torch.zeros(6, 1).long(), 9.0)


def a_diagonal(net, h):
    h.diagonal().zero_()
    return h


def through_overlapping_views(net, h):
    first, second = h[:, :5], h[:, 3:]
    first.add_(1)
    second.mul_(2)
    return h + F.pad(first, (0, 3)) + F.pad(second, (3, 0))


def before_and_after(net, h):
    before = h * 1
    h.relu_()
    return h + before


def several_given_tensors(net, h):
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(h, dim=1, out=(values, places))
    return values + places


def a_copy_in_another_dtype(net, h):
    kept = torch.zeros(h.shape, dtype=torch.float64)
    kept.copy_(h)
    return kept.float()


def a_row_into_all(net, h):
    return h.copy_(h[0].clone())


def nothing(net, h):
    return F.dropout(h, 0.5, training=False, inplace=True)


def in_a_loop(net, h):
    out = h.new_zeros(h.shape)
    for place in range(h.shape[1]):
        out[:, place] = h[:, : place + 1].sum(1)
    return out


WRITING = [
    zero_a_column, through_views, into_a_given_tensor, with_masks, in_another_dtype, by_strides, by_weight_data,
    by_index, a_diagonal, through_overlapping_views, before_and_after, several_given_tensors, a_copy_in_another_dtype,
    a_row_into_all, nothing, in_a_loop,
]  # fmt: skip


def replay(recording, model, x, gates=None):
    """The outputs for other inputs of the recorded shape, with the weights and gates of `model`."""
    values = recording.bind(x, torch.device("cpu"))
    gates = [site.module for site in find_sites(model)] if gates is None else gates
    recording.run(recording.operations, values, {}, recording.weights(model), gates_of(gates))
    (output,) = recording.graph.find_nodes(op="output")
    return [ChainMap(values, recording.weights(model), recording.values)[node] for node in output.args[0]]


@pytest.mark.parametrize("code", WRITING)
def test_what_is_written_in_place_is_there_with_other_inputs_weights_and_gates(code):
    torch.manual_seed(0)
    model, other = Wired(code).eval(), Wired(code).eval()
    other.act = nn.ReLU()
    recording = Recording(model, find_sites(model), torch.randn(6, 4))
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(replay(recording, model, x)[0], model(x))
        by_relu = replay(recording, other, x, [other.act])[0]
        torch.testing.assert_close(by_relu, other(x))
    assert not any(node.target is torch.ops.aten.copy_.default for node in recording.operations)


def test_maps_norms_and_attention_are_whole():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    recording = Recording(model, find_sites(model), torch.randn(3, 5, 8))
    names = [operation_name(node) for node in recording.operations]
    assert {"linear", "layer_norm", "scaled_dot_product_attention", "activation_site"} <= {*names}
    assert not {"addmm", "gelu", "_transformer_encoder_layer_fwd"} & {*names}


def test_a_network_with_one_linear_weight_under_two_names_is_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert Recording(model, find_sites(model), torch.randn(2, 4)).tied == {"0.weight"}


def test_random_numbers_are_those_of_the_recorded_run():
    model = Wired(lambda net, h: h + torch.rand(8) + torch.randn_like(h).mul_(0.1)).eval()
    x = torch.randn(5, 4)
    recording = Recording(model, find_sites(model), x)
    first, second = replay(recording, model, x)[0], replay(recording, model, x)[0]
    assert torch.equal(first, second)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        torch.testing.assert_close(first, model(x))


@pytest.mark.parametrize(
    ("code", "of_batch", "decided"),
    [
        (lambda net, h: h, False, False),
        (lambda net, h: h * int(h.sum() > 0), True, False),
        (lambda net, h: h * len(h.tolist()), True, False),
        (lambda net, h: h * float(net.up.weight.abs().max()), False, False),
        (lambda net, h: h * (1 + int(net.act(h).sum() > 1e9)), True, True),
    ],
)
def test_reads_by_python_are_known(code, of_batch, decided):
    model = Wired(code).eval()
    recording = Recording(model, find_sites(model), torch.randn(5, 4))
    assert recording.belongs_to_batch is of_batch
    assert (recording.decided_from < float("inf")) is decided


def test_buffers_that_a_forward_pass_writes_into_stay():
    model = Wired(lambda net, h: h + net.calls.add_(1)).eval()
    recording, x = Recording(model, find_sites(model), torch.randn(5, 4)), torch.randn(5, 4)
    assert torch.equal(model.calls, torch.zeros(1))
    found = replay(recording, model, x)[0]
    with torch.no_grad():
        torch.testing.assert_close(found, model(x))


def test_a_failing_model_raises_its_own_error_and_is_as_before():
    def fail(net, h):
        raise KeyError("no such layer")

    model = Wired(fail).train()
    model.down.eval()
    with pytest.raises(KeyError, match="no such layer"):
        Recording(model, find_sites(model), torch.randn(5, 4))
    assert isinstance(model.act, nn.GELU)
    assert [module.training for module in (model, model.up, model.down)] == [True, True, False]
    assert torch.backends.mha.get_fastpath_enabled()


class Forces(nn.Module):
    """Reads the gradient of an energy, as a model of atoms gives it."""

    def __init__(self, gate):
        super().__init__()
        self.up, self.gate, self.act, self.down = nn.Linear(4, 6), gate, nn.GELU(), nn.Linear(4, 3)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            forces = torch.autograd.grad(self.gate(self.up(x)).sum(), x)[0]
        return self.down(self.act(forces.detach()))


@pytest.mark.parametrize("gate", [nn.GELU(), nn.Identity()])
def test_gradients_inside_a_forward_pass_are_refused_in_words(gate):
    model = Forces(gate)
    with pytest.raises(ValueError, match="Forces takes a gradient inside its forward pass"):
        Recording(model, find_sites(model), torch.randn(5, 4))


class Cached(nn.Module):
    """Keeps a tensor of its first call, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.kept = nn.Linear(4, 4), nn.GELU(), []

    def forward(self, x):
        if not self.kept:
            self.kept.append(torch.arange(4.0).cos())
        return self.act(self.up(x)) * self.kept[0]


def test_what_a_network_keeps_of_the_recorded_run_can_be_trained_with():
    model = Cached()
    Recording(model, find_sites(model), torch.randn(3, 4))
    assert isinstance(model.act, nn.GELU)
    assert not model.kept[0].is_inference()
    model(torch.randn(3, 4)).sum().backward()
    assert model.up.weight.grad is not None


class LiveTensors(TorchDispatchMode):
    """The largest number of large results that live at one time."""

    def __init__(self):
        super().__init__()
        self.live, self.most = weakref.WeakSet(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.numel() == 17 * 64:
            self.live.add(output)
        self.most = max(self.most, len(self.live))
        return output


def test_a_recording_holds_no_more_tensors_where_the_network_is_deeper():
    most = []
    for depth in (3, 12):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth))).eval()
        with LiveTensors() as counted:
            Recording(model, find_sites(model), torch.randn(17, 64))
        most.append(counted.most)
    assert 0 < most[0] == most[1]


class Batch:
    """What `Recordings` asks of a batch of folds."""

    def __init__(self, inputs, number):
        self.inputs, self.numbers, self.shape = inputs, (number,), (number,)

    def load(self):
        return self


def test_batches_that_differ_in_sizes_alone_share_one_recording():
    model = Wired(lambda net, h: h.view(len(h) // 2, 2, 8).flip(1).reshape(len(h), 8)).eval()
    sites = find_sites(model)
    recordings = Recordings(model, sites, all_tensors)
    batches = [Batch(torch.randn(2 * size, 4), size) for size in (2, 3, 5)]
    (recording,) = {recordings.of(batch) for batch in batches}
    for batch in batches:
        values = recording.bind(batch.inputs, torch.device("cpu"))
        with torch.no_grad():
            numbers, weights = recordings.numbers_of(batch), recording.weights(model)
            recording.run(recording.operations, values, numbers, weights, gates_of([model.act]))
            (output,) = recording.graph.find_nodes(op="output")
            torch.testing.assert_close(values[output.args[0][0]], model(batch.inputs))


def test_other_operations_are_another_recording():
    model = Wired(lambda net, h: h if len(h) == 4 else h.neg()).eval()
    recordings = Recordings(model, find_sites(model))
    batches = [Batch(torch.randn(size, 4), size) for size in (4, 5)]
    assert len({recordings.of(batch) for batch in batches}) == 2
