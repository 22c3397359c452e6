"""The refusals of a conversion before the work."""

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn

from hf_lgelu.comparing.comparison import labels_fit, require_classes
from hf_lgelu.networks.batches import TRIED, Batch
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.networks.run import Inputs
from hf_lgelu.networks.sites import BOUNDED_KINDS, SMOOTH_KINDS, find_sites
from hf_lgelu.networks.smooth_calls import find_smooth_calls
from hf_lgelu.refit.config import RUNGS, ConversionConfig
from hf_lgelu.refit.report import ConversionReport

WHERE_NOT_FINITE = (
    "look for NaN or infinities in the data and in the weights; weights in float16, which ends at 65,504, want "
    "model.float()"
)
"""The advice where numbers are not finite."""


class ConversionRefusedError(RuntimeError):
    """The model was not converted; the given one is as it was.

    If anything was measured, `report` holds the measurements, and `model` is the converted network that was refused.

    >>> import torch
    >>> from hf_lgelu import ConversionConfig, ConversionRefusedError, convert_to_relu
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 3))
    >>> try:
    ...     convert_to_relu(net, torch.randn(200, 4), options=ConversionConfig(max_kl=1e-12, strict=True))
    ... except ConversionRefusedError as error:
    ...     print(error.report.held_out.refitted.kl > 1e-12)
    True
    """

    def __init__(self, message: str, report: ConversionReport | None = None, model: nn.Module | None = None) -> None:
        super().__init__(message)
        self.report, self.model = report, model


def require_refittable(model: nn.Module, config: ConversionConfig) -> None:
    """Raise the errors of `convert_to_relu` about the model's weights, before any data are read."""
    reason = why_not_writable(model)
    if reason is not None:
        raise ConversionRefusedError(f"{type(model).__name__} cannot be refitted: {reason}")
    steps = next((effort for effort in config.rungs if RUNGS[effort].takes_steps), None)
    if steps is not None and not can_take_steps(model):
        raise ValueError(
            f"`effort` {steps!r} takes steps of Adam, and in float16 they are not finite: convert model.float() "
            "(the result may be cast back), or stop at `effort` 'place'"
        )


def why_not_writable(model: nn.Module) -> str | None:
    """The reason why a model cannot be refitted at all, with what to do; None for a model that can be refitted.

    Its weights must be plain floating-point tensors on one device that has float64.
    """
    devices = {str(parameter.device) for parameter in model.parameters() if not parameter.is_meta}
    mapped = {str(place) for module in model.modules() for place in getattr(module, "hf_device_map", {}).values()}
    devices |= mapped if len(mapped) > 1 else set()
    if len(devices) > 1:
        return (
            f"it is spread over {', '.join(sorted(devices))}, and what is summed over one layer has to meet on one "
            'device. Load it on one that holds it, such as device_map="cpu"'
        )
    if any(device.startswith("mps") for device in devices):
        return "it is on mps, which has no float64, and the fit is summed in it. Convert model.cpu()"
    for name, module in model.named_modules():
        if any(value.is_meta for value in (*module.parameters(False), *module.buffers(False))):
            return f"{name or 'it'} ({type(module).__name__}) has no weights, it is on the meta device. Load them first"
        if any(value.is_inference() for value in module.parameters(False)):
            return (
                f"{name or 'it'} ({type(module).__name__}) holds tensors that were made under torch.inference_mode, "
                "which cannot be changed outside of it. Load the model outside"
            )
        kind = _quantized(module)
        if kind is not None:
            return (
                f"{name or 'it'} ({type(module).__name__}) holds {kind}, which are no plain floating-point numbers: it "
                "is quantized, or sharded. Convert the model first, then quantize the ReLU model"
            )
    return None


def _quantized(module: nn.Module) -> str | None:
    """A tensor of a module that is not plain floating point, in words; None if there is none."""
    if hasattr(module, "_packed_params"):
        return "packed weights"
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter.data) is not Tensor:
            return f"its {name} as {type(parameter.data).__name__}"
        # A matrix of whole numbers is quantized, but a count or an index may be a parameter, too.
        is_number = parameter.is_floating_point() or parameter.is_complex() or parameter.ndim < 2
        if not is_number or (parameter.dtype.itemsize < 2 and parameter.is_floating_point()):
            return f"its {name} as {parameter.dtype}"
    for name, buffer in module.named_buffers(recurse=False):
        if "weight" in name and not buffer.is_floating_point():
            return f"its {name} as {buffer.dtype}"
    return None


def require_gates(model: nn.Module, inputs: Inputs, config: ConversionConfig) -> None:
    """Raise ValueError where a model has no gate, neither module nor call, or lacks a gate that `keep` names."""
    gates, keep = [site.name for site in find_sites(model, config.kinds or SMOOTH_KINDS)], config.keep
    if not gates:
        smooth = "".join(f"\n  {call}" for call in find_smooth_calls(model, inputs))
        advice = (
            f". What it computes smoothly:{smooth}.\nIf one of these is a gate that the code spells out, write it as a "
            "call with a name, such as torch.nn.functional.silu(x), or as a module. Only ConversionConfig(kinds=) "
            f"makes ReLU of {', '.join(BOUNDED_KINDS)}"
            if smooth
            else ": nothing in it is smooth"
        )
        kinds = f"gate of kind {', '.join(config.kinds)}" if config.kinds else "gate that conversion takes"
        already = " (it has ReLU)" if any(isinstance(module, nn.ReLU) for module in model.modules()) else ""
        raise ValueError(f"{type(model).__name__} has no {kinds}{already}{advice}")
    # Each letter of a text would be taken for a name.
    if isinstance(keep, str) or not isinstance(keep, Collection) or not all(isinstance(name, str) for name in keep):
        raise TypeError(f"keep must be a sequence of names such as [{gates[0]!r}], got {keep!r}")
    unknown = sorted(set(keep) - set(gates))
    if unknown:
        raise ValueError(
            f"keep: no gate is named {', '.join(unknown)}; there are {', '.join(gates[:4])}"
            + (" and so on" if len(gates) > 4 else "")
        )


def can_take_steps(model: nn.Module) -> bool:
    """Whether steps of Adam on a model's weights are finite: in float16 the squares of its gradients are 0."""
    return all(parameter.dtype != torch.float16 for parameter in model.parameters())


def require_comparable(read: OutputReader, batch: Batch, what: str) -> tuple[str, ...]:
    """Warnings of labels that do not fit the first output.

    Raises ValueError unless the model gives outputs that can be compared, and for labels that are none of its classes.
    """
    few = batch[:TRIED]
    scores, labels = read(few.inputs).first, batch.labels
    if labels is None or labels.is_floating_point():
        return ()
    if labels_fit(cast(Tensor, few.labels), scores):
        if labels.ndim == 1:  # in a sequence, padding may hold anything
            require_classes(labels, scores)
        return ()
    unread = (
        f"the labels of {what}, of shape {tuple(labels.shape)}, are not one for each row of the scores, of shape "
        f"{tuple(scores.shape)} with the classes last: no accuracy or perplexity was measured by them"
    )
    return (unread,)
