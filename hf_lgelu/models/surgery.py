"""λ-gates in the place of a trained, or new, model's activations."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers.utils import logging

from hf_lgelu.activation.gates import DEFAULT_GATE, check_gate
from hf_lgelu.activation.hardness import DEFAULT_INIT_HARDNESS, DEFAULT_TEMPERATURE
from hf_lgelu.activation.module import GATE_MODULES
from hf_lgelu.models.channels import site_input_shapes
from hf_lgelu.models.config_keys import pretrained_roots
from hf_lgelu.models.example_run import Inputs
from hf_lgelu.models.exchange import SurgeryReport, exchange_activations, found_sites
from hf_lgelu.models.operable import operable_module, require_values_here
from hf_lgelu.models.optimizer_groups import DEFAULT_LR_MULTIPLIER, OptimizerChange
from hf_lgelu.models.outputs import agree, outputs_of
from hf_lgelu.models.record import loads_elsewhere, plan_gates
from hf_lgelu.models.sites import SELF_GATE_KINDS, ActivationSite, gate_of, lambda_gelu_modules

logger = logging.get_logger(__name__)

GRANULARITIES = ("layer", "channel")
"""How many λ a site can have: one, or one for each channel or hidden unit."""


def replace_activations(
    model: nn.Module,
    *,
    kinds: Sequence[str] = SELF_GATE_KINDS,
    gate: str | None = None,
    granularity: str = "layer",
    init_hardness: float = DEFAULT_INIT_HARDNESS,
    temperature: float = DEFAULT_TEMPERATURE,
    inputs: Inputs | None = None,
    channel_axis: int | None = None,
    include: Callable[[str], bool] | None = None,
    rewrite_config: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
    hardness_lr_multiplier: float = DEFAULT_LR_MULTIPLIER,
) -> SurgeryReport:
    """Put a λ-gate, each with its own λ, in the place of every activation module of the given kinds.

    Changes `model` in place. Each site gets the row of GATES whose λ = 1 it is: λ-GELU, its tanh form, λ-SiLU. For
    models that ignore the activation string, or for more than one λ per layer.

    Args:
        model: any module tree, compiled or not. Give the outermost PreTrainedModel: a part does not know the config
            that the whole is saved with.
        kinds: rows of `hf_lgelu.models.sites.KINDS`, by what is computed, whatever the class: "gelu" (erf, tanh and
            sigmoid forms) and "silu" by default.
        gate: a row of GATES for all sites. By default each has its own; what no row is at λ = 1, as the sigmoid form
            of GELU and Mish, gets "lambda_gelu".
        granularity: "layer" for one λ a site, "channel" for one λ a channel or hidden unit.
        init_hardness: λ at the start, above 1.
        temperature: t > 0.
        inputs: needed for "channel", which takes its shapes from one forward pass. With them, a model that uses the
            input of an in-place activation again is refused: no λ-gate works in place.
        channel_axis: the axis of channels in every activation's input. By default it is the last behind a linear
            layer, and 1 behind a convolution or batch norm, as one forward pass shows.
        include: a predicate on site names; the default takes all.
        rewrite_config: make a transformers config rebuild the model: by its activation key where that can say one λ
            per layer, else by a record. `from_pretrained` reads both where this package is imported.
        optimizer: one that holds the model's parameters already, changed in place: every new s joins its hardness
            group, and a parameter that is gone leaves it. An optimizer made before that is not given never learns λ.
        hardness_lr_multiplier: c of a hardness group that has to be made.

    Raises:
        TypeError: the model is no module, or an argument has the wrong type.
        ValueError: nothing to replace, an argument is wrong, or the input of an in-place activation is used again.
        RuntimeError: the model is wrapped for distributed training or by PEFT, or scripted; accelerate keeps values of
            it elsewhere (`device_map`); or the optimizer cannot take up a hardness. After every error model and
            optimizer are unchanged.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    >>> len(hf_lgelu.replace_activations(model, granularity="channel", inputs=torch.zeros(1, 4)))
    1
    >>> model[1].raw_hardness.shape
    torch.Size([8])
    """
    model = operable_module(model)
    require_values_here(model.named_modules())  # a new s beside them would have no value
    change = None if optimizer is None else OptimizerChange(optimizer, model, hardness_lr_multiplier)
    if change is not None:
        change.require_room_for_hardness()
    if granularity not in GRANULARITIES:
        raise ValueError(f"unknown granularity {granularity!r}; accepted: {', '.join(GRANULARITIES)}")
    check_gate(DEFAULT_GATE if gate is None else gate)
    sites = found_sites(model, kinds, include)
    shapes = _raw_shapes(model, sites, granularity, inputs, channel_axis)
    if inputs is not None:
        _refuse_reused_inputs(model, sites, inputs)
    modules: list[nn.Module] = []
    for site in sites:
        module = GATE_MODULES[gate or gate_of(site.module)](
            init_hardness=init_hardness, temperature=temperature, raw_shape=shapes[site.name]
        )
        module._is_hf_initialized = True  # or a later model.init_weights() would undo what it has learned
        # Where the site's neighbours live: a model spread over devices must not fetch s from elsewhere.
        near = next(itertools.chain(site.parent.parameters(), model.parameters()), torch.empty(0))
        modules.append(module.to(near.device))
    report = exchange_activations(model, sites, modules, plan_gates if rewrite_config else None, change)
    for _, root in pretrained_roots(model):
        if loads_elsewhere(root.config):
            logger.warning(
                f"{type(root.config).__name__} has no key for its activations: a process that has not imported "
                "hf_lgelu reads the saved checkpoint as a network without λ-GELU. Load it by hf_lgelu.from_pretrained"
            )
    for encoder in model.modules():
        # Of padded rows it makes tensors without a shape, for a fused kernel that layers with λ-gates do not run.
        if isinstance(encoder, nn.TransformerEncoder) and lambda_gelu_modules(encoder):
            encoder.use_nested_tensor = False
    return report


def _raw_shapes(
    model: nn.Module,
    sites: list[ActivationSite],
    granularity: str,
    inputs: Inputs | None,
    channel_axis: int | None,
) -> dict[str, tuple[int, ...]]:
    if granularity == "layer":
        return {site.name: (1,) for site in sites}
    if inputs is None:
        raise ValueError(f"granularity {granularity!r} takes its shapes from a forward pass: pass inputs, a batch")
    shapes = {}
    for name, (shape, found) in site_input_shapes(model, sites, inputs).items():
        axis = found if channel_axis is None else channel_axis
        if axis is None:
            raise ValueError(
                f"{name}: which axis of its input, of shape {shape}, counts channels is not known: it comes from no "
                "convolution and no linear layer. Give channel_axis, with include= for the sites where it holds"
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"channel_axis={axis} is out of range for the input of {name}, of shape {shape}")
        axis %= len(shape)
        shapes[name] = (shape[axis], *[1] * (len(shape) - axis - 1))
    return shapes


def _refuse_reused_inputs(model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs) -> None:
    """Raise ValueError where the model gives other outputs once its in-place activations leave their inputs alone."""
    in_place = [site for site in sites if getattr(site.module, "inplace", False)]
    if not in_place:
        return
    expected = outputs_of(model, inputs)

    def matters(some: Sequence[ActivationSite]) -> bool:
        try:
            for site in some:
                site.module.inplace = False
            found = outputs_of(model, inputs)
        finally:
            for site in some:
                site.module.inplace = True
        return not agree(expected, found)

    if matters(in_place):
        names = [site.name for site in in_place if matters([site])] or [site.name for site in in_place]
        raise ValueError(
            f"{', '.join(names)} works in place, and its input is used again, which would be another tensor behind a "
            "λ-gate. Have the model's code take the output where it means it, or leave out these sites (include=)"
        )
