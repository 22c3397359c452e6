"""Activation sites: the places of activations in a module tree, and their kinds."""

import copy
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import nn

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.networks.elementwise import (
    BOUNDED_KINDS,
    CONVERTED_KINDS,
    FunctionModule,
    form_of_activation,
    is_linear,
    values_of_activation,
)
from hf_lgelu.networks.source import codes_in, functions_in

_FUSED_KERNEL = "activation_relu_or_gelu"
_FUSED_CODES = {"relu": 1, "gelu": 2}

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, partial, torch.jit.ScriptFunction)

LEARNED_KINDS: tuple[str, ...] = tuple(GATES)
"""The λ-gates, with a hardness of their own; a substitution exchanges these kinds by default."""

SELF_GATE_KINDS: tuple[str, ...] = ("gelu", "silu")
"""The kinds that a row of GATES is at λ = 1; `replace_activations` takes these kinds by default."""

SMOOTH_KINDS: tuple[str, ...] = (*LEARNED_KINDS, *CONVERTED_KINDS)
"""The kinds of gates that become ReLU by default: smooth gates, and gates with a slope below zero."""

KINDS: tuple[str, ...] = (*SMOOTH_KINDS, *BOUNDED_KINDS)
"""Every kind that a user can name."""


@dataclass(frozen=True)
class ActivationSite:
    """One place in a module tree that holds an activation: `parent.<attribute>` is `module`."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module
    kind: str
    fused_kernel: int | None = None
    """The parent's code of its fused kernel when the site was found (`place`); None without a fused kernel."""
    function: Callable[..., Any] | None = None
    """The function that the attribute holds in the place of a module, as `F.gelu`; `module` then computes the same."""

    def put(self, module: nn.Module) -> None:
        """Place `module` at this site, in the training mode of the site's own; `self.module` restores everything."""
        if module is self.module and self.function is not None:
            place(self.parent, self.attribute, self.function)
        else:
            place(self.parent, self.attribute, module.train(self.module.training))
        if module is self.module and self.fused_kernel is not None:
            setattr(self.parent, _FUSED_KERNEL, self.fused_kernel)


def place(parent: nn.Module, attribute: str, activation: nn.Module | Callable[..., Any]) -> None:
    """Set `parent.<attribute>` to an activation, and make the parent run it."""
    if not isinstance(activation, nn.Module) and attribute in parent._modules:
        delattr(parent, attribute)  # torch lets no function take a module's place
    setattr(parent, attribute, activation)
    # The fused kernel of torch's encoder layer runs in eval mode and reads only its code; 0 keeps the kernel off.
    if hasattr(parent, _FUSED_KERNEL):
        form = form_of_activation(activation)
        setattr(parent, _FUSED_KERNEL, 0 if form is None else _FUSED_CODES.get(form.name, 0))


def kind_of(module: nn.Module) -> str | None:
    """The row of `KINDS` that `module` is, or None; for a λ-gate, its row of GATES."""
    if isinstance(module, LambdaGate):
        return module.row
    form = form_of_activation(module)
    return form.kind if form is not None and form.kind in KINDS else None


def is_activation(held: Any) -> bool:
    """Whether a module or function is elementwise and not linear, like a λ-gate or ReLU."""
    values = values_of_activation(held)
    return isinstance(held, LambdaGate) or (values is not None and not is_linear(values))


def computes_same(one: Any, other: Any) -> bool:
    """Whether two activations, modules or functions, compute the same; without values their classes are compared."""
    mine, others = values_of_activation(one), values_of_activation(other)
    if mine is None or others is None:
        return type(one) is type(other)
    return torch.allclose(mine, others, rtol=2e-5, atol=2e-5, equal_nan=True)


def row_of(module: nn.Module) -> str:
    """The row of GATES to replace `module`: a λ-gate's own row, the row that `module` is at λ = 1, else λ-GELU."""
    if isinstance(module, LambdaGate):
        return module.row
    form = form_of_activation(module)
    return next((gate.name for gate in GATES.values() if form and form.name in gate.plain_names), DEFAULT_GATE)


def find_sites(model: nn.Module, kinds: Iterable[str] = SMOOTH_KINDS) -> list[ActivationSite]:
    """Every activation site of the given kinds, in the order in which the modules were registered.

    A module at several places (one GELU used throughout) is a site at each. A shared parent (ALBERT's single layer) is
    walked once.
    """
    wanted = check_kinds(kinds)
    return [site for site in _walk(model, "", set(), kind_of) if site.kind in wanted]


def sites_in_words(model: nn.Module, kinds: Iterable[str] = SMOOTH_KINDS) -> str:
    """The gates that a network has, by their classes: "Hardswish × 7, SiLU × 5" or "no smooth gates"."""
    found = Counter(
        GATES[site.kind].label if site.kind in GATES else site.module._get_name() for site in find_sites(model, kinds)
    )
    return ", ".join(f"{label} × {count}" for label, count in found.items()) or "no smooth gates"


@contextmanager
def exchanged(sites: Sequence[ActivationSite], modules: Sequence[nn.Module]) -> Iterator[None]:
    """A block in which each site has its module of `modules`. After the block, or an error, the sites are as before."""
    try:
        for site, module in zip(sites, modules, strict=True):
            site.put(module)
        yield
    finally:
        for site in sites:
            site.put(site.module)


def functions_as_modules(model: nn.Module, kinds: Iterable[str]) -> AbstractContextManager[None]:
    """A block in which gates that are functions in attributes, as `F.gelu`, are modules; a copy keeps the modules."""
    sites = [site for site in find_sites(model, kinds) if site.function is not None]
    return exchanged(sites, [copy.copy(site.module) for site in sites])


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """`kinds` as a tuple, or a ValueError that names the accepted kinds."""
    checked = tuple(kinds)
    for kind in checked:
        if kind not in KINDS:
            raise ValueError(f"unknown activation kind {kind!r}; accepted: {', '.join(KINDS)}")
    return checked


def _walk(
    module: nn.Module, prefix: str, seen: set[int], read_kind: Callable[[nn.Module], str | None]
) -> Iterator[ActivationSite]:
    if id(module) in seen:
        return
    seen.add(id(module))
    fused, cls = getattr(module, _FUSED_KERNEL, None), cast(Any, type(module))
    for attribute, value in list(vars(module).items()):
        if attribute == "forward" or attribute.startswith("_"):  # nearly all of them: training runs this in each step
            continue
        # A function that can be tried: it is no method of an object, not Python's own, and a forward reads it.
        is_function = isinstance(value, _FUNCTIONS) or isinstance(getattr(value, "__self__", None), type)
        if is_function and getattr(value, "__module__", None) != "builtins" and attribute in _names_read(cls):
            called = FunctionModule(value).train(module.training)
            kind = read_kind(called)
            if kind is not None:
                yield ActivationSite(f"{prefix}{attribute}", module, attribute, called, kind, fused, value)
    held = dict(module._modules.items())  # that of TorchScript has no `get`
    children = [(name, module, name, child) for name, child in held.items() if child is not None]
    copies, original = held.get("modules_to_save"), held.get("original_module")
    if original is not None and isinstance(copies, nn.ModuleDict):  # PEFT saves this module: take the copy that runs
        active = () if module.disable_adapters else module.active_adapters
        if active and active[0] in copies:
            children = [(f"modules_to_save.{active[0]}", copies, active[0], copies[active[0]])]
        else:
            children = [("original_module", module, "original_module", original)]
    for step, parent, attribute, child in children:
        name = f"{prefix}{step}"
        kind = read_kind(child)
        if kind is None:
            yield from _walk(child, f"{name}.", seen, read_kind)
        else:
            yield ActivationSite(name, parent, attribute, child, kind, getattr(parent, _FUSED_KERNEL, None))


@lru_cache(1024)
def _names_read(cls: Any) -> frozenset[str]:
    """The names in the code of `forward` and of the methods that it names: "act" for `self.act(x)`."""
    names, left = set[str](), ["forward"]
    while left:
        for function in functions_in(inspect.getattr_static(cls, left.pop(), None)):
            for code in codes_in(function.__code__):
                found = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))} - names
                names |= found
                left += found
    return frozenset(names)


def uncompiled_name(name: str) -> str:
    """A site's name as in a checkpoint: without the steps of torch.compile, FSDP and activation checkpointing."""
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def lambda_gelu_modules(model: nn.Module) -> list[tuple[str, LambdaGate]]:
    """(name, module) of every λ-gate, each once, in registration order."""
    if isinstance(model, LambdaGate):
        return [("", model)]
    found: dict[int, tuple[str, LambdaGate]] = {}
    for site in _walk(model, "", set(), lambda module: module.row if isinstance(module, LambdaGate) else None):
        found.setdefault(id(site.module), (site.name, site.module))
    return list(found.values())


def require_lambda_gelu(model: nn.Module) -> list[tuple[str, LambdaGate]]:
    """`lambda_gelu_modules`, or a ValueError where the model has none."""
    modules = lambda_gelu_modules(model)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no λ-GELU activation, nor another λ-gate; it has {sites_in_words(model)}. "
            f"Call hf_lgelu.replace_activations(model), or set the activation key of its config to one of "
            f"{', '.join(GATES)} (hidden_act, activation_function, ...: many configs ignore a wrong key silently)"
        )
    return modules


def uncompiled(model: nn.Module) -> nn.Module:
    """The module inside torch.compile, which hides operations, or `model` itself."""
    return getattr(model, "_orig_mod", model)
