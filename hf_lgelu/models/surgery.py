"""The exchange of activations: λ-gates replace activations, and ReLU replaces λ-gates, for good or for a while.

The changes of configs are planned first, and made after the modules are exchanged. The plan may refuse, and the model
is unchanged then.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES, check_gate
from hf_lgelu.activation.hardness import DEFAULT_INIT_HARDNESS, DEFAULT_TEMPERATURE
from hf_lgelu.activation.module import GATE_MODULES
from hf_lgelu.models.config_keys import ConfigChange, forget_checkpoint, plan_configs, pretrained_roots, write_configs
from hf_lgelu.models.copies import changeable_module, require_values_here
from hf_lgelu.models.hardening import MAX_SWAP_ERROR, GateHardness, gates_by_site, softest_gate
from hf_lgelu.models.record import loads_elsewhere, plan_gates, saved_without_gates
from hf_lgelu.networks.sites import (
    KINDS,
    LEARNED_KINDS,
    SELF_GATE_KINDS,
    ActivationSite,
    exchanged,
    find_sites,
    lambda_gelu_modules,
    row_of,
    sites_in_words,
)

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class SurgeryReport:
    """The sites that surgery exchanged, {site: "GELU → LambdaGELU"}, and the config keys that it rewrote.

    `gates` are the λ-gates that ReLU has replaced, by site.

    >>> import hf_lgelu
    >>> from torch import nn
    >>> print(hf_lgelu.replace_activations(nn.Sequential(nn.Linear(4, 8), nn.GELU())))
    1 activations replaced
      1: GELU → LambdaGELU
    """

    sites: dict[str, str]
    config_changes: tuple[ConfigChange, ...] = ()
    gates: dict[str, GateHardness] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} activations replaced"]
        lines += [f"  {name}: {change}" for name, change in self.sites.items()]
        lines += [f"  config {change}" for change in self.config_changes]
        if self.gates:
            lines.append(f"  softest gate {softest_gate(self.gates)}")
        return "\n".join(lines)


def replace_activations(
    model: nn.Module,
    *,
    kinds: Sequence[str] = SELF_GATE_KINDS,
    gate: str | None = None,
    init_hardness: float = DEFAULT_INIT_HARDNESS,
    temperature: float = DEFAULT_TEMPERATURE,
    include: Callable[[str], bool] | None = None,
) -> SurgeryReport:
    """Put a λ-gate, each with its own λ, in the place of every activation module of the given kinds.

    Changes `model` in place. For models that ignore the activation string. A transformers config then rebuilds the
    model: by its activation key if the key can say all gates, else by a record, which only `hf_lgelu.from_pretrained`
    reads. A warning comes where another load would not end in an error.

    Args:
        model: any module tree, compiled or not. Give the outermost PreTrainedModel: a part does not know the config of
            the whole.
        kinds: rows of `hf_lgelu.networks.sites.KINDS`, by the computed function, whatever the class: "gelu" (erf, tanh
            and sigmoid forms) and "silu" by default.
        gate: a row of GATES for all sites. By default each site gets the row with its activation at λ = 1 (λ-GELU, its
            tanh form, λ-SiLU). Other activations, such as Mish and the sigmoid form of GELU, get "lambda_gelu".
        init_hardness: λ at the start, above 1.
        temperature: t > 0.
        include: a predicate on site names; the default takes all sites.

    Make the optimizer after the surgery, from `hardness_parameter_groups`: an optimizer made before never learns λ.

    Raises ValueError for nothing to replace or a wrong argument. Raises RuntimeError for a model that cannot be changed
    (wrapped for distributed training or by PEFT, with values elsewhere). After every error the model is unchanged.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    >>> len(hf_lgelu.replace_activations(model))
    1
    >>> round(model[1].hardness.item(), 3)
    1.05
    """
    model = changeable_module(model)
    require_values_here(model.named_modules())  # a new s next to the kept-away values would have no value
    check_gate(DEFAULT_GATE if gate is None else gate)
    sites = found_sites(model, kinds, include)
    modules: list[nn.Module] = []
    for site in sites:
        module = GATE_MODULES[gate or row_of(site.module)](init_hardness=init_hardness, temperature=temperature)
        # On the device of the site's neighbours: a model spread over devices must not fetch s from elsewhere.
        near = next(itertools.chain(site.parent.parameters(), model.parameters()), torch.empty(0))
        modules.append(module.to(near.device))
    report = exchange_activations(model, sites, modules, plan_gates)
    _warn_of_loads(model)
    for encoder in model.modules():
        # It would make shapeless tensors of padded rows, for a fused kernel that layers with λ-gates do not run.
        if isinstance(encoder, nn.TransformerEncoder) and lambda_gelu_modules(encoder):
            encoder.use_nested_tensor = False
    return report


def substitute_relu(model: nn.Module, *, kinds: Sequence[str] = LEARNED_KINDS) -> SurgeryReport:
    """Put `nn.ReLU` in the place of every λ-gate: same weights, a plain ReLU network.

    Changes `model` in place. The largest change at any activation is κ/λ (`swap_error_bound`), so harden first. A
    warning comes if this change is above 0.00213, the value after hardening; `export_relu` then refuses.
    `find_smooth_calls` finds other smooth operations of the network. Under FSDP2 every rank must call it.

    Args:
        model: any module tree. Its config says ReLU then, as in `replace_activations`.
        kinds: rows of `hf_lgelu.networks.sites.KINDS`. ("gelu",) is the plain swap of GELU.

    Raises ValueError for nothing to replace and for λ-gates that each forward makes anew, and RuntimeError for a model
    that cannot be changed. The model is unchanged then.

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
    model = changeable_module(model)
    gates, sites = gates_by_site(model), found_sites(model, kinds)
    texts = (
        (f"{name}.{key}", value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, str)
    )
    by_name = [place for place, value in texts if value in GATES]
    if by_name:  # as Mamba's convolution does, whatever module stands at `act`
        raise ValueError(
            f"{type(model).__name__} makes λ-gates anew in each forward, by their names in {', '.join(by_name[:4])}: "
            "these learn no λ, and no ReLU takes their place. Convert the network with its plain activation"
        )
    report = exchange_activations(model, sites, list(map(relu_for, sites)), plan_gates)
    report = replace(report, gates={site: gate for site, gate in gates.items() if site in report.sites})
    _warn_of_loads(model)
    soft = sum(not gate.swap_error <= MAX_SWAP_ERROR for gate in report.gates.values())
    if soft:
        logger.warning(
            f"{soft} of the {len(report)} gates that became ReLU were soft, and the model computes something else now "
            f"({softest_gate(report.gates)}; hardening leaves {MAX_SWAP_ERROR:.3g}). Harden it "
            "first (harden=True), refit it by convert_to_relu(model, data), or keep what it computes by export_gelu"
        )
    return report


def _warn_of_loads(model: nn.Module) -> None:
    """Warn of each load that would give a network without the new gates, and no error."""
    for _, root in pretrained_roots(model):
        if loads_elsewhere(root.config):
            logger.warning(
                f"{type(root.config).__name__} has no key for its activations: load the saved checkpoint by "
                "hf_lgelu.from_pretrained. Any other load gives a network with the old gates, without an error"
            )
    for warning in saved_without_gates(model):
        logger.warning(warning)


def relu_for(site: ActivationSite) -> nn.ReLU:
    """ReLU for a site, in place only if its activation is: later operations may read the activation's input."""
    return nn.ReLU(inplace=bool(getattr(site.module, "inplace", False)))


class TemporaryRelu:
    """A temporary `substitute_relu` that can be used again: the sites are found once. Weights and config are untouched.

    If a model is wrapped for distributed training, give and call the inner module. `include` chooses sites by name.
    `gates` are the new gates by name. Raises ValueError without sites.

    >>> import torch, hf_lgelu
    >>> from hf_lgelu.models.surgery import TemporaryRelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> with TemporaryRelu(model).applied():
    ...     print(type(model.layers[0].activation).__name__)
    ReLU
    >>> print(type(model.layers[0].activation).__name__)
    LambdaGELU
    """

    def __init__(
        self, model: nn.Module, *, kinds: Sequence[str] = LEARNED_KINDS, include: Callable[[str], bool] | None = None
    ) -> None:
        self._sites = found_sites(changeable_module(model, temporarily=True), kinds, include)
        self._relus = list(map(relu_for, self._sites))
        self.gates = {site.name: relu for site, relu in zip(self._sites, self._relus, strict=True)}

    def applied(self) -> AbstractContextManager[None]:
        """A block with ReLU inside; afterwards, or after an error, the former activations are back."""
        return exchanged(self._sites, self._relus)


def found_sites(
    model: nn.Module, kinds: Sequence[str], include: Callable[[str], bool] | None = None
) -> list[ActivationSite]:
    """The sites of these kinds whose names `include` accepts. If there are none, ValueError names the other kinds."""
    sites = [site for site in find_sites(model, kinds) if include is None or include(site.name)]
    if sites:
        return sites
    others = tuple(dict.fromkeys(site.kind for site in find_sites(model, KINDS) if site.kind not in kinds))
    raise ValueError(
        f"{type(model).__name__} has no activation module of kind {', '.join(kinds)}"
        f"{' that `include` accepts' if include else ''}; it has {sites_in_words(model, KINDS)}"
        f"{f' (kinds={others!r}). convert_to_relu(model, data) makes ReLU of any kind' if others else ''}. Calls of "
        "functions (F.gelu in a forward) are exchanged only by convert_to_relu; hf_lgelu.find_smooth_calls(model, "
        "inputs) names the lines"
    )


def exchange_activations(
    model: nn.Module,
    sites: Sequence[ActivationSite],
    modules: Sequence[nn.Module],
    plan: Callable[[PreTrainedModel, dict[str, nn.Module]], list[ConfigChange]],
) -> SurgeryReport:
    """Put the modules at their sites, and write the configs.

    `plan` gives the changes of the configs (`plan_configs`). If it refuses, the model is unchanged.
    """
    plans = plan_configs(model, dict(zip((site.name for site in sites), modules, strict=True)), plan)
    for site, module in zip(sites, modules, strict=True):
        site.put(module)
    forget_checkpoint(model)
    pairs = zip(sites, modules, strict=True)
    replaced = {site.name: f"{site.module._get_name()} → {type(module).__name__}" for site, module in pairs}
    return SurgeryReport(replaced, write_configs(plans))
