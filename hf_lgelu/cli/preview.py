"""What a conversion would change and refuse, from one look at the network and its data: nothing is fitted."""

import math
from typing import Any

from torch import nn

from hf_lgelu.comparing.comparison import compare_outputs
from hf_lgelu.comparing.distance import networks_table
from hf_lgelu.formats import text_table
from hf_lgelu.graph.layers import find_layers
from hf_lgelu.models.config_keys import runtime_warnings
from hf_lgelu.networks.network import Network
from hf_lgelu.networks.outputs import Outputs
from hf_lgelu.networks.sites import sites_in_words
from hf_lgelu.refit.config import ConversionConfig
from hf_lgelu.refit.convert import prepare, still_smooth, with_plain_parts
from hf_lgelu.refit.folds import load_own
from hf_lgelu.refit.task import swap_costs
from hf_lgelu.refit.widen import can_be_wider

_DEAREST = 3


def preview_conversion(model: nn.Module, data: Any, config: ConversionConfig) -> str:
    """The gates and maps, the cost of the plain swap and of single gates, and what stays smooth, in lines of text.

    Raises the errors of `convert_to_relu` before the first fit. `model` and `data` are as there.
    """
    model, _ = with_plain_parts(model, config)
    with Network(model, config.kinds, config.outputs, config.box_channels) as network:
        task = prepare(network, data, config)
        exchange, sites = task.exchange, task.recordings.sites
        recording = task.recordings.of(task.folds.first)
        found = find_layers(recording, model, sites)
        maps = sum(len(layer.maps) for layer in found.layers)
        unfit = set().union(*found.unfit.values())
        refitted = len(sites) - len(unfit) - len(found.uncounted)
        lines = [
            f"{type(model).__name__}, {sites_in_words(model)}: nothing is written, because this is a dry run.",
            f"{refitted} of {len(sites)} gates would be converted with a refit of {maps} linear maps after them.",
        ]
        for (name, reason), before in found.unfit.items():
            gates = ", ".join(sites[index].name for index in sorted(before))
            lines.append(f"- {gates}: only the gate, because of {reason if name in reason else f'{name}: {reason}'}")
        lines += [f"- {sites[index].name}: only the gate, no output that counts needs it" for index in found.uncounted]
        if can_be_wider(model, recording, found):
            lines.append("More hidden units usually help most: `width` 1.25 adds a quarter to each block.")

        def swapped(inputs: Any) -> Outputs:
            with exchange.plain_swap(model).applied():
                return task.read(inputs)

        batches = load_own(task.folds.held_out or task.folds.fitted)
        metrics, compared = compare_outputs(task.read, {"swap": swapped}, batches, over_processes=True)
        table = networks_table(metrics, {"plain swap": compared["swap"].distance}, main=True)
        lines += [f"{exchange.target.title} in their place, without a refit:", *text_table(*table, text_columns=1)]
        if len(sites) > 1:
            costs = list(swap_costs(task.read, task.folds, exchange).items())[:_DEAREST]
            dearest = ", ".join(f"{name} {cost:.3g}" for name, cost in costs if math.isfinite(cost))
            lines.append(f"The gates that cost most, each swapped alone: {dearest}. `keep` leaves gates smooth.")
        with exchange.plain_swap(model).applied():
            lines += [f"still smooth: {call}" for call in still_smooth(model, task.folds, config.outputs)]
        lines += [f"warning: with {exchange.target.title} in its config, {text}" for text in runtime_warnings(model)]
        return "\n".join([*lines, *(f"warning: {text}" for text in task.warnings)])
