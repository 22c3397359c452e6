"""Verified robustness against radii that are known exactly, and against dense grids."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hf_lgelu.activation.module import LambdaGELU
from hf_lgelu.analysis.verification import marabou, robustness
from hf_lgelu.analysis.verification.marabou import MarabouNetwork, UnreadableNetworkError, marabou_refusal
from hf_lgelu.analysis.verification.robustness import find_adversarial, verify_robustness

MARGIN = 1e-4
EXPORTS: dict = {}


@pytest.fixture(autouse=True)
def _each_network_is_exported_once(monkeypatch):
    """The same network again, from memory: an export takes longer than most proofs."""
    export = marabou.export_onnx

    def from_memory(model, path, inputs, **options):
        state = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        key = (repr(model), state, tuple(inputs.shape))
        if key not in EXPORTS:
            export(model, path, inputs, **options)
            EXPORTS[key] = Path(path).read_bytes()
        Path(path).write_bytes(EXPORTS[key])

    monkeypatch.setattr(marabou, "export_onnx", from_memory)


def linear(weight, bias):
    weight, bias = torch.tensor(weight), torch.tensor(bias)
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight, bias
    return layer


def affine():
    """Leads over class 0: class 1 by −1 + x0 − 3·x1, class 2 by −4 + x1. From 0 the radius is 1/4."""
    return nn.Sequential(linear([[0.0, 0.0], [1.0, -3.0], [0.0, 1.0]], [0.0, -1.0, -4.0]))


def diamond():
    """Class 1 where |x0| + |x1| > 1, else class 0."""
    corners = linear([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], [0.0] * 4)
    return nn.Sequential(corners, nn.ReLU(), linear([[0.0] * 4, [1.0] * 4], [1.0, 0.0]))


def verify(model, inputs, labels, epsilons, **options):
    inputs, labels = torch.tensor(inputs), torch.tensor(labels)
    return verify_robustness(model, inputs, labels, epsilons=epsilons, margin=MARGIN, **options)


def statuses(report):
    return [(result.index, result.epsilon, result.status) for result in report.results]


# (0.2, 0.1) leaves the diamond at (1 − 0.3)/2. (2, 0.5) enters it at 1: the second |x| is 0 from 0.5 on.
RADII = {
    affine: [([0.0, 0.0], 0, 0.25)],
    diamond: [([0.2, 0.1], 0, 0.35), ([2.0, 0.5], 1, 1.0), ([-0.75, -1.5], 1, 0.625)],
}


@pytest.mark.parametrize("restarts", [0, 5], ids=["solver alone", "attack first"])
@pytest.mark.parametrize("build", RADII)
def test_proved_just_below_the_exact_radius_and_refuted_just_above(build, restarts):
    points, labels, radii = zip(*RADII[build], strict=True)
    epsilons = [factor * radius for radius in radii for factor in (1.001, 0.999)]
    report = verify(build(), points, labels, epsilons, attack_restarts=restarts, attack_steps=100)
    assert statuses(report) == [
        (index, epsilon, "refuted" if epsilon > radius else "proved")
        for epsilon in epsilons
        for index, radius in enumerate(radii)
    ]
    for result in report.results:
        if result.status == "proved":
            assert result.by in ("bounds", "search")
            assert result.counterexample is None
            assert result.other_class is None
            continue
        assert result.by in (("search",) if restarts == 0 else ("attack", "search"))
        found, point = result.counterexample, torch.tensor(points[result.index])
        assert found.dtype == torch.float32
        assert found.shape == (2,)
        assert (found.double() - point.double()).abs().max() <= result.epsilon
        assert build()(found[None]).argmax().item() == result.other_class == 1 - labels[result.index]


def test_answers_are_counted_and_told():
    report = verify(diamond(), [[0.2, 0.1], [2.0, 0.5]], [0, 1], [1.2, 0.4], attack_restarts=0)
    first, second, third = str(report).splitlines()
    assert first.endswith("up to a lead of 0.0001?")
    assert "ε = 1.2: 2 refuted of 2 in " in second
    assert "ε = 0.4: 1 proved, 1 refuted of 2 in " in third
    assert report.count(1.2, "refuted") == report.count(1.2, "refuted", "search") == 2
    assert report.count(0.4, "refuted", "search") == 1
    assert report.count(0.4, "proved") == 1
    assert report.count(0.4, "refuted", "attack") == report.count(0.4, "timeout") == 0
    with pytest.raises(ValueError, match=r"epsilon must be one of 1\.2, 0\.4, got 0\.3"):
        report.count(0.3, "proved")
    with pytest.raises(ValueError, match=r"status must be one of proved, refuted, .*, got 'Proved'"):
        report.count(0.4, "Proved")
    narrow = verify(diamond(), [[0.1, 0.0]], [0], torch.tensor([0.4]), attack_restarts=0)
    assert narrow.count(0.4, "proved") == 1  # 0.4 in float32 is 0.4000000059604645


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_network_that_works_in_place_is_asked_about_the_inputs_given(restarts):
    """With the ReLU of 0.3 and −5 the radius would be another one: it is 0.7, of |x0| alone."""
    model = nn.Sequential(nn.ReLU(inplace=True), linear([[0.0, 0.0], [1.0, 1.0]], [1.0, 0.0]))
    given = torch.tensor([[0.3, -5.0]])
    report = verify_robustness(
        model, given, torch.tensor([0]), epsilons=[0.6, 0.8], margin=MARGIN, attack_restarts=restarts
    )
    assert [result.status for result in report.results] == ["proved", "refuted"]
    assert given.tolist() == [[torch.tensor(0.3).item(), -5.0]]
    found = report.results[1].counterexample  # in the ball around the input, and of the other class there
    assert (found - torch.tensor([0.3, -5.0])).abs().max() <= 0.8 + 1e-6
    assert found.clamp(min=0.0).sum() > 1


@pytest.mark.parametrize("seed", range(2))
def test_a_random_network_as_a_dense_grid_has_it(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    points = torch.randn(4, 2) * 2
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(2)
        labels = model(points).argmax(-1)
    epsilons = (0.05, 0.3, 1.5)
    report = verify_robustness(model, points, labels, epsilons=epsilons, margin=MARGIN, attack_restarts=0)
    expected = [grid_answer(model, points[r.index], labels[r.index], r.epsilon) for r in report.results]
    decided = [(result.status, answer) for result, answer in zip(report.results, expected, strict=True) if answer]
    assert len(decided) >= 9
    assert len({answer for _, answer in decided}) == 2
    assert all(status == answer for status, answer in decided)


@torch.no_grad()
def grid_answer(model, point, label, epsilon, steps=301):
    """What a grid and the Lipschitz constant allow to say; None in between."""
    double = nn.Sequential(*(nn.Linear(m.in_features, m.out_features).double() if isinstance(m, nn.Linear) else m
                             for m in model))  # fmt: skip
    double.load_state_dict(model.state_dict())
    axis = torch.linspace(-epsilon, epsilon, steps, dtype=torch.float64)
    scores = double(point.double() + torch.cartesian_prod(axis, axis))
    others = torch.arange(3) != label
    lead = (scores[:, others].amax(1) - scores[:, label]).max().item()
    lipschitz = 2.0  # of a difference of two scores, in the L∞ norms
    for layer in double[::2]:
        lipschitz *= layer.weight.abs().sum(1).max().item()
    if lead > 2 * MARGIN:
        return "refuted"
    return "proved" if lead + lipschitz * epsilon / (steps - 1) < 0 else None


def test_scale_and_valid_range_bound_each_feature():
    scale = torch.tensor([2.0, 0.0])  # the second cannot move, and the radius is 1/(2·1)
    report = verify(affine(), [[0.0, 0.0]], [0], [0.49, 0.51], scale=scale, attack_restarts=0)
    assert [result.status for result in report.results] == ["proved", "refuted"]
    assert report.results[1].counterexample[1] == 0
    # x0 up to 0.2 leaves 0.8 for −3·x1: x1 down to −0.2667.
    for lowest, status, restarts in ((-0.26, "proved", 0), (-0.27, "refuted", 0), (-0.27, "refuted", 5)):
        ends = (torch.tensor([-1.0, lowest]), torch.tensor([0.2, 3.0]))  # x1 below 4: class 2 stays behind
        report = verify(affine(), [[0.0, 0.0]], [0], [5.0], input_range=ends, attack_restarts=restarts)
        assert report.results[0].status == status
    found = report.results[0].counterexample.double()
    assert (found >= ends[0].double()).all()
    assert (found <= ends[1].double()).all()


def test_a_range_that_misses_the_input_reaches_to_it():
    report = verify(affine(), [[0.0, 0.0]], [0], [5.0], input_range=(1.0, 1.0), attack_restarts=0)
    assert report.results[0].status == "proved"  # [0, 1]²: the lead is at most 0, at (1, 0)
    with_room = verify(affine(), [[0.0, 0.0]], [0], [5.0], input_range=(1.0, 1.1), attack_restarts=0)
    assert with_room.results[0].status == "refuted"
    below = verify(affine(), [[0.0, 0.0]], [0], [5.0], input_range=(-0.34, -0.34), attack_restarts=0)
    assert below.results[0].status == "refuted"  # at (0, −0.34), not at (−0.34, −0.34)


def test_images_keep_their_shape():
    weight = torch.tensor([[0.0] * 8, [1.0, -1.0] * 4])
    model = nn.Sequential(nn.Flatten(), linear(weight.tolist(), [0.0, -2.0]))  # radius 2/8
    images = torch.zeros(1, 2, 2, 2)
    report = verify_robustness(model, images, torch.tensor([0]), epsilons=[0.249, 0.251], attack_restarts=0)
    assert [result.status for result in report.results] == ["proved", "refuted"]
    assert report.results[1].counterexample.shape == (2, 2, 2)
    assert torch.equal(report.results[1].counterexample.flatten() > 0, weight[1] > 0)


def test_an_input_of_another_class_is_not_asked_about(monkeypatch):
    monkeypatch.setattr(MarabouNetwork, "score_lead_bounds", None)
    report = verify(diamond(), [[2.0, 0.5]], [0], [0.1])
    assert statuses(report) == [(0, 0.1, "misclassified")]


@pytest.mark.parametrize(
    ("answer", "status"), [("sat", "unconfirmed"), ("TIMEOUT", "timeout"), ("QUIT_REQUESTED", "unknown")]
)
def test_what_is_not_settled_counts_as_neither(monkeypatch, answer, status):
    harmless = np.array([0.2, 0.1])

    def find_lead(self, *args):
        return answer, harmless if answer == "sat" else None

    monkeypatch.setattr(MarabouNetwork, "find_lead", find_lead)
    report = verify(diamond(), [[0.2, 0.1]], [0], [0.5], attack_restarts=0)
    assert statuses(report) == [(0, 0.5, status)]
    assert (report.results[0].counterexample is not None) == (status == "unconfirmed")


def rounding(threshold):
    """Class 1 where x > threshold; in float32, which has steps of 8 at 1e8, where x rounds to more than it."""
    return nn.Sequential(
        linear([[1.0], [0.0]], [1e8, threshold]), nn.Identity(), linear([[0.0, 1.0], [1.0, 0.0]], [0.0, -1e8])
    )


@pytest.mark.parametrize(("threshold", "point"), [(5.0, 4.5), (2.0, 3.0)])
def test_float32_and_float64_must_agree(monkeypatch, threshold, point):
    """4.5 rounds to 8, above 5; 3 rounds to 0, below 2: one precision has another class, and the other has not."""
    either = verify(rounding(threshold), [[point]] * 2, [0, 1], [0.1])
    assert statuses(either) == [(0, 0.1, "misclassified"), (1, 0.1, "misclassified")]
    monkeypatch.setattr(robustness, "find_adversarial", lambda *args, **options: torch.tensor([point]))
    monkeypatch.setattr(MarabouNetwork, "score_lead_bounds", lambda *args: {1: np.inf})
    monkeypatch.setattr(MarabouNetwork, "find_lead", lambda *args: ("sat", np.array([point])))
    (result,) = verify(rounding(threshold), [[0.0]], [0], [10.0]).results
    assert (result.status, result.by) == ("unconfirmed", "search")


def test_a_lead_below_the_margin_is_not_excluded():
    # Class 1 leads affine() by −1 + 4ε at most: 0.48 at 0.37 and 0.52 at 0.38.
    inputs, label = torch.zeros(1, 2), torch.tensor([0])
    report = verify_robustness(affine(), inputs, label, epsilons=[0.37, 0.38], margin=0.5, attack_restarts=0)
    assert [result.status for result in report.results] == ["proved", "refuted"]


def test_the_attack_starts_at_the_input_and_then_where_the_seed_says():
    def attack(start, restarts, seed, radius=1.0):
        start = torch.tensor(start)
        return find_adversarial(
            diamond(), start - radius, start + radius, start, 0, steps=0, restarts=restarts, seed=seed
        )

    assert attack([2.0, 0.5], 1, 0).tolist() == [2.0, 0.5]
    assert attack([0.2, 0.1], 1, 0) is None
    first, again, other = (attack([0.2, 0.1], 20, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_solver_stops_when_the_time_is_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
    inputs = torch.randn(1, 30)
    label = model(inputs).argmax(-1)
    report = verify_robustness(model, inputs, label, epsilons=[0.06], timeout_seconds=0.5, attack_restarts=0)
    assert report.results[0].status == "timeout"
    assert report.results[0].by is None
    assert 0.5 <= report.results[0].seconds < 8


def test_the_attack_finds_what_lies_behind_a_plateau_and_stays_in_the_box():
    center, radius = torch.tensor([0.2, 0.1]), 0.4
    found = find_adversarial(diamond(), center - radius, center + radius, center, 0, steps=40, restarts=3, seed=0)
    assert found.abs().sum() > 1
    assert (found - center).abs().max() <= radius + 1e-6
    tight = find_adversarial(diamond(), center - 0.34, center + 0.34, center, 0, steps=40, restarts=3, seed=0)
    assert tight is None


@pytest.mark.parametrize(
    ("gate", "named"), [(nn.GELU(), "gelu"), (LambdaGELU(), "lambda|erf|gelu"), (nn.SiLU(), "silu")]
)
def test_smooth_networks_are_refused_by_name_and_by_marabou_itself(gate, named):
    model = nn.Sequential(nn.Linear(2, 4), gate, nn.Linear(4, 2))
    with pytest.raises(ValueError, match=rf"(?is)is smooth.*no GELU.*1 \({type(gate).__name__}\).*({named}).*harden"):
        verify(model, [[0.0, 0.0]], [0], [0.1])
    assert "Marabou cannot read the network" in marabou_refusal(model, torch.zeros(1, 2))


def test_sigmoid_is_smooth_and_not_refused():
    model = nn.Sequential(linear([[1.0]], [0.0]), nn.Sigmoid(), linear([[0.0], [1.0]], [0.75, 0.0]))
    assert marabou_refusal(model, torch.zeros(1, 1)) is None
    radius = float(np.log(3))  # sigmoid(log 3) = 0.75
    report = verify(model, [[0.0]], [0], [0.99 * radius, 1.01 * radius], attack_restarts=0)
    assert [result.status for result in report.results] == ["proved", "refuted"]


def test_nothing_is_printed(capfd):
    verify(diamond(), [[0.2, 0.1]], [0], [0.3, 0.4], attack_restarts=0)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == ""


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Dropout(0.999), *diamond()).train()  # in training, it would lose the input
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = verify(model, [[2.0, 0.5]], [1], [0.3])
    assert statuses(report) == [(0, 0.3, "proved")]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.dtype == torch.float32 and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("package", ["maraboupy.Marabou", "onnx", "onnxscript", "onnxruntime"])
def test_an_absent_package_names_the_extra(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'hf-lgelu\[verify\]'"):
        verify(diamond(), [[0.2, 0.1]], [0], [0.1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inputs": torch.zeros(1, 2, dtype=torch.float64)}, TypeError, "float32"),
        ({"inputs": torch.zeros(2)}, ValueError, r"\(N, \.\.\.\)"),
        ({"labels": torch.tensor([0, 1])}, ValueError, r"labels \(N,\)"),
        ({"epsilons": []}, ValueError, "one or more"),
        ({"epsilons": [-0.1]}, ValueError, "at least 0"),
        ({"epsilons": [float("nan")]}, ValueError, "finite"),
        ({"epsilons": ["0.1"]}, TypeError, "epsilons must be numbers"),
        ({"epsilons": [None]}, TypeError, "epsilons must be numbers"),
        ({"epsilons": True}, TypeError, "epsilons must be numbers"),
        ({"margin": 0.0}, ValueError, "margin must be a finite number above 0, got 0"),
        ({"margin": float("inf")}, ValueError, "margin must be a finite number above 0, got inf"),
        ({"margin": float("nan")}, ValueError, "margin must be a finite number above 0, got nan"),
        ({"timeout_seconds": float("inf")}, ValueError, "timeout_seconds must be a finite number"),
        ({"attack_steps": -1}, ValueError, "attack_steps must be at least 0, got -1"),
        ({"attack_restarts": -1}, ValueError, "attack_restarts must be at least 0, got -1"),
        ({"attack_steps": 2.5}, TypeError, "attack_steps must be an integer"),
        ({"inputs": [[0.0, 0.0]]}, TypeError, "inputs must be a torch Tensor, got list"),
        ({"model": "model.onnx"}, TypeError, "model must be a torch Module, got str"),
        ({"labels": ["a"]}, TypeError, "labels must be integers"),
        ({"labels": torch.tensor([True])}, ValueError, "labels must be integers, .* got torch.bool"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds"),
        ({"inputs": torch.tensor([[0.0, float("nan")]])}, ValueError, "inputs must be finite"),
        ({"scale": -1.0}, ValueError, "scale must be finite and at least 0, got -1 to -1"),
        ({"scale": torch.tensor([1.0, float("nan")])}, ValueError, "scale must be finite"),
        ({"input_range": (1.0, torch.tensor([2.0, 0.0]))}, ValueError, "lowest at most highest"),
        ({"labels": torch.tensor([0.5])}, ValueError, "labels must be integers, .* got torch.float32"),
        ({"labels": torch.tensor([2])}, ValueError, "labels must be 0 to 1, .* got 2 to 2"),
        ({"model": nn.Linear(2, 1)}, ValueError, r"at least 2 classes, \(batch, classes\), got \(1, 1\)"),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    arguments = {"model": diamond(), "inputs": torch.zeros(1, 2), "labels": torch.tensor([0]), "epsilons": [0.1]}
    with pytest.raises(error, match=message):
        verify_robustness(**(arguments | change))


@pytest.mark.parametrize(
    ("epsilons", "labels"),
    [
        (0.05, [0]),
        (torch.tensor([0.05]), np.array([0], np.int32)),
        (np.array(0.05), torch.tensor([0], dtype=torch.uint8)),
    ],
)
def test_numbers_in_other_clothes_say_the_same(epsilons, labels):
    report = verify_robustness(diamond(), torch.tensor([[0.2, 0.1]]), labels, epsilons=epsilons, attack_restarts=0)
    assert [(result.status, result.by) for result in report.results] == [("proved", "bounds")]
    assert report.results[0].epsilon == pytest.approx(0.05)


def test_tanh_is_read_as_the_network_that_it_is():
    """tanh(x) reaches 0.5 at artanh(0.5)."""
    model = nn.Sequential(linear([[1.0]], [0.0]), nn.Tanh(), linear([[0.0], [1.0]], [0.5, 0.0]))
    radius = float(np.arctanh(0.5))
    report = verify(model, [[0.0]], [0], [0.99 * radius, 1.01 * radius], attack_restarts=0)
    assert [result.status for result in report.results] == ["proved", "refuted"]


def test_silu_spelled_out_is_refused_in_words_that_help():
    class Spelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x):
            x = self.first(x)
            return self.second(x * torch.sigmoid(x))

    said = r"(?s)no product with another computed value.*the model itself \(Spelled\): sigmoid × 1.*substitute_relu"
    with pytest.raises(UnreadableNetworkError, match=said):
        verify(Spelled().eval(), [[0.0, 0.0]], [0], [0.1])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_prove_nothing(number):
    model = diamond()
    model[0].weight.data[0, 0] = number
    with pytest.raises(ValueError, match=r"0\.weight holds NaN or infinity; look at the model's weights"):
        verify(model, [[0.2, 0.1]], [0], [0.3])
    model = nn.Sequential(diamond(), nn.BatchNorm1d(2)).eval()
    model[1].running_mean[0] = number
    with pytest.raises(ValueError, match=r"1\.running_mean holds NaN or infinity"):
        verify(model, [[0.2, 0.1]], [0], [0.3])


def test_scores_are_found_by_key_as_by_attribute():
    class Named(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.network, self.wrap = diamond(), wrap

        def forward(self, x):
            return self.wrap(self.network(x))

    report = verify(Named(lambda scores: {"logits": scores}), [[0.2, 0.1]], [0], [0.34, 0.36], attack_restarts=0)
    assert [result.status for result in report.results] == ["proved", "refuted"]
    with pytest.raises(TypeError, match="a tensor or an output with `logits`, got dict"):
        verify(Named(lambda scores: {"scores": scores}), [[0.2, 0.1]], [0], [0.3])
