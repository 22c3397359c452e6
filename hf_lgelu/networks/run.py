"""Runs of a model on example inputs, with its modes, buffers and hooks as before afterwards."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

Function = TypeVar("Function", bound=Callable[..., Any])

_KEPT_FORWARD = "_original_forward"  # where accelerate keeps the forward that it wraps

# The lengths and sizes of random inputs, where neither the config nor the architecture gives one.
_TOKENS = 16
_SAMPLES = 16_000  # a second of speech
_PIXELS = 224  # of a side

Inputs: TypeAlias = Tensor | Mapping[str, Any] | Sequence[Any]
"""One tensor, keyword arguments as a mapping (a batch of the Trainer), or positional arguments."""

NOT_TAKEN = (ValueError, TypeError, RuntimeError, LookupError, AttributeError, AssertionError)
"""The errors of a model that does not take its inputs or its config. timm asserts the size of images; a missing input
is looked up, or is None."""


def run_example(model: nn.Module, inputs: Inputs) -> Any:
    """The output of `model` in eval mode, without gradients, otherwise as from `call_alike`."""
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
    # If accelerate keeps that parameter elsewhere, its hook moves the inputs to the device of the values.
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


def require_taken(model: nn.Module, inputs: Inputs, what: str) -> Any:
    """The output. Raises ValueError, with the model's own message, where the model does not take inputs of `what`."""
    try:
        return run_example(model, inputs)
    except NOT_TAKEN as error:
        taken, hint = [*inspect.signature(model.forward).parameters], ""
        if isinstance(inputs, dict) and inputs.keys().isdisjoint(taken):  # `call_with` passes the mapping itself
            hint = f"No name among these is an argument of its forward ({', '.join(taken[:6])}). "
        raise ValueError(
            f"{type(model).__name__} does not take the inputs of {what} ({in_words(inputs)}): {error}. {hint}Give "
            "batches with the names, shapes and dtypes that the model was trained on"
        ) from error


def random_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Keyword arguments for a forward pass of two samples, on the CPU: tokens, images, audio, time series or features.

    Numbers are standard normal, in the model's dtype; tokens are uniform over the vocabulary. Raises ValueError for a
    model whose main input is of another kind, or that does not take these inputs.
    """
    generator = torch.Generator().manual_seed(0)
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    kinds = [model.main_input_name]
    if "pixel_values" in accepted and hasattr(config, "vision_config") and not model.can_generate():
        kinds.append("pixel_values")  # models like CLIP; models like LLaVA also run on text only
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
        # What prepares the images reads the config; timm's own is that of the published weights.
        own, published = (getattr(place, "pretrained_cfg", None) or {} for place in (config, model.timm_model))
        described = published | own
        channels, *size = described.get("input_size") or (3, _PIXELS, _PIXELS)
        size = getattr(getattr(model.timm_model, "patch_embed", None), "img_size", None) or size
    if size is None:
        size = _PIXELS  # a convolutional network takes any size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(config, "num_frames", None)  # models like VideoMAE
    return (channels, height, width) if frames is None else (frames, channels, height, width)


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

    A network of transformers names its outputs, even if its config asks for a tuple.
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


def in_dtype(inputs: Any, dtype: torch.dtype) -> Any:
    """The inputs with every floating-point tensor in that dtype, and detached."""

    def cast_to(value: Any) -> Any:
        return value.detach().to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return pytree.tree_map(cast_to, dict(inputs) if isinstance(inputs, Mapping) else inputs)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A block with every module in eval mode; afterwards each module is back in its own mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:  # an adapter merged for evaluation; outer modules first, as in `train`
            if module.training != mode and type(module).train is not nn.Module.train:
                module.train(mode)
        for module, mode in modes:
            module.training = mode


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """A block after which every buffer is as before, whatever forwards inside write into it (a count of calls)."""
    kept = [
        (module, name, buffer, buffer._version, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_inference()  # inference buffers stay
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
def structure_restored(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """A block after which a model's modules and their text attributes are as before; it gives a test for changes.

    BigBird puts another attention into all of its layers at its first short text, and leaves it there.
    """
    texts = (
        {name: value for name, value in vars(module).items() if isinstance(value, str)} for module in model.modules()
    )
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
    """A block in which the model runs without accelerate's autocast; afterwards, or after an error, with it again.

    accelerate leaves autocast around the forward of a model that it prepared (Trainer with bf16 or fp16). The model
    then computes other values than its weights do when they are loaded again.
    """
    held = [
        (module, {name: vars(module)[name] for name in ("forward", _KEPT_FORWARD)})
        for module in model.modules()
        if {"forward", _KEPT_FORWARD} <= vars(module).keys()
    ]
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
def plain_evaluation(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without the caller's contexts; neither its modes nor its buffers change.

    Compiled code (`model.compile()`) calls no hook, so the model runs eagerly inside. Autocast, also the one that
    accelerate leaves around a forward, would put casts between the weights and their use. In inference mode no tensor
    has a gradient.
    """
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    no_autocast = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
    with (
        own_forward(model),
        torch.compiler.set_stance("force_eager"),
        torch.inference_mode(False),
        no_autocast,
        evaluation_mode(model),
        buffers_restored(model),
    ):
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
    """A block in which torch is seeded with 0 (not on Apple's GPUs); afterwards torch's random state is as before.

    Some models (ViTMAE) draw random numbers in eval mode.
    """
    kind, count = _accelerators()
    with torch.random.fork_rng(range(count), device_type=kind):
        # torch.manual_seed would leave a call with a stack trace for each kind of device that is absent.
        torch.default_generator.manual_seed(0)
        if count:
            torch.get_device_module(kind).manual_seed_all(0)
        yield


@functools.cache
def _accelerators() -> tuple[str, int]:
    """(the device type that is seeded with the CPU and that `fork_rng` can keep, or "cuda"; its number of devices)."""
    found = torch.accelerator.current_accelerator()
    kind = "cuda" if found is None or found.type == "mps" else found.type
    return kind, torch.get_device_module(kind).device_count()


def forward_hooks(
    modules: Iterable[nn.Module], hook: Callable[[nn.Module, tuple[Any, ...], Any], Any]
) -> AbstractContextManager[None]:
    """A block in which `hook(module, arguments, output)` is called after each forward of `modules`.

    The hook gets the arguments given by position, or without these the arguments given by name. If the hook returns
    something other than None, this replaces the output.
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
def _removed_behind(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    # The fused path of torch's encoder layers would give the modules inside nested tensors without a shape.
    is_fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        # Code that was compiled before (`model.compile()`) runs no hook.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
        for handle in handles:
            handle.remove()
