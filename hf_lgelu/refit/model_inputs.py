"""Given inputs as a model takes them: a decoder's part made of labels, and what does not fit found before the work."""

import inspect
from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor, nn

from hf_lgelu.models.example_run import run_example
from hf_lgelu.refit.calibration import Batch, take_units
from hf_lgelu.refit.compare import main_output
from hf_lgelu.refit.units import IGNORED_LABEL

_TRIED = 2  # units; a model may drop an axis of length 1


def for_decoder(model: nn.Module, batches: Iterable[Batch]) -> Iterator[Batch]:
    """With the decoder's inputs that an encoder-decoder makes of labels, where there are none.

    Its mask comes with them: targets are of different lengths, and what they are padded with is no prediction.
    """
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    for batch in batches:
        has_targets = batch.labels is not None and batch.labels.ndim == 2
        if make is not None and has_targets and "decoder_input_ids" not in batch.tensors:
            bare = isinstance(batch.inputs, Tensor)
            inputs = {model.main_input_name: batch.inputs} if bare else dict(batch.inputs)
            inputs["decoder_input_ids"] = make(labels=batch.labels).cpu()
            if "decoder_attention_mask" in inspect.signature(model.forward).parameters:
                mask = (batch.labels != IGNORED_LABEL).long()
                mask[:, 0] = 1  # the token that starts them
                inputs.setdefault("decoder_attention_mask", mask)
            batch = Batch(inputs, batch.labels)
        yield batch


def checked(model: nn.Module, batches: Iterator[Batch]) -> Iterator[Batch]:
    """A second set, whose first inputs the model takes. Raises ValueError if it does not, or there is none."""
    batches = filter(len, batches)
    first = next(batches, None)
    if first is None:
        raise ValueError(
            "evaluation holds no inputs; an iterator gives its batches once, so one that was read before, as "
            "calibration or otherwise, is empty. Pass a dataset or a DataLoader, or leave it out"
        )
    require_taken(model, first, "evaluation")
    return chain([first], batches)


def require_taken(model: nn.Module, batch: Batch, what: str) -> None:
    """Raise ValueError, with what the model said, unless it takes the first units of `batch` and gives one output each.

    `what` names the inputs: "calibration" or "evaluation".
    """
    few = take_units(batch, slice(_TRIED))
    try:
        run_example(model, few.inputs)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        given = ", ".join(
            f"{name or 'a tensor'} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            for name, value in few.tensors.items()
        )
        raise ValueError(
            f"{type(model).__name__} does not take the {what} inputs ({given}): {error}. Give batches with the names, "
            "shapes and dtypes that the model was trained on"
        ) from error
    main_output(model, few.inputs)
