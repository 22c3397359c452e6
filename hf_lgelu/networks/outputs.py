"""The outputs of a model that count, and how they are read for a comparison."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from hf_lgelu.networks.run import Inputs, forward_hooks, run_example

IGNORED_LABEL = -100
"""The label of positions that nothing predicts, and of padding in sequences of labels: cross entropy ignores it."""

# Names from transformers and sentence-transformers. Class scores come first, because labels are read with the first.
_CLASS_SCORES = ("logits", "start_logits", "end_logits", "class_queries_logits", "prediction_logits")
_READ = (
    *_CLASS_SCORES,
    *("seq_relationship_logits", "pred_boxes", "pred_masks", "iou_scores", "masks_queries_logits"),
    *("logits_per_image", "logits_per_text", "text_embeds", "image_embeds", "sentence_embedding", "embeddings"),
    *("predicted_depth", "reconstruction", "prediction_outputs", "spectrogram", "waveform", "audio_values"),
)
_NOT_READ = frozenset(
    (
        *("loss", "hidden_states", "attentions", "cross_attentions", "past_key_values", "cache_params", "aux_loss"),
        *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions", "decoder_hidden_states"),
        *("decoder_attentions", "feature_maps", "token_embeddings", "all_layer_embeddings"),
    )
)
_EMBEDDINGS = frozenset(
    ("sentence_embedding", "embeddings", "text_embeds", "image_embeds", "pooler_output", "last_hidden_state")
)
SIDES = 4  # of a box
SCORES, BOXES = "logits", "pred_boxes"  # outputs of a detector: the scores and the box of each place
_OFF_ONE = 0.01  # the sum of probabilities may miss 1 by this much: they may be rounded to bfloat16
_LEAST_CHANCE = 1e-6  # probabilities nearer to 0 or 1 are read as this near
_TOO_MANY_BY_CHANCE = 32  # so many scores do not all lie between 0 and 1 by chance


def task_outputs(output: Any, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The floating-point tensors of an output that count, by name.

    Of an output of transformers, these are the outputs that its task reads. If it has none of these, and in any other
    output with names, all count but losses, hidden states, attentions and caches. A tensor is named "", the tensors of
    a tuple or list "0", "1" and so on; a tensor deeper inside is "name.0". `names` are outputs that count instead;
    raises ValueError where one is missing.
    """
    found = _floating(output)
    if names is not None:
        missing = [name for name in names if not any(_is_in(given, name) for given in found)]
        if missing or not names:
            there = [name or "a tensor without a name, which counts where `outputs` is left out" for name in found]
            raise ValueError(
                f"`outputs` must name floating-point outputs of the model, which are {', '.join(there) or 'none'}, "
                f"got {missing or 'no name'}"
            )
        return {given: found[given] for name in names for given in found if _is_in(given, name)}
    if not isinstance(output, Mapping):
        return found
    read = {given: found[given] for name in _READ for given in found if _is_in(given, name)}
    if type(output).__module__.startswith("transformers.") and read:
        return read
    counted = read | {given: value for given, value in found.items() if given.partition(".")[0] not in _NOT_READ}
    # A backbone gives nothing but the maps that a head reads.
    return counted or {given: value for given, value in found.items() if _is_in(given, "feature_maps")}


def _is_in(given: str, name: str) -> bool:
    return given == name or given.startswith(f"{name}.")


def _floating(output: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(output) if tensor.is_floating_point()}


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in an output, in order: "logits", or "0.1" in tuples of tuples."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Tensor):
        yield name, output
    elif isinstance(output, Mapping):
        entries = output.items()
    elif isinstance(output, list | tuple):
        entries = enumerate(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        entries = [(part.name, getattr(output, part.name, None)) for part in dataclasses.fields(output)]
    for inner, value in entries:
        yield from named_tensors(value, f"{name}.{inner}" if name else str(inner))


Kind = Literal["scores", "probabilities", "embeddings", "values"]
"""The kind of an output: scores of classes of which one is right, what a softmax made of them, embeddings, or other
values."""


class Outputs(NamedTuple):
    """The outputs that count, by name, each with its classes on the last axis, and the kind of each.

    `queries_are_chosen` is true for a detector that ranks places of a picture and gives the boxes of the best places in
    the order of their rank. The n-th box of another network may then be at another place. `left_out` are the names
    of the outputs that would count if the caller had not named others.
    """

    tensors: dict[str, Tensor]
    kinds: dict[str, Kind]
    queries_are_chosen: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def first(self) -> Tensor:
        """The output that labels are read with."""
        return next(iter(self.tensors.values()))

    def has_classes(self, name: str) -> bool:
        """Whether the columns of an output are classes of which one is right."""
        return self.kinds[name] in ("scores", "probabilities")

    def scores(self, name: str, output: Tensor) -> Tensor:
        """This network's or another's `output` of this name as class scores: the logarithm of probabilities."""
        return output.clamp(_LEAST_CHANCE).log() if self.kinds[name] == "probabilities" else output

    @property
    def is_detector(self) -> bool:
        """Whether there are scores and a box of each place in a picture."""
        return {SCORES, BOXES} <= self.tensors.keys()

    @property
    def is_sigmoid_detector(self) -> bool:
        """Whether a sigmoid reads each score of a detector; a softmax has one score more, for an empty place."""
        return self.is_detector and not self.has_classes(SCORES)

    def certainty(self) -> Tensor:
        """(samples, places) a detector's certainty from 0 to 1 that a box holds something."""
        scores = self.scores(SCORES, self.tensors[SCORES].float())
        return scores.sigmoid().amax(-1) if self.is_sigmoid_detector else 1 - scores.softmax(-1)[..., -1]


LAYERS = (nn.Linear, Conv1D, _ConvNd)
"""The modules whose outputs have channels on an axis that is known."""


def channel_axis(module: nn.Module, output: Tensor) -> int:
    """The axis of an output along which its channels lie: the last one, or that of a convolution, counted from 0."""
    # 0 for one picture without a batch axis
    return output.dim() - len(module.kernel_size) - 1 if isinstance(module, _ConvNd) else output.dim() - 1


class OutputReader:
    """Reads the outputs of a model that are compared: its `task_outputs`, each with its classes on the last axis.

    The classes of maps (N, C, H, W) are moved there from axis 1 where a convolution is the last layer, as in torch's
    losses; after a linear layer they are last. One run finds this out. A map without a name whose last
    layer does not tell holds values. Named outputs of three axes have classes last. One number per sample (N,) becomes
    (N, 1).

    With `box_channels`, all outputs together are a detector's, as `_maps_as_detections` reads them.
    """

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None, box_channels: int | None = None) -> None:
        """`names` are the outputs that count, as in `task_outputs`."""
        self.model, self._names, self._box_channels = model, names, box_channels
        self._class_axes: dict[str, int | None] = {}  # {map: the axis of its classes, where it is known}

    def of(self, model: nn.Module) -> "OutputReader":
        """A reader of the same outputs of another network."""
        return OutputReader(model, self._names, self._box_channels)

    def counted(self, output: Any) -> list[Tensor]:
        """The tensors that count of an output of the model."""
        return list(task_outputs(output, self._names).values())

    def __call__(self, inputs: Any, call: Callable[[nn.Module, Any], Any] = run_example) -> Outputs:
        """The outputs for inputs; `call` runs the model, and may keep gradients.

        Raises ValueError where no output has a leading axis that counts the inputs.
        """
        model = self.model
        whole = call(model, inputs)
        found, every = task_outputs(whole, self._names), task_outputs(whole)
        left_out = tuple(name for name in every if name not in found)
        if self._box_channels is not None:
            detections = _maps_as_detections(found, self._box_channels)
            return Outputs(detections, dict.fromkeys(detections, "values"), left_out=left_out)
        given = {name: value for name, value in found.items() if value.ndim}
        if not given:
            raise ValueError(
                f"{type(model).__name__} gives {'one number for all inputs' if found else 'no tensor'}: networks "
                "are compared by an output whose leading axis counts the inputs. Convert the part that gives one, or "
                "name another output (`outputs`)"
            )
        maps = {name for name, value in given.items() if value.ndim > (2 if name == "" else 3)}
        if not maps <= self._class_axes.keys():
            self._class_axes |= self._find_class_axes(inputs, maps)
        axes = self._class_axes
        tensors = {name: classes_last(value, axes[name] if name in maps else None) for name, value in given.items()}
        unknown = {name for name in maps if name == "" and axes[name] is None}
        kinds = {
            name: "values" if name in unknown else self._kind(name, value, every | given)
            for name, value in tensors.items()
        }
        # RT-DETR and its kind rank the places of the encoder, and give the best.
        chosen = isinstance(whole, Mapping) and "enc_topk_logits" in whole and {SCORES, BOXES} <= given.keys()
        return Outputs(tensors, kinds, chosen, left_out)

    def _find_class_axes(self, inputs: Any, maps: Collection[str]) -> dict[str, int | None]:
        """{map: its class axis, that of the channels of the last layer whose output has as many axes}.

        None where the layer's shape does not fit. Sums, norms, softmax and pooling may stand between. A transposed
        tensor of three axes may have the same size.
        """
        last: dict[int, tuple[tuple[int, ...], int]] = {}  # number of axes → (shape, channel axis) of the layer
        layers = [module for module in self.model.modules() if isinstance(module, LAYERS)]

        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            last[output.dim()] = tuple(output.shape), channel_axis(module, output)

        with forward_hooks(layers, see):
            seen = task_outputs(run_example(self.model, inputs), list(maps))
        axes: dict[str, int | None] = {}
        for name, tensor in seen.items():
            shape, axis = last.get(tensor.dim(), ((), 0))
            is_same = shape == tensor.shape and shape[1] != shape[2] if tensor.dim() == 3 else bool(shape)
            axes[name] = axis if is_same and shape[axis] == tensor.shape[axis] else None
        return axes

    def _kind(self, name: str, tensor: Tensor, every: Mapping[str, Tensor]) -> Kind:
        """The kind of one of the outputs, whose classes are on the last axis of `tensor`.

        `every` has all outputs: boxes among them say how the scores are read, also if only the scores count.
        """
        if are_embeddings(self.model, name, every[name]):
            return "embeddings"
        config = getattr(self.model, "config", None)
        if every[name].ndim < 2 or tensor.shape[-1] < 2 or not _softmax_reads(config, name, every):
            return "values"
        chances = are_probabilities(tensor.detach())
        return "scores" if chances is None else "probabilities" if chances else "values"


def _maps_as_detections(found: Mapping[str, Tensor], box_channels: int) -> dict[str, Tensor]:
    """{"logits": (B, cells, classes), "pred_boxes": (B, cells, box channels)} of the maps of a detector.

    A map is (B, channels, H, W), (B, anchors, H, W, channels), or one row a cell; then the shorter axis has the
    channels. Maps of one size lie on each other: first those of boxes. Probabilities are read back into scores. The
    fifth of five box channels is an objectness, which multiplies the chance of each class.
    """
    maps: dict[torch.Size, list[Tensor]] = {}
    for value in found.values():
        if value.ndim in (3, 4, 5):
            axis = {3: 1 if value.shape[1] < value.shape[-1] else 2, 4: 1, 5: 4}[value.ndim]
            value = value.movedim(axis, -1)
            maps.setdefault(value.shape[1:-1], []).append(value.flatten(1, -2))
    joined = [torch.cat(parts, -1) for parts in maps.values()]
    channels = {value.shape[-1] for value in joined}
    if len(channels) != 1 or not (isinstance(box_channels, int) and box_channels < min(channels)):
        shapes = ", ".join(f"{name!r} {tuple(value.shape)}" for name, value in found.items())
        raise ValueError(
            f"box_channels={box_channels}: the outputs ({shapes}) are no maps of as many channels each, and more than "
            "that whole number; name the raw maps (outputs=)"
        )
    cells = torch.cat(joined, 1)
    box_columns = SIDES if box_channels == SIDES + 1 else box_channels
    boxes, scores = cells[..., :box_columns], cells[..., box_columns:]
    least, most = scores.detach().aminmax()
    if least >= 0 and most <= 1:
        scores = scores.float().logit(_LEAST_CHANCE)
    if box_columns < box_channels:  # the chance of an object, times that of the class
        log_chance = F.logsigmoid(scores.float())
        log_chance = (log_chance[..., :1] + log_chance[..., 1:]).clamp(max=-_LEAST_CHANCE)
        scores = log_chance - (-log_chance.expm1()).log()
    return {SCORES: scores, BOXES: boxes}


def _softmax_reads(config: Any, name: str, found: Mapping[str, Tensor]) -> bool:
    """Whether a softmax reads the columns of an output. Where a sigmoid reads each column, a KL would miss changes."""
    if config is None or name not in ("logits", "scores"):  # "scores" of a CrossEncoder
        return name in ("", *_CLASS_SCORES)
    labels = getattr(config, "num_labels", None)
    if {SCORES, BOXES} <= found.keys() and labels is not None:
        return found[name].shape[-1] == labels + 1  # a softmax has one more score, for an empty place
    one_each = getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
    return not one_each and labels != 1


def as_of_softmax(scores: Tensor) -> Tensor:
    """(…, 2): scores that a sigmoid reads, as a softmax would read them; a sigmoid of z is a softmax of z and 0."""
    return torch.stack([scores, torch.zeros_like(scores)], -1)


def with_nearest_queries(original: Outputs, student: Outputs) -> Outputs:
    """The student's outputs; where queries are chosen, for each query of the original the student's nearest one.

    Queries with similar scores and a similar box are near. A student's query that is the nearest of several counts for
    each of them. One that is the nearest of none does not count.
    """
    if not original.queries_are_chosen:
        return student
    places = [
        torch.cat([network.tensors[SCORES].sigmoid(), network.tensors[BOXES]], -1).detach()
        for network in (original, student)
    ]
    nearest = torch.cdist(*places, p=1).argmin(-1)[..., None]
    tensors = {
        name: value.gather(1, nearest.expand(-1, -1, value.shape[-1])) if name in (SCORES, BOXES) else value
        for name, value in student.tensors.items()
    }
    return student._replace(tensors=tensors)


def are_embeddings(model: Any, name: str, output: Tensor) -> bool:
    """Whether an output of this name is embeddings, or the states whose mean is an embedding."""
    # A timm network without classes gives embeddings.
    without_classes = name == "" and getattr(model, "num_classes", None) == 0
    return output.ndim > 1 and (without_classes or name in _EMBEDDINGS)


def are_probabilities(output: Tensor) -> bool | None:
    """Whether the rows of an output (..., classes) are probabilities that add up to 1; None for scores of any size.

    Many numbers that all lie between 0 and 1 and do not add up are a sigmoid's: no classes of which one is right.
    """
    if not output.numel():
        return None
    least, most = output.aminmax()
    if not (least >= 0 and most <= 1):
        return None
    add_up = bool(((output.sum(-1, dtype=torch.float32) - 1).abs() < _OFF_ONE).all())
    return True if add_up else False if output.numel() >= _TOO_MANY_BY_CHANCE else None


def classes_last(output: Tensor, class_axis: int | None = None) -> Tensor:
    """The output (..., classes), from `class_axis` or else axis 1 of maps (N, C, H, W); else (N, 1)."""
    if output.ndim < 2:
        return output.reshape(-1, 1)
    usual = 1 if output.ndim > 3 else -1
    return output.movedim(usual if class_axis is None else class_axis, -1)


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the next token at each token.

    This holds for a causal language model of transformers, a class that inherits from one, and a model that generates
    without an encoder (Llava and others).
    """
    if hasattr(model, "get_base_model"):  # an adapter of PEFT around it
        model = model.get_base_model()
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if any(base.__name__ in names for base in type(model).__mro__):
        return True
    generates = isinstance(model, PreTrainedModel) and model.can_generate()
    return generates and not getattr(model.config, "is_encoder_decoder", False)


def labels_of_predictions(labels: Any, model: nn.Module) -> Any:
    """The labels, each at the position that predicts it.

    In a causal language model that is one position earlier, and the last position predicts nothing. Labels that are no
    tensor of tokens are returned unchanged.
    """
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or not is_causal(model):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED_LABEL)], dim=1)


# The largest change by rounding in an output, relative to its largest number.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}


def outputs_of(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The floating-point tensors that a model gives in eval mode, without the loss."""
    found = _floating(run_example(model, inputs))
    kept = [tensor for name, tensor in found.items() if not _is_in(name, "loss")]
    return [tensor for tensor in kept if tensor.ndim] or kept  # in a tuple the loss has no name


def agree(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether tensors have the same shapes and, up to rounding, the same numbers (NaN too)."""
    return [tensor.shape for tensor in before] == [tensor.shape for tensor in after] and all(
        torch.allclose(one, other, rtol=0, atol=_largest_rounding(one), equal_nan=True)
        for one, other in zip(before, after, strict=True)
    )


def _largest_rounding(output: Tensor) -> float:
    """The most that rounding changes a number of this output, by its dtype and its largest finite number."""
    finite = output[output.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return _ROUNDING.get(output.dtype, _ROUNDING[torch.float32]) * largest
