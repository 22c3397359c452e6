"""λ-GELU checkpoint → plain GELU checkpoint of the same function."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_lgelu.export.folding.fold import FoldedSite, fold_hardness, max_relative_change
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.files import whole_folder
from hf_lgelu.models.checkpoint import save_checkpoint
from hf_lgelu.models.comparison import OutputChange, compare_models
from hf_lgelu.models.config_keys import ConfigChange
from hf_lgelu.models.example_run import Inputs, in_dtype
from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.own_forward import in_own_forward, independent_copy
from hf_lgelu.models.random_inputs import random_inputs
from hf_lgelu.models.runtimes import runtime_warnings
from hf_lgelu.models.sites import require_lambda_gelu

_MAX_CHANGE_BY_RELOADING = 1e-5  # transformers' two spellings of GELU round differently; its tanh form is further off


@dataclass(frozen=True)
class GELUExport:
    """What `export_gelu` did.

    `change` is between the λ-GELU model and the GELU model loaded from the folder, on the example inputs, both
    computed in float32 (float64 for a float64 model). `warnings` name the programs that are known not to compute what
    this checkpoint says (`RUNTIMES`).
    """

    folder: str
    sites: tuple[FoldedSite, ...]
    config_changes: tuple[ConfigChange, ...]
    change: OutputChange
    processor_files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def relative_change(self) -> float:
        """The largest change of an output over the largest output."""
        return _relative(self.change)

    def __str__(self) -> str:
        lines = [
            f"{len(self.sites)} λ-gates folded into the weights, saved with their plain activations in {self.folder}",
            f"  on the example inputs: {self.change}",
            *(f"  {site}" for site in self.sites),
            *(f"  config {change}" for change in self.config_changes),
            *(f"  warning: {warning}" for warning in self.warnings),
        ]
        return "\n".join(lines)


@in_own_forward
def export_gelu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
    overwrite: bool = False,
) -> GELUExport:
    """Save `model` as a GELU model that computes the same: a checkpoint that needs nothing of this package.

    `model` stays as it is. Every λ is folded into the layers around its activation (`fold_hardness`), the config key of
    the model's family is rewritten, the folder is loaded again with transformers and compared with the λ-GELU model.
    A model card goes along (`write_card`).

    Args:
        model: a transformers model with λ-GELU: a family of transformers, timm in its wrapper, our MLP.
        folder: where to; complete or not there.
        processor: tokenizer or image processor, saved beside the weights.
        source: folder or Hub id from which the tokenizer's and processor's files are copied instead.
        inputs: such that run the whole model; random ones of the right shape
            (`hf_lgelu.models.random_inputs`) if None.
        overwrite: replace a folder that is not empty.

    Raises:
        TypeError: `model` is no transformers model; `fold_hardness` takes any module.
        ValueError: no λ-GELU, sites where λ cannot be folded (each named with the reason), or no example inputs are
            known for this model.
        RuntimeError: `model` is wrapped by PEFT or for distributed training, no config key says GELU in its erf form
            at these sites (UnsupportedConfigError), or the folder, loaded again, computes something else.
        FileExistsError: `folder` is not empty.
        OSError: the disk is full or not writable; what was at `folder` is as it was.

    Example:
        >>> import tempfile
        >>> from hf_lgelu import MLPConfig, MLPForClassification, export_gelu
        >>> model = MLPForClassification(MLPConfig(num_features=3, hidden_size=4, num_hidden_layers=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_gelu(model, f"{folder}/gelu")
        >>> report.relative_change < 1e-5
        True
    """
    with whole_folder(folder, overwrite=overwrite) as new:
        report = save_gelu(model, new, processor=processor, source=source, inputs=inputs)
        write_card(operable_module(model), new, form="gelu", change=report.change)
    return replace(report, folder=str(folder))


@in_own_forward
def save_gelu(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    processor: Any = None,
    source: str | os.PathLike | None = None,
    inputs: Inputs | None = None,
) -> GELUExport:
    """`export_gelu` into a folder that is there, without the card."""
    model = operable_module(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"export_gelu saves transformers models, got {type(model).__name__}; fold_hardness(model, inputs) "
            "folds any module in memory"
        )
    require_lambda_gelu(model)
    inputs = random_inputs(model) if inputs is None else inputs
    folded = independent_copy(model).eval()
    report = fold_hardness(folded, inputs)
    files = save_checkpoint(folded, folder, processor, source)
    change = _change_after_reload(model, folded, folder, inputs)
    warnings = runtime_warnings(folded.config)
    if warnings and _is_family_default(folded.config, report.config_changes):
        warnings = ()
    return GELUExport(str(folder), report.sites, report.config_changes, change, files, warnings)


def _is_family_default(config: PreTrainedConfig, changes: Sequence[ConfigChange]) -> bool:
    """Whether the activations written are those that the family has of itself, and no program computes others."""
    own = type(config)().to_dict()
    return bool(changes) and all(len(change.path) == 1 and own.get(change.path[0]) == change.new for change in changes)


def _change_after_reload(
    model: PreTrainedModel, folded: PreTrainedModel, folder: str | os.PathLike, inputs: Inputs
) -> OutputChange:
    dtype = folded.dtype
    wide = torch.promote_types(dtype, torch.float32)
    reloaded = type(folded).from_pretrained(folder, dtype=wide, use_safetensors=True).to(folded.device)
    inputs = in_dtype(inputs, wide)  # of both copies; not every network casts what it is given
    before, after = (m if dtype == wide else independent_copy(m).to(wide) for m in (model, folded))
    by_reloading = compare_models(after, reloaded, inputs)
    if not _relative(by_reloading) <= _MAX_CHANGE_BY_RELOADING:
        raise RuntimeError(f"the GELU model, saved and loaded again, computes something else: {by_reloading}")
    change = compare_models(before, reloaded, inputs)
    allowed = max_relative_change(dtype)
    if not _relative(change) <= allowed:
        raise RuntimeError(
            f"the GELU model computes something else than the λ-GELU model: {change}. That is more than the "
            f"{allowed:g} of the largest output that rounding in {dtype} may make; nothing was kept"
        )
    return change


def _relative(change: OutputChange) -> float:
    return change.max_change / change.largest_output if change.largest_output else change.max_change
