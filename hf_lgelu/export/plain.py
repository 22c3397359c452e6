"""A plain checkpoint of a λ-GELU checkpoint: ReLU for hard gates, or the GELU network of the same function."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_lgelu.comparing.output_comparison import OutputChange, compare_models
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.files import whole_folder
from hf_lgelu.models.checkpoint import require_same_model, save_checkpoint
from hf_lgelu.models.config_keys import ConfigChange, runtime_warnings
from hf_lgelu.models.copies import changeable_module, independent_copy
from hf_lgelu.models.hardening import MAX_SWAP_ERROR, smallest_by_site, softest_gate, swap_errors
from hf_lgelu.models.surgery import put_relu
from hf_lgelu.networks.random_inputs import random_inputs
from hf_lgelu.networks.run import Inputs, forward_hooks, in_dtype, in_own_forward
from hf_lgelu.networks.sites import LEARNED_KINDS, find_sites, lambda_gelu_modules
from hf_lgelu.networks.smooth_calls import SmoothCall, find_smooth_calls

if TYPE_CHECKING:
    from hf_lgelu.export.absorption.absorb import AbsorbedSite

_MAX_CHANGE_BY_RELOADING = (
    1e-5  # the two erf forms of GELU in transformers round differently; the tanh form differs more
)


@dataclass(frozen=True)
class CheckpointExport:
    """The report of `export_relu` or `export_gelu`.

    `hardness` is the smallest λ of each site. `swap_error` is the bound κ/λ, the most by which ReLU in a gate's place
    changes a unit. `change` is the change of the outputs on the example inputs; a GELU export measures it on the
    reloaded folder. After a ReLU export, `smooth_calls` are the smooth operations that are left on these inputs, and
    `unreached` the gates that did not run. After a GELU export, `sites` are the gates with the weights that absorbed λ.
    `warnings` name programs that ignore the activation in this checkpoint's config.
    """

    form: str
    folder: str
    hardness: dict[str, float]
    swap_error: dict[str, float]
    config_changes: tuple[ConfigChange, ...]
    change: OutputChange
    warnings: tuple[str, ...] = ()
    smooth_calls: tuple[SmoothCall, ...] = ()
    unreached: tuple[str, ...] = ()
    sites: tuple["AbsorbedSite", ...] = ()

    @property
    def relative_change(self) -> float:
        """The largest change of an output over the largest output."""
        return _relative(self.change)

    def __str__(self) -> str:
        is_relu = self.form == "relu"
        warnings = list(self.warnings)
        if self.unreached:
            named = ", ".join(self.unreached[:4]) + (", ..." if len(self.unreached) > 4 else "")
            missed = f"{len(self.unreached)} gates did not run on the example inputs ({named})"
            warnings.insert(0, f"{missed} and were not compared: give inputs that run the whole model")
        done = "λ-GELU → ReLU, saved" if is_relu else "λ-gates absorbed by the weights, saved with plain activations"
        lines = [
            f"{len(self.hardness)} {done} in {self.folder}",
            *([f"  softest gate {softest_gate(self.hardness, self.swap_error)}"] if is_relu else []),
            f"  on the example inputs: {self.change}",
            *(f"  {site}" for site in self.sites),
            *(f"  config {change}" for change in self.config_changes),
            *(f"  still smooth: {call}" for call in self.smooth_calls),
            *(f"  warning: {warning}" for warning in warnings),
        ]
        return "\n".join(lines)


def export_relu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    max_swap_error: float = MAX_SWAP_ERROR,
    allow_soft: bool = False,
    overwrite: bool = False,
) -> CheckpointExport:
    """Save `model` with ReLU instead of every λ-GELU, as a checkpoint that needs no hf_lgelu.

    `model` stays as it is. The config key of the model's family is rewritten. The folder is loaded again with
    transformers, and its outputs must be those of the substituted model. A model card is written (`write_card`).

    Args:
        model: a transformers model with λ-GELU, also timm's in its wrapper, or this package's MLP.
        folder: the folder to write. It is written whole or not at all.
        processor: tokenizer or image processor to save in the folder.
        source: folder or Hub id whose tokenizer or image processor is copied instead.
        inputs: example inputs, on which the change of the outputs is measured. None takes random inputs
            (`hf_lgelu.networks.random_inputs`). Real inputs say more.
        max_swap_error: the largest κ/λ that is allowed, with κ = 0.16997 for λ-GELU (`swap_error_bound`). The default
            allows λ-GELU from λ = 79.8 on, half the paper's target.
        allow_soft: export soft gates too.
        overwrite: replace a folder that holds a model.

    Raises:
        TypeError: `model` is no transformers model; `substitute_relu` takes any module.
        ValueError: there is no λ-GELU, gates are too soft (the message has the λ of each), no example inputs are known
            for this model, or the model gives NaN on them.
        RuntimeError: `model` is wrapped by PEFT or for distributed training, no config key gives ReLU at these sites
            (UnsupportedConfigError), or the reloaded folder gives other outputs.
        OSError: `folder` is not empty (FileExistsError) or cannot be written. An existing folder stays as it was.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification, anneal_hardness, export_relu
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> anneal_hardness(model, 1.0)  # every λ at 159.577, as after hardening
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_relu(model, f"{folder}/relu")
        >>> report.change.unchanged_predictions, max(report.swap_error.values()) < 0.0011
        (1.0, True)
    """
    return _export(
        "relu", model, folder, overwrite, processor=processor, source=source, inputs=inputs,
        max_swap_error=max_swap_error, allow_soft=allow_soft,
    )  # fmt: skip


def export_gelu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    overwrite: bool = False,
) -> CheckpointExport:
    """Save `model` as a GELU model of the same function, as a checkpoint that needs no hf_lgelu.

    `model` stays as it is. The layers around each activation absorb its λ (`absorb_hardness`). The config key of the
    model's family is rewritten. The folder is loaded again with transformers and compared with the λ-GELU model. A
    model card is written (`write_card`). The other arguments and errors are those of `export_relu`.

    Args:
        inputs: example inputs that run the whole model. None takes random inputs.

    Raises:
        TypeError: `model` is no transformers model; `absorb_hardness` takes any module.
        ValueError: λ of a site cannot be absorbed; the message names each site with the reason.
        RuntimeError: no config key gives GELU in its erf form at these sites (UnsupportedConfigError), or the reloaded
            folder computes something else.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification, export_gelu
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_gelu(model, f"{folder}/gelu")
        >>> report.relative_change < 1e-5
        True
    """
    return _export("gelu", model, folder, overwrite, processor=processor, source=source, inputs=inputs)


def _export(
    form: str, model: PreTrainedModel, folder: str | os.PathLike, overwrite: bool, **options: Any
) -> CheckpointExport:
    with whole_folder(folder, overwrite=overwrite) as new:
        report = save_plain(model, new, form=form, **options)
        write_card(changeable_module(model), new, form=form, change=report.change)
    return replace(report, folder=str(folder))


@in_own_forward
def save_plain(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    form: str,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    max_swap_error: float = MAX_SWAP_ERROR,
    allow_soft: bool = False,
) -> CheckpointExport:
    """The report of `export_relu` ("relu") or `export_gelu` ("gelu"), for an existing folder, without a card."""
    model = changeable_module(model)
    if not isinstance(model, PreTrainedModel):
        in_memory = "substitute_relu(model)" if form == "relu" else "absorb_hardness(model, inputs)"
        raise TypeError(
            f"export_{form} saves transformers models, got {type(model).__name__}; {in_memory} changes any module in "
            "memory"
        )
    if not lambda_gelu_modules(model):
        advice = "it has no smooth gate that could be exchanged"
        if smooth := sorted({site.kind for site in find_sites(model)}):
            made = "convert_to_relu(model, data) (hf-lgelu convert) converts these without training"
            advice = f"its gates are {', '.join(smooth)}; {made}"
        raise ValueError(f"{type(model).__name__} has no λ-GELU for export_{form} to replace; {advice}")
    hardness = smallest_by_site(model)
    swap_error = swap_errors(model, hardness)
    inputs = random_inputs(model) if inputs is None else inputs
    plain = independent_copy(model).eval()
    sites: tuple[AbsorbedSite, ...] = ()
    smooth_calls: tuple[SmoothCall, ...] = ()
    unreached: tuple[str, ...] = ()
    if form == "relu":
        config_changes = put_relu(plain).config_changes
        gates, ran = find_sites(model, LEARNED_KINDS), set()
        with forward_hooks([gate.module for gate in gates], lambda module, given, output: ran.add(id(module))):
            change = compare_models(model, plain, inputs)
        soft = [name for name, error in swap_error.items() if not error <= max_swap_error]  # nor NaN
        if soft and not allow_soft:
            named = "; ".join(f"{name}: λ = {hardness[name]:.4g}, κ/λ = {swap_error[name]:.3g}" for name in soft[:8])
            more = f"; and {len(soft) - 8} more" if len(soft) > 8 else ""
            raise ValueError(
                f"{len(soft)} of {len(swap_error)} gates are too soft for ReLU: the swap changes a unit by up to "
                f"{max(swap_error.values()):.3g}, and {max_swap_error:.3g} is allowed ({named}{more}). On the example "
                f"inputs: {change}. Harden the model, keep its function with export_gelu, or give `allow_soft`"
            )
        unreached = tuple(gate.name for gate in gates if id(gate.module) not in ran)
    else:
        from hf_lgelu.export.absorption.absorb import absorb_hardness

        absorbed = absorb_hardness(plain, inputs)
        config_changes, sites = absorbed.config_changes, absorbed.sites
    save_checkpoint(plain, folder, processor, source)
    warnings = runtime_warnings(plain)
    if form == "relu":
        reloaded = type(plain).from_pretrained(folder, dtype=plain.dtype, use_safetensors=True)
        require_same_model(plain, reloaded.to(plain.device), inputs)
        smooth_calls = tuple(find_smooth_calls(plain, inputs))
    else:
        change = _change_after_reload(model, plain, folder, inputs)
        if warnings and config_changes:
            # Every program computes the default activation of a family.
            own = type(plain.config)().to_dict()
            if all(len(each.path) == 1 and own.get(each.path[0]) == each.new for each in config_changes):
                warnings = ()
    return CheckpointExport(
        form, str(folder), hardness, swap_error, config_changes, change, warnings, smooth_calls, unreached, sites
    )


def _change_after_reload(
    model: PreTrainedModel, plain: PreTrainedModel, folder: str | os.PathLike, inputs: Inputs
) -> OutputChange:
    """The change of the outputs after the weights absorbed λ, measured on the reloaded folder in a wide dtype."""
    from hf_lgelu.export.absorption.absorb import max_relative_change

    dtype = plain.dtype
    wide = torch.promote_types(dtype, torch.float32)
    reloaded = type(plain).from_pretrained(folder, dtype=wide, use_safetensors=True).to(plain.device)
    inputs = in_dtype(inputs, wide)  # of both copies, because not every network casts its inputs
    before, after = (m if dtype == wide else independent_copy(m).to(wide) for m in (model, plain))
    by_reloading = compare_models(after, reloaded, inputs)
    if not _relative(by_reloading) <= _MAX_CHANGE_BY_RELOADING:
        raise RuntimeError(f"the reloaded GELU model computes something else than the saved one: {by_reloading}")
    change = compare_models(before, reloaded, inputs)
    allowed = max_relative_change(dtype)
    if not _relative(change) <= allowed:
        raise RuntimeError(
            f"the GELU model computes something else than the λ-GELU model: {change}. Rounding in {dtype} explains "
            f"{allowed:g} of the largest output at most; no file is kept"
        )
    return change


def _relative(change: OutputChange) -> float:
    return change.max_change / change.largest_output if change.largest_output else change.max_change
