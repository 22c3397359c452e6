"""Activation sites: where in a module tree an activation sits, and of what kind it is."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations as hf_activations

from hf_lgelu.activation.gates import DEFAULT_GATE, GATES
from hf_lgelu.activation.module import LambdaGate
from hf_lgelu.models.example_run import NOT_TAKEN

_FUSED_KERNEL = "activation_relu_or_gelu"

_TIMM_LAYERS = "timm.layers"
_ACTIVATION_FILES = ("torch.nn.modules.activation", "transformers.activations", "timm.layers.activations")
# torch keeps these beside its activations.
_OTHER_CLASSES = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)

_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


@dataclass(frozen=True)
class PlainForm:
    """A smooth activation that networks are trained with: its kind, its name in transformers, the classes computing it.

    The classes are looked up by these names in torch.nn, transformers.activations and timm.layers.
    """

    kind: str
    name: str
    classes: tuple[str, ...]

    @property
    def gate(self) -> str | None:
        """The row of GATES whose λ = 1 it is."""
        return next((gate.name for gate in GATES.values() if self.name in gate.plain_names), None)


_TANH_FORM = PlainForm(
    "gelu",
    "gelu_pytorch_tanh",
    ("GELUTanh", "NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation"),  # four spellings of it
)

PLAIN_FORMS: tuple[PlainForm, ...] = (
    PlainForm("gelu", "gelu", ("GELU", "GELUActivation")),
    _TANH_FORM,
    PlainForm("gelu", "quick_gelu", ("QuickGELU", "QuickGELUActivation")),  # x·σ(1.702x)
    PlainForm("silu", "silu", ("SiLU", "SiLUActivation", "Swish")),
    PlainForm("mish", "mish", ("Mish", "MishActivation")),
)
"""ClippedGELUActivation is left out: it is another function."""

_PLAIN_LABELS = {"gelu": "GELU", "silu": "SiLU", "mish": "Mish"}

LEARNED_KINDS: tuple[str, ...] = tuple(GATES)
"""The λ-gates, with a hardness of their own: what a substitution exchanges unless other kinds are asked for."""

SELF_GATE_KINDS: tuple[str, ...] = tuple(dict.fromkeys(form.kind for form in PLAIN_FORMS if form.gate))
"""What λ = 1 of a row of GATES is: what `replace_activations` takes unless other kinds are asked for."""

SMOOTH_KINDS: tuple[str, ...] = (*LEARNED_KINDS, *_PLAIN_LABELS)
"""The kinds of smooth gates that become ReLU when they harden."""

_HOMOGENEOUS: dict[type, str] = {nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu"}


@dataclass(frozen=True)
class ActivationSite:
    """One place in a module tree that holds an activation: `parent.<attribute>` is `module`."""

    name: str
    parent: nn.Module
    attribute: str
    module: nn.Module
    kind: str
    fused_kernel: int | None = None
    """The parent's code of its fused kernel when the site was found (`place`); None without such a kernel."""

    def put(self, module: nn.Module) -> None:
        """Place `module` at this site, in the training mode of the site's own module; `self.module` puts all back."""
        place(self.parent, self.attribute, module.train(self.module.training))
        _keep_hooks(self.module, module)
        if module is self.module and self.fused_kernel is not None:
            setattr(self.parent, _FUSED_KERNEL, self.fused_kernel)

    def is_in_place(self, model: nn.Module) -> bool:
        """Whether `model`, in which the site was found, still holds `module` where its name says."""
        place = model
        for step in self.name.split("."):  # from the top: a whole block may have been exchanged
            child = place._modules.get(step)
            if child is None:
                return False
            place = child
        return place is self.module


def place(parent: nn.Module, attribute: str, module: nn.Module) -> None:
    """Set `parent.<attribute>` to an activation, and have the parent run it.

    torch's TransformerEncoderLayer has a fused kernel for ReLU (1) and GELU (2). The kernel runs in eval mode and never
    looks at the module, so the layer's code for it has to follow; 0 keeps the kernel off.
    """
    setattr(parent, attribute, module)
    if getattr(parent, _FUSED_KERNEL, 0):
        is_erf = type(module) is nn.GELU and module.approximate == "none"
        setattr(parent, _FUSED_KERNEL, 1 if type(module) is nn.ReLU else 2 if is_erf else 0)


@cache
def _plain_classes(with_timm: bool) -> dict[type, PlainForm]:
    """{class: its form}, as far as the imported libraries have them."""
    libraries = [nn, hf_activations, *([sys.modules[_TIMM_LAYERS]] if with_timm else [])]
    return {
        getattr(library, name): form
        for form in PLAIN_FORMS
        for name in form.classes
        for library in libraries
        if hasattr(library, name)
    }


def plain_form(module: nn.Module) -> PlainForm | None:
    """The plain activation that `module` computes, or None; a subclass may compute something of its own."""
    classes = _plain_classes(_TIMM_LAYERS in sys.modules)  # a model with one of timm's layers has imported them
    base = next((cls for cls in type(module).__mro__ if cls in classes), None)
    if base is None or not _computes_as(module, base):
        return None
    if base is nn.GELU and getattr(module, "approximate", None) == "tanh":
        return _TANH_FORM
    return classes[base]


def kind_of(module: nn.Module) -> str | None:
    """The kind of smooth gate that `module` is, or None; a λ-gate's is its row of GATES."""
    if isinstance(module, LambdaGate):
        return module.gate
    form = plain_form(module)
    return None if form is None else form.kind


@torch.no_grad()
def _computes_as(module: nn.Module, base: Any) -> bool:
    """Whether a module computes what `base`'s forward does, and always will: a subclass has nothing to learn."""
    own: Any = type(module).forward
    if own is base.forward:
        return True
    x = torch.linspace(-8, 8, 129, dtype=torch.float64, device="cpu")
    x = torch.cat([x, 100 * x])  # what is clipped may be clipped far out
    try:
        given, expected = own(module, x.clone()), base.forward(module, x.clone())
    except NOT_TAKEN:
        return False
    # A subclass may compute in float32.
    same = isinstance(given, Tensor) and given.shape == x.shape and torch.allclose(given.double(), expected, 1e-6, 1e-6)
    return same and not list(module.parameters())


def is_activation(module: nn.Module) -> bool:
    """Whether the module's class is in the files where torch, transformers and timm keep their activations.

    Attention and softmax are in these files too and are no activations.
    """
    return type(module).__module__.startswith(_ACTIVATION_FILES) and not isinstance(module, _OTHER_CLASSES)


def function_of(module: Any) -> tuple[type, float | None]:
    """(class, slope of a LeakyReLU): the function of an activation, whatever its weights."""
    return type(module), getattr(module, "negative_slope", None)


def plain_gate_of(module: nn.Module) -> str | None:
    """The row of GATES whose λ = 1 is the plain activation `module`, or None where there is none."""
    form = plain_form(module)
    return None if form is None else form.gate


def gate_of(module: nn.Module) -> str:
    """The row of GATES that takes the place of `module`: a λ-gate's own, else `plain_gate_of`.

    No row is at λ = 1 the sigmoid form of GELU, x·σ(1.702x), or Mish. Both get λ-GELU, which is near.
    """
    return module.gate if isinstance(module, LambdaGate) else plain_gate_of(module) or DEFAULT_GATE


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Have the hooks of `old` run at `new`; their handles then remove them from both."""
    for name in _HOOKS:
        hooks = getattr(old, name)
        if hooks and not getattr(new, name):
            setattr(new, name, hooks)


def checked_module(model: nn.Module) -> nn.Module:
    """The model, or a TypeError that names the class of another object."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; load a checkpoint first")
    return model


def find_sites(model: nn.Module, kinds: Iterable[str] = SMOOTH_KINDS) -> list[ActivationSite]:
    """Every activation site of the given kinds, in the order in which the modules were registered.

    A module registered at several places (one stateless GELU used throughout) is a site at each of them. A parent that
    is itself shared (ALBERT's single layer) is walked once and gives one site.
    """
    wanted = check_kinds(kinds)
    return [site for site in _walk(checked_module(model), "", set(), kind_of) if site.kind in wanted]


def find_relu_sites(model: nn.Module) -> list[ActivationSite]:
    """Every ReLU and leaky ReLU, in the same order: gates g with g(c·z) = c·g(z) for c > 0."""
    return list(_walk(checked_module(model), "", set(), lambda module: _HOMOGENEOUS.get(type(module))))


def sites_in_words(model: nn.Module, kinds: Iterable[str] = SMOOTH_KINDS) -> str:
    """The smooth gates that a network has as modules: "12 GELU", "3 SiLU and 12 GELU" or "no smooth gates"."""
    labels = {gate.name: gate.label for gate in GATES.values()} | _PLAIN_LABELS
    found = Counter(site.kind for site in find_sites(model, kinds))
    return " and ".join(f"{count} {labels[kind]}" for kind, count in found.items()) or "no smooth gates"


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """`kinds` as a tuple, or a ValueError that names the accepted kinds."""
    checked = tuple(kinds)
    for kind in checked:
        if kind not in SMOOTH_KINDS:
            raise ValueError(f"unknown activation kind {kind!r}; accepted: {', '.join(SMOOTH_KINDS)}")
    return checked


def _walk(
    module: nn.Module, prefix: str, seen: set[int], read_kind: Callable[[nn.Module], str | None]
) -> Iterator[ActivationSite]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for step, parent, attribute, child in _live_children(module):
        name = f"{prefix}{step}"
        kind = read_kind(child)
        if kind is None:
            yield from _walk(child, f"{name}.", seen, read_kind)
        else:
            yield ActivationSite(name, parent, attribute, child, kind, getattr(parent, _FUSED_KERNEL, None))


def _live_children(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, attribute, child) of the children that a module runs.

    For a module that an adapter saves, PEFT keeps the original and a copy for each adapter; one of them runs.
    """
    copies, original = module._modules.get("modules_to_save"), module._modules.get("original_module")
    if original is not None and isinstance(copies, nn.ModuleDict):
        active = () if module.disable_adapters else module.active_adapters
        if active and active[0] in copies:
            yield f"modules_to_save.{active[0]}", copies, active[0], copies[active[0]]
        else:
            yield "original_module", module, "original_module", original
        return
    for attribute, child in module._modules.items():
        if child is not None:
            yield attribute, module, attribute, child


def uncompiled_name(name: str) -> str:
    """A site's name as in a checkpoint: without the steps of torch.compile, FSDP and activation checkpointing."""
    for wrapper in ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def short_names(names: Iterable[str]) -> dict[str, str]:
    """{module name: what tells it from the others}, as "layer.3" of "bert.encoder.layer.3.intermediate.activation".

    Left out are the steps that all names begin or end with, but for the step in front of a number.
    """
    paths = {name: name.split(".") for name in names}
    room = min(map(len, paths.values()), default=1) - 1  # a step stays of each
    start = next((step for step in range(room) if len({path[step] for path in paths.values()}) > 1), room)
    room -= start
    end = next((step for step in range(room) if len({path[-1 - step] for path in paths.values()}) > 1), room)
    if start and any(path[start].isdigit() for path in paths.values()):
        start -= 1
    return {name: ".".join(path[start : len(path) - end]) for name, path in paths.items()}


def lambda_gelu_modules(model: nn.Module) -> list[tuple[str, LambdaGate]]:
    """(name, module) of every λ-gate, each once, in registration order."""
    if isinstance(checked_module(model), LambdaGate):
        return [("", model)]
    found: dict[int, tuple[str, LambdaGate]] = {}
    for site in _walk(model, "", set(), lambda module: module.gate if isinstance(module, LambdaGate) else None):
        found.setdefault(id(site.module), (site.name, site.module))
    return list(found.values())


def raw_parameters(module: LambdaGate) -> list[nn.Parameter]:
    """The parameters of s: `raw_hardness` alone, unless torch.nn.utils.parametrize computes s from others."""
    parametrized = getattr(module, "parametrizations", {})
    if "raw_hardness" in parametrized:
        return list(parametrized["raw_hardness"].parameters())
    return [module.raw_hardness]


def require_lambda_gelu(model: nn.Module) -> list[tuple[str, LambdaGate]]:
    """`lambda_gelu_modules`, or a ValueError where the model has none."""
    modules = lambda_gelu_modules(model)
    if not modules:
        others = sorted({site.kind for site in find_sites(model)})
        raise ValueError(
            f"{type(model).__name__} has no λ-GELU activation"
            + (f" (smooth gates it has: {', '.join(others)})" if others else "")
            + f", nor another λ-gate. Set the activation key of its config to {', '.join(map(repr, GATES))} (the key "
            "differs by family: hidden_act, activation_function, ...; many configs ignore a wrong key silently) or "
            "call hf_lgelu.replace_activations(model)"
        )
    return modules
