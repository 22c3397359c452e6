"""A model run on example inputs: what really happens inside, and nothing of the model changed behind it.

Inputs of the shapes that a config says are drawn for want of real ones."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

Function = TypeVar("Function", bound=Callable[..., Any])

_KEPT_FORWARD = "_original_forward"  # where accelerate keeps what it puts its own around

Inputs: TypeAlias = Tensor | Mapping[str, Any] | Sequence[Any]
"""One tensor, keyword arguments as a mapping (a batch of the Trainer), or positional arguments."""

NOT_TAKEN = (ValueError, TypeError, RuntimeError, LookupError, AttributeError, AssertionError)
"""The errors of a model that does not take its inputs or its config: timm asserts the size of images, and an input that
is missing is looked up, or None."""


def run_example(model: nn.Module, inputs: Inputs) -> Any:
    """The output of `model` in eval mode, without gradients, as by `call_alike`."""
    with torch.no_grad(), evaluation_mode(model):
        return call_alike(model, inputs)


def call_alike(model: nn.Module, inputs: Inputs) -> Any:
    """The output of `model` in its own mode for the inputs `placed` for it, with the same random numbers every time."""
    given = placed(inputs, model)
    with same_randomness():
        return call_with(model, given)


def placed(inputs: Inputs, model: nn.Module) -> Tensor | dict[str, Any] | tuple[Any, ...]:
    """The inputs with copies of their tensors, which may be written into, on the device of the model's first parameter.

    Raises TypeError for inputs of another kind.
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    # Where accelerate keeps that parameter elsewhere, its hook takes the inputs to where it brings the values.
    stays = device.type == "meta" and any(has_offloaded_params(module) for module in model.modules())

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        require_plain(value, meta=device.type == "meta" and not stays)
        return value.clone() if stays else value.to(device, copy=True)

    if isinstance(inputs, Tensor):
        return place(inputs)
    if isinstance(inputs, Mapping):
        return pytree.tree_map(place, dict(inputs))
    if isinstance(inputs, Sequence) and not isinstance(inputs, str):
        return pytree.tree_map(place, tuple(inputs))
    raise TypeError(
        "inputs must be a tensor, a mapping of keyword arguments or a sequence of positional arguments, got "
        + type(inputs).__name__
    )


def require_plain(tensor: Tensor, *, meta: bool = False) -> None:
    """Raise TypeError for a tensor that is sparse or quantized, or, without `meta`, on the meta device."""
    if tensor.layout != torch.strided or tensor.is_quantized or (tensor.is_meta and not meta):
        kind = "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else f"{tensor.layout}"
        raise TypeError(
            f"inputs must be dense tensors of numbers, and one of shape {tuple(tensor.shape)} is {kind}; give a sparse "
            "one as its indices and values, or dense"
        )


def require_taken(model: nn.Module, inputs: Inputs, what: str) -> None:
    """Raise ValueError where the model does not take inputs of `what`, with what the model said."""
    try:
        run_example(model, inputs)
    except NOT_TAKEN as error:
        raise ValueError(
            f"{type(model).__name__} does not take the inputs of {what} ({in_words(inputs)}): {error}. Give "
            "batches with the names, shapes and dtypes that the model was trained on"
        ) from error


def in_words(value: Any) -> str:
    """The form of inputs, e.g. "x: (2, 3) float32, edges: (2, 9) int64"."""
    if isinstance(value, Tensor | np.ndarray):
        return f"a tensor {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {in_words(entry).removeprefix('a tensor ')}" for name, entry in value.items())
    name = type(value).__name__
    if isinstance(value, list | tuple):
        return f"{name} of {len(value)}: {', '.join(dict.fromkeys(map(in_words, value[:3])))}"
    return name


def call_with(model: nn.Module, inputs: Tensor | dict[str, Any] | tuple[Any, ...], **options: Any) -> Any:
    """The output of `model` for arguments by position or name, or for a mapping as the one argument that it needs.

    A network of transformers names its outputs, though its config wants a tuple.
    """
    is_unnamed = isinstance(model, PreTrainedModel) and not getattr(model.config, "return_dict", True)
    needs_names = is_unnamed or isinstance(inputs, dict)
    taken = inspect.signature(model.forward).parameters.values() if needs_names else ()
    if is_unnamed and any(each.name == "return_dict" or each.kind is each.VAR_KEYWORD for each in taken):
        options["return_dict"] = True
    if not isinstance(inputs, dict):
        return model(*((inputs,) if isinstance(inputs, Tensor) else inputs), **options)
    needed = [each.name for each in taken if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    whole = len(needed) == 1 and needed[0] not in inputs  # as a SentenceTransformer's `input`
    return model(inputs) if whole else model(**(options | inputs))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside, each back in its own mode after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # an adapter merged for evaluation; from the outside in, as train goes
            if module.training != mode and type(module).train is not nn.Module.train:
                module.train(mode)
        for module, mode in modes:
            module.training = mode


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Every buffer as before, after the block, whatever the forwards inside wrote into it, such as a count of calls."""
    kept = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()  # those nobody can write outside inference mode
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, version, values in kept:
                if buffer._version != version:
                    buffer.copy_(values)
                module._buffers[name] = buffer


@contextmanager
def structure_kept(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """The modules of a model and their text attributes as before, after the block; gives a test for a change.

    BigBird puts another attention into all of its layers at its first short text, and leaves it there.
    """
    texts = ({name: value for name, value in vars(module).items() if isinstance(value, str)}
             for module in model.modules())  # fmt: skip
    kept = [(module, dict(module._modules), own) for module, own in zip(model.modules(), texts, strict=True)]

    def is_another() -> bool:
        return any(module._modules != parts or not own.items() <= vars(module).items() for module, parts, own in kept)

    try:
        yield is_another
    finally:
        if is_another():
            for module, parts, own in kept:
                module._modules.clear()
                module._modules.update(parts)
                vars(module).update(own)


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The model without accelerate's autocast inside the block; with it again after, also after an error.

    accelerate leaves autocast around the forward of a model that it prepared (Trainer with bf16 or fp16), which then
    computes otherwise than its weights do when they are loaded again. A `model` that is no module is left alone.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    held = [(module, {name: vars(module)[name] for name in ("forward", _KEPT_FORWARD)}) for module in modules
            if {"forward", _KEPT_FORWARD} <= vars(module).keys()]  # fmt: skip
    try:
        for module, wrapped in held:
            original = wrapped[_KEPT_FORWARD]
            del module.__dict__["forward"], module.__dict__[_KEPT_FORWARD]
            if getattr(original, "__func__", None) is not type(module).forward:
                module.__dict__["forward"] = original
        yield
    finally:
        for module, wrapped in held:
            module.__dict__.update(wrapped)


@contextmanager
def looked_at(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without the caller's contexts; neither its modes nor its buffers change.

    Compiled code (`model.compile()`) calls no hook, so the model runs eagerly inside. Autocast, also the one that
    accelerate leaves around a forward, would put casts between the weights and their use. In inference mode no tensor
    has a gradient.
    """
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    no_autocast = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
    with (
        own_forward(model), torch.compiler.set_stance("force_eager"), torch.inference_mode(False), no_autocast,
        evaluation_mode(model), buffers_kept(model),
    ):  # fmt: skip
        yield


def in_own_forward(function: Function) -> Function:
    """A function of a model, its first argument, that runs inside `own_forward` of that model."""

    @functools.wraps(function)
    def called(model: nn.Module, *args: Any, **options: Any) -> Any:
        with own_forward(model):
            return function(model, *args, **options)

    return cast(Function, called)


@contextmanager
def same_randomness() -> Iterator[None]:
    """torch's generators (not Apple's) as after `torch.manual_seed(0)` in the block, as before behind: ViTMAE draws."""
    kind, count = _accelerators()
    with torch.random.fork_rng(range(count), device_type=kind):
        # torch.manual_seed has every kind of device that is not there remember the call, each with a stack trace.
        torch.default_generator.manual_seed(0)
        if count:
            torch.get_device_module(kind).manual_seed_all(0)
        yield


@functools.cache
def _accelerators() -> tuple[str, int]:
    """The device type that is seeded beside the CPU and that `fork_rng` can keep ("cuda" without one), and how many."""
    found = torch.accelerator.current_accelerator()
    kind = "cuda" if found is None or found.type == "mps" else found.type
    return kind, torch.get_device_module(kind).device_count()


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs with every floating-point tensor in that dtype, and detached."""

    def cast_to(value: Any) -> Any:
        return value.detach().to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return pytree.tree_map(cast_to, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def forward_hooks(
    modules: Iterable[nn.Module], hook: Callable[[nn.Module, tuple[Any, ...], Any], Any]
) -> AbstractContextManager[None]:
    """A block in which `hook(module, arguments, output)` is called after each forward of `modules`.

    The arguments are those given by position or, where there are none, those given by name. A result of the hook other
    than None takes the output's place.
    """

    def call(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        return hook(module, args or tuple(named.values()), output)

    return _removed_behind([module.register_forward_hook(call, with_kwargs=True) for module in modules])


def forward_pre_hooks(
    modules: Iterable[nn.Module], hook: Callable[[nn.Module, tuple[Any, ...]], Any]
) -> AbstractContextManager[None]:
    """A block in which `hook(module, arguments)` is called before each forward of `modules`."""

    def call(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        hook(module, args or tuple(named.values()))

    return _removed_behind([module.register_forward_pre_hook(call, with_kwargs=True) for module in modules])


@contextmanager
def calls_seen(modules: Collection[nn.Module], see: Callable[[nn.Module, Tensor, Tensor], Any]) -> Iterator[None]:
    """A block in which `see(module, input, output)` is called after each forward of `modules`, all of one argument."""
    given: list[Tensor] = []
    # A copy: what works in place leaves its output there.
    before = forward_pre_hooks(modules, lambda module, inputs: given.append(inputs[0].detach().clone()))
    with before, forward_hooks(modules, lambda module, inputs, output: see(module, given.pop(), output.detach())):
        yield


@contextmanager
def _removed_behind(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    # torch's encoder layers run their own modules inside: the fused path gives these nested tensors without a shape.
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Code that was compiled before (`model.compile()`) looks at no hook.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
        for handle in handles:
            handle.remove()


_CALL = nn.Module._call_impl.__code__
LIBRARIES = ("torch.", "hf_lgelu.", "transformers.activations", "timm.layers.activations")
"""The starts of the names of modules whose frames are no code of a network's own."""


def line_of(frame: FrameType) -> str:
    """The place that a frame is at, for a reader: "net.py:12 (Net.forward)"."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_qualname})"


def ids_of(modules: Iterable[nn.Module]) -> set[int]:
    """What tells these modules from others: torch.export runs them as other objects with the same attributes."""
    return {id(vars(module)) for module in modules}


def frames_inside(modules: Collection[int] | None = None) -> tuple[nn.Module, list[FrameType]] | None:
    """(the innermost module that is called now, or of these `ids_of`; the frames inside, from the innermost on)."""
    frame: FrameType | None = sys._getframe(1)
    frames: list[FrameType] = []
    while frame is not None:
        if frame.f_code is _CALL and (modules is None or id(vars(frame.f_locals["self"])) in modules):
            return frame.f_locals["self"], frames
        frames.append(frame)
        frame = frame.f_back
    return None


def running(modules: Collection[int] | None = None) -> tuple[nn.Module, list[FrameType]] | None:
    """`frames_inside` without the frames of torch and of activations, unless they are the module's own code."""
    found = frames_inside(modules)
    if found is None:
        return None
    module, frames = found
    own = {cls.__module__ for cls in type(module).__mro__} - {nn.Module.__module__}
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    theirs = [frame for frame, name in zip(frames, names, strict=True)
              if name in own or not name.startswith(LIBRARIES)]  # fmt: skip
    return module, theirs or frames[-1:]


_TOKENS = 16
_SAMPLES = 16_000  # a second of speech
_PIXELS = 224  # a side, where neither the config nor the architecture says


def random_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass of two samples, on the CPU: tokens, images, audio, time series or features.

    Numbers are standard normal, in the model's dtype, tokens uniform over the vocabulary. Raises ValueError for a model
    whose main input is of another kind, or that does not take these.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    kinds = [model.main_input_name]
    if "pixel_values" in accepted and hasattr(config, "vision_config") and not model.can_generate():
        kinds.append("pixel_values")  # CLIP and its like; LLaVA and its like run on text alone
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        kinds.append("decoder_input_ids")
    inputs: dict[str, Tensor] = {}
    for kind in dict.fromkeys(kinds):
        if kind in ("input_ids", "decoder_input_ids"):
            text = config.get_text_config()
            limit = getattr(text, "max_position_embeddings", None) or _TOKENS
            length = min(_TOKENS, limit) if limit > 0 else _TOKENS  # XLNet says -1 for no limit
            inputs[kind] = torch.randint(text.vocab_size, (2, length), generator=generator)
            continue
        shape: tuple[int, ...]
        if kind == "pixel_values":
            shape = _image_shape(model)
        elif kind == "features" and hasattr(config, "num_features"):
            shape = (config.num_features,)
        elif kind == "input_values":
            is_spectrogram = hasattr(config, "num_mel_bins") and hasattr(config, "patch_size")  # AST
            shape = (config.max_length, config.num_mel_bins) if is_spectrogram else (_SAMPLES,)
        elif kind == "input_features" and hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
            shape = (config.num_mel_bins, 2 * config.max_source_positions)  # Whisper's stem halves the length
        elif kind == "past_values" and hasattr(config, "num_input_channels"):
            shape = (config.context_length, config.num_input_channels)
        else:
            raise ValueError(
                f"no example inputs are known for {type(model).__name__}, which takes {kind!r}; pass some of your own, "
                "e.g. one batch as a dict of tensors"
            )
        inputs[kind] = torch.randn((2, *shape), generator=generator).to(model.dtype)
    if "input_ids" in inputs and "attention_mask" in accepted:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    require_taken(model, inputs, "random numbers in the shapes of its config")
    return inputs


def _image_shape(model: PreTrainedModel) -> tuple[int, ...]:
    config = getattr(model.config, "vision_config", model.config)
    channels = getattr(config, "num_channels", 3)
    size = getattr(config, "image_size", None)
    if hasattr(model, "timm_model"):
        described = getattr(model.timm_model, "pretrained_cfg", None) or {}
        channels, *size = described.get("input_size") or (3, _PIXELS, _PIXELS)
        size = getattr(getattr(model.timm_model, "patch_embed", None), "img_size", None) or size
    if size is None:
        size = _PIXELS  # a convolutional network takes any
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(config, "num_frames", None)  # VideoMAE and its like
    return (channels, height, width) if frames is None else (frames, channels, height, width)
