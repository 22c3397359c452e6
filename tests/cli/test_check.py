"""hf-lgelu check and profile: what they say, and that check writes nothing."""

import re

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_lgelu import replace_activations
from hf_lgelu.export.hub.card import write_card
from hf_lgelu.models.checkpoint import load_checkpoint
from hf_lgelu.models.hardening import hardness_profile
from hf_lgelu.models.mlp import MLPConfig, MLPForClassification

SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_hardened_checkpoint_with_data(place, test_rows, call):
    before = files(place)
    status, said, errors = call("check", place / "hard", "--evaluation", place / "test.csv", "--disable_tqdm")
    assert (status, errors) == (0, "")
    features, labels = test_rows
    accuracy = (load_checkpoint(place / "hard")(features).logits.argmax(-1) == labels).double().mean().item()
    assert "MLPForClassification, λ-GELU × 2" in said
    assert "layers.0.activation (LambdaGELU): erf × 1" in said
    assert "The smallest λ of 2 gates is 159.6: ReLU changes a unit by at most κ/λ = 0.00107" in said
    assert re.search(rf"\n  original +0 +100 % +{accuracy:.4f}\n", said)
    assert "2 of 2 gates can be converted, with 2 linear maps after them" in said
    assert "only where hf_lgelu is installed" in said
    assert f"hf-lgelu export {place / 'hard'} --output_dir" in said
    assert files(place) == before


def test_a_gelu_checkpoint_is_sent_to_convert(place, call):
    status, said, _ = call("check", place / "gelu", "--disable_tqdm")
    assert status == 0
    assert "No. On the path of these inputs it computes smoothly" in said
    assert "give real ones by --evaluation DATA" in said
    assert f"hf-lgelu convert {place / 'gelu'} --data DATA" in said
    assert "hf_lgelu is installed" not in said


def test_a_relu_network_has_nothing_to_do(tmp_path, call):
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8, activation_function="relu")
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    status, said, _ = call("check", tmp_path / "gpt2", "--disable_tqdm")
    assert status == 0
    assert "Yes: no smooth activation was seen" in said
    assert "Nothing: it has no gate" in said
    assert "With ReLU in its config: llama.cpp ignores the activation that the config of a gpt2 names" in said


def test_what_cannot_be_refitted_is_named(tmp_path, call):
    """A tied map behind the gate, and a smooth pooler that is no gate."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **SIZES))
    model.save_pretrained(tmp_path / "bert")
    _, said, _ = call("check", tmp_path / "bert", "--disable_tqdm")
    assert "bert.pooler.activation (Tanh): tanh × 1" in said  # the classifier reads it
    assert "--width 1.25 adds a quarter to each block, and takes about three times as long" in said
    assert "llama.cpp" not in said  # it runs no classifier
    assert "1 of 1 gates can be" in said
    masked = BertForMaskedLM(BertConfig(vocab_size=20, **SIZES))
    masked.save_pretrained(tmp_path / "masked")
    _, said, _ = call("check", tmp_path / "masked", "--disable_tqdm")
    assert "1 of 2 gates can be" in said
    assert "bert.embeddings.word_embeddings.weight is tied: several modules hold it" in said
    assert "These gates are exchanged too, but the weights after them stay as they are." in said
    assert "hf-lgelu convert" in said


def test_what_the_output_never_uses_is_not_counted(sentence_folder, call):
    """The encoder of a sentence encoder has a pooler, with tanh, and its embedding is of another pooling."""
    model, texts = sentence_folder
    words = ("--evaluation", texts, "--max_eval_samples", 8, "--disable_tqdm")
    _, said, _ = call("check", model, *words)
    assert "Not counted, because no output that counts depends on it: encoder.pooler.activation." in said
    assert "Tanh" not in said
    assert "would stay smooth" not in said
    assert "These gates cost most when each is swapped alone" in said
    assert "--keep" not in said  # which sentence-transformers could not load
    assert "intermediate_act_fn (GELUActivation): gelu" in said


def test_what_is_not_read_from_files_is_sent_to_the_function(tmp_path, call):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    T5ForConditionalGeneration(
        T5Config(**sizes, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    ).save_pretrained(tmp_path / "t5")
    status, said, _ = call("check", tmp_path / "t5", "--disable_tqdm")
    assert status == 0
    assert "2 of 2 gates can be" in said
    assert "It gives logits, encoder_last_hidden_state: networks are compared by logits, and logits count." in said
    assert (
        "Call hf_lgelu.convert_to_relu(model, data) in Python: this command reads no inputs for encoder-decoders"
        in said
    )


def test_a_network_that_gives_nan_is_told_as_such(place, tmp_path, call):
    model = load_checkpoint(place / "gelu")
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))
    model.save_pretrained(tmp_path / "nan")
    status, _, errors = call("check", tmp_path / "nan", "--evaluation", place / "test.csv", "--disable_tqdm")
    assert status == 1
    assert "gives NaN on test.csv: look for NaN in its weights" in errors


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
    """{gate: the most that ReLU in its place changes a unit}, tried out on a fine grid, as many columns as units."""
    x = torch.linspace(-8, 8, 40_001)[:, None].expand(-1, 4)
    gates = {name: module for name, module in model.named_modules() if hasattr(module, "hardness")}
    with torch.no_grad():
        return {name: (gate(x) - x.relu()).abs().max().item() for name, gate in gates.items()}


def with_several_hardnesses(folder):
    """Two gates with a λ for each of four channels: 1, 400, 400, 400, and 100 four times."""
    torch.manual_seed(0)
    model = MLPForClassification(MLPConfig(num_features=4, hidden_size=4, num_hidden_layers=2, hidden_act="gelu"))
    replace_activations(model, granularity="channel", inputs=torch.randn(2, 4))
    for layer, values in zip(model.layers, ([1.0, 400.0, 400.0, 400.0], [100.0] * 4), strict=True):
        layer.activation.hardness_override.copy_(torch.tensor(values))
    model.save_pretrained(folder)
    return load_checkpoint(folder)


def test_of_several_hardnesses_the_smallest_is_told_with_its_bound(tmp_path, call):
    soft, hard = largest_swap_errors(with_several_hardnesses(tmp_path / "soft")).values()
    assert (soft, hard) == (pytest.approx(0.16997, abs=1e-5), pytest.approx(0.0016997, abs=1e-6))
    _, said, _ = call("profile", tmp_path / "soft")
    title, *lines = said.splitlines()[:3]
    assert title.split() == ["gate", "mean", "λ", "smallest", "λ", "κ/λ"]
    assert [line.split()[1:4] for line in lines] == [["300.2", "1", "0.17"], ["100", "100", "0.0017"]]
    write_card(load_checkpoint(tmp_path / "soft"), tmp_path / "soft")
    words = ("export", tmp_path / "soft", "--output_dir", tmp_path / "relu", "--allow_soft", "--disable_tqdm")
    assert "softest gate layers.0.activation: λ = 1, at most 0.17 a unit" in call(*words)[1]
    for folder in ("soft", "relu"):
        text = (tmp_path / folder / "README.md").read_text()
        assert "ended at λ from 1 to 100 (the smallest λ of each gate)" in text
        assert f"| `layers.0.activation` | 300.2 | 1 | {soft:.2g} |" in text
        assert f"| `layers.1.activation` | 100 | 100 | {hard:.2g} |" in text


def test_the_dearest_gates_are_said(place, call):
    rows = place / "rows.csv"
    status, said, _ = call("check", place / "gelu", "--evaluation", rows, "--disable_tqdm")
    assert status == 0
    (line,) = [line for line in said.splitlines() if "These gates cost most when each is swapped alone" in line]
    assert line.endswith("--keep 1 leaves 1 smooth.")  # of two gates; the third of --keep 3 is not there
    assert "layers.0.activation" in line
    assert "layers.1.activation" in line
