"""What a user chooses about the data and the model of a benchmark."""

import os
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class DataOptions:
    """Where the data lies, which part of it is used, and what a run is selected on.

    Args:
        data_dir: a folder of data set folders. None takes the environment variable LGELU_DATA_DIR,
            and without that the Hugging Face Hub.
        max_train_samples: at most this many training rows, the first of a seeded permutation.
        max_eval_samples: the same for the validation part and for the test split.
        validation_fraction: 0 evaluates on the test split, as the paper seems to; a fraction in (0, 1)
            holds out that part of the training split, stratified by class, to evaluate on.
        split_seed: of every choice of rows. It is not the seed of the run.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range.
    """

    data_dir: str | os.PathLike[str] | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    validation_fraction: float = 0.0
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.data_dir is not None and not isinstance(self.data_dir, str | os.PathLike):
            raise TypeError(f"data_dir must be a path or None, got {type(self.data_dir).__name__}")
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, "; None uses every row")
        _check_integer("split_seed", self.split_seed, 0, "")
        fraction = self.validation_fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            raise TypeError(f"validation_fraction must be a number, got {type(fraction).__name__}")
        if not 0 <= fraction < 1:
            raise ValueError(f"validation_fraction must lie in [0, 1), got {fraction!r}; 0 evaluates on the test split")


@dataclass(frozen=True)
class ModelOptions:
    """Which model of its family a benchmark trains; a benchmark takes some of these (`Benchmark.model_defaults`).

    Args:
        pretrained: folder or Hub id of a checkpoint to fine-tune; None trains from scratch.
        image_size: height and width in pixels that images are resized to.
        patch_size: height and width of a vision transformer's patches, in pixels.
        num_layers: blocks.
        width: units of the residual stream.
        num_heads: attention heads; divides `width`.
        context_length: tokens in one row of text.
        vocabulary_size: tokens of the tokenizer that is trained on the corpus.

    Raises:
        TypeError, ValueError: a value of the wrong type or out of range.
    """

    pretrained: str | None = None
    image_size: int | None = None
    patch_size: int | None = None
    num_layers: int | None = None
    width: int | None = None
    num_heads: int | None = None
    context_length: int | None = None
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        if self.pretrained is not None and not isinstance(self.pretrained, str):
            raise TypeError(f"pretrained must be a folder, a Hub id or None, got {type(self.pretrained).__name__}")
        for name in (field.name for field in fields(self) if field.name != "pretrained"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1, "; None takes the benchmark's default")


def _check_integer(name: str, value: object, smallest: int, remark: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}{remark}")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}{remark}")
