"""The study of gates on the digits, cut short: its smooth network converted."""

import pytest
import torch
from lgelu_lab.benchmarks.table import BENCHMARKS
from lgelu_lab.measurements.gates import GATE_COLUMNS, GATE_OPTIONS, measure_gates
from lgelu_lab.measurements.networks import find_models, load_data
from lgelu_lab.studies.experiments import STUDIES
from lgelu_lab.studies.study import run_study

import hf_lgelu

DIGITS = BENCHMARKS["mlp-digits"]
pytestmark = pytest.mark.slow  # the study itself, cut short
SHORT = {"num_train_epochs": 2, "max_eval_samples": 100, "per_device_train_batch_size": 32, "switch_fraction": 0.5}


def test_the_converted_network_is_scored_and_compared_as_by_hand(tmp_path):
    assert run_study(STUDIES["gates"].build(["mlp-digits"], [1])[:1], tmp_path, overrides=SHORT) == []
    smooth = find_models(tmp_path, "mlp-digits", 1, ("smooth",))
    data, original = load_data(smooth["smooth"].record), smooth["smooth"].load()
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1))[:256]
    converted, _ = hf_lgelu.convert_to_relu(original, {"features": data.train.features[order]})
    (row,) = measure_gates(smooth, DIGITS, data, GATE_OPTIONS.settings(rows=256))
    assert row.keys() == GATE_COLUMNS.keys()
    with torch.no_grad():
        before, after = (model(features=data.eval.features).logits for model in (original, converted))
    assert row["refusal"] is None
    assert row["score"] == pytest.approx((after.argmax(-1) == data.eval.labels).double().mean().item(), abs=1e-9)
    assert row["max_logit_change"] == pytest.approx((before - after).abs().max().item(), rel=1e-4)
