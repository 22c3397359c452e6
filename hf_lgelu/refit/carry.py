"""The original and the ReLU network carried forward side by side, chunk by chunk, from layer to layer.

Each stops at every layer; so one pass of each is enough for all layers, where looking from outside would take one a
layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.refit.features import choose_positions, convolution_rows, linear_rows, output_rows
from hf_lgelu.refit.layers import Layer, Layers, LinearMap, find_layers
from hf_lgelu.refit.moments import Moments
from hf_lgelu.refit.order import Stage, differing_nodes, plan_stages
from hf_lgelu.refit.plan import CalibrationPlan, Chunk
from hf_lgelu.refit.program import Program, upstream
from hf_lgelu.refit.states import CarriedStates

ROWS_PER_FEATURE = 16
"""Positions of feature maps that a convolution is fitted on, per feature. A ResNet-18's layers had errors 8 % to 26 %
larger with 8 than with 32."""

_ROWS_AT_ONCE = 4096
_TEXT_INPUTS = ("input_ids", "inputs_embeds")
_DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class Trace:
    """The program of one shape of inputs, with its layers; `masks` has the input that masks each layer's tokens."""

    program: Program
    layers: Layers
    stages: list[Stage]
    differing: frozenset[Node]
    original: Mapping[Node, Any]
    student: Mapping[Node, Any]
    masks: list[Node | None]


@dataclass(frozen=True)
class _Values:
    """What a chunk's nodes hold: where both networks agree, in the original, in the student."""

    same: dict[Node, Any]
    original: dict[Node, Any]
    student: dict[Node, Any]


class Carrier:
    """Carries every chunk of the folds. Use as a context manager; layers are visited once each, in order."""

    def __init__(
        self, model: nn.Module, student: nn.Module, sites: Sequence[ActivationSite], plan: CalibrationPlan
    ) -> None:
        """`sites` are those of `model`; `student` is its copy with ReLU at them, refitted while it is carried."""
        self._model, self._student, self._sites, self._plan = model, student, sites, plan
        self._images = plan.distinct_units - plan.held_out_units
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._states = CarriedStates()
        self._traces: dict[Any, Trace] = {}
        self.trace = self._trace(plan.first)

    def __enter__(self) -> "Carrier":
        return self

    def __exit__(self, *error: object) -> None:
        self._states.__exit__(*error)

    @property
    def layers(self) -> Layers:
        """What there is to refit and what cannot be."""
        return self.trace.layers

    @torch.no_grad()
    def moments(self, index: int, visit: Callable[[], None] = lambda: None) -> list[Moments]:
        """Carry every chunk on to a layer; the sums over its rows, one a fold. `visit` is called after each chunk.

        What the layer before was refitted to by then is taken into account.
        """
        sums = []
        for number, fold in enumerate(self._plan.folds):
            total = _Buffer(self._zeros(self.layers.layers[index]))
            for place, chunk in enumerate(fold):
                trace = self._trace(chunk)
                state = self._states.take((number, place))
                values, behind = self._advance(trace, chunk, index, _loaded(trace, state))
                total.add(*self._rows(trace, chunk, index, values, behind))
                if index + 1 < len(self.layers.layers):
                    self._states.put((number, place), _pruned(trace.stages[index], values))
                visit()
            sums.append(total.sums().reduce_over_processes())
        return sums

    def _trace(self, chunk: Chunk) -> Trace:
        signature = (len(chunk), *sorted(chunk.lengths.items()))
        if signature not in self._traces:
            program = Program(self._model, self._sites, chunk.inputs)
            layers = find_layers(program, self._model, self._sites)
            self._traces[signature] = Trace(
                program, layers, plan_stages(program, layers.layers), differing_nodes(program, layers.layers),
                program.stored(self._model), program.stored(self._student),
                [_mask(program, layer) for layer in layers.layers],
            )  # fmt: skip
            self._require_alike(layers)
        return self._traces[signature]

    def _require_alike(self, layers: Layers) -> None:
        first = next(iter(self._traces.values())).layers
        if [_names(layer) for layer in first.layers] != [_names(layer) for layer in layers.layers]:
            raise ValueError(
                f"{type(self._model).__name__} computes other layers for inputs of another shape; give calibration "
                "inputs of one shape"
            )

    def _advance(self, trace: Trace, chunk: Chunk, index: int, values: _Values) -> tuple[_Values, dict[Node, Any]]:
        """Run both networks up to the layer's target; the student's values behind its maps come separately."""
        program, stage = trace.program, trace.stages[index]
        if index == 0:
            values.same.update(program.bind(chunk.inputs, self._device))
        else:  # once more behind the layer before, now that it is refitted
            self._run_student(trace, trace.stages[index - 1].behind, values.student, values)
        same = [node for node in stage.before if node not in trace.differing]
        differing = [node for node in stage.before if node in trace.differing]
        program.run(same, values.same, (trace.original,), self._original_gate)
        program.run([*differing, *stage.behind], values.original, (values.same, trace.original), self._original_gate)
        self._run_student(trace, differing, values.student, values)
        behind: dict[Node, Any] = {}
        self._run_student(trace, stage.behind, behind, values)
        return values, behind

    def _run_student(self, trace: Trace, nodes: Sequence[Node], into: dict[Node, Any], values: _Values) -> None:
        trace.program.run(nodes, into, (values.student, values.same, trace.student), lambda site, value: value.relu())

    def _original_gate(self, site: int, value: Tensor) -> Tensor:
        module = self._sites[site].module
        return module(value.clone() if getattr(module, "inplace", False) else value)

    def _zeros(self, layer: Layer) -> Moments:
        groups = layer.maps[0].geometry.groups
        width = sum(consumer.width for consumer in layer.maps)
        return Moments.zeros(groups, width, len(layer.maps[0].target.scale) // groups, self._device)

    def _rows(
        self, trace: Trace, chunk: Chunk, index: int, values: _Values, behind: Mapping[Node, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(features, residuals, the original's values at the target, mask of rows)."""
        layer = trace.layers.layers[index]
        first, positions = layer.maps[0], self._positions(layer, chunk, index)
        original, student = _wide(values.original[layer.target]), _wide(behind[layer.target])
        residuals, targets = (
            _outputs(first, first.target.in_output_layout(value), positions) for value in (original - student, original)
        )
        features = []
        for consumer in layer.maps:
            data = next(known[consumer.data] for known in (values.student, values.same) if consumer.data in known)
            features.append(_features(consumer, data, positions))
        return torch.cat(features, dim=-1), residuals, targets, _counted(trace.masks[index], values, len(residuals))

    def _positions(self, layer: Layer, chunk: Chunk, index: int) -> Tensor | None:
        """Which positions of the layer's feature maps are fitted, per image; None for all."""
        first = layer.maps[0]
        if first.geometry.kind != "convolution":
            return None
        available = math.prod(first.node.meta["val"].shape[2:])
        wanted = math.ceil(ROWS_PER_FEATURE * sum(consumer.width for consumer in layer.maps) / self._images)
        if wanted >= available:
            return None
        return choose_positions([seed ^ index for seed in chunk.seeds], available, wanted).to(self._device)


class _Buffer:
    """Rows on their way into sums: products of a few hundred rows cost more in memory traffic than in arithmetic."""

    def __init__(self, moments: Moments) -> None:
        self._moments, self._parts, self._rows = moments, [], 0

    def add(self, *part: Tensor | None) -> None:
        """Features, residuals, targets and mask of some rows."""
        self._parts.append(part)
        self._rows += len(part[0])
        if self._rows >= _ROWS_AT_ONCE:
            self._empty()

    def sums(self) -> Moments:
        """Over all rows added."""
        self._empty()
        return self._moments

    def _empty(self) -> None:
        if self._parts:
            self._moments.add(
                *(None if part[0] is None else torch.cat(part) for part in zip(*self._parts, strict=True))
            )
        self._parts, self._rows = [], 0


def _mask(program: Program, layer: Layer) -> Node | None:
    """The input that says which tokens of a layer are padding: the decoder's own for what depends on its tokens."""
    inputs = {node.name: node for node in program.inputs}
    sources = upstream(layer.target)
    if any(inputs.get(name) in sources for name in _DECODER_INPUTS):
        return inputs.get("decoder_attention_mask")
    text = [inputs[name] for name in _TEXT_INPUTS if name in inputs]
    # The image tower of a model with two has as many rows as the text's mask only by chance.
    return inputs.get("attention_mask") if not text or any(node in sources for node in text) else None


def _counted(mask: Node | None, values: _Values, rows: int) -> Tensor | None:
    """Which rows are no padding, where rows are tokens."""
    if mask is None or values.same[mask].numel() != rows:
        return None
    return values.same[mask].reshape(-1).bool()


def _features(consumer: LinearMap, data: Tensor, positions: Tensor | None) -> Tensor:
    if consumer.geometry.kind == "linear":
        return linear_rows(data)
    return convolution_rows(data, consumer.geometry, positions)


def _outputs(consumer: LinearMap, value: Tensor, positions: Tensor | None) -> Tensor:
    if consumer.geometry.kind == "linear":
        return linear_rows(value)
    return output_rows(value, consumer.geometry.groups, positions)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _names(layer: Layer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(consumer.name for consumer in layer.maps), layer.sites


def _loaded(trace: Trace, state: Mapping[str, Mapping[str, Any]]) -> _Values:
    nodes = trace.program.by_name
    return _Values(*({nodes[name]: value for name, value in state.get(part, {}).items()} for part in _PARTS))


def _pruned(stage: Stage, values: _Values) -> dict[str, dict[str, Any]]:
    """What is needed from here on, by the nodes' names."""
    kept = stage.later | stage.features
    return {
        # The masks say at every layer which rows count.
        "same": {node.name: value for node, value in values.same.items() if node in kept or _is_mask(node)},
        "original": {node.name: value for node, value in values.original.items() if node in stage.later},
        "student": {node.name: value for node, value in values.student.items() if node in kept},
    }


def _is_mask(node: Node) -> bool:
    return node.op == "placeholder" and node.name.endswith("attention_mask")


_PARTS = ("same", "original", "student")
