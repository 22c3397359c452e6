"""The original and the converted network, run side by side from layer to layer, batch by batch.

Both networks stop at every layer and go on from there. So one forward pass of each network serves all layers; hooks
would need one forward pass for each layer.
"""

import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.models.batches import DECODER_INPUTS, mask_over
from hf_lgelu.models.example_run import same_randomness
from hf_lgelu.refit.features import choose_positions
from hf_lgelu.refit.folds import FoldBatch, Folds
from hf_lgelu.refit.gate_units import find_gate_units
from hf_lgelu.refit.layers import Layer, Layers, find_layers
from hf_lgelu.refit.moments import BufferedMoments, Moments, Rows, widened
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.program import (
    KeptValues,
    Program,
    Programs,
    Stage,
    Stop,
    differing_nodes,
    gate_of,
    plan_stages,
    upstream,
)
from hf_lgelu.refit.ridge import held_out_once

ROWS_PER_FEATURE = 16
"""Positions of feature maps that a convolution is fitted on, per feature. A ResNet-18's layers had errors 8 % to 26 %
larger with 8 than with 32."""

MEMORY_LIMIT = 2 * 2**30
"""Bytes of carried values that stay in memory; the rest goes to the folder for temporary files."""

PADDING_COUNTS = "padding may count: its rows are not those of the attention mask"
HIDDEN_COUNT = "outputs that a mask hides count as right, so the rest is moved less"
"""Notes on a layer."""

_HIDDEN = -1e30
_TEXT_INPUTS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True)
class Trace:
    """The program of one shape of inputs, with its layers; `masks` holds the mask over each layer's tokens, or None."""

    program: Program
    layers: Layers
    stages: list[Stage]
    differing: frozenset[Node]
    original: Mapping[Node, Any]
    converted: Mapping[Node, Any]
    masks: list[Node | None]


@dataclass(frozen=True)
class Values:
    """The values of a batch: equal in both networks, of the original, of the converted network; and the masks."""

    same: dict[Node, Any]
    original: dict[Node, Any]
    converted: dict[Node, Any]
    masks: dict[Node, Tensor]

    def needed_behind(self, stage: Stage) -> dict[str, dict[Node, Any]]:
        """The values that stages after `stage` use."""
        kept = stage.later | stage.features
        return {
            "same": {node: value for node, value in self.same.items() if node in kept},
            "original": {node: value for node, value in self.original.items() if node in stage.later},
            "converted": {node: value for node, value in self.converted.items() if node in kept},
            "masks": self.masks,
        }


class Carrier:
    """Both networks with every batch of the folds: a context manager, whose layers are visited once each, in order."""

    def __init__(self, programs: Programs, converted: nn.Module, folds: Folds, gate_maps_change: bool = False) -> None:
        """`converted`, a copy of the programs' model with other gates at their sites, is refitted meanwhile.

        With `gate_maps_change` the maps before the gates of `converted` are not the original's.
        """
        self._gate_maps_change = gate_maps_change
        self._programs, self._converted = programs, converted
        self._model, self._sites = model, sites = programs.model, programs.sites
        self._gates = gate_of([site.module for site in sites])
        self._new_gates = gate_of([converted.get_submodule(site.name) for site in sites])
        self._batches = [[piece for batch in fold for piece in batch.not_square()] for fold in folds.folds]
        self._images = len(folds.samples.keys) - folds.held_out_samples
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._kept = KeptValues(MEMORY_LIMIT)
        self._traces: dict[Any, Trace] = {}
        self._noted: set[tuple[int, str]] = set()
        self.trace = self._trace(folds.first)

    def __enter__(self) -> "Carrier":
        return self

    def __exit__(self, *error: object) -> None:
        self._kept.close()

    @property
    def layers(self) -> Layers:
        """The layers to refit, and the maps that cannot be refitted."""
        return self.trace.layers

    @torch.no_grad()
    def moments(self, index: int) -> list[Moments]:
        """The sums over the rows of a layer, one for each fold. Carries every batch on to the layer.

        The rows see the refitted weights of the layer before. Folds that the ridge does not hold out in turn are added
        up: for a wide map, each fold is a large matrix.
        """
        layer = self.layers.layers[index]
        groups = layer.maps[0].geometry.groups
        channels = len(layer.maps[0].aim.scale) // groups
        sums: list[Moments] = []
        for fold in range(len(self._batches)):
            total = BufferedMoments(Moments.zeros(groups, layer.width, channels, self._device))
            with same_randomness():
                for trace, batch, values, behind in self._carried(index, fold):
                    total.add(self._rows(trace, batch, index, values, behind))
            found = total.sums().reduce_over_processes()
            if len(sums) > 1 and held_out_once(found.gram.shape[-1], sum(part.count for part in sums)):
                sums[-1] += found
            else:
                sums.append(found)
        self._noted.update(*each_has(self._noted))
        return sums

    def note(self, index: int) -> str | None:
        """The report's note on the rows of a layer whose moments were taken, or None."""
        return ", ".join(note for note in (PADDING_COUNTS, HIDDEN_COUNT) if (index, note) in self._noted) or None

    @torch.no_grad()
    def pass_by(self, index: int) -> None:
        """Carry every batch on to a layer that is refitted already, as `moments` does, without sums."""
        for fold in range(len(self._batches)):
            with same_randomness():
                for _ in self._carried(index, fold):
                    pass

    def _carried(self, index: int, fold: int) -> Iterator[tuple[Trace, FoldBatch, Values, dict[Node, Any]]]:
        """Each batch of a fold, with both networks run up to a layer's aim.

        The converted network's values behind the layer's maps are returned apart: they change with the refit.
        """
        for place, batch in enumerate(self._batches[fold]):
            trace = self._trace(batch)
            program, stage = trace.program, trace.stages[index]
            if index == 0:
                given = batch.load()
                nodes = {node.name: node for node in program.inputs}
                masks = {nodes[name]: mask.to(self._device) for name, mask in given.masks.items() if name in nodes}
                values = Values(program.bind(given.inputs, self._device), {}, {}, masks)
            else:  # once more behind the layer before, now that it is refitted
                values = Values(**self._kept.take((fold, place), program))
                self._run_converted(trace, trace.stages[index - 1].behind, values.converted, values)
            same = [node for node in stage.before if node not in trace.differing]
            differing = [node for node in stage.before if node in trace.differing]
            program.run(same, values.same, (trace.original,), self._gates)
            program.run([*differing, *stage.behind], values.original, (values.same, trace.original), self._gates)
            self._run_converted(trace, differing, values.converted, values)
            behind: dict[Node, Any] = {}
            self._run_converted(trace, stage.behind, behind, values)
            yield trace, batch, values, behind
            if index + 1 < len(self.layers.layers):
                self._kept.put((fold, place), values.needed_behind(stage))

    def _run_converted(self, trace: Trace, nodes: Sequence[Node], into: dict[Node, Any], values: Values) -> None:
        trace.program.run(nodes, into, (values.converted, values.same, trace.converted), self._new_gates)

    def _trace(self, batch: FoldBatch) -> Trace:
        shape = batch.shape
        if shape not in self._traces:
            program = self._programs.of(batch)
            layers = find_layers(program, self._model, self._sites)
            stops = [layer.stop for layer in layers.layers]
            units = find_gate_units(program) if self._gate_maps_change else []
            changed = [Stop(tuple(operation.node for operation in unit.maps), unit.before.node) for unit in units]
            self._traces[shape] = Trace(
                program, layers, plan_stages(program, stops), differing_nodes(program, [*stops, *changed]),
                program.stored(self._model), program.stored(self._converted),
                [_mask_over(program, layer) for layer in layers.layers],
            )  # fmt: skip
            first = next(iter(self._traces.values())).layers
            if [(layer.name, layer.sites) for layer in first.layers] != [
                (layer.name, layer.sites) for layer in layers.layers
            ]:
                raise ValueError(
                    f"{type(self._model).__name__} computes other layers for inputs of another shape; give inputs of "
                    "one shape"
                )
        return self._traces[shape]

    def _rows(self, trace: Trace, batch: FoldBatch, index: int, values: Values, behind: dict[Node, Any]) -> Rows:
        """The rows of a layer; for a convolution, at some positions of each image."""
        layer = trace.layers.layers[index]
        first, positions = layer.maps[0], None
        if first.geometry.kind == "convolution":
            wanted = math.ceil(ROWS_PER_FEATURE * layer.width / self._images)
            available = math.prod(first.node.meta["val"].shape[2:])
            chosen = choose_positions([seed ^ index for seed in batch.seeds], available, wanted)
            positions = None if chosen is None else chosen.to(self._device)
        original, converted = widened(values.original[layer.aim]), widened(behind[layer.aim])
        hidden = (original < _HIDDEN) & (converted < _HIDDEN)  # by an added mask, as for classes that cannot occur
        if bool(hidden.any()):
            self._noted.add((index, HIDDEN_COUNT))
        residuals, targets = (
            first.geometry.output_rows(first.aim.in_output_layout(value.masked_fill(hidden, 0.0)), positions)
            for value in (original - converted, original)
        )
        known = ChainMap(behind, values.converted, values.same)
        features = [consumer.geometry.feature_rows(known[consumer.data], positions) for consumer in layer.maps]
        counted = self._counted(trace, index, values, positions, len(residuals))
        return Rows(torch.cat(features, dim=-1), residuals, targets, counted)

    def _counted(self, trace: Trace, index: int, values: Values, positions: Tensor | None, rows: int) -> Tensor | None:
        """Which rows of a layer are not padding, (rows,); None where all rows count."""
        node, first = trace.masks[index], trace.layers.layers[index].maps[0]
        mask = None if node is None else values.masks.get(node)
        if mask is None:
            return None
        shape = tuple(first.node.meta["val"].shape)
        axes = (shape[0], *shape[2:]) if first.geometry.kind == "convolution" else shape[:-1]
        counted = mask_over(mask, axes, {given.name: given.meta["val"] for given in trace.program.inputs})
        if counted is not None:
            return (counted if positions is None else counted.flatten(1).gather(1, positions)).reshape(-1)
        if mask.numel() == rows:  # time first, as in XLNet and torch's encoder layers, or a single axis
            return (mask.mT if mask.shape == axes[::-1] else mask).reshape(-1)
        if rows != len(mask) and not bool(mask.all()):  # the rows are not tokens, frames of sound or samples
            self._noted.add((index, PADDING_COUNTS))
        return None


def _mask_over(program: Program, layer: Layer) -> Node | None:
    """The input that masks a layer's tokens: the decoder's mask for layers that depend on the decoder's tokens."""
    inputs = {node.name: node for node in program.inputs}
    sources = upstream(layer.aim)
    if any(inputs.get(name) in sources for name in DECODER_INPUTS):
        return inputs.get("decoder_attention_mask")
    text = [inputs[name] for name in _TEXT_INPUTS if name in inputs]
    # The image tower of a model with two has as many rows as the text's mask only by chance.
    return inputs.get("attention_mask") if not text or any(node in sources for node in text) else None
