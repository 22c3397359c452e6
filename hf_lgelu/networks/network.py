"""A model under observation: one block for all temporary changes of it, and the outputs that count."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import Any

from torch import nn

from hf_lgelu.networks.calls import CALLED_KINDS, gates_as_modules
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.networks.run import Inputs, plain_evaluation
from hf_lgelu.networks.sites import SMOOTH_KINDS, functions_as_modules


class Network:
    """A model in eval mode whose gates are modules, without the caller's contexts: inside a block, and not after it.

    Threads take turns: inside the block a model has other gates.
    """

    _one_at_a_time = RLock()

    def __init__(
        self,
        model: nn.Module,
        kinds: Collection[str] | None = None,
        outputs: Sequence[str] | None = None,
        box_channels: int | None = None,
    ) -> None:
        """`kinds` are the rows of `hf_lgelu.networks.sites.KINDS` that count as gates; the rest is for `read`."""
        self.model, self._kinds, self._block = model, kinds, ExitStack()
        self.read = OutputReader(model, outputs, box_channels)

    def __enter__(self) -> "Network":
        with ExitStack() as block:
            block.enter_context(self._one_at_a_time)
            block.enter_context(plain_evaluation(self.model))
            block.enter_context(functions_as_modules(self.model, self._kinds or SMOOTH_KINDS))
            self._block = block.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def take_calls(self, inputs: Inputs) -> None:
        """Turn the activations that a forward on `inputs` calls into modules, too (`gates_as_modules`)."""
        self._block.enter_context(gates_as_modules(self.model, inputs, self._kinds or CALLED_KINDS))
