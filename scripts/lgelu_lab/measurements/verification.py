"""Local robustness of the benchmarks' MLPs, by Marabou: what it proves, refutes, leaves open and refuses.

First projected gradient descent looks for a counterexample. Then Marabou, a complete verifier of piecewise-linear
networks, bounds every wrong class's lead over the label symbolically, and searches the classes that the bounds leave
open, the likeliest first. A counterexample is replayed in torch, and counts only if float32 and float64 both give
another class. "Proved" says: in Marabou's arithmetic of the exported graph no wrong class leads the label by the margin
or more anywhere in the ball. It is no proof about float32 rounding, and a lead below the margin is not excluded.
"""

import copy
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu import MLPForClassification, export_onnx
from hf_lgelu.environment import require
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel

PIXEL_RANGE = {"mlp-digits": 16.0, "mlp-fmnist": 255.0}
"""Largest pixel of each benchmark in the units of its preprocessing; the smallest is 0."""

VERIFICATION_COLUMNS: dict[str, str] = {
    "model": "network",
    "epsilon": "radius of the L∞ ball, as a share of the pixels' range (0 to 1); null where the network is refused",
    "refusal": "Marabou's own words on the network's ONNX export; null where it reads it",
    "points": "correctly classified test images asked about, the first in the order of the test split",
    "misclassified": "test images passed over on the way because their class was wrong already",
    "proved": "images with the same class in the whole ball, up to the margin, in the solver's arithmetic",
    "proved_by_bounds": "of these, by symbolic bounds alone, without search",
    "refuted": "images with a counterexample that changes the class in torch, in float32 and float64",
    "refuted_by_attack": "of these, found by projected gradient descent before the solver was asked",
    "unconfirmed": "images with a counterexample of the solver that does not change the class in torch",
    "timeout": "images left open when the time ran out",
    "unknown": "images on which the solver gave up by itself",
    "median_seconds": "time per image, attack and solver together, s",
    "max_seconds": "the longest, s",
}


@dataclass(frozen=True)
class VerificationSettings:
    """What is asked.

    Args:
        epsilons: radii, as shares of the pixels' range.
        points: correctly classified test images.
        timeout_seconds: of the solver, for each image and ε.
        margin: lead of a wrong class, in units of the scores, from which on a point counts as a violation.
        seed: of the attack's random starts.
    """

    epsilons: tuple[float, ...] = (0.002, 0.005, 0.01, 0.02)
    points: int = 20
    timeout_seconds: float = 5.0
    margin: float = 1e-4
    seed: int = 0


STATUSES = ("proved", "refuted", "unconfirmed", "timeout", "unknown")
_STEPS, _RESTARTS, _STEP_FRACTION = 40, 5, 0.25  # of the gradient descent; the last of the box's half width
_SPREADS = (0.1, 1.0, 3.0, 0.1, 1.0, 3.0, 0.1, 1.0)  # of the points at which what Marabou read is held to torch
_ALLOWED = 1e-3  # of a score there


def measure_verification(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: VerificationSettings
) -> list[dict[str, Any]]:
    """A row per network that Marabou reads and ε, and one for each network that it refuses."""
    rows = []
    for name, trained in models.items():
        network = trained.load()
        shared = dict.fromkeys(VERIFICATION_COLUMNS) | {"model": name}
        try:
            verifier = Verifier(network, data.test.features[:1], settings)
        except UnreadableNetworkError as refusal:
            rows.append(shared | {"refusal": str(refusal)})
            continue
        inputs, labels, misclassified = first_correct(network, data, settings.points)
        scale, lowest, highest = pixel_units(data.preprocessing, PIXEL_RANGE[benchmark.name], inputs.shape[1])
        for epsilon in settings.epsilons:
            answers, seconds = [], []
            for features, label in zip(inputs, labels.tolist(), strict=True):
                started = time.perf_counter()
                answers.append(
                    verifier.settle(features, label, *box_around(features, epsilon * scale, lowest, highest))
                )
                seconds.append(time.perf_counter() - started)
            found = [answer[:2] for answer in answers]
            rows.append(
                shared
                | {"epsilon": epsilon, "points": len(found), "misclassified": misclassified}
                | {status: sum(answer.status == status for answer in answers) for status in STATUSES}
                | {
                    "proved_by_bounds": found.count(("proved", "bounds")),
                    "refuted_by_attack": found.count(("refuted", "attack")),
                    "median_seconds": round(statistics.median(seconds), 4),
                    "max_seconds": round(max(seconds), 4),
                }
            )
    return rows


@torch.no_grad()
def first_correct(network: nn.Module, data: BenchmarkData, points: int) -> tuple[Tensor, Tensor, int]:
    """The first `points` test rows of the right class, their labels, and how many wrong ones lie between them.

    Raises ValueError if the test split has fewer.
    """
    features, labels = data.test.features, data.test.labels
    correct = (network(features).logits.argmax(-1) == labels).nonzero().flatten()
    if not 1 <= points <= len(correct):
        raise ValueError(f"points must be 1 to {len(correct)}, the test rows that the network gets right, got {points}")
    chosen = correct[:points]
    return features[chosen], labels[chosen], int(chosen[-1]) + 1 - points


def pixel_units(
    preprocessing: Mapping[str, Any], pixel_range: float, num_features: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, lowest, highest), each (F,) float64: what the pixels' range, 0 and the largest pixel are as features.

    A pixel that is constant in the training rows is 0 in every row, and cannot move.
    """
    mean, deviation = (
        np.broadcast_to(np.asarray(preprocessing[name], dtype=np.float64), (num_features,))
        for name in ("mean", "deviation")
    )
    inverse = np.divide(1.0, deviation, out=np.zeros(num_features), where=deviation > 0)
    ends = (pixel_range * inverse, -mean * inverse, (pixel_range - mean) * inverse)
    scale, lowest, highest = (torch.from_numpy(end) for end in ends)
    return scale, lowest, highest


def box_around(features: Tensor, radius: Tensor, lowest: Tensor, highest: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of the ball, float64, clipped to the valid range; always around the input."""
    center = features.double()
    lower = torch.maximum(center - radius, torch.minimum(lowest, center))
    upper = torch.minimum(center + radius, torch.maximum(highest, center))
    return lower.numpy(), upper.numpy()


class UnreadableNetworkError(RuntimeError):
    """Marabou does not know an operation of the graph, or reads it as another network; the message says which."""


class Answer(NamedTuple):
    """`status` is one of STATUSES; `by` is "attack", "bounds" or "search", None where nothing settled it."""

    status: str
    by: str | None = None
    counterexample: Tensor | None = None


class Verifier:
    """What settles whether a network has one class in a box.

    Raises TypeError for another network than an MLP, ImportError without maraboupy, UnreadableNetworkError.
    """

    def __init__(self, model: MLPForClassification, example: Tensor, settings: VerificationSettings) -> None:
        if not isinstance(model, MLPForClassification):
            raise TypeError(f"an MLPForClassification is verified, got {type(model).__name__}")
        self.model, self.double = model, copy.deepcopy(model).double()
        self.settings = settings
        self.network = MarabouNetwork(model, example)

    def settle(self, features: Tensor, label: int, lower: np.ndarray, upper: np.ndarray) -> Answer:
        """The answer for one input of the class `label` and a box around it."""
        inner = _inner_box(lower, upper)
        found = find_adversarial(self.model, *inner, features, label, seed=self.settings.seed)
        if found is not None and self._confirms(found, label):
            return Answer("refuted", "attack", found)
        return self.ask_solver(features, label, lower, upper, inner)

    def ask_solver(
        self, features: Tensor, label: int, lower: np.ndarray, upper: np.ndarray, inner: tuple[Tensor, Tensor]
    ) -> Answer:
        """The solver's answer, without an attack before."""
        seconds, margin = self.settings.timeout_seconds, self.settings.margin
        ends = time.perf_counter() + seconds
        with torch.no_grad():
            ranking = self.model(features[None]).logits[0].argsort(descending=True).tolist()
        others = [other for other in ranking if other != label]
        bounds = self.network.lead_bounds(lower, upper, label, others, seconds)
        left = [other for other in others if not bounds[other] < margin]
        if not left:
            return Answer("proved", "bounds")
        for other in left:
            remaining = ends - time.perf_counter()
            if remaining <= 0:
                return Answer("timeout")
            answer, point = self.network.find_lead(lower, upper, label, other, margin, remaining)
            if point is not None:
                found = torch.from_numpy(point).float().reshape(features.shape).clamp(*inner)
                return Answer("refuted" if self._confirms(found, label) else "unconfirmed", "search", found)
            if answer != "unsat":
                return Answer("timeout" if answer == "TIMEOUT" else "unknown")
        return Answer("proved", "search")

    @torch.no_grad()
    def _confirms(self, found: Tensor, label: int) -> bool:
        scores = self.double(found[None].double()).logits, self.model(found[None]).logits
        return label not in (each[0].argmax().item() for each in scores)


def _inner_box(lower: np.ndarray, upper: np.ndarray) -> tuple[Tensor, Tensor]:
    """The largest float32 box inside: rounding must not carry a counterexample out of the ball."""
    low, high = lower.astype(np.float32), upper.astype(np.float32)
    low = np.where(low < lower, np.nextafter(low, np.float32(math.inf)), low)
    high = np.where(high > upper, np.nextafter(high, np.float32(-math.inf)), high)
    return torch.from_numpy(low), torch.from_numpy(high)


def find_adversarial(
    model: nn.Module, lower: Tensor, upper: Tensor, start: Tensor, label: int, *, seed: int
) -> Tensor | None:
    """An input in the box whose class is not `label`, by projected gradient descent; None, which proves nothing.

    The first descent begins at `start`, the others at random points of the box.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand((_RESTARTS, *start.shape), generator=generator, dtype=start.dtype)
    points = lower + (upper - lower) * shares
    points[0] = start
    step_size = _STEP_FRACTION * (upper - lower) / 2
    for step in range(_STEPS + 1):
        points = torch.minimum(torch.maximum(points, lower), upper).detach().requires_grad_(True)
        scores = model(points).logits
        others = torch.arange(scores.shape[-1]) != label
        lead = scores[:, others].amax(-1) - scores[:, label]
        if (lead > 0).any():
            return points[int(lead.argmax())].detach()
        (gradient,) = torch.autograd.grad(lead.sum(), points)
        points = points.detach() + gradient.sign() * step_size * (1 - step / (_STEPS + 1))
    return None


class MarabouNetwork:
    """A network as Marabou read it from ONNX; `example` is one row of inputs, (1, F).

    Constraints stay with Marabou's network unless they are added with `isProperty=True`: a second query would silently
    hold the first one's, too, and answer "unsat" wrongly. Its parser reads some graphs as other networks, without an
    error: what was read is held to torch at the example and points around it.

    Raises ImportError without maraboupy, UnreadableNetworkError.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        with warnings.catch_warnings():  # its TensorFlow parser is missing, which is no matter here
            warnings.simplefilter("ignore")
            self._marabou = require("maraboupy.Marabou", "benchmarks")
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "model.onnx")
            export_onnx(model, file, example, dynamic_axes={})
            try:
                with _silence():
                    network = self._marabou.read_onnx(file)
            # The parser has no error class of its own, and looks operations and constants up in dictionaries.
            except (NotImplementedError, RuntimeError, KeyError, TypeError, ValueError, AssertionError) as error:
                said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise UnreadableNetworkError(f"Marabou cannot read the network: {said}") from error
        self._network = network
        self._inputs = [int(variable) for variable in np.concatenate([v.flatten() for v in network.inputVars])]
        self._scores = [int(variable) for variable in network.outputVars[0].flatten()]
        self._outputs = list(network.outputVars)
        self._bounds = dict(network.lowerBounds), dict(network.upperBounds)
        self._variables = network.numVars
        self._require_same(model, example)

    @torch.no_grad()
    def _require_same(self, model: nn.Module, example: Tensor) -> None:
        """Raise UnreadableNetworkError where torch and Marabou differ, both in float64."""
        wide = copy.deepcopy(model).double()
        generator = torch.Generator().manual_seed(0)
        size = example.abs().max().clamp(min=1.0)
        for spread in (0.0, *_SPREADS):
            point = (example + spread * size * torch.randn(example.shape, generator=generator)).double()
            expected = wide(point).logits[0].numpy()
            self._pose(point[0].numpy(), point[0].numpy(), 0, [])
            bounds = self._calculated_bounds(60.0)
            found = np.array([bounds.get(variable, (-math.inf, math.inf)) for variable in self._scores], dtype=float)
            off = np.abs(found - expected[:, None]).max()
            if not off <= _ALLOWED * max(1.0, float(np.abs(expected).max())):  # nor NaN, nor infinite
                raise UnreadableNetworkError(
                    f"Marabou reads another network than torch runs: scores of one input differ by {off:.4g}. What it "
                    "proves of that says nothing of this one"
                )

    def lead_bounds(
        self, lower: np.ndarray, upper: np.ndarray, label: int, others: Sequence[int], timeout_seconds: float
    ) -> dict[int, float]:
        """{class: upper bound of score[class] − score[label]} over the box, by Marabou's symbolic bounds (DeepPoly).

        Infinite where it gave none.
        """
        leads = self._pose(lower, upper, label, others)
        self._network.outputVars = [np.array(list(leads.values()))]
        bounds = self._calculated_bounds(timeout_seconds)
        return {other: float(bounds[lead][1]) if lead in bounds else math.inf for other, lead in leads.items()}

    def find_lead(
        self, lower: np.ndarray, upper: np.ndarray, label: int, other: int, margin: float, timeout_seconds: float
    ) -> tuple[str, np.ndarray | None]:
        """Search the box for an input with score[other] − score[label] ≥ margin.

        Returns Marabou's answer ("sat", "unsat", "TIMEOUT", or another word where it gives up) and, if it is "sat",
        the input, flat, float64.
        """
        leads = self._pose(lower, upper, label, [other])
        self._network.setLowerBound(leads[other], margin)
        with _silence():
            answer, values, _ = self._network.solve(verbose=False, options=self._options(timeout_seconds))
        return answer, np.array([values[variable] for variable in self._inputs]) if answer == "sat" else None

    def _pose(self, lower: np.ndarray, upper: np.ndarray, label: int, others: Sequence[int]) -> dict[int, int]:
        """A fresh question about the box, with a variable for the lead of each class over the label.

        A lead is a variable because symbolic bounds reach through its equation to the inputs; the same
        constraint as an inequality is left to the search.
        """
        network = self._network
        network.clearProperty()
        network.numVars = self._variables
        network.outputVars = list(self._outputs)
        network.lowerBounds, network.upperBounds = (dict(bounds) for bounds in self._bounds)
        for variable, low, high in zip(self._inputs, lower.flat, upper.flat, strict=True):
            network.setLowerBound(variable, float(low))
            network.setUpperBound(variable, float(high))
        leads = {}
        for other in others:
            leads[other] = network.getNewVariable()
            terms = [leads[other], self._scores[other], self._scores[label]]
            network.addEquality(terms, [1.0, -1.0, 1.0], 0.0, isProperty=True)
        return leads

    def _calculated_bounds(self, timeout_seconds: float) -> Mapping[int, tuple[float, float]]:
        with _silence():
            return self._network.calculateBounds(verbose=False, options=self._options(timeout_seconds))[1]

    def _options(self, timeout_seconds: float) -> Any:
        # Whole seconds; 0 would be no limit at all.
        return self._marabou.createOptions(verbosity=0, timeoutInSeconds=max(1, math.ceil(timeout_seconds)))


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing on stdout and stderr, not even from C++, which sys.stdout does not see."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        for descriptor, number in zip(kept, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


VERIFICATION = Measurement(
    name="verification",
    benchmarks=tuple(PIXEL_RANGE),
    models=("gelu", "relu", "lambda_gelu", "hardened_relu"),
    settings=VerificationSettings,
    measure=measure_verification,
    divisible=True,
)
