"""Where the rest of the gap sits: what each layer alone adds to the distance between converted and original network."""

from collections.abc import Collection, Iterator, Sequence
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


_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Conv1D)


def with_returns(
    original: nn.Module,
    converted: nn.Module,
    layers: Sequence[LayerRefit],
    scaled: Collection[str],
    folds: Folds,
    outputs: Sequence[str] | None,
) -> list[LayerRefit]:
    """The layers with what returns for each, where that can be measured.

    That takes inputs held out and layers that are modules by themselves, of the original's scale (not in `scaled`).
    """
    modules = dict(converted.named_modules())
    measured = [
        layer
        for layer in layers
        if all(isinstance(modules.get(name), _MAPS) and name not in scaled for name in layer.layers)
    ]
    batches = some_held_out(folds)
    found = returned_by_layer(original, converted, [layer.layers for layer in measured], batches, outputs)
    if found is None:
        return list(layers)
    returns = {layer.layers: value for layer, value in zip(measured, found, strict=True)}
    return [replace(layer, returns=returns.get(layer.layers)) for layer in layers]


@torch.no_grad()
def returned_by_layer(
    original: nn.Module,
    converted: nn.Module,
    layers: Sequence[Sequence[str]],
    batches: Sequence[Batch],
    outputs: Sequence[str] | None = None,
) -> list[float] | None:
    """The distance to the original that returns when a layer alone gives what it gives in the original, for each layer.

    In KL (nats), of outputs that are no class scores relative error; what the layers before it do stays. Both networks
    are in eval mode and stay as they are; every process must call. None where no process has a batch.

    Args:
        layers: names of the modules of each layer, in both networks and with the same outputs in both.
        batches: of this process.
        outputs: names of the outputs that count.
    """
    names = sorted({name for layer in layers for name in layer})
    variants = Variants(original, len(layers) + 1)
    for batch in batches:
        given: dict[str, list[Any]] = {name: [] for name in names}
        with ExitStack() as hooks:
            for name in names:
                hooks.enter_context(forward_hooks([original.get_submodule(name)], _recorder(given[name])))
            reference = compared_outputs(original, batch.inputs, outputs)
        for number, layer in enumerate([(), *layers]):
            with ExitStack() as hooks:
                for name in layer:
                    hooks.enter_context(forward_hooks([converted.get_submodule(name)], _player(iter(given[name]))))
                variants.add(number, reference, compared_outputs(converted, batch.inputs, outputs), batch)
    found = variants.evaluations()
    if found is None:
        return None
    whole, *alone = [evaluation.refitted.distance for evaluation in found]
    return [whole - distance for distance in alone]


def _recorder(into: list[Any]) -> Any:
    def record(module: nn.Module, inputs: tuple, output: Any) -> None:
        # What works in place behind the layer would leave its own output there.
        into.append(pytree.tree_map_only(Tensor, Tensor.clone, output))

    return record


def _player(outputs: Iterator[Any]) -> Any:
    def play(module: nn.Module, inputs: tuple, output: Any) -> Any:
        return next(outputs)

    return play
