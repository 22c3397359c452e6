"""The cost of each gate when it alone becomes ReLU, to choose the gates that stay smooth."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from hf_lgelu.comparing.comparison import compare_outputs
from hf_lgelu.models.copies import changeable_module
from hf_lgelu.models.surgery import TemporaryRelu
from hf_lgelu.networks.batches import Batch, cut_batches, nothing_given, read_batches
from hf_lgelu.networks.network import Network
from hf_lgelu.networks.outputs import OutputReader, Outputs
from hf_lgelu.networks.sites import SMOOTH_KINDS, check_kinds, find_sites
from hf_lgelu.refit.config import SAMPLES_TO_RANK
from hf_lgelu.refit.refusals import WHERE_NOT_FINITE


def gate_costs(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int | None = None,
    max_samples: int | None = SAMPLES_TO_RANK,
    outputs: Sequence[str] | None = None,
    box_channels: int | None = None,
) -> dict[str, float]:
    """{name of a gate: distance from the original when it alone is exchanged for ReLU}, the dearest first.

    The distance is that of `hf_lgelu.comparing.distance.Distance`, infinite where outputs are not finite. No
    weight is refitted, so a conversion costs less, and only the order counts. `keep=3` of `convert_to_relu` keeps the
    first three gates. The function takes one forward pass per gate and one more; `model` stays as it is. `model` and
    `data` are as for `convert_to_relu`, and the options as in `ConversionConfig`.

    Raises ValueError where there is no gate, no input that the model takes, or no finite output.

    >>> import torch
    >>> from hf_lgelu.refit.gate_costs import gate_costs
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    >>> list(gate_costs(net, torch.randn(50, 4)))
    ['1']
    """
    model = changeable_module(model)
    TemporaryRelu(model, kinds=SMOOTH_KINDS)  # raises where there is no gate
    with Network(model, outputs=outputs, box_channels=box_channels) as network:
        read = read_batches(data, model=model, batch_size=batch_size, max_samples=max_samples)
        batches = list(cut_batches(read, batch_size))
        if not batches:
            raise nothing_given("data")
        return swap_costs(network.read, batches, SMOOTH_KINDS)


def swap_costs(
    read: OutputReader,
    batches: Sequence[Batch],
    kinds: Sequence[str],
    make: Callable[[], nn.Module] = nn.ReLU,
) -> dict[str, float]:
    """`gate_costs` of the model that `read` reads, on this process's batches; `make` builds the new gate."""
    model = read.model
    names = [site.name for site in find_sites(model, check_kinds(kinds))]
    swaps = {name: TemporaryRelu(model, kinds=kinds, include=name.__eq__, make=make) for name in names}

    def alone(name: str, inputs: Any) -> Outputs:
        with swaps[name].applied():
            return read(inputs)

    runs = {name: partial(alone, name) for name in names}
    _, found = compare_outputs(read, runs, batches, over_processes=True)
    if not all(comparison.rows for comparison in found.values()):
        raise ValueError("no input has a prediction that is no padding; give others")
    costs = {name: comparison.distance.value for name, comparison in found.items()}
    if min(costs.values()) == math.inf:
        raise ValueError(f"the outputs are not finite: {WHERE_NOT_FINITE}")
    return dict(sorted(costs.items(), key=lambda entry: entry[1], reverse=True))
