"""The verdict on an int8 file, against numpy on the files that it is about, and a network whose int8 must lose."""

import json
import math

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from hf_lgelu import export_int8, export_onnx, quantize_onnx
from hf_lgelu.export.comparison import lost as lost_in_int8

ROWS = torch.randn(200, 5, generator=torch.Generator().manual_seed(1))
JUDGED = [number for number in range(200) if number % 4]  # every fourth gives ranges


class Embedder(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, rows):
        return {"sentence_embedding": self.layers(rows)}


def network(gate):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), gate, nn.Linear(16, 3))


def with_outliers(layers):
    """The same function: half of the channels are 3,000 times as large, and are read by weights as much smaller."""
    with torch.no_grad():
        for part in (layers[0].weight, layers[0].bias):
            part[::2] *= 3000
        layers[2].weight[:, ::2] /= 3000
    return layers


def outputs(path, rows):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: rows.numpy()})[0].astype(np.float64)


def files_of(model, folder):
    """The float and the int8 file that the same rows give."""
    folder.mkdir()
    export_onnx(model, folder / "float.onnx", ROWS[:8])
    quantize_onnx(folder / "float.onnx", folder / "int8.onnx", ROWS[::4])
    return folder / "float.onnx", folder / "int8.onnx"


def nearest(vectors):
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    return cosines.argmax(1)


@pytest.mark.parametrize(
    "kind", ["labels", "embeddings", "values", pytest.param("predictions", marks=pytest.mark.slow)]
)
def test_the_verdict_is_what_numpy_finds_on_the_files(kind, tmp_path):
    original, model = network(nn.GELU()), network(nn.ReLU())
    data, measure = ROWS, "share of predictions that differ"
    if kind == "labels":  # which decide nothing
        data = [(ROWS, torch.arange(200) % 3)]
    elif kind == "embeddings":
        original, model, measure = Embedder(original), Embedder(model), "share of nearest neighbours that differ"
    elif kind == "values":
        original, model = (nn.Sequential(part, nn.Linear(3, 1)) for part in (original, model))
        measure = "relative error (share of squares)"
    report = export_int8(model, tmp_path / "out", data, original=original, allow_worse=True)
    assert report.measure == measure
    of_model = [outputs(tmp_path / "out" / name, ROWS[JUDGED]) for name in ("model.onnx", "model-int8.onnx")]
    of_original = [outputs(path, ROWS[JUDGED]) for path in files_of(original, tmp_path / "original")]

    def lost(float32, int8):
        if kind == "values":
            return np.square(int8 - float32).sum() / np.square(float32 - float32.mean(0)).sum(), None
        found = nearest if kind == "embeddings" else lambda scores: scores.argmax(1)
        kept = (found(float32) == found(int8)).mean()
        return 1 - kept, kept

    allowed, share = lost(*of_original)
    margin = 0.01 if kind == "values" else max(math.sqrt(share * (1 - share) / 150), 1 / 150)
    assert report.loss == pytest.approx(lost(*of_model)[0], rel=1e-3, abs=1e-9)
    assert report.allowed == pytest.approx(allowed + margin, rel=1e-3)
    assert report.is_good == (report.loss <= report.allowed)
    assert [lost_in_int8(row.from_float32)[1] for row in report.rows[2:]] == pytest.approx(
        [lost(*of_original)[0], report.loss], rel=1e-3, abs=1e-9
    )
    assert f" {report.loss:.3g} " in str(report).splitlines()[4]  # of the table that compare_networks gives too
    saved = json.loads((tmp_path / "out" / "int8.json").read_text())
    assert (saved["verdict"], saved["is_good"], saved["loss"]) == (report.line, report.is_good, report.loss)
    assert str(report).splitlines()[-1] == report.line
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["int8.json", "model-int8.onnx", "model.onnx"]


@pytest.mark.parametrize("has_original", [True, False])
def test_outliers_that_int8_cannot_hold_are_refused_and_kept_only_where_asked(has_original, tmp_path):
    model = with_outliers(network(nn.ReLU()))
    original = network(nn.ReLU()) if has_original else None
    torch.testing.assert_close(model(ROWS), network(nn.ReLU())(ROWS), rtol=1e-3, atol=1e-4)  # in float the same
    measure = "share of predictions that differ" if has_original else r"relative error \(share of squares\)"
    what = rf"int8: worse; {measure} .* Nothing is kept\. .*`operations` layers.*`allow_worse`"
    with pytest.raises(RuntimeError, match=what) as raised:
        export_int8(model, tmp_path / "out", ROWS, original=original)
    assert ("(`original`)" in str(raised.value)) != has_original
    assert list(tmp_path.iterdir()) == []
    report = export_int8(model, tmp_path / "out", ROWS, original=original, allow_worse=True)
    exact, found = (outputs(tmp_path / "out" / name, ROWS[JUDGED]) for name in ("model.onnx", "model-int8.onnx"))
    error = np.square(found - exact).sum() / np.square(exact - exact.mean(0)).sum()
    if has_original:
        assert report.loss > report.allowed
    else:
        assert report.loss == pytest.approx(error, rel=1e-3)
        assert error > 0.25
    assert not report.is_good


def test_one_network_alone_is_judged_by_its_distance_from_float32(tmp_path):
    report = export_int8(network(nn.ReLU()), tmp_path / "out", ROWS)
    assert report.allowed == 0.25
    assert report.is_good
    assert [(row.network, row.precision) for row in report.rows] == [
        ("network", "float32"), ("network", "int8"),
    ]  # fmt: skip
    assert report.line == f"int8: good; relative error (share of squares) {report.loss:.3g}, allowed 0.25"


def test_each_of_repeated_rows_counts_once(tmp_path):
    report = export_int8(network(nn.ReLU()), tmp_path / "out", ROWS[:12].repeat(9, 1))
    assert (report.samples, report.calibration_samples) == (9, 3)
    with pytest.raises(ValueError, match="two or more"):
        export_int8(network(nn.ReLU()), tmp_path / "one", ROWS[:1].repeat(9, 1))


def test_int8_is_judged_by_the_output_that_it_changes_most(tmp_path):
    """int8 changes values whose weights differ by 1e5 within a row, and no class."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.values = network(nn.ReLU()), with_outliers(network(nn.ReLU()))

        def forward(self, rows):
            return {"logits": self.body(rows), "values": self.values(rows)}

    with pytest.raises(RuntimeError, match="int8: worse"):
        export_int8(Two(), tmp_path / "out", ROWS)
    report = export_int8(Two(), tmp_path / "out", ROWS, outputs=["logits"])
    assert report.is_good
    assert "Not compared: `values`." in str(report)


def test_a_detectors_raw_map_is_judged_as_scores_and_boxes(tmp_path):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1))
    pictures = torch.randn(16, 3, 8, 8)
    report = export_int8(head, tmp_path / "out", pictures, original=head, box_channels=4)
    assert report.measure == "distance of scores and boxes"
    assert report.line.startswith("int8: good; distance of scores and boxes ")
