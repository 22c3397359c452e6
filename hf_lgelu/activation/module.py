"""The λ-gates as modules with a learnable hardness."""

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_lgelu.activation.hardness import (
    DEFAULT_INIT_HARDNESS,
    DEFAULT_TEMPERATURE,
    check_init_hardness,
    check_temperature,
    effective_hardness,
    raw_from_hardness,
)
from hf_lgelu.activation.kernels import apply_learned_gate

# torch.fx.symbolic_trace records one call, as for nn.GELU, because the choice inside depends on the input.
torch.fx.wrap("apply_learned_gate")


class LambdaGate(nn.Module):
    """f(x; λ) = x·G(λx) with λ = 1 + softplus(s/t) learned through `raw_hardness` (s): the common base of all gates.

    Use a row's own class: `LambdaGELU`, `LambdaGELUTanh`, `LambdaSiLU`.

    State dict: `raw_hardness` (s, the only parameter), `temperature` (t) and `hardness_override`
    (0 while s rules; otherwise the λ that hardening has set). All are float32 of shape (1,), whatever the model's
    dtype. So a checkpoint evaluates the same after a reload in the middle of hardening. A state whose λ is not finite
    is refused.

    Args:
        inplace: accepted, because timm passes it first, and ignored.
        init_hardness: λ at the start, above 1.
        temperature: t > 0; the paper uses 0.1.
        device: the device of the state, as in torch's modules.
        dtype: accepted as in torch's modules, and ignored: the state stays float32.

    Sites that hold the same module object share its λ.

    Shape: input any, float; output the same shape and dtype.

    `torch.compile`, `torch.export`, `torch.jit.trace` and `torch.fx` take this module. `torch.jit.script` cannot choose
    among kernels, and raises a RuntimeError.

    Raises:
        ValueError: a λ or t is not as described; the message names the accepted values.
    """

    row: ClassVar[str]
    """The name of the row of GATES."""

    def __init__(
        self,
        inplace: bool = False,
        *,
        init_hardness: float = DEFAULT_INIT_HARDNESS,
        temperature: float = DEFAULT_TEMPERATURE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.init_hardness = check_init_hardness(init_hardness)
        self.init_temperature = check_temperature(temperature)
        raw_hardness = raw_from_hardness(self.init_hardness, self.init_temperature)
        # float32: a step of s in bfloat16 would round away. Of shape (1,): FSDP cannot shard a scalar.
        self.raw_hardness = nn.Parameter(torch.full((1,), raw_hardness, dtype=torch.float32, device=device))
        self.register_buffer("temperature", torch.full((1,), self.init_temperature, dtype=torch.float32, device=device))
        self.register_buffer("hardness_override", torch.zeros((1,), dtype=torch.float32, device=device))
        self._awaits_values = self.raw_hardness.is_meta

    def reset_parameters(self) -> None:
        """Set s to the initial hardness, t to its constructor value, and lift the override.

        Only `torch.nn.init` functions are used, and through their module. transformers guards these functions while it
        loads a checkpoint, so a tensor that was loaded is left alone.
        """
        raw_hardness = raw_from_hardness(self.init_hardness, self.init_temperature)
        torch.nn.init.constant_(self.raw_hardness, raw_hardness)
        torch.nn.init.constant_(self.temperature, self.init_temperature)
        torch.nn.init.zeros_(self.hardness_override)

    @property
    def _is_hf_initialized(self) -> bool:
        """True. During a load, transformers asks this before it initializes tensors that the checkpoint lacks.

        A gate that was built without memory then sets its missing tensors, once, while `torch.nn.init` is guarded.
        """
        guarded = getattr(sys.modules.get("transformers.initialization"), "constant_", None)
        is_asked = torch.nn.init.constant_ is guarded and not self.raw_hardness.is_meta
        if is_asked and self._awaits_values:
            self.reset_parameters()
            self._awaits_values = False
            problem = state_problem(self.raw_hardness, self.temperature, self.hardness_override)
            if problem is not None:
                raise RuntimeError(f"the checkpoint has no valid hardness for one of its gates: {problem}")
        return True

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        """Ignored: transformers sets this on every module."""

    @property
    def hardness(self) -> Tensor:
        """λ, float32 of shape (1,): the override where hardening has set one, else λ(s)."""
        return effective_hardness(self.raw_hardness, self.temperature, self.hardness_override)

    def forward(self, x: Tensor) -> Tensor:
        return apply_learned_gate(x, self.raw_hardness, self.temperature, self.hardness_override, self.row)

    def extra_repr(self) -> str:
        return f"init_hardness={self.init_hardness}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LambdaGate":
        # model.to(torch.bfloat16), .half() and .double() move the state but do not cast it.
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(device=moved.device)

        return super()._apply(move_only, recurse)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = {name: state_dict.get(prefix + name) for name in ("raw_hardness", "temperature", "hardness_override")}
        if (problem := state_problem(**state)) is not None:
            error_msgs.append(f"{prefix.removesuffix('.') or type(self).__name__}: {problem}")
            return
        half = {
            prefix + name: tensor
            for name, tensor in state.items()
            if isinstance(tensor, Tensor) and tensor.dtype != torch.float32
        }
        if half:  # assign=True would put the checkpoint's own tensors in
            state_dict = {**state_dict, **{name: tensor.detach().float() for name, tensor in half.items()}}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class LambdaGELU(LambdaGate):
    """λ-GELU, f(x; λ) = x·Φ(λx) with λ = 1 + softplus(s/t) learned: GELU (erf) at λ = 1, ReLU for λ → ∞.

    Arguments, state dict and shapes: `LambdaGate`.

    >>> import torch, hf_lgelu
    >>> activation = hf_lgelu.LambdaGELU(init_hardness=2.0)
    >>> activation(torch.tensor([-1.0, 1.0]))
    tensor([-0.0228,  0.9772], grad_fn=<_LambdaGateBackward>)
    >>> round(activation.hardness.item(), 6)
    2.0
    """

    row = "lambda_gelu"


class LambdaGELUTanh(LambdaGate):
    """The tanh form of λ-GELU: `F.gelu(x, approximate="tanh")`, GPT-2's, at λ = 1, ReLU for λ → ∞.

    Arguments, state dict and shapes: `LambdaGate`.

    >>> import torch, hf_lgelu
    >>> from hf_lgelu.activation.module import LambdaGELUTanh
    >>> LambdaGELUTanh(init_hardness=160.0)(torch.tensor([-1.0, 1.0])).tolist()
    [-0.0, 1.0]
    """

    row = "lambda_gelu_tanh"


class LambdaSiLU(LambdaGate):
    """λ-SiLU, f(x; λ) = x·σ(λx) with λ = 1 + softplus(s/t) learned: SiLU (Swish) at λ = 1, ReLU for λ → ∞.

    Arguments, state dict and shapes: `LambdaGate`.

    >>> import torch, hf_lgelu
    >>> hf_lgelu.LambdaSiLU(init_hardness=160.0)(torch.tensor([-1.0, 1.0])).tolist()
    [-0.0, 1.0]
    """

    row = "lambda_silu"


GATE_MODULES: dict[str, type[LambdaGate]] = {cls.row: cls for cls in (LambdaGELU, LambdaGELUTanh, LambdaSiLU)}
"""The module of each row of GATES."""


NEEDS_THE_PACKAGE = "hf_lgelu.from_pretrained"
"""The value of an activation key where the config alone cannot rebuild the model. A process without this package
refuses the checkpoint, and the error names this function."""


class GuardedGate(LambdaGELU):
    """The activation `NEEDS_THE_PACKAGE` in a process that has imported this package: an error in words."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "the config alone cannot build this network's gates, and it would be another network. Load a checkpoint "
            "with hf_lgelu.from_pretrained(ModelClass, folder), the whole network where this is a part of one, and "
            "copy a model with copy.deepcopy"
        )


def state_problem(
    raw_hardness: Tensor | None, temperature: Tensor | None, hardness_override: Tensor | None
) -> str | None:
    """The reason why a λ-gate must not take this state, or None. Missing tensors, or tensors without values, pass.

    s has to be finite, t finite and above 0, and the override finite and at least 0 (`effective_hardness`).
    """
    if (bad := _first_bad(raw_hardness, lambda s: s.isfinite())) is not None:
        return f"raw_hardness holds {bad}, which stands for no hardness λ; it has to be finite"
    if (bad := _first_bad(temperature, lambda t: t.isfinite() & (t > 0))) is not None:
        return f"temperature holds {bad}; it has to be finite and above 0"
    if (bad := _first_bad(hardness_override, lambda h: h.isfinite() & (h >= 0))) is not None:
        return f"hardness_override holds {bad}; it has to be a finite hardness λ, or 0 where λ is learned"
    return None


def _first_bad(values: Tensor | None, is_good: Callable[[Tensor], Tensor]) -> float | None:
    if not isinstance(values, Tensor) or values.device.type == "meta" or not values.is_floating_point():
        return None
    good = is_good(values.detach())
    return None if bool(good.all()) else values.detach()[~good].flatten()[0].item()
