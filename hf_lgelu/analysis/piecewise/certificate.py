"""How far the swap of λ-GELU for ReLU can move a network's scores, known before swapping."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_lgelu.analysis.piecewise.input_flow import NotPiecewiseAffineError, scores_of
from hf_lgelu.analysis.piecewise.swap_error import bound_swap
from hf_lgelu.formats import percent
from hf_lgelu.models.comparison import count_rows, floating_outputs, has_classes
from hf_lgelu.models.example_run import Inputs, forward_hooks, in_dtype, require_plain, run_example
from hf_lgelu.models.operable import uncompiled
from hf_lgelu.models.own_forward import independent_copy
from hf_lgelu.models.profile import hardness_profile, smallest_by_site, swap_errors
from hf_lgelu.models.sites import LEARNED_KINDS, checked_module, find_sites
from hf_lgelu.models.substitution import temporary_relu

_ROWS = (13, 17)  # of inputs that are tried: what has as many of both is the rows
_MOST_AXES = 3  # of scores whose classes lie along the last; a map of pixels has them along the second
_ROUNDING = 1e-9  # of a bound or a score, in float64


@dataclass(frozen=True)
class SiteCertificate:
    """One gate: its smallest λ, the bound κ/λ of |λ-GELU − ReLU| there, and the largest value on the inputs given."""

    name: str
    smallest_hardness: float
    bound: float
    measured: float | None


@dataclass(frozen=True)
class SubstitutionCertificate:
    """What is known of the swap, in units of the scores.

    Scores are the model's `logits`, or the first floating-point tensor that it gives. `logit_bounds`, of the shape of
    the scores of one row, hold for every input of the shape of the rows given, in exact arithmetic; None with a
    `reason` where the structure is not followed. The others speak of the inputs given and are None without:
    `input_bounds`, the largest bound of any score with the gates' inputs known; `certified_fraction` of the rows whose
    predicted class provably stays; `measured` and `unchanged_predictions`, the largest change and the share of equal
    predictions when swapped in float64; `rows`, predictions compared. A prediction is the largest score along the last
    axis. Where a row has a single score, or scores have four axes and more, of which the last counts no classes, the
    two shares are None.
    """

    sites: tuple[SiteCertificate, ...]
    logit_bounds: Tensor | None
    reason: str | None
    input_bounds: float | None = None
    certified_fraction: float | None = None
    measured: float | None = None
    unchanged_predictions: float | None = None
    rows: int | None = None

    @property
    def bound(self) -> float | None:
        """The largest of `logit_bounds`: no score of any input moves by more."""
        return None if self.logit_bounds is None else self.logit_bounds.max().item()

    def __str__(self) -> str:
        width = max(4, *(len(site.name) for site in self.sites))
        lines = [f"{'gate':<{width}}  smallest λ  bound κ/λ   measured"]
        for site in self.sites:
            measured = "-" if site.measured is None else f"{site.measured:.3g}"
            lines.append(f"{site.name:<{width}}  {site.smallest_hardness:10.4g}  {site.bound:9.3g}  {measured:>9}")
        bound = f"{self.bound:.4g}" if self.bound is not None else f"none ({self.reason})"
        lines.append(f"largest change of a score, any input, at most: {bound}")
        if self.rows is None:
            return "\n".join([*lines, "nothing measured: no inputs given"])
        if self.input_bounds is not None:
            lines.append(f"on these inputs, at most: {self.input_bounds:.4g}")
        if self.unchanged_predictions is None:
            told = f"{self.rows} rows of one score or of a map, no known class each"
            return "\n".join([*lines, f"measured: {self.measured:.4g} on {told}"])
        if self.certified_fraction is not None:
            lines.append(f"predictions that provably stay: {percent(self.certified_fraction)}")
        lines.append(
            f"measured: {self.measured:.4g}; {percent(self.unchanged_predictions)} of {self.rows} predictions equal"
        )
        return "\n".join(lines)


def certify_substitution(
    model: nn.Module, inputs: Inputs | None = None, *, batch_size: int = 256
) -> SubstitutionCertificate:
    """How much `substitute_relu` can move the scores, and how much it does on the inputs given.

    `model` stays as it is.

    Args:
        model: has λ-GELU. Networks of linear layers, convolutions, batch norm, averages, sums (residual
            connections), λ-GELU and ReLU get a bound (swap_error.py beside this file); any other is measured only.
        inputs: a tensor (N, ...), alone or under the name of the model's first argument; anything else that the model
            takes by keyword or position is measured only. Rows must not depend on each other. One row is enough for
            the bound over every input of its shape; without any, it is known where the first layer is linear and each
            row of its inputs gets scores of its own.
        batch_size: rows of a tensor at a time.

    Raises:
        ValueError: the model has no λ-GELU; the inputs have no row, one of them holds NaN, or the only one infinity.
        RuntimeError: the model gives no floating-point output, or one that is not finite.

    Example:
        >>> import torch
        >>> from hf_lgelu import LambdaGELU, certify_substitution
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), LambdaGELU(init_hardness=160.0), torch.nn.Linear(4, 2))
        >>> certificate = certify_substitution(model, torch.randn(32, 3))
        >>> certificate.measured <= certificate.input_bounds <= certificate.bound
        True
    """
    hardness_profile(checked_module(model))  # refuses a model without λ-GELU in its own words
    network = independent_copy(uncompiled(model)).double().eval()
    inputs = _in_float64(network, inputs)
    _check_finite(inputs)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
    batches = inputs.split(batch_size) if isinstance(inputs, Tensor) else [] if inputs is None else [inputs]
    bounds, reason = _every_input_bound(network, inputs)
    measured, size, agree, rows, gates = _measure(network, batches) if batches else (None, 0.0, None, None, {})
    known, certified = (None, None)
    if bounds is not None and batches:
        known, certified = _on_inputs(network, batches)
        bound = bounds.max().item()
        if max(known, measured or 0.0) > bound + _ROUNDING * max(bound, size):
            bounds, known, certified = None, None, None
            reason = "rows of these inputs move by more than the bound of one alone: they depend on each other"
    return SubstitutionCertificate(_sites(network, gates), bounds, reason, known, certified, measured, agree, rows)


def _in_float64(network: nn.Module, inputs: Inputs | None) -> Inputs | None:
    """The inputs in float64; the tensor itself where it is the only one, given by the name of the first argument."""
    if isinstance(inputs, Mapping):
        first = next(iter(inspect.signature(network.forward).parameters), None)
        if first is not None and inputs.keys() == {first}:
            return in_dtype(inputs[first], torch.float64)
    return in_dtype(inputs, torch.float64)


def _check_finite(inputs: Inputs | None) -> None:
    if isinstance(inputs, Mapping | list):  # an additive mask may be −inf
        values = inputs.values() if isinstance(inputs, Mapping) else inputs
        if any(isinstance(value, Tensor) and bool(value.isnan().any()) for value in values):
            raise ValueError("inputs hold NaN; give numbers")
    if not isinstance(inputs, Tensor):
        return
    require_plain(inputs)
    if inputs.ndim == 0 or len(inputs) == 0:
        raise ValueError(f"inputs must have shape (N, ...) with N ≥ 1, got {tuple(inputs.shape)}")
    if not bool(inputs.isfinite().all()):
        raise ValueError("inputs hold NaN or infinity; give finite ones")


def _every_input_bound(network: nn.Module, inputs: Inputs | None) -> tuple[Tensor | None, str | None]:
    if inputs is None:
        return _bound_of_any_shape(network)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return None, "bounds need the network's one input as a floating-point tensor"
    try:
        _, bounds = bound_swap(network, inputs[:1], every_input=True)
    except (NotPiecewiseAffineError, TypeError) as error:
        return None, str(error)
    # All of them are of the one row, whatever their first axis counts.
    return _finite(bounds[0] if bounds.ndim > 1 and len(bounds) == 1 else torch.atleast_1d(bounds))


def _bound_of_any_shape(network: nn.Module) -> tuple[Tensor | None, str | None]:
    """The bound where nobody says what an input looks like: that of rows, if one more axis does not change it."""
    first = next((module for module in network.modules() if list(module.parameters(recurse=False))), None)
    if not isinstance(first, nn.Linear):
        return None, "the shape of an input is not known; pass inputs, one row is enough"
    found = []
    for count in _ROWS:
        rows = torch.zeros(count, first.in_features, dtype=torch.float64, device=first.weight.device)
        try:
            found.append(bound_swap(network, rows, every_input=True)[1])
        except (NotPiecewiseAffineError, TypeError) as error:
            return None, str(error)
        except RuntimeError as error:
            shape = tuple(rows.shape)
            return None, f"an input of {shape} was tried and is not what the network takes ({error}); pass inputs"
    bounds = found[0]
    try:
        _, of_one = bound_swap(network, rows[None], every_input=True)
    except (NotPiecewiseAffineError, TypeError, ValueError, RuntimeError):
        of_one = found[-1][None]  # it takes rows alone
    are_rows = [len(each) if each.ndim else 0 for each in found] == list(_ROWS)
    if not (are_rows and _are_same(found[-1], of_one) and torch.allclose(found[-1][0], bounds[0], equal_nan=True)):
        return None, "the bound depends on the shape of an input; pass inputs, one row is enough"
    return _finite(bounds[0] if bounds.ndim > 1 else bounds[:1])


def _are_same(bounds: Tensor, of_one: Tensor) -> bool:
    return of_one.shape[1:] == bounds.shape and torch.allclose(of_one[0], bounds, equal_nan=True)


def _finite(bounds: Tensor) -> tuple[Tensor | None, str | None]:
    if not bool(bounds.isfinite().all()):
        return None, "the bound is not finite; look at the model's weights"
    return bounds, None


def _have_classes(scores: Tensor) -> bool:
    """Whether the largest along the last axis may be a class."""
    return has_classes(scores) and scores.ndim <= _MOST_AXES


def _on_inputs(network: nn.Module, batches: list[Tensor]) -> tuple[float, float | None]:
    """The largest bound of a score, and the share of rows that keep their class; None where there are no classes."""
    largest, certified, rows = 0.0, 0, 0
    for batch in batches:
        scores, bounds = bound_swap(network, batch, every_input=False)
        largest = max(largest, bounds.max().item())
        if not _have_classes(scores):
            continue
        top = scores.argmax(-1, keepdim=True)
        # The winner can lose its own bound, and each rival gain its own.
        lead = (scores - bounds).gather(-1, top) - (scores + bounds)
        certified += int((lead.scatter(-1, top, torch.inf) > 0).all(-1).sum())
        rows += top.numel()
    return largest, certified / rows if rows else None


def _measure(
    network: nn.Module, batches: list[Inputs]
) -> tuple[float, float, float | None, int, dict[nn.Module, float]]:
    """Largest change and largest score, share of equal predictions, their number, and each gate's largest error, at all
    of its places."""
    gates = {site.module: 0.0 for site in find_sites(network, LEARNED_KINDS)}

    def watch(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        error = (output - args[0].relu()).abs().max().item() if output.numel() else 0.0
        gates[module] = max(gates[module], error)

    largest, size, agree, rows = 0.0, 0.0, 0, 0
    of_classes = False
    for batch in batches:
        with forward_hooks(list(gates), watch):
            before = _scores(network, batch)
        with temporary_relu(network):
            after = _scores(network, batch)
        largest = max(largest, (before - after).abs().max().item())
        size = max(size, before.abs().max().item())
        of_classes = _have_classes(before)
        agree += int((before.argmax(-1) == after.argmax(-1)).sum())
        rows += count_rows(before)
    return largest, size, agree / rows if of_classes else None, rows, gates


def _scores(network: nn.Module, batch: Inputs) -> Tensor:
    output = run_example(network, batch)
    try:
        scores = scores_of(output)
    except TypeError:  # it names no logits
        outputs = floating_outputs(output)
        if not outputs:
            raise RuntimeError("the model gives no floating-point output to compare") from None
        scores = outputs[0]
    if not bool(scores.isfinite().all()):
        raise RuntimeError("the model's output holds NaN or infinity on these inputs; nothing can be said of the swap")
    return scores


def _sites(network: nn.Module, gates: dict[nn.Module, float]) -> tuple[SiteCertificate, ...]:
    smallest, bounds = smallest_by_site(network), swap_errors(network)
    return tuple(
        SiteCertificate(site.name, smallest[site.name], bounds[site.name], gates.get(site.module))
        for site in find_sites(network, LEARNED_KINDS)
    )
