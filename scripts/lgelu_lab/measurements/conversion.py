"""ReLU without training: the GELU networks as they are, swapped, with folded biases, converted, beside hardened."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_lgelu import ConversionRefusedError, convert_to_relu, substitute_relu
from hf_lgelu.comparing.comparison import OutputComparison
from hf_lgelu.networks.outputs import IGNORED_LABEL, OutputReader
from hf_lgelu.networks.sites import SMOOTH_KINDS
from hf_lgelu.refit.config import EFFORTS, ConversionConfig
from hf_lgelu.refit.report import ConversionReport
from lgelu_lab.benchmarks.benchmark import Benchmark
from lgelu_lab.benchmarks.data import BenchmarkData
from lgelu_lab.measurements.measurement import Measurement
from lgelu_lab.measurements.networks import TrainedModel, available_rows, draw_calibration, evaluate
from lgelu_lab.studies.experiments import STUDIES

CONVERSION_COLUMNS: dict[str, str] = {
    "model": "network: gelu, which is converted, or hardened_relu, which was trained to be a ReLU network",
    "method": "original (GELU), direct (swapped, weights as they are), the effort that was asked for (refit, place, "
    "distill; place-wider: place with a width budget) or hardened; in older records bias-fold, blocks and statistics "
    "(swapped, BatchNorm's statistics taken anew)",
    "rows": "calibration rows: of text tokens, else rows of features or images; null where none are needed",
    "score": "the benchmark's metric on the evaluation split",
    "loss": "mean loss on the evaluation split, of the network that is there (absent earlier)",
    "original_score": "the same of the GELU network",
    "kl": "mean KL(original ‖ network) on the evaluation split, nats per prediction",
    "agreement": "share of predictions on the evaluation split with the original's argmax, 0 to 1",
    "max_logit_change": "largest difference from a logit of the original's on the evaluation split",
    "seconds": "wall time of the conversion, with the rungs below the effort; of the hardened network, of its "
    "training, where that was timed whole",
    "kept": "the rung whose network it is, the nearest of those climbed; null where none was",
    "width": "units of the converted network over the original's; null where nothing was converted",
    "refusal": "why there is no such network; null where there is",
}

_UNCHANGED = {"kl": 0.0, "agreement": 1.0, "max_logit_change": 0.0}
_COMPARED_ROWS = 64


@dataclass(frozen=True)
class ConversionSettings:
    """What is fitted on, and how hard it is tried.

    Args:
        rows: calibration rows of the refits, of text tokens; as many as there are where there are fewer. The efforts
            above "refit" take the most.
        seed: of the draw from the training rows.
        bf16: score and compare the networks under bfloat16 autocast, in which some runs train and are evaluated; what
            is fitted is fitted without. None as the run of the GELU network, and float32 where none is known.
        efforts: rungs of `convert_to_relu`, each a conversion of its own that climbs from the lowest.
        width_budget: of a second conversion with effort "place"; 1 for none.

    Raises ValueError for an effort, or a width budget, that is none.
    """

    rows: tuple[int, ...] = (64, 256, 1024, 8192)
    seed: int = 0
    bf16: bool | None = None
    efforts: tuple[str, ...] = EFFORTS
    width_budget: float = 1.25

    def __post_init__(self) -> None:
        for effort in self.efforts:
            ConversionConfig(effort=effort, width=self.width_budget)


@dataclass(frozen=True)
class _Original:
    """The GELU network, what its conversions are scored on, and its score."""

    model: PreTrainedModel
    benchmark: Benchmark
    data: BenchmarkData
    bf16: bool
    score: float

    @classmethod
    def of(cls, trained: TrainedModel, benchmark: Benchmark, data: BenchmarkData, bf16: bool) -> "_Original":
        model = trained.load()
        score = evaluate(model, benchmark, data, bf16=bf16)[benchmark.metric]
        return cls(model.cpu(), benchmark, data, bf16, score)

    def row(self, model: str, method: str, rows: int | None = None, **values: Any) -> dict[str, Any]:
        return dict.fromkeys(CONVERSION_COLUMNS) | {
            "model": model, "method": method, "rows": rows, "original_score": self.score, **values,
        }  # fmt: skip

    def compared(self, network: PreTrainedModel) -> dict[str, float | None]:
        batches = DataLoader(self.data.eval, batch_size=_COMPARED_ROWS, collate_fn=self.benchmark.collate)
        scores = evaluate(network, self.benchmark, self.data, bf16=self.bf16)
        score = {"score": scores[self.benchmark.metric], "loss": scores["loss"]}
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return {**score, **change_of_outputs(self.model, network.cpu(), batches)}


def measure_conversion(
    models: Mapping[str, TrainedModel], benchmark: Benchmark, data: BenchmarkData, settings: ConversionSettings
) -> list[dict[str, Any]]:
    """A row per way from the GELU network to a ReLU one, and one of the GELU network itself."""
    original = _Original.of(models["gelu"], benchmark, data, bool(settings.bf16))
    swapped = models["gelu"].load()
    substitute_relu(swapped, kinds=SMOOTH_KINDS)
    counts = sorted({min(rows, available_rows(data)) for rows in settings.rows})
    hardened = models["hardened_relu"]
    seconds = hardened.record.whole_seconds
    return [
        original.row("gelu", "original", score=original.score, **_UNCHANGED),
        original.row("gelu", "direct", **original.compared(swapped)),
        *(_converted(original, method, rows, settings.seed, asked) for method, rows, asked in _ways(settings, counts)),
        original.row("hardened_relu", "hardened", **original.compared(hardened.load()), seconds=seconds),
    ]


def _ways(settings: ConversionSettings, counts: list[int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(method, rows, arguments): the refit on every number of rows, the rungs above it on the most."""
    for effort in dict.fromkeys(settings.efforts):
        for rows in counts if effort == "refit" else counts[-1:]:
            yield effort, rows, {"effort": effort}
        if effort == "place" and settings.width_budget > 1:
            yield "place-wider", counts[-1], {"effort": effort, "width": settings.width_budget}


def _converted(original: _Original, method: str, rows: int, seed: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    calibration = draw_calibration(original.data, rows, seed)
    model = original.model.to("cuda" if torch.cuda.is_available() else "cpu")
    options = ConversionConfig(data_collator=original.benchmark.collate)
    try:
        converted, report = convert_to_relu(model, calibration, options=options, **asked)
    except (ConversionRefusedError, ValueError) as refusal:  # a result of its own
        return original.row("gelu", method, rows, refusal=str(refusal))
    finally:
        model.cpu()
    told = {"seconds": report.seconds, "kept": kept_rung(report), "width": report.width_share}
    return original.row("gelu", method, rows, **original.compared(converted), **told)


def kept_rung(report: ConversionReport) -> str:
    """The rung whose network a conversion gave: of those that it climbed, the last that was kept."""
    return [step.effort for step in report.steps if step.is_kept][-1]


@torch.no_grad()
def change_of_outputs(
    original: PreTrainedModel, network: PreTrainedModel, batches: DataLoader
) -> dict[str, float | None]:
    """{"kl", "agreement", "max_logit_change"} of the network's logits against the original's, over every prediction.

    KL(original ‖ network) is a mean in nats, in float64; None where a sigmoid reads the logits. The agreement is the
    share with the same argmax. Predictions whose label is −100 are not counted.
    """
    change = OutputComparison()
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        found, changed = (OutputReader(model.eval())(inputs) for model in (original, network))
        expected, given = found.tensors["logits"], changed.tensors["logits"]
        labels = batch.get("labels")
        counted = labels != IGNORED_LABEL if labels is not None and labels.shape == expected.shape[:-1] else None
        change.add(expected, given, counted, kind=found.kinds["logits"])
    return {"kl": change.kl, "agreement": change.agreement, "max_logit_change": change.largest_change}


CONVERSION = Measurement(
    name="conversion",
    benchmarks=(*STUDIES["downstream"].benchmarks, *STUDIES["pretrained"].benchmarks),
    models=("gelu", "hardened_relu"),
    settings=ConversionSettings,
    measure=measure_conversion,
    of_run=("bf16",),
)
