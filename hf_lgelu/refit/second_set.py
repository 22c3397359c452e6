"""The second set of a conversion: nothing is fitted on it, and what was given to fit on as well is counted."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import PartialState
from torch import nn

from hf_lgelu.refit.batches import Batch, for_decoder, read_batches, taken_by
from hf_lgelu.refit.folds import Folds
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.units import cut_batches, unit_keys


class SecondSet:
    """This process's part of it, batch by batch; read once. `first` is the first batch of all processes."""

    def __init__(self, first: Batch, batches: Iterator[Batch], folds: Folds) -> None:
        self.first, self._batches, self._known = first, batches, frozenset(folds.units.keys)
        self._repeated = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._repeated += sum(key in self._known for key in unit_keys(batch))
            yield batch

    def repeated(self) -> int:
        """Units of all processes, read so far, that were fitted or chosen on as well; each process must call."""
        return sum(each_has(self._repeated))


def second_set(
    model: nn.Module,
    data: Any,
    folds: Folds,
    state: PartialState,
    *,
    batch_size: int | None = None,
    collate: Callable[[Any], Any] | None = None,
) -> SecondSet | None:
    """None without one. Raises ValueError where the model does not take it."""
    if data is None:
        return None
    batches = for_decoder(model, read_batches(data, batch_size=batch_size, collate=collate))
    batches = taken_by(model, batches, "evaluation_data")
    first = next(batches)
    every = cut_batches(itertools.chain([first], batches), batch_size)
    return SecondSet(first, itertools.islice(every, state.process_index, None, state.num_processes), folds)
