"""Batches that are calls of the model: graphs, lists of graphs, sets, images of any size, several arguments."""

import pytest
import torch
from torch import nn

from hf_lgelu import compare_networks, convert_to_relu
from hf_lgelu.networks.batches import read_batches
from hf_lgelu.refit import carry

NODE, EDGE, DIM, CLASSES = 5, 2, 8, 3


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def mlp(width, out):
    return nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, out))


class Messages(nn.Module):
    """Messages along edges, then scores of classes for each node."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(NODE, DIM)
        self.edge = nn.ModuleList(mlp(2 * DIM + EDGE, DIM) for _ in range(1))
        self.node = nn.ModuleList(mlp(2 * DIM, DIM) for _ in range(1))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, nodes, edges, features):
        x, (sources, ends) = self.first(nodes), edges
        for edge, node in zip(self.edge, self.node, strict=True):
            sent = edge(torch.cat([x[sources], x[ends], features], -1))
            x = x + node(torch.cat([x, torch.zeros_like(x).index_add(0, ends, sent)], -1))
        return self.head(x)


def joined(graphs):
    """One graph of several."""
    edges, before = [], 0
    for graph in graphs:
        edges.append(graph["edges"] + before)
        before = before + len(graph["nodes"])
    nodes, features = (torch.cat([graph[name] for graph in graphs]) for name in ("nodes", "features"))
    return {"nodes": nodes, "edges": torch.cat(edges, 1), "features": features}


class OfLists(Messages):
    """One row a graph, whose nodes are added up as `batch.max() + 1` graphs, as libraries of graphs do it."""

    def __init__(self):
        super().__init__()
        self.last = mlp(CLASSES, 2)

    def forward(self, graphs):
        scores = super().forward(**joined(graphs))
        which = torch.cat([torch.full((len(graph["nodes"]),), number) for number, graph in enumerate(graphs)])
        return self.last(torch.zeros(which.max().item() + 1, CLASSES).index_add(0, which, scores))


class Set(nn.Module):
    """One row for a set of points."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.point, self.whole = mlp(3, 8), mlp(8, CLASSES)

    def forward(self, points):
        return self.whole(self.point(points).amax(0, keepdim=True))


class Images(nn.Module):
    """A row for each image of a list, whatever the sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.maps = nn.Sequential(nn.Conv2d(3, 6, 3), nn.SiLU(), nn.Conv2d(6, 4, 3, stride=2))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, images):
        alike = [nn.functional.interpolate(image[None], size=(12, 12)) for image in images]
        return self.head(self.maps(torch.cat(alike)).mean((2, 3)))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(6, CLASSES)

    def forward(self, left, right):
        return self.net(torch.cat([left, right], -1))


class Dense(nn.Module):
    """A graph as nodes and a square of edges: both count nodes first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = mlp(NODE, DIM), mlp(DIM, CLASSES)

    def forward(self, nodes, adjacency):
        return self.last(adjacency @ self.first(nodes))


def graph(number, nodes=None):
    generator, count = seeded(number), nodes or 9 + number % 7
    edges = 2 * count + number % 5
    return {
        "nodes": torch.randn(count, NODE, generator=generator),
        "edges": torch.randint(count, (2, edges), generator=generator),
        "features": torch.randn(edges, EDGE, generator=generator),
    }


def dense(number):
    nodes = graph(number)["nodes"]
    return {"nodes": nodes, "adjacency": torch.rand(len(nodes), len(nodes), generator=seeded(number)) / len(nodes)}


def points(number):
    return torch.randn(20 + number % 9, 3, generator=seeded(number))


def image(number):
    return torch.randn(3, 12 + number % 5, 11 + number % 3, generator=seeded(number))


CASES = {
    "edges and nodes by name": (Messages, graph),
    "edges and nodes by position": (Messages, lambda number: tuple(graph(number).values())),
    "list of graphs": (OfLists, lambda number: [graph(3 * number + part) for part in range(1 + number % 3)]),
    "graphs and labels": (OfLists, lambda number: ([graph(number), graph(number + 99)], torch.tensor([0, 1]))),
    "adjacency": (Dense, dense),
    "sets": (Set, points),
    "images of all sizes": (Images, lambda number: [image(number), image(number + 99)]),
    "two images of one size": (Images, lambda number: [image(5 * number), image(5 * number)[..., :1].repeat(1, 1, 11)]),
}


# torch.export reasons long about sums of open sizes; graphs by name are converted below
SLOW = ("list of graphs", "graphs and labels", "edges and nodes by name")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_each_batch_is_one_sample(case):
    make, batch = CASES[case]
    batches = [batch(number) for number in range(24)]
    report = convert_to_relu(make().eval(), [*batches, batches[0]]).report
    assert (report.samples, report.distinct_samples, report.held_out.samples) == (25, 24, 4)
    assert report.held_out.refitted.value < report.held_out.direct.value
    assert report.folds == 4
    assert not any(layer.is_unfit for layer in report.layers)


def test_one_recording_serves_graphs_of_all_sizes_and_rows_are_what_the_maps_see(monkeypatch):
    """Of 24 graphs 20 are fitted on: a row for each edge or node, and predictions of nodes in the part held out."""
    looked_at, find = [], carry.find_layers
    monkeypatch.setattr(carry, "find_layers", lambda *given: looked_at.append(given[0]) or find(*given))
    graphs = [graph(number) for number in range(24)]
    report = convert_to_relu(Messages().eval(), graphs).report
    assert len(looked_at) == 1
    edges, nodes = (sum(each[name].shape[-1 - (name == "nodes")] for each in graphs) for name in ("edges", "nodes"))
    assert report.rows == edges
    behind = {layer.layers[0].split(".")[0]: layer.rows for layer in report.layers}
    assert set(behind) == {"edge", "node"}
    assert edges * 0.7 < behind["edge"] < edges
    assert behind["node"] + report.held_out.rows == nodes
    assert report.warnings == ()


def test_fewer_than_16_graphs_are_fitted_on_and_none_is_held_out():
    report = convert_to_relu(Messages().eval(), [graph(number) for number in range(12)]).report
    assert (report.held_out, report.samples, report.folds) == (None, 12, 1)
    assert report.rows > 200
    assert "16 inputs or more" in report.warnings[0]


def test_two_tensors_by_position_are_split_like_one():
    left, right = torch.randn(2, 200, 3, generator=seeded())
    report = convert_to_relu(Two().eval(), [(left, right)]).report
    named = convert_to_relu(Two().eval(), {"left": left, "right": right}).report
    assert (report.samples, report.rows, report.held_out.samples) == (200, 200, named.held_out.samples)
    assert report.held_out.refitted.value == pytest.approx(named.held_out.refitted.value, rel=0.5)


def test_images_of_other_sizes_in_each_batch_are_samples_that_run_alone():
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batches = [torch.randn(4, 3, 10 + size, 12, generator=seeded(size)) for size in range(6)]
    report = convert_to_relu(net.eval(), batches).report
    assert (report.samples, report.distinct_samples, report.held_out.samples) == (24, 24, 4)
    assert report.held_out.refitted.value < report.held_out.direct.value


def test_a_second_set_and_compare_take_such_batches():
    graphs = [graph(number) for number in range(40)]
    original = Messages().eval()
    labelled = [each | {"labels": original(**each).argmax(-1)} for each in graphs]
    model, report = convert_to_relu(original, labelled[:20], evaluation_data=labelled[18:])
    assert (report.evaluation.samples, report.repeated) == (22, 2)
    assert report.evaluation.rows == sum(len(each["nodes"]) for each in graphs[18:])
    assert report.evaluation.original_metrics == {"accuracy": 1.0}
    comparison = compare_networks(original, model, graphs[20:])
    assert comparison.samples == 20
    assert comparison.rows[1].distance.kl == pytest.approx(report.evaluation.refitted.kl, rel=0.5)
    with pytest.raises(ValueError, match="int8"):
        compare_networks(original, model, graphs, int8=True)


def test_what_no_form_fits_is_refused_with_the_form_that_came():
    with pytest.raises(ValueError, match=r"Messages.*\(tuple of 3: a tensor \(18, 2\) float32, .*9, 5\)"):
        convert_to_relu(Messages().eval(), [tuple(graph(0).values())[::-1]])


@pytest.mark.parametrize(
    ("raw", "inputs", "is_sample"),
    [
        ((torch.ones(4, 2), torch.ones(4)), "tensor", False),
        ((torch.ones(4, 2), torch.ones(3)), "tuple", True),
        ((torch.ones(4, 2), torch.ones(4), torch.ones(4)), "tuple", False),
        ([torch.ones(4, 2), torch.ones(3), torch.ones(4)], "list", True),
        ({"x": torch.ones(4, 2), "y": torch.ones(3)}, "mapping", True),
        ({"x": torch.ones(4, 2), "scale": torch.tensor(1.0)}, "mapping", True),
    ],
)
def test_the_form_is_read_from_shapes_where_no_model_is_asked(raw, inputs, is_sample):
    (batch,) = read_batches([raw])
    assert batch.is_sample == is_sample
    assert len(batch) == (1 if is_sample else 4)
    found = {"tensor": torch.Tensor, "tuple": tuple, "list": tuple, "mapping": dict}[inputs]
    assert isinstance(batch.inputs, found)
    if inputs == "list":
        assert isinstance(batch.inputs[0], list)
