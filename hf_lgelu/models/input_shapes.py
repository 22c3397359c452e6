"""What shape reaches each activation, and which of its axes counts channels."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_lgelu.models.example_run import Inputs, forward_hooks, run_example
from hf_lgelu.models.sites import ActivationSite

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, Conv1D)


def site_input_shapes(
    model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs
) -> dict[str, tuple[tuple[int, ...], int]]:
    """{site name: (shape of its input, channel axis)}, seen in one forward pass.

    The channel axis is 1 behind a convolution or a batch or group normalization and the last behind a
    linear layer. Behind anything else (a residual sum, a reshape) it is 1 from four axes on, else the last.
    Raises ValueError for a site that the example inputs never reach.
    """
    producers: dict[int, tuple[Tensor, nn.Module]] = {}
    seen: dict[str, tuple[tuple[int, ...], int]] = {}

    with one_module_per_site(model, sites) as names:

        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if id(module) in names and args and isinstance(args[0], Tensor):
                producer = producers.get(id(args[0]), (None, None))[1]
                seen.setdefault(names[id(module)], (tuple(args[0].shape), channel_axis(args[0], producer)))
            # What only passes a tensor on (Identity, dropout in eval mode) did not make it.
            if isinstance(output, Tensor) and not (args and output is args[0]):
                producers[id(output)] = (output, module)  # the tensor is kept, so that its id stays its own

        leaves = [module for module in model.modules() if not list(module.children())]
        with forward_hooks(leaves, look):
            run_example(model, inputs)
    missing = [site.name for site in sites if site.name not in seen]
    if missing:
        raise ValueError(f"the example inputs never reach {', '.join(missing)}; give inputs that run the whole model")
    return seen


@contextmanager
def one_module_per_site(model: nn.Module, sites: Sequence[ActivationSite]) -> Iterator[dict[int, str]]:
    """{id(module): site name}, with copies at those of `sites` whose module sits at several places of the model.

    Inside, a hook on the module in place at a site (`site.parent.<attribute>`) sees that site's calls alone.
    """
    places = Counter(id(child) for module in model.modules() for child in module._modules.values())
    names: dict[int, str] = {}
    copies: list[nn.Module] = []
    try:
        for site in sites:
            module = site.module
            if places[id(module)] > 1:
                module = copy.deepcopy(module)
                copies.append(module)
                site.put(module)
            names[id(module)] = site.name
        yield names
    finally:
        for site in sites:
            site.put(site.module)


def channel_axis(tensor: Tensor, producer: nn.Module | None) -> int:
    """The axis of `tensor` that counts channels, given the module whose output it is (None: not a module's)."""
    if isinstance(producer, _CHANNELS_FIRST):
        return 1
    if isinstance(producer, _CHANNELS_LAST):
        return -1
    return 1 if tensor.dim() >= 4 else -1
