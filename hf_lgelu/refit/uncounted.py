"""Outputs that do not count, and the maps behind gates that keep their weights for it."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from hf_lgelu.formats import quoted
from hf_lgelu.models.example_run import run_example
from hf_lgelu.models.sites import ActivationSite
from hf_lgelu.models.task_outputs import task_outputs, uncounted_outputs
from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.layers import find_layers
from hf_lgelu.refit.program import Program
from hf_lgelu.refit.report import LayerRefit


def uncounted_warnings(
    model: nn.Module, sites: Sequence[ActivationSite], batch: Batch, layers: Sequence[LayerRefit]
) -> Iterator[str]:
    """Of maps behind gates that count, on ways to outputs that do not: they were not refitted, as `layers` say.

    Heads of which no gate counts are told by their gates. A second trace finds the maps, where there are such outputs.
    """
    output = run_example(model, batch.inputs)
    counted, others = list(task_outputs(output)), list(uncounted_outputs(output))
    if not others:
        return
    program = Program(model, sites, batch.inputs, _all_outputs)
    beside = {name for layer in layers if layer.is_beside for name in layer.sites}
    known = {name for layer in layers for name in layer.layers}
    kept = [
        consumer.name
        for layer in find_layers(program, model, sites).layers
        if not beside.issuperset(sites[index].name for index in layer.sites)
        for consumer in layer.maps
        if consumer.name not in known
    ]
    if kept:
        yield (
            f"of the outputs {quoted(others)} did not count, and {quoted(kept)} behind gates on the way there kept the "
            f"weights: what these give now was not measured. Name what you use of them in outputs=, beside "
            f"{quoted(counted)}"
        )


def _all_outputs(output: Any) -> list[Tensor]:
    return list((task_outputs(output) | uncounted_outputs(output)).values())
