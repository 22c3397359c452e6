"""A detector without training: the small SiLU one of drawn boxes, trained, converted at each effort, in float and int8.

Average precision is that on other pictures, against what is drawn and against what the original finds there.
"""

import copy
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_lgelu import convert_to_relu, export_onnx, quantize_onnx, substitute_relu
from hf_lgelu.environment import hardware, package_versions
from hf_lgelu.export.onnx.onnx_run import OnnxModel
from hf_lgelu.models.sites import SMOOTH_KINDS
from lgelu_lab.benchmarks.detector import Counted, Detector, decode, train_detector
from lgelu_lab.benchmarks.drawn_boxes import Boxes, average_precision, draw_pictures
from lgelu_lab.measurements.int8 import FLOAT32, PRECISIONS

CONVERSIONS: dict[str, dict[str, Any]] = {
    "refit": {"effort": "refit"},
    "place": {"effort": "place"},
    "distill": {"effort": "distill"},
    "distill 5400": {"effort": "distill", "distill_steps": 5400},
}
"""What they are called, and options of `convert_to_relu`."""

COLUMNS = (
    *("method", "precision", "ap", "ap50", "ap_of_original", "ap50_of_original", "distance", "seconds"),
    *("seed", "pictures", "judged", "cpu", "torch", "transformers"),
)
"""Of a row: average precisions, the relative error on pictures held out, seconds of one processor."""
KEY = ("method", "precision", "seed")
"""Of these, what says which row was asked for."""

PICTURES, JUDGED = 1024, 500
_FOUND_FROM = 0.3  # score from which the original's boxes count as found
_CALIBRATED_ON = 256
_AT_ONCE = 100


def measure_detector(
    seed: int,
    model: Detector | None = None,
    pictures: int = PICTURES,
    there: Collection[tuple[str, str]] = (),
) -> Iterator[dict[str, Any]]:
    """A row per network and precision, but those (method, precision) that are `there`; nothing is made for them.

    `model` is the one trained with this seed, where it is there already.
    """
    missing = {method: [p for p in PRECISIONS if (method, p) not in there] for method in methods()}
    if not any(missing.values()):
        return
    model = train_detector(seed) if model is None else model
    # Of the training pictures, without their boxes; judged on others.
    data, _ = draw_pictures(pictures, seed)
    judge = _Judge(model, seed)
    facts = {"seed": seed, "pictures": pictures, "judged": JUDGED, "cpu": hardware(1)["cpu"]}
    facts |= {name: package_versions()[name] for name in ("torch", "transformers")}
    for method, network, told in _networks(model, data, [method for method in missing if missing[method]]):
        for precision in missing[method]:
            yield {"method": method, "precision": precision, **judge(network, precision, data), **told, **facts}


def methods() -> tuple[str, ...]:
    """What the networks are called that are judged."""
    return ("original", "direct swap", *CONVERSIONS)


def _networks(model: Detector, data: Tensor, wanted: Sequence[str]) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """(method, network, {"distance": relative error on pictures held out, "seconds": of one processor})."""
    for method in wanted:
        if method in CONVERSIONS:
            began = time.process_time()
            converted, report = convert_to_relu(Counted(model), data, max_kl=None, **CONVERSIONS[method])
            seconds = round(time.process_time() - began, 1)
            yield method, converted.detector, {"distance": report.held_out.refitted.distance, "seconds": seconds}
            continue
        network = copy.deepcopy(model)
        if method == "direct swap":
            substitute_relu(network, kinds=SMOOTH_KINDS)
        yield method, network, {"distance": None, "seconds": None}


class _Judge:
    """Average precision of networks on pictures that none was trained or fitted on."""

    def __init__(self, original: Detector, seed: int) -> None:
        self._pictures, self._drawn = draw_pictures(JUDGED, 10_000 + seed)
        found = decode(_run(original, self._pictures))
        self._found = [
            Boxes(*(part[boxes.scores >= _FOUND_FROM] for part in (boxes.corners, boxes.classes, boxes.scores)))
            for boxes in found
        ]

    def __call__(self, network: nn.Module, precision: str, data: Tensor) -> dict[str, float]:
        maps = (
            _run(network, self._pictures)
            if precision == FLOAT32
            else _run_int8(network, precision, self._pictures, data)
        )
        found = decode(maps)
        own = {f"{name}_of_original": value for name, value in average_precision(found, self._found).items()}
        return {name: round(value, 4) for name, value in {**average_precision(found, self._drawn), **own}.items()}


@torch.no_grad()
def _run(network: nn.Module, pictures: Tensor) -> Sequence[Tensor]:
    return [torch.cat(parts) for parts in zip(*map(network, pictures.split(_AT_ONCE)), strict=True)]


def _run_int8(network: nn.Module, precision: str, pictures: Tensor, data: Tensor) -> Sequence[Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        path, int8 = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        export_onnx(network, path, data[:4])
        rows, operations = list(data[:_CALIBRATED_ON].split(64)), precision.removeprefix("int8-")
        quantize_onnx(path, int8, rows, operations=operations, max_relative_error=10.0)
        session = OnnxModel(int8)
        (name,) = session.input_names
        outputs = [session({name: part.numpy()}) for part in pictures.split(_AT_ONCE)]
    return [torch.cat([torch.from_numpy(one) for one in parts]) for parts in zip(*outputs, strict=True)]
