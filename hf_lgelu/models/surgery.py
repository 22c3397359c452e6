"""Replacing the activations of a model that exists: plain ones by λ-gates, those by ReLU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers.utils import logging

from hf_lgelu.activation.gates import DEFAULT_GATE, check_gate
from hf_lgelu.activation.hardness import DEFAULT_INIT_HARDNESS, DEFAULT_TEMPERATURE, check_granularity
from hf_lgelu.activation.module import GATE_MODULES, SharedLambdaGate
from hf_lgelu.models.channel_axes import axis_not_told
from hf_lgelu.models.comparison import allowed_rounding, outputs_of
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.config_plans import ConfigPlans
from hf_lgelu.models.example_run import Inputs
from hf_lgelu.models.gate_configs import config_plans, plan_gates, plan_relu
from hf_lgelu.models.input_shapes import site_input_shapes
from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.optimizer_groups import DEFAULT_LR_MULTIPLIER, OptimizerChange
from hf_lgelu.models.origin import forget_checkpoint
from hf_lgelu.models.profile import MAX_SWAP_ERROR, smallest_by_site, softest_gate, swap_errors
from hf_lgelu.models.sites import (
    LEARNED_KINDS,
    SELF_GATE_KINDS,
    ActivationSite,
    check_kinds,
    find_sites,
    gate_of,
)
from hf_lgelu.registry import refuse_guarded

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class ReplacedSite:
    """One activation that surgery exchanged."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class SurgeryReport:
    """What surgery did: the sites it exchanged and the config keys it rewrote.

    >>> import hf_lgelu
    >>> from torch import nn
    >>> report = hf_lgelu.replace_activations(nn.Sequential(nn.Linear(4, 8), nn.GELU()))
    >>> print(report)
    1 activations replaced
      1: GELU → LambdaGELU
    >>> len(report), report.sites[0].name, report.config_changes
    (1, '1', ())
    """

    sites: tuple[ReplacedSite, ...]
    config_changes: tuple[ConfigChange, ...] = ()
    hardness: dict[str, float] = field(default_factory=dict)
    """{site: its smallest λ} of the λ-gates that ReLU has replaced, and ..."""
    swap_error: dict[str, float] = field(default_factory=dict)
    """... {site: κ/λ}, the most that one unit of each has changed."""

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} activations replaced"]
        lines += [f"  {site.name}: {site.old} → {site.new}" for site in self.sites]
        lines += [f"  config {change}" for change in self.config_changes]
        if self.swap_error:
            lines.append(f"  softest gate {softest_gate(self.hardness, self.swap_error)}")
        return "\n".join(lines)


def replace_activations(
    model: nn.Module,
    *,
    kinds: Sequence[str] = SELF_GATE_KINDS,
    gate: str | None = None,
    forward: str = "gate",
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
        model: any module tree. A model wrapped by torch.compile is operated on inside. Give
            the outermost PreTrainedModel: a part does not know the config that the whole is saved with.
        kinds: rows of `SMOOTH_KINDS`: "gelu" (erf, tanh and sigmoid forms of torch, transformers and
            timm), "silu", "mish". The first two by default.
        gate: a row of GATES for all sites. By default each has its own; the sigmoid form of GELU and Mish, which no
            row is at λ = 1, get "lambda_gelu".
        forward: "gate", or "relu" for a surrogate gradient (`LambdaGELU`): a ReLU network from now on, with λ in its
            gradients alone. A config's string then ends in "_relu", and `substitute_relu` changes no output.
        granularity: "layer", "channel", "neuron" or "network".
        init_hardness: λ at the start, above 1.
        temperature: t > 0.
        inputs: needed for "channel" and "neuron", which take their shapes from one forward pass. With them, a model
            that uses the input of an in-place activation again is refused: no λ-gate works in place, and what comes
            later would see another value there. Without them that cannot be known.
        channel_axis: the axis of channels in every activation's input; found from the forward pass if None, by the
            layers that the inputs come from.
        include: a predicate on site names; the default takes all.
        rewrite_config: make a transformers config rebuild the model. With one λ per layer and a key that
            can say so, plain `from_pretrained` then loads it; otherwise `hf_lgelu.from_pretrained` does.
        optimizer: one that holds the model's parameters already, changed in place: every new s joins its hardness
            group, which is made if there is none, and a parameter that is gone leaves it. Without it, make the
            optimizer after the surgery: one made before would never learn λ.
        hardness_lr_multiplier: c of a hardness group that has to be made.

    Raises:
        TypeError: the model is no module, or an argument has the wrong type.
        ValueError: nothing to replace, an argument is wrong, a λ of a gate that goes is also that of one that stays, or
            the input of an in-place activation is used again.
        RuntimeError: the model is wrapped for distributed training or by PEFT, or scripted; or the optimizer cannot
            take up a hardness. After every error model and optimizer are unchanged.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    >>> len(hf_lgelu.replace_activations(model, granularity="channel", inputs=torch.zeros(1, 4)))
    1
    >>> model[1].raw_hardness.shape
    torch.Size([8])
    """
    model = operable_module(model)
    change = None if optimizer is None else OptimizerChange(optimizer, model, hardness_lr_multiplier)
    if change is not None:
        change.require_room_for_hardness()
    granularity = check_granularity(granularity).name
    kinds = check_kinds(kinds)
    check_gate(DEFAULT_GATE if gate is None else gate)
    sites = found_sites(model, kinds, include)
    require_whole_hardness(model, sites)
    shapes = _raw_shapes(model, sites, granularity, inputs, channel_axis)
    if inputs is not None:
        _refuse_reused_inputs(model, sites, inputs)
    modules: list[nn.Module] = []
    for site in sites:
        name = gate or gate_of(site.module)
        if granularity == "network" and modules:
            modules.append(SharedLambdaGate(modules[0], name))
            continue
        module = GATE_MODULES[name](
            init_hardness=init_hardness,
            temperature=temperature,
            granularity=granularity,
            raw_shape=shapes[site.name],
            forward=forward,
        )
        module._is_hf_initialized = True  # or a later model.init_weights() would undo what it has learned
        modules.append(module.to(_device(model, site)))
    plans = config_plans(model, sites, modules, plan_gates) if rewrite_config else ConfigPlans()
    return _carry_out(model, sites, modules, plans, change)


def substitute_relu(
    model: nn.Module,
    *,
    kinds: Sequence[str] = LEARNED_KINDS,
    rewrite_config: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> SurgeryReport:
    """Put `nn.ReLU` in the place of every λ-gate: same weights, a plain ReLU network.

    Changes `model` in place. The largest change at any activation is κ/λ (`swap_error_bound`), so harden first; it is
    0 where the gate's forward pass is ReLU already. A warning says where it is above what hardening leaves, 0.00213;
    `export_relu` refuses that. ReLU works in place where what it replaces did. What else the network computes smoothly
    is seen by `find_smooth_calls`. Under FSDP2 every rank must call it.

    Args:
        model: any module tree; as for `replace_activations`.
        kinds: rows of `SMOOTH_KINDS`. ("gelu",) is the direct GELU → ReLU swap.
        rewrite_config: rewrite the config keys that the family uses, so that a process without hf_lgelu
            loads the saved model.
        optimizer: one that holds the model's parameters, changed in place: every s that is gone leaves it.

    Raises:
        TypeError: the model is no module.
        ValueError: nothing to replace, an optimizer of another model, or a λ of a gate that goes is also that of one
            that stays.
        RuntimeError: a model wrapped for distributed training or by PEFT (merge_and_unload it first), or scripted;
            or (UnsupportedConfigError) a config with no key that says ReLU at exactly these sites. After every error
            model and optimizer are unchanged.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> hf_lgelu.anneal_hardness(model, 1.0)  # every λ at 159.577, as after hardening
    >>> print(hf_lgelu.substitute_relu(model))
    2 activations replaced
      layers.0.activation: LambdaGELU → ReLU
      layers.1.activation: LambdaGELU → ReLU
      config hidden_act: 'lambda_gelu' → 'relu'
      softest gate layers.0.activation: λ = 159.577, at most 0.00107 a unit
    """
    model = operable_module(model)
    hardness, errors = _hardness_of(model, check_kinds(kinds))
    report = put_relu(model, kinds=kinds, rewrite_config=rewrite_config, optimizer=optimizer)
    report = replace(report, hardness=hardness, swap_error=errors)
    soft = sum(not error <= MAX_SWAP_ERROR for error in report.swap_error.values())  # nor NaN
    if soft:
        logger.warning(
            f"{soft} of the {len(report)} gates that became ReLU were soft, and the model computes something else now "
            f"({softest_gate(report.hardness, report.swap_error)}; hardening leaves {MAX_SWAP_ERROR:.3g}). Harden it "
            "first (train with harden=True); without training, convert_to_relu refits the layers behind the gates, "
            "and export_gelu keeps what soft gates compute"
        )
    return report


def put_relu(
    model: nn.Module,
    *,
    kinds: Sequence[str] = LEARNED_KINDS,
    rewrite_config: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> SurgeryReport:
    """`substitute_relu` for callers that judge soft gates themselves: λ is not read. Changes `model` in place."""
    model = operable_module(model)
    change = None if optimizer is None else OptimizerChange(optimizer, model, DEFAULT_LR_MULTIPLIER)
    sites, modules, plans = _plan_substitution(model, kinds, rewrite_config)
    return _carry_out(model, sites, modules, plans, change)


def _hardness_of(model: nn.Module, kinds: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """The smallest λ and κ/λ of the λ-gates of these kinds; nothing of a model without values (device "meta")."""
    going = {site.name for site in find_sites(model, kinds) if site.kind in LEARNED_KINDS}
    if not going or any(parameter.is_meta for parameter in model.parameters()):
        return {}, {}
    smallest = smallest_by_site(model)
    hardness, errors = (
        {name: value for name, value in known.items() if name in going}
        for known in (smallest, swap_errors(model, smallest))
    )
    return hardness, errors


def require_substitutable(model: nn.Module, *, kinds: Sequence[str] = LEARNED_KINDS) -> None:
    """Raise what `substitute_relu` would, and change nothing."""
    _plan_substitution(operable_module(model), kinds, rewrite_config=True)


def _plan_substitution(
    model: nn.Module, kinds: Sequence[str], rewrite_config: bool
) -> tuple[list[ActivationSite], list[nn.Module], ConfigPlans]:
    sites = found_sites(model, check_kinds(kinds), swap=True)
    require_whole_hardness(model, sites)
    modules: list[nn.Module] = [relu_for(site) for site in sites]
    plans = config_plans(model, sites, modules, plan_relu) if rewrite_config else ConfigPlans()
    return sites, modules, plans


def relu_for(site: ActivationSite) -> nn.ReLU:
    """ReLU for the place of an activation: in place where that is, since something may read its input after it."""
    return nn.ReLU(inplace=bool(getattr(site.module, "inplace", False)))


def found_sites(
    model: nn.Module, kinds: Sequence[str], include: Callable[[str], bool] | None = None, *, swap: bool = False
) -> list[ActivationSite]:
    """The activations of these kinds whose names `include` accepts; ValueError, with those there are, if it is none.

    Raises RuntimeError for a model with gates that its config could not build (`refuse_guarded`).
    """
    refuse_guarded(model)
    sites = [site for site in find_sites(model, kinds) if include is None or include(site.name)]
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no activation module of kind {', '.join(kinds)}"
            + (" that `include` accepts" if include else "")
            + f"; it has {_what_there_is(model, kinds, swap)}. Activations called as functions (F.gelu inside a "
            "forward) cannot be exchanged: find_smooth_calls(model, inputs) lists them"
        )
    return sites


def _what_there_is(model: nn.Module, kinds: Sequence[str], swap: bool) -> str:
    present = find_sites(model)
    if present:
        named = "; ".join(sorted({f"{site.kind} at {site.name}" for site in present})[:4])
        others = sorted({site.kind for site in present} - set(kinds))
        if swap:  # which loses what the network has learned to rely on
            return (
                f"{named}. convert_to_relu(model, data) makes ReLU of these; kinds={tuple(others)!r} swaps them as is"
            )
        return f"{named}{f' (kinds={tuple(others)!r} takes them)' if others else ''}"
    smooth = "no smooth activation module at all"
    return f"ReLU already, and {smooth}" if any(isinstance(module, nn.ReLU) for module in model.modules()) else smooth


def require_whole_hardness(model: nn.Module, sites: Sequence[ActivationSite]) -> None:
    """Raise ValueError where a gate that stays uses the hardness of one at `sites`, which would leave the model."""
    going = {site.name for site in sites}
    staying = [site for site in find_sites(model, LEARNED_KINDS) if site.name not in going]
    held = {id(site.module) for site in staying}
    gone = {id(site.module): site.name for site in sites if id(site.module) not in held}
    shared: dict[str, list[str]] = {}
    for site in staying:
        if isinstance(site.module, SharedLambdaGate) and id(site.module.owner) in gone:
            shared.setdefault(gone[id(site.module.owner)], []).append(site.name)
    if shared:
        owner, others = next(iter(shared.items()))
        raise ValueError(
            f"the λ of {owner}, which is to be exchanged, is also that of {', '.join(others[:4])}"
            f"{' and so on' if len(others) > 4 else ''} (granularity 'network'), which would stay without a λ of their "
            f"own. Exchange them all, or keep {owner} too"
        )


def _raw_shapes(
    model: nn.Module,
    sites: list[ActivationSite],
    granularity: str,
    inputs: Inputs | None,
    channel_axis: int | None,
) -> dict[str, tuple[int, ...]]:
    raw_shape = check_granularity(granularity).raw_shape
    if raw_shape is None:
        return {site.name: (1,) for site in sites}
    if inputs is None:
        raise ValueError(
            f"granularity {granularity!r} takes its shapes from a forward pass: pass inputs, e.g. one batch"
        )
    shapes = {}
    for name, (shape, found) in site_input_shapes(model, sites, inputs).items():
        axis = found if channel_axis is None else channel_axis
        if axis is None:
            raise ValueError(
                f"{axis_not_told(name, shape, 'channels')}. Give channel_axis, with include= for the sites where it "
                "holds"
            )
        shapes[name] = raw_shape(shape, axis)
    return shapes


def _refuse_reused_inputs(model: nn.Module, sites: Sequence[ActivationSite], inputs: Inputs) -> None:
    """Raise ValueError where the model computes otherwise once its in-place activations leave their inputs alone."""
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
        pairs = zip(expected, found, strict=True)
        return not all(torch.allclose(a, b, rtol=0, atol=allowed_rounding(a), equal_nan=True) for a, b in pairs)

    if matters(in_place):
        names = [site.name for site in in_place if matters([site])] or [site.name for site in in_place]
        raise ValueError(
            f"{', '.join(names)} works in place, and its input is used again: what uses it sees the activation's "
            "output there, and would see its input behind a λ-gate, which does not work in place. Have the model's "
            "code take the output where it means it, or leave these sites as they are (include=)"
        )


def _carry_out(
    model: nn.Module,
    sites: Sequence[ActivationSite],
    modules: Sequence[nn.Module],
    plans: ConfigPlans,
    change: OptimizerChange | None,
) -> SurgeryReport:
    before = {id(parameter): parameter for parameter in model.parameters()}
    replaced = exchange(sites, modules)
    forget_checkpoint(model)
    if change is not None:
        after = {id(parameter): parameter for parameter in model.parameters()}
        change.carry_out(
            [parameter for key, parameter in before.items() if key not in after],
            [parameter for key, parameter in after.items() if key not in before],
        )
    return SurgeryReport(replaced, plans.carry_out())


def exchange(sites: Sequence[ActivationSite], modules: Sequence[nn.Module]) -> tuple[ReplacedSite, ...]:
    """Put each module at its site."""
    for site, module in zip(sites, modules, strict=True):
        site.put(module)
    return tuple(
        ReplacedSite(site.name, type(site.module).__name__, type(module).__name__)
        for site, module in zip(sites, modules, strict=True)
    )


def _device(model: nn.Module, site: ActivationSite) -> torch.device:
    """Where the site's neighbours live: a model spread over devices must not fetch s from elsewhere."""
    near = next(site.parent.parameters(), None)
    if near is None:
        near = next(model.parameters(), None)
    return torch.device("cpu") if near is None else near.device
