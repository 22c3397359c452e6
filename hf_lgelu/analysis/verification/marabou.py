"""Marabou, a complete verifier of piecewise-linear networks, asked about the scores of a classifier.

What its Python interface does not tell: constraints stay with a network unless they are added with
`isProperty=True`, so that a second query would silently hold the first one's, too, and answer "unsat" wrongly. And its
parser reads some graphs as other networks, without an error: a proof about these would be none of the model's. So
graphs of the kinds that are known for it are refused, and of each network what was read is held to torch at points.
"""

import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_lgelu.analysis.piecewise.input_flow import scores_of
from hf_lgelu.analysis.verification.misread_graphs import misread
from hf_lgelu.export.onnx.onnx_export import export_onnx
from hf_lgelu.export.onnx.onnx_run import silence_process
from hf_lgelu.extras import require
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.smooth_calls import SmoothCall, find_smooth_calls

_POINTS = 8  # at which what Marabou read is held to torch, beside the example
_SPREADS = (0.1, 1.0, 3.0)
_ALLOWED = 1e-3  # of a score; it computes in float64, and bounds sigmoid and tanh at a point up to some width
_SECONDS_A_POINT = 60

_SMOOTH_THAT_IT_READS = ("sigmoid", "tanh")

_INSTEAD = (
    "Train with harden=True and verify the ReLU network (hf_lgelu.substitute_relu(model), or a folder that export_relu "
    "saved), or use a verifier that bounds this activation"
)


class ScoresOnly(nn.Module):
    """`model` with the class scores alone as output: (batch, classes), from a tensor or an output with `logits`, an
    attribute or by that key. A network that works in place leaves the inputs as they are. TypeError for an output of
    another kind."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        # Of a graph that is exported nothing works in place.
        return scores_of(self.model(inputs if torch.compiler.is_compiling() else inputs.clone()))


class UnreadableNetworkError(RuntimeError):
    """Marabou does not know an operation of the graph, or reads it as another network; the message says which.

    >>> import hf_lgelu
    >>> issubclass(hf_lgelu.UnreadableNetworkError, RuntimeError)
    True
    """


class MarabouNetwork:
    """A network as Marabou read it from ONNX.

    Args:
        model: gives class scores, a tensor or an output with `logits`.
        example: one row of inputs, (1, ...).

    Raises ImportError that names the extra [verify], UnreadableNetworkError, or RuntimeError if the ONNX export of the
    model computes something else than the model.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._marabou = _import_marabou()
        scores = ScoresOnly(model)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "model.onnx")
            # A proof is about the graph: the export compares it with torch.
            export_onnx(scores, file, example, dynamic_axes={})
            if found := misread(file):
                raise UnreadableNetworkError(f"Marabou would read another network: {found}")
            try:
                with silence_process():
                    self._network = self._marabou.read_onnx(file)
                self._keep_what_was_read()
                differing = self._first_difference(scores, example)
            # The parser has no error class of its own, and looks operations and constants up in dictionaries; what it
            # cannot multiply (a learned scale per unit) it notices when it is asked.
            except (NotImplementedError, RuntimeError, KeyError, TypeError, ValueError, AssertionError) as error:
                raise UnreadableNetworkError(_unread(error)) from error
        if differing is not None:
            raise UnreadableNetworkError(
                f"Marabou reads another network than torch runs: {differing}. What it proves of that says nothing of "
                "this one"
            )

    def _keep_what_was_read(self) -> None:
        network = self._network
        self._inputs = [int(variable) for variable in np.concatenate([v.flatten() for v in network.inputVars])]
        self._scores = [int(variable) for variable in network.outputVars[0].flatten()]
        self._outputs = list(network.outputVars)
        self._bounds = dict(network.lowerBounds), dict(network.upperBounds)
        self._variables = network.numVars

    @torch.no_grad()
    def _first_difference(self, scores: nn.Module, example: Tensor) -> str | None:
        """What torch and Marabou say of the first point at which they differ: the example, and points around it.

        Both in float64, so that rounding is no difference.
        """
        scores = independent_copy(scores).double()
        generator = torch.Generator().manual_seed(0)
        size = example.abs().max().clamp(min=1.0)
        spreads = [_SPREADS[number % len(_SPREADS)] for number in range(_POINTS)]
        around = [example + s * size * torch.randn(example.shape, generator=generator) for s in spreads]
        for point in (example, *around):
            expected = scores(point.double())[0].numpy()
            low, high = self._scores_at(point[0].double().numpy())
            allowed = _ALLOWED * max(1.0, float(np.abs(expected).max()))
            off = np.maximum(low - expected, expected - high).max()
            if not max(off, (high - low).max() / 2) <= allowed:  # nor NaN, nor infinite
                middle = ", ".join(f"{value:.4g}" for value in ((low + high) / 2)[:4])
                return f"scores of one input are {', '.join(f'{v:.4g}' for v in expected[:4])} by torch, {middle} by it"
        return None

    def _scores_at(self, point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper bounds of the scores of one input, which hardly differ."""
        self._pose(point, point, 0, [])
        with silence_process():
            _, bounds, _ = self._network.calculateBounds(verbose=False, options=self._options(_SECONDS_A_POINT))
        ends = np.array([bounds.get(variable, (-math.inf, math.inf)) for variable in self._scores], dtype=float)
        return ends[:, 0], ends[:, 1]

    def score_lead_bounds(
        self, lower: np.ndarray, upper: np.ndarray, label: int, others: Sequence[int], timeout_seconds: float
    ) -> dict[int, float]:
        """{class: upper bound of score[class] − score[label]} over the box, by Marabou's symbolic bounds (DeepPoly).

        Infinite where it gave none.
        """
        leads = self._pose(lower, upper, label, others)
        self._network.outputVars = [np.array(list(leads.values()))]
        with silence_process():
            _, bounds, _ = self._network.calculateBounds(verbose=False, options=self._options(timeout_seconds))
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
        with silence_process():
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

    def _options(self, timeout_seconds: float) -> Any:
        # Whole seconds; 0 would be no limit at all.
        return self._marabou.createOptions(verbosity=0, timeoutInSeconds=max(1, math.ceil(timeout_seconds)))


def marabou_refusal(model: nn.Module, example: Tensor) -> str | None:
    """What Marabou says when it cannot read the network, or None if it can; `example` is one row, (1, ...)."""
    try:
        MarabouNetwork(model, example)
    except UnreadableNetworkError as error:
        return str(error)
    return None


def refuse_smooth(model: nn.Module, example: Tensor) -> list[SmoothCall]:
    """ValueError for smooth operations that Marabou does not read; those that it reads."""
    calls = find_smooth_calls(model, example)
    unread = [call for call in calls if call.operation not in _SMOOTH_THAT_IT_READS]
    if unread:
        raise ValueError(
            f"{type(model).__name__} is smooth, and Marabou reads ReLU, sigmoid and tanh, but no GELU and no erf: "
            f"{'; '.join(map(str, unread))}. {_INSTEAD}"
        )
    return calls


def read_network(model: nn.Module, example: Tensor, read: Sequence[SmoothCall]) -> MarabouNetwork:
    """The network as Marabou reads it; where it cannot, the error names the smooth operations that were `read`."""
    try:
        return MarabouNetwork(model, example)
    except UnreadableNetworkError as error:
        if not read:
            raise
        raise UnreadableNetworkError(
            f"{error}. It reads sigmoid and tanh between affine layers, and no product with another computed value, as "
            f"in x·σ(x), which is SiLU spelled out: {'; '.join(map(str, read))}. {_INSTEAD}"
        ) from error


def _unread(error: Exception) -> str:
    """What Marabou's parser could not read: the operation at which it stopped, off its frames, and its own words."""
    frames, node = error.__traceback__, None
    while frames is not None:
        node = frames.tb_frame.f_locals.get("node", node)
        frames = frames.tb_next
    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
    if node is not None and hasattr(node, "op_type"):
        return f"Marabou cannot read the network's {node.op_type} ({', '.join(node.output)}): {said}"
    if isinstance(error, TypeError):  # of the solver, which is given numbers where it has one
        said = f"it has no product with a constant for each unit ({said})"
    return f"Marabou cannot read the network: {said}"


def _import_marabou() -> Any:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "verify")
    with warnings.catch_warnings():  # its TensorFlow parser is missing, which is no matter here
        warnings.simplefilter("ignore")
        return require("maraboupy.Marabou", "verify")
