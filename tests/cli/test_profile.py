"""hf-lgelu profile: a line a gate."""

import json

import pytest
import torch
from matplotlib.axes import Axes

from hf_lgelu.export.card import write_card
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.hardening import hardness_profile
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification


def test_the_profile_is_a_line_a_gate(place, call):
    status, said, _ = call("profile", place / "soft")
    assert status == 0
    for gate, value in hardness_profile(load_checkpoint(place / "soft")).items():
        (line,) = [line for line in said.splitlines() if line.startswith(f"{gate} ")]
        assert float(line.split()[1]) == pytest.approx(value, rel=1e-3)
        assert float(line.split()[2]) == pytest.approx(0.16997 / value, rel=0.06)  # two digits
    assert "hardened: no" in said
    status, _, errors = call("profile", place / "gelu")
    assert status == 1
    assert "has no λ-GELU" in errors


def largest_swap_errors(model):
    """{gate: the most that ReLU in its place changes a unit}, tried out on a fine grid."""
    x = torch.linspace(-8, 8, 40_001)
    gates = {name: module for name, module in model.named_modules() if hasattr(module, "hardness")}
    with torch.no_grad():
        return {name: (gate(x) - x.relu()).abs().max().item() for name, gate in gates.items()}


def test_each_hardness_is_told_with_its_bound(tmp_path, call):
    soft, hard = largest_swap_errors(of_two_hardnesses(tmp_path / "soft")).values()
    assert (soft, hard) == (pytest.approx(0.27846, abs=1e-5), pytest.approx(0.0027846, abs=1e-6))
    _, said, _ = call("profile", tmp_path / "soft")
    title, *lines = said.splitlines()[:3]
    assert title.split() == ["gate", "λ", "κ/λ", "learned", "λ"]
    assert [line.split()[1:3] for line in lines] == [["1", "0.28"], ["100", "0.0028"]]
    write_card(load_checkpoint(tmp_path / "soft"), tmp_path / "soft")
    words = ("export", tmp_path / "soft", "--output_dir", tmp_path / "relu", "--allow_soft", "--disable_tqdm")
    assert "softest gate layers.0.activation: λ = 1, at most 0.278 a unit" in call(*words)[1]
    for folder in ("soft", "relu"):
        text = (tmp_path / folder / "README.md").read_text()
        assert "ended at λ from 1 to 100" in text
        assert f"| `layers.0.activation` | 1.0500 | 1 | {soft:.2g} |" in text  # as learned, now
        assert f"| `layers.1.activation` | 1.0500 | 100 | {hard:.2g} |" in text


def test_a_plot_is_a_picture_of_every_gate_over_the_epochs(tmp_path, call, monkeypatch):
    of_two_hardnesses(tmp_path / "run")
    rows = [
        {"epoch": epoch, **{f"hardness/layers.{i}.activation": 1.0 + i * epoch for i in (0, 1)}} for epoch in (1, 2)
    ]
    history = [{"loss": 0.5, "epoch": 1}, *({**row, "hardness/mean": 1.5} for row in rows)]
    for rows_of_history, words in ((history[:1], "has λ of no epoch"), (history, "")):
        state = {"epoch": 3, "log_history": rows_of_history}
        (tmp_path / "run" / "trainer_state.json").write_text(json.dumps(state))
        assert words in call("profile", tmp_path / "run", "--plot", tmp_path / "other.png")[2]
    assert "a checkpoint of Trainer, as runs/" in call("profile", tmp_path, "--plot", tmp_path / "hardness.png")[2]
    drawn, plot = {}, Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda *given, **more: (drawn.update({more["label"]: given[1:]}), plot(*given, **more))[1]
    )
    status, said, errors = call("profile", tmp_path / "run", "--plot", tmp_path / "new" / "hardness.png")
    assert status == 0, errors
    assert f"λ over the epochs: {tmp_path / 'new' / 'hardness.png'}" in said
    assert (tmp_path / "new" / "hardness.png").read_bytes().startswith(b"\x89PNG")
    # The last point is λ in the checkpoint: Trainer writes the history before the last epoch is in it.
    soft, hard = drawn["layers.0.activation"], drawn["layers.1.activation"]
    assert soft == ([1, 2, 3], pytest.approx([1.0, 1.0, 1.0], rel=1e-5))
    assert hard == ([1, 2, 3], pytest.approx([2.0, 3.0, 100.0], rel=1e-5))


def of_two_hardnesses(folder):
    """Two gates of λ-SiLU, at λ = 1 and 100."""
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, num_hidden_layers=2, hidden_act="lambda_silu"))
    for layer, value in zip(model.layers, (1.0, 100.0), strict=True):
        layer.activation.hardness_override.fill_(value)
    model.save_pretrained(folder)
    return load_checkpoint(folder)
