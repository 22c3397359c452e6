"""Local robustness: can a change of at most ε in every feature change the class? Proved, refuted or left open."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu.analysis.verification.marabou import MarabouNetwork, ScoresOnly, read_network, refuse_smooth
from hf_lgelu.models.example_run import evaluation_mode, keeping_buffers, require_plain
from hf_lgelu.models.own_forward import independent_copy

STATUSES = ("proved", "refuted", "unconfirmed", "timeout", "unknown", "misclassified")
"""unconfirmed: the solver's counterexample does not change the class in torch; timeout: the time ran out;
unknown: the solver gave up by itself; misclassified: the input has another class already, and nothing was asked."""


@dataclass(frozen=True)
class RobustnessResult:
    """The answer for one input and one ε.

    `status` is one of STATUSES. `by` says what settled it: "attack" (gradient search in torch), "bounds" (the
    solver's symbolic bounds), "search" (its case splitting); None where nothing did. `counterexample` has the shape
    and dtype of an input, lies within the ball and the valid range, and `other_class` is its class; both are None
    unless the status is refuted or unconfirmed.
    """

    index: int
    epsilon: float
    status: str
    by: str | None
    seconds: float
    counterexample: Tensor | None = None
    other_class: int | None = None


@dataclass(frozen=True)
class RobustnessReport:
    """The answers, for each ε in turn and there in the inputs' order."""

    results: tuple[RobustnessResult, ...]
    margin: float

    def count(self, epsilon: float, status: str, by: str | None = None) -> int:
        """How many inputs have this status at `epsilon` (settled by `by`, if given).

        Raises ValueError for an ε that was not asked for (those of float32 are known by their float64) and for a status
        that is none of STATUSES.
        """
        asked = dict.fromkeys(result.epsilon for result in self.results)
        near = [one for one in asked if math.isclose(one, float(epsilon), rel_tol=1e-6)]
        if not near:
            raise ValueError(f"epsilon must be one of {', '.join(f'{one:g}' for one in asked)}, got {epsilon!r}")
        if status not in STATUSES:
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r}")
        found = [result for result in self.results if result.epsilon == near[0] and result.status == status]
        return sum(by is None or result.by == by for result in found)

    def __str__(self) -> str:
        lines = [f"Is the class the same in the whole ball, up to a lead of {self.margin:g}?"]
        for epsilon in dict.fromkeys(result.epsilon for result in self.results):
            counts = {status: self.count(epsilon, status) for status in STATUSES}
            told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
            seconds = sum(result.seconds for result in self.results if result.epsilon == epsilon)
            lines.append(f"  ε = {epsilon:g}: {told} of {sum(counts.values())} in {seconds:.3g} s")
        return "\n".join(lines)


@keeping_buffers
def verify_robustness(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor | Sequence[int],
    *,
    epsilons: float | Sequence[float],
    scale: Tensor | float = 1.0,
    input_range: tuple[Tensor | float, Tensor | float] | None = None,
    timeout_seconds: float = 10.0,
    margin: float = 1e-4,
    attack_steps: int = 40,
    attack_restarts: int = 5,
    seed: int = 0,
) -> RobustnessReport:
    """Ask for each input and ε whether the class is the same everywhere in the L∞ ball around the input.

    First projected gradient descent looks for a counterexample. Then Marabou bounds every wrong class's lead
    over the label symbolically, and searches the classes that the bounds leave open, the likeliest first, until one
    gives a counterexample. Each counterexample is replayed in torch, in float32 and float64, and counts as a
    refutation only if both give another class.

    What "proved" says: in Marabou's arithmetic of the exported graph, no wrong class leads the label by `margin` or
    more anywhere in the ball. It is no proof about float32 rounding, and a lead below `margin` is not excluded.
    Marabou reads ReLU, sigmoid and tanh, but neither GELU nor erf, nor a product of computed values (x·σ(x),
    attention); other verifiers (auto_LiRPA) can bound GELU.

    Args:
        model: (batch, ...) → class scores, a tensor or an output with `logits`; float32, on the CPU.
        inputs: (N, ...), float32.
        labels: (N,) integers, the true classes.
        epsilons: a radius of the balls, or several, each at least 0, in units of `scale`.
        scale: how far a feature moves for ε = 1: a number or a tensor that broadcasts to one input. For pixels
            standardized by (p − mean)/deviation, range/deviation makes ε a share of the pixels' range.
        input_range: lowest and highest valid features, numbers or tensors likewise; the ball is clipped to it.
            Where an input lies outside, by rounding, the range reaches to the input.
        timeout_seconds: of the solver, for each input and ε; it looks at the clock in whole seconds.
        margin: above 0 and finite, in units of the scores. At 0 the solver stops on the boundary, where nothing changes
            yet.
        attack_steps: of the gradient descent; 0 looks at the starting points alone.
        attack_restarts: descents; 0 leaves the attack out.
        seed: of the attack's random starts.

    Raises:
        ValueError: the network has smooth operations other than sigmoid and tanh (each place is named), NaN or
            infinity in parameters or buffers, or an argument does not fit.
        TypeError: model, inputs, labels or epsilons are of another kind, or model and inputs not float32.
        ImportError: no maraboupy; the message names the extra [verify].
        RuntimeError: Marabou cannot read the graph, in its own words (`UnreadableNetworkError`); the places of sigmoid
            and tanh are named with it.

    Example:
        >>> import torch
        >>> from hf_lgelu import verify_robustness
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
        >>> for layer in (model[0], model[2]):
        ...     _ = layer.weight.data.copy_(torch.eye(2)), layer.bias.data.zero_()
        >>> report = verify_robustness(model, torch.tensor([[0.5, 0.2]]), [0], epsilons=[0.1, 0.2])
        >>> report.count(0.1, "proved"), report.count(0.2, "refuted")
        (1, 1)
    """
    labels, epsilons = _as_labels(labels), _as_epsilons(epsilons)
    _check(model, inputs, labels)
    _check_numbers(timeout_seconds, margin, attack_steps, attack_restarts)
    _check_box(inputs, scale, input_range)
    _require_finite_weights(model)
    read = refuse_smooth(model, inputs[:1])
    scores = ScoresOnly(model)
    with evaluation_mode(scores):
        _check_labels(scores, inputs[:1], labels)
        network = read_network(model, inputs[:1], read)
        verifier = _Verifier(scores, network, timeout_seconds, margin, attack_steps, attack_restarts, seed)
        results = []
        for epsilon in epsilons:
            for index, (features, label) in enumerate(zip(inputs, labels.tolist(), strict=True)):
                box = _box(features, epsilon, scale, input_range)
                started = time.perf_counter()
                status, by, found = verifier.settle(features, label, *box)
                seconds = time.perf_counter() - started
                other = None if found is None else verifier.predict(found)[1]
                results.append(RobustnessResult(index, float(epsilon), status, by, seconds, found, other))
    return RobustnessReport(tuple(results), margin)


STEP_FRACTION = 0.25
"""Of the box's half width; it falls to 0 over the steps."""


def find_adversarial(
    scores: nn.Module, lower: Tensor, upper: Tensor, start: Tensor, label: int, *, steps: int, restarts: int, seed: int
) -> Tensor | None:
    """An input in the box whose class is not `label`, or None if none was found, which proves nothing.

    Args:
        scores: (batch, ...) → (batch, classes).
        lower: of the box, of one input's shape; on the model's device, as the next two.
        upper: likewise.
        start: the input itself. The first descent begins there, the others at random points of the box.
        label: the class to leave.
        steps: of each descent, along the sign of the gradient of the leading wrong class's score minus the label's.
        restarts: descents, side by side as one batch.
        seed: of the random points.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand((restarts, *start.shape), generator=generator, dtype=start.dtype).to(start.device)
    points = lower + (upper - lower) * shares
    points[0] = start
    step_size = STEP_FRACTION * (upper - lower) / 2
    for step in range(steps + 1):
        points = torch.minimum(torch.maximum(points, lower), upper).detach().requires_grad_(True)
        lead = _lead(scores(points), label)
        if (lead > 0).any():
            return points[int(lead.argmax())].detach()
        (gradient,) = torch.autograd.grad(lead.sum(), points)
        points = points.detach() + gradient.sign() * step_size * (1 - step / (steps + 1))
    return None


def _lead(scores: Tensor, label: int) -> Tensor:
    others = torch.arange(scores.shape[-1], device=scores.device) != label
    return scores[:, others].amax(-1) - scores[:, label]


class _Verifier:
    def __init__(
        self,
        scores: ScoresOnly,
        network: MarabouNetwork,
        timeout_seconds: float,
        margin: float,
        attack_steps: int,
        attack_restarts: int,
        seed: int,
    ) -> None:
        self.scores = scores
        self.double = independent_copy(scores).double()
        self.network = network
        self.timeout_seconds, self.margin = timeout_seconds, margin
        self.attack = {"steps": attack_steps, "restarts": attack_restarts, "seed": seed}

    def settle(
        self, features: Tensor, label: int, lower: np.ndarray, upper: np.ndarray
    ) -> tuple[str, str | None, Tensor | None]:
        """(status, what settled it, counterexample) of one input and box."""
        if set(self.predict(features)) != {label}:
            return "misclassified", None, None
        inner = _inner_box(lower, upper)
        if self.attack["restarts"]:
            found = find_adversarial(self.scores, *inner, features, label, **self.attack)
            if found is not None and self.confirms(found, label):
                return "refuted", "attack", found
        return self.ask_solver(features, label, lower, upper, inner)

    def ask_solver(
        self, features: Tensor, label: int, lower: np.ndarray, upper: np.ndarray, inner: tuple[Tensor, Tensor]
    ) -> tuple[str, str | None, Tensor | None]:
        ends = time.perf_counter() + self.timeout_seconds
        with torch.no_grad():
            ranking = self.scores(features[None])[0].argsort(descending=True).tolist()
        others = [other for other in ranking if other != label]
        bounds = self.network.score_lead_bounds(lower, upper, label, others, self.timeout_seconds)
        left = [other for other in others if not bounds[other] < self.margin]
        if not left:
            return "proved", "bounds", None
        for other in left:
            remaining = ends - time.perf_counter()
            if remaining <= 0:
                return "timeout", None, None
            answer, point = self.network.find_lead(lower, upper, label, other, self.margin, remaining)
            if point is not None:
                found = torch.from_numpy(point).float().reshape(features.shape).clamp(*inner)
                return "refuted" if self.confirms(found, label) else "unconfirmed", "search", found
            if answer != "unsat":
                return "timeout" if answer == "TIMEOUT" else "unknown", None, None
        return "proved", "search", None

    @torch.no_grad()
    def predict(self, features: Tensor) -> tuple[int, int]:
        """The class in float64 and in float32."""
        return self.double(features[None].double())[0].argmax().item(), self.scores(features[None])[0].argmax().item()

    def confirms(self, found: Tensor, label: int) -> bool:
        return label not in self.predict(found)


def _box(
    features: Tensor, epsilon: float, scale: Tensor | float, input_range: tuple[Tensor | float, Tensor | float] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of the ball, float64, clipped to the valid range; always around the input."""
    center = features.double()
    radius = epsilon * torch.as_tensor(scale, dtype=torch.float64).expand(features.shape)
    lower, upper = center - radius, center + radius
    if input_range is not None:
        lowest, highest = (torch.as_tensor(end, dtype=torch.float64).expand(features.shape) for end in input_range)
        lower = torch.maximum(lower, torch.minimum(lowest, center))
        upper = torch.minimum(upper, torch.maximum(highest, center))
    return lower.numpy(), upper.numpy()


def _inner_box(lower: np.ndarray, upper: np.ndarray) -> tuple[Tensor, Tensor]:
    """The largest float32 box inside: rounding must not carry a counterexample out of the ball."""
    low, high = lower.astype(np.float32), upper.astype(np.float32)
    low = np.where(low < lower, np.nextafter(low, np.float32(math.inf)), low)
    high = np.where(high > upper, np.nextafter(high, np.float32(-math.inf)), high)
    return torch.from_numpy(low), torch.from_numpy(high)


def _as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    try:
        tensor = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"labels must be integers, the true classes, got {type(labels).__name__}: {error}") from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"labels must be integers, the true classes, got {tensor.dtype}")
    return tensor.cpu().long()


def _as_epsilons(epsilons: float | Sequence[float]) -> list[float]:
    values = np.asarray(epsilons.cpu() if isinstance(epsilons, Tensor) else epsilons)
    if values.dtype.kind not in "fiu":
        raise TypeError(f"epsilons must be numbers, got {epsilons!r}")
    found = [float(value) for value in np.atleast_1d(values).flat]
    if not found or not all(0 <= epsilon < math.inf for epsilon in found):
        raise ValueError(f"epsilons must be finite numbers of at least 0, one or more, got {found}")
    return found


def _check(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    for name, value, kind in (("model", model, nn.Module), ("inputs", inputs, Tensor)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a torch {kind.__name__}, got {type(value).__name__}")
    require_plain(inputs)
    if inputs.dtype != torch.float32 or any(p.dtype != torch.float32 for p in model.parameters()):
        raise TypeError(f"model and inputs must be float32, got inputs of {inputs.dtype}; call .float() on both")
    if inputs.ndim < 2 or not len(inputs) or labels.shape != inputs.shape[:1]:
        raise ValueError(
            "inputs must have shape (N, ...) with N at least 1, and labels (N,), got "
            f"{tuple(inputs.shape)} and {tuple(labels.shape)}"
        )


def _require_finite_weights(model: nn.Module) -> None:
    # A solver's bounds on infinite weights are numbers that prove anything.
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity; look at the model's weights")


def _check_numbers(timeout_seconds: float, margin: float, attack_steps: int, attack_restarts: int) -> None:
    for name, value in (("timeout_seconds", timeout_seconds), ("margin", margin)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}")
    for name, value in (("attack_steps", attack_steps), ("attack_restarts", attack_restarts)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def _check_box(
    inputs: Tensor, scale: Tensor | float, input_range: tuple[Tensor | float, Tensor | float] | None
) -> None:
    # An empty box, or one with NaN, holds no counterexample and would be "proved".
    if not inputs.isfinite().all():
        raise ValueError("inputs must be finite; there is NaN or infinity in them")
    size = torch.as_tensor(scale)
    if not ((size >= 0) & size.isfinite()).all():
        raise ValueError(f"scale must be finite and at least 0, got {size.min().item():g} to {size.max().item():g}")
    if input_range is not None:
        lowest, highest = (torch.as_tensor(end, dtype=torch.float64) for end in input_range)
        if not (lowest <= highest).all():
            raise ValueError("input_range must be (lowest, highest), lowest at most highest for every feature")


@torch.no_grad()
def _check_labels(scores: ScoresOnly, example: Tensor, labels: Tensor) -> None:
    shape = scores(example).shape
    if len(shape) != 2 or shape[1] < 2:
        raise ValueError(f"model must give scores of at least 2 classes, (batch, classes), got {tuple(shape)}")
    if not ((labels >= 0) & (labels < shape[1])).all():
        raise ValueError(
            f"labels must be 0 to {shape[1] - 1}, the classes of the scores, got {labels.min()} to {labels.max()}"
        )
