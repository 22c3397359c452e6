"""The smooth activations that one forward pass of a model executes.

Surgery sees modules. An `F.gelu` inside a forward, an activation built anew at each call and a formula spelled out with
tanh are no modules, so the operations themselves are watched here.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.called import Called, ids_of, line_of, running
from hf_lgelu.models.elementwise import is_smooth, module_values
from hf_lgelu.models.example_run import Inputs, run_example
from hf_lgelu.models.operable import uncompiled
from hf_lgelu.models.sites import SMOOTH_KINDS, is_activation, kind_of

# erf, tanh and sigmoid catch the formulas that are spelled out; hardswish is quadratic between its corners.
_SMOOTH_OPERATIONS = frozenset(
    (
        *("gelu", "silu", "mish", "elu", "celu", "selu", "softplus", "log_sigmoid_forward", "glu", "hardswish"),
        *("erf", "erfc", "special_ndtr", "tanh", "sigmoid"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"),
    )
)
_FUSED_ENCODER_LAYER = "_transformer_encoder_layer_fwd"  # torch's, in eval mode; one argument says GELU or ReLU
_USE_GELU = 7

_OWN_FORMULA = "a formula of its own"

_ROLES = {
    "gate": "activation module",
    "activation": "activation module that surgery leaves alone",
    "function": "called as a function",
    "call": "called as a function, and a gate runs in its place",
}


@dataclass(frozen=True)
class SmoothCall:
    """A smooth elementwise operation that ran.

    `module` is the dotted name of the innermost module running it: "" is the model itself, None a module that is not
    registered in the model. `module_class` is that module's class. `role` is what the module is to surgery: "gate", an
    activation module of a kind that surgery exchanges; "activation", a module of another kind, such as `nn.Tanh`;
    "function", a module in whose code the operation stands, or a module that is built anew at each call; "call", the
    same where `gates_as_modules` has a module run in the call's place. `line` is then where the call stands.
    """

    module: str | None
    module_class: str
    operation: str
    role: str
    count: int
    line: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        place = "a module built during the forward" if self.module is None else self.module or "the model itself"
        at = "" if self.line is None else f" at {self.line}"
        return f"{place} ({self.module_class}): {self.operation} × {self.count}, {_ROLES[self.role]}{at}"


def find_smooth_calls(model: nn.Module, inputs: Inputs) -> list[SmoothCall]:
    """The smooth activations that one run of the model executes, in the order of their first call.

    These are GELU, SiLU, Mish, ELU, CELU, SELU, GLU, softplus, sigmoid, tanh, erf, hardswish and fused recurrent cells,
    in modules and in functional calls. The activation modules of torch, transformers and timm that are not piecewise
    linear count whatever their formula (softsign, squared ReLU). An empty list means that no gate on this path is one
    of these. Softmax, normalization and products of activations (attention) are no gates and not listed. Not seen are
    a formula from other operations (x², x/(1+|x|), exp) in a forward, and code outside torch.

    Raises TypeError for example inputs of another kind than `Inputs`.

    >>> import torch, hf_lgelu
    >>> from hf_lgelu.models.smooth_calls import find_smooth_calls
    >>> from torch import nn
    >>> for call in find_smooth_calls(nn.Sequential(nn.GELU(), nn.ReLU(), nn.Tanh()), torch.zeros(1, 4)):
    ...     print(call)
    0 (GELU): gelu × 1, activation module
    2 (Tanh): tanh × 1, activation module that surgery leaves alone
    """
    model = uncompiled(model)  # it would run eagerly here all the same
    names = {id(module): name for name, module in model.named_modules()}
    watch = _Watch(ids_of(module for module in model.modules() if not isinstance(module, Called)))
    with torch.inference_mode(False), _module_stack(watch), watch:  # in it fused cells pass as they are, unseen
        run_example(model, inputs)
    named = {module_id for module_id, operation, _, _ in watch.counts if operation != _OWN_FORMULA}
    calls = []
    for (module_id, operation, is_called, line), count in watch.counts.items():
        if operation == _OWN_FORMULA and module_id in named:
            continue
        module = watch.modules[module_id]
        name = names.get(module_id)
        role = "call" if is_called else "function" if name is None else _role(module)
        calls.append(SmoothCall(name, type(module).__name__, operation, role, count, line))
    return calls


def _role(module: nn.Module) -> str:
    if kind_of(module) in SMOOTH_KINDS:
        return "gate"
    return "activation" if is_activation(module) else "function"


class _Watch(TorchDispatchMode):
    def __init__(self, registered: set[int]) -> None:
        """`registered` are the `ids_of` the modules whose code is looked at for lines."""
        super().__init__()
        self.registered = registered
        self.stack: list[nn.Module] = []
        self.modules: dict[int, nn.Module] = {}  # keeps modules built during the forward alive, so ids stay theirs
        self.counts: Counter[tuple[int, str, bool, str | None]] = Counter()

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        self.stack.append(module)
        # In a module that is built anew at each call, a gate may run in the place of the module's function.
        is_own = id(vars(module)) in self.registered and not isinstance(module, LambdaGate)
        if is_own and is_smooth(module):
            self.modules[id(module)] = module
            self.counts[id(module), _OWN_FORMULA, False, None] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = func.overloadpacket.__name__.rstrip("_")
        module = self.stack[-1] if self.stack else None
        # λ-GELU's softplus makes λ from s; it is no activation.
        is_parameter = operation == "softplus" and isinstance(module, LambdaGate)
        is_smooth = operation in _SMOOTH_OPERATIONS or (operation == _FUSED_ENCODER_LAYER and bool(args[_USE_GELU]))
        if is_smooth and module is not None and not is_parameter:
            is_called, found = isinstance(module, Called), running(self.registered)
            if is_called and found is not None:
                module = found[0]
            self.modules[id(module)] = module
            is_gate = id(vars(module)) in self.registered and module_values(module) is not None
            line = None if is_gate or found is None else line_of(found[1][0])
            self.counts[id(module), operation, is_called, line] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _module_stack(watch: _Watch) -> Iterator[None]:
    """Have `watch.stack` be the modules whose forward is running in this thread, registered in the model or not."""
    own = get_ident()  # the hooks are of the whole process

    def enter(module: nn.Module, args: Any) -> None:
        if get_ident() == own:
            watch.enter(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() == own:
            watch.stack.pop()

    handles = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
