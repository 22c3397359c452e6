"""A plain checkpoint of a λ-GELU checkpoint, with ReLU for hard gates; `gelu` has the sibling for soft gates."""

import os
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_lgelu.comparing.comparison import compare_models
from hf_lgelu.comparing.distance import Distance
from hf_lgelu.export.card import write_card
from hf_lgelu.files import whole_folder
from hf_lgelu.models.checkpoint import require_same_model, save_checkpoint
from hf_lgelu.models.config_keys import ConfigChange, runtime_warnings
from hf_lgelu.models.copies import changeable_module, independent_copy
from hf_lgelu.models.hardening import MAX_SWAP_ERROR, softest_gate
from hf_lgelu.models.surgery import put_relu
from hf_lgelu.networks.random_inputs import random_inputs
from hf_lgelu.networks.run import Inputs, forward_hooks, in_own_forward
from hf_lgelu.networks.sites import find_sites, lambda_gelu_modules
from hf_lgelu.networks.smooth_calls import SmoothCall, find_smooth_calls


@dataclass(frozen=True)
class CheckpointExport:
    """The report of `export_relu` or `export_gelu`.

    `hardness` is the smallest λ of each site. `swap_error` is the bound κ/λ, the most by which ReLU in a gate's place
    changes a unit. `change` is the change of the outputs on the example inputs. After a ReLU export, `smooth_calls` are
    the smooth operations that are left on these inputs, and `unreached` the gates that did not run. `warnings` name
    programs that ignore the activation in this checkpoint's config.
    """

    form: str
    folder: str
    hardness: dict[str, float]
    swap_error: dict[str, float]
    config_changes: tuple[ConfigChange, ...]
    change: Distance
    warnings: tuple[str, ...] = ()
    smooth_calls: tuple[SmoothCall, ...] = ()
    unreached: tuple[str, ...] = ()

    def __str__(self) -> str:
        is_relu = self.form == "relu"
        warnings = list(self.warnings)
        if self.unreached:
            named = ", ".join(self.unreached[:4]) + (", ..." if len(self.unreached) > 4 else "")
            missed = f"{len(self.unreached)} gates did not run on the example inputs ({named})"
            warnings.insert(0, f"{missed} and were not compared: give inputs that run the whole model")
        done = "λ-GELU → ReLU, saved" if is_relu else "λ-gates → plain activations, λ in the maps around them, saved"
        lines = [
            f"{len(self.hardness)} {done} in {self.folder}",
            *([f"  softest gate {softest_gate(self.hardness, self.swap_error)}"] if is_relu else []),
            f"  on the example inputs: {self.change}",
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
        >>> report.change.agreement, max(report.swap_error.values()) < 0.0011
        (1.0, True)
    """
    model = require_exportable(model, "relu")
    with whole_folder(folder, overwrite=overwrite) as new:
        report = save_relu(
            model, new, processor=processor, source=source, inputs=inputs, max_swap_error=max_swap_error,
            allow_soft=allow_soft,
        )  # fmt: skip
        write_card(model, new, report=report)
    return replace(report, folder=str(folder))


@in_own_forward
def save_relu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    max_swap_error: float = MAX_SWAP_ERROR,
    allow_soft: bool = False,
) -> CheckpointExport:
    """The report of `export_relu`, for an existing folder, without a card."""
    inputs = random_inputs(model) if inputs is None else inputs
    relu = independent_copy(model).eval()
    surgery = put_relu(relu)
    gates, ran = {name: model.get_submodule(name) for name in surgery.hardness}, set[nn.Module]()
    with forward_hooks(list(gates.values()), lambda module, given, output: ran.add(module)):
        change = compare_models(model, relu, inputs)
    soft = [name for name, error in surgery.swap_error.items() if not error <= max_swap_error]  # nor NaN
    if soft and not allow_soft:
        words = [f"{name}: λ = {surgery.hardness[name]:.4g}, κ/λ = {surgery.swap_error[name]:.3g}" for name in soft]
        more = f"; and {len(soft) - 8} more" if len(soft) > 8 else ""
        raise ValueError(
            f"{len(soft)} of {len(gates)} gates are too soft for ReLU: the swap changes a unit by up to "
            f"{max(surgery.swap_error.values()):.3g}, and {max_swap_error:.3g} is allowed ({'; '.join(words[:8])}"
            f"{more}). On the example inputs: {change}. Harden the model, keep its function with export_gelu, or give "
            "`allow_soft`"
        )
    save_checkpoint(relu, folder, processor, source)
    require_same_model(relu, reloaded_as(relu, folder), inputs)
    return CheckpointExport(
        "relu",
        str(folder),
        surgery.hardness,
        surgery.swap_error,
        surgery.config_changes,
        change,
        runtime_warnings(relu),
        tuple(find_smooth_calls(relu, inputs)),
        tuple(name for name, gate in gates.items() if gate not in ran),
    )


def require_exportable(model: nn.Module, form: str) -> PreTrainedModel:
    """The model to export, not compiled. Raises the errors of `export_relu` for a model that cannot be exported."""
    model = changeable_module(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"export_{form} saves transformers models, got {type(model).__name__}; substitute_relu(model) changes any "
            "module in memory"
        )
    if not lambda_gelu_modules(model):
        advice = "it has no smooth gate that could be exchanged"
        if smooth := sorted({site.kind for site in find_sites(model)}):
            made = "convert_to_relu(model, data) (hf-lgelu convert) converts these without training"
            advice = f"its gates are {', '.join(smooth)}; {made}"
        raise ValueError(f"{type(model).__name__} has no λ-GELU for export_{form} to replace; {advice}")
    return model


def reloaded_as(model: PreTrainedModel, folder: str | os.PathLike) -> PreTrainedModel:
    """The saved model as plain transformers loads it, in the dtype and on the device of `model`."""
    return type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True).to(model.device)
