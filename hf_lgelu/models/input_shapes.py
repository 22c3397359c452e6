"""What shape reaches each activation, and which of its axes counts channels."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_lgelu.models.channel_axes import ChannelAxes
from hf_lgelu.models.example_run import Inputs, forward_hooks, run_example
from hf_lgelu.models.sites import ActivationSite


def site_input_shapes(
    model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs
) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """{site name: (shape of its input, channel axis from 0, None where it is not known)}, seen in one forward pass.

    The channel axis is followed from the layer that made the input (`ChannelAxes`).
    Raises ValueError for a site that the example inputs never reach.
    """
    axes = ChannelAxes(model)
    seen: dict[str, tuple[tuple[int, ...], int | None]] = {}

    with one_module_per_site(model, sites) as names:

        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor):
                seen.setdefault(names[id(module)], (tuple(args[0].shape), axes.of(args[0])))

        with forward_hooks([module for module in model.modules() if id(module) in names], look), axes.watching():
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
