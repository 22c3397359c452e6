"""What each gate costs when it alone becomes ReLU: which ones to keep, if some may stay smooth."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_lgelu.models.example_run import evaluation_mode
from hf_lgelu.models.sites import SMOOTH_KINDS, check_kinds, find_sites
from hf_lgelu.models.surgery import TemporaryRelu, operable_module
from hf_lgelu.refit.batches import for_decoder, read_batches, taken_by
from hf_lgelu.refit.compare import evaluate_conversion
from hf_lgelu.refit.folds import cut_batches


def gate_costs(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int | None = None,
    collate: Callable[[Any], Any] | None = None,
    max_units: int | None = 64,
    kinds: Sequence[str] = SMOOTH_KINDS,
    outputs: Sequence[str] | None = None,
) -> dict[str, float]:
    """{name of a gate: mean KL to the original in nats when it alone is exchanged for ReLU}, the dearest first.

    Of outputs that are no class scores, the relative error. Weights are as they are, so this is an upper end of what
    the gate costs in a conversion, and the order is what it is for: the first names go into `keep` of
    `convert_to_relu`. Three forward passes a gate; `model` stays as it is.

    Args:
        model: as for `convert_to_relu`.
        data: inputs, as there.
        batch_size: inputs run at once.
        collate: makes a batch of a list of the dataset's items.
        max_units: at most so many inputs.
        kinds: rows of `SMOOTH_KINDS`: which gates are looked at.
        outputs: names of the outputs that count; the first is compared.

    Raises ValueError where there is no gate, or no input that the model takes.

    >>> import torch
    >>> from hf_lgelu import gate_costs
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    >>> list(gate_costs(net, torch.randn(50, 4)))
    ['1']
    """
    model = operable_module(model)
    TemporaryRelu(model, kinds=kinds)  # raises where there is no gate
    given = for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate, max_units=max_units))
    batches = list(cut_batches(taken_by(model, given, "data"), batch_size))
    costs = {}
    with evaluation_mode(model):
        for site in find_sites(model, check_kinds(kinds)):
            alone = TemporaryRelu(model, kinds=kinds, include=site.name.__eq__)
            found = evaluate_conversion(model, model, alone, batches, outputs)
            if found is None:
                raise ValueError("no input has a prediction that is no padding; give others")
            costs[site.name] = found.direct.distance
    return dict(sorted(costs.items(), key=lambda entry: -entry[1]))
