"""Networks that nobody here trained: original, plain swap and converted, each by the measure of its own task."""

import copy
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_lgelu import ConversionRefusedError, convert_to_relu, export_onnx, quantize_onnx, substitute_relu
from hf_lgelu.comparing.comparison import compare_outputs
from hf_lgelu.environment import hardware, require
from hf_lgelu.export.onnx_run import OnnxModel
from hf_lgelu.networks.batches import Batch
from hf_lgelu.networks.outputs import OutputReader
from hf_lgelu.networks.sites import SMOOTH_KINDS
from lgelu_lab.benchmarks.real_inputs import Inputs, in_batches, joined, read_samples
from lgelu_lab.benchmarks.real_networks import RealNetwork, load_network
from lgelu_lab.benchmarks.source import Origin
from lgelu_lab.measurements.conversion import kept_rung
from lgelu_lab.measurements.records import (
    MeasurementRecord,
    measurement_path,
    plain_settings,
    read_same,
    write_measurement,
)
from lgelu_lab.studies.checkout import software_versions

REAL_COLUMNS: dict[str, str] = {
    "model": "network, a key of REAL",
    "method": "original, direct (ReLU at every smooth gate, weights as they are) or converted (convert_to_relu)",
    "effort": "asked of the conversion; null where nothing was converted",
    "kept": "the rung whose network it is, the nearest of those climbed; null where none was",
    "width": "units of the converted network over the original's; null where nothing was converted",
    "precision": "float32 in torch, or int8 in onnxruntime (convolutions and matrix products, ranges of 64 samples; in "
    "records before 0.3.0 the units of what was converted were equalized before)",
    "fitted_on": "sequences that were fitted on; null where none are needed",
    "rows": "of these, tokens that were counted",
    "metric": "accuracy, perplexity (of a predicted token), same_neighbour (share of samples whose nearest neighbour, "
    "by cosine, is the original's); the record of Whisper has word_error_rate",
    "score": "the metric on the evaluation samples",
    "judged": "sequences judged on: as many as asked for, or as there are; null where there is no network",
    "kl": "mean KL(original ‖ network) in nats per prediction; null for embeddings",
    "agreement": "share of predictions with the original's argmax; for embeddings as same_neighbour",
    "cosine": "mean cosine of an embedding to the original's; null elsewhere",
    "least_cosine": "the least of them",
    "seconds": "wall time of the conversion",
    "call_ms": "least processor time of a call of 8 samples in onnxruntime, one thread, ms; the networks take turns "
    "until none gets 1 % faster in 20 rounds (before 0.3.0: 20 calls, one network after the other); null where "
    "none was timed",
    "refusal": "why there is no such network; null where there is",
}

Row = dict[str, Any]
METRICS = {"classification": "accuracy", "embedding": "same_neighbour", "text": "perplexity"}
"""{task: by what its networks are judged}."""


def judge(original: nn.Module, network: nn.Module, batches: list[Inputs], outputs: Sequence[str] | None = None) -> Row:
    """The score by the labels, which of a text are its tokens; of embeddings the neighbours that stay."""
    labelled = []
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        labelled.append(Batch(inputs, batch["labels"] if "labels" in batch else batch["input_ids"]))
    read = OutputReader(original, outputs)
    _, found = compare_outputs(read, {"": read.of(network)}, labelled)
    distance = found[""].distance
    if distance.embedding:
        same = distance.embedding["same_neighbour"]
        cosines = {name: distance.embedding[name] for name in ("cosine", "least_cosine")}
        return {"score": same, "agreement": same, **cosines}
    (score,) = distance.metrics.values()
    return {"score": score, "kl": distance.kl, "agreement": distance.agreement}


_FITTED_AT_ONCE = _JUDGED_AT_ONCE = 16
_CALIBRATED_ON = 64
_TIMED_AT_ONCE = 8
_STEADY_ROUNDS = 20


@dataclass(frozen=True)
class RealSettings:
    """How much is fitted on and judged on.

    Args:
        samples: sequences of the conversions; as many as there are where there are fewer.
        efforts: of the conversions on the most samples; with fewer, only the first is made.
        width_budget: of the efforts above "refit".
        evaluation_samples: what is judged on, other samples than those; as many as there are where there are fewer.
        onnx: also judge and time the original and the last conversion of each width in onnxruntime, in float32 and
            int8.
        seed: of the draws and the steps.
    """

    samples: tuple[int, ...] = (64, 256, 1024)
    efforts: tuple[str, ...] = ("refit",)
    width_budget: float = 1.0
    evaluation_samples: int = 400
    onnx: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """One network from elsewhere, and the samples it is fitted on and judged on, each in a seeded order."""

    network: RealNetwork
    settings: RealSettings
    model: PreTrainedModel
    tokenizer: Any
    fitted: list[Inputs]
    evaluation: list[Inputs]
    origin: Origin

    @cached_property
    def pad(self) -> int:
        """The token that fills up sequences; 0 where there are none."""
        return getattr(self.tokenizer, "pad_token_id", None) or 0

    @cached_property
    def judged(self) -> list[Inputs]:
        """The samples to judge on in batches; the logits of several texts would fill the memory."""
        at_once = 1 if self.network.task == "text" else _JUDGED_AT_ONCE
        return in_batches(self.evaluation, self.pad, at_once)

    def row(self, method: str, changed: nn.Module | None, **values: Any) -> Row:
        """A row of REAL_COLUMNS; judged where there is a network."""
        asked = {"model": self.network.name, "method": method, "metric": METRICS[self.network.task]}
        scores: Row = {}
        if changed is not None:
            # An embedding is the mean of the last states; the pooler, which was trained for pairs, is not read.
            outputs = ["last_hidden_state"] if self.network.task == "embedding" else None
            scores = {**judge(self.model, changed, self.judged, outputs), "judged": len(self.evaluation)}
        return dict.fromkeys(REAL_COLUMNS) | asked | {"precision": "float32"} | scores | values


def load_measured(
    network: RealNetwork, settings: RealSettings, data_dir: str | None, packages: Path | None
) -> Measured:
    """A network with the samples that it is fitted on and judged on."""
    # What would stop the last rows is refused before hours of conversions.
    for package in ("onnx", "onnxscript", "onnxruntime") if settings.onnx else ():
        require(package, "onnx")
    model, tokenizer = load_network(network, packages)
    corpus, wanted = network.corpus, {network.corpus.fit_split, network.corpus.eval_split}
    found = corpus.load(data_dir)
    most, judged_on = max(settings.samples), settings.evaluation_samples
    fitted = read_samples(network, found.splits[corpus.fit_split], tokenizer, most + judged_on, settings.seed)
    if len(wanted) == 1:
        judged_on = min(judged_on, len(fitted) // 2)
        fitted, judged = fitted[judged_on:], fitted[:judged_on]
    else:
        fitted = fitted[:most]
        judged = read_samples(network, found.splits[corpus.eval_split], tokenizer, judged_on, settings.seed)
    return Measured(network, settings, model, tokenizer, fitted, judged, found.origin)


def measure_real(measured: Measured) -> list[Row]:
    """A row of the original, one of the plain swap, one per conversion, then those in onnxruntime."""
    settings, model = measured.settings, measured.model
    swapped = copy.deepcopy(model)
    substitute_relu(swapped, kinds=SMOOTH_KINDS)
    rows, networks = [measured.row("original", model), measured.row("direct", swapped)], {None: (0, model)}
    for row, converted in _conversions(measured):
        if converted is not None:
            networks[row["width"]] = len(rows), converted
        rows.append(row)
    if settings.onnx:
        rows = _in_onnxruntime(measured, rows, networks)
    return rows


def _conversions(measured: Measured) -> Iterator[tuple[Row, nn.Module | None]]:
    settings = measured.settings
    counts = sorted({min(count, len(measured.fitted)) for count in settings.samples})
    asked = [(count, settings.efforts[0]) for count in counts[:-1]]
    for count, effort in [*asked, *((counts[-1], effort) for effort in settings.efforts)]:
        data = in_batches(measured.fitted[:count], measured.pad, _FITTED_AT_ONCE, labelled=False)
        began = time.perf_counter()
        told = {"fitted_on": count, "effort": effort}
        wider = {} if effort == "refit" else {"width": settings.width_budget}
        try:
            converted, report = convert_to_relu(measured.model, data, effort=effort, **wider)
        except (ConversionRefusedError, ValueError) as refusal:  # a result of its own
            yield measured.row("converted", None, **told, refusal=str(refusal)), None
            continue
        told |= {
            "kept": kept_rung(report),
            "width": report.width_share,
            "rows": report.rows,
            "seconds": round(time.perf_counter() - began, 1),
        }
        yield measured.row("converted", converted, **told), converted


class _Session(nn.Module):
    """A file in onnxruntime, with the outputs of the network that it was made of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._onnx = OnnxModel(path)

    def forward(self, **inputs: Any) -> Inputs:
        """The outputs by name; an input that the graph does not have is left out."""
        given = {name: tensor for name, tensor in inputs.items() if name in self._onnx.input_names}
        found = self._onnx(given)
        return dict(zip(self._onnx.output_names, map(torch.from_numpy, found), strict=True))


def _call_ms(sessions: Sequence[_Session], batch: Inputs) -> list[float]:
    """Least processor time of a call of each, in turns until all are steady."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    least, steady = [math.inf] * len(sessions), 0
    while steady < _STEADY_ROUNDS:
        times = []
        for session in sessions:
            began = time.process_time()
            session(**inputs)
            times.append(1e3 * (time.process_time() - began))
        is_steady = all(new > 0.99 * old for new, old in zip(times, least, strict=True))
        steady = steady + 1 if is_steady else 0
        least = list(map(min, times, least))
    return [round(ms, 3) for ms in least]


def _in_onnxruntime(
    measured: Measured, rows: list[Row], networks: Mapping[float | None, tuple[int, nn.Module]]
) -> list[Row]:
    """The rows with the latency of these networks, {width: (its row, network)}, and their int8 rows behind."""
    pad, fitted = measured.pad, measured.fitted
    calibration = in_batches(fitted[:_CALIBRATED_ON], pad, _TIMED_AT_ONCE, labelled=False)
    rows, sessions = list(rows), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, network in networks.values():
            file, quantized = Path(folder, f"{number}.onnx"), Path(folder, f"{number}-int8.onnx")
            told = {name: rows[number][name] for name in ("method", "effort", "kept", "width", "fitted_on", "rows")}
            try:
                export_onnx(network, file, calibration[0])
                sessions[number] = _Session(file)
                quantize_onnx(file, quantized, calibration, operations="layers")
            except (ValueError, RuntimeError, OSError) as refusal:
                rows.append(measured.row(changed=None, **told, precision="int8", refusal=str(refusal)))
                continue
            sessions[len(rows)] = session = _Session(quantized)
            rows.append(measured.row(changed=session, **told, precision="int8"))
        times = _call_ms(list(sessions.values()), joined(fitted[:_TIMED_AT_ONCE], pad))
    timed = dict(zip(sessions, times, strict=True))
    return [{**row, "call_ms": timed.get(number)} for number, row in enumerate(rows)]


def record_real(
    network: RealNetwork,
    settings: RealSettings,
    output_dir: str | Path,
    *,
    data_dir: str | None = None,
    packages: Path | None = None,
) -> MeasurementRecord:
    """Measure, and write the record to `output_dir`/<name>/real-seed<seed>.json; one that is there is returned.

    Raises ValueError that names the settings in which the one that is there differs.
    """
    path, began = measurement_path(output_dir, network.name, "real", settings.seed), time.perf_counter()
    if path.exists():
        return read_same(path, settings)
    measured = load_measured(network, settings, data_dir, packages)
    rows = measure_real(measured)
    told = {"run": network.source, "licence": network.licence, "metric": rows[0]["metric"], "score": rows[0]["score"]}
    record = MeasurementRecord(
        measurement="real",
        benchmark=network.name,
        seed=settings.seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - began, 3),
        settings=plain_settings(settings),
        models={network.name: told},
        rows=tuple(rows),
        versions=software_versions(),
        hardware=hardware(1),
        data={
            "train_samples": len(measured.fitted),
            "eval_samples": len(measured.evaluation),
            "eval_split": network.corpus.eval_split,
            "classes": measured.model.config.num_labels if rows[0]["metric"] == "accuracy" else None,
            **asdict(measured.origin),
        },
    )
    write_measurement(record, output_dir)
    return record
