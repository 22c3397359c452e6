"""The sequential refit written down plainly: every layer runs both whole networks again and solves dense systems.

Nothing of the package is used but the plan, which says which inputs are in which fold, and one constant. Forward
hooks read what a module takes and gives, windows come from `F.unfold`, and the ridge is NumPy's least squares on an
augmented system.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_lgelu.refit import carry

STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
KINKS = (0.0, -0.2, 0.2, -0.4, 0.4, -0.6, 0.6, -0.8, 0.8, -1.0, 1.0)


def ones(model: nn.Module) -> float:
    """The scale of a map whose output goes into the sum as it is."""
    return 1.0


def plain_scale(name: str) -> Callable[[nn.Module], Tensor]:
    """The same of a BatchNorm without weights."""

    def scale(model: nn.Module) -> Tensor:
        norm = model.get_submodule(name)
        return 1 / (norm.running_var + norm.eps).sqrt()

    return scale


def as_it_is(value: Tensor) -> Tensor:
    """The layout of a target that a map's output reaches without a move."""
    return value


def batch_norm_scale(name: str) -> Callable[[nn.Module], Tensor]:
    """∂(output of a BatchNorm in eval mode)/∂(its input), per channel."""

    def scale(model: nn.Module) -> Tensor:
        norm = model.get_submodule(name)
        return norm.weight.detach() / (norm.running_var + norm.eps).sqrt()

    return scale


@dataclass(frozen=True)
class Step:
    """One refit: `maps` are solved together towards the teacher's output of the module `target`.

    scales: per map, ∂target/∂(its output). bias: (parameter that takes the constant, ∂target/∂(it)), None where
    there is none. layout: the target laid out as the maps' outputs. shifted: the bias before the gate of a depthwise
    map, from which the kinks are taken.
    """

    maps: tuple[str, ...]
    target: str
    scales: tuple[Callable[[nn.Module], Tensor | float], ...] = (ones,)
    bias: tuple[str, Callable[[nn.Module], Tensor | float]] | None = None
    layout: Callable[[Tensor], Tensor] = as_it_is
    strengths: tuple[float, ...] = STRENGTHS
    shifted: str | None = None


@dataclass(frozen=True)
class Chosen:
    """What dense cross-validation chose for a step."""

    choice: str
    strength: float | None
    error_before: float | None
    error_after: float | None
    rows: int


def swapped(model: nn.Module) -> nn.Module:
    """A copy with nn.ReLU in the place of every smooth activation module."""
    student = copy.deepcopy(model)
    for module in student.modules():
        for name, child in module.named_children():
            if any(word in type(child).__name__.lower() for word in ("gelu", "silu", "mish")):
                setattr(module, name, nn.ReLU())
    return student


@torch.no_grad()
def refit(model: nn.Module, steps: Sequence[Step], plan) -> tuple[nn.Module, list[Chosen]]:
    """The refitted student and what was chosen, step by step."""
    student = swapped(model).eval()
    chosen = []
    images = sum(len(batch) for fold in plan.folds for batch in fold)
    for index, step in enumerate(steps):
        if step.shifted is not None and len(plan.folds) > 1:
            student.get_parameter(step.shifted)[:] = _nearest_shift(model, student, step, plan, index, images)
        folds = [_dense(model, student, step, fold, index, images) for fold in plan.folds]
        has_bias = step.bias is not None
        choice, strength, before, after = _choose(folds, has_bias, step.strengths)
        chosen.append(Chosen(choice, strength, before, after, sum(len(fold[0][0]) for fold in folds)))
        everything = [tuple(np.concatenate(part) for part in zip(*group, strict=True)) for group in _by_group(folds)]
        changes = [_change(features, residuals, choice, strength, has_bias) for features, residuals, _ in everything]
        _write(student, step, changes)
    return student, chosen


def _nearest_shift(model, student, step: Step, plan, index: int, images: int) -> Tensor:
    """The bias from which each channel has the kink with the least error on the folds held out."""
    bias, errors = student.get_parameter(step.shifted).clone(), []
    for kink in KINKS:
        student.get_parameter(step.shifted)[:] = bias - kink
        folds = [_dense(model, student, step, fold, index, images) for fold in plan.folds]
        groups = _by_group(folds)
        errors.append([_errors([group], [("refit", 1e-3)], step.bias is not None)[0] for group in groups])
    return bias - torch.tensor(KINKS)[np.argmin(errors, axis=0)]


def _by_group(folds):
    """Per group of channels the list of its folds."""
    return [[fold[group] for fold in folds] for group in range(len(folds[0]))]


def _dense(model, student, step, batches, index, images) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(X, R, T) of one fold, per group of channels."""
    groups = getattr(student.get_submodule(step.maps[0]), "groups", 1)
    parts = []
    for batch in batches:
        teacher_seen, student_seen = (
            seen(net, (*step.maps, step.target), batch.load().inputs) for net in (model, student)
        )
        target = step.layout(teacher_seen[step.target][1])
        residual = target - step.layout(student_seen[step.target][1])
        mask = batch.load().inputs.get("attention_mask") if isinstance(batch.load().inputs, dict) else None
        features = [_rows(student.get_submodule(name), student_seen[name][0], groups) for name in step.maps]
        features = torch.cat(features, dim=-1)
        convolution = is_convolution(student.get_submodule(step.maps[0]))
        part = (features, *(_outputs(value, convolution, groups) for value in (residual, target)))
        if convolution:
            part = _at_some_positions(part, [seed ^ index for seed in batch.seeds], images)
        part = tuple(value.flatten(0, 1).double().numpy() for value in part)
        if mask is not None:
            real = mask.reshape(-1).bool().numpy()
            part = tuple(value[real] for value in part)
        parts.append(part)
    stacked = [np.concatenate(values) for values in zip(*parts, strict=True)]
    return [tuple(value[:, group] for value in stacked) for group in range(groups)]


def is_convolution(module: nn.Module) -> bool:
    """Whether rows are windows."""
    return isinstance(module, nn.Conv1d | nn.Conv2d)


def is_input_first(module: nn.Module) -> bool:
    """Whether the weight is (in, out)."""
    return isinstance(module, Conv1D) or getattr(module, "weight_is_transposed", None) is False


def seen(net: nn.Module, names: Sequence[str], inputs) -> dict[str, tuple[Tensor, Tensor]]:
    """{module: (what it took, what it gave)} in one whole forward pass in eval mode."""
    found = {}
    handles = [
        net.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: found.__setitem__(name, (args[0].clone(), output.clone()))
        )
        for name in names
    ]
    training = net.training
    with torch.no_grad():
        net.eval()
        net(**inputs) if isinstance(inputs, dict) else net(inputs)
        net.train(training)
    for handle in handles:
        handle.remove()
    return found


def _rows(module: nn.Module, x: Tensor, groups: int) -> Tensor:
    """(B, positions, groups, features)."""
    if not is_convolution(module):
        return x.reshape(len(x), -1, 1, x.shape[-1])
    kernel, stride, padding, dilation = module.kernel_size, module.stride, module.padding, module.dilation
    if isinstance(module, nn.Conv1d):
        x = x[:, :, None]
        kernel, stride, padding, dilation = (1, *kernel), (1, *stride), (0, *padding), (1, *dilation)
    windows = F.unfold(x, kernel, dilation, padding, stride)  # (B, C · kernel, positions)
    return windows.reshape(len(x), groups, -1, windows.shape[-1]).permute(0, 3, 1, 2)


def _outputs(y: Tensor, convolution: bool, groups: int) -> Tensor:
    """(B, positions, groups, outputs)."""
    if not convolution:
        return y.reshape(len(y), -1, 1, y.shape[-1])
    return y.flatten(2).reshape(len(y), groups, -1, y[0, 0].numel()).permute(0, 3, 1, 2)


def _at_some_positions(part, seeds: Sequence[int], images: int):
    """So many positions per feature over all images: of each image as many, from a seed of its own."""
    available, width = part[0].shape[1], part[0].shape[3]
    wanted = math.ceil(max(carry.ROWS_PER_FEATURE * width, carry.LEAST_POSITIONS) / images)
    if wanted >= available:
        return part
    drawn = [torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:wanted] for seed in seeds]
    return tuple(torch.stack([image[chosen] for image, chosen in zip(value, drawn, strict=True)]) for value in part)


def _choose(folds, has_bias: bool, strengths: Sequence[float]) -> tuple[str, float | None, float | None, float | None]:
    if len(folds) == 1:
        return ("refit", STRENGTHS[0], None, None) if strengths == STRENGTHS else ("unchanged", None, None, None)
    candidates = [("unchanged", None), *([("bias only", None)] if has_bias else [])]
    candidates += [("refit", strength) for strength in reversed(strengths)]
    groups = _by_group(folds)
    errors, targets = _errors(groups, candidates, has_bias), [np.concatenate([f[2] for f in group]) for group in groups]
    spread = sum(((each - each.mean(0)) ** 2).sum() for each in targets)
    best = int(errors.argmin())
    return *candidates[best], errors[0] / spread, errors[best] / spread


def _errors(groups, candidates, has_bias: bool) -> np.ndarray:
    """The square error of each candidate, summed over groups and the folds held out in turn."""
    errors = np.zeros(len(candidates))
    for group in groups:
        for held_out in range(len(group)):
            features, residuals, _ = (
                np.concatenate(part)
                for part in zip(*(fold for index, fold in enumerate(group) if index != held_out), strict=True)
            )
            unseen, missing, _ = group[held_out]
            for index, candidate in enumerate(candidates):
                change, constant = _change(features, residuals, *candidate, has_bias)
                errors[index] += ((missing - unseen @ change.T - constant) ** 2).sum()
    return errors


def _change(features, residuals, choice, strength, has_bias) -> tuple[np.ndarray, np.ndarray]:
    """(Δ (m, d), δb (m,)) in units of the target."""
    count, width = features.shape
    outputs = residuals.shape[1]
    if choice == "unchanged":
        return np.zeros((outputs, width)), np.zeros(outputs)
    if choice == "bias only":
        return np.zeros((outputs, width)), residuals.mean(0)
    around = features - features.mean(0) if has_bias else features
    penalty = np.sqrt(strength * (around**2).sum() / width)
    if has_bias:
        rows = np.block([[features, np.ones((count, 1))], [penalty * np.eye(width), np.zeros((width, 1))]])
    else:
        rows = np.concatenate([features, penalty * np.eye(width)])
    right = np.concatenate([residuals, np.zeros((width, outputs))])
    solution = np.linalg.lstsq(rows, right, rcond=None)[0]
    return solution[:width].T, solution[width] if has_bias else np.zeros(outputs)


def _write(student: nn.Module, step: Step, changes) -> None:
    weight_change = torch.from_numpy(np.concatenate([change for change, _ in changes]))
    constant = torch.from_numpy(np.concatenate([constant for _, constant in changes]))
    start = 0
    for name, scale in zip(step.maps, step.scales, strict=True):
        module = student.get_submodule(name)
        width = module.weight.numel() // len(weight_change)
        part = weight_change[:, start : start + width] / torch.as_tensor(scale(student)).reshape(-1, 1)
        start += width
        module.weight += part.T if is_input_first(module) else part.reshape(module.weight.shape)
    if step.bias is not None:
        name, scale = step.bias
        parameter = student.get_parameter(name)
        parameter += constant / scale(student)
