"""The original and the converted network carried forward side by side, batch by batch, from layer to layer.

Each stops at every layer; so one pass of each is enough for all layers, where looking from outside would take one a
layer.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from hf_lgelu.models.example_run import same_randomness
from hf_lgelu.models.outputs import DECODER_INPUTS, is_of_sound, mask_of_frames
from hf_lgelu.refit.features import choose_positions
from hf_lgelu.refit.folds import FoldBatch, Folds
from hf_lgelu.refit.layers import Layer, Layers, LinearMap, find_layers
from hf_lgelu.refit.moments import BufferedMoments, Moments, Rows, widened
from hf_lgelu.refit.placement import find_gate_units
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.program import Gate, Program, Programs, Stage, Stop, differing_nodes, plan_stages, upstream
from hf_lgelu.refit.ridge import held_out_once

ROWS_PER_FEATURE = 16
"""Positions of feature maps that a convolution is fitted on, per feature. A ResNet-18's layers had errors 8 % to 26 %
larger with 8 than with 32."""

MEMORY_LIMIT = 2 * 2**30
"""Bytes of carried values that stay in memory; what is beyond goes to the folder for temporary files."""

_HIDDEN = -1e30
_TEXT_INPUTS = ("input_ids", "inputs_embeds")


@dataclass(frozen=True)
class Trace:
    """The program of one shape of inputs, with its layers.

    `masks` has the input that masks each layer's tokens.
    """

    program: Program
    layers: Layers
    stages: list[Stage]
    differing: frozenset[Node]
    original: Mapping[Node, Any]
    converted: Mapping[Node, Any]
    masks: list[Node | None]


@dataclass(frozen=True)
class Values:
    """What a batch's nodes hold: where both networks agree, in the original, in the converted one."""

    same: dict[Node, Any] = field(default_factory=dict)
    original: dict[Node, Any] = field(default_factory=dict)
    converted: dict[Node, Any] = field(default_factory=dict)


class Carrier:
    """Carries every batch of the folds. Use as a context manager; layers are visited once each, in order."""

    def __init__(self, programs: Programs, converted: nn.Module, folds: Folds, gate_maps_change: bool = False) -> None:
        """`converted`, a copy of the programs' model with other gates at their sites, is refitted meanwhile.

        With `gate_maps_change` the maps before the gates of `converted` are not the original's.
        """
        self._gate_maps_change = gate_maps_change
        self._programs, self._converted, self._folds = programs, converted, folds
        self._model, self._sites = model, sites = programs.model, programs.sites
        self._gates = _gate([site.module for site in sites])
        self._new_gates = _gate([converted.get_submodule(site.name) for site in sites])
        self._images = len(folds.samples.keys) - folds.held_out_samples
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._states = CarriedStates(MEMORY_LIMIT)
        self._traces: dict[Any, Trace] = {}
        self._counting_padding: set[int] = set()
        self._hiding: set[int] = set()
        self.trace = self._trace(folds.first)

    def __enter__(self) -> "Carrier":
        return self

    def __exit__(self, *error: object) -> None:
        self._states.close()

    @property
    def layers(self) -> Layers:
        """What there is to refit and what cannot be."""
        return self.trace.layers

    @property
    def site_names(self) -> list[str]:
        """Names of the gates, by index."""
        return [site.name for site in self._sites]

    @property
    def steps_per_layer(self) -> int:
        """How often a layer calls `visit`, and once for its refit."""
        return sum(map(len, self._folds.folds)) + 1

    @torch.no_grad()
    def moments(self, index: int, visit: Callable[[], None] = lambda: None) -> list[Moments]:
        """Carry every batch on to a layer; the sums over its rows, one a fold. `visit` is called after each batch.

        Folds that the ridge does not leave out in turn are added up: of a wide map each is a large matrix. What the
        layer before was refitted to by then is taken into account.
        """
        sums: list[Moments] = []
        for fold in range(len(self._folds.folds)):
            total = BufferedMoments(self._zeros(self.layers.layers[index]))
            with same_randomness():
                for trace, batch, values, behind in self._carried(index, fold):
                    total.add(self._rows(trace, batch, index, values, behind))
                    visit()
            found = total.sums().reduce_over_processes()
            if len(sums) > 1 and held_out_once(found.gram.shape[-1], sum(part.count for part in sums)):
                sums[-1] += found
            else:
                sums.append(found)
        for noted in (self._counting_padding, self._hiding):
            if any(each_has(index in noted)):
                noted.add(index)
        return sums

    def note(self, index: int) -> str | None:
        """What to know of the rows of a layer whose moments were taken, for the report."""
        notes = {
            "padding may count: its rows are not those of the attention mask": self._counting_padding,
            "outputs that a mask hides count as right, so the rest is moved less": self._hiding,
        }
        return ", ".join(note for note, layers in notes.items() if index in layers) or None

    @torch.no_grad()
    def pass_by(self, index: int) -> None:
        """Carry every batch on to a layer that is refitted already, as `moments` does, and look at nothing."""
        for fold in range(len(self._folds.folds)):
            with same_randomness():
                for _ in self._carried(index, fold):
                    pass

    def _carried(self, index: int, fold: int) -> Iterator[tuple[Trace, FoldBatch, Values, dict[Node, Any]]]:
        """Each batch of a fold at a layer, with what the converted network has behind its maps."""
        for place, batch in enumerate(self._folds.folds[fold]):
            trace = self._trace(batch)
            values = _loaded(trace, self._states.take((fold, place)))
            yield trace, batch, values, self._advance(trace, batch, index, values)
            if index + 1 < len(self.layers.layers):
                self._states.put((fold, place), _pruned(trace.stages[index], values))

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
                [_mask(program, layer) for layer in layers.layers],
            )  # fmt: skip
            self._require_alike(layers)
        return self._traces[shape]

    def _require_alike(self, layers: Layers) -> None:
        first = next(iter(self._traces.values())).layers
        if [(layer.name, layer.sites) for layer in first.layers] != [
            (layer.name, layer.sites) for layer in layers.layers
        ]:
            raise ValueError(
                f"{type(self._model).__name__} computes other layers for inputs of another shape; give inputs of one "
                "shape"
            )

    def _advance(self, trace: Trace, batch: FoldBatch, index: int, values: Values) -> dict[Node, Any]:
        """Run both networks up to the layer's target, into `values`; the converted one's values behind its maps are
        given back: they change with the refit."""
        program, stage = trace.program, trace.stages[index]
        if index == 0:
            values.same.update(program.bind(batch.load().inputs, self._device))
        else:  # once more behind the layer before, now that it is refitted
            self._run_converted(trace, trace.stages[index - 1].behind, values.converted, values)
        same = [node for node in stage.before if node not in trace.differing]
        differing = [node for node in stage.before if node in trace.differing]
        program.run(same, values.same, (trace.original,), self._gates)
        program.run([*differing, *stage.behind], values.original, (values.same, trace.original), self._gates)
        self._run_converted(trace, differing, values.converted, values)
        behind: dict[Node, Any] = {}
        self._run_converted(trace, stage.behind, behind, values)
        return behind

    def _run_converted(self, trace: Trace, nodes: Sequence[Node], into: dict[Node, Any], values: Values) -> None:
        trace.program.run(nodes, into, (values.converted, values.same, trace.converted), self._new_gates)

    def _zeros(self, layer: Layer) -> Moments:
        groups = layer.maps[0].geometry.groups
        return Moments.zeros(groups, layer.width, len(layer.maps[0].target.scale) // groups, self._device)

    def _rows(self, trace: Trace, batch: FoldBatch, index: int, values: Values, behind: Mapping[Node, Any]) -> Rows:
        layer = trace.layers.layers[index]
        first, positions = layer.maps[0], self._positions(layer, batch, index)
        original, converted = widened(values.original[layer.target]), widened(behind[layer.target])
        hidden = (original < _HIDDEN) & (converted < _HIDDEN)  # by a mask that is added, as of classes that cannot be
        if bool(hidden.any()):
            self._hiding.add(index)
        residuals, targets = (
            first.geometry.output_rows(first.target.in_output_layout(value.masked_fill(hidden, 0.0)), positions)
            for value in (original - converted, original)
        )
        features = []
        for consumer in layer.maps:
            data = _known(consumer.data, behind, values.converted, values.same)
            features.append(consumer.geometry.feature_rows(data, positions))
        counted = _counted(trace, index, values, positions)
        if counted is not None and _is_time_first(self._unlike(batch, index, counted) or first, counted):
            counted = counted.mT
        if counted is not None and counted.numel() != len(residuals):  # rows are no tokens, nor made of sound
            if len(residuals) != len(counted) and not bool(counted.all()):  # nor one a sample
                self._counting_padding.add(index)
            counted = None
        return Rows(torch.cat(features, dim=-1), residuals, targets, None if counted is None else counted.reshape(-1))

    def _unlike(self, batch: FoldBatch, index: int, counted: Tensor) -> LinearMap | None:
        """The layer's first map in the trace of a sample less, where a batch has as many samples as tokens: by its own
        nobody can tell which axis is which."""
        if counted.ndim != 2 or counted.shape[0] != counted.shape[1] or len(batch) < 2 or bool(counted.all()):
            return None
        return self._trace(replace(batch, numbers=batch.numbers[1:])).layers.layers[index].maps[0]

    def _positions(self, layer: Layer, batch: FoldBatch, index: int) -> Tensor | None:
        """Which positions of the layer's feature maps are fitted, per image; None for all."""
        first = layer.maps[0]
        if first.geometry.kind != "convolution":
            return None
        available = math.prod(first.node.meta["val"].shape[2:])
        wanted = math.ceil(ROWS_PER_FEATURE * layer.width / self._images)
        chosen = choose_positions([seed ^ index for seed in batch.seeds], available, wanted)
        return None if chosen is None else chosen.to(self._device)


def _is_time_first(consumer: LinearMap, counted: Tensor) -> bool:
    """Whether a map's rows are (T, B) where the mask is (B, T): XLNet, torch's encoder layers by default."""
    if consumer.geometry.kind != "linear" or counted.ndim != 2:
        return False
    leading = tuple(consumer.node.meta["val"].shape[:-1])
    return len(leading) == 2 and leading[0] == counted.shape[1] and leading != tuple(counted.shape)


def _known(node: Node, *known: Mapping[Node, Any]) -> Any:
    return next(values[node] for values in known if node in values)


def _gate(modules: Sequence[nn.Module]) -> Gate:
    def run(site: int, value: Tensor) -> Tensor:
        module = modules[site]
        # Not as it is called: what hooks do to its output is in the trace.
        return module.forward(value.clone() if getattr(module, "inplace", False) else value)

    return run


def _mask(program: Program, layer: Layer) -> Node | None:
    """The input that says which tokens of a layer are padding: the decoder's own for what depends on its tokens."""
    inputs = {node.name: node for node in program.inputs}
    sources = upstream(layer.target)
    if any(inputs.get(name) in sources for name in DECODER_INPUTS):
        return inputs.get("decoder_attention_mask")
    text = [inputs[name] for name in _TEXT_INPUTS if name in inputs]
    # The image tower of a model with two has as many rows as the text's mask only by chance.
    return inputs.get("attention_mask") if not text or any(node in sources for node in text) else None


def _counted(trace: Trace, index: int, values: Values, positions: Tensor | None) -> Tensor | None:
    """Which positions of a layer no mask calls padding, (B, T), and of the chosen ones where some are; None for all."""
    node = trace.masks[index]
    if node is None:
        return None
    mask, first = values.same[node], trace.layers.layers[index].maps[0]
    output = first.node.meta["val"]
    length = output.shape[2 if first.geometry.kind == "convolution" else 1] if output.ndim == 3 else None
    if length is not None and is_of_sound(mask, {given.name: given.meta["val"] for given in trace.program.inputs}):
        mask = mask_of_frames(mask, length)
    if positions is not None and mask.shape[1:] == (length,):
        mask = mask.gather(1, positions)
    return mask.bool()


def _loaded(trace: Trace, state: Mapping[str, Mapping[str, Any]]) -> Values:
    nodes = trace.program.by_name
    return Values(**{part: {nodes[name]: value for name, value in held.items()} for part, held in state.items()})


def _pruned(stage: Stage, values: Values) -> dict[str, dict[str, Any]]:
    """What is needed from here on, by the nodes' names: what is on disk knows of no nodes."""
    kept = stage.later | stage.features
    return {
        # The masks say at every layer which rows count.
        "same": {node.name: value for node, value in values.same.items() if node in kept or _is_mask(node)},
        "original": {node.name: value for node, value in values.original.items() if node in stage.later},
        "converted": {node.name: value for node, value in values.converted.items() if node in kept},
    }


def _is_mask(node: Node) -> bool:
    return node.op == "placeholder" and node.name.endswith("attention_mask")


class CarriedStates:
    """One state a batch, a dict of tensors, tuples or numbers: in memory up to a limit (bytes), the rest on disk."""

    def __init__(self, memory_limit: int) -> None:
        self._limit, self._used = memory_limit, 0
        self._kept: dict[Any, tuple[Any, int]] = {}
        self._folder: tempfile.TemporaryDirectory | None = None

    def close(self) -> None:
        """Forget all."""
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, key: Any, state: dict[str, Any]) -> None:
        """Keep a state under a key that holds none."""
        size = _bytes(state)
        if self._used + size <= self._limit:
            self._used += size
            self._kept[key] = (state, size)
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hf_lgelu-")
        path = Path(self._folder.name, f"{len(self._kept)}-{abs(hash(key))}.pt")
        torch.save(state, path)
        self._kept[key] = (path, 0)

    def take(self, key: Any) -> dict[str, Any]:
        """Give the state back, and keep it no longer; an empty one where there was none."""
        state, size = self._kept.pop(key, ({}, 0))
        self._used -= size
        if isinstance(state, Path):
            loaded = torch.load(state, weights_only=True)
            state.unlink()
            return loaded
        return state


def _bytes(state: dict[str, Any]) -> int:
    """Each storage once: views share one."""
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in pytree.tree_leaves(state)
        if isinstance(leaf, Tensor)
    }
    return sum(storages.values())
