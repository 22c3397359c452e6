"""What shape reaches each activation, and which of its axes counts channels."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_lgelu.models.example_run import ExampleInputs, forward_hooks, run_example
from hf_lgelu.models.sites import ActivationSite

_CHANNELS_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)


def site_input_shapes(
    model: nn.Module, sites: Sequence[ActivationSite], example_inputs: ExampleInputs
) -> dict[str, tuple[tuple[int, ...], int]]:
    """{site name: (shape of its input, channel axis)}, seen in one forward pass.

    The channel axis is 1 behind a convolution or a batch or group normalization and the last behind
    any other module; where no module made the tensor (a residual sum), 1 from four axes on.
    Raises ValueError for a site that the example inputs never reach.
    """
    leaves = [module for module in model.modules() if not list(module.children())]
    producers: dict[int, tuple[Tensor, nn.Module]] = {}
    seen: dict[int, tuple[tuple[int, ...], int]] = {}
    wanted = {id(site.module) for site in sites}

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if id(module) in wanted and args and isinstance(args[0], Tensor):
            producer = producers.get(id(args[0]), (None, None))[1]
            seen.setdefault(id(module), (tuple(args[0].shape), _channel_axis(args[0], producer)))
        if isinstance(output, Tensor):
            producers[id(output)] = (output, module)  # the tensor is kept, so that its id stays its own

    with forward_hooks(leaves, look):
        run_example(model, example_inputs)
    missing = [site.name for site in sites if id(site.module) not in seen]
    if missing:
        raise ValueError(f"the example inputs never reach {', '.join(missing)}; give inputs that run the whole model")
    return {site.name: seen[id(site.module)] for site in sites}


def _channel_axis(tensor: Tensor, producer: nn.Module | None) -> int:
    if isinstance(producer, _CHANNELS_FIRST):
        return 1
    if producer is None and tensor.dim() >= 4:
        return 1
    return -1
