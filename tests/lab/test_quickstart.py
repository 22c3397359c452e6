"""The quickstart: both roads, every cell filled, the table's accuracies counted anew, and λ that learns."""

from pathlib import Path

import pytest
import quickstart
import torch
from lgelu_lab.benchmarks.data import DataOptions
from lgelu_lab.benchmarks.digits import load_digits
from lgelu_lab.studies.records import read_record

from hf_lgelu.models.checkpoint import load_checkpoint


@pytest.mark.slow
def test_the_quickstart_fills_its_table(tmp_path, capsys):
    rows = {row["network"]: row for row in quickstart.quickstart(tmp_path, epochs=120)}
    assert list(rows) == list(quickstart._FOLDERS)
    assert all(cell.strip("–- ") for row in rows.values() for cell in row.values())
    rows_held_out = load_digits(DataOptions()).eval
    for way, folder in quickstart._FOLDERS.items():
        model = load_checkpoint(tmp_path / folder)
        assert {type(module).__name__ for module in model.modules()} & {"ReLU", "LambdaGELU"} or way == "GELU"
        with torch.no_grad():
            right = model(rows_held_out.features).logits.argmax(-1) == rows_held_out.labels
        assert float(rows[way]["accuracy"]) == pytest.approx(right.double().mean().item(), abs=0.05)  # of five in six
        assert float(rows[way]["plain torch"]) < 1e-4
    assert Path(tmp_path, "hardened", "hardness.png").stat().st_size > 10_000
    learned = read_record(tmp_path / "hardened").epochs[29].hardness.values()  # hardening begins after it
    assert min(learned) > 1.5
    assert max(learned) > 2 * min(learned)
    said = capsys.readouterr().out
    assert said.startswith("[  0 s] Five small networks on 1,797 handwritten digits: about two minutes")
    assert "What to try next" in said
