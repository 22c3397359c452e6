"""The smooth activations that one forward pass of a model executes.

Surgery sees modules. An `F.gelu` in a forward, an activation that each call builds anew, and a formula written with
tanh are no modules. So the operations themselves are watched here.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.elementwise import FunctionModule, is_piecewise_linear, values_of_activation
from hf_lgelu.networks.run import Inputs, forward_pre_hooks, run_example
from hf_lgelu.networks.sites import is_activation, uncompiled
from hf_lgelu.networks.source import LIBRARIES, frames_inside, line_of

# erf, tanh and sigmoid catch written-out formulas; hardswish is quadratic between its corners.
_SMOOTH_OPERATIONS = frozenset(
    (
        *("gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid_forward", "glu", "hardswish"),
        *("erf", "erfc", "special_ndtr", "tanh", "sigmoid"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"),
    )
)

_OWN_FORMULA = "a formula of its own"


@dataclass(frozen=True)
class SmoothCall:
    """A smooth elementwise operation that ran.

    `module` is the dotted name of the innermost module that runs it: "" is the model itself, None a module that is not
    registered in the model. `module_class` is the class of this module. `line` is None for an activation module. It is
    the place of the call for a module with the operation in its own code, or a module that each call builds anew.
    """

    module: str | None
    module_class: str
    operation: str
    count: int
    line: str | None = None

    def __str__(self) -> str:
        place = "a module built during the forward" if self.module is None else self.module or "the model itself"
        how = "activation module" if self.line is None else f"called as a function at {self.line}"
        return f"{place} ({self.module_class}): {self.operation} × {self.count}, {how}"


def find_smooth_calls(model: nn.Module, inputs: Inputs) -> list[SmoothCall]:
    """The smooth activations that one run of the model executes, in the order of their first call.

    The activations are GELU, SiLU, Mish, ELU, CELU, SELU, GLU, softplus, sigmoid, tanh, erf, hardswish and fused
    recurrent cells, in modules and in functional calls. Activation modules of torch, transformers and timm that are not
    piecewise linear are found whatever their formula (softsign, squared ReLU). An empty list means that no gate on this
    path is one of these. Softmax, normalization and products of activations (attention) are no gates and are not
    listed. A formula from other operations (x², x/(1+|x|), exp) in a forward is not seen, and neither is code outside
    torch.

    Raises TypeError for example inputs of another kind than `Inputs`.

    >>> import torch, hf_lgelu
    >>> from torch import Tensor, nn
    >>> for call in hf_lgelu.find_smooth_calls(nn.Sequential(nn.GELU(), nn.ReLU(), nn.Tanh()), torch.zeros(1, 4)):
    ...     print(call)
    0 (GELU): gelu × 1, activation module
    2 (Tanh): tanh × 1, activation module
    """
    model = uncompiled(model)  # a compiled model would run eagerly here as well
    names = {id(module): name for name, module in model.named_modules()}
    watch = _Watch(model)

    def note_formula(module: nn.Module, args: Any) -> None:
        values = values_of_activation(module)
        if values is not None and not is_piecewise_linear(values):
            watch.note(module, _OWN_FORMULA)

    own = [module for module in model.modules() if id(module) in watch.registered]
    # In inference mode fused cells pass unseen.
    with torch.inference_mode(False), forward_pre_hooks(own, note_formula), watch:
        run_example(model, inputs)
    named = {module_id for module_id, operation, _ in watch.counts if operation != _OWN_FORMULA}
    return [
        SmoothCall(names.get(module_id), type(watch.modules[module_id]).__name__, operation, count, line)
        for (module_id, operation, line), count in watch.counts.items()
        if operation != _OWN_FORMULA or module_id not in named
    ]


class _Watch(TorchDispatchMode):
    """Counts the smooth operations that run, by module, operation and line."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.registered = {id(module) for module in model.modules() if not isinstance(module, FunctionModule)}
        self.modules: dict[int, nn.Module] = {}  # keeps modules built during the forward alive, so ids stay theirs
        self.counts: Counter[tuple[int, str, str | None]] = Counter()

    def note(self, module: nn.Module, operation: str, line: str | None = None) -> None:
        """Count one more call."""
        self.modules[id(module)] = module
        self.counts[id(module), operation, line] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket.__name__.rstrip("_")
        if operation in _SMOOTH_OPERATIONS:
            (inner, _), (known, frames) = frames_inside(), frames_inside(self.registered)
            # λ-GELU's softplus makes λ from s; it is no activation.
            if not (operation == "softplus" and isinstance(inner, LambdaGate)):
                # A FunctionModule runs in the place of a call: the module that calls counts.
                module = known or self.model if isinstance(inner, FunctionModule) or inner is None else inner
                is_gate = id(module) in self.registered and is_activation(module)
                # Frames of torch and of activations count where they are the module's own code.
                own = {cls.__module__ for cls in type(known).__mro__} - {nn.Module.__module__}
                names = ((str(frame.f_globals.get("__name__")), frame) for frame in frames)
                theirs = (frame for name, frame in names if name in own or not name.startswith(LIBRARIES))
                self.note(module, operation, None if is_gate else line_of(next(theirs, frames[-1])))
        return func(*args, **(kwargs or {}))
