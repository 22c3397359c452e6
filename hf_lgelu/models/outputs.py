"""The outputs of a model that count, and the comparison of two models by them."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_lgelu.formats import main_measures, percent
from hf_lgelu.models.channels import ChannelAxes
from hf_lgelu.models.example_run import Inputs, run_example

IGNORED_LABEL = -100
"""The label of what nothing predicts, and what the labels of sequences are padded with: cross entropy ignores it."""

# By the names that transformers and sentence-transformers give them. Class scores come first: the first is compared.
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
        *("decoder_attentions", "feature_maps"),
    )
)
_EMBEDDINGS = frozenset(
    ("sentence_embedding", "embeddings", "text_embeds", "image_embeds", "pooler_output", "last_hidden_state")
)
QUERIES = ("logits", "pred_boxes")  # of a detector: the scores and the box of each place
_OFF_ONE = 0.01  # by which the sum of probabilities may miss 1: they may be rounded to bfloat16
_TOO_MANY_BY_CHANCE = 32  # scores do not all lie between 0 and 1 if there are so many


def task_outputs(output: Any, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The floating-point tensors of an output that count, by name; the first is the one that is compared closest.

    Of an output with names, those that a task reads; where there is none of these, all but hidden states, attentions,
    caches and losses. Of a tensor that tensor, named ""; of a tuple or list all, named "0", "1" and so on. A tensor
    deeper inside is "name.0". `names` are outputs that count instead; ValueError where one is not there.
    """
    found = _floating(output)
    if names is not None:
        if not names:
            raise ValueError("outputs is empty: name an output, or leave the option out")
        missing = [name for name in names if not any(_is_in(given, name) for given in found)]
        if missing:
            there = [name or "a tensor without a name, which counts where outputs is left out" for name in found]
            raise ValueError(
                f"outputs={list(names)}: the model gives no floating-point output {', '.join(map(repr, missing))}; it "
                f"gives {', '.join(there) or 'none'}"
            )
        return {given: found[given] for name in names for given in found if _is_in(given, name)}
    if not isinstance(output, Mapping):
        return found
    read = {given: found[given] for name in _READ for given in found if _is_in(given, name)}
    return read or {given: value for given, value in found.items() if given.partition(".")[0] not in _NOT_READ}


def uncounted_outputs(output: Any) -> dict[str, Tensor]:
    """The outputs that `task_outputs` leaves out although a task may read them; none of transformers' own classes."""
    if not isinstance(output, Mapping) or type(output).__module__.startswith("transformers."):
        return {}
    counted = task_outputs(output)
    return {given: value for given, value in _floating(output).items()
            if given not in counted and given.partition(".")[0] not in _NOT_READ}  # fmt: skip


def _is_in(given: str, name: str) -> bool:
    return given == name or given.startswith(f"{name}.")


def _floating(output: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named_tensors(output) if tensor.is_floating_point()}


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an output with its name, in order: "logits", or "0.1" of tuples in tuples."""
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


class Compared(NamedTuple):
    """The outputs that count by name, and whether the first, which is compared closest, is class scores or embeddings.

    `queries_are_chosen` is true of a detector that ranks places of a picture and gives the boxes of the best places in
    the order of their rank: the n-th box of another network may be at another place.
    """

    tensors: dict[str, Tensor]
    are_logits: bool
    queries_are_chosen: bool = False
    are_embeddings: bool = False

    def certainty(self) -> Tensor | None:
        """(samples, boxes) how sure a detector is that something is in each box, from 0 to 1; None of another network.

        A softmax has its last score for a place where nothing is; scores without one are read by a sigmoid each.
        """
        if next(iter(self.tensors)) != "logits" or not {*QUERIES} <= self.tensors.keys():
            return None
        scores = self.tensors["logits"].float()
        return 1 - scores.softmax(-1)[..., -1] if self.are_logits else scores.sigmoid().amax(-1)


_CLASS_AXES: WeakKeyDictionary[nn.Module, dict[str, int | None]] = WeakKeyDictionary()
"""{model: {output: the axis that counts its classes, where it can be followed}}."""


def compared_outputs(
    model: nn.Module,
    inputs: Any,
    outputs: Sequence[str] | None = None,
    call: Callable[[nn.Module, Any], Any] = run_example,
) -> Compared:
    """The outputs of a model that are compared: its `task_outputs`, each with its classes on the last axis.

    The classes of maps are moved there from the axis on which the layer before has them: 1 behind a convolution, as in
    torch's losses, the last behind a linear layer. Named outputs of three axes have them last. One number a sample (N,)
    becomes (N, 1). Probabilities are no class scores. `call` may keep gradients.
    """
    whole = call(model, inputs)
    found = task_outputs(whole, outputs)
    name = next(iter(found), "")
    if not found or found[name].ndim == 0:
        raise ValueError(
            f"{type(model).__name__} gives {'one number for all inputs' if found else 'no tensor'}: networks "
            "are compared by an output whose leading axis counts the inputs. Convert the part that gives one, or name "
            "another output (outputs=)"
        )
    are_vectors = are_embeddings(model, name, found[name])
    maps = {name for name, value in found.items() if value.ndim > (2 if name == "" else 3)}
    axes = _CLASS_AXES.setdefault(model, {})
    if not maps <= axes.keys():  # each model is followed once
        followed = ChannelAxes(model)
        with followed.watching():
            seen = task_outputs(run_example(model, inputs), list(found))
        axes |= {name: followed.followed(seen[name]) for name in maps}
    tensors = {name: classes_last(value, (name in maps and axes[name]) or None)
               for name, value in found.items() if value.ndim}  # fmt: skip
    are_logits = (
        not are_vectors
        and found[name].ndim > 1
        and has_classes(tensors[name])
        and _exclude_each_other(getattr(model, "config", None), name, found)
        and not are_probabilities(tensors[name].detach())
    )
    chosen = isinstance(whole, Mapping) and "enc_topk_logits" in whole and {*QUERIES} <= found.keys()
    return Compared(tensors, are_logits, chosen, are_vectors)


def _exclude_each_other(config: Any, name: str, found: Mapping[str, Tensor]) -> bool:
    """Whether the columns of an output are scores that a softmax reads: a sigmoid of each sees more than a KL does."""
    if config is None or name != "logits":
        return are_class_scores(name)
    labels = getattr(config, "num_labels", None)
    if {*QUERIES} <= found.keys() and labels is not None:
        return found[name].shape[-1] == labels + 1  # a softmax has one more for a place where nothing is
    one_each = getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
    return not one_each and labels != 1


def in_order_of(reference: Compared, other: Compared) -> Compared:
    """The other network's outputs; where queries are chosen, in the order of the reference's nearest queries.

    Near are queries of like scores and a like box.
    """
    if not reference.queries_are_chosen:
        return other
    places = [
        torch.cat([network.tensors["logits"].sigmoid(), network.tensors["pred_boxes"]], -1).detach()
        for network in (reference, other)
    ]
    nearest = torch.cdist(*places, p=1).argmin(-1)[..., None]
    tensors = {
        name: value.gather(1, nearest.expand(-1, -1, value.shape[-1])) if name in QUERIES else value
        for name, value in other.tensors.items()
    }
    return other._replace(tensors=tensors)


def are_class_scores(name: str) -> bool:
    """Whether an output of this name holds a score for each class along its last axis; a bare tensor counts as such."""
    return name in ("", *_CLASS_SCORES)


def are_embeddings(model: Any, name: str, output: Tensor) -> bool:
    """Whether an output of this name is embeddings, or the states that they are the mean of; no scores, no values."""
    # Of timm it is what a network without classes gives.
    without_classes = name == "" and getattr(model, "num_classes", None) == 0
    return output.ndim > 1 and (without_classes or name in _EMBEDDINGS)


def are_probabilities(output: Tensor) -> bool:
    """Whether an output (..., classes) comes from softmax or a sigmoid; another softmax would make it near uniform."""
    if not has_classes(output) or not output.numel():
        return False
    least, most = output.aminmax()
    if not (least >= 0 and most <= 1):
        return False
    add_up = (output.sum(-1, dtype=torch.float32) - 1).abs() < _OFF_ONE
    return bool(add_up.all()) or output.numel() >= _TOO_MANY_BY_CHANCE


def classes_last(output: Tensor, class_axis: int | None = None) -> Tensor:
    """The output (..., classes), from `class_axis` or else axis 1 of maps (N, C, H, W); else (N, 1)."""
    if output.ndim < 2:
        return output.reshape(-1, 1)
    usual = 1 if output.ndim > 3 else -1
    return output.movedim(usual if class_axis is None else class_axis, -1)


def has_classes(output: Tensor) -> bool:
    """Whether an output has several scores a row, so that the largest may be a predicted class."""
    return output.ndim > 1 and output.shape[-1] > 1


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts, at each token, the next one.

    So does a causal language model of transformers or what inherits from one, and what generates without an encoder
    (Llava and the like).
    """
    if hasattr(model, "get_base_model"):  # an adapter of PEFT around it
        model = model.get_base_model()
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if any(base.__name__ in names for base in type(model).__mro__):
        return True
    generates = isinstance(model, PreTrainedModel) and model.can_generate()
    return generates and not getattr(model.config, "is_encoder_decoder", False)


def labels_of_predictions(labels: Any, model: nn.Module) -> Any:
    """The labels, each at the position that predicts it: of a causal language model one position earlier, where the
    last position predicts nothing. What is no tensor of token labels comes back unchanged."""
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or not is_causal(model):
        return labels
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED_LABEL)], dim=1)


# What rounding may change in an output, relative to the largest.
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}

_VARIES = 1e-9  # least variance, as a share of the mean square, of an output that is not constant up to rounding
_NUMBERS_AT_ONCE = 2**21  # compared in float64
_TIE = 1e-7  # of cosines, by which rounding parts samples that are equally near

MOST_NEIGHBOURS = 2048
"""Samples among which nearest neighbours are looked for: the products of all pairs are held."""


@dataclass(frozen=True)
class OutputChange:
    """How far the first output of one model (not the loss) is from another's: what `OutputComparison` has found.

    `max_change` is the largest absolute difference, `largest_output` the largest finite absolute value of the first
    model. `unchanged_predictions` is the share of predictions, `rows` in number, whose largest score stays at its
    class; None where a prediction is a single score, and of embeddings.
    """

    max_change: float
    largest_output: float
    unchanged_predictions: float | None
    rows: int
    relative_error: float = math.nan
    embedding: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"largest change {self.max_change:.3g} of outputs up to {self.largest_output:.3g}"
        if self.embedding:
            near = main_measures(None, 1.0, self.relative_error, self.embedding)
            return ", ".join([text, *(f"{name} {value}" for name, value in near.items())])
        if self.unchanged_predictions is None:
            return f"{text}, on {self.rows} rows of one score"
        return f"{text}, {percent(self.unchanged_predictions)} of {self.rows} predictions unchanged"


class OutputComparison:
    """How far one network's output is from another's on the same samples, added up over predictions.

    A prediction is a row of numbers along the last axis (`classes_last`). Numbers are compared in float64, of large
    outputs a few rows at a time. An infinity that both networks give at one place is no change.

    Of class scores there is a `kl`, of embeddings the `embedding`, and of all values the `relative_error`.
    """

    def __init__(self) -> None:
        self.rows = self._unchanged = self._rows_of_scores = 0
        self.largest_change = self.largest_output = self._squares = 0.0
        self._columns: dict[int, tuple[int, Tensor]] = {}  # {columns: (rows with as many, sum of each column)}
        self._kls: list[float] = []  # of each sample, and so the errors
        self._errors: list[float] = []
        self._cosines: list[float] = []
        self._vectors: list[Tensor] = []  # (2, samples, columns) of the original and the other, for the neighbours

    def add(
        self,
        original: Tensor,
        changed: Tensor,
        counted: Tensor | None = None,
        *,
        are_scores: bool = False,
        are_embeddings: bool = False,
    ) -> "OutputComparison":
        """This comparison, with a batch of outputs added, (samples, ..., columns).

        `counted` (samples, ...) says which predictions count; None for all. `are_scores` says that the columns are
        scores of classes of which one is right: then there is a KL. Of embeddings with several positions a sample's is
        the mean of those that count, as sentence-transformers pools by default.
        """
        samples = torch.arange(len(original)).reshape(-1, *[1] * (original.ndim - 2)).expand(original.shape[:-1])
        if counted is None:
            rows = [samples.flatten(), original.reshape(-1, original.shape[-1]), changed.reshape(-1, changed.shape[-1])]
        else:
            rows = [samples[counted.cpu()], original[counted], changed[counted]]
        kls, errors = torch.zeros(2, len(original), dtype=torch.float64)
        size = max(1, _NUMBERS_AT_ONCE // original.shape[-1])
        for owners, wanted, found in zip(*(part.split(size) for part in rows), strict=True):
            if not len(owners):
                continue
            wanted, found = ((part.cpu() if part.device.type == "mps" else part).double() for part in (wanted, found))
            change, finite = difference(found, wanted), wanted.nan_to_num(0.0, 0.0, 0.0)
            self.rows += len(owners)
            self._unchanged += int(same_classes(wanted, found).sum())
            self.largest_change = float(np.maximum(self.largest_change, change.abs().max().item()))
            self.largest_output = max(self.largest_output, finite.abs().max().item())
            self._squares += finite.square().sum().item()
            self._add_columns(len(owners), finite.sum(0).cpu())
            errors.index_add_(0, owners, change.square().sum(-1).cpu())
            if are_scores:
                self._rows_of_scores += len(owners)
                kls.index_add_(0, owners, kl_terms(wanted, found).sum(-1).cpu())
        self._kls += kls.tolist()
        self._errors += errors.tolist()
        if are_embeddings:
            vectors = torch.stack([_vectors(outputs, counted) for outputs in (original, changed)])
            self._vectors.append(vectors[:, : max(0, MOST_NEIGHBOURS - len(self._cosines))])
            self._cosines += F.cosine_similarity(*vectors.double(), dim=-1).tolist()
        return self

    def merge(self, other: "OutputComparison") -> None:
        """Add what another comparison holds: of the same networks in another process, or of another output."""
        for sums in ("rows", "_unchanged", "_rows_of_scores", "_squares", "_kls", "_errors", "_cosines", "_vectors"):
            setattr(self, sums, getattr(self, sums) + getattr(other, sums))
        self.largest_change = float(np.maximum(self.largest_change, other.largest_change))  # with NaN, not as max
        self.largest_output = max(self.largest_output, other.largest_output)
        for count, total in other._columns.values():
            self._add_columns(count, total)

    def _add_columns(self, count: int, total: Tensor) -> None:
        before, sum_before = self._columns.get(len(total), (0, torch.zeros_like(total)))
        self._columns[len(total)] = before + count, sum_before + total

    @property
    def agreement(self) -> float:
        """The share of predictions whose largest number stays where it is."""
        return self._unchanged / self.rows

    @property
    def change(self) -> OutputChange:
        """The changes as a record."""
        share = self.agreement if any(columns > 1 for columns in self._columns) and not self._cosines else None
        return OutputChange(
            self.largest_change, self.largest_output, share, self.rows, self.relative_error, self.embedding
        )

    @property
    def embedding(self) -> dict[str, float]:
        """How near embeddings are, by samples; empty of other outputs.

        "cosine" is the mean cosine of a sample's two embeddings, "least_cosine" the least. "same_neighbour" is the
        share of samples whose nearest other sample by cosine stays the nearest, among the first `MOST_NEIGHBOURS`; it
        is left out of fewer than three. Of equally near samples any is the nearest.
        """
        if not self._cosines:
            return {}
        cosines = torch.tensor(self._cosines, dtype=torch.float64)
        found = {"cosine": cosines.mean().item(), "least_cosine": cosines.min().item()}
        units = F.normalize(torch.cat(self._vectors, 1)[:, :MOST_NEIGHBOURS].double(), dim=-1)
        if units.shape[1] > 2:
            original, changed = ((each @ each.T).fill_diagonal_(-math.inf) for each in units)
            of_chosen = original.gather(1, changed.argmax(1, keepdim=True))
            found["same_neighbour"] = (of_chosen >= original.amax(1, keepdim=True) - _TIE).double().mean().item()
        return found

    @property
    def kl(self) -> float | None:
        """The mean over predictions of KL(original ‖ changed), in nats; None unless all rows are scores of classes."""
        return sum(self._kls) / self.rows if self._are_scores else None

    @property
    def relative_error(self) -> float:
        """Σ(changed − original)² / Σ(original − its mean)²: a share of squares, with a mean for each column.

        The error of an output that does not vary, as of a single row, is relative to Σ original².
        """
        error = sum(self._errors)
        varying = self._squares - sum((total.square().sum() / count).item() for count, total in self._columns.values())
        scale = varying if varying > _VARIES * self._squares else self._squares
        if not scale:  # of an original that is 0 everywhere, or NaN
            return error if math.isnan(error) else float(error > 0)
        return error / scale

    @property
    def gaps(self) -> tuple[float, ...]:
        """How far each sample is: what the KL is the mean of, or without scores of classes the error the sum."""
        return tuple(self._kls if self._are_scores else self._errors)

    @property
    def _are_scores(self) -> bool:
        return self._rows_of_scores == self.rows


def _vectors(output: Tensor, counted: Tensor | None) -> Tensor:
    """(samples, columns) float32 on the CPU: the mean over a sample's positions; a sample without one is left out."""
    if counted is None:
        rows = list(output.reshape(len(output), -1, output.shape[-1]))
    else:
        rows = [sample[kept] for sample, kept in zip(output, counted, strict=True)]
    means = [row.float().mean(0).cpu() for row in rows if len(row)]
    return torch.stack(means) if means else torch.empty(0, output.shape[-1])


def difference(output: Tensor, other: Tensor) -> Tensor:
    """`output - other`, with 0 where both are the same infinity, which models give for impossible classes."""
    return torch.where(output == other, 0.0, output - other)


def same_classes(output: Tensor, other: Tensor) -> Tensor:
    """The mask (...) of rows of (..., classes) without NaN in which both have the largest score at the same class."""
    (largest, classes), (other_largest, other_classes) = output.max(-1), other.max(-1)
    return (classes == other_classes) & ~largest.isnan() & ~other_largest.isnan()  # the largest of a NaN is NaN


def kl_terms(reference: Tensor, output: Tensor) -> Tensor:
    """p·log(p/q) of every class, (..., classes), from logits; an impossible class (p = 0) adds nothing."""
    expected, given = F.log_softmax(reference, dim=-1), F.log_softmax(output, dim=-1)
    terms = F.kl_div(given, expected, reduction="none", log_target=True)
    return terms.masked_fill(expected == -math.inf, 0.0)


def compare_models(model: nn.Module, other: nn.Module, inputs: Inputs) -> OutputChange:
    """The change from the first output of `model` that counts to that of `other`.

    Raises ValueError for outputs of different shapes, none or empty ones, and for NaN of `model`.
    """
    before, after = (compared_outputs(network, inputs) for network in (model, other))
    first, second = (next(iter(found.tensors.values())).cpu() for found in (before, after))
    if first.shape != second.shape:
        raise ValueError(
            f"the first outputs of the models, {tuple(first.shape)} and {tuple(second.shape)}, must have one shape to "
            "be compared"
        )
    if not first.numel():
        raise ValueError(f"the outputs on the example inputs, of shape {tuple(first.shape)}, are empty; give a row")
    if first.isnan().any():
        raise ValueError("the model gives NaN on the example inputs; give finite inputs, or look at its weights")
    mask = inputs.get("attention_mask") if before.are_embeddings and isinstance(inputs, Mapping) else None
    counted = mask.bool().cpu() if isinstance(mask, Tensor) and mask.shape == first.shape[:-1] else None
    return OutputComparison().add(first, second, counted, are_embeddings=before.are_embeddings).change


def outputs_of(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """The floating-point tensors that a model gives in eval mode, without the loss."""
    found = _floating(run_example(model, inputs))
    kept = [tensor for name, tensor in found.items() if not _is_in(name, "loss")]
    return [tensor for tensor in kept if tensor.ndim] or kept  # of a tuple the loss has no name


def allowed_rounding(output: Tensor) -> float:
    """The most that rounding changes a number of this output, by its dtype and its largest finite number."""
    return _ROUNDING.get(output.dtype, _ROUNDING[torch.float32]) * largest_finite(output)


def agree(
    before: Sequence[Tensor], after: Sequence[Tensor], allowed: Callable[[Tensor], float] = allowed_rounding
) -> bool:
    """Whether tensors have the same shapes and the same numbers (NaN too), up to the allowed change of each tensor."""
    return [tensor.shape for tensor in before] == [tensor.shape for tensor in after] and all(
        torch.allclose(one, other, rtol=0, atol=allowed(one), equal_nan=True)
        for one, other in zip(before, after, strict=True)
    )


def largest_finite(tensor: Tensor) -> float:
    """The largest finite absolute value; 0 without a finite number."""
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
