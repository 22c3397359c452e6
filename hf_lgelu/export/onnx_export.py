"""A model as one ONNX file, which computes the same in onnxruntime for any batch size and sequence length."""

import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_lgelu.environment import require
from hf_lgelu.export.onnx_run import OnnxModel, read_onnx, require_parity, silence_python, strip_metadata
from hf_lgelu.files import whole_file
from hf_lgelu.models.checkpoint import copy_processor_files
from hf_lgelu.models.copies import independent_copy
from hf_lgelu.networks.batches import nothing_given, read_batches
from hf_lgelu.networks.outputs import named_tensors, task_outputs
from hf_lgelu.networks.run import NOT_TAKEN, Inputs, buffers_restored, evaluation_mode, in_own_forward, require_plain
from hf_lgelu.networks.sites import uncompiled

ONNX_FILE = "model.onnx"
OPSET = 20  # the first opset with Gelu
MIN_OPSET = 11  # the first at which onnxruntime runs transformers' models from torch's older exporter
DYNAMO_OPSET = 18  # the first of torch's exporter; its older exporter (TorchScript) writes older ones
FUSED_ATTENTION_OPSET = 14  # the first at which the older exporter writes torch's fused attention
MAX_OPSET = 25  # the newest for every graph; asked for a newer one, the exporter may write another

DynamicAxes = Mapping[str, Mapping[int, str]]
"""{input: {axis: name}}; axes of one name have one size."""

BATCH, SEQUENCE = "batch", "sequence"

_EXAMPLES = 8  # the items of a dataset that are traced

MAX_BYTES = 2**31 - 2**20  # protobuf ends at 2 GiB, and the graph needs some room


@dataclass(frozen=True)
class OnnxReport:
    """The file that `export_onnx` wrote, and its difference from torch.

    `inputs` are {name: shape}; an axis that may vary is named. `max_abs_difference` is the largest difference of an
    output on the example inputs. `other_shapes_max_abs_difference` is the largest at the sizes `other_shapes`.
    """

    path: Path
    file_bytes: int
    opset: int
    inputs: dict[str, tuple[int | str, ...]]
    outputs: tuple[str, ...]
    max_abs_difference: float
    other_shapes_max_abs_difference: float
    other_shapes: tuple[dict[str, int], ...]
    largest_output: float

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in self.inputs.items())
        sizes = [", ".join(f"{axis} {size}" for axis, size in others.items()) for others in self.other_shapes]
        lines = [
            f"{self.path}: ONNX opset {self.opset}, {self.file_bytes:,} bytes",
            f"  {inputs} → {', '.join(self.outputs)}",
            f"  onnxruntime differs from torch by at most {self.max_abs_difference:.3g} of outputs up to "
            f"{self.largest_output:.3g} on the example inputs",
            *([f"  at {' and '.join(sizes)}: at most {self.other_shapes_max_abs_difference:.3g}"] if sizes else []),
        ]
        return "\n".join(lines)


@in_own_forward
def export_onnx(
    model: nn.Module,
    path: str | os.PathLike,
    inputs: Any,
    *,
    data_collator: Callable[[Any], Any] | None = None,
    dynamic_axes: DynamicAxes | None = None,
    opset: int = OPSET,
    tolerance: float = 1e-4,
    overwrite: bool = False,
) -> OnnxReport:
    """Write `model` in eval mode to one ONNX file, and compare onnxruntime with torch before it is put in place.

    Inputs are named by the arguments of the model's forward. A single output tensor is named "logits". If the model
    gives `logits`, the file has the outputs that the task reads, "logits" first (of a detector also "pred_boxes"), and
    no hidden states. Otherwise the file has all outputs by their names, "output_0" and so on for a tuple, and "name.0"
    for a tensor inside another output. A SentenceTransformer gives "sentence_embedding", after pooling and
    normalization, a CrossEncoder "scores". A cache is switched off. The model is left as it was. The file holds no
    stack traces and no paths.

    The first axis of every input is the batch. The second axis of integer and boolean inputs is the sequence. Both may
    vary. The comparison is made on the example inputs and, cut or repeated, at other sizes and lengths. Outputs at
    padding, by an attention_mask of zeros, are not compared.

    Args:
        model: float32. If it is on another device than the CPU, a copy is exported.
        path: the file to write, usually ".onnx".
        inputs: as for `find_smooth_calls`, tensors only; "labels" and values of None are left out. Or a dataset, or an
            iterable of batches, whose first batch is taken.
        data_collator: makes a batch of a list of items, as in `ConversionConfig`: of a SentenceTransformer
            `model.preprocess`, with a list of texts as inputs.
        dynamic_axes: which axes may vary instead, e.g. {"pixel_values": {0: "batch"}}; {} for none.
        opset: version of ONNX's operations, 11 to 25; below 18, torch's older exporter writes the file.
        tolerance: the largest difference allowed, relative to the largest |output|, or to 1 if that is larger.
        overwrite: replace an existing file.

    Raises:
        ImportError: onnx, onnxscript or onnxruntime is missing; the message names the extra [onnx].
        ValueError: the model is too large for one file, or an argument does not fit; TypeError: it is not float32.
        torch.onnx.OnnxExporterError: torch cannot write an operation of the model at this opset.
        RuntimeError: onnxruntime differs from torch by more than `tolerance`. No file is kept.
        FileExistsError: the file exists, and `overwrite` is False.

    Example:
        >>> import tempfile, torch
        >>> from hf_lgelu import export_onnx
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(model, f"{folder}/model.onnx", torch.randn(2, 4))
        >>> report.inputs, report.max_abs_difference < 1e-5
        ({'input': ('batch', 4)}, True)
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, "onnx")
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if dtypes - {torch.float32}:
        raise TypeError(f"the model must be float32, got {', '.join(sorted(map(str, dtypes)))}; call .float() on it")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size > MAX_BYTES:
        raise ValueError(
            f"{type(model).__name__} has {size / 2**30:.2f} GiB of weights, and one ONNX file holds less than 2 GiB; "
            "export it with torch.onnx.export(..., dynamo=True, external_data=True), which writes a second file"
        )
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise ValueError(f"opset must be {MIN_OPSET} to {MAX_OPSET}, which torch's exporters write, got {opset}")
    model = uncompiled(model)  # whose forward names its arguments
    if data_collator is not None or not isinstance(inputs, Mapping | Tensor | list | tuple):
        batches = read_batches(inputs, model=model, batch_size=_EXAMPLES, data_collator=data_collator)
        batch = next(batches, None)
        if batch is None:
            raise nothing_given("inputs")
        inputs = batch.inputs if isinstance(batch.inputs, Tensor) else batch.tensors
    inputs = _named_inputs(model, inputs)
    axes = _choose_axes(inputs, dynamic_axes)
    if any(tensor.device.type != "cpu" for tensor in tensors):
        model = independent_copy(model).cpu()
    whole = whole_file(path, overwrite=overwrite)
    with evaluation_mode(model), buffers_restored(model), torch.no_grad(), whole as file:
        network = _NamedOutputs(model, tuple(inputs))
        network.train(False)
        sizes = {axis: inputs[name].shape[i] for name, named in axes.items() for i, axis in named.items()}
        # The exporter takes an axis of size 1 for one that is always 1.
        traced = _resize(inputs, axes, {axis: max(2, size) for axis, size in sizes.items()})
        expected = network.outputs(inputs)  # before the trace: torch 2.8 leaves its symbols in what a network keeps
        outputs = tuple(expected)
        # Before the trace: a network that keeps numbers for the last batch size would be traced with them (YOLO).
        resized = _outputs_at_other_sizes(network, inputs, axes, sizes)
        _write(network, traced, outputs, axes, opset, file)
        onnx_model = OnnxModel(file)
        example = require_parity(onnx_model, inputs, expected, tolerance, "on the example inputs")
        others = [require_parity(onnx_model, batch, found, tolerance, f"at {sizes}") for sizes, batch, found in resized]
        file_bytes = file.stat().st_size
    return OnnxReport(
        path=Path(path),
        file_bytes=file_bytes,
        opset=opset,
        inputs={n: tuple(axes.get(n, {}).get(i, size) for i, size in enumerate(v.shape)) for n, v in inputs.items()},
        outputs=outputs,
        max_abs_difference=example.largest_change,
        other_shapes_max_abs_difference=max((change.largest_change for change in others), default=0.0),
        other_shapes=tuple(sizes for sizes, *_ in resized),
        largest_output=example.largest_output,
    )


def save_beside_onnx(model: Any, folder: str | os.PathLike, source: str | os.PathLike | None) -> None:
    """Write the config of a model, and the tokenizer or image processor of the folder or Hub id `source`, if any.

    Of a network of sentence-transformers it is the tokenizer that it holds, which cuts texts at its `max_seq_length`.
    """
    if isinstance(config := getattr(getattr(model, "transformers_model", model), "config", None), PreTrainedConfig):
        config.save_pretrained(folder)
    if isinstance(tokenizer := getattr(model, "tokenizer", None), PreTrainedTokenizerBase):
        tokenizer.save_pretrained(folder)
    elif source is not None:
        copy_processor_files(source, folder)


def _named_inputs(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The example inputs by the names of the forward's arguments, on the CPU, without labels and None."""
    if isinstance(inputs, Mapping):
        given = dict(inputs)
    else:
        values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        given = inspect.signature(model.forward).bind_partial(*values).arguments
    given = {name: value for name, value in given.items() if value is not None and name != "labels"}
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"inputs must be the tensors of one call, alone, in a list or by name, got {type(value).__name__} for "
                f"{name!r}; take one batch of a DataLoader, next(iter(loader))"
            )
        require_plain(value)
    return {name: value.cpu() for name, value in given.items()}


def _choose_axes(inputs: Mapping[str, Tensor], given: DynamicAxes | None) -> dict[str, dict[int, str]]:
    """The axes that may vary: the given ones, or the batch of every input and the sequence of tokens."""
    if given is None:
        axes = {}
        for name, value in inputs.items():
            tokens = value.ndim >= 2 and not value.dtype.is_floating_point and not value.dtype.is_complex
            axes[name] = {0: BATCH, **({1: SEQUENCE} if tokens else {})} if value.ndim else {}
    else:
        axes = {name: dict(named) for name, named in given.items()}
    sizes: dict[str, tuple[str, int]] = {}
    for name, named in axes.items():
        if name not in inputs or not all(0 <= i < inputs[name].ndim for i in named):
            there = ", ".join(f"{given} has {value.ndim} axes" for given, value in inputs.items())
            raise ValueError(f"dynamic_axes names the axes {list(named)} of {name!r}, but {there}")
        for i, axis in named.items():
            size = inputs[name].shape[i]
            other, first = sizes.setdefault(axis, (name, size))
            if size != first or not size:
                raise ValueError(
                    f"axis {axis!r} must have one size, at least 1, but has {first} in {other} and {size} in {name}; "
                    "name the axes that may vary in dynamic_axes"
                )
    return axes


def _resize(inputs: Mapping[str, Tensor], axes: DynamicAxes, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Copies of the inputs, cut or repeated along their named axes."""
    resized = {name: tensor.clone() for name, tensor in inputs.items()}
    for name, named in axes.items():
        for i, axis in named.items():
            value = resized[name]
            resized[name] = value.index_select(i, torch.arange(sizes[axis]) % value.shape[i])
    return resized


class _NamedOutputs(nn.Module):
    """`model` with a tuple of tensors as output, called by keyword arguments, or with one mapping if it takes one."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names
        accepted = inspect.signature(model.forward).parameters
        self.fixed = {"use_cache": False} if "use_cache" in accepted else {}
        self.takes_mapping = isinstance(model, nn.Sequential) and not set(names) <= accepted.keys()

    def outputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name, for copies of the inputs, because a network may change its inputs in place."""
        return self.named({name: tensor.clone() for name, tensor in inputs.items()})

    def named(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.takes_mapping:
            return task_outputs(self.model(given))
        output = self.model(**given, **self.fixed)
        if isinstance(output, Tensor):
            return {"logits": output}
        if getattr(output, "logits", None) is not None:
            # The outputs that the task reads, such as boxes, and no hidden states.
            return task_outputs(output) if isinstance(output, Mapping) else {"logits": output.logits}
        if isinstance(output, Mapping):
            items = list(output.items())
        else:
            items = [(f"output_{i}", v) for i, v in enumerate(output)] if isinstance(output, tuple | list) else []
        return {inner: tensor for name, value in items for inner, tensor in named_tensors(value, str(name))}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.named(dict(zip(self.names, inputs, strict=True))).values())


def _write(
    network: _NamedOutputs,
    traced: dict[str, Tensor],
    outputs: tuple[str, ...],
    axes: DynamicAxes,
    opset: int,
    file: Path,
) -> None:
    named: dict[str, Any] = {"opset_version": opset, "input_names": list(traced), "output_names": list(outputs)}
    with silence_python("torch.onnx"):  # the exporters print warnings and progress
        if opset >= DYNAMO_OPSET:
            shapes = (tuple(dict(axes.get(name, {})) for name in traced),)
            program = torch.onnx.export(
                network,
                tuple(traced.values()),
                dynamo=True,
                dynamic_shapes=shapes,
                external_data=False,
                verbose=False,
                **named,
            )
            proto = program.model_proto
        else:
            models = [part for part in network.modules() if isinstance(part, PreTrainedModel)]
            fused = [part for part in models if part.config._attn_implementation == "sdpa"]
            fused = fused if opset < FUSED_ATTENTION_OPSET else []
            for part in fused:
                part.set_attn_implementation("eager")
            try:
                varying, given = {name: dict(axis_names) for name, axis_names in axes.items()}, tuple(traced.values())
                torch.onnx.export(network, given, os.fspath(file), dynamo=False, dynamic_axes=varying, **named)
            finally:
                for part in fused:
                    part.set_attn_implementation("sdpa")
            proto = read_onnx(file)
    strip_metadata(proto)
    del proto.graph.value_info[:]  # onnxruntime's quantizer trips over stale shapes; it infers them again
    onnx = require("onnx", "onnx")
    onnx.checker.check_model(proto)
    onnx.save(proto, os.fspath(file))


def _outputs_at_other_sizes(
    network: _NamedOutputs, inputs: dict[str, Tensor], axes: DynamicAxes, own: dict[str, int]
) -> list[tuple[dict[str, int], dict[str, Tensor], dict[str, Tensor]]]:
    """[(sizes, inputs, torch's outputs)] at other sizes of the axes than the inputs' `own`, if the model takes them."""
    # Only the batch grows: a longer sequence may be more than the model's positions.
    smaller = {axis: size // 2 if size > 1 else 2 for axis, size in own.items()}
    larger = {axis: max(3, size + 1) if axis == BATCH else max(1, size - 1) for axis, size in own.items()}
    resized, refusal = [], None
    for sizes in (smaller, larger) if own else ():
        batch = _resize(inputs, axes, sizes)
        # Of rows that the cut left as nothing but padding, runtimes give arbitrary values.
        if "attention_mask" in batch and not batch["attention_mask"].flatten(1).any(1).all():
            continue
        try:
            expected = network.outputs(batch)
        except NOT_TAKEN as error:
            refusal = f"at {sizes} torch says: {error}"
            continue
        resized.append((sizes, batch, expected))
    if refusal is not None and not resized:
        raise ValueError(
            f"the model takes none of the other sizes that were tried for the axes that may vary: {refusal}. Pass "
            "dynamic_axes with the axes that do vary, or {} for none"
        )
    return resized
