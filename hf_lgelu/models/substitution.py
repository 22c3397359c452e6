"""ReLU in the place of λ-gates, or of other activations, for good or for a while: the paper's substitution."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from accelerate.utils import has_offloaded_params
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_lgelu.models.config_keys import ConfigChange, UnsupportedConfigError, plan_config_changes
from hf_lgelu.models.exchange import SurgeryReport, exchange_activations, found_sites, put_modules
from hf_lgelu.models.hardening import MAX_SWAP_ERROR, smallest_by_site, softest_gate, swap_errors
from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.optimizer_groups import DEFAULT_LR_MULTIPLIER, OptimizerChange
from hf_lgelu.models.record import forget_sites
from hf_lgelu.models.sites import LEARNED_KINDS, ActivationSite, find_sites

logger = logging.get_logger(__name__)


def substitute_relu(
    model: nn.Module,
    *,
    kinds: Sequence[str] = LEARNED_KINDS,
    rewrite_config: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> SurgeryReport:
    """Put `nn.ReLU` in the place of every λ-gate: same weights, a plain ReLU network.

    Changes `model` in place. The largest change at any activation is κ/λ (`swap_error_bound`), so harden first. A
    warning says where it is above what hardening leaves, 0.00213; `export_relu` refuses that. What else the network
    computes smoothly is seen by `find_smooth_calls`. Under FSDP2 every rank must call it.

    Args:
        model: any module tree; as for `replace_activations`.
        kinds: rows of `hf_lgelu.models.sites.KINDS`. ("gelu",) is the direct GELU → ReLU swap.
        rewrite_config: rewrite the config keys that the family uses, so that a process without hf_lgelu
            loads the saved model.
        optimizer: one that holds the model's parameters, changed in place: every s that is gone leaves it.

    Raises:
        TypeError: the model is no module.
        ValueError: nothing to replace, or an optimizer of another model.
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
    hardness, errors = _hardness_of(model, kinds)
    report = put_relu(model, kinds=kinds, rewrite_config=rewrite_config, optimizer=optimizer)
    report = replace(report, hardness=hardness, swap_error=errors)
    soft = sum(not error <= MAX_SWAP_ERROR for error in report.swap_error.values())  # nor NaN
    if soft:
        logger.warning(
            f"{soft} of the {len(report)} gates that became ReLU were soft, and the model computes something else now "
            f"({softest_gate(report.hardness, report.swap_error)}; hardening leaves {MAX_SWAP_ERROR:.3g}). Harden it "
            "first (train with harden=True), or convert_to_relu(model, data), which refits what is behind the gates; "
            "export_gelu keeps what soft gates compute"
        )
    return report


def put_relu(
    model: nn.Module,
    *,
    kinds: Sequence[str] = LEARNED_KINDS,
    rewrite_config: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> SurgeryReport:
    """`substitute_relu` without reading λ, for callers that judge soft gates themselves. Changes `model` in place."""
    model = operable_module(model)
    change = None if optimizer is None else OptimizerChange(optimizer, model, DEFAULT_LR_MULTIPLIER)
    sites = found_sites(model, kinds, swap=True)
    plan = _plan_relu if rewrite_config else None
    return exchange_activations(model, sites, [relu_for(site) for site in sites], plan, change)


def _hardness_of(model: nn.Module, kinds: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """The smallest λ and κ/λ of the λ-gates of these kinds; none of a model without values (device "meta")."""
    gates = {site.name: site.module for site in find_sites(model, kinds) if site.kind in LEARNED_KINDS}
    on_meta = [gate for gate in gates.values() if any(parameter.is_meta for parameter in gate.parameters())]
    if not gates or not all(map(has_offloaded_params, on_meta)):  # accelerate may keep the values elsewhere
        return {}, {}
    smallest = smallest_by_site(model)
    errors = swap_errors(model, smallest)
    return {name: smallest[name] for name in gates}, {name: errors[name] for name in gates}


def _plan_relu(root: PreTrainedModel, planned: dict[str, nn.Module]) -> list[ConfigChange]:
    try:
        return plan_config_changes(root, set(planned), "relu") + forget_sites(root.config)
    except UnsupportedConfigError as error:
        raise UnsupportedConfigError(
            f"{error}. A saved model would come back with others; pass rewrite_config=False to substitute in memory"
        ) from error


def relu_for(site: ActivationSite) -> nn.ReLU:
    """ReLU for a site: in place where the activation is, because something may read the activation's input later."""
    return nn.ReLU(inplace=bool(getattr(site.module, "inplace", False)))


class TemporaryRelu:
    """`substitute_relu` for a while, again and again: the sites are found once.

    Weights and config are untouched. Of a model wrapped for distributed training, give and call the inner module:
    DistributedDataParallel broadcasts buffers at each forward and fails where all that the model had were λ-GELU's.
    `make` gives another gate than ReLU, and `include` says by name which sites. Raises ValueError if there are none.

    >>> import torch, hf_lgelu
    >>> from hf_lgelu.models.substitution import TemporaryRelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> with TemporaryRelu(model).applied():
    ...     print(type(model.layers[0].activation).__name__)
    ReLU
    >>> print(type(model.layers[0].activation).__name__)
    LambdaGELU
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kinds: Sequence[str] = LEARNED_KINDS,
        make: Callable[[], nn.Module] | None = None,
        include: Callable[[str], bool] | None = None,
    ) -> None:
        self._model, self._inside = model, operable_module(model, temporarily=True)
        self._sites = found_sites(self._inside, kinds, include)
        self._relus = [relu_for(site) if make is None else make() for site in self._sites]

    @contextmanager
    def applied(self) -> Iterator[SurgeryReport]:
        """ReLU inside the block; after it, also after an error, the former activations."""
        try:
            yield SurgeryReport(put_modules(self._sites, self._relus))
        finally:
            for site in self._sites:
                site.put(site.module)

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` is the one given at first, with every site unchanged."""
        return self._model is model and all(site.is_in_place(self._inside) for site in self._sites)
