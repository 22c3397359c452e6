"""Whether parameters can be written one without the other: what is tied is one parameter, but memory may be shared."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)  # other classes of tensors (quantized, sharded) may have no memory to ask for


def require_own_memory(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError where a parameter of these names overlaps itself or another parameter or buffer in memory."""
    held = _by_storage(model)
    for name in names:
        parameter = model.get_parameter(name)
        if _overlaps_itself(parameter):
            raise ValueError(
                f"{name} is an expanded tensor, several of its values lie in one place of memory, and they cannot be "
                "rescaled apart; give it a memory of its own (clone)"
            )
        for other_name in _sharing(parameter, held):
            raise ValueError(
                f"{name} and {other_name} lie in one memory (b.weight.data = a.weight.data) and cannot be rescaled "
                "apart; make them one parameter, or give each its own (clone)"
            )


def names_in_shared_memory(model: nn.Module) -> set[str]:
    """Of the parameters that overlap another parameter or a buffer in memory (`b.weight.data = a.weight.data.T`)."""
    held = _by_storage(model)
    return {name for name, parameter in model.named_parameters() if any(_sharing(parameter, held))}


def _by_storage(model: nn.Module) -> dict[int, list[tuple[str, Tensor]]]:
    held: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in _PLAIN and not tensor.is_meta:
            held.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    return held


def _sharing(parameter: Tensor, held: dict[int, list[tuple[str, Tensor]]]) -> Iterator[str]:
    """Names of the others that overlap it."""
    if type(parameter) in _PLAIN and not parameter.is_meta:
        for name, other in held[parameter.untyped_storage().data_ptr()]:
            if other is not parameter and _overlap(parameter, other):
                yield name


def _overlaps_itself(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Of two tensors of one storage. Tensors between whose values another's lie count as overlapping."""
    (start, end), (other_start, other_end) = _bytes(tensor), _bytes(other)
    return start < other_end and other_start < end


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The first byte and the one behind the last, from the start of the storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size() * bool(tensor.numel())
