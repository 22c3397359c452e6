"""What is checked of a checkpoint that a script is given, before any work is done with it."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from hf_lgelu.models.example_run import run_example


def require_other_folder(model: str | os.PathLike, folder: Path) -> None:
    """Raise ValueError if the output folder is the checkpoint's own or has it inside: replaced, it would be lost."""
    if Path(model).exists() and Path(model).resolve().is_relative_to(folder.resolve()):
        what = "is the checkpoint itself" if folder.samefile(model) else "has the checkpoint inside"
        raise ValueError(f"{folder} {what}; give another output folder, so that it is not lost")


def require_fitting_rows(
    model: PreTrainedModel, name: str, rows: Mapping[str, Tensor], source: str, advice: str
) -> None:
    """Raise ValueError, with what the model said, unless it takes these rows.

    `name` is the checkpoint's, `source` says where the rows are from, `advice` what to do.
    """
    try:
        run_example(model, rows)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        shapes = ", ".join(f"{column} {tuple(tensor.shape)}" for column, tensor in rows.items())
        raise ValueError(f"{name} does not take the rows of {source} ({shapes}): {error}. {advice}") from error
