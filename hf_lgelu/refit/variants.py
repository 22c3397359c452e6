"""How far each of several networks is from the original, whose outputs on a batch are there once for all of them."""

from collections.abc import Sequence

from torch import nn

from hf_lgelu.refit.batches import Batch
from hf_lgelu.refit.compare import Compared, Sums, add_sums, batch_sums, evaluation_of, in_order_of
from hf_lgelu.refit.processes import each_has
from hf_lgelu.refit.report import Evaluation


class Variants:
    """What the numbers of so many networks are made of, batch by batch."""

    def __init__(self, original: nn.Module, count: int) -> None:
        self._original = original
        self._found: list[Sums] = [{} for _ in range(count)]

    def add(self, number: int, reference: Compared, output: Compared, batch: Batch) -> None:
        """What the original and the network of that number give on a batch."""
        tensors = in_order_of(reference, output).tensors
        new = batch_sums([reference.tensors, reference.tensors, tensors], batch, self._original)
        if new["rows"]:
            new["logits"] = new["rows"] * reference.are_logits
            self._found[number] = add_sums(self._found[number], new)

    def evaluations(self) -> Sequence[Evaluation] | None:
        """Of each network as `refitted`, with the original itself as `direct`, over the batches of all processes.

        None where no process has a prediction that is no padding; every process must call.
        """
        totals: list[Sums] = [{} for _ in self._found]
        for part in each_has(self._found):
            totals = [add_sums(total, sums) for total, sums in zip(totals, part, strict=True)]
        return [evaluation_of(total) for total in totals] if all(totals) else None
