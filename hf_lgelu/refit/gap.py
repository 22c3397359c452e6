"""Where the rest of the gap sits: what each layer alone adds to the distance between converted and original network."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.pytorch_utils import Conv1D

from hf_lgelu.models.example_run import forward_hooks
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.compare import compared_outputs
from hf_lgelu.refit.folds import FoldBatch, Folds
from hf_lgelu.refit.layers import Layer, LinearMap
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.report import LayerRefit
from hf_lgelu.refit.variants import Variants

_ROWS = 512  # tokens or rows, about, that it is measured on
_LEAST_UNITS, _MOST_UNITS = 8, 128


def some_held_out(folds: Folds) -> list[Batch]:
    """A part of the inputs held out, some hundred rows, as far as this process has them; [] where there are none.

    Which ones hangs on nothing but what they are, and so not on how many processes share them.
    """
    one_in = max(1, folds.held_out_rows // _ROWS, -(-folds.held_out_units // _MOST_UNITS))
    one_in = min(one_in, max(1, folds.held_out_units // _LEAST_UNITS))
    chosen = [
        number
        for batch in folds.held_out
        for number, seed in zip(batch.numbers, batch.seeds, strict=True)
        if seed % one_in == 0
    ]
    size = max(map(len, folds.held_out), default=1)
    parts = [tuple(chosen[start : start + size]) for start in range(0, len(chosen), size)]
    return [FoldBatch(folds.units, part, folds.units.longest(part)).load() for part in parts]


_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D, nn.modules.batchnorm._BatchNorm)


def played_modules(layers: Sequence[Layer], scaled: Set[str]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """{names of a layer's maps: the modules that give all that it gives}, where there are such.

    A map without a bias has its constant in the BatchNorm right behind it, which then gives it. None where that is
    behind a sum, nor where a module has another scale than the original's (in `scaled`): it is before a placed gate.
    """
    found = {}
    for layer in layers:
        holders = [_holder(consumer) for consumer in layer.maps]
        names = tuple(consumer.name for consumer in layer.maps)
        modules = tuple(name for name in holders if name is not None)
        if len(modules) == len(names) and scaled.isdisjoint({*names, *modules}):
            found[names] = modules
    return found


def _holder(consumer: LinearMap) -> str | None:
    """Of a map's constant; the map, where it has none."""
    name = consumer.name if consumer.bias is None else consumer.bias.parameter.rpartition(".")[0]
    path, norm = consumer.target.path, consumer.target.norm
    return name if name == consumer.name or (path and norm is path[0]) else None


def with_returns(
    original: nn.Module,
    converted: nn.Module,
    layers: Sequence[LayerRefit],
    played: Mapping[tuple[str, ...], tuple[str, ...]],
    folds: Folds,
    outputs: Sequence[str] | None,
) -> list[LayerRefit]:
    """The layers with what returns for each, where that can be measured.

    That takes inputs held out and layers in `played` whose modules are called.
    """
    modules = dict(converted.named_modules())
    measured = [
        names for names, givers in played.items() if all(isinstance(modules.get(name), _MAPS) for name in givers)
    ]
    found = returned_by_layer(original, converted, [played[names] for names in measured], some_held_out(folds), outputs)
    if found is None:
        return list(layers)
    returns = dict(zip(measured, found, strict=True))
    return [replace(layer, returns=returns.get(layer.layers)) for layer in layers]


@torch.no_grad()
def returned_by_layer(
    original: nn.Module,
    converted: nn.Module,
    layers: Sequence[Sequence[str]],
    batches: Sequence[Batch],
    outputs: Sequence[str] | None = None,
) -> list[float | None] | None:
    """The distance to the original that returns when a layer alone gives what it gives in the original, for each layer.

    In KL (nats), of outputs that are no class scores relative error; what the layers before it do stays. Both networks
    are in eval mode and stay as they are; every process must call. None where no process has a batch, and of a layer
    with a module that is not called (its weights are used in a function), or where outputs are not finite.

    Args:
        layers: names of the modules of each layer, in both networks and with the same outputs in both.
        batches: of this process.
        outputs: names of the outputs that count.
    """
    names = sorted({name for layer in layers for name in layer})
    variants, silent = Variants(original, len(layers) + 1), set[str]()
    for batch in batches:
        given: dict[str, list[Any]] = {name: [] for name in names}
        with ExitStack() as hooks:
            for name in names:
                hooks.enter_context(forward_hooks([original.get_submodule(name)], _recorder(given[name])))
            reference = compared_outputs(original, batch.inputs, outputs)
        silent |= {name for name in names if not given[name]}
        for number, layer in enumerate([(), *layers]):
            with ExitStack() as hooks:
                for name in layer:
                    hooks.enter_context(forward_hooks([converted.get_submodule(name)], _player(iter(given[name]))))
                variants.add(number, reference, compared_outputs(converted, batch.inputs, outputs), batch)
    found = variants.evaluations()
    if found is None:
        return None
    whole, *alone = [evaluation.refitted.distance for evaluation in found]
    silent = set().union(*each_has(silent))
    returns = [whole - distance for distance in alone]
    return [
        value if math.isfinite(value) and silent.isdisjoint(layer) else None
        for layer, value in zip(layers, returns, strict=True)
    ]


def _recorder(into: list[Any]) -> Any:
    def record(module: nn.Module, inputs: tuple, output: Any) -> None:
        # What works in place behind the layer would leave its own output there.
        into.append(pytree.tree_map_only(Tensor, Tensor.clone, output))

    return record


def _player(outputs: Iterator[Any]) -> Any:
    def play(module: nn.Module, inputs: tuple, output: Any) -> Any:
        return next(outputs)

    return play
