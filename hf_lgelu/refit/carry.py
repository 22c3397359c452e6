"""The original and the student, carried side by side from layer to layer, batch by batch.

Both networks stop at every layer and go on from there, so one forward pass of each serves all layers.
"""

import itertools
import math
import tempfile
from collections import ChainMap, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from hf_lgelu.graph.aims import LinearMap
from hf_lgelu.graph.layers import NEVER_REACHED, Layer, Layers, find_layers, gates_before
from hf_lgelu.graph.maps import choose_positions, shape_of
from hf_lgelu.graph.recording import Recording, Recordings, Stage, gates_of, plan_stages, upstream
from hf_lgelu.networks.masks import DECODER_INPUTS, MASKS, is_of_sound, mask_over
from hf_lgelu.processes import each_has, own_part
from hf_lgelu.refit.folds import FoldBatch, Folds
from hf_lgelu.refit.moments import FitRows, Moments, widened
from hf_lgelu.refit.ridge import held_out_once

ROWS_PER_FEATURE = 16
"""Positions of feature maps that a convolution is fitted on, per feature. A ResNet-18's layers had errors 8 % to 26 %
larger with 8 than with 32."""

LEAST_POSITIONS = 2**15
"""Positions in all for a narrow convolution: of the maps that end a detector, one in a hundred shows an object."""

POSITIONS_WITH_KINKS = 2**11
"""The same for a depthwise convolution, which has few features and is fitted once for each kink."""

MEMORY_LIMIT = 2 * 2**30
"""Bytes of carried values that stay in memory; the rest goes to the folder for temporary files."""

KINKS = (0.0, *(sign * step / 5 for step in range(1, 6) for sign in (-1, 1)))
"""The kinks that the gate before a depthwise map can get, in units of its input: five on each side of zero."""

_HIDDEN = -1e30
_TEXT_INPUTS = ("input_ids", "inputs_embeds")


Run = Callable[[Iterable[Node], MutableMapping[Node, Any], dict[Node, Any]], None]
"""(operations, values, numbers of the batch): `Recording.run` with the weights and gates of one network."""


class RecordedPair(NamedTuple):
    """Both networks by one recording: its layers, and a stage and a mask for each layer."""

    recording: Recording
    layers: Layers
    stages: list[Stage]
    masks: list[Node | None]
    of_sound: bool  # whether the masks are those of sounds
    run_original: Run
    run_student: Run


def _key(layer: Layer) -> tuple[str, tuple[int, ...]]:
    return layer.name, layer.sites


def _of_all(first: RecordedPair, pairs: Sequence[RecordedPair]) -> tuple[Layers, list[Recording]]:
    """(the layers of all recordings in an order of computation, the recording that each is from).

    Gates without a refit are those of `first`, less those that another recording reaches.
    """
    found: dict[Any, tuple[Layer, Recording]] = {}
    before: dict[Any, set[Any]] = defaultdict(set)  # {a layer: those that come right before it in some recording}
    for pair in (first, *pairs):
        keys = list(map(_key, pair.layers.layers))
        for key, layer in zip(keys, pair.layers.layers, strict=True):
            found.setdefault(key, (layer, pair.recording))
        for earlier, later in itertools.pairwise([None, *keys]):
            before[later].add(earlier)
    ordered = [found[key] for key in TopologicalSorter(before).static_order() if key is not None]
    reached = frozenset().union(*(pair.recording.reached for pair in pairs))
    unfit = {
        (name, reason): sites
        for (name, reason), sites in first.layers.unfit.items()
        if reason != NEVER_REACHED or not sites <= reached  # it has the one gate that it names
    }
    return replace(first.layers, layers=[layer for layer, _ in ordered], unfit=unfit), [each for _, each in ordered]


class _Arrival(NamedTuple):
    """A batch that has come to a layer, with the values of both networks up to the layer's aim."""

    number: int  # the layer's, in `Carrier.pair`
    batch: FoldBatch
    pair: RecordedPair  # by the batch's own recording
    layer: Layer  # as in this recording, which may be that of another shape
    mask: Node | None
    original: dict[Node, Any]  # values, also of the masks among the inputs
    student: dict[Node, Any]
    numbers: dict[Node, Any]  # of the batch, for the operations that take some


class ValueStore:
    """The values of each batch between two stages: in memory up to a limit (bytes), the rest on disk."""

    def __init__(self, memory_limit: int) -> None:
        self._left = memory_limit
        self._held: dict[Any, tuple[list[Any] | Path, Any, int]] = {}
        self._folder: tempfile.TemporaryDirectory | None = None

    def close(self) -> None:
        """Forget all values, in memory and on disk."""
        self._held.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def put(self, key: Any, values: Any) -> None:
        """Keep values, in containers of any kind, under a new key."""
        leaves, structure = pytree.tree_flatten(values)
        storages = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())  # views share a storage
        if size <= self._left:
            self._left -= size
            self._held[key] = leaves, structure, size
            return
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hf_lgelu-")
        path = Path(self._folder.name, f"{len(self._held)}-{abs(hash(key))}.pt")
        torch.save(leaves, path)
        self._held[key] = path, structure, 0

    def take(self, key: Any) -> Any:
        """The values under a key, which is free again."""
        leaves, structure, size = self._held.pop(key)
        self._left += size
        if isinstance(leaves, Path):
            path, leaves = leaves, torch.load(leaves, weights_only=True)
            path.unlink()
        return pytree.tree_unflatten(leaves, structure)


class Carrier:
    """Both networks with every batch of the folds.

    Its life:

    1. Both networks are recorded on the first batch. Batches of other shapes are recorded when they first come to a
       layer. Where values decide what runs, all batches are recorded at once: `layers` are those of all recordings, and
       `pair` is the recording with the most layers.
    2. `advance_to(index)` is called once for each layer, in order. For each batch, the student runs the maps of
       the layer before again, with their refitted weights, up to that layer's aim. Then both networks run up to the new
       layer's aim. The layer's rows are read off and summed up, and the values that later layers use are kept.
    3. The caller writes refitted weights, and kinks, into the student. A Carrier writes nothing.
    4. `close` frees all values.
    """

    def __init__(self, recordings: Recordings, student: nn.Module, folds: Folds) -> None:
        """`student` is a copy of the recorded model with other gates at its sites. It is refitted meanwhile."""
        self.recordings, self._student = recordings, student
        own = {id(batch) for batch in own_part(folds.fitted)}
        self._batches = [
            [piece for batch in fold if id(batch) in own for piece in batch.not_square()] for fold in folds.folds
        ]
        self._new_gates = [student.get_submodule(site.name) for site in recordings.sites]
        self._images = sum(map(len, folds.fitted))
        self._device = next((parameter.device for parameter in student.parameters()), torch.device("cpu"))
        self._values = ValueStore(MEMORY_LIMIT)
        self._pairs: dict[Recording, RecordedPair] = {}
        self._with_padding: set[int] = set()
        if self.pair_of(folds.first).recording.belongs_to_batch:  # others run other parts: experts that tokens choose
            for batch in folds.fitted:
                for piece in batch.not_square():
                    self.pair_of(piece)
        self.pair = max(self._pairs.values(), key=lambda pair: len(pair.layers.layers))
        self.layers, self.recording_of = _of_all(self.pair, list(self._pairs.values()))

    def close(self) -> None:
        """Forget all values that were carried."""
        self._values.close()

    @torch.no_grad()
    def advance_to(self, index: int) -> list[list[Moments]]:
        """Carry all batches on to a layer: the sums over its rows, for each fold.

        A fold without a row is left out. Of a wide layer the ridge holds out the first fold only, so the sums of all
        others are added up.

        A depthwise layer has such sums for each of the KINKS of the gate before it, any other layer for kink 0 alone.
        """
        layer = self.layers.layers[index]
        groups = layer.maps[0].geometry.groups
        channels = len(layer.maps[0].gain) // groups
        kinks = KINKS if layer.depthwise_gate is not None and len(self._batches) > 1 else KINKS[:1]
        sums: list[list[Moments]] = [[] for _ in kinks]
        for fold in range(len(self._batches)):
            totals = [Moments.zeros(groups, layer.width, channels, self._device) for _ in kinks]
            for arrival in self._arrivals(index, fold):
                for maps in arrival.layer.uses:
                    at_use = _without_drift_before(arrival, maps[0]) if layer.feeds_itself else arrival
                    for total, rows in zip(totals, self._rows(at_use, maps, kinks), strict=True):
                        total.add(*rows)
            for total, parts in zip(totals, sums, strict=True):
                of_fold = total.reduce_over_processes()
                if not of_fold.count:  # no batch of the fold leads to the layer
                    continue
                # The rows so far are at most all rows, so the ridge will hold out the first fold only, too.
                if len(parts) > 1 and held_out_once(of_fold.gram.shape[-1], sum(part.count for part in parts)):
                    parts[-1] += of_fold
                else:
                    parts.append(of_fold)
        self._with_padding.update(*each_has(self._with_padding))
        return sums

    def note(self, index: int) -> str | None:
        """The report's note on the rows of a layer that the batches have come to, or None."""
        padding = "padding may count: its rows are not those of the attention mask"
        return padding if index in self._with_padding else None

    @torch.no_grad()
    def values(self, batch: FoldBatch, nodes: Collection[Node]) -> Iterator[tuple[Node, Tensor]]:
        """(node, its value in the original on a batch) of nodes of the batch's recording, when each is computed."""
        pair, numbers = self.pair_of(batch), self.recordings.numbers_of(batch)
        values = pair.recording.bind(batch.load().inputs, self._device)
        needed = pair.recording.in_order(set().union(*map(upstream, nodes)))
        last_user = {operand: node for node in needed for operand in node.all_input_nodes}
        for node in needed:
            pair.run_original([node], values, numbers)
            if node in nodes:
                yield node, values[node]
            for operand in node.all_input_nodes:
                if last_user[operand] is node:
                    values.pop(operand, None)

    def _arrivals(self, index: int, fold: int) -> Iterator[_Arrival]:
        """The batches of a fold that come to a layer, with their values up to its aim."""
        for place, batch in enumerate(self._batches[fold]):
            pair = self.pair_of(batch)
            keys, key = list(map(_key, pair.layers.layers)), _key(self.layers.layers[index])
            if key not in keys:  # what Python read of this batch led past the layer
                continue
            here = keys.index(key)  # in the batch's own recording
            stage, numbers = pair.stages[here], self.recordings.numbers_of(batch)
            if here == 0:
                original = pair.recording.bind(batch.load().inputs, self._device)
                student = dict(original)
            else:
                original, student = self._values.take((fold, place))
                pair.run_student(pair.stages[here - 1].after, student, numbers)  # with the refitted weights
            for run, values in ((pair.run_original, original), (pair.run_student, student)):
                run((*stage.before, *stage.after), values, numbers)
            layer, mask = pair.layers.layers[here], pair.masks[here]
            yield _Arrival(index, batch, pair, layer, mask, original, student, numbers)
            if here + 1 < len(pair.stages):
                both = ((original, stage.original), (student, stage.student))
                needed = tuple({node: values[node] for node in values if node in later} for values, later in both)
                self._values.put((fold, place), needed)
            original.clear()  # the caller may still hold them while the next batch runs
            student.clear()

    def _rows(self, arrival: _Arrival, maps: Sequence[LinearMap], kinks: Sequence[float]) -> list[FitRows]:
        """Rows of one use of a layer: the student's inputs of its `maps`, and original minus student at the aim.

        The list has an entry for each kink of the gate before, kink 0 first. A convolution has rows at some positions.
        """
        layer, first, positions = arrival.layer, maps[0], None
        sizes = lambda node: arrival.student[node].shape  # noqa: E731
        if first.geometry.kind == "convolution":
            least = LEAST_POSITIONS if layer.depthwise_gate is None else POSITIONS_WITH_KINKS
            wanted = math.ceil(max(ROWS_PER_FEATURE * layer.width, least) / self._images)
            available = math.prod(arrival.student[first.operation.node].shape[2:])
            chosen = choose_positions([seed ^ arrival.number for seed in arrival.batch.seeds], available, wanted)
            positions = None if chosen is None else chosen.to(self._device)
        original, student = (widened(each[first.aim]) for each in (arrival.original, arrival.student))
        # An added mask hides what both hold there, as for classes that cannot occur; its numbers differ by rounding.
        hidden = (original < _HIDDEN) & (student < _HIDDEN)
        residuals, originals = (
            first.geometry.output_rows(first.in_output_layout(value.masked_fill(hidden, 0.0), sizes), positions)
            for value in (original - student, original)
        )
        inputs = [
            consumer.geometry.feature_rows(arrival.student[consumer.operation.data], positions) for consumer in maps
        ]
        counted = self._counted(arrival, first, positions, len(residuals))
        rows = FitRows(torch.cat(inputs, dim=-1), residuals, originals, counted)
        if layer.depthwise_gate is None or len(kinks) == 1:
            return [rows]
        at_gate, weight = layer.from_gate[0].args[0], first.operation.weight_in(self._student)
        weight = weight.reshape(*residuals.shape[1:], -1)
        to_aim = widened(weight * first.gain.to(weight).view(len(weight), -1, 1))
        by_kink = [rows]
        for kink in kinks[1:]:
            values = ChainMap({at_gate: arrival.student[at_gate] - kink}, arrival.student)
            arrival.pair.run_student(layer.from_gate, values, arrival.numbers)
            features = first.geometry.feature_rows(values[layer.from_gate[-1]], positions)
            lost = torch.einsum("ngd,gmd->ngm", widened(rows.features - features), to_aim)
            by_kink.append(rows._replace(features=features, residuals=residuals + lost))
        return by_kink

    def _counted(self, arrival: _Arrival, first: LinearMap, positions: Tensor | None, rows: int) -> Tensor | None:
        """The mask (rows,) of a layer's rows that are not padding; None where all rows count."""
        mask = None if arrival.mask is None else arrival.original[arrival.mask]
        if mask is None:
            return None
        shape = tuple(arrival.student[first.operation.node].shape)
        axes = (shape[0], *shape[2:]) if first.geometry.kind == "convolution" else shape[:-1]
        mask = mask.bool()
        counted = mask_over(mask, axes, {"input_values": mask} if arrival.pair.of_sound else {})
        if counted is not None:
            return (counted if positions is None else counted.flatten(1).gather(1, positions)).reshape(-1)
        if mask.numel() == rows:  # time first, as in XLNet and torch's encoder layers, or a single axis
            return (mask.mT if mask.shape == axes[::-1] else mask).reshape(-1)
        if rows != len(mask) and not bool(mask.all()):  # the rows are not tokens, frames of sound or samples
            self._with_padding.add(arrival.number)
        return None

    def pair_of(self, batch: FoldBatch) -> RecordedPair:
        """Both networks for the batch, recorded on the first call."""
        recording = self.recordings.of(batch)
        if recording not in self._pairs:
            model, sites = self.recordings.model, self.recordings.sites
            layers, old_gates = find_layers(recording, model, sites), [site.module for site in sites]
            # Kinks of a gated unit are written once the later of its two maps is refitted: both maps run again then.
            earlier_halves: dict[Node, Node] = {}
            for fed in layers.fed_gates:
                if fed.other is not None:
                    earlier, later = sorted((fed.before.node, fed.other.node), key=recording.operations.index)
                    earlier_halves[later] = earlier
            stops: list[tuple[list[Node], list[Node]]] = []  # of each layer: what changes with its weights, its aims
            for layer in layers.layers:
                nodes = [consumer.operation.node for use in layer.uses for consumer in use]
                nodes += [earlier_halves[node] for node in nodes if node in earlier_halves]
                nodes += [] if layer.depthwise_gate is None else [layer.depthwise_gate.before.node]
                if layer.feeds_itself:
                    nodes += [gate for use, *_ in layer.uses for gate in gates_before(recording, use)]
                stops.append((nodes, [use[0].aim for use in layer.uses]))
            masks = [_mask_of(recording, layer) for layer in layers.layers]
            inputs = {name: torch.empty(shape_of(node), device="meta") for node, name in recording.inputs.items()}
            pair = RecordedPair(
                recording,
                layers,
                plan_stages(recording, stops, {*filter(None, masks)}),
                masks,
                any(is_of_sound(inputs[name], inputs) for name in MASKS if name in inputs),
                partial(recording.run, weights=recording.weights(model), gate=gates_of(old_gates)),
                partial(recording.run, weights=recording.weights(self._student), gate=gates_of(self._new_gates)),
            )
            self._pairs[recording] = pair
        return self._pairs[recording]


def _without_drift_before(arrival: _Arrival, use: LinearMap) -> _Arrival:
    """The original's values up to the gates before a map, and values with the new gates from there on.

    Where one use reads the output of another, a fit on the student's values would correct each use for the drift of the
    earlier uses. That drift is gone once these are refitted, too.
    """
    recording, student = arrival.pair.recording, dict(arrival.original)
    nodes = recording.downstream(gates_before(recording, use), upstream(use.aim))
    arrival.pair.run_student(recording.in_order(nodes), student, arrival.numbers)
    return arrival._replace(student=student)


def _mask_of(recording: Recording, layer: Layer) -> Node | None:
    """The input that masks a layer's tokens: the decoder's mask for layers that depend on the decoder's tokens."""
    inputs = {name: node for node, name in recording.inputs.items()}
    sources = upstream(layer.maps[0].aim)
    if any(inputs.get(name) in sources for name in DECODER_INPUTS):
        return inputs.get("decoder_attention_mask")
    text = [inputs[name] for name in _TEXT_INPUTS if name in inputs]
    # An image tower next to a text tower has as many rows as the text's mask only by chance.
    return inputs.get("attention_mask") if not text or any(node in sources for node in text) else None
