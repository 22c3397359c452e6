"""Another gate in the place of a model's own for a while: ReLU for an evaluation, say."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from hf_lgelu.models.exchange import SurgeryReport, exchange, found_sites
from hf_lgelu.models.operable import operable_module
from hf_lgelu.models.sites import LEARNED_KINDS, check_kinds
from hf_lgelu.models.substitution import relu_for


@contextmanager
def temporary_relu(model: nn.Module, *, kinds: Sequence[str] = LEARNED_KINDS) -> Iterator[SurgeryReport]:
    """`substitute_relu` for the length of a block; after it, also after an error, the model as it was.

    Changes `model` in place. Weights and config are untouched. Of a model wrapped for distributed training, pass
    the inner module, and call that one too: DistributedDataParallel broadcasts buffers at each forward and fails
    where all that the model had were λ-GELU's. Raises ValueError if there is nothing to substitute.

    >>> import torch, hf_lgelu
    >>> model = hf_lgelu.MLPForClassification(hf_lgelu.MLPConfig(num_features=4, hidden_size=8, num_hidden_layers=2))
    >>> with hf_lgelu.temporary_relu(model):
    ...     print(type(model.layers[0].activation).__name__)
    ReLU
    >>> print(type(model.layers[0].activation).__name__)
    LambdaGELU
    """
    with TemporaryRelu(model, kinds=kinds).applied() as report:
        yield report


class TemporaryRelu:
    """`temporary_relu` for a model that goes to and fro, batch by batch: sites are looked for once."""

    def __init__(
        self,
        model: nn.Module,
        *,
        kinds: Sequence[str] = LEARNED_KINDS,
        make: Callable[[], nn.Module] | None = None,
        include: Callable[[str], bool] | None = None,
    ) -> None:
        """`make` gives another gate than ReLU; `include` says by name which sites, by default all."""
        self._model, self._inside = model, operable_module(model, temporarily=True)
        self._sites = found_sites(self._inside, check_kinds(kinds), include)
        self._relus = [relu_for(site) if make is None else make() for site in self._sites]

    @contextmanager
    def applied(self) -> Iterator[SurgeryReport]:
        """ReLU inside the block; after it, also after an error, what was there."""
        try:
            yield SurgeryReport(exchange(self._sites, self._relus))
        finally:
            for site in self._sites:
                site.put(site.module)

    def fits(self, model: nn.Module) -> bool:
        """Whether `model` is the one that was given, with every site as it was then."""
        return self._model is model and all(site.is_in_place(self._inside) for site in self._sites)
