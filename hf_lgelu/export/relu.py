"""λ-GELU checkpoint → plain ReLU checkpoint, refused where the gates are not hard."""

import os
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from hf_lgelu.export.hub.card import write_card
from hf_lgelu.files import whole_folder
from hf_lgelu.models.checkpoint import save_checkpoint
from hf_lgelu.models.comparison import OutputChange, compare_models, require_same_model
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.example_run import Inputs, forward_hooks
from hf_lgelu.models.hardening import MAX_SWAP_ERROR, smallest_by_site, softest_gate, swap_errors
from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.own_forward import in_own_forward, independent_copy
from hf_lgelu.models.random_inputs import random_inputs
from hf_lgelu.models.runtimes import runtime_warnings
from hf_lgelu.models.sites import LEARNED_KINDS, find_sites, require_lambda_gelu
from hf_lgelu.models.smooth_calls import SmoothCall, find_smooth_calls
from hf_lgelu.models.substitution import put_relu


@dataclass(frozen=True)
class ReLUExport:
    """What `export_relu` did.

    `hardness` is the smallest λ of each site, `swap_error` the bound κ/λ there: the most that one unit of that gate
    can change. `change` is what the swap did to the outputs on the example inputs. `smooth_calls` is what the ReLU
    model still computes smoothly there; an empty list says that no gate on that path is smooth. `unreached` are the
    gates that did not run on them, of which nothing there says anything. `warnings` name the programs that are known
    not to compute what this checkpoint says (`RUNTIMES`).
    """

    folder: str
    hardness: dict[str, float]
    swap_error: dict[str, float]
    config_changes: tuple[ConfigChange, ...]
    change: OutputChange
    smooth_calls: tuple[SmoothCall, ...]
    processor_files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{len(self.hardness)} λ-GELU → ReLU, saved in {self.folder}",
            f"  softest gate {softest_gate(self.hardness, self.swap_error)}",
            f"  on the example inputs: {self.change}",
            *(f"  config {change}" for change in self.config_changes),
            *(f"  still smooth: {call}" for call in self.smooth_calls),
            *([f"  warning: {_unreached_text(self.unreached)}"] if self.unreached else []),
            *(f"  warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


@in_own_forward
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
) -> ReLUExport:
    """Save `model` with ReLU in the place of every λ-GELU: a checkpoint that needs nothing of this package.

    `model` stays as it is. The config key of the model's family is rewritten, the folder is loaded again with
    transformers, and its outputs must be those of the substituted model. A model card goes along (`write_card`).

    Args:
        model: a transformers model with λ-GELU: a family of transformers, timm in its wrapper, our MLP.
        folder: where to; complete or not there.
        processor: tokenizer or image processor, saved beside the weights.
        source: folder or Hub id from which the tokenizer's and processor's files are copied instead.
        inputs: on which the change of the outputs is measured; random ones of the right shape
            (`hf_lgelu.models.random_inputs`) if None. Real inputs say more.
        max_swap_error: the largest κ/λ that is let through, κ = 0.16997 for λ-GELU (`swap_error_bound`). The
            default is that of λ-GELU at λ = 79.8, half the paper's target.
        allow_soft: export all the same.
        overwrite: replace a folder that is not empty.

    Raises:
        TypeError: `model` is no transformers model; `substitute_relu` takes any module.
        ValueError: no λ-GELU, gates softer than `max_swap_error` allows (the message has the λ of each), or no
            example inputs are known for this model, or the model gives NaN on them.
        RuntimeError: `model` is wrapped by PEFT or for distributed training, no config key says ReLU at these sites
            (UnsupportedConfigError), or the folder, loaded again, gives other outputs.
        FileExistsError: `folder` is not empty.
        OSError: the disk is full or not writable; what was at `folder` is as it was.

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
    with whole_folder(folder, overwrite=overwrite) as new:
        report = save_relu(
            model, new, processor=processor, source=source, inputs=inputs, max_swap_error=max_swap_error,
            allow_soft=allow_soft,
        )  # fmt: skip
        write_card(operable_module(model), new, form="relu", change=report.change)
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
) -> ReLUExport:
    """`export_relu` into a folder that is there, without the card."""
    model = operable_module(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"export_relu saves transformers models, got {type(model).__name__}; substitute_relu(model) changes any "
            "module in memory"
        )
    _require_lambda_gelu(model)
    hardness = smallest_by_site(model)
    swap_error = swap_errors(model, hardness)
    inputs = random_inputs(model) if inputs is None else inputs
    if not allow_soft:
        _refuse_soft_gates(model, hardness, swap_error, max_swap_error, inputs)
    substituted = independent_copy(model).eval()
    report = put_relu(substituted)
    gates, ran = find_sites(model, LEARNED_KINDS), set()
    with forward_hooks([site.module for site in gates], lambda module, given, output: ran.add(id(module))):
        change = compare_models(model, substituted, inputs)
    files = save_checkpoint(substituted, folder, processor, source)
    reloaded = type(substituted).from_pretrained(folder, dtype=substituted.dtype, use_safetensors=True)
    require_same_model(substituted, reloaded.to(substituted.device), inputs)
    return ReLUExport(
        folder=str(folder),
        hardness=hardness,
        swap_error=swap_error,
        config_changes=report.config_changes,
        change=change,
        smooth_calls=tuple(find_smooth_calls(substituted, inputs)),
        processor_files=files,
        warnings=runtime_warnings(substituted.config),
        unreached=tuple(site.name for site in gates if id(site.module) not in ran),
    )


def _unreached_text(names: tuple[str, ...]) -> str:
    named = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
    return (
        f"{len(names)} of the gates did not run on the example inputs ({named}), so nothing was compared of them: give "
        "inputs that run the whole model"
    )


def _require_lambda_gelu(model: PreTrainedModel) -> None:
    try:
        require_lambda_gelu(model)
    except ValueError as error:
        smooth = sorted({site.kind for site in find_sites(model)})
        advice = (
            f"its gates are {', '.join(smooth)}: convert_to_relu(model, data) (hf-lgelu convert) makes a ReLU model of "
            "it without training"
            if smooth
            else "it has no smooth gate that a substitution could exchange"
        )
        raise ValueError(f"{type(model).__name__} has no λ-GELU for export_relu to replace; {advice}") from error


def _refuse_soft_gates(
    model: PreTrainedModel,
    hardness: dict[str, float],
    swap_error: dict[str, float],
    max_swap_error: float,
    inputs: Inputs,
) -> None:
    soft = [name for name, error in swap_error.items() if not error <= max_swap_error]  # nor NaN
    if not soft:
        return
    named = "; ".join(f"{name}: λ = {hardness[name]:.4g}, κ/λ = {swap_error[name]:.3g}" for name in soft[:8])
    more = f"; and {len(soft) - 8} more" if len(soft) > 8 else ""
    substituted = independent_copy(model).eval()
    put_relu(substituted, rewrite_config=False)
    raise ValueError(
        f"{len(soft)} of {len(swap_error)} gates are too soft for ReLU: swapping them changes a unit by up to "
        f"{max(swap_error.values()):.3g}, and {max_swap_error:.3g} is allowed ({named}{more}). On the example inputs: "
        f"{compare_models(model, substituted, inputs)}. Harden the model (train with harden=True), keep its function "
        "with export_gelu, or go on all the same with allow_soft=True (--allow_soft)"
    )
