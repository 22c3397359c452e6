"""Decoding that skips zeros: at one token, the maps around a ReLU are read only where the ReLU's output is not zero.

Two `forward`s are exchanged for each ReLU. That of the map beside the gate notes its input and gives ones, so that the
product with the gate's output is the gate's output. That of the map behind then sums the rows of the live units.
"""

import threading
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from hf_lgelu.activation.kernels.cpu.rows import load_loop, sum_live_rows
from hf_lgelu.activation.kernels.plain import opaque_refusal
from hf_lgelu.models.dataflow import COPIES, RESHAPES, AffineOperation, operation_name, read_affine, shape_of, users
from hf_lgelu.models.example_run import Inputs
from hf_lgelu.models.operable import operable_module, require_values_here
from hf_lgelu.models.sites import find_relu_sites
from hf_lgelu.refit.layers import affine_source, product_behind, views_back
from hf_lgelu.refit.program import Program


class _Map:
    """The `forward` of a map that may skip units: at one token outside training, as `generate` runs it.

    The weight lies in memory unit by unit. It keeps its name, shape and values, and state dicts have it as it was.
    """

    def __init__(self, module: nn.Module, units_axis: int, beside: "_Map | None" = None) -> None:
        """`units_axis` is the weight's axis of hidden units; `beside` is given for the map behind a gated unit."""
        self.module, self._units_axis, self.beside = module, units_axis, beside
        self.dense = module.forward
        self.noted: dict[int, Tensor] = {}  # a thread's own input, between the two maps
        weight = cast(nn.Parameter, module.weight)
        weight.data = self._turned(self._turned(weight.data).contiguous())
        self._hook = module.register_state_dict_post_hook(_lay_as_usual)
        module.forward = self

    def undo(self) -> None:
        """The module as it was."""
        self._hook.remove()
        del self.module.forward
        weight = cast(nn.Parameter, self.module.weight)
        weight.data = weight.data.contiguous()

    def _turned(self, weight: Tensor) -> Tensor:
        return weight if self._units_axis == 0 else weight.t()

    def can_skip(self, x: Tensor) -> bool:
        """Whether `x` is one token, no derivative is wanted, and the weight still lies unit by unit."""
        weight, is_one = cast(nn.Parameter, self.module.weight), x.numel() == x.shape[-1]
        if not is_one or self.module.training or torch.is_grad_enabled() or opaque_refusal(x, weight) is not None:
            return False
        return all(part.is_cpu and part.dtype == torch.float32 for part in (x, weight)) and self.rows.is_contiguous()

    @property
    def rows(self) -> Tensor:
        """The weight with a row a hidden unit."""
        return self._turned(cast(nn.Parameter, self.module.weight))

    @property
    def bias(self) -> Tensor | None:
        """The module's bias."""
        return cast(Tensor | None, self.module.bias)


class _Beside(_Map):
    def __call__(self, x: Tensor) -> Tensor:
        if not self.can_skip(x):
            return self.dense(x)
        self.noted[threading.get_ident()] = x
        return x.new_ones(1).expand(*x.shape[:-1], len(self.rows))


class _Behind(_Map):
    def __call__(self, x: Tensor) -> Tensor:
        beside = self.beside
        noted = beside.noted.pop(threading.get_ident(), None) if beside and beside.noted else None
        if not self.can_skip(x) or (beside and noted is None):
            return self.dense(x if noted is None else x * beside.dense(noted))
        others = (None,) * 3 if noted is None else (noted.contiguous(), beside.rows, beside.bias)
        return sum_live_rows(x.contiguous(), self.rows, self.bias, *others)


def _lay_as_usual(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].contiguous()


def skip_zeros(model: nn.Module, skip: bool = True, *, inputs: Inputs | None = None) -> list[str]:
    """The ReLUs whose zeros are skipped from now on when the model decodes one token; `skip=False` undoes it.

    Changes `model` in place: a feed-forward block reads the weights beside and behind its ReLU only for the hidden
    units that are not zero. Blocks are found by what they compute: act(gate(x)) * up(x) or act(up(x)), then a linear
    map. It serves a ReLU network on the CPU in float32, in eval mode without gradients, one token of one sequence at a
    time, as `generate` runs it. Everything else is computed densely, with the same outputs up to rounding.

    A C++ loop is compiled on first use; without a compiler a warning says so, and the model stays as it is. Checkpoints
    that are saved meanwhile are the same. The second map's weight lies transposed in memory, which takes no more of it.

    Args:
        model: a network with ReLU modules, such as `convert_to_relu` gives.
        skip: False for the model as it was.
        inputs: a batch of more than one token, from which the blocks are found; by default the `dummy_inputs` of a
            model of transformers.

    Raises ValueError where no block is found, and RuntimeError for a model that cannot be changed.

    >>> import torch, hf_lgelu
    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> hf_lgelu.skip_zeros(network, inputs=torch.randn(3, 4))
    ['1']
    >>> hf_lgelu.skip_zeros(network, False)
    []
    """
    model = operable_module(model)
    require_values_here(model.named_modules())
    for module in model.modules():
        if isinstance(held := vars(module).get("forward"), _Map):
            held.undo()
    if not skip or isinstance(load_loop(), str):
        return []
    sites = [site for site in find_relu_sites(model) if site.kind == "relu"]
    found = {}
    if sites:
        program = Program(model, sites, cast(Any, model).dummy_inputs if inputs is None else inputs)
        blocks = {site.name: _block(model, program, index) for index, site in enumerate(sites)}
        found = {name: block for name, block in blocks.items() if block is not None}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no ReLU module, on the CPU and in float32, with a linear map behind it, alone "
            "or after a product with a second map. convert_to_relu(model, data) makes a ReLU network of a smooth one"
        )
    for behind, beside in found.values():
        first = None if beside is None else _Beside(*beside)
        _Behind(*behind, first)
    return list(found)


_Found = tuple[nn.Module, int]
"""A map's module, and the axis of hidden units in its weight."""


def _block(model: nn.Module, program: Program, site: int) -> tuple[_Found, _Found | None] | None:
    """The map behind a gate and the map beside it, or None where the two are not read so."""
    calls = program.flow.calls.get(site, [])
    if len(calls) != 1:
        return None
    (call,), product = calls, product_behind(calls[0])
    behind = _map_behind(program, call if product is None else product)
    found = None if behind is None else _module(model, program, behind, behind.input_axis)
    if found is None or product is None:
        return None if found is None else (found, None)
    other = next(operand for operand in product.args[:2] if [*views_back(operand, call)][-1] is not call)
    up = affine_source(program, other, product)
    beside = None if up is None else _module(model, program, up, up.output_axis)
    return None if beside is None else (found, beside)


def _map_behind(program: Program, node: Node) -> AffineOperation | None:
    while len(users(node)) == 1:
        (user,) = users(node)
        operation = read_affine(user, program.flow)
        if operation is not None:
            return operation if operation.data is node else None
        if operation_name(user) not in COPIES | RESHAPES or shape_of(user)[-1:] != shape_of(node)[-1:]:
            return None
        node = user
    return None


def _module(model: nn.Module, program: Program, operation: AffineOperation, axis: int | None) -> _Found | None:
    """The module that computes a linear map of rows, and nothing else, from parameters of its own."""
    is_linear = operation.mixes and operation.channel_axis == -1 and operation.is_direct
    if axis is None or not is_linear or not program.flow.are_used_once(*operation.parameters):
        return None
    name, _, attribute = operation.weight_name.rpartition(".")
    module, running = model.get_submodule(name), list(operation.node.meta.get("nn_module_stack", {}).values())
    runs_here = bool(running) and running[-1][0] in (f"model.{name}", name)
    is_whole = attribute == "weight" and {"weight", "bias"} >= dict(module.named_parameters()).keys()
    is_plain = runs_here and is_whole and "forward" not in vars(module) and hasattr(module, "bias")
    weight = model.get_parameter(operation.weight_name)
    return (module, axis) if is_plain and weight.is_cpu and weight.dtype == torch.float32 else None
