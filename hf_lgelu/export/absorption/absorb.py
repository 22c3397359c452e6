"""λ absorbed by the weights: a soft λ-GELU model becomes a GELU model of the same function, a λ-SiLU model a SiLU one.

a(x; λ) = gelu(λx)/λ (arXiv:2603.21991). So a λ-GELU between two layers is a GELU between two other layers. The layer
before is multiplied by λ (weight and bias), and the weight of the layer after is divided by λ.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.activation.gates import GATES
from hf_lgelu.export.absorption.scaling import plan_scaling, scale_parameters
from hf_lgelu.graph.recording import Recording
from hf_lgelu.models.config_keys import (
    ConfigChange,
    UnsupportedConfigError,
    combined,
    forget_checkpoint,
    plan_config_changes,
    without_guard,
)
from hf_lgelu.models.copies import require_values_here
from hf_lgelu.models.record import forget_sites
from hf_lgelu.models.surgery import plan_configs, write_configs
from hf_lgelu.networks.outputs import largest_finite
from hf_lgelu.networks.run import Inputs, in_own_forward
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites, require_lambda_gelu, uncompiled


@dataclass(frozen=True)
class AbsorbedSite:
    """A λ-GELU that became a GELU: its λ (one, or one per channel), and the weights multiplied and divided by λ.

    The biases of the layers in `multiplied` were multiplied as well.
    """

    name: str
    hardness: tuple[float, ...]
    multiplied: tuple[str, ...]
    divided: tuple[str, ...]

    def __str__(self) -> str:
        low, high = min(self.hardness), max(self.hardness)
        value = f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
        return f"{self.name}: λ = {value}, {', '.join(self.multiplied)} × λ, {', '.join(self.divided)} / λ"


@dataclass(frozen=True)
class AbsorptionReport:
    """The sites whose λ `absorb_hardness` absorbed, and the config keys that it rewrote."""

    sites: tuple[AbsorbedSite, ...]
    config_changes: tuple[ConfigChange, ...] = ()

    def __len__(self) -> int:
        return len(self.sites)

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} λ-gates absorbed by the weights, plain activations in their place"]
        lines += [f"  {site}" for site in self.sites]
        lines += [f"  config {change}" for change in self.config_changes]
        return "\n".join(lines)


@in_own_forward
def absorb_hardness(model: nn.Module, inputs: Inputs, *, rewrite_config: bool = True) -> AbsorptionReport:
    """Replace every λ-gate by its plain activation, and put λ into the layers around the gate; the function stays.

    The plain activation is the gate at λ = 1: `nn.GELU` (erf) for λ-GELU, its tanh form, or `nn.SiLU`.

    Changes `model` in place; hooks of a gate stay at its place. One λ per site (granularity "layer") goes through
    reshapes, pooling and products with other tensors (gated units). A λ per channel is absorbed where the channels can
    be followed to both layers. λ is absorbed with its present value, also with a hardening override. New weights are
    computed in float64 and rounded once to their own dtype.

    Args:
        model: any module tree.
        inputs: inputs of one forward pass, from which the layers around each activation are read. They must run the
            whole model. Parts that depend on the inputs' shape or values are taken as in this pass.
        rewrite_config: rewrite the config keys that the family uses, so that transformers loads the saved model.

    Raises:
        ValueError: no λ-GELU; sites whose λ cannot be absorbed, each with the reason
            (after a residual sum, feeding several layers, between tied weights); or outputs that would change.
        RuntimeError: (UnsupportedConfigError) no config key says GELU in its erf form at these sites.

    Example:
        >>> import torch
        >>> from hf_lgelu import LambdaGELU, absorb_hardness
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), LambdaGELU(init_hardness=2.0), torch.nn.Linear(4, 1))
        >>> inputs = torch.randn(5, 3)
        >>> before = model(inputs)
        >>> _ = absorb_hardness(model, inputs)
        >>> type(model[1]).__name__, torch.allclose(model(inputs), before, atol=1e-6)
        ('GELU', True)
    """
    model = uncompiled(model)
    require_lambda_gelu(model)
    require_values_here(model.named_modules())
    sites = find_sites(model, LEARNED_KINDS)
    if not sites:
        raise ValueError("the model is a single λ-GELU with no layer to absorb λ; give the model that contains it")
    hardness = [site.module.hardness.detach().cpu().double() for site in sites]
    recording = Recording(model, sites, inputs)
    if recording.decided_from < math.inf:
        raise ValueError(
            f"{type(model).__name__} decides by values after a gate what it computes (a branch, a number of rows), so "
            "one forward pass does not show all layers around its gates. Keep λ-GELU (save_pretrained)"
        )
    plan = plan_scaling(model, recording, dict(enumerate(hardness)))
    if plan.reasons:
        reasons = "".join(f"\n  {sites[index].name}: {plan.reasons[index]}" for index in sorted(plan.reasons))
        raise ValueError(
            f"{type(model).__name__} cannot become a plain GELU model of the same function: the layers around "
            f"{len(plan.reasons)} of its activations cannot absorb λ:{reasons}\nKeep λ-GELU (save_pretrained), or, "
            "once its gates are hard, make a ReLU model of it with export_relu"
        )
    gates = {site.name: site.kind for site in sites}
    plans = plan_configs(model, gates, _plan_plain if rewrite_config else None)
    # Inside the model, numbers may be rounded like the weights, whatever the dtype of the outputs.
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    share = max(max_relative_change(dtype) for dtype in dtypes)

    scale_parameters(
        model,
        plan.factors,
        inputs,
        changed="with λ in its weights",
        exchanged=[(site, GATES[site.kind].plain_module()) for site in sites],
        allowed=lambda output: max(share, max_relative_change(output.dtype)) * largest_finite(output),
    )
    forget_checkpoint(model)
    absorbed = tuple(
        AbsorbedSite(site.name, tuple(hardness[index].flatten().tolist()), plan.before[index], plan.after[index])
        for index, site in enumerate(sites)
    )
    return AbsorptionReport(absorbed, write_configs(plans))


def _plan_plain(root: PreTrainedModel, gates: dict[str, str]) -> list[ConfigChange]:
    """The config changes that make the sites of `gates` plain; raises UnsupportedConfigError if there are none."""
    changes: list[ConfigChange] = []
    for gate in dict.fromkeys(gates.values()):
        names = {name for name in gates if gates[name] == gate}
        refusals: list[Exception] = []
        for activation in GATES[gate].plain_names:
            try:
                changes += plan_config_changes(root, names, activation)
                break
            except UnsupportedConfigError as refusal:
                refusals.append(refusal)
        else:
            raise UnsupportedConfigError(
                f"{refusals[0]}. Saved and loaded, the model would come back with other activations than "
                f"{GATES[gate].plain_label}. To absorb λ in memory only, pass rewrite_config=False"
            ) from refusals[0]
    lifted = without_guard(root.config)
    return combined(root.config, lifted, [each for each in changes if each not in lifted]) + forget_sites(root.config)


def max_relative_change(dtype: torch.dtype) -> float:
    """The largest allowed change of the outputs, as a fraction of the largest output, for weights of a dtype."""
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 1e-1)
