"""Decoding that skips zeros: at one token, the maps around a ReLU are read only where the ReLU's output is not zero.

The map before the ReLU is read whole. In a gated block another map (up) makes the factor of the ReLU's output. Its
`forward` notes its input and gives ones, so that the product is the ReLU's output. The `forward` of the map that reads
the product (down) then sums the rows of the live units.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.activation.kernels.cpu.rows import load_loop, run_rows
from hf_lgelu.activation.kernels.plain import opaque_refusal
from hf_lgelu.graph.layers import find_fed_gates, product_behind
from hf_lgelu.graph.maps import COPIES, RESHAPES, AffineOperation, read_affine, shape_of
from hf_lgelu.graph.recorder import operation_name
from hf_lgelu.graph.recording import Recording
from hf_lgelu.models.copies import changeable_module, require_values_here
from hf_lgelu.networks.run import Inputs
from hf_lgelu.networks.sites import find_relu_sites


class _Map:
    """The `forward` of a map: a loop for one token on the CPU in float32 and eval mode without gradients, else dense.

    The weight lies in memory unit by unit. Its name, shape and values stay, and state dicts hold it in the usual order.
    """

    def __init__(self, module: Any, units_axis: int | None, up: "_Map | None" = None) -> None:
        """`units_axis` is the weight's axis of hidden units; `up` is given for the other map of a gated block."""
        self.module, self._units_axis, self.up = module, units_axis, up
        self.noted: dict[int, Tensor] = {}  # a thread's own input, until the other map takes it
        module.weight.data = self._turned(self._turned(module.weight.data).contiguous())
        self._hook = module.register_state_dict_post_hook(_put_in_order)
        module.forward = self

    def undo(self) -> None:
        """Restore the module's own `forward` and memory order."""
        self._hook.remove()
        del self.module.forward
        self.module.weight.data = self.module.weight.data.contiguous()

    def dense(self, x: Tensor) -> Tensor:
        """The module's own `forward`."""
        return type(self.module).forward(self.module, x)

    def rows_for(self, x: Tensor) -> Tensor | None:
        """The weight with a row for each hidden unit, or None where `x` has to be computed densely."""
        weight, is_one_token = self.module.weight, x.numel() == x.shape[-1]
        if not is_one_token or self.module.training or torch.is_grad_enabled() or opaque_refusal(x, weight):
            return None
        is_float32 = all(part.is_cpu and part.dtype == torch.float32 for part in (x, weight))
        rows = self._turned(weight)
        return rows if is_float32 and rows.is_contiguous() else None

    def _turned(self, weight: Tensor) -> Tensor:
        return weight if self._units_axis == 0 else weight.t()


class _Before(_Map):
    def __call__(self, x: Tensor) -> Tensor:
        rows = self.rows_for(x)
        return self.dense(x) if rows is None else run_rows(x, None, rows, self.module.bias)


class _Up(_Map):
    def __call__(self, x: Tensor) -> Tensor:
        rows = self.rows_for(x)
        if rows is None:
            if self.noted:  # left by a pass that ended with an error
                self.noted.pop(threading.get_ident(), None)
            return self.dense(x)
        self.noted[threading.get_ident()] = x
        return x.new_ones(1).expand(*x.shape[:-1], len(rows))


class _Down(_Map):
    def __call__(self, x: Tensor) -> Tensor:
        rows, up = self.rows_for(x), self.up
        noted = up.noted.pop(threading.get_ident(), None) if up is not None and up.noted else None
        if rows is None or (noted is None and up is not None):
            return self.dense(x if noted is None or up is None else x * up.dense(noted))
        up_rows, bias = (None, None) if noted is None or up is None else (up.rows_for(noted), up.module.bias)
        return run_rows(noted, x, up_rows, bias, rows, self.module.bias)


def _put_in_order(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].contiguous()


def skip_zeros(model: nn.Module, skip: bool = True, *, inputs: Inputs | None = None) -> list[str]:
    """The names of the ReLUs whose zeros are skipped from now on while the model decodes; `skip=False` undoes it.

    Changes `model` in place. A feed-forward block then reads the map before its ReLU whole, and its other maps only for
    the hidden units that are not zero. This holds on the CPU in float32, in eval mode without gradients, for one token
    of one sequence at a time, as `generate` runs it. Everything else is computed densely. Outputs are the same up to
    rounding.

    Blocks are found by what they compute, act(gate(x)) * up(x) or act(up(x)) before a linear map. The first use
    compiles a loop in C++; without a compiler a warning says so, and the model stays dense. No weight is stored twice,
    and saved checkpoints do not change.

    Args:
        model: a network with ReLU modules, as `convert_to_relu` gives.
        skip: False for the model as it was.
        inputs: a batch of several tokens, on which the blocks are found; by default `dummy_inputs` of transformers.

    Raises ValueError where no block is found, and RuntimeError for a model that cannot be changed.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> hf_lgelu.skip_zeros(network, inputs=torch.randn(3, 4))
    ['1']
    >>> hf_lgelu.skip_zeros(network, False)
    []
    """
    model = changeable_module(model)
    require_values_here(model.named_modules())
    for module in model.modules():
        if isinstance(held := vars(module).get("forward"), _Map):
            held.undo()
    if not skip or isinstance(load_loop(), str):
        return []
    sites = [site for site in find_relu_sites(model) if site.kind == "relu"]
    traced = Recording(model, sites, getattr(model, "dummy_inputs", None) if inputs is None else inputs)
    found = []
    for fed in find_fed_gates(traced):
        (call,) = traced.calls[fed.site]
        product, other = product_behind(call), fed.other
        after = _map_after(traced, product or call)
        maps = [fed.before, after] if other is None else [fed.before, after, other]
        modules = [_module_of(model, traced, each) for each in maps]
        if after is None or None in modules or (product is None) != (other is None):
            continue
        _Before(modules[0], fed.before.output_axis)
        _Down(modules[1], after.input_axis, None if other is None else _Up(modules[2], other.output_axis))
        found.append(sites[fed.site].name)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no ReLU module in a feed-forward block of linear maps in float32 on the CPU. "
            "model.float() makes float32 of another dtype, convert_to_relu(model, data) ReLU of smooth gates"
        )
    return found


def _map_after(traced: Recording, node: Node) -> AffineOperation | None:
    """The affine operation that alone takes a node's output."""
    while len(list(node.users)) == 1:
        (user,) = list(node.users)
        operation = read_affine(user, traced)
        if operation is not None:
            return operation if operation.data is node else None
        if operation_name(user) not in COPIES | RESHAPES or shape_of(user)[-1:] != shape_of(node)[-1:]:
            return None
        node = user
    return None


def _module_of(model: nn.Module, traced: Recording, operation: AffineOperation | None) -> nn.Module | None:
    """The module that computes a linear map of rows, and nothing more, with parameters of its own."""
    if operation is None or not (operation.mixes and operation.channel_axis == -1 and operation.is_direct):
        return None
    name, _, attribute = operation.weight_name.rpartition(".")
    if attribute != "weight" or not traced.are_used_once(*operation.parameters):
        return None

    def runs_in(node: Node) -> str:
        return [path for path, _ in (node.meta.get("nn_module_stack") or {"": ("", "")}).values()][-1]

    module = model.get_submodule(name)
    path = runs_in(operation.node)
    more = [
        node
        for node in traced.operations
        if runs_in(node) == path and node is not operation.node and operation_name(node) not in COPIES | RESHAPES
    ]
    is_own = path.removeprefix("model.") == name and not more and "forward" not in vars(module)
    weight = model.get_parameter(operation.weight_name)
    return module if is_own and weight.is_cpu and weight.dtype == torch.float32 else None
