"""The λ-GELU sites of a model in training, without a walk over all its modules at every step."""

from torch import nn

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.sites import LEARNED_KINDS, ActivationSite, exchange_count, find_sites, require_lambda_gelu


class KnownSites:
    """Remembers where a model has its λ-GELU, and looks again as soon as that may have changed.

    It has when the model is another one, when at a site's name there is another module than there was, or when
    this package's surgery has been at work anywhere. What a user puts elsewhere by hand shows after `forget`.
    A copy, also a pickled one, remembers nothing: the model does not go with it.
    """

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type["KnownSites"], tuple[()]]:
        return KnownSites, ()

    def forget(self) -> None:
        """Look again at the next question; also lets go of the model."""
        self._model: nn.Module | None = None
        self._sites: list[ActivationSite] = []
        self._modules: list[LambdaGate] = []
        self._exchanges = -1

    def modules(self, model: nn.Module) -> list[LambdaGate]:
        """Every module that owns a hardness, each once. Raises ValueError for a model without λ-GELU."""
        self._look(model)
        return self._modules

    def sites(self, model: nn.Module) -> list[ActivationSite]:
        """Every λ-GELU site, those that share a hardness too. Raises ValueError for a model without λ-GELU."""
        self._look(model)
        return self._sites

    def _look(self, model: nn.Module) -> None:
        if self._are_current(model):
            return
        self._modules = [module for _, module in require_lambda_gelu(model)]
        self._sites = find_sites(model, LEARNED_KINDS)
        self._model, self._exchanges = model, exchange_count()

    def _are_current(self, model: nn.Module) -> bool:
        return (
            self._model is model
            and self._exchanges == exchange_count()
            and all(site.is_in_place(model) for site in self._sites)
        )
